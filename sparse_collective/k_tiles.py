"""A block row's stored blocks as K-tiles: the one thing that makes a dense mainloop block-sparse.

A is BSR with blocks (bm, bk): `crow_indices` (M / bm + 1) says where a block row's blocks begin among the stored
ones, `col_indices` (nnz) in which block column each lies. Stored block p is matrix p of mA (bm, bk, nnz), and
multiplies matrix col_indices[p] of mB (N, bk, K / bk, L). A block taller than tile_m is several row tiles that
walk the same list; a block wider than tile_k is several K-tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.k_tiles import KTile


@dataclass(frozen=True)
class BsrKTiles:
    """K-tiles of one block row, or of the part of it that one row tile covers."""

    col_indices: cute.Tensor
    count: Int32
    begin: Int32  # number of the row's first stored block
    row: Int32  # block row
    rest_m: Int32  # row tile inside the block
    steps: cutlass.Constexpr[int]  # K-tiles a block; static, or at() would divide

    @property
    def out(self) -> tuple:
        return self.rest_m, self.row

    def at(self, i) -> KTile:
        p = self.begin + i // self.steps
        k = i % self.steps
        return KTile(a=(self.rest_m, k, p), b=(k, Int32(self.col_indices[p])))


@dataclass(frozen=True)
class BsrSource:
    """The sparse source: row tile m lies in block row m // tiles_m and sums over that row's stored blocks."""

    crow_indices: cute.Tensor  # (M / bm + 1,) int32 or int64
    col_indices: cute.Tensor  # (nnz,)
    tiles_m: cutlass.Constexpr[int]  # row tiles a block
    steps: cutlass.Constexpr[int]  # K-tiles a block
    order: cute.Tensor | None = None  # (tiles, 2), of the work tiles, where rows differ in length (balance.py)

    def bounds(self, m) -> tuple:
        """(begin, end) of the block row's stored blocks."""
        row = m // self.tiles_m
        return Int32(self.crow_indices[row]), Int32(self.crow_indices[row + 1])

    def for_tile(self, m, l, bounds) -> BsrKTiles:
        begin, end = bounds
        count = (end - begin) * self.steps
        return BsrKTiles(self.col_indices, count, begin, m // self.tiles_m, m % self.tiles_m, self.steps)
