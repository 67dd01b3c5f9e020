"""What the compiler is kept from moving."""

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

# A sum of exponentials is never below 0, which ptxas does not know.
STORE_IF_NEGATIVE = """{ .reg .pred p, q;
setp.lt.f32 p, $0, 0f00000000; setp.lt.or.f32 q, $1, 0f00000000, p; @q st.shared.f32 [$2], $0; }"""


@dsl_user_op
def finish_first(a: Float32, b: Float32, address: Int32, *, loc=None, ip=None) -> None:
    """Waits that come after this are not moved up to where `a` and `b`, two sums of exponentials, are not there yet.

    ptxas moves a wait for products over arithmetic, but not over a store to shared memory: one that needs the sums, and
    that never happens.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (a, b, address)]
    llvm.inline_asm(
        None, operands, STORE_IF_NEGATIVE, "f,f,r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def read_here(register: str, *, loc=None, ip=None) -> Int32:
    """A special register of PTX, as "tid.x", read where this stands: nothing that comes of it is kept from before."""
    number = llvm.inline_asm(
        T.i32(), [], f"mov.u32 $0, %{register};", "=r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Int32(number)


# No arithmetic gives a NaN of this pattern, which ptxas does not know.
SELECT = "{ .reg .pred p; setp.eq.b32 p, $2, 0x7fffdead; selp.f32 $0, 0f00000000, $1, p; }"


@dsl_user_op
def after(value: Float32, other: Float32, *, loc=None, ip=None) -> Float32:
    """`value`, not to be had before `other` is."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (value, other)]
    result = llvm.inline_asm(
        T.f32(), operands, SELECT, "=f,f,f",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Float32(result)
