"""Decode from an FP8 KV cache: merge the results of a CTA's warps, which have different tiles of the same rows.

    row maxima and row sums of all warps -> shared memory -> each warp's O times its weight -> shared memory
    -> sum over the warps, always in the same order -> the result, or one split of it

O replaces the rings in shared memory, which all warps have finished reading by then.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.ampere import WARP

from ...forward.config import ACC_PAD, DecodeFacts
from ...forward.heads import TileRows
from ...forward.softmax import OnlineSoftmax, exp2, quad_sum, rows_and_columns
from ..store import store_of_split
from .mainloop import ROWS, WarpState
from .q import LANE_VALUES

VECTOR = LANE_VALUES  # neighboring columns that a thread writes and reads
WIDTH = 4  # bytes of FP32


class Merge:
    """The warps' work after their last tiles."""

    def __init__(self, facts: DecodeFacts):
        self.facts, self.warps, self.store = facts, facts.config.groups, store_of_split(facts)
        self.pitch = facts.head_dim_v + ACC_PAD

    @cute.jit
    def __call__(
        self,
        c: WarpState,
        at_softmax: Int32,
        at_acc: Int32,
        sinks: cute.Tensor | None,  # (2,)
        v_scale: Float32 | None,
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        rows: TileRows,
        row0: Int32,  # first row of the tile
    ):
        lane = cute.arch.lane_idx()
        lse = self.normalize(c, at_softmax, sinks)
        self.write(c, at_acc)
        cute.arch.sync_threads()
        if c.warp == 0:
            if const_expr(mLSE is not None):
                rows.heads.store_lse(lse, self.store.of_tile(mLSE, rows.tile), rows, row0 + lane // 4, lane, True)
        self.store_o(rows.view(self.store.of_tile(mO, rows.tile)), at_acc, v_scale, row0, rows.end)

    @cute.jit
    def normalize(self, c: WarpState, at_softmax: Int32, sinks: cute.Tensor | None) -> cute.Tensor:
        """Multiply O by this warp's weight in its rows, and divide it by the row sums. Returns the rows' LSE (2,)."""
        softmax, out = c.softmax, rows_and_columns(c.acc_O)
        lane = cute.arch.lane_idx()
        softmax_of_warps = cute.make_tensor(  # (row max or row sum, row, warp)
            make_ptr(Float32, at_softmax, AddressSpace.smem, assumed_align=8), cute.make_layout((2, ROWS, self.warps))
        )
        for r in range_constexpr(2):
            row_sum = quad_sum(softmax.row_sum[r])
            if lane % 4 == 0:
                softmax_of_warps[0, lane // 4 + 8 * r, c.warp] = softmax.row_max[r]
                softmax_of_warps[1, lane // 4 + 8 * r, c.warp] = row_sum
        cute.arch.sync_threads()
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in range_constexpr(2):
            row = lane // 4 + 8 * r
            largest = softmax_of_warps[0, row, 0]
            for w in range_constexpr(1, self.warps):
                largest = cute.arch.fmax(largest, softmax_of_warps[0, row, w])
            scaled_max, total = softmax.scaled_max(largest), Float32(0.0)
            for w in range_constexpr(self.warps):
                total = total + softmax_of_warps[1, row, w] * exp2(
                    softmax_of_warps[0, row, w] * softmax.scale_log2 - scaled_max
                )
            row_max[r], row_sum[r] = largest, total
            softmax.factor[r] = exp2(softmax.row_max[r] * softmax.scale_log2 - scaled_max)
        softmax.rescale(out)
        lse = cute.make_rmem_tensor(2, Float32)
        OnlineSoftmax(softmax.scale_log2, row_max, row_sum, softmax.factor, False).finish(out, lse, sinks)
        return lse

    @cute.jit
    def write(self, c: WarpState, at_acc: Int32):
        """Write a warp's O (16, Dv) to shared memory, with its columns in order.

        A lane has four neighbors of each 16 columns: the first of mma.sync's two n8 tiles has the even columns.
        """
        lane = cute.arch.lane_idx()
        values = cute.make_tensor(c.acc_O.iterator, cute.make_layout((2, 2, cute.size(c.acc_O) // 4)))
        at = at_acc + ((c.warp * ROWS + lane // 4) * self.pitch + lane % 4 * VECTOR) * WIDTH
        for r in range_constexpr(2):
            for i in range_constexpr(self.facts.head_dim_v // 16):
                vector = cute.make_rmem_tensor(VECTOR, Float32)
                for j in range_constexpr(VECTOR):
                    vector[j] = values[j // 2, r, 2 * i + j % 2]
                cute.autovec_copy(vector, self.vector(at + (8 * r * self.pitch + 16 * i) * WIDTH))

    @cute.jit
    def store_o(self, mO: cute.Tensor, at_acc: Int32, v_scale: Float32 | None, row0: Int32, rows: Int32):
        """Store the sum over all warps to mO (rows, Dv), packed: the 16 rows from `row0` on that are below `rows`."""
        vectors = const_expr(self.facts.head_dim_v // VECTOR)  # of a row
        threads = const_expr(WARP * self.warps)
        width = const_expr(mO.element_type.width // 8)
        for begin in range_constexpr(0, ROWS * vectors, threads):
            number = begin + cute.arch.thread_idx()[0]
            row, column = number // vectors, number % vectors * VECTOR
            if row < cutlass.min(rows - row0, ROWS):
                total = cute.make_rmem_tensor(VECTOR, Float32)
                total.fill(0.0)
                for w in range_constexpr(self.warps):
                    part = cute.make_rmem_tensor(VECTOR, Float32)
                    at = at_acc + ((w * ROWS + row) * self.pitch + column) * WIDTH
                    cute.autovec_copy(self.vector(at), part)
                    for j in range_constexpr(VECTOR):
                        total[j] = total[j] + part[j]
                if const_expr(v_scale is not None):
                    for j in range_constexpr(VECTOR):
                        total[j] = total[j] * v_scale
                result = cute.make_rmem_tensor(VECTOR, mO.element_type)
                result.store(total.load().to(mO.element_type))
                at = mO[row0 + row, None].iterator.toint() + Int64(column * width)
                place = make_ptr(mO.element_type, at, AddressSpace.gmem, assumed_align=VECTOR * width)
                cute.autovec_copy(result, cute.make_tensor(place, cute.make_layout(VECTOR)))

    def vector(self, at: Int32) -> cute.Tensor:
        """View of four columns at an address in shared memory."""
        place = make_ptr(Float32, at, AddressSpace.smem, assumed_align=VECTOR * WIDTH)
        return cute.make_tensor(place, cute.make_layout(VECTOR))
