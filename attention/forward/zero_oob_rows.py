"""Zeros in shared memory the rows of V past the end of a sequence, where those of the next sequence are.

Their columns of P are 0, but 0 times Inf or NaN is NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

VECTOR = 16  # bytes that one thread stores at once


def lines_of(layout) -> tuple[int, int]:
    """(bytes of a line, lines) of a stage of V's ring (Dv, tile_n, PIPE), of 16-bit elements.

    A row of V is cut into pieces as wide as the swizzle. First come the first pieces of all rows, one below the other,
    then their second pieces. A swizzle permutes 16-byte chunks within a line, so it does not matter to whole lines.
    """
    dim, rows, _ = (cute.size(layout, mode=[i]) for i in range(3))
    width = cute.crd2idx((0, 1, 0), layout)
    for piece in range(dim // width):
        if cute.crd2idx((piece * width, rows - 1, 0), layout) != ((piece + 1) * rows - 1) * width:
            raise ValueError(f"V's rows are not in lines of {width} elements: {layout}")
    return width * 2, dim // width * rows


@cute.jit
def zero_oob_rows(
    ring: Int32,  # address in shared memory
    layout: cutlass.Constexpr,  # of the ring (Dv, tile_n, PIPE), without its swizzle
    index: Int32,  # of the tile in the ring
    valid: Int32,  # rows of V to keep
    thread: Int32,
    threads: cutlass.Constexpr[int],
    barrier: Int32,  # a named barrier of these threads
):
    """Zero the rows from `valid` on of a tile that has been loaded, before `threads` threads issue products with it.

    Other warpgroups may do the same to the same tile, even while this one multiplies: they write the same zeros.
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
