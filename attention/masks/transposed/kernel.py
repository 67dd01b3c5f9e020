"""Kernels that transpose the lists of a block mask (dispatch.py).

MakeBitmaps: a warp for each row of blocks sets the bits of its columns in shared memory, and copies them to memory.

Transpose: a CTA for each head and 32 columns of blocks. A lane reads the word of one row, and 32 ballots transpose
these of a warp: lane c has a bit for each row that lists column c. Each warp has a part of the rows. It counts them,
and after the counts of all warps are known, it reads the words again and writes its rows.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.tile.bits import set_bit

from .config import ROWS, WARPS, WORD, WORDS, TransposeFacts


class MakeBitmaps:
    """Compiles to the kernel of `TransposeFacts` with rows."""

    def __init__(self, facts: TransposeFacts):
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        counts: cute.Tensor,  # (B, H, Mq) int32
        columns: cute.Tensor,  # (B, H, Mq, width) int32, in any order
        bits: cute.Tensor,  # (B, H, Mq, words) int32
        cols: Int32,  # Mk; other numbers among the columns are ignored
        stream: cuda.CUstream,
    ):
        rows = counts.shape[0] * counts.shape[1] * counts.shape[2]
        self.kernel(counts, columns, bits, cols).launch(
            grid=(cute.ceil_div(rows, ROWS), 1, 1), block=(ROWS * 32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, counts: cute.Tensor, columns: cute.Tensor, bits: cute.Tensor, cols: Int32):
        tidx = cute.arch.thread_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sBits = smem.allocate_tensor(Int32, cute.make_layout((WORDS, ROWS)), 16)
        warp, lane = cute.arch.make_warp_uniform(tidx // 32), tidx % 32
        sRow = sBits[None, warp]
        batch, heads, rows = counts.shape
        number, words = cute.arch.block_idx()[0] * ROWS + warp, bits.shape[3]
        if number < batch * heads * rows:
            m, head = number % rows, number // rows
            b, h = head // heads, head % heads
            for i in cutlass.range(lane, words, 32, unroll=1):
                sRow[i] = Int32(0)
            cute.arch.sync_warp()
            for i in cutlass.range(lane, counts[b, h, m], 32, unroll=1):
                column = columns[b, h, m, i]
                if (column >= 0) & (column < cols):
                    set_bit(sRow, column)
            cute.arch.sync_warp()
            for i in cutlass.range(lane, words, 32, unroll=1):
                bits[b, h, m, i] = sRow[i]


class Transpose:
    """Compiles to the kernel of `TransposeFacts` without rows."""

    def __init__(self, facts: TransposeFacts):
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        bits: cute.Tensor,  # (B, H, Mq, words) int32
        counts: cute.Tensor,  # (B, H, Mk) int32
        rows: cute.Tensor,  # (B, H, Mk, Mq) int32
        stream: cuda.CUstream,
    ):
        self.kernel(bits, counts, rows).launch(
            grid=(bits.shape[0] * bits.shape[1] * bits.shape[3], 1, 1), block=(WARPS * 32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, bits: cute.Tensor, counts: cute.Tensor, rows: cute.Tensor):
        tidx, number = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sCounts = smem.allocate_tensor(Int32, cute.make_layout((WORD, WARPS)), 16)
        warp, lane = cute.arch.make_warp_uniform(tidx // 32), tidx % 32
        heads, total, words = bits.shape[1], bits.shape[2], bits.shape[3]
        word, head = number % words, number // words
        b, h = head // heads, head % heads
        own = bits[b, h, None, word]  # (Mq,)
        column = word * WORD + lane
        span = cute.ceil_div(cute.ceil_div(total, 32), WARPS) * 32  # rows of a warp
        begin = warp * span
        end = cutlass.min(begin + span, total)

        count = Int32(0)
        for first in cutlass.range(begin, end, 32, unroll=1):
            count = count + cute.arch.popc(self.listed(own, first, total))
        sCounts[lane, warp] = count
        cute.arch.sync_threads()
        place, every = Int32(0), Int32(0)
        for w in range_constexpr(WARPS):
            if w < warp:
                place = place + sCounts[lane, w]
            every = every + sCounts[lane, w]
        if column < counts.shape[2]:
            if warp == 0:
                counts[b, h, column] = every
        for first in cutlass.range(begin, end, 32, unroll=1):
            mine = self.listed(own, first, total)
            while mine != 0:
                rows[b, h, column, place] = first + cute.arch.popc((mine & -mine) - 1)
                mine = mine & (mine - 1)
                place = place + 1

    @cute.jit
    def listed(self, own: cute.Tensor, first: Int32, total: Int32) -> Int32:
        """A bit for each of 32 rows from `first` on that list this lane's column."""
        lane = cute.arch.lane_idx()
        word, mine = Int32(0), Int32(0)
        if first + lane < total:
            word = own[first + lane]
        for c in range_constexpr(WORD):
            column = Int32(cute.arch.vote_ballot_sync((word >> c) & 1 != 0))
            if lane == c:
                mine = column
        return mine
