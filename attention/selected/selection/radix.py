"""The k-th largest of the keys in a CTA's buffer, by a radix select of 8-bit digits.

The first digit begins at the highest bit of the difference of the largest and smallest key: scores that have passed a
bound have similar exponents, and a histogram of fixed bits would have most of them in one bin. The select ends early
where a bin is selected as a whole.
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute import make_ptr

from cute_kernels.tile.bits import scan_lanes

from .config import DIGIT, DIGITS, VECTOR, WARP, TopFacts

LARGEST = 2**31 - 1


class KthLargest:
    """Radix select by all threads of a CTA."""

    def __init__(self, facts: TopFacts):
        self.facts, self.warps = facts, facts.threads // WARP

    @cute.jit
    def threshold(
        self,
        buffers: tuple,
        count: Int32,
        wanted: Int32,
        digits: cutlass.Constexpr,
    ) -> tuple:
        """(key, number): the `wanted` largest of more keys are those above the key, and the first so many equal to it.

        With fewer `digits` than DIGITS more keys may be above it. All of them must be visible to all threads.
        """
        sKey, _, sHist, sWarp, sFound = buffers
        threads, tidx = self.facts.threads, cute.arch.thread_idx()[0]
        lane, warp = tidx % WARP, tidx // WARP
        for i in cutlass.range(tidx, DIGIT * DIGITS, threads, unroll=1):
            sHist[i] = Int32(0)
        low, high = Int32(LARGEST), Int32(-LARGEST - 1)
        for i in cutlass.range(tidx, count, threads, unroll=1):
            low, high = cutlass.min(low, sKey[i]), cutlass.max(high, sKey[i])
        low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
        if lane == 0:
            sWarp[warp, 2], sWarp[warp, 3] = low, high
        cute.arch.sync_threads()
        low, high = sWarp[lane % self.warps, 2], sWarp[lane % self.warps, 3]
        low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")

        # Keys less `low` are searched in [base, base + last]; rank: of the key among them, from the largest
        base, last, rank = Uint32(0), Uint32(high - low), wanted
        shift = cutlass.max(Int32(24) - Int32(cute.arch.clz(high - low)), 0)
        key, equal, digit = low, Int32(0), Int32(0)
        searching = Int32(1)
        while searching != 0:
            for i in cutlass.range(tidx, count, threads, unroll=1):
                relative = Uint32(sKey[i] - low)
                if (relative >= base) & (relative - base <= last):
                    bin = Int32((relative - base) >> Uint32(shift))
                    cute.arch.atomic_add(sHist.iterator + (digit * DIGIT + bin), Int32(1))
            cute.arch.sync_threads()
            if warp == 0:
                self.find(sHist, digit * DIGIT, rank, sFound)
            cute.arch.sync_threads()
            bin, before, size = sFound[0], sFound[1], sFound[2]
            base = base + (Uint32(bin) << Uint32(shift))
            rank = rank - before
            if (rank == size) | (digit == digits - 1):  # the whole bin
                key, equal, searching = low + Int32(base) - 1, Int32(0), Int32(0)
            if const_expr(digits == DIGITS):
                if (shift == 0) & (rank < size):
                    key, equal, searching = low + Int32(base), rank, Int32(0)
            last = (Uint32(1) << Uint32(shift)) - 1
            shift = cutlass.max(shift - 8, 0)
            digit = digit + 1
        return key, equal

    @cute.jit
    def find(self, sHist: cute.Tensor, offset: Int32, rank: Int32, sFound: cute.Tensor):
        """Write (bin, entries in larger bins, entries in it) of the rank-th largest entry; executed by one warp."""
        lane, bins = cute.arch.lane_idx(), const_expr(DIGIT // WARP)
        top = DIGIT - 1 - bins * lane
        own, entries = Int32(0), cute.make_rmem_tensor(bins, Int32)
        for i in range_constexpr(bins // VECTOR):
            place = sHist.iterator + (offset + top + 1 - bins + VECTOR * i)
            place = make_ptr(Int32, place.toint(), AddressSpace.smem, assumed_align=4 * VECTOR)
            part = cute.make_tensor(entries.iterator + VECTOR * i, VECTOR)
            cute.autovec_copy(cute.make_tensor(place, VECTOR), part)
        for i in range_constexpr(bins):
            own = own + entries[i]
        upto = scan_lanes(own, WARP)
        before, found, size = upto - own, Int32(0), Int32(0)
        holds = (before < rank) & (rank <= upto)
        if holds:
            so_far = before
            for i in range_constexpr(bins):
                size_of = entries[bins - 1 - i]
                if (so_far < rank) & (rank <= so_far + size_of):
                    found, before, size = top - i, so_far, size_of
                so_far = so_far + size_of
            sFound[0], sFound[1], sFound[2] = found, before, size
