"""All inline PTX: instructions without a CuTe function, and values that the compiler must not move or keep."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .element import BITS_16, VECTOR_BYTES, element_of


def _asm(result, operands: list, text: str, constraints: str, *, side_effects: bool, loc, ip):
    """Emit inline PTX with IR values as operands; returns a value of type `result`, or None."""
    return llvm.inline_asm(
        result, operands, text, constraints,
        has_side_effects=side_effects, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def inline(result, operands: list, text: str, constraints: str, *, side_effects: bool = False, loc=None, ip=None):
    """Emit inline PTX from other modules of this package; see _asm."""
    return _asm(result, operands, text, constraints, side_effects=side_effects, loc=loc, ip=ip)


# -- where values are computed --------------------------------------------------------------------------------

# ptxas does not know that a sum of exponentials is never negative.
STORE_IF_NEGATIVE = """{ .reg .pred p, q;
setp.lt.f32 p, $0, 0f00000000; setp.lt.or.f32 q, $1, 0f00000000, p; @q st.shared.f32 [$2], $0; }"""


@dsl_user_op
def compute_before_waits(a: Float32, b: Float32, address: Int32, *, loc=None, ip=None) -> None:
    """Force `a` and `b`, two sums of exponentials, to be computed before any subsequent wait for WGMMAs.

    ptxas moves such a wait up over arithmetic, but not over a store to shared memory. This is a store that depends on
    the sums and is never executed, since no sum is negative.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (a, b, address)]
    _asm(None, operands, STORE_IF_NEGATIVE, "f,f,r", side_effects=True, loc=loc, ip=ip)


# No arithmetic results in a NaN of this pattern, nor does a bitwise and of results. ptxas does not know this.
STORE_IF_ONES = "{ .reg .pred p; setp.eq.s32 p, $0, -1; @p st.shared.b32 [$1], $0; }"


@dsl_user_op
def store_if_ones(bits: Int32, address: Int32, *, loc=None, ip=None) -> None:
    """`compute_before_waits` for results of any sign; `bits` is the bitwise and of their bits."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (bits, address)]
    _asm(None, operands, STORE_IF_ONES, "r,r", side_effects=True, loc=loc, ip=ip)


def compute_all_before_waits(values: cute.Tensor, address: Int32) -> None:
    """Force an FP32 fragment to be computed before any subsequent wait for WGMMAs, at half an instruction per element.

    See compute_before_waits.
    """
    words = cute.recast_tensor(values, Int32)
    bits = words[0]
    for v in range(1, cute.size(words)):
        bits = bits & words[v]
    store_if_ones(bits, address)


@dsl_user_op
def read_special_register(register: str, *, loc=None, ip=None) -> Int32:
    """Read a PTX special register such as "tid.x" here, so that no register holds it before."""
    return Int32(_asm(T.i32(), [], f"mov.u32 $0, %{register};", "=r", side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def zero_here(*, loc=None, ip=None) -> Float32:
    """0.0, written to a register here, not after the subsequent wgmma.fence."""
    return Float32(_asm(T.f32(), [], "mov.b32 $0, 0;", "=f", side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def here(x: Int32, *, loc=None, ip=None) -> Int32:
    """x, computed before this point; LLVM might otherwise compute it after the subsequent wgmma.fence."""
    value = Int32(x).ir_value(loc=loc, ip=ip)
    return Int32(_asm(T.i32(), [value], "mov.b32 $0, $1;", "=r,r", side_effects=True, loc=loc, ip=ip))


# ptxas does not know that no arithmetic results in a NaN of this pattern.
SELECT = "{ .reg .pred p; setp.eq.b32 p, $2, 0x7fffdead; selp.f32 $0, 0f00000000, $1, p; }"


@dsl_user_op
def value_after(value: Float32, other: Float32, *, loc=None, ip=None) -> Float32:
    """`value`, with a dependency on `other`: the compiler cannot use it before `other` has been computed."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (value, other)]
    return Float32(_asm(T.f32(), operands, SELECT, "=f,f,f", side_effects=False, loc=loc, ip=ip))


@dsl_user_op
def integer_to_float(x: Int32, *, loc=None, ip=None) -> Float32:
    """`x` converted to FP32. Unlike float(x) + constant, LLVM cannot rewrite this to a conversion of x + constant."""
    value = Int32(x).ir_value(loc=loc, ip=ip)
    return Float32(_asm(T.f32(), [value], "cvt.rn.f32.s32 $0, $1;", "=f,r", side_effects=False, loc=loc, ip=ip))


SELECT_INTEGER = "{ .reg .pred p; setp.eq.b32 p, $2, 0x7fffdead; selp.b32 $0, 0, $1, p; }"


@dsl_user_op
def integer_after(value: Int32, other: Float32, *, loc=None, ip=None) -> Int32:
    """`value_after` for an integer, e.g. an address, so that a load cannot start before."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (value, other)]
    return Int32(_asm(T.i32(), operands, SELECT_INTEGER, "=r,r,f", side_effects=False, loc=loc, ip=ip))


def opaque(value: Int32 | Int64) -> Int32 | Int64:
    """The value, opaque to the compiler, which cannot rematerialize it elsewhere."""
    kind = type(value)
    return cute.arch.inline_ptx(f"mov.b{kind.width} {{$w0}}, {{$r0}};", write_only_types=[kind], read_only_args=[value])


def zero_of(count: Int32) -> Int32:
    """0, computed from a nonnegative number in a way that is opaque to the compiler.

    Added to the addresses in a loop, it keeps the compiler from computing them before the loop, where they would occupy
    registers throughout.
    """
    return cute.arch.inline_ptx("shr.u32 {$w0}, {$r0}, 31;", write_only_types=[Int32], read_only_args=[count])


# -- loads ----------------------------------------------------------------------------------------------------

VECTOR_WORDS = VECTOR_BYTES // 4  # registers
VECTOR_HALVES = BITS_16.vector


@dsl_user_op
def load_volatile(pointer: cute.Pointer, *, loc=None, ip=None) -> Float32:
    """Load an FP32 value from shared memory; the compiler may not move the load across a barrier."""
    address = pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    text = "ld.volatile.shared.f32 $0, [$1];"
    return Float32(_asm(T.f32(), [address], text, "=f,r", side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def in_both_banks(value: Float32, one: Int32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """The value twice, in an even and in an odd register, the two halves of a 64-bit result. `one` is 1, opaque to the
    compiler.

    Registers have two banks. An instruction with three operands from one bank takes an additional clock.
    """
    text = (
        "{.reg .b64 t; .reg .b32 u, z; mov.b32 u, $2; mov.b32 z, 0; mov.b64 t, {z, u}; "
        "mad.wide.u32 t, u, $3, t; mov.b64 {$0, $1}, t;}"
    )
    result = llvm.StructType.get_literal([T.f32()] * 2)
    operands = [Float32(value).ir_value(loc=loc, ip=ip), Int32(one).ir_value(loc=loc, ip=ip)]
    both = _asm(result, operands, text, "=f,=f,f,r", side_effects=False, loc=loc, ip=ip)
    return tuple(Float32(llvm.extractvalue(T.f32(), both, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def load_shared_word(address: Int32, *, loc=None, ip=None) -> Int32:
    """Load 32 bits from a shared-memory address, like load_volatile."""
    operands, text = [Int32(address).ir_value(loc=loc, ip=ip)], "ld.volatile.shared.b32 $0, [$1];"
    return Int32(_asm(T.i32(), operands, text, "=r,r", side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def bulk_load(to: Int32, source: Int64, size: int, barrier: Int32, *, loc=None, ip=None) -> None:
    """Bulk copy of `size` bytes from global to this CTA's shared memory, both at multiples of 16 bytes.

    Called by one thread; the bytes are counted by the mbarrier at the address `barrier`.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int32(to), Int64(source), Int32(barrier))]
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
    _asm(None, operands, text, "r,l,r", side_effects=True, loc=loc, ip=ip)


def load_vector(at: Int64, valid, stream: bool, words: int = VECTOR_WORDS, fresh: bool = False) -> tuple:
    """Load up to 16 bytes of global memory into up to four registers; zeros if not `valid` (None: always valid).

    stream: bypass L1. fresh: another kernel may have written the data since this one started, so the load must not be
    .nc.
    """
    registers = ", ".join(f"{{$w{i}}}" for i in range(words))
    registers, kind = (f"{{ {registers} }}", f".v{words}.b32") if words > 1 else (registers, ".b32")
    kind = f"{'' if fresh else '.nc'}{'.L1::no_allocate' if stream else ''}{kind}"
    load = f"ld.global{kind} {registers}, [{{$r0}}];"
    types = [Int32] * words
    if valid is None:
        return as_tuple(cute.arch.inline_ptx(load, write_only_types=types, read_only_args=[at]))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(words))
    text = f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} @p {load} }}"
    return as_tuple(cute.arch.inline_ptx(text, write_only_types=types, read_only_args=[at, Int32(valid)]))


def as_tuple(values) -> tuple:
    """The results of inline PTX as a tuple; a single result is not one."""
    return values if isinstance(values, tuple | list) else (values,)


def load_elements(at: Int64, step: Int64, valid) -> tuple:
    """Load eight 16-bit elements, `step` bytes apart in global memory, into four registers; zeros as in load_vector."""
    lines = [f".reg .b16 h<{VECTOR_HALVES}>;", ".reg .b64 a;", "mov.b64 a, {$r0};"]
    guard = ""
    if valid is not None:
        lines += [".reg .pred p;", "setp.ne.s32 p, {$r2}, 0;"] + [f"mov.b16 h{i}, 0;" for i in range(VECTOR_HALVES)]
        guard = "@p "
    for i in range(VECTOR_HALVES):
        lines += [f"{guard}ld.global.nc.b16 h{i}, [a];", "add.s64 a, a, {$r1};"]
    lines += [f"mov.b32 {{$w{i}}}, {{ h{2 * i}, h{2 * i + 1} }};" for i in range(VECTOR_WORDS)]
    args = [at, step] if valid is None else [at, step, Int32(valid)]
    text = "{ " + " ".join(lines) + " }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32] * VECTOR_WORDS, read_only_args=args)


# -- FP8 ------------------------------------------------------------------------------------------------------

# E5M2 is the upper byte of FP16.
E5M2_TO_FP16 = "prmt.b32 {$w0}, {$r0}, 0, 0x1404; prmt.b32 {$w1}, {$r0}, 0, 0x3424;"
E4M3_TO_FP16 = """{ .reg .b16 low, high; mov.b32 { low, high }, {$r0};
cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }"""
# Move exponent and mantissa to their FP16 positions; the result is 2^-8 times the value, since the biases differ by 8.
# Bit 7 of z is set if an element is NaN (0x7f), and becomes the exponent's highest bit. Elements 0 and 2, 1 and 3.
E4M3_TO_FP16_BY_BITS = """{ .reg .b32 m, z, a, b;
and.b32 m, {$r0}, 0x7f7f7f7f; add.u32 z, m, 0x01010101; and.b32 z, z, 0x80808080; or.b32 z, z, m;
shl.b32 a, {$r0}, 8; and.b32 a, a, 0x80008000; shl.b32 b, z, 7; and.b32 b, b, 0x7f807f80; or.b32 {$w0}, a, b;
and.b32 a, {$r0}, 0x80008000; shr.u32 b, z, 1; and.b32 b, b, 0x7f807f80; or.b32 {$w1}, a, b; }"""
BY_BITS_SCALE = 2.0**-8
E5M2_ACROSS = "prmt.b32 {$w0}, {$r0}, 0, 0x2404; prmt.b32 {$w1}, {$r0}, 0, 0x3414;"
E4M3_ACROSS = """{ .reg .b16 low, high; .reg .b32 a; prmt.b32 a, {$r0}, 0, 0x3120; mov.b32 { low, high }, a;
cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }"""


def float8_to_fp16(word: Int32, dtype: str, by_bits: bool) -> tuple:
    """Convert a register of four FP8 values to two registers of two FP16 values; the pairing depends on the dtype.

    by_bits: convert E4M3 without the instruction of sm_89 and newer; results are scaled by BY_BITS_SCALE.
    """
    text = E5M2_TO_FP16 if dtype == "float8_e5m2" else E4M3_TO_FP16_BY_BITS if by_bits else E4M3_TO_FP16
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[word])


def float8_to_fp16_across(word: Int32, dtype: str, by_bits: bool) -> tuple:
    """`float8_to_fp16` that pairs the first with the third and the second with the fourth value for all dtypes."""
    text = E5M2_ACROSS if dtype == "float8_e5m2" else E4M3_TO_FP16_BY_BITS if by_bits else E4M3_ACROSS
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[word])


# cvt puts the first operand into the upper half.
TO_E4M3 = """{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};
cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, { low, high }; }"""


def to_e4m3(values: list) -> Int32:
    """Convert four FP32 values to E4M3, the first in the lowest byte; saturates at 448, NaN stays NaN."""
    return cute.arch.inline_ptx(TO_E4M3, write_only_types=[Int32], read_only_args=values)


# Interleave the bytes of two rows, then those of two such pairs.
TRANSPOSE_BYTES = """{ .reg .b32 a, b, c, d;
prmt.b32 a, {$r0}, {$r1}, 0x5140; prmt.b32 b, {$r0}, {$r1}, 0x7362;
prmt.b32 c, {$r2}, {$r3}, 0x5140; prmt.b32 d, {$r2}, {$r3}, 0x7362;
prmt.b32 {$w0}, a, c, 0x5410; prmt.b32 {$w1}, a, c, 0x7632;
prmt.b32 {$w2}, b, d, 0x5410; prmt.b32 {$w3}, b, d, 0x7632; }"""


def transpose_bytes(rows: list) -> tuple:
    """Transpose a 4 x 4 matrix of bytes; the registers are its rows."""
    return cute.arch.inline_ptx(TRANSPOSE_BYTES, write_only_types=[Int32] * 4, read_only_args=rows)


# -- TF32 -----------------------------------------------------------------------------------------------------


@dsl_user_op
def round_to_tf32(x: Float32, *, loc=None, ip=None) -> Int32:
    """Round to TF32 (10 bits of mantissa), to nearest with ties away from zero; returns the bits."""
    value = Float32(x).ir_value(loc=loc, ip=ip)
    return Int32(_asm(T.i32(), [value], "cvt.rna.tf32.f32 $0, $1;", "=r,f", side_effects=False, loc=loc, ip=ip))


# -- stores ---------------------------------------------------------------------------------------------------


@dsl_user_op
def bulk_add(to: Int64, source: Int32, size: int, *, loc=None, ip=None) -> None:
    """Bulk reduction: add `size` bytes of FP32 in shared memory to global memory, both at multiples of 16 bytes.

    Called by one thread, after fence_proxy("async.shared"). The source may be overwritten after
    cp_async_bulk_commit_group and wait_group.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int64(to), Int32(source))]
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};"
    _asm(None, operands, text, "l,r", side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_vector_to_memory(to: Int64, values: cute.Tensor, offset: int, *, loc=None, ip=None) -> None:
    """Add four values atomically to FP32 values, `offset` bytes after a multiple of 16 bytes in global memory (sm_90).

    The additions of a warp at adjacent addresses are one request of 512 bytes.
    """
    operands = [Int64(to).ir_value(loc=loc, ip=ip), *(Float32(values[i]).ir_value(loc=loc, ip=ip) for i in range(4))]
    text = f"red.global.add.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
    _asm(None, operands, text, "l,f,f,f,f", side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_to_memory(to: Int64, value: Float32, offset: int, *, loc=None, ip=None) -> None:
    """Add a value atomically to the FP32 value `offset` bytes from an address in global memory."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int64(to), Float32(value))]
    _asm(None, operands, f"red.global.add.f32 [$0+{offset}], $1;", "l,f", side_effects=True, loc=loc, ip=ip)


ADD_UNLESS_ZERO = "{ .reg .pred p; setp.neu.f32 p, $1, 0f00000000; @p red.global.add.f32 [$0], $1; }"


@dsl_user_op
def add_unless_zero(to: Int64, value: Float32, *, loc=None, ip=None) -> None:
    """Add a value atomically to the FP32 value at an address in global memory, unless it is 0."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int64(to), Float32(value))]
    _asm(None, operands, ADD_UNLESS_ZERO, "l,f", side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_acquire(at: Int64, *, loc=None, ip=None) -> Int32:
    """Load 32 bits from global memory with acquire semantics."""
    operand = Int64(at).ir_value(loc=loc, ip=ip)
    text = "ld.acquire.gpu.global.b32 $0, [$1];"
    return Int32(_asm(T.i32(), [operand], text, "=r,l", side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def release_add(at: Int64, value: int, bulk: bool, *, loc=None, ip=None) -> None:
    """Add to a 32-bit value in global memory with release semantics.

    bulk: also releases bulk operations that this thread has waited for; requires sm_90.
    """
    operand = Int64(at).ir_value(loc=loc, ip=ip)
    text = f"{'fence.proxy.async; ' if bulk else ''}red.release.gpu.global.add.s32 [$0], {value};"
    _asm(None, [operand], text, "l", side_effects=True, loc=loc, ip=ip)


# -- MMA ------------------------------------------------------------------------------------------------------


@dsl_user_op
def _kept_in_place(values: list, *, loc=None, ip=None) -> list:
    """The values; arithmetic with them cannot be moved before this point."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in values]
    result = llvm.StructType.get_literal([T.f32()] * len(operands))
    constraints = ",".join(["=f"] * len(operands) + [str(i) for i in range(len(operands))])
    out = _asm(result, operands, "", constraints, side_effects=True, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(len(operands))]


def read_after_wait(acc: cute.Tensor) -> None:
    """Order reads of accumulators after the preceding wait for their WGMMAs.

    The compiler knows no order between a wait and arithmetic in registers. Without this it added a fragment before the
    wait, where the fragment was written in one loop iteration and added in the next.
    """
    for v, value in enumerate(_kept_in_place([acc[v] for v in range(cute.size(acc))])):
        acc[v] = value


WGMMA_TYPE = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


@dsl_user_op
def wgmma_slabs(
    acc: list,
    n: int,
    dtype: str,
    a: Int32,
    a_high: int,
    a_step: int,
    a_transposed: bool,
    b: Int32,
    b_high: int,
    b_transposed: bool,
    *,
    loc=None,
    ip=None,
) -> list:
    """acc + A @ B for several 64-row slabs of A and one B, by WGMMAs of 32 bytes of K; returns the new accumulators.

    Args:
        acc: this thread's FP32 registers, n / 2 per slab, slab by slab.
        n: columns of B.
        a, b: lower halves of the descriptors of the first slab of A (64 rows of 32 bytes) and of B (n rows of 32
            bytes), both in shared memory.
        a_high, b_high: their upper halves.
        a_step: distance between slabs of A, in units of 16 bytes.
        a_transposed, b_transposed: True if A is M-major, or B N-major; 16-bit elements only.

    Must be executed by all four warps of a warpgroup, between warpgroup.fence and commit_group.
    """
    per_slab = n // 2
    total = len(acc)
    kind = WGMMA_TYPE[dtype]
    element = element_of(dtype)
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{element.mma_k}.f32.{kind}.{kind}"
    turned = f", {int(a_transposed)}, {int(b_transposed)}" if element.transposes else ""
    lines = [".reg .pred p; .reg .b32 low; .reg .b64 da, db;", "setp.eq.u32 p, 0, 0;"]
    lines.append(f"mov.b64 db, {{${2 * total + 1}, {b_high}}};")
    for slab in range(total // per_slab):
        registers = ", ".join(f"${slab * per_slab + v}" for v in range(per_slab))
        lines.append(f"add.u32 low, ${2 * total}, {slab * a_step}; mov.b64 da, {{low, {a_high}}};")
        lines.append(f"{name} {{{registers}}}, da, db, p, 1, 1{turned};")
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in acc]
    operands += [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    result = llvm.StructType.get_literal([T.f32()] * total)
    constraints = ",".join(["=f"] * total + [str(i) for i in range(total)] + ["r", "r"])
    out = _asm(result, operands, "{ " + " ".join(lines) + " }", constraints, side_effects=True, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(total)]


@dsl_user_op
def sparse_wgmma_slabs(
    acc: list,
    n: int,
    dtype: str,
    a: Int32,
    a_high: int,
    a_step: int,
    b: Int32,
    b_high: int,
    b_transposed: bool,
    metadata: list,
    selector: int,
    accumulate: bool,
    *,
    loc=None,
    ip=None,
) -> list:
    """acc + A @ B, or A @ B, for several 64-row slabs of a 2:4 sparse A and one B: 64 bytes of K, half of A is stored.

    Args:
        metadata: this thread's register of each slab. With 16-bit elements, the lanes of `selector` (0 or 1) are read;
            with FP8 all lanes, and selector is 0. See cute_kernels.sparse24.format.
        accumulate: True to add to acc.
        others: as in wgmma_slabs; A is K-major, 64 rows of 32 bytes, and B has 64 bytes of K.
    """
    per_slab, total = n // 2, len(acc)
    slabs, kind, element = total // per_slab, WGMMA_TYPE[dtype], element_of(dtype)
    name = f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{2 * element.mma_k}.f32.{kind}.{kind}"
    turned = f", 0, {int(b_transposed)}" if element.transposes else ""
    lines = [f".reg .pred p; .reg .b32 low; .reg .b64 da, db; setp.ne.u32 p, {int(accumulate)}, 0;"]
    lines.append(f"mov.b64 db, {{${2 * total + 1}, {b_high}}};")
    for slab in range(slabs):
        registers = ", ".join(f"${slab * per_slab + v}" for v in range(per_slab))
        lines.append(f"add.u32 low, ${2 * total}, {slab * a_step}; mov.b64 da, {{low, {a_high}}};")
        word = f"${2 * total + 2 + slab}"
        lines.append(f"{name} {{{registers}}}, da, db, {word}, {selector}, p, 1, 1{turned};")
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in acc]
    operands += [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b, *metadata)]
    result = llvm.StructType.get_literal([T.f32()] * total)
    constraints = ",".join(["=f"] * total + [str(i) for i in range(total)] + ["r"] * (2 + slabs))
    out = _asm(result, operands, "{ " + " ".join(lines) + " }", constraints, side_effects=True, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(total)]


@dsl_user_op
def sparse_mma(acc: list, a: list, b: list, metadata: Int32, selector: int, dtype: str, *, loc=None, ip=None) -> list:
    """acc + A @ B for a 2:4 sparse A (16, 32) and B (32, 8) with 16-bit elements, or A (16, 64) and B (64, 8) in FP8;
    returns the new accumulators.

    Args:
        acc: this thread's 4 FP32 registers, as in mma.m16n8k16.
        a: 4 registers, as for a dense A whose rows are the 32 stored bytes of each row.
        b: 4 registers, those of two consecutive dense B.
        metadata: with 16-bit elements, the lanes of `selector` (0 or 1) are read; with FP8 all lanes, and selector is
            0. See cute_kernels.sparse24.format.

    All lanes of a warp execute it.
    """
    kind = WGMMA_TYPE[dtype]
    k = 2 * element_of(dtype).mma_k
    name = f"mma.sp::ordered_metadata.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32"
    d, of_a, of_b = (", ".join(f"${first + v}" for v in range(4)) for first in (0, 4, 8))
    text = f"{name} {{{d}}}, {{{of_a}}}, {{{of_b}}}, {{{d}}}, $12, {selector};"
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b, metadata)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in acc]
    result = llvm.StructType.get_literal([T.f32()] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 9 + [str(v) for v in range(4)])
    out = _asm(result, operands, text, constraints, side_effects=False, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), out, [v], loc=loc, ip=ip)) for v in range(4)]
