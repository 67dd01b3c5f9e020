"""The sm_90 kernel with promoted accumulation that overlaps the store of a work tile with the next tile's first WGMMAs.

A block-sparse tile of few K-tiles spends a third of its time in the store, during which tensor cores would idle. The
accumulators of a chunk are free once the store has read them, so the WGMMAs of the next tile's first K-tile write
straight into them:

    consumer groups    for each work tile:
                           first K-tile times its factor, in the accumulators -> the other K-tiles (promoted_sm90)
                           for each chunk of the store: read its accumulators -> start the next tile's WGMMAs there
                               -> the chunk's barriers, stmatrix, TMA store
                           wait for these WGMMAs -> release their stage

No accumulator is cleared, and no register is added. If there is no next tile, or it has no K-tile, the WGMMAs run on
whatever shared memory holds and their result is never read: with a branch the compiler would wait for each WGMMA.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ...scheduler import TileScheduler
from ...tile.hopper import start_product
from ...tile.ptx import in_both_banks, read_after_wait
from ..epilogue.formula import EpilogueArgs
from ..kernel_sm90 import GemmSm90
from ..mainloops.promoted_sm90 import ScaledMainloopSm90, of_step


class AheadMainloopSm90(ScaledMainloopSm90):
    """Mainloop of a tile whose first K-tile has been multiplied. WGMMAs have 64 columns and A in registers."""

    @cute.jit
    def begin(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, 1, MMA_N)
        A: tuple,  # operand_a
        tCrB: cute.Tensor,  # (MMA, MMA_N, MMA_K, PIPE)
        stage: Int32,
        n: cutlass.Constexpr,
    ):
        """Start product n of the first K-tile, into accumulators that have been read."""
        a, b = A[1][None, 0, None, stage], tCrB[None, n, None, stage]  # (MMA, MMA_K)
        fragments = [(of_step(a, k), of_step(b, k)) for k in range(self.k_blocks[0])]
        sums = cute.append_ones(acc[None, 0, n], up_to_rank=3)
        start_product(A[0], sums, fragments.__getitem__, self.k_blocks[0], True)

    @cute.jit
    def finish(
        self,
        k_tiles,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, 1, MMA_N)
        A: tuple,
        tCrB: cute.Tensor,  # (MMA, MMA_N, MMA_K, PIPE)
        pipeline,
        read,  # of the first K-tile
        factors: cute.Tensor,  # of which the first K-tile's is in the first set
    ):
        """Multiply the first K-tile by its factor, and add the others; returns the read state after them."""
        operands = (tiled_mma, acc, self.make_parts(acc), A, tCrB)
        if k_tiles.count > 0:
            read.advance()
            last = k_tiles.count - 1
            if last > 0:
                self.load_factors(k_tiles, 1, factors, 1)
                pipeline.consumer_wait(read)
                self.start(operands, 0, None, read.index)
                self.multiply_all(acc, factors)
                for i in cutlass.range((last - 1) // 2, unroll=1):
                    for turn in range_constexpr(2):
                        self.load_factors(k_tiles, 2 * i + 2 + turn, factors, turn)
                        read = self.add_in_turns(operands, factors, 1 - turn, pipeline, read, True)
                if (last - 1) % 2 > 0:
                    self.load_factors(k_tiles, last, factors, 0)
                    read = self.add_in_turns(operands, factors, 1, pipeline, read, True)
                    read = self.add_in_turns(operands, factors, 0, pipeline, read, False)
                else:
                    read = self.add_in_turns(operands, factors, 1, pipeline, read, False)
            else:
                self.multiply_all(acc, factors)
        if k_tiles.count == 0:  # not the other branch of the same: that one spilled
            acc.fill(0.0)
            for n in range_constexpr(cute.size(acc, mode=[2])):
                read_after_wait(acc[None, 0, n])
        return read

    def factors_of(self, factors: cute.Tensor, turn: int) -> tuple:
        return in_both_banks(factors[turn], cute.arch.grid_dim()[1])

    def promote(self, sums: cute.Tensor, part: cute.Tensor, m: int, n: int, factors: tuple) -> None:
        """sums += part times the factor, from the bank of registers that has neither"""
        for v in range(cute.size(part)):
            sums[v] = sums[v] + part[v] * factors[1 - v % 2]

    def multiply_all(self, acc: cute.Tensor, factors: cute.Tensor) -> None:
        """All sums times the factor of the first K-tile."""
        factor = self.factors_of(factors, 0)[0]
        for v in range(cute.size(acc)):
            acc[v] = acc[v] * factor


class AheadGemmSm90(GemmSm90):
    """GemmSm90 of one consumer group, whose mainloop is an AheadMainloopSm90."""

    @cute.jit
    def consume(
        self,
        tiles: tuple,
        scheduler: TileScheduler,
        source,
        ranks: tuple,
        ring,
        operands: tuple,
        args: EpilogueArgs,
        store: tuple,
        warpgroup: Int32,
        anchor: cute.Pointer,
        exchange: tuple,
    ):
        """A consumer warpgroup: multiply and store every work tile."""
        first, step = tiles
        end = scheduler.end(first, step)
        outs, sD, thr_mma_group, tiled_mma_group, extent = store
        read = self.ring_state(pipeline.PipelineUserType.Consumer, warpgroup)
        m, n, l = self.tile(first, scheduler, ranks)
        bounds = source.bounds(m, n, l)
        k_tiles = source.for_tile(m, l, bounds)
        factors = self.mainloop.first_factors(k_tiles, ())
        Coming(self, operands, ring, read, k_tiles.count * Int32(first < end)).start_all()
        for index in cutlass.range(first, end, step, unroll=1):
            k_tiles = source.for_tile(m, l, bounds)
            place = self.places(k_tiles, n, warpgroup), (l, k_tiles.l)
            m, n, l = self.tile(index + step, scheduler, ranks)
            bounds = source.bounds(m, n, l)
            read = self.mainloop.finish(k_tiles, *operands, ring, read, factors)
            k_tiles = source.for_tile(m, l, bounds)
            self.mainloop.load_factors(k_tiles, 0, factors, 0)
            coming = Coming(self, operands, ring, read, k_tiles.count * Int32(index + step < end))
            self.store.store(
                operands[1], args, outs, sD, thr_mma_group, tiled_mma_group, extent, *place, warpgroup, anchor,
                coming=coming,
            )  # fmt: skip
        self.store.drain()

    def tile(self, index: Int32, scheduler: TileScheduler, ranks: tuple) -> tuple:
        """(m, n, l) of this CTA's tile of a work tile; past the last one, of the last."""
        m, n, l = scheduler.decode(cutlass.min(index, scheduler.count - 1))
        return m * self.cfg.cluster_m + ranks[0], n * self.cfg.cluster_n + ranks[1], l


@dataclass(frozen=True)
class Coming:
    """The next work tile, of `count` K-tiles. The store of the tile before calls `start` when it has read a chunk, and
    `wait` at its end."""

    kernel: AheadGemmSm90
    operands: tuple
    ring: object
    read: object  # the state of its first K-tile
    count: Int32

    def start_all(self) -> None:
        """Start and finish all WGMMAs of the CTA's first tile."""
        for n in range(cute.size(self.operands[1], mode=[2])):
            self.start(n)
        self.wait()

    @cute.jit
    def start(self, n: cutlass.Constexpr):
        """Start the WGMMAs of chunk n's columns; chunk 0 first waits for its operands."""
        if const_expr(n == 0):
            if self.count > 0:
                self.ring.consumer_wait(self.read)
        self.kernel.mainloop.begin(*self.operands, self.read.index, n)

    @cute.jit
    def wait(self):
        """Until these products are done. None may be in flight where a loop goes back: the compiler would wait for each
        of all products."""
        warpgroup.wait_group(0)
        for n in range_constexpr(cute.size(self.operands[1], mode=[2])):
            read_after_wait(self.operands[1][None, 0, n])
        if self.count > 0:
            self.ring.consumer_release(self.read)
