"""Decode from an FP8 KV cache: a warp's FP16 fragments of Q, in the order along D in which the warp has K.

Q may be BF16, whose range exceeds FP16's: rows are multiplied by powers of 2, and their scores by the inverses.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.element import BITS_16

from ...forward.softmax import quad_max

CHUNK_VALUES = 16  # along D, of one mma.sync
LANE_VALUES = 4  # of these, per lane
BIAS = 127  # of FP32's exponent
Q_EXPONENT = 14  # of the largest value of a row of Q, in FP16
LEAST_EXPONENT, LARGEST_EXPONENT = Q_EXPONENT + 1, 2 * BIAS  # range of biased exponents that are scaled to it


@cute.jit
def q_fragments(facts: cutlass.Constexpr, mQ: cute.Tensor, row: Int32, rows: Int32) -> tuple:
    """(FP16 fragments (8, 1), one per 16 of D; factors of the scores of a thread's two rows, or None).

    A lane has four neighbors along D of rows `row` and `row` + 8, as it has of K: 8 bytes of each 32. Rows past the end
    are zeros.
    """
    dtype = cutlass_dtype(facts.dtype)
    count = const_expr(facts.head_dim // CHUNK_VALUES)
    column = cute.arch.lane_idx() % 4 * LANE_VALUES
    values = cute.make_rmem_tensor((LANE_VALUES, count, 2), dtype)
    values.fill(0.0)
    for r in range_constexpr(2):
        if row + 8 * r < rows:
            at = mQ[row + 8 * r, None].iterator.toint() + column * BITS_16.width
            for i in range_constexpr(count):
                place = make_ptr(dtype, at + i * 32, AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(LANE_VALUES)), values[None, i, r])
    factors = None
    if const_expr(dtype is not Float16):
        values, factors = to_fp16(values)
    fragments = []
    for i in range_constexpr(count):
        rQ = cute.make_rmem_tensor((8, 1), Float16)
        for r in range_constexpr(2):
            for e in range_constexpr(LANE_VALUES):
                # Its pair, of the two that K's conversion produces, and its place in the pair.
                pair, at = (e % 2, e // 2) if const_expr(facts.by_bits) else (e // 2, e % 2)
                rQ[4 * pair + 2 * r + at] = values[e, i, r]
        fragments.append(rQ)
    return fragments, factors


@cute.jit
def to_fp16(values: cute.Tensor) -> tuple:
    """Values (4, count, 2) of two BF16 rows times a power of 2 per row, and the inverses (2,) of these powers.

    A row's largest value is then between 2^14 and 2^15. Values that underflow in FP16 are less than 2^-38 of it, far
    below the precision of FP32 accumulation.
    """
    result = cute.make_rmem_tensor(values.layout, Float16)
    factors = cute.make_rmem_tensor(2, Float32)
    for r in range_constexpr(2):
        largest = Float32(0.0)
        for i in range_constexpr(cute.size(values, mode=[1])):
            for e in range_constexpr(LANE_VALUES):
                value = values[e, i, r].to(Float32)
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
        for i in range_constexpr(cute.size(values, mode=[1])):
            for e in range_constexpr(LANE_VALUES):
                result[e, i, r] = (values[e, i, r].to(Float32) * factor[0]).to(Float16)
    return result, factors
