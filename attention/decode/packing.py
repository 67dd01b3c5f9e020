"""Decode: packing of Q's rows into tiles, sequence lengths, and the split of KV tiles among CTAs.

The g query heads that share a KV head are packed into the rows of one tile, so that K and V are read once (GQA
packing):

    packed row r    is row r // g of head h_kv * g + r % g
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..forward.kv_tiles import KvTiles, WindowSource
from ..seqlen import DenseSeqlens, SeqlenInfo


@dataclass(frozen=True)
class DecodeTile:
    """Tile m of the packed rows of KV head h_kv of sequence b, and the index of its split."""

    m: Int32
    h_kv: Int32
    b: Int32
    split: Int32


@dataclass(frozen=True)
class DecodeScheduler:
    """The splits of one tile after the other."""

    tiles_m: Int32
    kv_heads: Int32
    batch: Int32
    splits: Int32

    @property
    def count(self) -> Int32:
        return self.tiles_m * self.kv_heads * self.batch * self.splits

    def decode(self, index) -> DecodeTile:
        split, rest = index % self.splits, index // self.splits
        m, rest = rest % self.tiles_m, rest // self.tiles_m
        return DecodeTile(m, rest % self.kv_heads, rest // self.kv_heads, split)


@dataclass(frozen=True)
class CacheSeqlens:
    """Sequence b has seqlens[b] rows of K and V. A value out of range is clamped."""

    rows: Int32
    capacity: Int32
    seqlens: cute.Tensor  # (B,)

    def of(self, b) -> SeqlenInfo:
        return SeqlenInfo(b, self.rows, cutlass.min(cutlass.max(self.seqlens[b], 0), self.capacity))


@dataclass(frozen=True)
class CacheSpans:
    """Sequence b has rows spans[b, 0] to before spans[b, 1] of K and V; values out of range are clamped."""

    rows: Int32
    capacity: Int32
    spans: cute.Tensor  # (B, 2)

    def of(self, b) -> SeqlenInfo:
        end = cutlass.min(cutlass.max(self.spans[b, 1], 0), self.capacity)
        return SeqlenInfo(b, self.rows, end, begin=cutlass.min(cutlass.max(self.spans[b, 0], 0), end))


def cache_seqlens(facts, rows: Int32, mK: cute.Tensor, mSeqlens: cute.Tensor | None, mTable: cute.Tensor | None):
    """Rows of K and V (B or pages, Hkv, S, ..) of each sequence: all, or those in mSeqlens (B,) or (B, 2).

    The capacity is that of mTable (B, pages per sequence) with pages. rows: number of rows of Q.
    """
    capacity = mTable.shape[1] * facts.page_size if facts.page_size else mK.shape[2]
    if not facts.seqlens:
        return DenseSeqlens(rows, capacity)
    return (CacheSpans if facts.spans else CacheSeqlens)(rows, capacity, mSeqlens)


@dataclass(frozen=True)
class PackedWindowSource(WindowSource):
    """A WindowSource of packed rows. Its tiles are divided into `splits` runs, whose lengths differ by at most one
    tile."""

    qhead_per_kvhead: Int32  # heads of Q that share a head of K and V
    splits: Int32

    def for_tile(self, tile: DecodeTile, seqlen: SeqlenInfo) -> KvTiles:
        first = tile.m * self.tile_m
        after = cutlass.min((first + self.tile_m - 1) // self.qhead_per_kvhead + 1, seqlen.rows)
        tiles = self.for_rows(first // self.qhead_per_kvhead, after, seqlen)
        return tiles.part(tiles.count * tile.split // self.splits, tiles.count * (tile.split + 1) // self.splits)

    def place(self, tile: DecodeTile, row) -> tuple:
        return tile.h_kv * self.qhead_per_kvhead + row % self.qhead_per_kvhead, row // self.qhead_per_kvhead

    def bounds(self, row, seqlen) -> tuple:
        return WindowSource.bounds(self, row // self.qhead_per_kvhead, seqlen)
