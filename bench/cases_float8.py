"""Products of 8-bit floats: dense ones beside torch._scaled_mm, with scales of each kind and sums of both kinds;
block-sparse ones with a scale for each stored block beside our own dense product, and beside the same of bfloat16;
those of few tokens beside a copy of as many bytes; decoding from caches of 8-bit floats beside caches of bfloat16, and
beside a copy of as many bytes; a feed-forward layer beside a dense one.

A dense product and its peer have the same quantised operands, b contiguous along K, and write bfloat16. A row's notes
say how far each result is from fp64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attention import attention
from cute_kernels import explain, gemm
from sparse_collective import bsr_linear

from . import ceilings
from . import peers_float8 as peers
from .cases import COPY, CUBE, of_rows, product, randn
from .cases_attention import CACHE_HEADS, AttentionProblem
from .cases_attention import COPY as CACHE_COPY
from .cases_layers import swiglu
from .peers import Call, Operands, own_call
from .peers_float8 import BLOCKS, SCALED_MM, CachedAttention, Scaled, ScaledSparse
from .rows import Candidate, Case, Problem

SUITE = "float8"
WIDE_CACHE = "our bfloat16 cache"
PAGE = 64  # rows
DENSE, WIDE = "our dense float8", "our bfloat16"


def float8(
    M: int, N: int, K: int, per: str, fast: bool, asked: float | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> Case:
    """gemm(a, b, scale_a=, scale_b=) beside torch._scaled_mm, with the same accumulation."""
    name = str(dtype).removeprefix("torch.")
    epilogue = f"scales per {per}" + (", fast accumulation" if fast else "")
    problem = Problem("gemm", M, N, K, layout="NT", dtype=name, epilogue=epilogue)
    x = Scaled(lambda: randn(M, K), lambda: randn(N, K), per, dtype)

    def ours() -> tuple:
        terms = {"scale_a": x.scale_a, "scale_b": x.scale_b, "use_fast_accum": fast, "out": x.out()}
        call = Call(lambda: gemm(x.a, x.b, **terms))
        return x.verified(x.with_error(call)), explain(gemm, x.a, x.b, **terms)

    row = f"gemm {M}x{N}x{K} NT, {name.removeprefix('float8_')}, {epilogue}"
    return Case(SUITE, row, problem, ours, [peers.scaled_mm(x, problem.flops, fast=fast)], SCALED_MM, asked)


def sparse(block: tuple[int, int], density: float, against: str, asked: float | None = None, size: int = CUBE) -> Case:
    """bsr_linear(x, W, scale_x=) of equally many random blocks in each row, with a scale each, and of `size` tokens.

    against: DENSE, our gemm of the whole cube, by useful rates; or WIDE, our bsr_linear of the same in bfloat16.
    """
    per_row = max(1, round(density * size / block[1]))
    kept = per_row * block[1] / size
    epilogue = "scales per block and token"
    problem = Problem("bsr_linear", size, size, size, block, kept, dtype="float8_e4m3fn", epilogue=epilogue)
    x = ScaledSparse(lambda: of_rows(size, size, block, per_row), lambda: randn(size, size))

    peer = {
        DENSE: Candidate(DENSE, 2.0 * size**3, lambda: float8(size, size, size, "row", False).ours()[0]),
        WIDE: Candidate(WIDE, problem.flops, lambda: product(Operands(x.a, x.b, transposed=True), bsr_linear)[0]),
    }[against]
    row = f"bsr_linear {block[0]}x{block[1]}, {kept:.3g}, e4m3fn, {epilogue}, over {against}"
    return Case(SUITE, row, problem, lambda: layer(x), [peer], against, asked)


def few_tokens(
    tokens: int, block: tuple[int, int], density: float = 0.25, asked: float | None = 0.75, size: int = 2 * CUBE
) -> Case:
    """bsr_linear(x, W, scale_x=) of a few tokens, limited by the bytes of W, beside a copy that moves as many."""
    per_row = round(density * size / block[1])
    epilogue = "scales per block and token"
    kept = per_row * block[1] / size
    problem = Problem("bsr_linear", size, tokens, size, block, kept, dtype="float8_e4m3fn", epilogue=epilogue)
    x = ScaledSparse(lambda: of_rows(size, size, block, per_row), lambda: randn(tokens, size))

    def copy() -> Call:
        values = x.quantised[0].values.view(torch.uint8).flatten()
        half = values[: values.numel() // 2]  # each byte is read and written
        to = torch.empty_like(half)
        return Call(lambda: to.copy_(half))

    name = f"bsr_linear {block[0]}x{block[1]}, {density:.3g}, e4m3fn, {epilogue}, {tokens} tokens, {size} squared"
    return Case(SUITE, name, problem, lambda: layer(x), [Candidate(COPY, problem.flops, copy)], COPY, asked)


def layer(x: ScaledSparse) -> tuple:
    """Our bsr_linear of x, and its plan."""
    W, tokens, scale = x.quantised
    terms = {"scale_x": scale, "out": x.out().t()}
    call = Call(lambda: bsr_linear(tokens, W, **terms).t())
    return x.verified(x.with_error(call)), explain(bsr_linear, tokens, W, **terms)


@dataclass(frozen=True)
class CacheProblem(AttentionProblem):
    """Decoding from paged FP8 caches."""

    cache: str = "float8_e4m3fn"
    page_size: int = PAGE

    @property
    def kv_bytes(self) -> float:
        return super().kv_bytes / 2


def cached(
    batch: int, keys: int, against: str, asked: float | None = None, page_size: int = PAGE, heads: tuple = CACHE_HEADS
) -> Case:
    """attention(q, k, v, k_descale=, v_descale=) of one query a sequence to full caches.

    against: WIDE_CACHE, our attention to the same in bfloat16; or COPY, by bytes of K and V over the time, where a copy
        reads and writes.
    """
    H, Hkv, D = heads
    problem = CacheProblem("attention", batch, 1, keys, H, Hkv, D, page_size=page_size)
    pages = batch * keys // page_size
    x = CachedAttention(lambda: randn(batch, 1, H, D), lambda: randn(pages, page_size, Hkv, D))

    def call_of(args: tuple, terms: dict) -> tuple:
        return own_call(x, attention, *args, out=x.out().transpose(1, 2), **terms)

    as_many = problem.flops * 2 * ceilings.COPY_BYTES / problem.kv_bytes
    others = [
        Candidate(WIDE_CACHE, problem.flops, lambda: call_of(*x.wide_call())[0]),
        Candidate(CACHE_COPY, as_many, ceilings.copy),
    ]
    row = f"decoding B{batch}, {keys // 1024}k keys, {H}/{Hkv} heads D{D}, pages of {page_size}, e4m3fn, over {against}"
    return Case(SUITE, row, problem, lambda: call_of(*x.narrow_call()), others, against, asked)


def float8_cases(mode: str) -> Iterator[Case]:
    """Rows with a number asked of them; "full" has layers of a model as well."""
    for size in (4096, 8192):
        for per in ("tensor", "row"):
            for fast in (False, True):
                yield float8(size, size, size, per, fast, 1.0)
        yield float8(size, size, size, BLOCKS, False, 1.08)
    for block, rate, speed in (((128, 128), 0.80, 1.6), ((64, 64), 0.55, 1.4)):
        yield sparse(block, 1 / 8, DENSE, rate)
        yield sparse(block, 1 / 8, WIDE, speed)
    for block in ((128, 128), (64, 64)):
        for tokens in (1, 8, 32, 64):
            yield few_tokens(tokens, block)
    yield cached(8, 16384, WIDE_CACHE, 1.75)
    yield cached(8, 16384, CACHE_COPY)
    for tokens, speed in ((1, 5.0), (64, 4.0), (8192, 5.0)):
        yield swiglu("fp8", 4096, 14336, tokens, 0.25, speed)
    if mode == "full":
        for batch, keys in ((16, 16384), (1, 131072), (1, 16384)):
            yield cached(batch, keys, WIDE_CACHE)
        yield cached(8, 16384, WIDE_CACHE, page_size=16)
        yield cached(8, 16384, WIDE_CACHE, heads=(64, 8, 128))
        for M in (128, 2048, 8192):
            for N, K in ((4096, 4096), (14336, 4096), (4096, 14336)):
                for per in ("row", BLOCKS):
                    yield float8(M, N, K, per, False)
        yield float8(8192, 8192, 8192, "tensor", False, dtype=torch.float8_e5m2)
        for block in ((128, 64), (256, 128), (64, 128), (32, 32)):
            yield sparse(block, 1 / 8, WIDE)
