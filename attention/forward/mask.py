"""Score modifications before the softmax: the softcap, a score_mod, and masks."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import integer_after
from cute_kernels.traced.indices import InTile, Shared
from cute_kernels.traced.lower import lower

from ..masks import element_mask
from ..masks.score_mod import KV_INPUT, Q_INPUT, SCORE_INPUT, ScoreMod

AT_ONCE = 16  # scores of a thread whose positions, and values loaded for them, are in registers at a time
LOG2E = 1.4426950408889634


@cute.jit
def cap_scores(scores: cute.Tensor, twice: Float32):  # (rows, columns)
    """scores = c tanh(scores / c), in units of c: the remaining factor c is part of the softmax's scale.

    `twice` is 2 log2(e) scale / c, since tanh(y) = 1 - 2 / (1 + e^(2 y)).
    """
    for i in range_constexpr(cute.size(scores)):
        denominator = 1.0 + cute.math.exp2(scores[i] * twice, approx=True, ftz=True)
        scores[i] = 1.0 - 2.0 * cute.arch.rcp_approx(denominator)


@cute.jit
def change_scores(
    scores: cute.Tensor,  # (rows, columns) of this thread
    mod: cutlass.Constexpr[ScoreMod],
    tensors: tuple | None,  # inputs of the score_mod
    scale: Float32,
    source,
    row: Int32,  # of the thread's first row
    col0: Int32,  # first column of the tile
    tile,  # scheduler.QueryTile or problem.DecodeTile
    seqlen,  # seqlen.SeqlenInfo
    inside: cutlass.Constexpr[bool],  # True if the tile ends before the last column
):
    """scores = score_mod(scale * scores, b, h, q, kv)."""
    low, columns = cute.arch.lane_idx() % 4 * 2, const_expr(cute.size(scores, mode=[1]))
    for r in range_constexpr(cute.size(scores, mode=[0])):
        shared = Shared(SCORE_INPUT, KV_INPUT)
        h, q = source.heads.place(tile, row + 8 * r)
        if const_expr(mod.indexes(Q_INPUT)):
            q = cutlass.min(q, seqlen.rows - 1)  # tensors are not read past their ends
        q = seqlen.q_position(q)
        for c in range_constexpr(columns):
            if const_expr(mod.takes_positions and r + c > 0 and (r * columns + c) % AT_ONCE == 0):
                # Registers do not suffice for the loads of all scores at once, nor for their positions.
                low = integer_after(low, scores[r, c - 1] if const_expr(c > 0) else scores[r - 1, columns - 1])
            column = InTile(col0, const_expr(4 * columns), low, const_expr(c // 2 * 8 + c % 2))
            if const_expr(mod.indexes(KV_INPUT) and not inside):
                column = cutlass.min(column.index, seqlen.cols - 1)
            inputs = [scores[r, c] * scale, tile.b, h, q, seqlen.k_position(column)]
            scores[r, c] = lower(mod.program, inputs, tensors, shared)


@cute.jit
def mask_window(
    scores: cute.Tensor,  # (rows, columns) of this thread
    source,
    row: Int32,  # of the thread's first row
    col0: Int32,  # first column of the tile
    seqlen,  # seqlen.SeqlenInfo
):
    """Set scores to -inf where a row does not attend to a column."""
    for r in range_constexpr(cute.size(scores, mode=[0])):
        begin, end = source.bounds(row + 8 * r, seqlen)
        mine = col0 + cute.arch.lane_idx() % 4 * 2
        begin, end = begin - mine, end - mine
        for c in range_constexpr(cute.size(scores, mode=[1])):
            column = const_expr(c // 2 * 8 + c % 2)
            seen = column < end
            if const_expr(source.window.left):
                seen = seen and column >= begin
            scores[r, c] = select_(seen, scores[r, c], -Float32.inf)


@cute.jit
def mask_elements(
    scores: cute.Tensor,  # (rows, columns) of this thread
    kind,  # config.BlockKind
    source,  # block_source.BlockSource
    row: Int32,  # of the thread's first row
    col0: Int32,  # first column of the tile
    tile,  # scheduler.QueryTile
    seqlen,  # seqlen.SeqlenInfo
):
    """Set scores to -inf where the element mask is false, and past the last column."""
    low, columns = cute.arch.lane_idx() % 4 * 2, const_expr(cute.size(scores, mode=[1]))
    for r in range_constexpr(cute.size(scores, mode=[0])):
        h, q = source.heads.place(tile, row + 8 * r)
        if const_expr(kind.mask is not None and kind.mask.indexes(element_mask.Q_INPUT)):
            q = cutlass.min(q, seqlen.rows - 1)  # tensors are not read past their ends
        q = seqlen.q_position(q)
        shared = Shared(element_mask.KV_INPUT)
        for c in range_constexpr(columns):
            column = InTile(col0, const_expr(4 * columns), low, const_expr(c // 2 * 8 + c % 2))
            seen = column.index < seqlen.cols
            if const_expr(kind.mask is not None):
                if const_expr(kind.mask.indexes(element_mask.KV_INPUT)):
                    column = cutlass.min(column.index, seqlen.cols - 1)
                inputs = [tile.b, h, q, seqlen.k_position(column)]
                seen = seen & lower(kind.mask.program, inputs, source.mask_tensors, shared)
            scores[r, c] = select_(seen, scores[r, c], -Float32.inf)
