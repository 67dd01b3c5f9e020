"""The sm_90 store of a gated GEMM in which one consumer warpgroup has the gate's rows and the other those of `up`.

FP8 GEMMs with tiles of 128 rows and two consumer warpgroups are laid out this way. Thread i of both warpgroups has the
same rows and columns of its 64 x `tile_n`. Each warpgroup finishes every second chunk of 64 x `epi_n` columns; the
other one passes it its accumulators of that chunk, rounded to D's dtype as a plain GEMM would round them:

    warp 0               wait until no earlier TMA store reads shared memory
    both warpgroups      barrier: the rings are free
    all 256 threads      scales, rounding; accumulators of the other's chunks -> own ring
    both warpgroups      barrier: the rings are written
    all 128 threads      each own chunk: the other's accumulators from its ring -> activation(gate) * up
                         -> stmatrix to the same buffer -> fence
    warp 0               TMA store of the chunk, commit

Thread i reads what thread i of the other warpgroup has written, so accumulators are exchanged as vectors of 16 bytes in
the order of threads. A buffer of the ring holds a chunk in either form.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from ...tile.barriers import PRODUCT_GATE
from ...tile.element import VECTOR_BYTES
from ...tile.hopper import WARPGROUP
from ...tile.ptx import load_volatile
from ...traced.activations import ACTIVATIONS
from ..contexts import StoreCtx
from .chunk import Chunk
from .formula import Epilogue
from .store_sm90 import StoreSm90
from .writers_sm90 import SLAB_M

WORDS = VECTOR_BYTES // 4  # of a vector


class GatedStoreSm90(StoreSm90):
    """Store of activation(gate) * up, computed from the accumulators of two consumer warpgroups."""

    def __init__(self, facts, group_n: int, dtype):
        super().__init__(facts, group_n, dtype)
        self.activation = self.spec.activation
        self.spec = replace(self.spec, activation=None, gated=False)  # the terms of the plain GEMM
        self.epilogue = Epilogue(self.spec)
        self.values = SLAB_M * self.epi_n // WARPGROUP  # per chunk and thread
        self.vectors = self.values * dtype.width // 8 // VECTOR_BYTES

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, 1, MMA_N) of this warpgroup, FP32
        ctx: StoreCtx,  # warpgroup 0 has the gate
        places: tuple,  # (m, n, outer_m) of the tile, in a tuple
        batch: tuple,
        rank=None,
        following=None,
    ):
        # A branch, since the warpgroups pass on different chunks of their accumulators.
        if ctx.warpgroup == 0:
            self.store_chunks(0, acc, ctx, places[0], batch, following)
        else:
            self.store_chunks(1, acc, ctx, places[0], batch, following)

    @cute.jit
    def store_chunks(
        self,
        group: cutlass.Constexpr,  # warpgroup: it finishes chunks group, group + 2, ...
        acc: cute.Tensor,
        ctx: StoreCtx,
        place: tuple,  # (m, n, outer_m)
        batch: tuple,
        following,
    ):
        args, sD, extent = ctx.args, ctx.sD, ctx.extent
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        warp = cute.arch.make_warp_uniform(tidx // 32)
        out_m, out_n, outer_m = place
        col0, outer = out_n * self.tile_n, (outer_m, *batch)
        writer = self.writer(self, replace(ctx, warpgroup=group), tidx, warp)  # a constant
        # Load the scales of all chunks before the first barrier: later loads would each be waited for.
        columns = [None] * self.chunks
        if const_expr(self.each[1]):
            for e in range_constexpr(self.chunks):
                columns[e] = self.scales_of_columns(args.scale_n, col0 + e * self.epi_n, batch[0])
        turns = const_expr(2 * self.buffers)  # chunks that both rings hold
        for first in range_constexpr(0, self.chunks, turns):
            past = const_expr(min(first + turns, self.chunks))
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.sync_warpgroups(group, 0)
            for e in range_constexpr(first + 1 - group, past, 2):
                z = self.rounded(acc, e, args, columns[e], extent, outer)
                cute.autovec_copy(self.words(z), self.slots(sD, self.buffer(e, first), tidx))
                if const_expr(following is not None):
                    following.start(e, e == 1 - group)
            self.sync_warpgroups(group, 1)
            for e in range_constexpr(first + group, past, 2):
                buffer = const_expr(self.buffer(e, first))
                # Loaded after the barrier: otherwise the compiler hoists all chunks' activations above it, and spills.
                one = load_volatile(ctx.one)
                z = self.rounded(acc, e, args, columns[e], extent, outer, one)
                other = cute.make_rmem_tensor(self.values, self.dtype)
                cute.autovec_copy(self.slots(sD, buffer, tidx), self.words(other))
                rOut = writer.new_chunk()
                self.multiply_gate(rOut, *((z, other) if group == 0 else (other, z)))
                if const_expr(following is not None):
                    following.start(e, False)
                at = (out_m, (col0, e), outer_m, batch[0])
                # No store reads this buffer any more, so all of `buffers` stores may be in flight: no wait.
                writer.store_chunk(rOut, 0, Int32(buffer), at, self.buffers)
        if const_expr(following is not None):
            following.wait()  # in this branch: no WGMMA may be in flight where branches meet

    def buffer(self, e: int, first: int) -> int:
        """Index of chunk e's buffer in the ring of the warpgroup that passes it on; `first` is the first chunk that the
        rings hold now."""
        return (1 - e % 2) * self.buffers + (e - first) // 2

    def rounded(
        self, acc: cute.Tensor, e: int, args, columns: list | None, extent: tuple, outer: tuple, one=None
    ) -> cute.Tensor:
        """(values,) of chunk e as the plain GEMM stores them; computed after `one`, a 1.0, has been loaded."""
        rD, rZ = (cute.make_rmem_tensor(self.values, dtype) for dtype in (Float32, self.dtype))
        if one is not None and columns is not None:
            columns, one = [column * one for column in columns], None
        for v in range(self.values):
            x = acc[e * self.values + v]
            rD[v] = x if one is None else x * one
        self.multiply(rD, None, columns, 0)
        self.epilogue.apply(Chunk(args, rD, [], extent, outer))  # no remaining term reads the coordinates
        rZ.store(rD.load().to(self.dtype))
        return rZ

    def multiply_gate(self, rOut: cute.Tensor, gate: cute.Tensor, up: cute.Tensor) -> None:
        """rOut = activation(gate) * up, in FP32, rounded once."""
        x = gate.load().to(Float32)
        if self.activation is not None:
            x = ACTIVATIONS[self.activation](x)
        flat = cute.make_tensor(rOut.iterator, cute.make_layout(self.values))
        flat.store((x * up.load().to(Float32)).to(self.dtype))

    def words(self, values: cute.Tensor) -> cute.Tensor:
        """(WORDS, vectors) of a chunk in registers"""
        pointer = cute.recast_tensor(values, Int32).iterator
        return cute.make_tensor(pointer, cute.make_layout((WORDS, self.vectors)))

    def slots(self, sD: cute.Tensor, buffer: int, tidx: Int32) -> cute.Tensor:
        """(WORDS, vectors) of this thread in a buffer; vector i of consecutive threads is contiguous."""
        at = sD.iterator.toint() + buffer * (self.vectors * WARPGROUP * VECTOR_BYTES) + tidx * VECTOR_BYTES
        place = make_ptr(Int32, at, AddressSpace.smem, assumed_align=VECTOR_BYTES)
        return cute.make_tensor(place, cute.make_layout((WORDS, self.vectors), stride=(1, WORDS * WARPGROUP)))

    def sync_warpgroups(self, group: cutlass.Constexpr, which: int) -> None:
        """Synchronize the 256 threads of both warpgroups, which run different code: each arrives at the barrier on
        which the other one waits. Consecutive calls use different barriers (`which`), so no thread arrives at one
        twice."""
        first = PRODUCT_GATE + 2 * which
        cute.arch.barrier_arrive(barrier_id=first + 1 - group, number_of_threads=2 * WARPGROUP)
        cute.arch.barrier(barrier_id=first + group, number_of_threads=2 * WARPGROUP)
