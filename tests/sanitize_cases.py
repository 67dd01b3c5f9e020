"""A few tiny products, and attention, on each path, for compute-sanitizer: `python -m tests.sanitize_cases [NAME...]`.

They are small, as a sanitizer slows every access down, and ragged, as it is at edges that accesses go wrong. Results
are compared too: a kernel that does nothing has no memory errors.
"""

import sys
from collections.abc import Callable

import torch

import cute_kernels
from attention import attention
from bench.gates.products_attention import Attend
from cute_kernels import explain, gemm
from cute_kernels.matmul import candidates
from cute_kernels.matmul.config import GemmConfig
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul

from .cases import banded, empty_rows, mask_to_indices, no_blocks, power_law
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


def only(gene: str, case: Callable[[], None]) -> None:
    """The case with those of the sm_90 candidates that have this of GemmConfig's fields set."""
    find = before = candidates.candidates_sm90
    if gene == "atomic":
        find = candidates.atomic_sm90
    candidates.candidates_sm90 = lambda *args: [c for c in find(*args) if getattr(c, gene) > GemmConfig.__dict__[gene]]
    try:
        case()
    finally:
        candidates.candidates_sm90 = before


def dense(m, n, k, layouts="nn", *, batch=(), dtype=torch.bfloat16, out_dtype=None, m_major=False, full=False, **more):
    a, b = operand(m, k, layouts[0], batch=batch, dtype=dtype), operand(k, n, layouts[1], batch=batch, dtype=dtype, k=k)
    terms = {"bias": normal(n), "activation": "gelu", "residual": normal(*batch, m, n, dtype=dtype)} if full else {}
    exact, by_torch = exact_and_torch(a, b, out_dtype or dtype, **terms)
    out = poisoned(n, m, dtype=by_torch.dtype).t() if m_major else poisoned(*exact.shape, dtype=by_torch.dtype)
    check(gemm, (a, b), out, exact, by_torch, k, terms | more)


def sparse(mask, block, n, *, linear=False, activation=None):
    crow, col = mask_to_indices(mask)
    shape = m, k = mask.shape[0] * block[0], mask.shape[1] * block[1]
    W = BsrMatrix(crow, col, normal(len(col), *block, k=k), shape)
    weight, b = dense_of(crow, col, W.values, shape), normal(*((n, k) if linear else (k, n)))
    terms = {"activation": activation} | ({"bias": normal(m)} if linear else {})
    exact, by_torch = exact_and_torch(*((b, weight.t()) if linear else (weight, b)), torch.bfloat16, **terms)
    op, args = (bsr_linear, (b, W)) if linear else (bsr_matmul, (W, b))
    check(op, args, poisoned(*exact.shape), exact, by_torch, k, terms)


def batch(one_pattern: bool, block=(64, 64)) -> BsrMatrix:
    """Three items, the second empty if each has its own pattern."""
    masks = power_law(4, 3), no_blocks(4, 3), empty_rows(4, 3)
    parts = [mask_to_indices(mask) for mask in (masks[:1] * 3 if one_pattern else masks)]
    shape = 4 * block[0], 3 * block[1]
    items = [BsrMatrix(crow, col, normal(len(col), *block, k=shape[1]), shape) for crow, col in parts]
    if not one_pattern:
        return BsrMatrix.stack(items)
    return BsrMatrix(*parts[0], torch.stack([item.values for item in items]), (3, *shape))


def batched(one_pattern: bool, n: int):
    W = batch(one_pattern)
    b, terms = normal(3, W.shape[2], n), {"bias": normal(3, W.shape[1], 1)}
    exact, by_torch = exact_and_torch(W.to_dense(), b, torch.bfloat16, **terms)
    check(bsr_matmul, (W, b), poisoned(*exact.shape), exact, by_torch, W.shape[2], terms)


def grouped(one_pattern: bool):
    W, groups = batch(one_pattern), torch.tensor([2, 0, 3, 1, -1], dtype=torch.int32)
    x = normal(64 * len(groups), W.shape[2])
    weights = torch.cat([W.to_dense(), torch.zeros_like(W.to_dense()[:1])])[groups.clamp(-1, 3).long()]
    found = exact_and_torch(x.unflatten(0, (len(groups), -1)), weights.mT, torch.bfloat16)
    exact, by_torch = (t.flatten(0, 1) for t in found)
    check(bsr_grouped_linear, (x, W, groups), poisoned(*exact.shape), exact, by_torch, W.shape[2], {})


def attend(*shape, **terms):
    """Attention into NaN on the GPU, with operands drawn on the CPU and compared there."""
    case = Attend(*shape, **terms)
    complaint = case.call().complaint(case.call(str(on_gpu(torch.empty(0)).device)).run().cpu())
    assert not complaint, complaint


def outgrown():
    """Attention whose scores grow from tile to tile, so that some warps of a warpgroup multiply theirs again."""
    from . import test_outgrown

    q, k, v = test_outgrown.operands(128, 40, 500, device="cpu", rows=130, columns=300, heads=1)
    q[..., 16:, :2] = 0
    out = on_gpu(poisoned(*q.shape))
    _, lse = attention(*map(on_gpu, (q, k, v)), scale=1 / 8, return_lse=True, out=out)
    test_outgrown.check(q, k, v, out.cpu(), lse.cpu(), torch.ones(130, 300, dtype=torch.bool))


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
    "bsr linear of few columns": lambda: sparse(power_law(6, 21), (16, 48), 3, linear=True),
    "bsr linear of 16 columns": lambda: sparse(empty_rows(5, 14), (64, 64), 16, linear=True),
    "bsr few columns, row-major": lambda: sparse(power_law(4, 13), (32, 112), 8),
    "bsr batch of one pattern": lambda: batched(True, 136),
    "bsr batch of patterns": lambda: batched(False, 136),
    "bsr grouped, one pattern": lambda: grouped(True),
    "bsr grouped, patterns": lambda: grouped(False),
    "attention": lambda: attend("dense", 1, 2, 2, 300, 177, 128),
    "attention, causal, tiles drawn": lambda: attend("dense", 2, 68, 17, 65, 70, 64, causal=True),
    "attention, a window": lambda: attend("dense", 1, 4, 1, 130, 200, 256, window=(70, 30), lse=False),
    "attention, softcap": lambda: attend("dense", 1, 2, 1, 200, 130, 96, softcap=5.0, causal=True, dtype=FP16),
    "attention, scores that grow": outgrown,
    "attention, packed": lambda: attend("packed", 5, 4, 2, 150, 170, 128, causal=True),
    "attention, packed, tiles drawn": lambda: attend("packed", 9, 32, 8, 100, 90, 64, lse=False),
    "attention, 128x128 blocks": lambda: attend("blocks", 1, 72, 9, 200, 300, 64, block=(128, 128)),
    "attention, 64x64 blocks": lambda: attend("blocks", 1, 72, 9, 200, 170, 128, block=(64, 64), lse=False),
    "attention, 128x64 blocks": lambda: attend("blocks", 1, 2, 1, 200, 170, 256, block=(128, 64)),
    "decoding, K and V split": lambda: attend("dense", 2, 8, 2, 1, 333, 128, splits=3),
    "decoding, a cache": lambda: attend("cache", 3, 6, 2, 3, 200, 256, causal=True, splits=1, lse=False),
    "decoding, pages of 16, split": lambda: attend("cache", 4, 8, 2, 3, 208, 64, causal=True, splits=3, page=16),
    "decoding, pages of 128": lambda: attend("cache", 3, 4, 2, 40, 256, 128, window=(70, 0), splits=2, page=128),
}
HOPPER = {  # kernels that the cost model does not choose for products as small as these
    "dense with K among CTAs": lambda: only("split", lambda: dense(136, 200, 520)),
    "dense, added up in any order": lambda: only("atomic", lambda: dense(136, 200, 520, deterministic=False)),
    "bsr pairs of rows": lambda: only("pairs", lambda: sparse(banded(5, 8), (64, 64), 264)),
    "bsr sweep": lambda: only("sweep", lambda: sparse(power_law(14, 9), (16, 16), 264)),
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
        for name, case in (CASES | (ODD if path == "sm_80" else HOPPER)).items():
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
