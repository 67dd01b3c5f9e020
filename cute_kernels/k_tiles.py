"""Where the next K-tile comes from: the seam between a mainloop and the structure of its operands.

A mainloop never computes where its operands lie. It asks a *source*, once per work tile, for a *K-tiles* value,
and that value, once per step, for a *KTile*:

    bounds = source.bounds(m, n, l)     # what must be read from memory; asked for one work tile ahead
    k_tiles = source.for_tile(m, l, bounds)     # cheap, and the same value in every role of the kernel
    k_tiles.count                       # how many K-tiles; 0 is legal and means "the sum over nothing"
    k_tiles.out(n)                      # (rest_m, rest_n, outer_m): the tile of D that column tile n writes
    k_tiles.l                           # which item of a batch of A it multiplies
    k_tiles.at(i)                       # KTile(a, b); pure
    k_tiles.scale(i)                    # what the products of K-tile i are multiplied by, where blocks have scales
    source.columns                      # None, or how many columns work tiles cover, if not all of D's N
    source.order                        # None, or in which order work tiles come (scheduler.py)
    source.shared_rows                  # how many neighbouring row tiles have the same K-tiles of B
    source.shared_columns               # how many neighbouring column tiles have the same K-tiles of A

The types are `Source` and `KTiles`, and `Segments` where K-tiles are of several kinds. A cluster loads an operand once
for CTAs that share it. If their K-tiles differed, the sums would be wrong and nobody would notice. So the kernel
refuses a cluster for which the source makes no promise (`check_sharing`).

Kernels see their operands as

    mA (M, K, outer_a)        outer_a: batch of a dense A, number of the stored block of a BSR A
    mB (N, K, outer_k, L)     outer_k: 1 for a dense product, the block column for a BSR one
    mD (M, N, outer_m, L)     outer_m: 1 for a dense product, the block row for a BSR one

where M and K are the extents *inside* one outer index: a whole dense matrix, or one block. TMA clips at those
extents, and so do the cp.async predicates: a tile that hangs over the edge of a block reads nothing of its
neighbour and writes nothing into it.

Two compile-time facts go with a source (config.GemmFacts). `k_blocks` gives, for each K-tile of one period, how many
MMA steps it holds, of 32 bytes each, so that a block of 112 16-bit columns is a K-tile of 64 (4 steps) and one of 48
(3 steps), and no step is spent on padding. `clips_k` says that a K-tile's steps may reach past the extent of mode K and
read zeros there.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32

ANY = 0  # of Source.shared_rows and shared_columns: all tiles share the operand


class KTile(NamedTuple):
    """Coordinates of one K-tile: the first ones in units of tiles, the last one an outer index."""

    a: tuple  # (rest_m, rest_k, outer_a)
    b: tuple  # (rest_k, outer_k), of D's column tile; where a tile has boxes, (rest_n, rest_k, outer_k) of each


class KTiles(Protocol):
    """What one work tile sums over."""

    count: Int32
    l: Int32

    def out(self, n) -> tuple: ...

    def at(self, i) -> KTile: ...


class Segments(Protocol):
    """K-tiles that come in segments, each of one kind, so that a mainloop has a loop for each and no branch in any.

    What a kind says is between a source and its mainloop, as whether a tile of scores is masked element by element.
    """

    count: Int32
    kinds: tuple  # static, of the segments in their order
    ends: tuple  # how many K-tiles there are up to the end of each segment; the last one is count

    def at(self, i): ...


class Source(Protocol):
    """Where the K-tiles of a product come from. A frozen dataclass of tensors and numbers, which kernels take as it is.

    `shared_rows`: row tiles number shared_rows * i up to shared_rows * (i + 1) - 1 have the same KTile.b in every
    step; 1 promises nothing, ANY all of them. `shared_columns` says the same of column tiles and KTile.a.
    """

    order: cute.Tensor | None
    columns: Int32 | None
    shared_rows: int
    shared_columns: int

    def bounds(self, m, n, l) -> tuple: ...

    def for_tile(self, m, l, bounds) -> KTiles: ...


def check_sharing(source, cluster_m: int, cluster_n: int) -> None:
    """Raise ValueError if CTAs of a cluster would share an operand whose K-tiles may differ among them."""
    for cluster, name, operand, tiles in (
        (cluster_m, "shared_rows", "B", "row"),
        (cluster_n, "shared_columns", "A", "column"),
    ):
        shared = getattr(source, name, 1)
        if cluster > 1 and shared % cluster:
            raise ValueError(
                f"a cluster loads {operand} once for {cluster} neighbouring {tiles} tiles, but "
                f"{type(source).__name__}.{name} is {shared}: their K-tiles may differ, and the sums would be wrong. "
                f"Use a configuration without that cluster, or a source that promises {name}"
            )


@dataclass(frozen=True)
class DenseKTiles:
    """All K-tiles of a dense product, in ascending order."""

    count: Int32
    m: Int32
    l: Int32

    def out(self, n) -> tuple:
        return self.m, n, Int32(0)

    def at(self, i) -> KTile:
        return KTile(a=(self.m, i, self.l), b=(i, Int32(0)))


@dataclass(frozen=True)
class DenseSource:
    """The trivial source: K-tile i of row tile m lies at (m, i)."""

    count: Int32  # K-tiles of the product
    a_batch: Int32  # extent of mA's outer mode: 1 where one A serves the whole batch
    columns = None

    @property
    def shared_rows(self) -> int:
        return ANY

    @property
    def shared_columns(self) -> int:
        return ANY

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

    def out(self, n) -> tuple:
        return self.whole.out(n)

    def at(self, i) -> KTile:
        return self.whole.at(self.first + i)

    def scale(self, i):
        return self.whole.scale(self.first + i)


def split_k_tiles(whole, rank, split: int, period: int) -> SplitKTiles:
    """The share of `rank` among `split` CTAs: whole periods, ascending with the rank; none where there are fewer."""
    periods = whole.count // period
    first = periods * rank // split
    end = periods * (rank + 1) // split
    return SplitKTiles(whole, first * period, (end - first) * period, whole.l)
