"""Problems of the decode kernels: tiles of packed rows (forward/heads), sequence lengths, and splits of KV tiles."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..forward.config import DecodeFacts
from ..forward.heads import GqaPacking
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
class SplitSource(WindowSource):
    """A WindowSource whose tiles are divided into `splits` runs, whose lengths differ by at most one tile."""

    splits: Int32 = 1

    def for_tile(self, tile: DecodeTile, seqlen: SeqlenInfo) -> KvTiles:
        tiles = WindowSource.for_tile(self, tile, seqlen)
        return tiles.part(tiles.count * tile.split // self.splits, tiles.count * (tile.split + 1) // self.splits)


def problem_of(
    facts: DecodeFacts,
    tile_m: int,
    mQ: cute.Tensor,  # (B, H, Sq, D)
    mK: cute.Tensor,  # (B or pages, Hkv, S, D)
    mSeqlens: cute.Tensor | None,  # (B,) or (B, 2)
    mTable: cute.Tensor | None,  # (B, pages per sequence)
    bounds: tuple,  # (left, right) of the window
    splits: Int32,
) -> tuple:
    """(SplitSource, DecodeScheduler, sequence lengths)."""
    batch, heads, rows, _ = mQ.shape
    kv_heads = mK.shape[1]
    packing = GqaPacking(heads // kv_heads)
    seqlens = cache_seqlens(facts, rows, mK, mSeqlens, mTable)
    scheduler = DecodeScheduler(cute.ceil_div(packing.rows(rows), tile_m), kv_heads, batch, splits)
    return SplitSource(facts.window, tile_m, facts.config.tile_n, *bounds, packing, splits), scheduler, seqlens
