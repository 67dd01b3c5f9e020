"""The cooperative schedule of the sm_90 kernel: all consumer warpgroups share each work tile.

    producer  | load 0 | load 1 | load 2 | ...                    runs ahead by the ring's stages
    group 0   |  mma 0  | store 0 |  mma 1  | store 1 | ...

A schedule owns the loops of the producer warps and of the consumer warpgroups over work tiles: which tiles each of them
has, and in which order it loads, multiplies and stores. The other schedules derive from this one.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from ...tile.barriers import Arrivals
from ..contexts import ConsumerCtx, ProducerCtx, Tile, Unordered, WorkTiles


class Cooperative:
    """One consumer group, and one producer warp."""

    barriers = 0  # mbarriers besides the ring's

    def __init__(self, facts, mainloop, store):
        self.facts, self.cfg = facts, facts.config
        self.mainloop, self.store = mainloop, store

    def arrivals(self) -> dict[str, Arrivals]:
        """Arrival counts of pipelines besides the ring."""
        return {}

    def buffer(self) -> cute.Layout | None:
        """Layout of FP32 values in shared memory that consumers exchange."""
        return None

    def init(self, barriers: cute.Pointer) -> None:
        """Initialize the mbarriers, by one thread, before the cluster's barriers are made visible."""

    def produces(self, warp: Int32):
        """True for the warps of the producer warpgroup that issue loads."""
        return warp == 0

    def ring_state(self, user: pipeline.PipelineUserType, number: Int32):
        """The initial pipeline state of a producer warp or consumer group."""
        return pipeline.make_pipeline_state(user, self.cfg.stages)

    def work(self, tiles: WorkTiles, number: Int32) -> tuple:
        """(first work tile, distance to the next) of a producer warp or consumer group."""
        return tiles.first, tiles.step

    def tile(self, tiles: WorkTiles, index: Int32, bounds: tuple) -> Tile:
        """Work tile `index`, with the K-tiles that this CTA multiplies."""
        return tiles.tile(index, bounds)

    # ------------------------------------------------------------------ producer

    @cute.jit
    def produce(self, ctx: ProducerCtx):
        """A producer warp: issue the loads of its work tiles."""
        tiles = ctx.tiles
        state = self.ring_state(pipeline.PipelineUserType.Producer, ctx.warp)
        end = tiles.end()
        first, step = self.work(tiles, ctx.warp)
        bounds = tiles.bounds(first)
        loaded = Int32(0)
        if const_expr(self.facts.chained):
            loaded = self.load_first_a(ctx, end, bounds)
            cute.arch.griddepcontrol_wait()
        for index in cutlass.range(first, end, step, unroll=1):
            tile = self.tile(tiles, index, bounds)
            bounds = tiles.bounds(index + step)
            # With several boxes, each K-tile names the columns.
            n = tile.k_tiles.out(tile.n)[1] if const_expr(self.cfg.boxes_b == 1) else None
            gB = ctx.b.gX[None, n, None, None, cutlass.min(tile.l, ctx.batch - 1)]
            b = replace(ctx.b, gX=gB)
            ahead = (loaded,) if const_expr(self.facts.chained) else ()
            state = self.mainloop.issue.load(tile.k_tiles, ctx.a, b, ctx.ring, state, *ahead)
            loaded = Int32(0)
        if const_expr(self.facts.chained):
            # No earlier: the next kernel's CTAs would all be where this one has left an SM idle.
            cute.arch.griddepcontrol_launch_dependents()
        replace(ctx.ring, num_stages=self.cfg.stages).producer_tail(state)

    @cute.jit
    def load_first_a(self, ctx: ProducerCtx, end: Int32, bounds: tuple):
        """Load A's part of the first K-tiles of a secondary kernel (tile/dependent_launch.py), as many as there are
        stages; returns how many."""
        count = Int32(0)
        if ctx.tiles.first < end:
            tile = self.tile(ctx.tiles, ctx.tiles.first, bounds)
            count = cutlass.min(tile.k_tiles.count, self.cfg.stages)
            state = self.ring_state(pipeline.PipelineUserType.Producer, Int32(0))
            for i in cutlass.range(count, unroll=1):
                ctx.ring.producer_acquire(state)
                barrier = ctx.ring.producer_get_barrier(state)
                self.mainloop.issue.load_a(tile.k_tiles.at(i), ctx.a, barrier, state.index)
                state.advance()
        return count

    # ------------------------------------------------------------------ consumers

    @cute.jit
    def consume(self, ctx: ConsumerCtx):
        """A consumer warpgroup: multiply and store the work tiles of its group."""
        tiles = ctx.tiles
        read = self.ring_state(pipeline.PipelineUserType.Consumer, ctx.group)
        release = self.ring_state(pipeline.PipelineUserType.Consumer, ctx.group)
        end = tiles.end()
        first, step = self.work(tiles, ctx.group)
        bounds = tiles.bounds(first)
        for index in cutlass.range(first, end, step, unroll=1):
            tile = self.tile(tiles, index, bounds)
            bounds = tiles.bounds(index + step)
            read, release = self.mainloop.mma(tile, ctx, read, release, Unordered())
            self.store.store(ctx.acc, ctx.out, self.places(tile, ctx.warpgroup), (tile.l, tile.k_tiles.l))
        self.store.drain()

    def places(self, tile: Tile, warpgroup: Int32) -> tuple:
        """The tile of D of a work tile; if the tile consists of boxes, that of each of this warpgroup's boxes."""
        cfg = self.cfg
        if cfg.boxes_b == 1:
            return (tile.k_tiles.out(tile.n),)
        boxes = cfg.boxes_b // cfg.warps_n
        first = warpgroup % (cfg.warps_m * cfg.warps_n) // cfg.warps_m * boxes
        return tuple(tile.k_tiles.out(first + box) for box in range(boxes))
