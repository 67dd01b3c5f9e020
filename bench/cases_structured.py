"""Products with a 2:4 sparse A beside cuBLAS's dense product of the same numbers, and torch's semi-structured one.

All count the same useful operations, those with stored elements, so ratios are of times.
"""

from collections.abc import Callable, Iterator

import torch

from cute_kernels import Sparse24, gemm, prune_2_4

from . import peers
from .cases import randn
from .peers import CUBLAS, SEMI_STRUCTURED, Operands, own_call
from .rows import Case, Problem

SUITE = "structured"


def structured(M: int, N: int, K: int, layout: str, against: str, asked: float | None = None) -> Case:
    """gemm(W, b) of a pruned W."""
    problem = Problem("gemm", M, N, K, density=0.5, layout=layout, epilogue="2:4")
    x = Operands(
        lambda: prune_2_4(randn(M, K)), lambda: randn(K, N) if layout == "NN" else randn(N, K).t()
    )  # fmt: skip

    def ours() -> tuple:
        return own_call(x, gemm, Sparse24.from_dense(x.a), x.b, out=x.out())

    others = [make(x, problem.flops) for make in (peers.cublas, peers.semi_structured)]
    return Case(SUITE, f"gemm 2:4 {M}x{N}x{K} {layout}, over {against}", problem, ours, others, against, asked)


def structured_cases(mode: str) -> Iterator[Case]:
    """Rows with a number asked of them; "full" has layers of a model as well."""
    for size in (4096, 8192):
        for layout in ("NN", "NT"):
            yield structured(size, size, size, layout, CUBLAS, 1.45)
            yield structured(size, size, size, layout, SEMI_STRUCTURED, 1.10)
    if mode == "full":
        yield structured(8192, 8192, 1024, "NN", CUBLAS)
        for tokens in (128, 2048, 8192):
            for M, K in ((4096, 4096), (14336, 4096), (4096, 14336)):
                yield structured(M, tokens, K, "NT", CUBLAS)


def host_calls() -> dict[str, Callable]:
    """Of which the host's cost is measured: on a preallocated output, 64x64 operands."""
    w, b = prune_2_4(randn(64, 64)), randn(64, 64)
    W, out = Sparse24.from_dense(w), torch.empty_like(b)
    return {
        "gemm, 2:4": lambda: gemm(W, b, out=out),
        "gemm of the dense matrix": lambda: gemm(w, b, out=out),
    }
