"""Stores of gradients from accumulators."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.element import BITS_16
from cute_kernels.tile.ptx import add_vector_to_memory

from ..forward.store_o import store_rows
from .config import FP32


@cute.jit
def store_fragment(acc: cute.Tensor, mX: cute.Tensor, row: Int32, rows: Int32, tiles_m: cutlass.Constexpr = 1):
    """Store an accumulator ((2, 2), tiles_m, columns / 8) to mX (rows, columns); see store_o.store_rows."""
    if const_expr(mX.element_type is Float32):
        store_fp32(acc, mX, row, rows, tiles_m)
    elif const_expr(cute.size(acc) // tiles_m % 16 == 0):
        store_rows(acc, mX, row, rows, tiles_m)
    else:
        store_pairs(acc, mX, row, rows, tiles_m)


@cute.jit
def store_fp32(acc: cute.Tensor, mX: cute.Tensor, row: Int32, rows: Int32, tiles_m: cutlass.Constexpr):
    """store_fragment for FP32, two adjacent columns at a time."""
    values = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for r in range_constexpr(2 * tiles_m):
        if row + 8 * r < rows:
            at = mX.iterator.toint() + (Int64(row + 8 * r) * mX.stride[0] + cute.arch.lane_idx() % 4 * 2) * FP32
            for i in range_constexpr(cute.size(acc) // (4 * tiles_m)):
                pair, first = cute.make_rmem_tensor(2, Float32), const_expr(2 * (r + 2 * tiles_m * i))
                for j in range_constexpr(2):
                    pair[j] = values[first + j]
                place = make_ptr(Float32, at + i * (8 * FP32), AddressSpace.gmem, assumed_align=2 * FP32)
                cute.autovec_copy(pair, cute.make_tensor(place, cute.make_layout(2)))


@cute.jit
def add_fragment(acc: cute.Tensor, mX: cute.Tensor, row: Int32, rows: Int32):
    """Add an accumulator ((2, 2), 1, columns / 8) to FP32 sums in memory, whose columns have the order of sums.py."""
    values = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for r in range_constexpr(2):
        if row + 8 * r < rows:
            at = mX.iterator.toint() + (Int64(row + 8 * r) * mX.stride[0] + cute.arch.lane_idx() % 4 * 4) * FP32
            for u in range_constexpr(cute.size(acc) // 8):
                four = [values[8 * u + 2 * r + v % 2 + v // 2 * 4] for v in range(4)]
                add_vector_to_memory(at, four, u * 16 * FP32)


@cute.jit
def store_pairs(acc: cute.Tensor, mX: cute.Tensor, row: Int32, rows: Int32, tiles_m: cutlass.Constexpr):
    """store_fragment for any number of columns that is a multiple of 8, two at a time."""
    values = cute.make_rmem_tensor(cute.size(acc), mX.element_type)
    values.store(cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc))).load().to(mX.element_type))
    words = cute.recast_tensor(values, Int32)  # (2 tiles_m rows, columns / 8)
    for r in range_constexpr(2 * tiles_m):
        if const_expr(isinstance(mX.stride[0], tuple)):  # rows of several heads
            at = mX[row + 8 * r, None].iterator.toint() + cute.arch.lane_idx() % 4 * 2 * BITS_16.width
        else:
            offset = Int64(row + 8 * r) * mX.stride[0] + cute.arch.lane_idx() % 4 * 2
            at = mX.iterator.toint() + offset * BITS_16.width
        for i in range_constexpr(cute.size(acc) // (4 * tiles_m)):
            word = cute.make_rmem_tensor(1, Int32)
            word[0] = words[r + 2 * tiles_m * i]
            if row + 8 * r < rows:
                place = make_ptr(Int32, at + i * 16, AddressSpace.gmem, assumed_align=4)
                cute.autovec_copy(word, cute.make_tensor(place, cute.make_layout(1)))
