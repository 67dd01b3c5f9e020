"""A score_mod in backward's mainloops, applied to one thread's accumulators of transposed scores.

With s a scaled score and m = score_mod(s): P = 2^(m log2(e) - LSE), dm = P (dP - delta), ds = dm * dm/ds. Gradients of
captured tensors are accumulated in FP32 in memory by atomics: an element t that is read gets dm * dm/dt. If all scores
of a head read the same element, the gradient is reduced over a warp first.

A scaled score of -inf has been masked; score_mod is not applied to it.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import add_to_memory, add_unless_zero, read_special_register
from cute_kernels.traced.indices import InTile, Shared
from cute_kernels.traced.lower import lower, place_of, ranges_of, values_of

from ..forward.softmax import exp2
from ..masks.score_mod import KV_INPUT, Q_INPUT
from .config import BackwardFacts


def first_indices(col: Int32, row: Int32, tiles_m: int, rows: int) -> tuple[InTile, InTile]:
    """Column and query row of the first element of a thread's accumulator ((2, 2), tiles_m, ..) of transposed scores,
    of which a warp has 16 * tiles_m columns from `col` on, and `rows` query rows from `row` on."""
    lane = read_special_register("laneid")
    return InTile(col, 16 * tiles_m, lane // 4, 0, step=1), InTile(row, rows, lane % 4 * 2, 0)


def inputs_at(facts: BackwardFacts, work, score: Float32, flat: int, tiles_m: int, col: InTile, row: InTile) -> list:
    """Arguments of score_mod for element `flat` of an accumulator; col, row: first_indices."""
    kv = replace(col, offset=flat // 4 % tiles_m * 16 + flat // 2 % 2 * 8)
    q = replace(row, offset=flat // (4 * tiles_m) * 8 + flat % 2)
    if facts.score.indexes(KV_INPUT):
        kv = kv.clamped(work.seqlen.cols - 1)  # no reads out of bounds
    if facts.score.indexes(Q_INPUT):
        q = q.clamped(work.seqlen.rows - 1)
    return [score * work.softcap, work.b, work.h, work.seqlen.q_position(q), work.seqlen.k_position(kv)]


def p_of(
    facts: BackwardFacts, work, score: Float32, lse: Float32, inputs: list, shared: Shared | None = None
) -> Float32:
    """P of a score; 0 if it is masked, or if its row is past the end or fully masked, so that LSE is inf."""
    m = lower(facts.score.program, inputs, work.score_tensors, shared)
    p = exp2(m * work.scale_log2 - lse)
    return Float32(select_((score == -Float32.inf) | (lse == Float32.inf), Float32(0.0), p))


def times_slope(facts: BackwardFacts, work, p: Float32, value: Float32, inputs: list, shared: Shared) -> Float32:
    """Return value * dm/ds if P is not 0."""
    if facts.score.adds:
        return value
    slope = lower(facts.score.slope, inputs, work.score_tensors, shared)
    return Float32(select_(p > 0.0, value * slope, value))


def ds_of(
    facts: BackwardFacts, work, kept: Float32, dp: Float32, lse: Float32, place: tuple, totals: list, shared: Shared
) -> Float32:
    """Return dS of an element, and accumulate its gradients of captured tensors.

    kept: its score, or P times dm/ds (BackwardFacts.keeps_scores). dp: dP - delta. place: the last arguments of
    inputs_at.
    """
    if not facts.score_reads:
        return kept * dp
    inputs = inputs_at(facts, work, kept, *place)
    p = p_of(facts, work, kept, lse, inputs) if facts.keeps_scores else kept  # shared, it would need more registers
    dm = p * dp
    add_gradients(facts, work, dm, inputs, totals, shared)
    return times_slope(facts, work, p, dm, inputs, shared)


def no_totals(facts: BackwardFacts) -> list:
    """Zeros for the per-thread sums of each read; used by reads that all scores of a head have in common."""
    return [Float32(0.0) for _ in facts.score_reads]


def add_gradients(facts: BackwardFacts, work, dm: Float32, inputs: list, totals: list, shared: Shared):
    """Add an element's gradients of captured tensors to memory, or to `totals`."""
    values, ranges = values_of(facts.score.program, inputs, work.score_tensors, shared), ranges_of(facts.score.program)
    for number, read in enumerate(facts.score_reads):
        slope = lower(read.slope, inputs, work.score_tensors, shared).to(Float32)
        term = Float32(select_(dm == 0.0, Float32(0.0), dm * slope))
        if read.of_head:
            totals[number] = totals[number] + term
        else:
            add_unless_zero(address_of(facts, work, read.load, values, ranges), term)


def address_of(facts: BackwardFacts, work, load, values: list, ranges: list):
    sums = work.score_sums[facts.score_sums.index(load.slot)]
    at = place_of(load, values, ranges, sums) or (0,)
    return (sums.iterator + cute.crd2idx(at, sums.layout)).toint()


@cute.jit
def add_totals(facts: cutlass.Constexpr[BackwardFacts], work, totals: list):
    """Add a warp's `totals` to the gradients."""
    program = const_expr(facts.score.program)
    inputs = [Float32(0.0), work.b, work.h, Int32(0), Int32(0)]
    for number in range_constexpr(len(facts.score_reads)):
        read = const_expr(facts.score_reads[number])
        if const_expr(read.of_head):
            total = totals[number]
            for distance in range_constexpr(5):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << distance)
            if cute.arch.lane_idx() == 0:
                values = values_of(program, inputs, work.score_tensors)
                add_to_memory(address_of(facts, work, read.load, values, ranges_of(program)), total, 0)
