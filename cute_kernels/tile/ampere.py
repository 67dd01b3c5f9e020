"""Building blocks of mma.sync kernels: swizzled tiles in shared memory, cp.async, ldmatrix, mma."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.cute.typing import AddressSpace

from .element import MMA_K_BYTES, VECTOR_BYTES, Element
from .ptx import round_to_tf32

WARP = 32
LEAST_CP_ASYNC = 4  # bytes
CHUNK = VECTOR_BYTES  # bytes that ldmatrix reads per line, and the unit of the swizzle
ALIGN = 128  # bytes; all 32 banks


def log2(x: int) -> int:
    assert x > 0 and x & (x - 1) == 0, f"{x} is not a power of two"
    return x.bit_length() - 1


def mma_op(dtype, acc_dtype=cutlass.Float32):
    """mma.sync atom of 16 rows, 8 columns and 32 bytes of K for operands and accumulators of these compiler types."""
    if dtype.width == 32:  # FP32; tensor cores ignore the lower 13 bits
        return warp.MmaTF32Op((16, 8, MMA_K_BYTES * 8 // dtype.width))
    op = warp.MmaF16BF16Op if dtype.width == 16 else warp.MmaFP8Op
    return op(dtype, acc_dtype, (16, 8, MMA_K_BYTES * 8 // dtype.width))


@dataclass(frozen=True)
class OperandTile:
    """A (rows, tile_k) tile of A or B: its layout in a stage, and the threads that copy and read its elements.

    A stage holds lines along the contiguous mode: tile_k elements of one row, or all rows of one k. The 16-byte
    chunks of a line are permuted by an XOR with bits of the line index, so that eight lanes access 32 banks without
    conflicts both when they copy along a line and when ldmatrix reads one chunk from each of eight lines.

    Offsets are linear over disjoint bits: offset(line + 2^i, byte) differs from offset(line, byte) by an XOR and an
    addition that are known at compile time (`split`). So a thread needs one base address for any number of vectors.
    The methods accept Python integers and Int32, and are checked on the host.
    """

    rows: int
    tile_k: int
    k_major: bool
    vector: int  # elements of one copy
    threads: int
    warps: int  # warps that the rows are divided among
    is_b: bool
    element: Element

    def __post_init__(self):
        assert self.k_major or self.element.transposes, f"ldmatrix does not transpose {self.element}"

    @property
    def lines(self) -> int:
        return self.rows if self.k_major else self.tile_k

    @property
    def line_bytes(self) -> int:
        return self.element.width * (self.tile_k if self.k_major else self.rows)

    @property
    def bytes(self) -> int:
        return self.lines * self.line_bytes

    @property
    def vector_bytes(self) -> int:
        return self.vector * self.element.width

    @property
    def span(self) -> int:
        """Rows per warp."""
        return self.rows // self.warps

    @property
    def chunks(self) -> int:
        """Adjacent chunks that the XOR permutes: a power of two that divides the chunks of a line."""
        chunks = self.line_bytes // CHUNK
        return min(8, chunks & -chunks)

    def swizzle(self, line):
        """The XOR for a line, in bytes."""
        return ((line >> log2(8 // self.chunks)) & (self.chunks - 1)) << 4

    def offset(self, line, byte):
        return line * self.line_bytes + (byte ^ self.swizzle(line))

    def split(self, line: int, byte: int) -> tuple[int, int]:
        """(x, add): offset(l + line, b + byte) == (offset(l, b) ^ x) + add if no bit is set in both summands."""
        mask = (self.chunks - 1) * CHUNK
        return (byte & mask) ^ self.swizzle(line), line * self.line_bytes + (byte & ~mask)

    # ------------------------------------------------------------------ copying: vector index = thread + j * active

    @property
    def active(self) -> int:
        """Threads that copy; a small tile may have fewer vectors than the CTA has threads."""
        return min(self.threads, self.bytes // self.vector_bytes)

    @property
    def copies(self) -> int:
        return self.bytes // (self.vector_bytes * self.active)

    @property
    def stride(self) -> int:
        """Lines between two vectors of a thread, for vectors of 16 bytes."""
        return self.position(self.active)[0]

    def position(self, index):
        """(line, element) of a vector."""
        bits = log2(self.line_bytes // self.vector_bytes)
        return index >> bits, (index & ((1 << bits) - 1)) * self.vector

    # ------------------------------------------------------------------ reading: ldmatrix x4 = 16 rows x 32 bytes of k

    def lane_offset(self, lane, index_warp):
        """Offset of a lane's row of an 8 x 16-byte ldmatrix matrix, for the warp's first 16 rows and first MMA step.

        The four matrices of a fragment are ordered along rows first for A, along k first for B.
        """
        i, r = lane >> 3, lane & 7
        row_half, k_half = (i >> 1, i & 1) if self.is_b else (i & 1, i >> 1)
        row = index_warp * self.span + row_half * 8
        if self.k_major:
            return self.offset(row + r, k_half * CHUNK)
        return self.offset(k_half * self.element.vector + r, row * self.element.width)

    def step(self, i: int, k: int) -> tuple[int, int]:
        """`split` of the warp's i-th 16 rows and k-th MMA step."""
        if self.k_major:
            return self.split(16 * i, MMA_K_BYTES * k)
        return self.split(self.element.mma_k * k, 16 * self.element.width * i)


def rounded_to_tf32(rX: cute.Tensor) -> cute.Tensor:
    """Round an FP32 fragment to TF32; returns its words."""
    words = cute.make_rmem_tensor(rX.shape, Int32)
    for v in range(cute.size(rX)):
        words[v] = round_to_tf32(rX[v])
    return words


class TileSteps:
    """Steps of mma.sync mainloops on OperandTiles: copy a vector, load fragments, multiply them.

    Addresses are integers in bytes; shared-memory addresses have 32 bits.
    """

    def __init__(self, dtype):
        self.dtype = dtype

    @cute.jit
    def copy_vector(self, op: cutlass.Constexpr, source: Int64, to: Int32, valid: cutlass.Boolean):
        """Copy one vector, or zeros if it is not valid."""
        size = const_expr(op.vector_bytes)
        layout = cute.make_layout(((op.vector, 1), 1))  # ((vector, rest), copies)
        gX = cute.make_tensor(make_ptr(self.dtype, source, AddressSpace.gmem, assumed_align=size), layout)
        sX = cute.make_tensor(make_ptr(self.dtype, to, AddressSpace.smem, assumed_align=size), layout)
        if const_expr(size >= LEAST_CP_ASYNC):
            # With a false predicate, cp.async reads nothing and writes zeros.
            mode = const_expr(LoadCacheMode.GLOBAL if size == CHUNK else LoadCacheMode.ALWAYS)
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), self.dtype, num_bits_per_copy=8 * size)
            pred = cute.make_rmem_tensor((1, 1), cutlass.Boolean)  # (rest, copies)
            pred[0] = valid
            cute.copy(atom, gX, sX, pred=pred)
        else:
            value = self.dtype(0.0)
            if valid:
                value = gX[0]
            sX[0] = value

    @cute.jit
    def read(
        self,
        op: cutlass.Constexpr,
        k: cutlass.Constexpr,
        lane: Int32,
        stage: Int32,
        rX: cute.Tensor,
        first: cutlass.Constexpr = 0,
    ):
        """Load one operand's fragments of MMA step k by ldmatrix, 16 rows per instruction, starting at 16-row group
        `first`.

        rX: (16 bytes, MMA_M) for A, (8 bytes, MMA_N) for B; its size determines the number of rows.
        """
        # Lines along k need no transpose: a register of the tensor core holds adjacent elements along k.
        vector = const_expr(op.element.vector)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not op.k_major, 4), self.dtype)
        count = const_expr(cute.size(rX) // vector)
        rX = cute.make_tensor(rX.iterator, cute.make_layout((vector, count)))  # two n8 fragments of B are one x4
        for i in range_constexpr(count):
            x, add = op.step(first + i, k)
            at = make_ptr(self.dtype, stage + (lane ^ x) + add, AddressSpace.smem, assumed_align=CHUNK)
            cute.copy(atom, cute.make_tensor(at, vector), rX[None, i])

    @cute.jit
    def multiply(self, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
        """One MMA step, accumulated in acc's type. For FP32 operands tensor cores truncate the lower 13 bits."""
        atom = cute.make_mma_atom(mma_op(self.dtype, acc.element_type))
        if const_expr(self.dtype.width == 32):
            rA, rB = cute.recast_tensor(rA, Int32), cute.recast_tensor(rB, Int32)
        cute.gemm(atom, acc, rA, rB, acc)
