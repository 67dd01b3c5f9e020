"""The tiles of K and V that a block mask's lists name, and the order of query tiles.

    one row of blocks   | partial blocks: masked element by element | full blocks: no masking |

A block is as high as `tiles_q` query tiles, which visit the same lists, and as wide as `steps` tiles of K, which are
visited one after the other. The last block may go past the last column of K, even by whole tiles. There shared memory
holds zeros, and the block is partial, so that they are masked.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .kv_tiles import EITHER, FULL, PARTIAL
from .scheduler import QueryScheduler, QueryTile


@dataclass(frozen=True)
class BlockTiles:
    """The tiles of K and V that one query tile visits: those of its partial blocks, then those of its full ones."""

    count: Int32
    blocks: Int32
    partial: Int32  # how many blocks are partial
    ends: tuple  # how many tiles are visited up to the end of each segment
    index: cute.Tensor  # (both widths,): columns of blocks, full ones from `width` on
    width: Int32
    steps: cutlass.Constexpr[int]  # tiles a block
    kinds: cutlass.Constexpr[tuple] = (PARTIAL, FULL)
    first: cutlass.Constexpr[int] = EITHER

    def at(self, i) -> Int32:
        """Number of the i-th tile; past the last one, the number of some other tile."""
        block = cutlass.min(i // self.steps, self.blocks - 1)
        place = block + Int32(block >= self.partial) * (self.width - self.partial)
        return Int32(self.index[place]) * self.steps + i % self.steps

    def at_partial(self, i) -> Int32:
        """The same of a tile of the partial segment."""
        return Int32(self.index[i // self.steps]) * self.steps + i % self.steps


@dataclass(frozen=True)
class BlockSource:
    """The lists of a BlockMask. Extents of 1 for the batch or the heads serve all items or heads."""

    index: cute.Tensor  # (B, H, Mq, both widths) int32: kv_indices and full_kv_indices side by side
    width: Int32  # of kv_indices
    mask_tensors: tuple  # what the element mask reads
    tiles_q: cutlass.Constexpr[int]  # query tiles a block
    steps: cutlass.Constexpr[int]  # tiles of K a block

    def for_tile(self, tile, seqlen) -> BlockTiles:
        """The tiles for a query tile (scheduler.QueryTile) of an item of these lengths (seqlen.SeqlenInfo)."""
        batch, heads = self.index.shape[0], self.index.shape[1]
        b, h, row = cutlass.min(tile.b, batch - 1), cutlass.min(tile.h, heads - 1), tile.m // self.tiles_q
        return BlockTiles(
            tile.blocks * self.steps,
            tile.blocks,
            tile.partial,
            (tile.partial * self.steps, tile.blocks * self.steps),
            self.index[b, h, row, None],
            self.width,
            self.steps,
        )

    def place(self, tile, row) -> tuple:
        """(head of Q, row of it) of a row of a query tile's item."""
        return tile.h, row


@dataclass(frozen=True)
class BlockQueryTile(QueryTile):
    """A query tile, how many blocks it has, and how many of them are partial."""

    partial: Int32
    blocks: Int32


@dataclass(frozen=True)
class OrderedScheduler(QueryScheduler):
    """Query tiles in the order of a table, such as the longest first."""

    table: cute.Tensor = None  # (tiles, 3) int32: QueryScheduler's number of heads one by one, partial blocks, blocks

    def fields(self, index) -> tuple:
        """QueryScheduler's, and how many blocks are partial and how many there are.

        From the table; past its end those of its last row, which nobody computes.
        """
        row = cutlass.min(index, self.count - 1)
        number, partial, blocks = (Int32(self.table[row, i]) for i in range(3))
        return *QueryScheduler.fields(self, number), partial, blocks

    def of_fields(self, fields: tuple) -> BlockQueryTile:
        m, h, b, partial, blocks = fields
        return BlockQueryTile(m, h, b, h // self.qhead_per_kvhead, partial, blocks)


def with_blocks(facts, scheduler: QueryScheduler, blocks: tuple) -> tuple:
    """(scheduler, source) for what block_sparse.blocks_of makes of a mask."""
    index, width, table, *mask_tensors = blocks
    kind, cfg = facts.blocks, facts.config
    tiles_q, steps = kind.block_q // cfg.tile_m, kind.block_k // cfg.tile_n
    ordered = OrderedScheduler(
        scheduler.tiles_m, scheduler.heads, scheduler.batch, scheduler.qhead_per_kvhead, table=table
    )
    return ordered, BlockSource(index, width, tuple(mask_tensors), tiles_q, steps)
