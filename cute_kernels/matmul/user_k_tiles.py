"""A KTileSource in a kernel: its programs on the kernel's integers, as the source of a dense GEMM."""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Int32

from ..k_tiles import DenseKTiles, DenseSource, KTile
from ..source import KTileSource
from ..traced.lower import lower
from .config import GemmFacts


def source_for(facts: GemmFacts, k_tiles: Int32, a_batch: Int32) -> DenseSource:
    """The source of a dense kernel, whose A has `k_tiles` K-tiles of the kernel's own size."""
    if facts.source is None:
        return DenseSource(k_tiles, a_batch)
    rows, steps = facts.source.tile_m // facts.config.tile_m, facts.source.tile_k // facts.config.tile_k

    @dataclass(frozen=True)
    class Tiles(UserKTiles):
        user, per_row, per_step = facts.source, rows, steps

    @dataclass(frozen=True)
    class Source(UserSource):
        tiles, shared_rows = Tiles, facts.source.shared_rows(facts.config.tile_m)

    return Source(k_tiles, a_batch)


@dataclass(frozen=True)
class UserKTiles(DenseKTiles):
    """K-tiles of a row tile. A K-tile of the user's is `per_step` of the kernel's, and a row tile `per_row`."""

    user: ClassVar[KTileSource]
    per_row: ClassVar[int]
    per_step: ClassVar[int]
    known: Int32  # the user's K-tiles along K

    def at(self, i) -> KTile:
        place = lower(self.user.at, (self.m // self.per_row, i // self.per_step, self.known))
        k = Int32(place) * self.per_step + i % self.per_step
        return KTile(a=(self.m, k, self.l), b=(k, Int32(0)))


@dataclass(frozen=True)
class UserSource(DenseSource):
    tiles: ClassVar[type[UserKTiles]]

    def for_tile(self, m, l, bounds) -> UserKTiles:
        known = (self.count + self.tiles.per_step - 1) // self.tiles.per_step
        count = lower(self.tiles.user.count, (m // self.tiles.per_row, known))
        return self.tiles(Int32(count) * self.tiles.per_step, m, cutlass.min(l, self.a_batch - 1), known)
