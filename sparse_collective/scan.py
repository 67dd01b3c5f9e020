"""A prefix sum by all threads of a CTA, for the kernels that make tables of a pattern."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

WARP = 32


@cute.jit
def exclusive_scan(
    sCounts: cute.Tensor,  # (at least count,) in shared memory
    count: Int32,
    sTotals: cute.Tensor,  # (WARP,) in shared memory
    tidx: Int32,
    threads: cutlass.Constexpr[int],
) -> Int32:
    """Each of the first `count` entries becomes the sum of those before it; returns the sum of all, in every thread.

    All threads of the CTA call it, at most 1024 and whole warps. It begins and ends with a barrier. Each warp scans
    one run of entries.
    """
    warps = threads // WARP
    warp, lane = tidx // WARP, tidx % WARP
    share = cute.ceil_div(cute.ceil_div(count, WARP), warps) * WARP
    begin = cutlass.min(warp * share, count)
    end = cutlass.min(begin + share, count)
    cute.arch.sync_threads()

    total = Int32(0)
    for first in cutlass.range(begin, end, WARP):
        mine = Int32(0)
        if first + lane < end:
            mine = Int32(sCounts[first + lane])
        sum_ = mine
        for distance in range_constexpr(5):
            other = cute.arch.shuffle_sync_up(sum_, 1 << distance)
            if lane >= (1 << distance):
                sum_ += other
        if first + lane < end:
            sCounts[first + lane] = total + sum_ - mine
        total += cute.arch.shuffle_sync(sum_, WARP - 1)
    if lane == 0:
        sTotals[warp] = total
    cute.arch.sync_threads()

    every, before = Int32(0), Int32(0)
    if lane < warps:
        every = Int32(sTotals[lane])
        if lane < warp:
            before = every
    for distance in range_constexpr(5):
        every += cute.arch.shuffle_sync_bfly(every, 1 << distance)
        before += cute.arch.shuffle_sync_bfly(before, 1 << distance)
    for first in cutlass.range(begin, end, WARP):
        if first + lane < end:
            sCounts[first + lane] = Int32(sCounts[first + lane]) + before
    cute.arch.sync_threads()
    return every
