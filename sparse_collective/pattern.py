"""Block patterns as sorted keys, made and compared without a device synchronization.

The key of a block is row * cols + col, row-major, so that the keys of a pattern are ascending and without duplicates.
Everything here is sort, searchsorted and gather on the indices' device: sizes are known on the host, contents are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import index_check

__all__ = ["Pattern"]

MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign
INFINITE = 0x7F800000  # the bits of infinity


@dataclass(frozen=True, eq=False)
class Pattern:
    """The indices of a BsrMatrix without its values.

    Args:
        crow_indices: (M / bm + 1,) int32 or int64; (L, M / bm + 1) for items with a pattern each.
        col_indices: (nnz,) of the same dtype.
        shape: (M, K), or (L, M, K) of items with a pattern each.
        blocksize: (bm, bk).
    """

    crow_indices: Tensor
    col_indices: Tensor
    shape: tuple[int, ...]
    blocksize: tuple[int, int]

    @property
    def nnz(self) -> int:
        return self.col_indices.shape[0]

    @property
    def n_block_rows(self) -> int:
        return self.shape[-2] // self.blocksize[0]

    @property
    def n_block_cols(self) -> int:
        return self.shape[-1] // self.blocksize[1]

    @property
    def batch(self) -> str | None:
        """As index_check asks for it: items of one pattern count as one matrix."""
        return "patterns" if self.crow_indices.dim() == 2 else None

    @property
    def total_rows(self) -> int:
        """Block rows of all items."""
        return self.n_block_rows * (self.crow_indices.shape[0] if self.batch else 1)

    def clone(self) -> Pattern:
        """A copy that changes in place of this one do not reach."""
        return Pattern(self.crow_indices.clone(), self.col_indices.clone(), self.shape, self.blocksize)

    def rows(self) -> Tensor:
        """(nnz,) int64 block row of each block; of items with a pattern each, rows are counted through all of them."""
        ends = self.crow_indices[..., 1:].reshape(-1)
        numbers = torch.arange(self.nnz, dtype=ends.dtype, device=ends.device)
        return torch.searchsorted(ends, numbers, right=True)

    def keys(self) -> Tensor:
        """(nnz,) int64, ascending."""
        return self.rows() * self.n_block_cols + self.col_indices

    def mask(self) -> Tensor:
        """(M / bm, K / bk) bool, or one of each item."""
        stored = torch.zeros(self.total_rows * self.n_block_cols, dtype=torch.bool, device=self.col_indices.device)
        shape = (*self.crow_indices.shape[:-1], self.n_block_rows, self.n_block_cols)
        return stored.index_fill_(0, self.keys(), True).view(shape)

    def error(self) -> str:
        """The first error in the contents of the indices, or "". Synchronizes."""
        return index_check.check(self)[0]


def indices_of(keys: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """(crow_indices, col_indices), int32, of ascending keys (nnz,) in a grid of rows x cols blocks."""
    starts = torch.arange(rows + 1, device=keys.device) * cols
    return torch.searchsorted(keys, starts, out_int32=True), (keys % max(cols, 1)).int()


def ranks(scores: Tensor) -> Tensor:
    """int32 of scores in float32, ascending from the highest score to the lowest: NaN first, both zeros alike.

    Sorted by these, scores have one order on every device. That of floats is not: CUDA's radix sort looks at bits, and
    takes a NaN for the lowest number of all if its sign bit is set.
    """
    bits = scores.float().contiguous().view(torch.int32)
    magnitude = bits & MAGNITUDE
    rank = torch.where((bits >= 0) | (magnitude == 0), -1 - magnitude, magnitude)
    return rank.masked_fill_(magnitude > INFINITE, -(2**31))


def top_keys(scores: Tensor, nnz: int) -> Tensor:
    """(nnz,) ascending keys of the highest of scores (rows, cols). NaN ranks first; of equal ones the earlier block.

    A stable sort, because every process of a group must take the same blocks.
    """
    return ranks(scores.flatten()).argsort(stable=True)[:nnz].sort().values


def top_keys_of_rows(scores: Tensor, per_row: int) -> Tensor:
    """(rows * per_row,) ascending keys of the highest `per_row` scores (rows, cols) of each row."""
    rows, cols = scores.shape
    kept = ranks(scores).argsort(dim=1, stable=True)[:, :per_row].sort(dim=1).values
    return (kept + torch.arange(rows, device=scores.device)[:, None] * cols).flatten()


def random_keys(rows: int, cols: int, nnz: int, device: torch.device | None = None) -> Tensor:
    """(nnz,) ascending keys of blocks drawn at random, of which block rows hold equally many, or one more.

    Which rows hold one more is drawn, too.
    """
    scores = torch.rand(rows, cols, device=device)
    each, more = divmod(nnz, max(rows, 1))
    rank = scores.argsort(dim=1, descending=True).argsort(dim=1)  # of a block in its row
    lucky = torch.rand(rows, device=scores.device).argsort().argsort() < more
    chosen = rank < each + lucky[:, None].long()
    return top_keys(chosen.float(), nnz)
