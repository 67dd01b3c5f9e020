"""Where the next K-tile comes from: the seam between a mainloop and the structure of its operands.

A mainloop never computes where its operands lie. It asks a *source*, once per work tile, for a *K-tiles* value,
and that value, once per step, for a *KTile*:

    bounds = source.bounds(m, n, l)     # what must be read from memory; asked for one work tile ahead
    k_tiles = source.for_tile(m, l, bounds)     # cheap, and the same value in every role of the kernel
    k_tiles.count                       # how many K-tiles; 0 is legal and means "the sum over nothing"
    k_tiles.out                         # (rest_m, outer_m): which rows of D the work tile writes
    k_tiles.l                           # which item of a batch of A it multiplies
    k_tiles.at(i)                       # KTile(a, b); pure
    source.order                        # None, or in which order work tiles come (scheduler.py)

Kernels see their operands as

    mA (M, K, outer_a)        outer_a: batch of a dense A, number of the stored block of a BSR A
    mB (N, K, outer_k, L)     outer_k: 1 for a dense product, the block column for a BSR one
    mD (M, N, outer_m, L)     outer_m: 1 for a dense product, the block row for a BSR one

where M and K are the extents *inside* one outer index: a whole dense matrix, or one block. TMA clips at those
extents, and so do the cp.async predicates: a tile that hangs over the edge of a block reads nothing of its
neighbour and writes nothing into it.

Two compile-time facts go with a source (config.GemmFacts). `k_blocks` gives, for each K-tile of one period, how many
16-wide MMA steps it holds, so that a block 112 wide is a K-tile of 64 (4 steps) and one of 48 (3 steps), and no step
is spent on padding. `clips_k` says that a K-tile's steps may reach past the extent of mode K and read zeros there.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32


class KTile(NamedTuple):
    """Coordinates of one K-tile: the first ones in units of tiles, the last one an outer index."""

    a: tuple  # (rest_m, rest_k, outer_a); of a pair of block rows two of these
    b: tuple  # (rest_k, outer_k)


@dataclass(frozen=True)
class DenseKTiles:
    """All K-tiles of a dense product, in ascending order."""

    count: Int32
    m: Int32
    l: Int32

    @property
    def out(self) -> tuple:
        return self.m, Int32(0)

    def at(self, i) -> KTile:
        return KTile(a=(self.m, i, self.l), b=(i, Int32(0)))


@dataclass(frozen=True)
class DenseSource:
    """The trivial source: K-tile i of row tile m lies at (m, i)."""

    count: Int32  # K-tiles of the product
    a_batch: Int32  # extent of mA's outer mode: 1 where one A serves the whole batch

    @property
    def order(self) -> None:
        """Work tiles of one length need no order of their own."""
        return None

    def bounds(self, m, n, l) -> tuple:
        return Int32(0), self.count

    def for_tile(self, m, l, bounds) -> DenseKTiles:
        return DenseKTiles(self.count, m, cutlass.min(l, self.a_batch - 1))


@dataclass(frozen=True)
class SplitKTiles:
    """One rank's share of another K-tiles value: `count` of its K-tiles from `first` on."""

    whole: object
    first: Int32
    count: Int32
    l: Int32

    @property
    def out(self) -> tuple:
        return self.whole.out

    def at(self, i) -> KTile:
        return self.whole.at(self.first + i)


def split_k_tiles(whole, rank, split: int, period: int) -> SplitKTiles:
    """The share of `rank` among `split` CTAs: whole periods, ascending with the rank; none where there are fewer."""
    periods = whole.count // period
    first = periods * rank // split
    end = periods * (rank + 1) // split
    return SplitKTiles(whole, first * period, (end - first) * period, whole.l)
