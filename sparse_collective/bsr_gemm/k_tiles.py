"""A block row's stored blocks as K-tiles: the one thing that makes a dense mainloop block-sparse.

A is BSR with blocks (bm, bk): `crow_indices` (M / bm + 1) says where a block row's blocks begin among the stored
ones, `col_indices` (nnz) in which block column each lies. Stored block p is matrix p of mA (bm, bk, nnz), and
multiplies matrix col_indices[p] of mB (N, bk, K / bk, L). A block taller than tile_m is several row tiles that
walk the same list; a block wider than tile_k is several K-tiles.

A may be a batch of items. Either all have one pattern: then block p of item l is matrix p + l * nnz of mA. Or each has
its own: then crow_indices has a second mode, and its numbers count the blocks of all items. Which item a work tile
takes is its l; or, for a grouped product, `groups` says so for every run of columns.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.k_tiles import ANY, KTile


@dataclass(frozen=True)
class BsrKTiles:
    """K-tiles of one block row, or of the part of it that one row tile covers."""

    col_indices: cute.Tensor
    count: Int32
    begin: Int32  # number of the row's first stored block
    first: Int32  # where that block's values lie: the same number, but in a batch of one pattern
    row: Int32  # block row
    rest_m: Int32  # row tile inside the block
    l: Int32  # item of A
    steps: cutlass.Constexpr[int]  # K-tiles a block; static, or at() would divide
    numbers: cute.Tensor | None = None  # of a transposed view: where the row's blocks lie
    scales: cute.Tensor | None = None  # (blocks,) fp32, of blocks that have one each

    def out(self, n) -> tuple:
        return self.rest_m, n, self.row

    def at(self, i) -> KTile:
        p = i // self.steps
        k = i % self.steps
        block = self.first + p
        if self.numbers is not None:
            block = self.first - self.begin + Int32(self.numbers[self.begin + p])
        return KTile(a=(self.rest_m, k, block), b=(k, Int32(self.col_indices[self.begin + p])))

    def scale(self, i) -> Float32:
        """Scale of the block of K-tile i. Past the last K-tile it is an arbitrary valid one, which is never used, so
        that scales can be prefetched."""
        return self.scales[cutlass.min(self.first + i // self.steps, self.scales.shape[0] - 1)]


@dataclass(frozen=True)
class BsrSource:
    """The sparse source: row tile m lies in block row m // tiles_m and sums over that row's stored blocks."""

    crow_indices: cute.Tensor  # (M / bm + 1,) int32 or int64; with batch "patterns" (M / bm + 1, L)
    col_indices: cute.Tensor  # (nnz,)
    tiles_m: cutlass.Constexpr[int]  # row tiles a block
    steps: cutlass.Constexpr[int]  # K-tiles a block
    order: cute.Tensor | None = None  # (tiles, 2), of the work tiles, where rows differ in length (tile_order)
    batch: cutlass.Constexpr[str | None] = None  # BlockFacts.batch
    items: Int32 | None = None  # L, of a batch
    groups: cute.Tensor | None = None  # (runs,) int32: the item of each run of columns
    tiles_run: cutlass.Constexpr[int] = 1  # column tiles in a run
    numbers: cute.Tensor | None = None  # (nnz,) int32, of a transposed view: which stored block each block is
    scales: cute.Tensor | None = None  # (blocks,) fp32, in the order of values, of blocks that have one each
    columns = None

    @property
    def shared_rows(self) -> int:
        """The row tiles of one block row."""
        return self.tiles_m

    @property
    def shared_columns(self) -> int:
        """All column tiles; of a grouped product those of a run."""
        return ANY if self.groups is None else self.tiles_run

    def bounds(self, m, n, l) -> tuple:
        """(begin, end) of the block row's stored blocks; of a grouped product (begin, end, item)."""
        row = m // self.tiles_m
        if self.groups is None:
            return self.stored(row, l)
        # No number leads outside of A: a run with one that is out of range sums over nothing.
        number = Int32(self.groups[n // self.tiles_run])
        item = cutlass.max(cutlass.min(number, self.items - 1), 0)
        begin, end = self.stored(row, item)
        return begin, begin + (end - begin) * Int32(number == item), item

    def stored(self, row, item) -> tuple:
        if self.batch == "patterns":
            return Int32(self.crow_indices[row, item]), Int32(self.crow_indices[row + 1, item])
        return Int32(self.crow_indices[row]), Int32(self.crow_indices[row + 1])

    def for_tile(self, m, l, bounds) -> BsrKTiles:
        begin, end, *item = bounds
        item = item[0] if item else l
        first = begin + item * Int32(self.col_indices.shape[0]) if self.batch == "values" else begin
        count = (end - begin) * self.steps
        row, rest_m = m // self.tiles_m, m % self.tiles_m
        return BsrKTiles(
            self.col_indices, count, begin, first, row, rest_m, item, self.steps, self.numbers, self.scales
        )
