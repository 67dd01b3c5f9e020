"""Writers of the sm_90 store: how a chunk of D gets from registers to global memory.

    TmaWriter       through a ring of buffers in shared memory, by TMA:
                        warp 0             wait until the ring's buffer is free
                        all 128 threads    stmatrix -> fence
                        warp 0             TMA store of the chunk, commit
    PackedWriter    the same for FP8, 2 bytes per store to shared memory
    DirectWriter    element by element, if D's strides or contiguous extent are not multiples of 16 bytes, as TMA needs

A writer serves one work tile. The store calls begin_chunk, then for each piece of the chunk begin_piece and put, then
end_chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers as sm90_utils

from ...tile.barriers import PRODUCT_STORE
from ...tile.fp8 import packed, store_halves, turned
from ...tile.hopper import WARPGROUP
from ..contexts import StoreCtx
from . import formula
from .chunk import Chunk

SLAB_M = 64  # rows of one WGMMA


class TmaWriter:
    """D, and z if it is stored, through the warpgroup's ring."""

    def __init__(self, store, ctx: StoreCtx, tidx: Int32, warp: Int32):
        """store: the StoreSm90; tidx, warp: indices in the warpgroup."""
        self.store, self.ctx, self.tidx, self.warp = store, ctx, tidx, warp
        self.make_copies()
        # (TMA atom, (TMA, PIPE), (TMA, rest_m, rest_n, outer_m, L)) of each output
        self.stores = [(tma, *self.partition(tma, ctx.sD, gD)) for tma, gD in ctx.outs]
        self.rOuts = []  # of a chunk

    def partition(self, tma: cute.CopyAtom, sD: cute.Tensor, gD: cute.Tensor) -> tuple:
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )

    def make_copies(self) -> None:
        """The copy of a chunk from registers to shared memory, and its shape in registers."""
        store, sD = self.store, self.ctx.sD
        atom = sm90_utils.get_smem_store_op(store.layout_enum, store.dtype, Float32)
        layout_atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(not store.n_major, 4), cutlass.Float16)
        self.copy_r2s = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(layout_atom, self.ctx.tiled_mma))
        thread = self.copy_r2s.get_slice(self.tidx)
        self.tRS_sD = thread.partition_D(sD)  # (R2S, R2S_M, R2S_N, PIPE)
        self.shape = cute.shape(thread.partition_S(sD))[:3]

    def blocks(self) -> Int32:
        """The extent of outer_m."""
        return self.ctx.outs[0][1].shape[4]

    def extent(self, outer_m: Int32) -> tuple:
        """(M, N) inside which values of a tile are stored. TMA clips absent boxes."""
        return self.ctx.extent

    def new_chunk(self) -> cute.Tensor:
        """Registers for a chunk."""
        return cute.make_rmem_tensor(self.shape, self.store.dtype)

    def begin_chunk(self) -> None:
        self.rOuts = [self.new_chunk() for _ in self.ctx.outs]

    def begin_piece(self, first: int, count: int) -> cute.Tensor | None:
        """Begin with values first, first + 1, ... of the chunk; returns where z goes."""
        layout = cute.make_layout(count)
        self.parts = [cute.make_tensor(rOut.iterator + first, layout) for rOut in self.rOuts]
        return self.parts[1] if len(self.parts) > 1 else None

    def put(self, chunk: Chunk, first: int) -> None:
        """Convert a piece of the chunk."""
        self.parts[0].store(chunk.rD.load().to(self.store.dtype))

    def end_chunk(self, i: int, count: int, place: tuple) -> None:
        """Store the i-th of a tile's `count` chunks; place: as store_chunk's."""
        outs, group = len(self.stores), self.ctx.warpgroup
        for which in range(outs):
            number = i * outs + which
            buffer = group * self.store.buffers + number % self.store.buffers
            pending = self.store.pending(number, count * outs)
            self.store_chunk(self.rOuts[which], which, buffer, place, pending)

    @cute.jit
    def store_chunk(
        self,
        rOut: cute.Tensor,
        which: cutlass.Constexpr,  # output
        buffer: Int32,
        place: tuple,  # rest_m, (column of the warpgroup's tile, chunk in it), outer_m, L
        pending: cutlass.Constexpr,  # earlier stores that may still read their buffers
    ):
        """Store a chunk from registers through a buffer of the ring."""
        tma, bSG_sD, bSG_gD = self.stores[which]
        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        self.sync()
        self.write(rOut, buffer)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        if self.warp == 0:
            slab, (col0, e), *outer = place
            cute.copy(tma, bSG_sD[None, buffer], bSG_gD[None, slab, col0 // self.store.epi_n + e, *outer])
            cute.arch.cp_async_bulk_commit_group()

    def write(self, rOut: cute.Tensor, buffer: Int32) -> None:
        """Write a chunk to its buffer."""
        cute.copy(self.copy_r2s, rOut, self.tRS_sD[None, None, None, buffer])

    def sync(self) -> None:
        """Synchronize the 128 threads of the warpgroup."""
        cute.arch.barrier(barrier_id=PRODUCT_STORE + self.ctx.warpgroup, number_of_threads=WARPGROUP)


class PackedWriter(TmaWriter):
    """An FP8 D: a word per 8 columns of a chunk (tile.fp8)."""

    def make_copies(self) -> None:
        self.shape = SLAB_M * self.store.epi_n // WARPGROUP // 4  # words

    def new_chunk(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.shape, Int32)

    def begin_piece(self, first: int, count: int) -> None:
        return None

    def put(self, chunk: Chunk, first: int) -> None:
        for v in range(0, chunk.size, 4):
            self.rOuts[0][(first + v) // 4] = packed(chunk.rD, v, self.store.out_name)

    def write(self, rOut: cute.Tensor, buffer: Int32) -> None:
        """Write a chunk to its buffer.

        TMA's swizzle xors address bits 4 and up with bits 7 and up, as many as a buffer row has units of 16 bytes. The
        stores of a warp have no bank conflicts.
        """
        epi_n, n_major = self.store.epi_n, self.store.n_major
        row_bytes = epi_n if n_major else SLAB_M
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = tidx % 32, tidx // 32
        g, t = lane // 4, lane % 4
        base = self.ctx.sD.iterator.toint() + buffer * (SLAB_M * epi_n)
        for j in range(epi_n // 8):
            word = rOut[j]
            if n_major:  # a row of the buffer is a row of D
                swizzle = (g * row_bytes >> 3) & (row_bytes - 16)
                at = base + (warp * 16 + g) * row_bytes + ((j // 2 * 16) ^ swizzle) + j % 2 * 8 + 2 * t
                store_halves(word, at, at + 8 * row_bytes)
            else:  # a row is a column of D; a thread of transposed words has one column
                row, column = warp * 16 + g // 2 * 2, 2 * t + g % 2
                at = base + (j * 8 + column) * row_bytes
                swizzle = t * 16
                store_halves(turned(word, lane), at + (row ^ swizzle), at + ((row + 8) ^ swizzle))


class DirectWriter:
    """Element by element, from registers to global memory."""

    def __init__(self, store, ctx: StoreCtx, tidx: Int32, warp: Int32):
        self.store, self.ctx, self.rZ = store, ctx, None

    def blocks(self) -> Int32:
        """The extent of outer_m."""
        return self.ctx.outs[0][1].shape[2]

    def extent(self, outer_m: Int32) -> tuple:
        """(M, N) inside which values of a tile are stored: nothing of an absent box."""
        rows, columns = self.ctx.extent
        return (rows, columns * Int32(outer_m < self.blocks())) if self.store.boxes > 1 else (rows, columns)

    def begin_chunk(self) -> None:
        """Nothing is collected for a chunk."""

    def begin_piece(self, first: int, count: int) -> cute.Tensor | None:
        self.rZ = cute.make_rmem_tensor(count, Float32) if self.store.spec.stores_z else None
        return self.rZ

    def put(self, chunk: Chunk, first: int) -> None:
        """Store a piece of the chunk."""
        outs = self.ctx.outs
        self.store_values(chunk.rD, chunk.cD, outs[0][1], chunk.extent, chunk.outer[:2])
        if self.rZ is not None:
            self.store_values(self.rZ, chunk.cD, outs[1][1], chunk.extent, chunk.outer[:2])

    @cute.jit
    def store_values(self, rD: cute.Tensor, cD: list, mD: cute.Tensor, extent: tuple, outer: tuple):
        if const_expr(self.store.narrow):
            formula.store_bytes(rD, cD, mD, extent, outer, self.store.out_name)
        else:
            for v in cutlass.range_constexpr(cute.size(rD)):
                if cute.elem_less(cD[v], extent):
                    mD[cD[v][0], cD[v][1], outer[0], outer[1]] = rD[v].to(self.store.dtype)

    def end_chunk(self, i: int, count: int, place: tuple) -> None:
        """All pieces have been stored."""
