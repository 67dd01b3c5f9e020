"""Bitmaps in shared memory, and the block lists that they are made of."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.tile.bits import lowest_bit, scan_lanes

from .config import AHEAD, THREADS, WORD


@cute.jit
def ones(sWords: cute.Tensor, sOthers: cute.Tensor, end: Int32) -> Int32:
    """Number of bits that are set in both, in the words before `end`."""
    count = Int32(0)
    for w in cutlass.range(end, unroll=4):
        count = count + cute.arch.popc(sWords[w] & sOthers[w])
    return count


@cute.jit
def load(listed: cute.Tensor, start: Int32, count: Int32, end: Int32) -> cute.Tensor:
    """AHEAD columns of a thread, of those from `start` to `count` in a list; -1 for none, and for numbers that are not
    from 0 to `end`."""
    columns = cute.make_rmem_tensor(AHEAD, Int32)
    for u in range_constexpr(AHEAD):
        i = start + u * THREADS + cute.arch.thread_idx()[0]
        columns[u] = Int32(-1)
        if i < count:
            columns[u] = listed[i]
    for u in range_constexpr(AHEAD):
        if columns[u] >= end:
            columns[u] = Int32(-1)
    return columns


@cute.jit
def write_bits(columns: cute.Tensor, sWords: cute.Tensor) -> Int32:
    """Write the numbers of the bits that are set, ascending, by one warp; returns how many there are."""
    lane, total, words = cute.arch.lane_idx(), Int32(0), cute.ceil_div(columns.shape[0], WORD)
    for begin in cutlass.range(0, words, 32, unroll=1):
        rest = Int32(0)
        if begin + lane < words:
            rest = sWords[begin + lane]
        own = cute.arch.popc(rest)
        upto = scan_lanes(own, 32)
        place = total + upto - own
        while rest != 0:
            columns[place] = (begin + lane) * WORD + lowest_bit(rest)
            rest = rest & (rest - 1)
            place = place + 1
        total = total + cute.arch.shuffle_sync(upto, 31)
    return total
