"""Products with a 2:4 sparse A beside cuBLAS's dense product of the same numbers, and torch's semi-structured one; and
block-sparse ones with 2:4 sparse blocks beside our own block-sparse product of the same numbers. The same of 8-bit
floats, beside our own dense product of these, and torch's.

All count the same useful operations, those with stored elements, so ratios are of times.
"""

from collections.abc import Iterator

from cute_kernels import Sparse24, explain, gemm, prune_2_4
from sparse_collective import Bsr24, bsr_linear

from . import peers, peers_float8
from .cases import CUBE, of_rows, product, randn
from .cases_float8 import DENSE, layer
from .cases_layers import swiglu
from .peers import CUBLAS, SEMI_STRUCTURED, Call, Operands, own_call
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


def structured_float8(M: int, N: int, K: int, per: str, fast: bool, against: str, asked: float | None = None) -> Case:
    """gemm(W, b, scale_a=, scale_b=) of a pruned and quantised W, beside our own dense product of the same numbers with
    the same accumulation, torch._scaled_mm, and with one scale for each operand cuSPARSELt's."""
    epilogue = f"2:4, scales per {per}" + (", fast accumulation" if fast else "")
    problem = Problem("gemm", M, N, K, density=0.5, layout="NT", dtype="float8_e4m3fn", epilogue=epilogue)
    x = peers_float8.Scaled(lambda: prune_2_4(randn(M, K)), lambda: randn(N, K), per)

    def call_of(a) -> tuple:
        terms = {"scale_a": x.scale_a, "scale_b": x.scale_b, "use_fast_accum": fast, "out": x.out()}
        call = Call(lambda: gemm(a, x.b, **terms))
        return x.verified(x.with_error(call)), explain(gemm, a, x.b, **terms)

    others = [
        Candidate(DENSE, problem.flops, lambda: call_of(x.a)[0]),
        peers_float8.scaled_mm(x, problem.flops, fast=fast),
    ]
    if per == "tensor":
        others.append(peers_float8.semi_structured(x, problem.flops))
    name = f"gemm e4m3 {epilogue}, {M}x{N}x{K} NT, over {against}"
    return Case(SUITE, name, problem, lambda: call_of(Sparse24.from_dense(x.a)), others, against, asked)


def blocks_float8(block: tuple[int, int], density: float, tokens: int = CUBE, size: int = CUBE) -> Case:
    """bsr_linear(x, W, scale_x=) of 2:4 sparse blocks with a scale each, beside ours of the same numbers as a
    BsrMatrix."""
    per_row = max(1, round(density * size / block[1]))
    kept = per_row * block[1] / size
    epilogue = "2:4, scales per block and token"
    problem = Problem("bsr_linear", size, tokens, size, block, kept / 2, dtype="float8_e4m3fn", epilogue=epilogue)
    x = peers_float8.ScaledSparse(
        lambda: of_rows(size, size, block, per_row).prune_2_4().to_bsr(), lambda: randn(tokens, size)
    )

    def ours() -> tuple:
        W, values, scale = x.quantised
        V, terms = Bsr24.from_bsr(W), {"scale_x": scale, "out": x.out().t()}
        call = Call(lambda: bsr_linear(values, V, **terms).t())
        return x.verified(x.with_error(call)), explain(bsr_linear, values, V, **terms)

    peer = Candidate(BSR, problem.flops, lambda: layer(x)[0])
    name = f"bsr_linear {block[0]}x{block[1]} e4m3, {kept:.3g} of blocks, 2:4, {tokens} tokens, over {BSR}"
    return Case(SUITE, name, problem, ours, [peer], BSR)


def structured_cases(mode: str) -> Iterator[Case]:
    """Rows with a number asked of them; "full" has products and layers of a model as well."""
    for size in (4096, 8192):
        for layout in ("NN", "NT"):
            yield structured(size, size, size, layout, CUBLAS, 1.45)
            yield structured(size, size, size, layout, SEMI_STRUCTURED, 1.10)
    yield blocks((128, 128), 1 / 8, asked=1.4)
    yield blocks((256, 128), 1 / 8, asked=1.45)
    for size in (4096, 8192):
        yield structured_float8(size, size, size, "row", False, DENSE, 1.3)
        yield structured_float8(size, size, size, "tensor", True, DENSE, 1.3)
    yield structured_float8(8192, 8192, 8192, "tensor", True, SEMI_STRUCTURED)
    yield blocks_float8((128, 128), 1 / 8)
    if mode == "full":
        yield blocks_float8((256, 256), 1 / 8)
        for tokens in (1, 64):
            yield blocks_float8((128, 128), 1 / 4, tokens)
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
            yield swiglu("2:4", 4096, 14336, tokens)
            yield swiglu("2:4", 4096, 14336, tokens, 0.25)
