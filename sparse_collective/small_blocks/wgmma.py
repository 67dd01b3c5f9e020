"""WGMMA on operands that are chosen at run time: descriptors as numbers, and accumulators as a list of registers.

CuTe's `cute.gemm` takes tensors whose shared-memory descriptors it rebuilds wherever they are used. In a kernel that
branches for each small block those few instructions cost more than the product. Here a descriptor is its two halves:
the upper one static (swizzle and stride), the lower one an address in units of 16 bytes, to be added to.
"""

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

SWIZZLE = {128: 1, 64: 2, 32: 3}  # bytes of a swizzled row -> its code in a descriptor
MMA_M = 64
PTX_TYPE = {"bfloat16": "bf16", "float16": "f16"}


def descriptor_high(row_bytes: int) -> int:
    """Upper half of the descriptor of a tile whose rows of `row_bytes` are swizzled in groups of 8.

    Rows are along K of a K-major tile. Of one that is M- or N-major a row is one k, and all of the tile's M or N.
    """
    return SWIZZLE[row_bytes] << 30 | 8 * row_bytes >> 4


def descriptor_low(address: Int32, k_major: bool) -> Int32:
    """Lower half of the descriptor of a tile at a shared-memory address; no tile here uses the leading offset."""
    return ((address >> 4) & 0x3FFF) | (int(k_major) << 16)


@dsl_user_op
def multiply(
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
    """acc + A @ B for several 64-row slabs of A and one B, as WGMMAs of 64 x n x 16; returns the new accumulators.

    Args:
        acc: fp32 registers of this thread, n / 2 for each slab, one slab after the other.
        n: columns of B.
        a, b: lower halves of the descriptors of the first slab of A (64, 16) and of B (n, 16), both in shared memory.
        a_high, b_high: their upper halves.
        a_step: from one slab of A to the next, in units of 16 bytes.
        a_transposed, b_transposed: whether A is M-major, and B N-major.

    Must be executed by all four warps of a warpgroup, between warpgroup.fence and commit_group.
    """
    per_slab = n // 2
    total = len(acc)
    kind = PTX_TYPE[dtype]
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    lines = [".reg .pred p; .reg .b32 low; .reg .b64 da, db;", "setp.eq.u32 p, 0, 0;"]
    lines.append(f"mov.b64 db, {{${2 * total + 1}, {b_high}}};")
    for slab in range(total // per_slab):
        registers = ", ".join(f"${slab * per_slab + v}" for v in range(per_slab))
        lines.append(f"add.u32 low, ${2 * total}, {slab * a_step}; mov.b64 da, {{low, {a_high}}};")
        lines.append(f"{name} {{{registers}}}, da, db, p, 1, 1, {int(a_transposed)}, {int(b_transposed)};")
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in acc]
    operands += [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    out = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * total),
        operands,
        "{ " + " ".join(lines) + " }",
        ",".join(["=f"] * total + [str(i) for i in range(total)] + ["r", "r"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(total)]
