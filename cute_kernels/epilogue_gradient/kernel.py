"""dz = dy f'(z), and the sums of dz's columns, in one pass over memory.

    warps      one row each at a time, `VECTOR` neighbouring columns a lane: 256 columns a CTA, 8 rows in turn
    lanes      loads of UNROLL rows of dy and z, then their products; sums of their own columns in registers
    CTA        adds up its 8 warps' sums in shared memory, warp by warp, and stores them as one row of `partial`

So each sum has one order: rows of a warp, warps of a CTA, and then CTAs, which torch adds up. Held by memory's rate.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.typing import AddressSpace

from ..dtypes import cutlass_dtype
from ..traced.lower import lower
from .config import COLUMNS, ROWS, VECTOR, WARPS

WARP = 32
UNROLL = 4  # rows of a warp whose loads are in flight together


class EpilogueGradient:
    """The kernel of one `EpilogueGradientFacts`."""

    def __init__(self, facts):
        self.facts = facts
        self.dtype = cutlass_dtype(facts.dtype)
        self.threads = WARP * WARPS

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,  # (rows, cols), as z and dz
        z: cute.Tensor,
        dz: cute.Tensor,
        partial: cute.Tensor | None,  # (rows / ROWS rounded up, cols) fp32
        stream: cuda.CUstream,
    ):
        self.kernel(dy, z, dz, partial).launch(
            grid=(cute.ceil_div(dy.shape[1], COLUMNS), cute.ceil_div(dy.shape[0], ROWS), 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, dy: cute.Tensor, z: cute.Tensor, dz: cute.Tensor, partial: cute.Tensor | None):
        tidx = cute.arch.thread_idx()[0]
        tile, part, _ = cute.arch.block_idx()
        warp, lane = tidx // WARP, tidx % WARP
        rows, cols = dy.shape
        column = tile * COLUMNS + lane * VECTOR
        inside = column < cols  # a vector lies inside or outside, since it divides cols
        at = cutlass.min(column, cols - VECTOR)
        sums = cute.make_rmem_tensor(VECTOR, Float32)
        sums.fill(0.0)
        for step in cutlass.range(ROWS // (WARPS * UNROLL), unroll=1):
            first = part * ROWS + step * (WARPS * UNROLL) + warp
            numbers = [cutlass.min(first + u * WARPS, rows - 1) for u in range(UNROLL)]
            loaded = [(self.load(dy, row, at), self.load(z, row, at)) for row in numbers]
            for u in range_constexpr(UNROLL):
                row = first + u * WARPS
                if row < rows and inside:
                    self.multiply(*loaded[u], dz, row, column, sums)
        if const_expr(self.facts.sums):
            self.store_sums(sums, partial, warp, tile, part)

    def vector(self, t: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """VECTOR elements of a row, 16 bytes."""
        offset = Int64(row) * t.stride[0] + column
        pointer = make_ptr(self.dtype, t.iterator.toint() + offset * (self.dtype.width // 8), AddressSpace.gmem,
                           assumed_align=16)  # fmt: skip
        return cute.make_tensor(pointer, VECTOR)

    def atom(self) -> cute.CopyAtom:
        return cute.make_copy_atom(CopyUniversalOp(), self.dtype, num_bits_per_copy=128)

    def load(self, t: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        values = cute.make_rmem_tensor(VECTOR, self.dtype)
        cute.copy(self.atom(), self.vector(t, row, column), values)
        return values

    @cute.jit
    def multiply(self, dy: cute.Tensor, z: cute.Tensor, dz: cute.Tensor, row: Int32, column: Int32, sums: cute.Tensor):
        """One lane's part of a row: stored, and added to its sums."""
        found = cute.make_rmem_tensor(VECTOR, self.dtype)
        for v in range_constexpr(VECTOR):
            value = lower(self.facts.derivative, [z[v].to(Float32)]).to(Float32) * dy[v].to(Float32)
            sums[v] = sums[v] + value
            found[v] = value.to(self.dtype)
        cute.copy(self.atom(), found, self.vector(dz, row, column))

    @cute.jit
    def store_sums(self, sums: cute.Tensor, partial: cute.Tensor, warp: Int32, tile: Int32, part: Int32):
        """The sums of all warps of the CTA, a column a thread."""
        tidx = cute.arch.thread_idx()[0]
        smem = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((COLUMNS, WARPS)), 16)
        for v in range_constexpr(VECTOR):
            smem[tidx % WARP * VECTOR + v, warp] = sums[v]
        cute.arch.sync_threads()
        total = smem[tidx, 0]
        for w in range_constexpr(1, WARPS):
            total = total + smem[tidx, w]
        column = tile * COLUMNS + tidx
        if column < partial.shape[1]:
            partial[part, column] = total
