"""Zero the rows of V in shared memory past the end of a sequence, which belong to the next sequence.

Their columns of P are 0, but 0 times Inf or NaN is NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

VECTOR = 16  # bytes that one thread stores at once


def lines_of(layout) -> tuple[int, int]:
    """(bytes of a line, lines) of a stage of V's ring (Dv, tile_n, PIPE) with 16-bit elements.

    A row of V is split into pieces as wide as the swizzle. The first pieces of all rows come first, one line each, then
    their second pieces. A swizzle permutes 16-byte chunks within a line, so it does not affect whole lines.
    """
    dim, rows, _ = (cute.size(layout, mode=[i]) for i in range(3))
    width = cute.crd2idx((0, 1, 0), layout)
    for piece in range(dim // width):
        if cute.crd2idx((piece * width, rows - 1, 0), layout) != ((piece + 1) * rows - 1) * width:
            raise ValueError(f"layout must store V's rows in lines of {width} elements, got {layout}")
    return width * 2, dim // width * rows


@cute.jit
def zero_oob_rows(
    ring: Int32,  # address in shared memory
    layout: cutlass.Constexpr,  # of the ring (Dv, tile_n, PIPE), without its swizzle
    index: Int32,  # stage of the tile
    valid: Int32,  # rows of V to keep
    thread: Int32,
    threads: cutlass.Constexpr[int],
    barrier: Int32,  # a named barrier of these threads
):
    """Zero the rows from `valid` on of a loaded tile, before `threads` threads issue WGMMAs with it.

    Other warpgroups may zero the same tile, even while this one multiplies: they write the same zeros.
    """
    width, lines = const_expr(lines_of(layout))
    rows = const_expr(cute.size(layout, mode=[1]))
    tile = ring + index * (lines * width)
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    for line in range_constexpr(0, lines, rows):
        begin, end = tile + (line + valid) * width, tile + (line + rows) * width
        for at in cutlass.range(begin + thread * VECTOR, end, threads * VECTOR, unroll=1):
            place = make_ptr(Int32, at, AddressSpace.smem, assumed_align=VECTOR)
            cute.autovec_copy(zeros, cute.make_tensor(place, cute.make_layout(4)))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
