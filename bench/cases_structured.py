"""Products with a 2:4 sparse A beside cuBLAS's dense product of the same numbers, and torch's semi-structured one; and
block-sparse ones with 2:4 sparse blocks beside our own block-sparse product of the same numbers.

All count the same useful operations, those with stored elements, so ratios are of times.
"""

from collections.abc import Callable, Iterator

import torch

from cute_kernels import Sparse24, gemm, prune_2_4
from sparse_collective import Bsr24, BsrMatrix, bsr_linear

from . import peers
from .cases import CUBE, of_rows, product, randn
from .cases_structured_layers import feed_forward
from .peers import CUBLAS, SEMI_STRUCTURED, Operands, own_call
from .rows import Candidate, Case, Problem

SUITE = "structured"
BSR = "our block-sparse product"


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


def blocks(
    block: tuple[int, int], density: float, tokens: int = CUBE, asked: float | None = None, size: int = CUBE
) -> Case:
    """bsr_linear(x, W) of as many 2:4 sparse blocks in each row, beside ours of the same numbers as a BsrMatrix."""
    per_row = max(1, round(density * size / block[1]))
    kept = per_row * block[1] / size
    problem = Problem("bsr_linear", size, tokens, size, block, kept / 2, epilogue="2:4")
    x = Operands(
        lambda: of_rows(size, size, block, per_row).prune_2_4().to_bsr(),
        lambda: randn(tokens, size).t(),
        transposed=True,
    )

    def ours() -> tuple:
        return own_call(x, bsr_linear, x.b.t(), Bsr24.from_bsr(x.a), out=x.out().t())

    peer = Candidate(BSR, problem.flops, lambda: product(x, bsr_linear)[0])
    name = f"bsr_linear {block[0]}x{block[1]}, {kept:.3g} of blocks, 2:4, {tokens} tokens, over {BSR}"
    return Case(SUITE, name, problem, ours, [peer], BSR, asked)


def structured_cases(mode: str) -> Iterator[Case]:
    """Rows with a number asked of them; "full" has products and layers of a model as well."""
    for size in (4096, 8192):
        for layout in ("NN", "NT"):
            yield structured(size, size, size, layout, CUBLAS, 1.45)
            yield structured(size, size, size, layout, SEMI_STRUCTURED, 1.10)
    yield blocks((128, 128), 1 / 8, asked=1.4)
    yield blocks((256, 128), 1 / 8, asked=1.45)
    if mode == "full":
        yield blocks((64, 64), 1 / 8)
        for block in ((128, 128), (256, 128)):
            yield blocks(block, 1 / 2)
            for tokens in (16, 64, 1024):
                yield blocks(block, 1 / 4, tokens)
        yield structured(8192, 8192, 1024, "NN", CUBLAS)
        for tokens in (128, 2048, 8192):
            for M, K in ((4096, 4096), (14336, 4096), (4096, 14336)):
                yield structured(M, tokens, K, "NT", CUBLAS)
        for tokens in (64, 8192):
            yield feed_forward(4096, 14336, tokens)
            yield feed_forward(4096, 14336, tokens, 0.25)


def host_calls() -> dict[str, Callable]:
    """Of which the host's cost is measured: on a preallocated output, 64x64 operands."""
    w, b = prune_2_4(randn(64, 64)), randn(64, 64)
    W, out = Sparse24.from_dense(w), torch.empty_like(b)
    V = BsrMatrix.from_dense(w, (64, 64)).prune_2_4()
    return {
        "gemm, 2:4": lambda: gemm(W, b, out=out),
        "gemm of the dense matrix": lambda: gemm(w, b, out=out),
        "bsr_linear, 2:4": lambda: bsr_linear(b, V, out=out),
    }
