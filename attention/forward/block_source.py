"""KV tiles listed by a block mask, and the order of query tiles.

    one row of blocks   | partial blocks: masked element by element | full blocks: no masking |

A block spans `tiles_q` query tiles, which visit the same lists, and `steps` KV tiles, which are visited one after the
other. The last block may extend past the last column of K, even by whole tiles. Shared memory holds zeros there, and
the block is partial, so these columns are masked.

Lists may contain numbers that are no block (BlockMask.from_indices). Those that are negative or large count as a block
after the longest mask, MOST columns. In memory nothing is read for blocks past the last one, and among partial blocks
all of one is masked.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..masks.block_lists import MOST
from .heads import GqaPacking, OneHead
from .kv_tiles import EITHER, FULL, PARTIAL
from .scheduler import QueryScheduler, QueryTile


@dataclass(frozen=True)
class BlockTiles:
    """KV tiles that one query tile visits: those of its partial blocks, then those of its full blocks."""

    count: Int32
    blocks: Int32
    partial: Int32  # number of partial blocks
    ends: tuple  # number of tiles up to the end of each segment
    index: cute.Tensor  # (both widths,): block columns; full blocks begin at `width`
    width: Int32
    most: cutlass.Constexpr[int]  # block columns of the longest mask
    steps: cutlass.Constexpr[int]  # KV tiles per block
    kinds: cutlass.Constexpr[tuple] = (PARTIAL, FULL)
    first: cutlass.Constexpr[int] = EITHER

    def at(self, i) -> Int32:
        """Index of the i-th tile; past the last one, the index of some other tile."""
        block = cutlass.min(i // self.steps, self.blocks - 1)
        place = block + Int32(block >= self.partial) * (self.width - self.partial)
        return self.column(place) * self.steps + i % self.steps

    def at_partial(self, i) -> Int32:
        """Index of the i-th tile, which must be in the partial segment."""
        return self.column(i // self.steps) * self.steps + i % self.steps

    def column(self, place) -> Int32:
        """A listed block column, at most `most`; `most` if it is negative. Positions in it fit into int32."""
        return Int32(cutlass.min(Uint32(Int32(self.index[place])), Uint32(self.most)))


@dataclass(frozen=True)
class BlockSource:
    """The lists of a BlockMask. A batch or head extent of 1 is broadcast."""

    index: cute.Tensor  # (B, H, Mq, both widths) int32: kv_indices and full_kv_indices side by side
    width: Int32  # of kv_indices
    mask_tensors: tuple  # inputs of the element mask
    tiles_q: cutlass.Constexpr[int]  # query tiles per block
    most: cutlass.Constexpr[int]  # block columns of the longest mask
    steps: cutlass.Constexpr[int]  # KV tiles per block
    heads: OneHead | GqaPacking = OneHead()

    def for_tile(self, tile, seqlen) -> BlockTiles:
        """KV tiles of a query tile (scheduler.QueryTile) of a sequence with these lengths (seqlen.SeqlenInfo)."""
        batch, heads = self.index.shape[0], self.index.shape[1]
        b, h, row = cutlass.min(tile.b, batch - 1), cutlass.min(tile.h, heads - 1), tile.m // self.tiles_q
        return BlockTiles(
            tile.blocks * self.steps,
            tile.blocks,
            tile.partial,
            (tile.partial * self.steps, tile.blocks * self.steps),
            self.index[b, h, row, None],
            self.width,
            self.most,
            self.steps,
        )


@dataclass(frozen=True)
class BlockQueryTile(QueryTile):
    """A query tile with its number of partial blocks and its number of blocks."""

    partial: Int32
    blocks: Int32


@dataclass(frozen=True)
class OrderedScheduler(QueryScheduler):
    """Query tiles in the order of a table, such as longest first."""

    table: cute.Tensor = None  # (tiles, 3) int32: QueryScheduler's tile index (head by head), partial blocks, blocks

    def fields(self, index) -> tuple:
        """QueryScheduler's fields, the number of partial blocks, and the number of blocks.

        They are read from the table; past its end, its last row is returned, and that tile is not computed.
        """
        row = cutlass.min(index, self.count - 1)
        number, partial, blocks = (Int32(self.table[row, i]) for i in range(3))
        return *QueryScheduler.fields(self, number), partial, blocks

    def of_fields(self, fields: tuple) -> BlockQueryTile:
        m, h, b, partial, blocks = fields
        return BlockQueryTile(m, h, b, h // self.qhead_per_kvhead, partial, blocks)


def with_blocks(facts, scheduler: QueryScheduler, blocks: tuple) -> tuple:
    """(scheduler, source) for the output of block_sparse.blocks_of."""
    index, width, table, *mask_tensors = blocks
    kind, cfg = facts.blocks, facts.config
    tiles_q, steps = kind.block_q // cfg.tile_m, kind.block_k // cfg.tile_n
    ordered = OrderedScheduler(
        scheduler.tiles_m, scheduler.heads, scheduler.batch, scheduler.qhead_per_kvhead, table=table
    )
    return ordered, BlockSource(index, width, tuple(mask_tensors), tiles_q, MOST // kind.block_k, steps)
