"""Which blocks a pattern stores next, chosen on the GPU by one kernel, which writes the new pattern over the old one.

A lane is what is chosen from together: the whole pattern, or, of an even one, a block row. One CTA a lane. Bitmaps over
the lane's cells (the blocks that it could store, row by row) lie in shared memory:

    kept      the stored blocks of highest score, until `dropped` are left
    grown     of all other cells, the `dropped` of highest score
    place     how many bits come before a cell's own: a scan over the words of the bitmap of both

The highest k of n scores are found digit by digit (11, 11 and 10 bits): a histogram of those that agree with the k-th
in the digits before, and a scan over it. Of equal ones the earlier cells are taken, so the choice is that of a stable
sort. Counts and bits are all that threads add to, so the order in which they do decides nothing.

Works on every architecture: no TMA, no tensor cores.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.runtime.derived import written
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from ..scan import WARP, exclusive_scan
from .config import RegrowthFacts

DIGITS = (11, 11, 10)  # bits of a rank's, from the highest
BINS = 1 << max(DIGITS)
THREADS = {False: 1024, True: 512}  # by `even`
MOST_WORDS = {False: 8192, True: 2048}  # of a lane's bitmaps: three of them are 96 and 24 KB of shared memory
MAGNITUDE = 0x7FFFFFFF
INFINITE = 0x7F800000


class RegrowthKernel:
    """Compiles to one kernel per `RegrowthFacts`."""

    def __init__(self, facts: RegrowthFacts):
        self.even = facts.even
        self.threads, self.words = THREADS[facts.even], MOST_WORDS[facts.even]

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,  # (nnz,) float32
        candidates: cute.Tensor,  # (rows * cols,) float32
        crow_indices: cute.Tensor,  # (rows + 1,)
        col_indices: cute.Tensor,  # (nnz,)
        origin: cute.Tensor,  # (nnz,)
        cols: Int32,
        dropped: Int32,  # of a lane
        stream: cuda.CUstream,
    ):
        lanes = crow_indices.shape[0] - 1 if const_expr(self.even) else 1
        self.kernel(scores, candidates, crow_indices, col_indices, origin, cols, dropped).launch(
            grid=(lanes, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        candidates: cute.Tensor,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        origin: cute.Tensor,
        cols: Int32,
        dropped: Int32,
    ):
        @cute.struct
        class Storage:
            chosen: cute.struct.MemRange[Int32, self.words]
            ties: cute.struct.MemRange[Int32, self.words]
            before: cute.struct.MemRange[Int32, self.words]
            totals: cute.struct.MemRange[Int32, WARP]
            found: cute.struct.MemRange[Int32, 2]

        self.smem_bytes = Storage.size_in_bytes()
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        flat = cute.make_layout(self.words)
        chosen, ties = storage.chosen.data_ptr(), storage.ties.data_ptr()
        sChosen, sTies = cute.make_tensor(chosen, flat), cute.make_tensor(ties, flat)
        sBefore = cute.make_tensor(storage.before.data_ptr(), flat)  # and the histogram
        sTotals = cute.make_tensor(storage.totals.data_ptr(), cute.make_layout(WARP))
        sFound = cute.make_tensor(storage.found.data_ptr(), cute.make_layout(2))
        threads = const_expr(self.threads)
        tidx, lane = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        rows, stored = crow_indices.shape[0] - 1, col_indices.shape[0]
        cells = cols
        if const_expr(self.even):
            stored = stored // rows
        else:
            cells = rows * cols
        first, first_cell, words = lane * stored, lane * cells, (cells + 31) // 32
        # Ranks, the best first, as the integers that they are compared as.
        mScores = cute.domain_offset((first,), cute.recast_tensor(scores, Int32))
        mCandidates = cute.domain_offset((first_cell,), cute.recast_tensor(candidates, Int32))

        for i in cutlass.range(tidx, words, threads):
            sChosen[i] = 0
            sTies[i] = 0
        worst, left = self.select(mScores, stored, stored - dropped, False, sChosen, sBefore, sTotals, sFound, tidx)
        for p in cutlass.range(tidx, stored, threads):
            rank = self.rank(mScores[p])
            if rank <= worst:
                cell = self.cell_of(crow_indices, col_indices, first + p, rows, cols)
                if rank < worst:
                    cute.arch.atomic_or(chosen + cell // 32, Int32(1) << cell % 32)
                else:
                    cute.arch.atomic_or(ties + cell // 32, Int32(1) << cell % 32)
        self.take_ties(sChosen, sTies, sBefore, sTotals, words, left, tidx)

        worst, left = self.select(mCandidates, cells, dropped, True, sChosen, sBefore, sTotals, sFound, tidx)
        for cell in cutlass.range(tidx, words * 32, threads):
            better, equal = False, False
            if cell < cells:
                rank = self.rank_of_candidate(mCandidates[cell])
                absent = self.bit(sChosen, cell) == 0
                better, equal = absent & (rank < worst), absent & (rank == worst)
            better, equal = cute.arch.vote_ballot_sync(better), cute.arch.vote_ballot_sync(equal)
            if tidx % WARP == 0:
                sChosen[cell // 32] = sChosen[cell // 32] | better
                sTies[cell // 32] = equal
        self.take_ties(sChosen, sTies, sBefore, sTotals, words, left, tidx)

        for i in cutlass.range(tidx, words, threads):
            sBefore[i] = cute.arch.popc(sChosen[i])
        exclusive_scan(sBefore, words, sTotals, tidx, threads)
        for cell in cutlass.range(tidx, cells, threads):
            if self.bit(sChosen, cell) != 0:
                origin[first + self.place(sChosen, sBefore, cell)] = -1
        cute.arch.sync_threads()
        for p in cutlass.range(tidx, stored, threads):
            cell = self.cell_of(crow_indices, col_indices, first + p, rows, cols)
            if self.bit(sChosen, cell) != 0:
                origin[first + self.place(sChosen, sBefore, cell)] = first + p
        cute.arch.sync_threads()  # the old pattern is not read any more
        for cell in cutlass.range(tidx, cells, threads):
            if self.bit(sChosen, cell) != 0:
                col_indices[first + self.place(sChosen, sBefore, cell)] = cell % cols
        if const_expr(not self.even):
            for row in cutlass.range(tidx, rows, threads):
                crow_indices[row] = self.place(sChosen, sBefore, row * cols)

    @cute.jit
    def select(
        self,
        bits: cute.Tensor,  # (n,) scores, as integers
        n: Int32,
        k: Int32,
        growing: cutlass.Constexpr[bool],
        sChosen: cute.Tensor,
        sHistogram: cute.Tensor,
        sTotals: cute.Tensor,
        sFound: cute.Tensor,
        tidx: Int32,
    ):
        """(rank of the k-th best, how many of those with this rank are among the k). Growing: of cells not chosen yet.

        With k = 0 a rank that none is better than, and 0.
        """
        threads = const_expr(self.threads)
        known, left, shift = Int32(0), k, 32
        for digit in range_constexpr(len(DIGITS)):
            before, width = shift, DIGITS[digit]
            shift = before - width
            for i in cutlass.range(tidx, 1 << width, threads):
                sHistogram[i] = 0
            if tidx == 0:
                sFound[0] = 0
                sFound[1] = 0
            cute.arch.sync_threads()
            for i in cutlass.range(tidx, n, threads):
                rank = self.rank(bits[i])
                counts = rank == rank
                if const_expr(growing):
                    rank = self.rank_of_candidate(bits[i])
                    counts = self.bit(sChosen, i) == 0
                if const_expr(digit > 0):
                    counts = counts & (rank >> before == known)
                if counts:
                    # The highest digit of a negative rank is the lower one.
                    number = ((rank >> shift) + (1 << width - 1 if digit == 0 else 0)) & ((1 << width) - 1)
                    cute.arch.atomic_add(sHistogram.iterator + number, Int32(1))
            total = exclusive_scan(sHistogram, Int32(1 << width), sTotals, tidx, threads)
            for i in cutlass.range(tidx, 1 << width, threads):
                begin, end = Int32(sHistogram[i]), total
                if i + 1 < 1 << width:
                    end = Int32(sHistogram[i + 1])
                if begin < left and left <= end:
                    sFound[0] = i
                    sFound[1] = left - begin
            cute.arch.sync_threads()
            known = (known << width) + sFound[0] - (1 << width - 1 if digit == 0 else 0)
            left = Int32(sFound[1])
            cute.arch.sync_threads()
        return known, left

    @cute.jit
    def rank(self, bits: Int32):
        """Of a float's bits: ascends from the highest float to the lowest, NaN before all; both zeros have one."""
        magnitude = bits & MAGNITUDE
        rank = magnitude
        if bits >= 0 or magnitude == 0:
            rank = -1 - magnitude
        if magnitude > INFINITE:
            rank = Int32(-(2**31))
        return rank

    @cute.jit
    def rank_of_candidate(self, bits: Int32):
        """The same, with minus infinity as the lowest finite float."""
        return cutlass.min(self.rank(bits), Int32(INFINITE - 1))

    @cute.jit
    def take_ties(
        self,
        sChosen: cute.Tensor,
        sTies: cute.Tensor,
        sBefore: cute.Tensor,
        sTotals: cute.Tensor,
        words: Int32,
        left: Int32,
        tidx: Int32,
    ):
        """Choose the first `left` of the ties, too, and forget them. All threads call it; it ends with a barrier."""
        threads = const_expr(self.threads)
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, words, threads):
            sBefore[i] = cute.arch.popc(sTies[i])
        exclusive_scan(sBefore, words, sTotals, tidx, threads)
        for i in cutlass.range(tidx, words, threads):
            word = Int32(sTies[i])
            taken = Int32(0)
            for _ in cutlass.range(cutlass.min(left - sBefore[i], cute.arch.popc(word))):
                lowest = word & -word
                taken |= lowest
                word ^= lowest
            sChosen[i] = sChosen[i] | taken
            sTies[i] = 0
        cute.arch.sync_threads()

    @cute.jit
    def cell_of(self, crow_indices: cute.Tensor, col_indices: cute.Tensor, p: Int32, rows: Int32, cols: Int32):
        """Of a stored block."""
        cell = Int32(col_indices[p])
        if const_expr(not self.even):
            low, high = Int32(0), rows  # the last row that begins at p or before
            while high - low > 1:
                middle = (low + high) // 2
                if Int32(crow_indices[middle]) <= p:
                    low = middle
                else:
                    high = middle
            cell += low * cols
        return cell

    @cute.jit
    def bit(self, sBits: cute.Tensor, cell: Int32):
        return (sBits[cell // 32] >> cell % 32) & 1

    @cute.jit
    def place(self, sChosen: cute.Tensor, sBefore: cute.Tensor, cell: Int32):
        """How many chosen cells come before this one."""
        return sBefore[cell // 32] + cute.arch.popc(sChosen[cell // 32] & ((Int32(1) << cell % 32) - 1))


def fits(rows: int, cols: int, even: bool) -> bool:
    """Whether the kernel serves a pattern of so many block rows and columns."""
    return (cols if even else rows * cols) <= WARP * MOST_WORDS[even]


def regrown_on_gpu(
    scores: torch.Tensor, candidates: torch.Tensor, crow: torch.Tensor, col: torch.Tensor, cols: int, dropped: int,
    even: bool,
) -> torch.Tensor:  # fmt: skip
    """family.regrown of a pattern that `fits`."""
    origin = torch.empty_like(col)
    facts = RegrowthFacts(device_arch(col.get_device())[0].target, even)
    function_for(facts)(scores.contiguous(), candidates.contiguous(), crow, col, origin, cols, dropped)
    written(*((col,) if even else (crow, col)))  # rows that stay even begin where they did
    return origin
