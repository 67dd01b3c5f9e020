"""The schedule that overlaps the store of a work tile with the next tile's first WGMMAs, under promoted accumulation.

A block-sparse tile of few K-tiles spends a third of its time in the store, during which tensor cores would idle. The
accumulators of a chunk are free once the store has read them, so the WGMMAs of the next tile's first K-tile write
straight into them:

    consumer groups    for each work tile:
                           first K-tile times its factor, in the accumulators -> the other K-tiles
                               (mainloops/first_in_place_sm90)
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

from ...tile.ptx import read_after_wait
from ..contexts import ConsumerCtx, Tile, WorkTiles
from ..mainloops.first_in_place_sm90 import FirstInPlaceSm90
from .cooperative import Cooperative


class OverlapStore(Cooperative):
    """A cooperative kernel whose mainloop is a FirstInPlaceSm90."""

    @cute.jit
    def consume(self, ctx: ConsumerCtx):
        """A consumer warpgroup: multiply and store every work tile."""
        tiles, source = ctx.tiles, ctx.tiles.source
        end = tiles.end()
        read = self.ring_state(pipeline.PipelineUserType.Consumer, ctx.group)
        m, n, l = self.place(tiles, tiles.first)
        bounds = source.bounds(m, n, l)
        k_tiles = source.for_tile(m, l, bounds)
        factors = self.mainloop.factors.first(Tile((n, 1, 0), l, k_tiles), ctx)
        NextTile(self.mainloop, ctx, read, k_tiles.count * Int32(tiles.first < end)).start_all()
        for index in cutlass.range(tiles.first, end, tiles.step, unroll=1):
            k_tiles = source.for_tile(m, l, bounds)
            places, batch = self.places(Tile((n, 1, 0), l, k_tiles), ctx.warpgroup), (l, k_tiles.l)
            m, n, l = self.place(tiles, index + tiles.step)
            bounds = source.bounds(m, n, l)
            read = self.mainloop.finish(k_tiles, ctx, read, factors)
            k_tiles = source.for_tile(m, l, bounds)
            self.mainloop.factors.load(k_tiles, 0, factors, 0)
            following = NextTile(self.mainloop, ctx, read, k_tiles.count * Int32(index + tiles.step < end))
            self.store.store(ctx.acc, ctx.out, places, batch, following=following)
        self.store.drain()

    def place(self, tiles: WorkTiles, index: Int32) -> tuple:
        """(m, n, l) of this CTA's tile of a work tile; past the last one, of the last."""
        m, n, l = tiles.scheduler.decode(cutlass.min(index, tiles.scheduler.count - 1))
        return m * tiles.cluster[0] + tiles.rank_m, n * tiles.cluster[1] + tiles.rank_n, l


@dataclass(frozen=True)
class NextTile:
    """The next work tile, of `count` K-tiles. The store of the tile before calls `start` when it has read a chunk, and
    `wait` at its end."""

    mainloop: FirstInPlaceSm90
    ctx: ConsumerCtx
    read: object  # the state of its first K-tile
    count: Int32

    def start_all(self) -> None:
        """Start and finish all WGMMAs of the CTA's first tile."""
        for n in range(cute.size(self.ctx.acc, mode=[2])):
            self.start(n, n == 0)
        self.wait()

    @cute.jit
    def start(self, n: cutlass.Constexpr, first: cutlass.Constexpr):
        """Start the WGMMAs of chunk n's columns; the first call waits for their operands."""
        if const_expr(first):
            if self.count > 0:
                self.ctx.ring.consumer_wait(self.read)
        self.mainloop.begin(self.ctx, self.read.index, n)

    @cute.jit
    def wait(self):
        """Wait for these WGMMAs. None may be in flight at a loop's back edge: the compiler would serialize them all."""
        warpgroup.wait_group(0)
        for n in range_constexpr(cute.size(self.ctx.acc, mode=[2])):
            read_after_wait(self.ctx.acc[None, 0, n])
        if self.count > 0:
            self.ctx.ring.consumer_release(self.read)
