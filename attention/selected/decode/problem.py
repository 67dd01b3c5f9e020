"""Problems of the decode kernel for selected blocks: query tokens with their lists, and splits of the lists.

The keys of a list are numbered from 0: key p is in the block of entry p // block_size. A tile is `tile_n` keys, and a
split is a run of tiles. A tile consists of boxes: keys that are adjacent in memory, of one block and one page. The
lanes of a warp look up the places of as many of its tiles at once as have 32 boxes, and `shuffle_sync` distributes
them.

Divisors are computed by the launching function. A division by a runtime value takes some 150 clocks, and the address of
a CTA's first list entry would need seven.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cutlass_dsl import select_

from ...decode.problem import cache_seqlens
from ...forward.heads import GqaPacking
from .config import ROWS


@dataclass(frozen=True)
class TokenTile:
    """Tile m of the rows of one query token of sequence b: query heads that share list `h_kv`; and a split's index."""

    m: Int32
    h_kv: Int32
    token: Int32
    b: Int32
    split: Int32


class TokenHeads(GqaPacking):
    """Query heads that share a list: row r of a token is query head tile.h_kv * g + r; past the end, the last one."""

    def place(self, tile: TokenTile, row) -> tuple:
        return tile.h_kv * self.qhead_per_kvhead + cutlass.min(row, self.qhead_per_kvhead - 1), tile.token

    def view(self, tensor: cute.Tensor, tile: TokenTile, seqlen) -> cute.Tensor:
        """Rows (g, ..) of (B, H, Sq, ..)."""
        rest = tensor.shape[3:]
        heads = tensor[(tile.b, None, tile.token, *(None for _ in rest))]
        return cute.domain_offset((tile.h_kv * self.qhead_per_kvhead, *(0 for _ in rest)), heads)


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
    def places(self, warp: Int32, n: Int32 | int) -> tuple:
        """Places of the boxes of a warp's tiles from its n-th on: (page, row in it, number of its keys that exist).

        Lane j has box j % boxes of tile n + j // boxes; past the end, of the last one. Without pages, the page is the
        sequence. It is -1 if the page table has no valid one, whose keys are zeros.
        """
        facts, lane = self.facts, cute.arch.lane_idx()
        i = warp + (n + lane // facts.boxes) * facts.config.groups
        i = cutlass.max(cutlass.min(i, self.count - 1), 0)
        key = (self.first + i) * facts.config.tile_n + lane % facts.boxes * facts.box
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

    def of_tile(self, places: tuple, n: Int32 | int) -> tuple:
        """Place of box (lane % boxes) of a warp's n-th tile, among `places` of `tiles_at_once` tiles."""
        facts = self.facts
        if facts.tiles_at_once == 1:
            return places
        at = n % facts.tiles_at_once * facts.boxes + cute.arch.lane_idx() % facts.boxes
        return tuple(cute.arch.shuffle_sync(x, at) for x in places)


@dataclass(frozen=True)
class ListSource:
    """The lists of all query tokens, (B, Sq, G, top), and the cache that their blocks are in.

    A CTA computes one split. The grid is (splits x tiles x B, lists of a token, Sq).
    """

    facts: cutlass.Constexpr  # config.SelectedDecodeFacts
    heads: TokenHeads
    indices: cute.Tensor
    table: cute.Tensor | None  # (B, pages per sequence)
    pages: Int32
    right: Int32  # 0: causal; Sq: not
    # Divisors; a list is that of `heads`, and several may be the same or have the same KV head.
    by_split: Any  # number of splits
    by_tile: Any  # tiles of a list
    by_group: Any  # lists of one of the G
    by_kv_head: Any  # lists of a KV head

    @property
    def splits(self) -> Any:
        return self.facts.cluster if self.facts.cluster > 1 else self.by_split

    def tile(self, index: tuple) -> TokenTile:
        """The tile and split of a CTA."""
        x, h_kv, token = index
        rest = x // self.splits
        return TokenTile(rest % self.by_tile, h_kv, token, rest // self.by_tile, x % self.splits)

    def kv_head(self, tile: TokenTile) -> Int32:
        return tile.h_kv // self.by_kv_head

    def for_tile(self, tile: TokenTile, seqlen) -> ListTiles:
        g = tile.h_kv // self.by_group
        indices = self.indices[tile.b, tile.token, g, None]
        limit = cutlass.min(seqlen.cols, seqlen.cols - seqlen.rows + tile.token + 1 + self.right)
        table = None if self.table is None else self.table[tile.b, None]
        count = cute.ceil_div(indices.shape[0] * self.facts.block_size, self.facts.config.tile_n)
        begin, end = (count * split // self.splits for split in (tile.split, tile.split + 1))
        return ListTiles(self.facts, indices, table, self.pages, tile.b, begin, end - begin, limit)


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
    """(ListSource, sequence lengths, grid)."""
    batch, heads, tokens, _ = mQ.shape
    kv_heads, groups = mK.shape[1], mIndices.shape[2]
    packed = heads // cutlass.max(groups, kv_heads)
    lists, tiles_m = heads // packed, cute.ceil_div(packed, ROWS)
    numbers = splits, tiles_m, lists // groups, lists // kv_heads
    divisors = (cute.fast_divmod_create_divisor_v2(cutlass.max(n, 1)) for n in numbers)
    source = ListSource(facts, TokenHeads(packed), mIndices, mTable, mK.shape[0], right, *divisors)
    grid = splits * tiles_m * batch, lists, tokens
    return source, cache_seqlens(facts, tokens, mK, mSeqlens, mTable), grid
