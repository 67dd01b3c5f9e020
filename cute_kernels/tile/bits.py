"""Bits in the words of a bitmap, and prefix sums across the lanes of a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def set_bit(sWords: cute.Tensor, number: Int32):
    """Set a bit of a bitmap in shared memory."""
    cute.arch.atomic_or(sWords.iterator + (number >> 5), Int32(1) << (number & 31))


@cute.jit
def lowest_bit(bits: Int32) -> Int32:
    """Number of the lowest bit that is set."""
    return cute.arch.popc((bits & -bits) - 1)


@cute.jit
def scan_lanes(own: Int32, lanes: cutlass.Constexpr) -> Int32:
    """Inclusive prefix sums across the first lanes of a warp, a power of two."""
    upto, lane, distance = own, cute.arch.lane_idx(), 1
    while const_expr(distance < lanes):
        other = cute.arch.shuffle_sync_up(upto, distance)
        if lane >= distance:
            upto = upto + other
        distance = distance * 2
    return upto
