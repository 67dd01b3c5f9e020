"""Compute P and dS in accumulators of transposed scores, whose rows are columns of the score matrix.

P = 2^(S scale log2(e) - LSE)        dS = P (dP - delta), with a softcap times 1 - tanh^2
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.traced.indices import Shared

from ..forward.mask import cap_scores
from ..forward.softmax import exp2, rows_and_columns
from ..masks.score_mod import SCORE_INPUT
from .config import FP32, BackwardFacts
from .mask import mask_elements, mask_window
from .score_mod import add_totals, ds_of, first_indices, inputs_at, no_totals, p_of, times_slope


@dataclass(frozen=True)
class Work:
    """One head's query tiles, and the arguments of masks, score_mod and dQ."""

    source: Any  # q_tiles.WindowRows or BlockRows
    tiles: Any  # source.for_tile of this tile
    seqlen: Any  # seqlen.SeqlenInfo
    b: Int32
    h: Int32
    col: Int32  # the thread's first column of the score matrix
    col0: Int32  # the tile's first column
    first_tile: Int32  # index of the head's first query tile, as row_tiles counts
    dq: Int64  # address of dq_accum
    turns: Int64 | None  # address of the semaphores, one per warp and query tile (semaphores.py)
    scale_log2: Float32
    softcap: Float32  # with a score_mod, the factor applied to scores before it
    score_tensors: tuple | None = None  # tensors that score_mod reads
    score_sums: tuple | None = None  # FP32 gradient accumulators of those that need a gradient


def row_values(at: Int32, columns: int) -> cute.Tensor:
    """Load LSE or delta of the query rows of this thread's scores, (columns,): two of every eight from `at` on."""
    values = cute.make_rmem_tensor(columns, Float32)
    for i in range(0, columns, 2):
        place = make_ptr(Float32, at + i * 4 * FP32, AddressSpace.smem, assumed_align=2 * FP32)
        pair = cute.make_layout(2)
        cute.autovec_copy(cute.make_tensor(place, pair), cute.make_tensor(values.iterator + i, pair))
    return values


@cute.jit
def mask_scores(
    facts: cutlass.Constexpr[BackwardFacts],
    scores: cute.Tensor,  # (rows, columns) of this thread
    work: Work,
    i: Int32,  # query tile of the head
    col: Int32,  # the thread's first column of the score matrix
    row0: Int32,  # the first query row of this warp's scores
):
    """Set masked scores to -inf."""
    if const_expr(facts.blocks is not None):
        if work.tiles.is_partial(i) or work.col0 + facts.config.tile_n > work.seqlen.cols:
            tensors = work.source.mask_tensors
            mask_elements(scores, facts.blocks, tensors, col, row0, work.b, work.h, work.seqlen)
    elif work.tiles.is_partial(i):
        mask_window(scores, work.source, col, row0, work.seqlen)


@cute.jit
def scores_to_p(
    facts: cutlass.Constexpr[BackwardFacts],
    acc_S: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    tiles_m: cutlass.Constexpr[int],  # MMA_M
    dtype: cutlass.Constexpr,
    work: Work,
    i: Int32,
    col: Int32,
    row0: Int32,
    lse: Int32,  # shared memory address of this thread's first value
):
    """Compute P from the scores in place. Returns the factors of dS due to the softcap, in 16 bits; None without one.

    Once P has been rounded, it may be multiplied by them, so that dP needs no more registers than without a softcap.
    """
    scores, slopes = rows_and_columns(acc_S, tiles_m), None
    if const_expr(facts.softcap):
        cap_scores(scores, work.softcap)
        slopes = cute.make_rmem_tensor(cute.size(acc_S), dtype)
        for v in range_constexpr(cute.size(acc_S)):
            slopes[v] = (1.0 - acc_S[v] * acc_S[v]).to(dtype)
    mask_scores(facts, scores, work, i, col, row0)
    values = row_values(lse, cute.size(scores, mode=[1]))
    for column in range_constexpr(cute.size(scores, mode=[1])):
        for r in range_constexpr(cute.size(scores, mode=[0])):
            scores[r, column] = exp2(scores[r, column] * work.scale_log2 - values[column])
    return slopes


@cute.jit
def changed_scores_to_p(
    facts: cutlass.Constexpr[BackwardFacts],
    acc_S: cute.Tensor,  # (MMA, MMA_M, MMA_N), masked
    tiles_m: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr,
    work: Work,
    col: Int32,
    row0: Int32,
    lse: Int32,  # shared memory address of this thread's first value
) -> cute.Tensor:
    """Return P with a score_mod, in `dtype`. acc_S becomes P times d score_mod / d score, unless
    BackwardFacts.keeps_scores."""
    values = row_values(lse, const_expr(cute.size(acc_S) // (2 * tiles_m)))
    rounded = cute.make_rmem_tensor(cute.size(acc_S), dtype)
    place = first_indices(col, row0, tiles_m, const_expr(cute.size(acc_S) // tiles_m * 2))
    shared = Shared(SCORE_INPUT)
    for v in range_constexpr(cute.size(acc_S)):
        inputs = inputs_at(facts, work, acc_S[v], v, tiles_m, *place)
        p = p_of(facts, work, acc_S[v], values[v // (4 * tiles_m) * 2 + v % 2], inputs, shared)
        rounded[v] = p.to(dtype)
        if const_expr(not facts.keeps_scores):
            acc_S[v] = times_slope(facts, work, p, p, inputs, shared)
    return rounded


@cute.jit
def changed_p_to_ds(
    facts: cutlass.Constexpr[BackwardFacts],
    acc_P: cute.Tensor,  # (MMA, MMA_M, MMA_N), acc_S after changed_scores_to_p
    acc_dP: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    tiles_m: cutlass.Constexpr[int],
    work: Work,
    col: Int32,
    row0: Int32,
    lse: Int32,  # shared memory addresses of this thread's first values
    delta: Int32,
):
    """Compute dS from dP in place, and the gradients of captured tensors."""
    lses, deltas = (row_values(at, const_expr(cute.size(acc_P) // (2 * tiles_m))) for at in (lse, delta))
    totals, shared = no_totals(facts), Shared(SCORE_INPUT)
    place = first_indices(col, row0, tiles_m, const_expr(cute.size(acc_P) // tiles_m * 2))
    for v in range_constexpr(cute.size(acc_P)):
        column = const_expr(v // (4 * tiles_m) * 2 + v % 2)
        acc_dP[v] = ds_of(facts, work, acc_P[v], acc_dP[v] - deltas[column], lses[column],
                          (v, tiles_m, *place), totals, shared)  # fmt: skip
    add_totals(facts, work, totals)


@cute.jit
def p_to_ds(
    acc_P: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    acc_dP: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    tiles_m: cutlass.Constexpr[int],
    delta: Int32,  # shared memory address of this thread's first value
):
    """Compute dS from dP in place."""
    p, ds = rows_and_columns(acc_P, tiles_m), rows_and_columns(acc_dP, tiles_m)
    values = row_values(delta, cute.size(ds, mode=[1]))
    for column in range_constexpr(cute.size(ds, mode=[1])):
        for r in range_constexpr(cute.size(ds, mode=[0])):
            ds[r, column] = p[r, column] * (ds[r, column] - values[column])
