"""A few tiny products on each path, for compute-sanitizer: `python -m tests.sanitize_cases [NAME...]`.

They are small, as a sanitizer slows every access down, and ragged, as it is at edges that accesses go wrong. Results
are compared too: a kernel that does nothing has no memory errors.
"""

import sys
from collections.abc import Callable

import torch

import cute_kernels
from cute_kernels import explain, gemm
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul

from .cases import empty_rows, mask_to_indices, power_law
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, operand, poisoned, seed


def check(op, args, out, exact, by_torch, k, terms) -> None:
    """Run an op on tensors copied to the GPU and compare on the CPU, so that few kernels but ours run."""
    args, terms = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in terms.items()}
    out = on_gpu(out)
    plan = explain(op, *args, out=out, **terms)
    op(*args, out=out, **terms)
    assert_as_good_as_torch(out.cpu(), exact, by_torch, k=k, plan=plan)


def on_gpu(x):
    return x.to("cuda") if isinstance(x, (torch.Tensor, BsrMatrix)) else x


def dense(m, n, k, layouts="nn", *, batch=(), dtype=torch.bfloat16, out_dtype=None, m_major=False, full=False):
    a, b = operand(m, k, layouts[0], batch=batch, dtype=dtype), operand(k, n, layouts[1], batch=batch, dtype=dtype, k=k)
    terms = {"bias": normal(n), "activation": "gelu", "residual": normal(*batch, m, n, dtype=dtype)} if full else {}
    exact, by_torch = exact_and_torch(a, b, out_dtype or dtype, **terms)
    out = poisoned(n, m, dtype=by_torch.dtype).t() if m_major else poisoned(*exact.shape, dtype=by_torch.dtype)
    check(gemm, (a, b), out, exact, by_torch, k, terms)


def sparse(mask, block, n, *, linear=False, activation=None):
    crow, col = mask_to_indices(mask)
    shape = m, k = mask.shape[0] * block[0], mask.shape[1] * block[1]
    W = BsrMatrix(crow, col, normal(len(col), *block, k=k), shape)
    weight, b = dense_of(crow, col, W.values, shape), normal(*((n, k) if linear else (k, n)))
    terms = {"activation": activation} | ({"bias": normal(m)} if linear else {})
    exact, by_torch = exact_and_torch(*((b, weight.t()) if linear else (weight, b)), torch.bfloat16, **terms)
    op, args = (bsr_linear, (b, W)) if linear else (bsr_matmul, (W, b))
    check(op, args, poisoned(*exact.shape), exact, by_torch, k, terms)


FP16, FP32 = torch.float16, torch.float32
CASES: dict[str, Callable[[], None]] = {
    "dense ragged": lambda: dense(200, 136, 72),
    "dense nt with terms": lambda: dense(136, 200, 72, "nt", dtype=FP16, full=True),
    "dense tn fp32 m-major": lambda: dense(136, 72, 200, "tn", out_dtype=FP32, m_major=True),
    "dense batch": lambda: dense(40, 72, 136, batch=(3,)),
    "bsr 64x64 with empty rows": lambda: sparse(empty_rows(5, 4), (64, 64), 136),
    "bsr 48x112": lambda: sparse(power_law(4, 3), (48, 112), 136, activation="relu"),
    "bsr linear 128x64": lambda: sparse(power_law(4, 3), (128, 64), 40, linear=True),
    "bsr linear 16x16": lambda: sparse(power_law(6, 5), (16, 16), 40, linear=True),
}
ODD = {
    "dense by element": lambda: dense(67, 45, 33, "tn"),
    "bsr of odd width": lambda: sparse(power_law(4, 3), (32, 48), 37),
}


def paths() -> list[str]:
    """The families of kernels that this GPU runs."""
    return ["sm_80", "sm_90"] if torch.cuda.get_device_capability() == (9, 0) else ["sm_80"]


def main(names: list[str]) -> int:
    if not torch.cuda.is_available():
        print("sanitize_cases: no CUDA GPU; these cases run kernels")
        return 2
    for path in paths():
        for name, case in (CASES | (ODD if path == "sm_80" else {})).items():
            if names and name not in names:
                continue
            seed(name)
            with cute_kernels.path(path):
                case()
            torch.cuda.synchronize()
            print(f"{path} {name}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
