"""Dense products of 8-bit floats beside torch._scaled_mm: scales of each kind, sums of both kinds.

Both are given the same quantised operands, b contiguous along K, and write bfloat16. A row's notes say how far each
result is from fp64; findings_float8 compares the sums without bfloat16's rounding.
"""

from collections.abc import Callable, Iterator

import torch

from cute_kernels import explain, gemm

from . import peers_float8 as peers
from .cases import randn
from .peers import Call
from .peers_float8 import BLOCKS, SCALED_MM, Scaled
from .rows import Case, Problem

SUITE = "float8"


def float8(
    M: int, N: int, K: int, per: str, fast: bool, asked: float | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> Case:
    """gemm(a, b, scale_a=, scale_b=) beside torch._scaled_mm, with the same accumulation."""
    name = str(dtype).removeprefix("torch.")
    epilogue = f"scales per {per}" + (", fast accumulation" if fast else "")
    problem = Problem("gemm", M, N, K, layout="NT", dtype=name, epilogue=epilogue)
    x = Scaled(lambda: randn(M, K), lambda: randn(N, K), per, dtype)

    def ours() -> tuple:
        terms = {"scale_a": x.scale_a, "scale_b": x.scale_b, "fast_accumulation": fast, "out": x.out()}
        call = Call(lambda: gemm(x.a, x.b, **terms))
        return x.verified(x.with_error(call)), explain(gemm, x.a, x.b, **terms)

    row = f"gemm {M}x{N}x{K} NT, {name.removeprefix('float8_')}, {epilogue}"
    return Case(SUITE, row, problem, ours, [peers.scaled_mm(x, problem.flops, fast=fast)], SCALED_MM, asked)


def float8_cases(mode: str) -> Iterator[Case]:
    """Rows with a number asked of them; "full" has layers of a model as well."""
    for size in (4096, 8192):
        for per in ("tensor", "row"):
            for fast in (False, True):
                yield float8(size, size, size, per, fast, 1.0)
        yield float8(size, size, size, BLOCKS, False, 1.08)
    if mode == "full":
        for M in (128, 2048, 8192):
            for N, K in ((4096, 4096), (14336, 4096), (4096, 14336)):
                for per in ("row", BLOCKS):
                    yield float8(M, N, K, per, False)
        yield float8(8192, 8192, 8192, "tensor", False, dtype=torch.float8_e5m2)


def host_calls() -> dict[str, Callable]:
    """Of which the host's cost is measured: on a preallocated output, 64x64 operands, of scales of blocks 64x512."""
    found = {}
    for per in ("tensor", "row", BLOCKS):
        K = 512 if per == BLOCKS else 64  # torch takes scales of blocks for a K of whole groups of four
        x = Scaled(randn(64, K), randn(64, K), per)
        terms = {"scale_a": x.scale_a, "scale_b": x.scale_b, "out": x.out()}
        found[f"gemm, scales per {per}"] = lambda x=x, terms=terms: gemm(x.a, x.b, **terms)
        found[f"{SCALED_MM}, scales per {per}"] = peers.scaled_mm_call(x, False, x.out())
    return found
