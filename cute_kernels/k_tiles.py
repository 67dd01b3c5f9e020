"""The interface between a mainloop and its operands' structure: iteration over K-tiles.

A mainloop does not compute operand coordinates. Once per work tile it gets a *K-tiles* value from a *source*, and once
per step a *KTile* from that value:

    bounds = source.bounds(m, n, l)     # values read from memory; prefetched one work tile ahead
    k_tiles = source.for_tile(m, l, bounds)     # cheap, and the same value in every role of the kernel
    k_tiles.count                       # number of K-tiles; may be 0, the empty sum
    k_tiles.out(n)                      # (rest_m, rest_n, outer_m): the tile of D that column tile n writes
    k_tiles.l                           # batch index of A
    k_tiles.at(i)                       # KTile(a, b); pure
    k_tiles.scale(i)                    # scale of K-tile i, if blocks have scales
    source.columns                      # None, or the number of columns that work tiles cover, if not all of D's N
    source.order                        # None, or the order of work tiles (scheduler.py)
    source.shared_rows                  # number of adjacent row tiles with the same K-tiles of B
    source.shared_columns               # number of adjacent column tiles with the same K-tiles of A

The types are `Source` and `KTiles`, and `Segments` for K-tiles of several kinds. A cluster loads an operand once for
the CTAs that share it. If their K-tiles differed, results would be silently wrong. So the kernel rejects a cluster
unless the source guarantees equal K-tiles (`check_sharing`).

Kernels see their operands as

    mA (M, K, outer_a)        outer_a: batch index of a dense A, index of the stored block of a BSR A
    mB (N, K, outer_k, L)     outer_k: 1 for a dense GEMM, the block column for a BSR one
    mD (M, N, outer_m, L)     outer_m: 1 for a dense GEMM, the block row for a BSR one

where M and K are the extents *inside* one outer index: a whole dense matrix, or one block. TMA and the cp.async
predicates clip at those extents: a tile that extends past the edge of a block neither reads nor writes the adjacent
block.

A source comes with two compile-time facts (config.GemmFacts). `k_blocks` is the number of MMA steps, of 32 bytes each,
of each K-tile in one period. A block of 112 16-bit columns is a K-tile of 64 (4 steps) and one of 48 (3 steps), and no
step is spent on padding. `clips_k` is True if the steps of a K-tile may reach past the extent of mode K and read zeros
there.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32

ANY = 0  # value of Source.shared_rows and shared_columns: all tiles share the operand


class KTile(NamedTuple):
    """Coordinates of one K-tile: the first ones in units of tiles, the last one an outer index."""

    a: tuple  # (rest_m, rest_k, outer_a)
    b: tuple  # (rest_k, outer_k), of D's column tile; where a tile has boxes, (rest_n, rest_k, outer_k) of each


class KTiles(Protocol):
    """The K-tiles of one work tile."""

    count: Int32
    l: Int32

    def out(self, n) -> tuple: ...

    def at(self, i) -> KTile: ...


class Segments(Protocol):
    """K-tiles in segments of one kind each, so that a mainloop has one branch-free loop per segment.

    A source and its mainloop agree on the meaning of a kind, e.g. that score tiles need element-wise masking.
    """

    count: Int32
    kinds: tuple  # static: the kind of each segment, in order
    ends: tuple  # number of K-tiles up to the end of each segment; the last one is count

    def at(self, i): ...


class Source(Protocol):
    """Source of a GEMM's K-tiles: a frozen dataclass of tensors and numbers, passed to the kernel as it is.

    shared_rows: row tiles shared_rows * i to shared_rows * (i + 1) - 1 have the same KTile.b in every step. 1
        guarantees nothing, ANY means all row tiles.
    shared_columns: the same for column tiles and KTile.a.
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
                f"a cluster loads {operand} once for {cluster} adjacent {tiles} tiles, so "
                f"{type(source).__name__}.{name} must be a multiple of {cluster}, got {shared}; use a configuration "
                f"without that cluster, or a source that guarantees {name}"
            )


@dataclass(frozen=True)
class DenseKTiles:
    """All K-tiles of a dense GEMM, in ascending order."""

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

    count: Int32  # K-tiles along K
    a_batch: Int32  # extent of mA's outer mode: 1 if A is shared by the whole batch
    columns = None

    @property
    def shared_rows(self) -> int:
        return ANY

    @property
    def shared_columns(self) -> int:
        return ANY

    @property
    def order(self) -> None:
        """None: work tiles of equal length need no order."""
        return None

    def bounds(self, m, n, l) -> tuple:
        return Int32(0), self.count

    def for_tile(self, m, l, bounds) -> DenseKTiles:
        return DenseKTiles(self.count, m, cutlass.min(l, self.a_batch - 1))


@dataclass(frozen=True)
class SplitKTiles:
    """One split-K rank's part of another K-tiles value: `count` K-tiles from `first` on."""

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
    """K-tiles of `rank` among `split` CTAs: whole periods, ascending with the rank; may be empty."""
    periods = whole.count // period
    first = periods * rank // split
    end = periods * (rank + 1) // split
    return SplitKTiles(whole, first * period, (end - first) * period, whole.l)
