"""Decoding from 8-bit floats: a warp's fragments of Q, of fp16, in the order along D in which it has K.

Q may be of bf16, whose range fp16 has not: rows are multiplied by powers of 2, and their scores by the inverses.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.element import BITS_16

from ..forward.softmax import quad_max

CHUNK_VALUES = 16  # along D, of one mma.sync
LANE_VALUES = 4  # of these, that a lane has
BIAS = 127  # of fp32's exponent
Q_EXPONENT = 14  # of the largest value of a row of Q, in fp16
LEAST_EXPONENT, LARGEST_EXPONENT = Q_EXPONENT + 1, 2 * BIAS  # of rows that are scaled by it, biased


@cute.jit
def q_fragments(facts: cutlass.Constexpr, mQ: cute.Tensor, row: Int32, rows: Int32) -> tuple:
    """(fragments (8, 1) of fp16, one for each 16 of D; what scores of a thread's two rows are to be multiplied by).

    A lane has four neighbours along D of rows `row` and `row` + 8, as it has of K: 8 bytes of each 32. Rows that do
    not exist are zeros.
    """
    dtype = cutlass_dtype(facts.dtype)
    count = const_expr(facts.head_dim // CHUNK_VALUES)
    column = cute.arch.lane_idx() % 4 * LANE_VALUES
    found = cute.make_rmem_tensor((LANE_VALUES, count, 2), dtype)
    found.fill(0.0)
    for r in range_constexpr(2):
        if row + 8 * r < rows:
            at = mQ[row + 8 * r, None].iterator.toint() + column * BITS_16.width
            for i in range_constexpr(count):
                place = make_ptr(dtype, at + i * 32, AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(LANE_VALUES)), found[None, i, r])
    factors = None
    if const_expr(dtype is not Float16):
        found, factors = to_fp16(found)
    fragments = []
    for i in range_constexpr(count):
        rQ = cute.make_rmem_tensor((8, 1), Float16)
        for r in range_constexpr(2):
            for e in range_constexpr(LANE_VALUES):
                rQ[e // 2 * 4 + r * 2 + e % 2] = found[e, i, r]
        fragments.append(rQ)
    return fragments, factors


@cute.jit
def to_fp16(found: cute.Tensor) -> tuple:
    """Values (4, count, 2) of two rows of bf16 times a power of 2 for each row, and its inverses (2,).

    A row's largest value is then between 2^14 and 2^15. What is too small for fp16 after that is less than 2^-38 of
    it, far below what fp32 sums keep.
    """
    result = cute.make_rmem_tensor(found.layout, Float16)
    factors = cute.make_rmem_tensor(2, Float32)
    for r in range_constexpr(2):
        largest = Float32(0.0)
        for i in range_constexpr(cute.size(found, mode=[1])):
            for e in range_constexpr(LANE_VALUES):
                value = found[e, i, r].to(Float32)
                largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
        bits = cute.make_rmem_tensor(1, Float32)
        bits[0] = quad_max(largest)
        exponent = cute.recast_tensor(bits, Int32)[0] >> 23
        exponent = cutlass.min(cutlass.max(exponent, LEAST_EXPONENT), LARGEST_EXPONENT)
        powers = cute.make_rmem_tensor(2, Int32)
        powers[0] = (2 * BIAS + Q_EXPONENT - exponent) << 23
        powers[1] = (exponent - Q_EXPONENT) << 23
        factor = cute.recast_tensor(powers, Float32)
        factors[r] = factor[1]
        for i in range_constexpr(cute.size(found, mode=[1])):
            for e in range_constexpr(LANE_VALUES):
                result[e, i, r] = (found[e, i, r].to(Float32) * factor[0]).to(Float16)
    return result, factors
