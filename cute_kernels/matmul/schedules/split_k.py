"""The split-K schedule: the CTAs of a cluster share a tile's K-tiles, and reduce their accumulators (GemmConfig.split).

    CTA 0             group 0   |  mma 0, first K-tiles | exchange | store a part of 0 |  mma 1, ...
    CTA 1             group 0   |  mma 0, last K-tiles  | exchange | store the rest    |  mma 1, ...

Every CTA has the partial accumulators of its share of K. CTA q stores part q of the tile, 1 / split of its columns (or
rows), so each CTA sends the others their parts, into their shared memory:

    barrier    arrivals                                                waits
    arrived    1 thread of this CTA, and the bytes the others send     this warpgroup, before it adds
    free       1 thread for each warp of the same warpgroup elsewhere  this warpgroup, before it sends

    warpgroup w of CTA r    wait free -> send part r ^ i to CTA r ^ i, for i = 1, 2, ... -> wait arrived
                            -> add the parts of CTAs 0, 1, ... in this order -> arrive at free of all the others

A thread's accumulators are the same elements in every CTA, so they are sent in the order of registers: 4 per thread and
step, and a warp's 512 bytes in one piece. They are added in the order of K, so results are bitwise identical on every
run. The buffer belongs to the exchange alone, so the producer may already load the next tile; and warpgroups do not
wait for each other.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline, range_constexpr

from ...k_tiles import split_k_tiles
from ...tile.barriers import Arrivals
from ...tile.hopper import WARPGROUP
from ..contexts import ConsumerCtx, Tile, Unordered, WorkTiles
from ..epilogue.store_sm90 import in_fp32
from .cooperative import Cooperative

VECTOR = 4  # fp32 of one store


def swaps(split: int) -> list[tuple[int, int, int]]:
    """(bit, place, other place): where `rank` has that bit, the two are swapped; all in all p and p ^ rank are."""
    bits = range(split.bit_length() - 1)
    return [(bit, p, p | 1 << bit) for bit in bits for p in range(split) if not p >> bit & 1]


class Exchange:
    """The exchange among `split` CTAs, of `groups` warpgroups with `accumulators` a thread."""

    def __init__(self, split: int, groups: int, accumulators: int):
        self.split, self.groups = split, groups
        self.part = accumulators // split  # of a thread
        self.bytes = (split - 1) * self.part * WARPGROUP * 4  # that one warpgroup receives
        self.barriers = 2 * groups
        # Of one warpgroup's barriers: `arrived` is full, `free` is empty.
        self.arrivals = Arrivals(1, 4, groups=groups, sharers=split - 1)

    def layout(self) -> cute.Layout:
        """(VECTOR, thread, step, sender, warpgroup)"""
        return cute.make_layout((VECTOR, WARPGROUP, self.part // VECTOR, self.split - 1, self.groups))

    @cute.jit
    def init(self, barriers: cute.Pointer):
        """By one thread, before the cluster's barriers are made visible."""
        for group in range_constexpr(self.groups):
            cute.arch.mbarrier_init(barriers + group, self.arrivals.full)
            cute.arch.mbarrier_init(barriers + self.groups + group, self.arrivals.empty)

    @cute.jit
    def reduce(
        self,
        acc: cute.Tensor,  # (split * part,) in the order of the store's chunks; its contents are lost
        sX: cute.Tensor,  # layout()
        barriers: cute.Pointer,
        group: Int32,
        rank: Int32,
        phase: Int32,  # parity of the work tile's number
    ):
        """Leave part `rank` of the whole sum in the first `part` accumulators."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        arrived, free = barriers + group, barriers + self.groups + group
        if tidx == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, self.bytes)
        self.sort(acc, rank)
        cute.arch.mbarrier_wait(free, phase ^ 1)
        bits = cute.recast_tensor(acc, Int32)
        for i in range_constexpr(1, self.split):
            for step in range_constexpr(self.part // VECTOR):
                value = tuple(bits[i * self.part + step * VECTOR + v] for v in range(VECTOR))
                slot = sX[None, tidx, step, i - 1, group].iterator
                cute.arch.store_async_dsmem(slot, value, arrived, rank ^ i)
        cute.arch.mbarrier_wait(arrived, phase)
        rX = cute.make_rmem_tensor((VECTOR, self.split), Float32)
        for step in range_constexpr(self.part // VECTOR):
            for r in range_constexpr(self.split):
                slot = cutlass.max(rank ^ r, 1) - 1  # one's own is in no slot, and what is read not used
                cute.autovec_copy(sX[None, tidx, step, slot, group], rX[None, r])
            for v in range_constexpr(VECTOR):
                own = acc[step * VECTOR + v]
                total = own if rank == 0 else rX[v, 0]
                for r in range_constexpr(1, self.split):
                    total = total + (own if rank == r else rX[v, r])
                acc[step * VECTOR + v] = total
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < self.split:
            if lane != rank:
                # It hands over no data, only a buffer that has been read, as the pipelines' releases do: a release at
                # the cluster's scope would wait for the GPU's memory.
                cute.arch.mbarrier_arrive(free, lane)

    @cute.jit
    def sort(self, acc: cute.Tensor, rank: Int32):
        """Part p of acc to place p ^ rank: selects, because registers cannot be indexed at run time."""
        for bit, p, other in swaps(self.split):
            swapped = (rank >> bit) & 1 == 1
            for v in range_constexpr(self.part):
                x, y = acc[p * self.part + v], acc[other * self.part + v]
                acc[p * self.part + v] = y if swapped else x
                acc[other * self.part + v] = x if swapped else y

    @cute.jit
    def drain(self, barriers: cute.Pointer, group: Int32, phase: Int32):
        """Before the CTA ends, the others must have made their last arrival at its barriers."""
        cute.arch.mbarrier_wait(barriers + self.groups + group, phase ^ 1)


class SplitK(Cooperative):
    """A cooperative kernel among the CTAs of a cluster along K."""

    def __init__(self, facts, mainloop, store):
        super().__init__(facts, mainloop, store)
        cfg = self.cfg
        groups = cfg.warps_m * cfg.warps_n
        accumulators = cfg.tile_m * cfg.tile_n // (groups * WARPGROUP)  # of a thread
        self.exchange = Exchange(cfg.split, groups, accumulators)
        self.barriers = self.exchange.barriers

    def arrivals(self) -> dict[str, Arrivals]:
        return {"exchange": self.exchange.arrivals}

    def buffer(self) -> cute.Layout:
        return self.exchange.layout()

    def init(self, barriers: cute.Pointer) -> None:
        self.exchange.init(barriers)

    def tile(self, tiles: WorkTiles, index: Int32, bounds: tuple) -> Tile:
        tile = tiles.tile(index, bounds)
        k_tiles = split_k_tiles(tile.k_tiles, tiles.rank_k, self.cfg.split, len(self.facts.k_blocks))
        return replace(tile, k_tiles=k_tiles)

    @cute.jit
    def consume(self, ctx: ConsumerCtx):
        """A consumer warpgroup: multiply its share of each work tile's K-tiles, exchange, and store a part."""
        tiles = ctx.tiles
        sX, barriers = ctx.exchange
        read = self.ring_state(pipeline.PipelineUserType.Consumer, ctx.group)
        release = self.ring_state(pipeline.PipelineUserType.Consumer, ctx.group)
        end = tiles.end()
        phase = Int32(0)  # of the exchange
        bounds = tiles.bounds(tiles.first)
        for index in cutlass.range(tiles.first, end, tiles.step, unroll=1):
            tile = self.tile(tiles, index, bounds)
            bounds = tiles.bounds(index + tiles.step)
            read, release = self.mainloop.mma(tile, ctx, read, release, Unordered())
            sums = in_fp32(ctx.acc, 0, cute.size(ctx.acc))[0]
            self.exchange.reduce(sums, sX, barriers, ctx.warpgroup, tiles.rank_k, phase)
            phase = phase ^ 1
            places = self.places(tile, ctx.warpgroup)
            self.store.store(sums, ctx.out, places, (tile.l, tile.k_tiles.l), tiles.rank_k)
        self.store.drain()
        self.exchange.drain(barriers, ctx.warpgroup, phase)
