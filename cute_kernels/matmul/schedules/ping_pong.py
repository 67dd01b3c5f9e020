"""The ping-pong schedule: two consumer groups with alternate work tiles: one multiplies while the other stores.

    producer  | load 0 | load 1 | load 2 | ...
    group 0   |  mma 0  | store 0 |  mma 2  | store 2 | ...
    group 1            |  mma 1  | store 1 |  mma 3  | ...

One ring feeds both groups in tile order, and a group skips the stages of the other group's tiles. Named barriers keep
the order of the mainloops: one starts when the other has issued its last WGMMA. So the groups do not compete for the
tensor cores, and skipping stages is safe: an mbarrier only tells the parity of its phase, so a waiting thread must
never be more than one phase away.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from ...tile.barriers import PRODUCT_ORDER
from ..contexts import ConsumerCtx, WorkTiles
from .cooperative import Cooperative

ORDER_THREADS = 256  # one consumer group waits, the other arrives


@dataclass(frozen=True)
class Order:
    """The order in which two consumer groups start their mainloops; see contexts.Unordered."""

    group: Int32

    def wait(self) -> None:
        cute.arch.barrier(barrier_id=PRODUCT_ORDER + self.group, number_of_threads=ORDER_THREADS)

    def arrive(self) -> None:
        cute.arch.barrier_arrive(barrier_id=PRODUCT_ORDER + 1 - self.group, number_of_threads=ORDER_THREADS)


class PingPong(Cooperative):
    """Two consumer groups that share a ring."""

    @cute.jit
    def consume(self, ctx: ConsumerCtx):
        """A consumer group: multiply and store every second work tile."""
        tiles = ctx.tiles
        first, step = tiles.first, tiles.step
        read = self.ring_state(pipeline.PipelineUserType.Consumer, ctx.group)
        release = self.ring_state(pipeline.PipelineUserType.Consumer, ctx.group)
        end = tiles.end()
        order = Order(ctx.group)
        bounds = tiles.bounds(first)
        if ctx.group == 1:
            order.arrive()  # group 0 goes first
            read, release = self.skip(tiles, first, end, bounds, read, release)
            bounds = tiles.bounds(first + step)
        first = first + ctx.group * step
        for index in cutlass.range(first, end, step * 2, unroll=1):
            tile = self.tile(tiles, index, bounds)
            other = tiles.bounds(index + step)
            bounds = tiles.bounds(index + step * 2)
            read, release = self.mainloop.mma(tile, ctx, read, release, order)
            read, release = self.skip(tiles, index + step, end, other, read, release)
            self.store.store(ctx.acc, ctx.out, self.places(tile, ctx.warpgroup), (tile.l, tile.k_tiles.l))
        self.store.drain()

    @cute.jit
    def skip(self, tiles: WorkTiles, index: Int32, end: Int32, bounds: tuple, read, release):
        """Skip the stages of a work tile that the other consumer group reads."""
        if index < end:
            count = tiles.tile(index, bounds).k_tiles.count
            read.advance(count)
            release.advance(count)
        return read, release
