"""The prepare kernel, first of backward: LSE and delta of each row (row_tiles), zeros for dq_accum and its semaphores.

    delta = sum of dO * O over a row, minus the gradient of its LSE     (FlashAttention-2, Dao 2023)

If sinks need a gradient, each warp also stores the partial sum of -exp(sink - LSE) delta over its rows. torch adds the
partial sums per head, in a deterministic order.

A CTA processes one query tile. Four threads process a row, so that a warp reads 64 bytes of eight rows at a time.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.typing import AddressSpace

from cute_kernels.dtypes import cutlass_dtype

from ..forward.mask import LOG2E
from ..forward.problem import one_item
from ..forward.softmax import exp2, quad_sum
from .config import PREPARE_WARPS as WARPS
from .config import PrepareFacts, overlaps
from .row_tiles import DenseRows, PackedRows

THREADS = 32 * WARPS
ROW_THREADS = 4
VECTOR = 8  # elements of 16 bytes


class Prepare:
    """Compiles to one kernel per `PrepareFacts`."""

    def __init__(self, facts: PrepareFacts):
        self.facts = facts
        self.dtype = cutlass_dtype(facts.dtype)

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mdO: cute.Tensor,  # as O
        mLSE: cute.Tensor,  # (B, H, Sq), packed (H, total_q)
        mdLSE: cute.Tensor | None,  # as LSE
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        rows: cute.Tensor,  # (B * H * tiles, 2, tile_m) FP32; packed (H * tiles, ..)
        dq: cute.Tensor,  # (B * H * tiles, tile_m * D) FP32
        turns: cute.Tensor | None,  # (B * H * tiles, parts) int32; deterministic
        mSinks: cute.Tensor | None,  # (H,)
        sink_sums: cute.Tensor | None,  # (B * H * tiles, WARPS) FP32
        stream: cuda.CUstream,
    ):
        if const_expr(self.facts.packed):
            (total, heads, _), batch = mO.shape, 1
            seqlens = PackedRows(cu_q, cu_q, total, total)
            mO, mdO = (one_item(t, (1, 0, 2)) for t in (mO, mdO))
            mLSE = one_item(mLSE, (0, 1))
            mdLSE = None if const_expr(mdLSE is None) else one_item(mdLSE, (0, 1))
        else:
            batch, heads, total, _ = mO.shape
            heads, total = heads // self.facts.packed_heads, total * self.facts.packed_heads
            seqlens = DenseRows(total, total)
        tiles = rows.shape[0] // (batch * heads)
        self.kernel(mO, mdO, mLSE, mdLSE, seqlens, rows, dq, turns, mSinks, sink_sums).launch(
            grid=(tiles * heads * batch, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mdO: cute.Tensor,
        mLSE: cute.Tensor,  # (B, H, Sq)
        mdLSE: cute.Tensor | None,
        seqlens,
        rows: cute.Tensor,
        dq: cute.Tensor,
        turns: cute.Tensor | None,
        mSinks: cute.Tensor | None,
        sink_sums: cute.Tensor | None,
    ):
        facts = self.facts
        if const_expr(overlaps(facts.arch)):
            cute.arch.griddepcontrol_launch_dependents()
        tidx = cute.arch.thread_idx()[0]
        number = cute.arch.block_idx()[0]
        packed = const_expr(facts.packed_heads)
        extents = mO.shape[0], mO.shape[1] // packed
        tile, h, b = place_of(number, extents, cute.arch.grid_dim()[0])
        if const_expr(facts.packed):
            b, tile = seqlens.find_q(tile, facts.tile_m)
        seqlen = seqlens.rows_of(b)
        if const_expr(mSinks is not None):
            sink, of_sink = mSinks[h].to(Float32) * LOG2E, Float32(0.0)
        self.zero_sums(dq, number, tidx)
        if const_expr(facts.parts > 0):
            if tidx < facts.parts:
                turns[number, tidx] = Int32(0)
        for first in range_constexpr(0, facts.tile_m, THREADS // ROW_THREADS):
            mine = first + tidx // ROW_THREADS
            row = tile * facts.tile_m + mine
            inside = row < seqlen.rows
            delta, lse = Float32(0.0), Float32.inf
            if inside:
                delta = self.dot(mO, mdO, self.place(seqlen, h, row), tidx % ROW_THREADS)
            delta = quad_sum(delta)
            if inside:
                place = self.place(seqlen, h, row)
                lse = mLSE[place] * LOG2E
                if lse == -Float32.inf:
                    lse = Float32.inf  # a fully masked row has P = 0
                if const_expr(facts.lse_gradient):
                    delta = delta - mdLSE[place]
            if mine < facts.tile_m:
                if tidx % ROW_THREADS == 0:
                    rows[number, 0, mine] = lse
                    rows[number, 1, mine] = delta
            if const_expr(mSinks is not None):
                if inside:  # other rows have a delta of 0, but an LSE of inf
                    of_sink = of_sink - exp2(sink - lse) * delta
        if const_expr(mSinks is not None):
            if const_expr(facts.packed):
                if b == seqlens.cu_q.shape[0] - 1:  # rows after the last sequence, whatever their dO is
                    of_sink = Float32(0.0)
            of_sink = self.sum_of_rows(of_sink)
            if tidx % 32 == 0:
                sink_sums[number, tidx // 32] = of_sink

    def place(self, seqlen, h: Int32, row: Int32) -> tuple:
        """(batch, head, row) in O and LSE of a row of head h, or of the heads that it stands for."""
        packed = self.facts.packed_heads
        if packed == 1:
            return seqlen.b, h, seqlen.q0 + row
        return seqlen.b, h * packed + row % packed, row // packed

    @cute.jit
    def zero_sums(self, dq: cute.Tensor, number: Int32, tidx: Int32):
        """Zero dq_accum of a query tile."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        size = const_expr(self.facts.tile_m * self.facts.head_dim)
        at = dq.iterator.toint() + (Int64(number) * size + tidx * 4) * 4
        for i in range_constexpr(0, size, THREADS * 4):
            if const_expr(i + THREADS * 4 <= size) or tidx * 4 + i < size:
                place = make_ptr(Float32, at + i * 4, AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(zeros, cute.make_tensor(place, cute.make_layout(4)))

    @cute.jit
    def sum_of_rows(self, x: Float32) -> Float32:
        """Sum x over the rows of a warp. The four threads of a quad hold the same x."""
        for offset in (4, 8, 16):
            x = x + cute.arch.shuffle_sync_bfly(x, offset)
        return x

    @cute.jit
    def dot(self, mO: cute.Tensor, mdO: cute.Tensor, row: tuple, lane: Int32) -> Float32:
        """This thread's part of the sum of O * dO over a row."""
        total = Float32(0.0)
        for i in range_constexpr(self.facts.head_dim_v // (ROW_THREADS * VECTOR)):
            column = (i * ROW_THREADS + lane) * VECTOR
            o, do = (self.load(t, (*row, column)) for t in (mO, mdO))
            for v in range_constexpr(VECTOR):
                total = total + o[v].to(Float32) * do[v].to(Float32)
        return total

    def load(self, t: cute.Tensor, at: tuple) -> cute.Tensor:
        """Load VECTOR elements of a row."""
        offset = sum(Int64(i) * s for i, s in zip(at[:3], t.stride[:3], strict=True)) + at[3]
        pointer = make_ptr(self.dtype, t.iterator.toint() + offset * (self.dtype.width // 8), AddressSpace.gmem,
                           assumed_align=16)  # fmt: skip
        values = cute.make_rmem_tensor(VECTOR, self.dtype)
        atom = cute.make_copy_atom(CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        cute.copy(atom, cute.make_tensor(pointer, VECTOR), values)
        return values


def place_of(number, shape: tuple, count) -> tuple:
    """(tile, head, batch) of query tile `number` among the `count` tiles of (B, H) = shape."""
    batch, heads = shape
    tiles = count // (batch * heads)
    return number % tiles, number // tiles % heads, number // (tiles * heads)
