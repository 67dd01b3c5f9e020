"""Values that the parts of an sm_90 GEMM kernel pass to each other: work tiles, and the state of each role."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..scheduler import TileScheduler
from .epilogue.formula import EpilogueArgs


@dataclass(frozen=True)
class Tile:
    """A work tile of this CTA."""

    column: tuple  # of its cluster's tile: (column tile, cluster's columns, rank of this CTA)
    l: Int32  # batch index of D
    k_tiles: Any  # k_tiles.KTiles

    @property
    def n(self) -> Int32:
        """Column tile."""
        n, columns, rank = self.column
        return n * columns + rank


@dataclass(frozen=True)
class WorkTiles:
    """The work tiles of a CTA: every `step`-th one of the scheduler, from `first` on."""

    scheduler: TileScheduler
    source: Any  # k_tiles.Source
    first: Int32
    step: Int32
    rank_m: Int32  # of the CTA in its cluster, which covers several row or column tiles
    rank_n: Int32
    rank_k: Int32  # split-K
    cluster: cutlass.Constexpr[tuple]  # (row tiles, column tiles)

    def end(self) -> Int32:
        return self.scheduler.end(self.first, self.step)

    def bounds(self, index: Int32) -> tuple:
        """The source's bounds for a work tile. Past the last tile they are the last tile's, and are never used."""
        m, n, l = self.scheduler.decode(cutlass.min(index, self.scheduler.count - 1))
        return self.source.bounds(m * self.cluster[0] + self.rank_m, n * self.cluster[1], l)

    def tile(self, index: Int32, bounds: tuple) -> Tile:
        """Work tile `index`, with all of its K-tiles."""
        m, n, l = self.scheduler.decode(index)
        k_tiles = self.source.for_tile(m * self.cluster[0] + self.rank_m, l, bounds)
        return Tile((n, self.cluster[1], self.rank_n), l, k_tiles)


@dataclass(frozen=True)
class Unordered:
    """Consumer groups may start their mainloops at any time; see schedules/ping_pong for the other case."""

    def wait(self) -> None:
        """Wait until this consumer group may start its mainloop."""

    def arrive(self) -> None:
        """Let the other consumer group start its mainloop, once this one's WGMMAs have been issued."""


@dataclass(frozen=True)
class Load:
    """TMA loads of an operand into its ring."""

    atom: cute.CopyAtom
    gX: cute.Tensor  # A: (TMA, rest_m, rest_k, outer_a); B: (TMA, rest_n, rest_k, outer_k, L), or without rest_n and L
    sX: cute.Tensor  # (TMA, PIPE)
    mask: Any  # CTAs that a load is multicast to; None for this CTA alone


@dataclass(frozen=True)
class ProducerCtx:
    """State of a producer warp."""

    tiles: WorkTiles
    a: Load
    b: Load
    batch: Int32  # extent of B's batch mode
    ring: Any  # pipeline
    warp: Int32


@dataclass(frozen=True)
class StoreCtx:
    """State of the store of a consumer warpgroup."""

    args: EpilogueArgs
    outs: tuple  # (TMA atom, gD) of D and, if the epilogue stores it, of z
    sD: cute.Tensor  # (64, epi_n, PIPE)
    thr_mma: Any  # this thread's slice of the next one
    tiled_mma: cute.TiledMma  # of one warpgroup
    extent: tuple  # (M, N)
    warpgroup: Int32  # consumer warpgroup
    one: cute.Pointer  # 1.0 in shared memory


@dataclass(frozen=True)
class ConsumerCtx:
    """State of a consumer warpgroup."""

    tiles: WorkTiles
    tiled_mma: cute.TiledMma
    acc: cute.Tensor  # (MMA, MMA_M, MMA_N)
    A: Any  # the mainloop's operand_a and operand_b
    B: Any
    ring: Any  # pipeline
    out: StoreCtx
    group: Int32  # consumer group
    exchange: tuple  # split-K: partial accumulators in shared memory, and mbarriers

    @property
    def warpgroup(self) -> Int32:
        return self.out.warpgroup
