"""What attention is measured against what: each case one call, its peers, and the ratio that is asked of it.

All tensors are bf16, standard normal, (B, S, H, D) in memory, as FlashAttention takes them; ours and torch's functions
get (B, H, S, D) views.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention
from attention.masks.mask_mods import window_bounds
from cute_kernels.testing.patterns import uniform
from sparse_collective import BsrMatrix

from . import ceilings, timing
from . import peers_attention as peers
from .peers import Call, own_call
from .peers_attention import FA4, FLASH, FLEX, Attention
from .rows import FASTEST, Candidate, Case

SUITE = "attention"
DTYPE = torch.bfloat16
COPY = "copy bandwidth"
OUR_DENSE = "ours, dense"
OUR_KEPT = "ours, BlockMask"  # in rows of other masks that users hold
FORWARD = "forward"  # how the names of rows begin that a geometric mean is asked of
EIGHTH = "block-sparse 128x128, 0.125"

# (B, S, H, D)
FIRST = (2, 8192, 16, 128)
SHAPES = (
    FIRST, (16, 1024, 16, 128), (1, 16384, 16, 128), (2, 8192, 32, 64), (2, 8192, 8, 256),
    (4, 4096, 16, 128), (8, 2048, 16, 128), (8, 2048, 32, 64), (8, 2048, 8, 256),
)  # fmt: skip
SMALL = ((1, 512, 8, 64), (4, 512, 16, 64))
SPARSE = FIRST
WINDOW = (1, 16384, 16, 128), (1023, 0)  # the last 1024 keys, the query's own among them
CACHES = ((8, 16384, 0.88), (16, 16384, 0.88), (8, 65536, 0.88), (1, 131072, 0.85), (1, 16384, 0.55))  # B, keys, asked
CACHE_HEADS = (32, 8, 128)  # of q, of k and v, D
SM_80 = (FIRST, (2, 8192, 32, 64))
PEERS = (peers.sdpa_cudnn, peers.sdpa_flash, peers.fa4)


@dataclass(frozen=True)
class AttentionProblem:
    """What is computed, as result files name it. `block` is None and `density` 1 without a block mask."""

    op: str  # attention, block_sparse_attention
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    block: tuple[int, int] | None = None
    density: float = 1.0  # share of blocks that are kept
    dtype: str = "bfloat16"
    path: str | None = None  # "sm_80" where that family of kernels was forced

    @cached_property
    def pairs(self) -> float:
        """(query, key) pairs of one head of one item that are seen."""
        if self.block is not None:
            return self.density * self.queries * self.keys
        left, right = (self.keys + self.queries if n is None else n for n in window_bounds(self.window, self.causal))
        position = torch.arange(self.keys - self.queries, self.keys, dtype=torch.int64)
        first, last = (position - left).clamp(min=0), (position + right).clamp(max=self.keys - 1)
        return float((last - first + 1).clamp(min=0).sum())

    @property
    def flops(self) -> float:
        """The useful ones: two for each multiply-add of both products, of pairs that are seen."""
        return 4.0 * self.pairs * self.head_dim * self.heads * self.batch

    @property
    def kv_bytes(self) -> float:
        """K and V."""
        return 2.0 * 2.0 * self.batch * self.keys * self.kv_heads * self.head_dim

    @property
    def bytes(self) -> float:
        """The least that passes through device memory: Q, K, V and the output, once."""
        return self.kv_bytes + 2.0 * 2.0 * self.batch * self.queries * self.heads * self.head_dim


def operands(p: AttentionProblem, blocks: Tensor | None = None, device: str = "cuda") -> Attention:
    """The tensors of a problem, made when first asked for."""
    shapes = [(p.batch, p.queries, p.heads, p.head_dim)] + 2 * [(p.batch, p.keys, p.kv_heads, p.head_dim)]
    q, k, v = (partial(torch.randn, *shape, device=device, dtype=DTYPE) for shape in shapes)
    terms = {} if blocks is None else {"blocks": lambda: blocks.to(device), "block_size": p.block}
    return Attention(q, k, v, p.causal, window=p.window, **terms)


def dense_problem(shape: tuple[int, int, int, int], causal: bool = False, **terms) -> AttentionProblem:
    """Of (B, S, H, D), with as many keys as queries and as many heads of each."""
    B, S, H, D = shape
    return AttentionProblem("attention", B, S, S, H, H, D, causal, **terms)


def named(shape: tuple[int, int, int, int], causal: bool) -> str:
    B, S, H, D = shape
    return f"B{B} S{S} H{H} D{D} {'causal' if causal else 'full'}"


def ours_of(x: Attention, forced: str | None = None, mask: Callable | None = None) -> tuple:
    """(call, plan) of ours, whose result has been compared with x's reference.

    Args:
        forced: "sm_80" to force that path.
        mask: makes the mask that block_sparse_attention takes; without it the op is attention.
    """
    op, args, terms = attention, x.heads_first, {"causal": x.causal, "window_size": x.window}
    if mask is not None:
        op, args, terms = block_sparse_attention, (*args, mask(x)), {}
    return own_call(x, op, *args, out=x.out().transpose(1, 2), forced=forced, **terms)


def case(name: str, problem, x: Attention, others: list[Candidate], against: str, asked, ours=None, **options) -> Case:
    """A case of this suite; those with FA4 come after all others, and ours is compiled before it is imported."""
    ours = ours or (lambda: ours_of(x, forced=problem.path))
    patches = any(other.name == FA4 for other in others)
    return Case(SUITE, name, problem, ours, others, against, asked, patches, **options)


# -- dense ---------------------------------------------------------------------------------------------------


def forward(shape: tuple[int, int, int, int], causal: bool, flex: bool = False) -> Case:
    """attention() beside cuDNN, FlashAttention 2 and 4, and FlexAttention where asked for."""
    problem = dense_problem(shape, causal)
    x = operands(problem)
    others = [make(x, problem.flops) for make in (*PEERS, *([peers.flex_attention] if flex else []))]
    return case(f"{FORWARD} {named(shape, causal)}", problem, x, others, FASTEST, 0.93)


def small(shape: tuple[int, int, int, int], causal: bool, graph: bool) -> Case:
    """A short call: its device time in a CUDA graph, or its wall time among many eager ones, outputs allocated."""
    problem = dense_problem(shape, causal)
    x = operands(problem)
    others = [make(x, problem.flops) for make in PEERS]
    name = f"small {named(shape, causal)}, {'CUDA graph' if graph else 'eager'}"
    if not graph:
        return case(name, problem, x, others, FASTEST, 1.0, timer=timing.interleaved_bursts)

    def ours():
        call, plan = ours_of(x)
        return Call(timing.graphed(call)), plan

    others = [replace(other, setup=lambda other=other: Call(timing.graphed(other.setup()))) for other in others]
    return case(name, problem, x, others, FASTEST, 1.0, ours, timer=timing.interleaved_graphs)


def sliding_window() -> Case:
    """A causal window beside FA4's and FlexAttention's."""
    shape, window = WINDOW
    problem = dense_problem(shape, True, window=window)
    x = operands(problem)
    others = [peers.flex_attention(x, problem.flops), peers.fa4(x, problem.flops)]
    return case(f"window {window[0] + 1}, {named(shape, True)}", problem, x, others, FASTEST, 1.05)


def older(shape: tuple[int, int, int, int], causal: bool) -> Case:
    """The sm_80 path beside FlashAttention 2, which has the same instructions."""
    problem = dense_problem(shape, causal, path="sm_80")
    x = operands(problem)
    name = f"sm_80 path {named(shape, causal)}"
    return case(name, problem, x, [peers.sdpa_flash(x, problem.flops)], FLASH, 0.95)


# -- block-sparse --------------------------------------------------------------------------------------------


def sparse(
    side: int, density: float, against: str, asked: float, settings: int = 1, dense: bool = False,
    held: str | None = None,
) -> Case:  # fmt: skip
    """block_sparse_attention of random full blocks beside FlexAttention, and FA4 where its tiles fit the blocks.

    Args:
        settings: how many of FlexAttention's are tried for blocks smaller than its tiles.
        dense: whether our own dense attention of the same shape takes turns too.
        held: which of HELD each call of ours is given, made once outside as users do, and nothing else prepared. A
            kept BlockMask takes turns then, and of the peers only that which the row is held against.
    """
    B, S, H, D = SPARSE
    blocks = uniform(S // side, S // side, round(density * S / side))
    kept = blocks.double().mean().item()
    problem = AttentionProblem("block_sparse_attention", B, S, S, H, H, D, block=(side, side), density=kept)
    x = operands(problem, blocks)
    whole = Attention(lambda: x.q, lambda: x.k, lambda: x.v)
    ours_dense = Candidate(OUR_DENSE, dense_problem(SPARSE).flops, lambda: ours_of(whole)[0])

    def ours(mask: Callable = kept_mask if held is None else HELD[held]):
        if dense:
            with contextlib.suppress(Exception):  # compiled before FA4 is imported; its own line will say
                ours_dense.setup()
        return ours_of(x, mask=mask)

    flex, fa4 = peers.flex_attention(x, problem.flops, settings=settings), peers.fa4(x, problem.flops)
    others = [ours_dense] if dense else []
    others += [flex, fa4] if side == 128 else [flex]
    name = f"block-sparse {side}x{side}, {density:.3g}"
    if held is not None:
        name += f", {held}"
        others = [other for other in others if other.name == against]
        others.insert(0, Candidate(OUR_KEPT, problem.flops, lambda: ours(lambda x: as_kept(HELD[held](x)))[0]))
    return case(name, problem, x, others, against, asked, ours)


def kept_mask(x: Attention) -> BlockMask:
    return BlockMask.from_blocks(x.blocks, x.block_size)


def as_kept(held) -> BlockMask:
    """The same mask as a BlockMask, with its mask_mod where it has one: what is left is the cost of passing it."""
    if isinstance(held, Tensor):
        return BlockMask.from_blocks(held)
    return BlockMask.from_bsr(held) if isinstance(held, BsrMatrix) else BlockMask.from_flex(held)


def bsr_pattern(x: Attention) -> BsrMatrix:
    """A matrix of zeros, of which the pattern counts."""
    rows, cols = x.blocks.nonzero(as_tuple=True)
    crow = torch.arange(len(x.blocks) + 1, device=rows.device, dtype=torch.int32) * (len(rows) // len(x.blocks))
    values = torch.zeros(len(cols), *x.block_size, dtype=DTYPE, device=rows.device)
    return BsrMatrix(crow, cols.int(), values, (x.q.shape[1], x.k.shape[1]))


# Masks that users hold, and what makes one.
FLEX_MASK, BOOL_MASK, BSR_MASK = "FlexAttention's mask", "bool tensor", "BsrMatrix"
HELD = {FLEX_MASK: peers.flex_mask, BOOL_MASK: lambda x: x.blocks, BSR_MASK: bsr_pattern}


# -- decoding ------------------------------------------------------------------------------------------------


def decoding(batch: int, keys: int, asked: float) -> Case:
    """One query a sequence: bytes of K and V over the time, held against a large copy's bytes read and written."""
    heads, kv_heads, D = CACHE_HEADS
    problem = AttentionProblem("attention", batch, 1, keys, heads, kv_heads, D)
    x = operands(problem)

    # Rates are compared as operations over time: the copy's are those of attention to as many bytes of K and V.
    as_many = problem.flops * 2 * ceilings.COPY_BYTES / problem.kv_bytes
    others = [Candidate(COPY, as_many, ceilings.copy), peers.sdpa_flash(x, problem.flops), peers.fa4(x, problem.flops)]
    name = f"decoding B{batch}, {keys // 1024}k keys, {heads}/{kv_heads} heads D{D}"
    return case(name, problem, x, others, COPY, asked)


def attention_cases(mode: str) -> Iterator[Case]:
    """All rows have a number asked of them; "full" tries more settings and sets FlexAttention beside every forward."""
    full = mode == "full"
    for shape, causal in product(SM_80, (False, True)):
        yield older(shape, causal)
    for density, held in product((1 / 8, 1 / 4, 1 / 2), (None, FLEX_MASK)):
        yield sparse(64, density, FLEX, 1.5, settings=len(peers.FLEX_SETTINGS) if full else 1, held=held)
    for shape, causal in product(SHAPES, (False, True)):
        yield forward(shape, causal, flex=full or shape == FIRST)
    for graph, shape, causal in product((True, False), SMALL, (False, True)):
        yield small(shape, causal, graph)
    for density in (1 / 8, 1 / 4, 1 / 2):
        yield sparse(128, density, FA4, 1.10, dense=density == 1 / 8)
        for held in HELD if density == 1 / 8 else (FLEX_MASK,):
            yield sparse(128, density, FA4, 1.10, held=held)
    yield sliding_window()
    for batch, keys, asked in CACHES:
        yield decoding(batch, keys, asked)
