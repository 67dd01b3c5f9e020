"""Conversion of FP32 accumulators to FP8, and the amax reduction.

mma.sync and WGMMA leave a lane (g, t) = (lane / 4, lane % 4) two adjacent columns, 2 t and 2 t + 1, of every 8, in rows
g and g + 8. As FP8 these four are one register, a *word*, in the order (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
stmatrix stores registers of two adjacent 16-bit elements, so it cannot be used: a lane stores halves of words, two
adjacent FP8 elements. If columns are contiguous in memory, lanes of rows g and g + 1 swap halves first.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import T, dsl_user_op, select_

from .ptx import inline

# Saturating conversion: values beyond the largest finite one, and infinities, become that one; NaN stays NaN.
FORMATS = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}
# prmt selectors for a lane's word and the one of row g + 1 (even g) or g - 1: bytes 0 and 2 of both, or 1 and 3.
OF_EVEN_ROWS, OF_ODD_ROWS = 0x6240, 0x3715


@dsl_user_op
def pack(values: list, dtype: str, *, loc=None, ip=None) -> Int32:
    """Convert four FP32 values to FP8 in one register, the first in its lowest byte; saturating. sm_89 and newer."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in values]
    convert = f"cvt.rn.satfinite.{FORMATS[dtype]}.f32"
    text = f"{{ .reg .b16 l, h; {convert} l, $2, $1; {convert} h, $4, $3; mov.b32 $0, {{l, h}}; }}"
    return Int32(inline(T.i32(), operands, text, "=r,f,f,f,f", loc=loc, ip=ip))


def packed(rD: cute.Tensor, first: int, dtype: str) -> Int32:
    """The word of four accumulators from index `first` on, padded with zeros."""
    return pack([rD[first + v] if first + v < cute.size(rD) else Float32(0.0) for v in range(4)], dtype)


def byte(word: Int32, number: int) -> Uint8:
    return Uint8((word >> (8 * number)) & 255)


@dsl_user_op
def permuted(a: Int32, b: Int32, selector: Int32, *, loc=None, ip=None) -> Int32:
    """prmt: select four bytes of a (0 to 3) and b (4 to 7), each by four bits of `selector`."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b, selector)]
    return Int32(inline(T.i32(), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", loc=loc, ip=ip))


def turned(word: Int32, lane: Int32) -> Int32:
    """Exchange bytes between rows r = g - g % 2 and r + 1: rows (r), (r+1), (r+8), (r+9) of column 2 t + g % 2."""
    other = cute.arch.shuffle_sync_bfly(word, 4)
    return permuted(word, other, Int32(select_((lane & 4) == 0, Int32(OF_EVEN_ROWS), Int32(OF_ODD_ROWS))))


def store_halves(word: Int32, low: Int32, high: Int32) -> None:
    """Store the lower and the upper half of a word to two shared-memory addresses."""
    for half, at in ((word & 0xFFFF, low), ((word >> 16) & 0xFFFF, high)):
        pointer = make_ptr(Uint16, at, AddressSpace.smem, assumed_align=2)
        cute.make_tensor(pointer, 1)[0] = Uint16(half)


@dsl_user_op
def larger_magnitude(most: Float32, x: Float32, *, loc=None, ip=None) -> Float32:
    """max(most, |x|) for most >= 0; propagates NaN."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (most, x)]
    text = "{ .reg .f32 a; abs.f32 a, $2; max.NaN.f32 $0, $1, a; }"
    return Float32(inline(T.f32(), operands, text, "=f,f,f", loc=loc, ip=ip))


@dsl_user_op
def larger_magnitudes(most: Int32, pair: Int32, dtype: str, *, loc=None, ip=None) -> Int32:
    """`larger_magnitude` for registers of two 16-bit elements."""
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (most, pair)]
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    text = f"{{ .reg .b32 a; and.b32 a, $2, 0x7fff7fff; max.NaN.{kind} $0, $1, a; }}"
    return Int32(inline(T.i32(), operands, text, "=r,r,r", loc=loc, ip=ip))


# Nonnegative floats compare like their bits as integers, and NaN is the largest.
RAISE = """{ .reg .b32 most, lane; .reg .pred p; mov.b32 most, $1; redux.sync.max.s32 most, most, 0xffffffff;
mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p red.global.max.s32 [$0], most; }"""


@dsl_user_op
def raise_to_magnitude(to: Int64, value: Float32, *, loc=None, ip=None) -> None:
    """Atomic maximum of an FP32 value in global memory and all lanes' values, which must be nonnegative. NaN counts as
    the largest. The result does not depend on the order of CTAs."""
    operands = [Int64(to).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    inline(None, operands, RAISE, "l,f", side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def divided(x: Float32, y: Float32, *, loc=None, ip=None) -> Float32:
    """x / y rounded to nearest, for all values."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y)]
    return Float32(inline(T.f32(), operands, "div.rn.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip))


# The first quotient is within two units in the last place, the second within one, and the third is correctly rounded,
# since the remainder is exact. copysign preserves -0.
QUOTIENT = """{ .reg .f32 n, q, e; neg.f32 n, $2; mul.rn.f32 q, $1, $3;
fma.rn.f32 e, q, n, $1; fma.rn.f32 q, e, $3, q; fma.rn.f32 e, q, n, $1; fma.rn.f32 q, e, $3, q;
copysign.f32 $0, $1, q; }"""


@dsl_user_op
def quotient(x: Float32, y: Float32, inverse: Float32, *, loc=None, ip=None) -> Float32:
    """x / y rounded to nearest, for y > 0 and its inverse rounded to nearest.

    Requires y, its inverse and 2^-24 x to be normal numbers. For a smaller x the error is below 2^-100 y.
    """
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y, inverse)]
    return Float32(inline(T.f32(), operands, QUOTIENT, "=f,f,f,f", loc=loc, ip=ip))
