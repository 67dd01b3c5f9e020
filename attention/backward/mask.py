"""Masks for transposed scores, whose rows are columns of the score matrix and whose columns are its rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.traced.indices import InTile, Shared
from cute_kernels.traced.lower import lower

from ..masks.element_mask import KV_INPUT, Q_INPUT


@cute.jit
def mask_window(
    scores: cute.Tensor,  # (rows, columns) of this thread, transposed
    source,  # q_tiles.WindowRows
    col: Int32,  # column of the score matrix for the thread's first row
    row0: Int32,  # row of the score matrix for the tile's first column
    seqlen,  # seqlen.SeqlenInfo
):
    """Set scores outside the window to -inf."""
    for r in range_constexpr(cute.size(scores, mode=[0])):
        begin, end = source.bounds(col + 8 * r, seqlen)
        mine = row0 + cute.arch.lane_idx() % 4 * 2
        begin, end = begin - mine, end - mine
        for c in range_constexpr(cute.size(scores, mode=[1])):
            row = const_expr(c // 2 * 8 + c % 2)
            seen = row < end
            if const_expr(source.window.right):
                seen = seen and row >= begin
            scores[r, c] = select_(seen, scores[r, c], -Float32.inf)


@cute.jit
def mask_elements(
    scores: cute.Tensor,  # (rows, columns) of this thread, transposed
    kind: cutlass.Constexpr,  # forward.config.BlockKind
    tensors: tuple,  # captured by its element mask: tensors, then scalars
    col: Int32,
    row0: Int32,
    b: Int32,
    h: Int32,
    seqlen,
):
    """Set scores to -inf where the element mask is False, and past the last column."""
    low, rows = cute.arch.lane_idx() % 4 * 2, const_expr(cute.size(scores, mode=[1]))
    for r in range_constexpr(cute.size(scores, mode=[0])):
        column = col + 8 * r
        inside = column < seqlen.cols
        if const_expr(kind.mask is not None and kind.mask.indexes(KV_INPUT)):
            column = cutlass.min(column, seqlen.cols - 1)  # no reads out of bounds
        column = seqlen.k_position(column)
        shared = Shared(Q_INPUT)
        for c in range_constexpr(rows):
            seen = inside
            if const_expr(kind.mask is not None):
                row = InTile(row0, const_expr(4 * rows), low, const_expr(c // 2 * 8 + c % 2))
                if const_expr(kind.mask.indexes(Q_INPUT)):
                    row = cutlass.min(row.index, seqlen.rows - 1)
                inputs = [b, h, seqlen.q_position(row), column]
                seen = seen & lower(kind.mask.program, inputs, tensors, shared)
            scores[r, c] = select_(seen, scores[r, c], -Float32.inf)
