"""Inline PTX: what the compiler must not move or keep."""

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

# ptxas does not know that a sum of exponentials is never negative.
STORE_IF_NEGATIVE = """{ .reg .pred p, q;
setp.lt.f32 p, $0, 0f00000000; setp.lt.or.f32 q, $1, 0f00000000, p; @q st.shared.f32 [$2], $0; }"""


@dsl_user_op
def compute_before_waits(a: Float32, b: Float32, address: Int32, *, loc=None, ip=None) -> None:
    """`a` and `b`, two sums of exponentials, are computed before any wait for WGMMAs that follows.

    ptxas moves such a wait up over arithmetic, but not over a store to shared memory. This is a store that needs the
    sums and never happens, since no sum is negative.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (a, b, address)]
    llvm.inline_asm(
        None, operands, STORE_IF_NEGATIVE, "f,f,r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def read_special_register(register: str, *, loc=None, ip=None) -> Int32:
    """A special register of PTX, such as "tid.x", read at this place, so that no register holds it from before."""
    number = llvm.inline_asm(
        T.i32(), [], f"mov.u32 $0, %{register};", "=r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Int32(number)


# ptxas does not know that no arithmetic results in a NaN of this pattern.
SELECT = "{ .reg .pred p; setp.eq.b32 p, $2, 0x7fffdead; selp.f32 $0, 0f00000000, $1, p; }"


@dsl_user_op
def value_after(value: Float32, other: Float32, *, loc=None, ip=None) -> Float32:
    """`value`, which the compiler cannot use before `other` has been computed."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (value, other)]
    result = llvm.inline_asm(
        T.f32(), operands, SELECT, "=f,f,f",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Float32(result)
