"""The sm_90 store of a gate whose rows are one consumer warpgroup's, and the rows that it multiplies the other's.

So it is in tiles of 128 rows of two warpgroups, as products of 8-bit floats have them. Thread i of both has the same
rows and columns of its 64x`tile_n`. Each warpgroup finishes every second chunk of 64 x `epi_n` columns, for which the
other one gives it its sums, rounded to D's dtype as the plain product would be:

    warp 0               wait until no store of before reads shared memory
    both warpgroups      meet: the rings are free
    all 256 threads      scales, rounding; sums of the chunks that the other finishes -> its own ring
    both warpgroups      meet: they are there
    all 128 threads      each chunk that it finishes: the other's sums from its ring -> activation(gate) * up
                         -> stmatrix to the same buffer -> fence
    warp 0               TMA store of the chunk, commit

A thread reads what the thread of its number has written, so sums are exchanged as vectors of 16 bytes, whose order in a
buffer is that of threads. A buffer of the ring holds a chunk of either.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from ..tile.barriers import PRODUCT_GATE
from ..tile.element import VECTOR_BYTES
from ..tile.hopper import WARPGROUP
from ..tile.ptx import load_volatile
from ..traced.activations import ACTIVATIONS
from . import epilogue
from .store_sm90 import SLAB_M, StoreSm90

WORDS = VECTOR_BYTES // 4  # of a vector


class GatedStoreSm90(StoreSm90):
    """Stores what two consumer warpgroups make of their accumulators."""

    def __init__(self, facts, group_n: int, dtype):
        super().__init__(facts, group_n, dtype)
        self.activation = self.spec.activation
        self.spec = replace(self.spec, activation=None, gated=False)  # what the plain product has
        self.values = SLAB_M * self.epi_n // WARPGROUP  # of a chunk and thread
        self.vectors = self.values * dtype.width // 8 // VECTOR_BYTES

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, 1, MMA_N) of this warpgroup, fp32
        args: epilogue.EpilogueArgs,
        outs: tuple,  # ((TMA atom, gD),)
        sD: cute.Tensor,  # (64, epi_n, PIPE)
        thr_mma,
        tiled_mma_group: cute.TiledMma,
        extent: tuple,  # (M, N)
        places: tuple,  # (m, n, outer_m) of the tile, in a tuple
        batch: tuple,
        group: cutlass.Int32,  # which consumer warpgroup: 0 has the gate
        anchor: cute.Pointer,  # 1.0 in shared memory
        rank=None,
    ):
        # A branch, for the two have other chunks of their accumulators to give away.
        if group == 0:
            self.store_turns(0, acc, args, outs[0], sD, tiled_mma_group, extent, places[0], batch, anchor)
        else:
            self.store_turns(1, acc, args, outs[0], sD, tiled_mma_group, extent, places[0], batch, anchor)

    @cute.jit
    def store_turns(
        self,
        group: cutlass.Constexpr,  # which warpgroup this is: it finishes chunks group, group + 2, ...
        acc: cute.Tensor,
        args: epilogue.EpilogueArgs,
        out: tuple,  # (TMA atom, gD)
        sD: cute.Tensor,
        tiled_mma_group: cute.TiledMma,
        extent: tuple,
        place: tuple,  # (m, n, outer_m)
        batch: tuple,
        anchor: cute.Pointer,
    ):
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        warp = cute.arch.make_warp_uniform(tidx // 32)
        out_m, out_n, outer_m = place
        col0, outer = out_n * self.tile_n, (outer_m, *batch)
        copy_r2s, tRS_sD, shape = self.copies(tiled_mma_group, sD, tidx)
        store = (out[0], *self.partition(out[0], sD, out[1]))
        # Those of all chunks, before the first barrier: later ones would each be waited for.
        columns = [None] * self.chunks
        if const_expr(self.each[1]):
            for e in range_constexpr(self.chunks):
                columns[e] = self.scales_of_columns(args.scale_n, col0 + e * self.epi_n, batch[0])
        turns = const_expr(2 * self.buffers)  # chunks that both rings hold
        for first in range_constexpr(0, self.chunks, turns):
            past = const_expr(min(first + turns, self.chunks))
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.meet(group, 0)
            for e in range_constexpr(first + 1 - group, past, 2):
                z = self.rounded(acc, e, args, columns[e], extent, outer)
                cute.autovec_copy(self.words(z), self.slots(sD, self.buffer(e, first), tidx))
            self.meet(group, 1)
            for e in range_constexpr(first + group, past, 2):
                buffer = const_expr(self.buffer(e, first))
                # After the barrier: else the compiler begins with all chunks' activations before it, and spills.
                one = load_volatile(anchor)
                z = self.rounded(acc, e, args, columns[e], extent, outer, one)
                other = cute.make_rmem_tensor(self.values, self.dtype)
                cute.autovec_copy(self.slots(sD, buffer, tidx), self.words(other))
                rOut = cute.make_rmem_tensor(shape, self.dtype)
                self.multiply_gate(rOut, *((z, other) if group == 0 else (other, z)))
                at = (out_m, (col0, e), outer_m, batch[0])
                # No store reads this buffer any more: waiting for so many of them waits for none.
                self.store_chunk(copy_r2s, rOut, tRS_sD, store, Int32(buffer), at, group, warp, self.buffers)

    def buffer(self, e: int, first: int) -> int:
        """The number of chunk e's buffer, in the ring of the warpgroup that gives it away; `first`: of the chunks that
        are in the rings together."""
        return (1 - e % 2) * self.buffers + (e - first) // 2

    def rounded(
        self, acc: cute.Tensor, e: int, args, columns: list | None, extent: tuple, outer: tuple, one=None
    ) -> cute.Tensor:
        """(values,) of chunk e, as the plain product stores them; not before `one`, a 1.0, is known."""
        rD, rZ = (cute.make_rmem_tensor(self.values, dtype) for dtype in (Float32, self.dtype))
        if one is not None and columns is not None:
            columns, one = [column * one for column in columns], None
        for v in range(self.values):
            x = acc[e * self.values + v]
            rD[v] = x if one is None else x * one
        self.multiply(rD, None, columns, 0)
        epilogue.apply(self.spec, args, rD, [], extent, outer)  # no term asks where its values are
        rZ.store(rD.load().to(self.dtype))
        return rZ

    def multiply_gate(self, rOut: cute.Tensor, gate: cute.Tensor, up: cute.Tensor) -> None:
        """rOut = activation(gate) * up, in fp32, rounded once"""
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
        """(WORDS, vectors) of this thread in a buffer. The threads' vectors of a number lie side by side."""
        at = sD.iterator.toint() + buffer * (self.vectors * WARPGROUP * VECTOR_BYTES) + tidx * VECTOR_BYTES
        place = make_ptr(Int32, at, AddressSpace.smem, assumed_align=VECTOR_BYTES)
        return cute.make_tensor(place, cute.make_layout((WORDS, self.vectors), stride=(1, WORDS * WARPGROUP)))

    def meet(self, group: cutlass.Constexpr, which: int) -> None:
        """All 256 threads of both warpgroups, which are in other code: each arrives at the barrier at which the other
        one waits. Barriers of the next meeting are others, so that nobody arrives at one twice."""
        first = PRODUCT_GATE + 2 * which
        cute.arch.barrier_arrive(barrier_id=first + 1 - group, number_of_threads=2 * WARPGROUP)
        cute.arch.barrier(barrier_id=first + group, number_of_threads=2 * WARPGROUP)
