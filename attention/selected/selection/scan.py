"""Prefix sums across the lanes of a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


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
