"""The correctness gate: a matrix of products on every path, against fp64.

Every output is full of NaN beforehand. A result passes if

- its largest error and its Frobenius error are at most twice those of torch, which multiplies in fp32 and rounds once
  (fp32 outputs: four times), plus a floor for the tensor core's fp32 sums (tests/reference.py);
- each element by itself is within two roundings of the exact one, plus that floor;
- of fp16 operands of unit variance, one of them over sqrt(K), the absolute error is below 1e-3: with fp32 output
  everywhere, with fp16 output where |exact| < 4. Above 4, one rounding to fp16 alone may cost 2e-3.

Of attention: products_attention.AttendCall.complaint.

Without a GPU the same matrix runs through the ops' CPU reference, which tests the ops' checks and shapes, no kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from ..rows import reason
from .gate import Gate, judged
from .products import BF16, FP16, FP32, OPS, Product
from .products_attention import Attend

NAME = "correctness"
TYPES = ((BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32))
LAYOUTS = ("nn", "nt", "tn")
DENSE_SHAPES = ((256, 384, 512), (200, 136, 72), (1000, 264, 2056))  # whole tiles; ragged; ragged and deep
# Block shape, and how many block rows and columns: matrices of about 512 rows.
BLOCKS = {(128, 128): (5, 4), (64, 64): (9, 8), (32, 32): (16, 12), (16, 16): (24, 20), (512, 112): (3, 5)}
BLOCKS |= {(48, 112): (9, 6)}
DENSE_TERMS = (
    "bias+relu",
    "bias+residual+gelu",
    "row bias+silu",
    "alpha+residual+beta",
    "bias+gelu_tanh",
    "alpha+squared_relu",
)
MATMUL_TERMS = ("bias+gelu", "row bias+relu", "residual+silu", "squared_relu")
LINEAR_TERMS = ("bias", "bias+gelu", "bias+gelu_tanh", "silu")
PATTERNS = ("empty_rows", "uniform", "power_law", "one_full_row", "no_blocks")
QUICK_ATTENTION = 5
ATTENTION = (  # ragged; each is a kernel of its own
    Attend("dense", 2, 8, 2, 200, 333, 128, causal=True),
    Attend("packed", 5, 4, 2, 200, 333, 64, window=(70, 30)),
    Attend("blocks", 2, 4, 2, 300, 430, 64, block=(64, 64)),
    Attend("cache", 4, 8, 2, 3, 512, 128, causal=True, splits=3, page=16),
    Attend("dense", 2, 4, 2, 333, 200, 64, window=(100, None), softcap=5.0, lse=False, dtype=FP16),
    Attend("dense", 1, 2, 2, 1000, 1100, 64),
    Attend("dense", 1, 4, 4, 300, 333, 96, dtype=FP16),
    Attend("dense", 1, 4, 1, 333, 333, 192, 128, causal=True, lse=False),
    Attend("dense", 1, 4, 2, 200, 333, 256, causal=True),
    Attend("packed", 33, 4, 2, 150, 150, 128, causal=True),
    Attend("packed", 3, 4, 4, 300, 200, 96, softcap=20.0, dtype=FP16, lse=False),
    Attend("blocks", 2, 4, 2, 300, 430, 128, block=(128, 128)),
    Attend("blocks", 1, 4, 4, 300, 430, 96, block=(64, 128), causal=True, lse=False),
    Attend("blocks", 2, 2, 2, 200, 300, 256, block=(128, 64), dtype=FP16),
    Attend("cache", 4, 8, 2, 3, 512, 64, window=(200, 2), splits=1, page=64, dtype=FP16),
    Attend("cache", 8, 8, 1, 9, 1000, 256, causal=True, splits=4),
    Attend("dense", 2, 8, 2, 1, 3000, 128, splits=7, lse=False),
)


def paths() -> list[str | None]:
    """The families of kernels that this machine runs; [None] where it runs none."""
    if not torch.cuda.is_available():
        return [None]
    return ["sm_80", "sm_90"] if torch.cuda.get_device_capability() == (9, 0) else ["sm_80"]


def products(quick: bool = False) -> list[Product | Attend]:
    """The matrix, paths left open. With `quick` as few as show every block, layout, type and kind of epilogue once, and
    every form of attention."""
    found = quick_products() if quick else [*dense_products(), *sparse_products()]
    return [*dict.fromkeys(found), *ATTENTION[: QUICK_ATTENTION if quick else None]]


def quick_products() -> Iterator[Product]:
    """A dozen: each costs a kernel to compile on each path."""
    for i, layout in enumerate(LAYOUTS):
        dtype, out_dtype = TYPES[i]
        yield Product("gemm", *DENSE_SHAPES[i], layout, dtype=dtype, out_dtype=out_dtype)
    yield Product("gemm", *DENSE_SHAPES[1], "nt", dtype=FP16, out_dtype=FP32, terms="bias+residual+gelu")
    ops = ("bsr_matmul", "bsr_linear")
    for i, (block, (rows, cols)) in enumerate(BLOCKS.items()):
        dtype, out_dtype = TYPES[(i + 1) % 4]
        m, k, pattern = rows * block[0], cols * block[1], PATTERNS[i % 3]
        yield Product(ops[i % 2], m, 136, k, "nn", block, pattern, dtype, out_dtype, ("", "bias+gelu")[i // 2 % 2])


def dense_products() -> Iterator[Product]:
    """Every layout with every pair of types on a whole and on a ragged shape; epilogues; odd extents."""
    for dtype, out_dtype in TYPES:
        for layout in LAYOUTS:
            for shape in DENSE_SHAPES[:2]:
                yield Product("gemm", *shape, layout, dtype=dtype, out_dtype=out_dtype)
        yield Product("gemm", *DENSE_SHAPES[2], "nt", dtype=dtype, out_dtype=out_dtype)
    for i, terms in enumerate(DENSE_TERMS):
        dtype, out_dtype = TYPES[i % 4]
        yield Product("gemm", *DENSE_SHAPES[i % 3], LAYOUTS[i % 3], dtype=dtype, out_dtype=out_dtype, terms=terms)
    for layout in ("nn", "tn"):
        yield Product("gemm", 129, 65, 33, layout, terms="bias+gelu")
    yield Product("gemm", 1, 8, 8)


def sparse_products() -> Iterator[Product]:
    """Every block shape in both ops with every type, patterns and epilogues taking turns; then every pattern."""
    turn = 0
    for block, (rows, cols) in BLOCKS.items():
        m, k = rows * block[0], cols * block[1]
        for dtype, out_dtype in TYPES:
            pattern = PATTERNS[turn % 3]
            matmul = ("", *MATMUL_TERMS)[turn % 5]
            linear = ("", *LINEAR_TERMS)[turn % 5]
            yield Product("bsr_matmul", m, 200, k, ("nn", "nt")[turn % 2], block, pattern, dtype, out_dtype, matmul)
            yield Product("bsr_linear", m, 136, k, ("nn", "nt")[turn % 2], block, pattern, dtype, out_dtype, linear)
            turn += 1
    for pattern in PATTERNS:
        for op in ("bsr_matmul", "bsr_linear"):
            yield Product(op, 640, 264, 512, "nn", (128, 128), pattern)
    yield Product("bsr_matmul", 128, 37, 192, "nn", (32, 48), "empty_rows")


def on_path(product: Product | Attend, path: str | None) -> bool:
    """Whether a family of kernels takes it: sm_90's TMA needs the operands' strides to be multiples of 16 bytes."""
    return path != "sm_90" or all(extent % 8 == 0 for extent in product.extents)


def spread(cases: Iterable[Product | Attend], families: Iterable[str | None]) -> list[Product | Attend]:
    """Every case on every path that takes it."""
    cases = list(cases)
    return [replace(case, path=path) for path in families for case in cases if on_path(case, path)]


def check(
    cases: Iterable[Product | Attend] | None = None,
    *,
    quick: bool = False,
    ops: Mapping[str, Callable] = OPS,
    device: str | None = None,
    families: Iterable[str | None] | None = None,
) -> Gate:
    """Run every case on every path with `ops`, and compare. A case that raises is a case that failed.

    `device` is by default the GPU, or the CPU where there is none; `families` the paths, by default all of the GPU's.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = products(quick) if cases is None else list(cases)
    families = paths() if families is None else list(families)
    runs = spread(cases, families)
    problems, wrong = [], 0
    for case in runs:
        try:
            call = case.call(device)
            complaint = call.complaint(call.run(ops))
        except Exception as error:
            complaint = reason(error)
        if complaint:
            wrong += 1
            problems += [case.name, *(f"    {line}" for line in complaint.splitlines())]
    where = " and ".join(path or "any path" for path in families) if device == "cuda" else "the CPU reference"
    return judged(
        NAME,
        problems,
        f"{len(runs)} products right, through {where}",
        f"{wrong} of {len(runs)} products wrong, through {where}",
    )
