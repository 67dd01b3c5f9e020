"""Problems of the decode kernel for selected blocks: query tokens with their lists, and splits of the lists.

The keys of a list are numbered from 0: key p is in the block of entry p // block_size. A tile is `tile_n` keys, and a
split is a run of tiles. A tile consists of boxes: keys that are adjacent in memory, of one block and one page. Lane j
finds the place of box j, and `shuffle_sync` tells the others.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cutlass_dsl import select_

from ...decode.problem import cache_seqlens
from ...forward.heads import GqaPacking, TileRows
from .config import ROWS


@dataclass(frozen=True)
class TokenTile:
    """Tile m of the rows of one query token of sequence b: query heads that share list `h_kv`; and a split's index."""

    m: Int32
    h_kv: Int32
    token: Int32
    b: Int32
    split: Int32


@dataclass(frozen=True)
class TokenScheduler:
    """The splits of one tile after the other."""

    tiles_m: Int32
    lists: Int32  # of a token; without a list per query head, one for each KV head
    tokens: Int32
    batch: Int32
    splits: Int32

    @property
    def count(self) -> Int32:
        return self.tiles_m * self.lists * self.tokens * self.batch * self.splits

    def decode(self, index) -> TokenTile:
        split, rest = index % self.splits, index // self.splits
        m, rest = rest % self.tiles_m, rest // self.tiles_m
        h_kv, rest = rest % self.lists, rest // self.lists
        return TokenTile(m, h_kv, rest % self.tokens, rest // self.tokens, split)


@dataclass(frozen=True)
class ListTiles:
    """KV tiles of one split of a token's list: tiles `first` to before `first` + `count` of the list's keys."""

    facts: cutlass.Constexpr  # config.SelectedDecodeFacts
    indices: cute.Tensor  # (top,), blocks of the sequence
    table: Any  # (pages per sequence,); None without pages
    pages: Int32  # number of pages
    b: Int32
    first: Int32
    count: Int32
    limit: Int32  # the token attends to keys of the sequence before this one

    @cute.jit
    def places(self, i: Int32) -> tuple:
        """Place of box (lane % boxes) of the split's i-th tile: (page, row in it, number of its keys that exist).

        Without pages, the page is the sequence. It is -1 if the page table has no valid one, whose keys are zeros.
        """
        facts = self.facts
        key = (self.first + i) * facts.config.tile_n + cute.arch.lane_idx() % facts.boxes * facts.box
        entry, top = key // facts.block_size, self.indices.shape[0]
        block = self.indices[cutlass.min(entry, top - 1)]
        exists = (entry < top) & (block >= 0) & (block < cute.ceil_div(self.limit, facts.block_size))
        row = select_(exists, block, Int32(0)) * facts.block_size + key % facts.block_size
        valid = select_(exists, cutlass.min(cutlass.max(self.limit - row, 0), facts.box), Int32(0))
        page = self.b
        if const_expr(self.table is not None):
            page = self.table[cutlass.min(row // facts.page_size, self.table.shape[0] - 1)]
            page = select_((page >= 0) & (page < self.pages), page, Int32(-1))
            row = row % facts.page_size
        return page, row, valid


@dataclass(frozen=True)
class ListSource:
    """The lists of all query tokens, (B, Sq, G, top), and the cache that their blocks are in."""

    facts: cutlass.Constexpr  # config.SelectedDecodeFacts
    heads: GqaPacking  # of the query heads that share a list
    indices: cute.Tensor
    table: cute.Tensor | None  # (B, pages per sequence)
    pages: Int32
    right: Int32  # 0: causal; Sq: not
    splits: Int32
    lists: Int32  # of a token, as TokenScheduler's
    kv_heads: Int32

    def kv_head(self, tile: TokenTile) -> Int32:
        return tile.h_kv // (self.lists // self.kv_heads)

    def for_tile(self, tile: TokenTile, seqlen) -> ListTiles:
        g = tile.h_kv // (self.lists // self.indices.shape[2])
        indices = self.indices[tile.b, tile.token, g, None]
        limit = cutlass.min(seqlen.cols, seqlen.cols - seqlen.rows + tile.token + 1 + self.right)
        table = None if self.table is None else self.table[tile.b, None]
        count = cute.ceil_div(indices.shape[0] * self.facts.block_size, self.facts.config.tile_n)
        begin, end = count * tile.split // self.splits, count * (tile.split + 1) // self.splits
        return ListTiles(self.facts, indices, table, self.pages, tile.b, begin, end - begin, limit)

    def rows(self, tile: TokenTile, seqlen) -> tuple:
        """(first row of the tile, TileRows) among the packed rows of all tokens."""
        first = tile.token * self.heads.qhead_per_kvhead
        return first + tile.m * ROWS, TileRows(self.heads, tile, seqlen, first + self.heads.qhead_per_kvhead)


def problem_of(
    facts,
    mQ: cute.Tensor,  # (B, H, Sq, D)
    mK: cute.Tensor,  # (B or pages, Hkv, S, D)
    mIndices: cute.Tensor,  # (B, Sq, G, top)
    mSeqlens: cute.Tensor,  # (B,)
    mTable: cute.Tensor | None,  # (B, pages per sequence)
    right: Int32,
    splits: Int32,
) -> tuple:
    """(ListSource, TokenScheduler, sequence lengths)."""
    batch, heads, tokens, _ = mQ.shape
    kv_heads, groups = mK.shape[1], mIndices.shape[2]
    packed = heads // cutlass.max(groups, kv_heads)
    lists = heads // packed
    scheduler = TokenScheduler(cute.ceil_div(packed, ROWS), lists, tokens, batch, splits)
    source = ListSource(facts, GqaPacking(packed), mIndices, mTable, mK.shape[0], right, splits, lists, kv_heads)
    return source, scheduler, cache_seqlens(facts, tokens, mK, mSeqlens, mTable)
