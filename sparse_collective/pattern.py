"""A block pattern: its index tensors, what is known about their contents, and the tables that kernels derive from them.

All matrices with the same index tensors share one Pattern, so indices are checked once and each table is made once. A
registered op finds it by the identity of its index tensors (`pattern_of`). A Pattern lives as long as crow_indices, or
as the last matrix that holds it.

Keys describe a pattern without a device synchronization. The key of a block is row * cols + col, row-major, so the keys
of a pattern are ascending and without duplicates.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.matmul.problem import NOT_KNOWN, PatternStats
from cute_kernels.runtime.derived import Derived, OfTensors, captured, plain_result
from cute_kernels.runtime.torch_compat import in_graph_trace

from . import index_check
from .csc import csc_index

__all__ = ["Pattern", "pattern_of", "patterns_of"]

MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign
INFINITE = 0x7F800000  # the bits of infinity


class Pattern:
    """The indices of a BsrMatrix without its values.

    Args:
        crow_indices: (M / bm + 1,) int32 or int64; (L, M / bm + 1) for items with a pattern each.
        col_indices: (nnz,) of the same dtype.
        shape: (M, K), or (L, M, K) of items with a pattern each.
        blocksize: (bm, bk).
        caches: False while a graph is traced: tables are not cached.
    """

    crow_indices: Tensor
    col_indices: Tensor
    shape: tuple[int, ...]
    blocksize: tuple[int, int]
    batch: str | None  # "patterns" with items of a pattern each; items that share the pattern count as one matrix
    nnz: int
    n_block_rows: int  # M / bm
    n_block_cols: int  # K / bk
    numbers: Tensor | None  # of a transposed pattern, (nnz,) int32: the position of its blocks among the stored ones
    checked: bool  # True once `check` has passed, or if the indices are right by construction
    version: tuple | None  # of the index tensors when `checked` was set
    even: bool  # True if all block rows are known to have equally many blocks
    stats: PatternStats  # of block columns that its rows need, where known; kernels are selected by them
    tables: Derived | None  # derived tensors by key; None: not cached
    forms: dict[tuple, dict]  # attributes of matrices with this pattern, by what they depend on

    def __init__(
        self,
        crow_indices: Tensor,
        col_indices: Tensor,
        shape: tuple[int, ...],
        blocksize: tuple[int, int],
        caches: bool = True,
    ) -> None:
        self.crow_indices, self.col_indices, self.shape, self.blocksize = crow_indices, col_indices, shape, blocksize
        self.batch = "patterns" if crow_indices.dim() == 2 else None
        self.nnz = col_indices.shape[0]
        self.n_block_rows, self.n_block_cols = shape[-2] // blocksize[0], shape[-1] // blocksize[1]
        self.numbers, self.checked, self.version, self.even, self.stats = None, False, None, False, NOT_KNOWN
        self.tables, self.forms = Derived() if caches else None, {}

    @property
    def total_rows(self) -> int:
        """Block rows of all items."""
        return self.n_block_rows * (self.crow_indices.shape[0] if self.batch else 1)

    def clone(self) -> Pattern:
        """A copy that in-place changes of this one do not reach."""
        return Pattern(self.crow_indices.clone(), self.col_indices.clone(), self.shape, self.blocksize)

    # Facts

    def current_version(self) -> tuple | None:
        """A value that changes if an index tensor is written to; None if torch does not track versions."""
        try:
            return self.crow_indices._version, self.col_indices._version
        except RuntimeError:  # tensors of inference mode
            return None

    def check(self) -> None:
        """Check the contents of the indices once; see BsrMatrix.check_indices."""
        if self.checked:
            return
        if captured(self.crow_indices):
            raise RuntimeError(
                "this BsrMatrix has unchecked indices, and a CUDA graph cannot capture the check, which "
                "synchronizes; call check_indices() before the capture, or build the matrix with check=False"
            )
        version = self.current_version()
        error, even, stats = index_check.check(self)
        if error:
            raise ValueError(error)
        self.even, self.stats, self.version, self.checked = even, stats, version, True

    def trust(self, even: bool, stats: PatternStats | None = None) -> None:
        """Take the indices as they are now for right, without a check."""
        self.even, self.checked = even, True
        self.version = None if self.tables is None else self.current_version()
        if stats is not None:
            self.stats = stats

    def outdated(self) -> bool:
        """True if the indices have been, or may have been, written to since they were checked."""
        return self.checked and (self.version is None or self.version != self.current_version())

    def unchecked(self) -> Pattern:
        """The same pattern and tables, to be checked again."""
        other = copy.copy(self)
        other.checked, other.version = False, None
        return other

    def error(self) -> str:
        """The first error in the contents of the indices, or "". Synchronizes."""
        return index_check.check(self)[0]

    def aliases(self, crow_indices: Tensor, col_indices: Tensor) -> bool:
        """True if these tensors have the memory of this pattern's; `tensor.data = ...` gives them another."""
        return (
            self.crow_indices.data_ptr() == crow_indices.data_ptr()
            and self.col_indices.data_ptr() == col_indices.data_ptr()
        )

    # Tables

    def derived(self, key, make: Callable, tensors_of: Callable = tuple, *, rows_alone: bool = False):
        """Return `make()`, cached; computed again after a write to an index tensor.

        Args:
            key: of the table.
            make: computes it from the index tensors alone, on their device.
            tensors_of: value -> its tensors.
            rows_alone: True if it depends on crow_indices alone.

        See Derived for streams and CUDA graphs.
        """
        crow = self.crow_indices
        if self.tables is None:
            return plain_result(crow, make)
        try:
            version = crow._version if rows_alone else (crow._version, self.col_indices._version)
        except RuntimeError:  # tensors of inference mode, whose tables are not cached
            version = None
        return self.tables.get(key, crow, make, tensors_of, version)

    def transposed(self) -> Pattern:
        """The pattern of the transpose, cached. Its index tensors are the CSC index of this pattern."""
        return self.derived("transposed", self._transposed, _index_tensors)

    def _transposed(self) -> Pattern:
        crow, col, numbers = csc_index(self.crow_indices, self.col_indices, self.n_block_cols)
        *items, M, K = self.shape
        other = Pattern(crow, col, (*items, K, M), self.blocksize[::-1], self.tables is not None)
        other.numbers, other.checked = numbers, True
        return other

    # Blocks

    def rows(self) -> Tensor:
        """(nnz,) int64 block row of each block; of items with a pattern each, rows are counted through all of them."""
        ends = self.crow_indices[..., 1:].reshape(-1).contiguous()
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


def _index_tensors(pattern: Pattern) -> tuple[Tensor | None, ...]:
    return pattern.crow_indices, pattern.col_indices, pattern.numbers


patterns_of = OfTensors(list)  # crow_indices -> [(weak reference to col_indices, their Pattern)]


def pattern_of(
    crow_indices: Tensor, col_indices: Tensor, shape: tuple[int, ...], blocksize: tuple[int, int], check: bool
) -> Pattern:
    """The Pattern of these tensor objects, of Pattern's arguments.

    check: the caller checks the indices. If they may have been written to since they were checked, it gets a Pattern
        that is not checked yet; tables are shared.

    The Pattern refers to aliases of the tensors (`detach()`), with their memory and version counters: it may live as
    long as crow_indices, which it must not keep alive.
    """
    if torch.compiler.is_compiling() or in_graph_trace():
        return Pattern(crow_indices, col_indices, shape, blocksize, caches=False)
    entries = patterns_of(crow_indices)
    for i, (reference, pattern) in enumerate(entries):
        same = reference() is col_indices and pattern.shape == shape and pattern.blocksize == blocksize
        if same and pattern.aliases(crow_indices, col_indices):
            if check and pattern.outdated():
                pattern = pattern.unchecked()
                entries[i] = reference, pattern
            return pattern
    crow, col = (plain_result(t, t.detach) for t in (crow_indices, col_indices))
    pattern = Pattern(crow, col, shape, blocksize)
    entries[:] = [entry for entry in entries if entry[0]() is not None]
    entries.append((weakref.ref(col_indices), pattern))
    return pattern


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
