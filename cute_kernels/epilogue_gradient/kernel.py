"""dz = dy f'(z), and the sums of dz's columns, in one pass over memory.

    warps      one row each at a time, `VECTOR` neighboring columns a lane: 256 columns a CTA, 8 rows in turn
    lanes      loads of UNROLL rows of dy and z, then their products; sums of their own columns in registers
    CTA        groups of 8 x UNROLL rows in turn with the other `parts` of its columns, so that all CTAs read from one
               region of memory; adds up its 8 warps' sums in shared memory, and stores them as one row of `partial`

All CTAs are resident at once, and end together. Each sum has one order: rows of a warp, warps of a CTA, and then CTAs,
which torch adds up. Held by memory's rate: so instructions are counted, and registers leave room for CTAS of
them on a multiprocessor, whose warps compute while others wait.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from ..dtypes import cutlass_dtype
from ..tile.vectors import VECTOR, load, store, widened
from ..traced.lower import lower
from .config import COLUMNS, UNROLL, WARPS

WARP = 32


class EpilogueGradient:
    """The kernel of one `EpilogueGradientFacts`."""

    def __init__(self, facts):
        self.facts = facts
        self.dtype = cutlass_dtype(facts.dtype)
        self.threads = WARP * WARPS

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,  # (rows, cols), contiguous as z and dz are
        z: cute.Tensor,
        dz: cute.Tensor,
        partial: cute.Tensor | None,  # (parts, cols) fp32
        parts: Int32,  # CTAs that share a column of tiles
        stream: cuda.CUstream,
    ):
        self.kernel(dy, z, dz, partial).launch(
            grid=(cute.ceil_div(dy.shape[1], COLUMNS), parts, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, dy: cute.Tensor, z: cute.Tensor, dz: cute.Tensor, partial: cute.Tensor | None):
        tidx = cute.arch.thread_idx()[0]
        tile, part, _ = cute.arch.block_idx()
        parts = cute.arch.grid_dim()[1]
        warp, lane = tidx // WARP, tidx % WARP
        rows, cols = dy.shape
        column = tile * COLUMNS + lane * VECTOR
        inside = column < cols  # a vector lies inside or outside, since it divides cols
        at = cutlass.min(column, cols - VECTOR)
        sums = cute.make_rmem_tensor(VECTOR, Float32)
        sums.fill(0.0)
        for group in cutlass.range(part, cute.ceil_div(rows, WARPS * UNROLL), parts, unroll=1):
            first = group * (WARPS * UNROLL) + warp
            places = [Int64(cutlass.min(first + u * WARPS, rows - 1)) * cols + at for u in range(UNROLL)]
            loaded = [(load(dy, place), load(z, place)) for place in places]
            for u in range_constexpr(UNROLL):
                if first + u * WARPS < rows and inside:
                    self.multiply(*loaded[u], dz, places[u], sums)
        if const_expr(self.facts.sums):
            self.store_sums(sums, partial, warp, tile, part)

    @cute.jit
    def multiply(self, dy: cute.Tensor, z: cute.Tensor, dz: cute.Tensor, place: Int64, sums: cute.Tensor):
        """One lane's part of a row: stored, and added to its sums."""
        found = cute.make_rmem_tensor(VECTOR, self.dtype)
        dy, z = widened(dy), widened(z)
        for v in range_constexpr(VECTOR):
            value = lower(self.facts.derivative, [z[v]]).to(Float32) * dy[v]
            sums[v] = sums[v] + value
            found[v] = value.to(self.dtype)
        store(found, dz, place)

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
