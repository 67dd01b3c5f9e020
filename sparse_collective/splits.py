"""Parts of a BsrMatrix: split it along block rows or block columns, and choose where to split."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .conversions import Balance, bits, of_bits
from .pattern import Pattern

__all__ = ["even_sizes", "sizes_of", "split", "submatrix", "submatrix_index"]


def even_sizes(extent: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of `extent` blocks, which differ by at most one; larger ones first."""
    each, more = divmod(extent, parts)
    return [each + (i < more) for i in range(parts)]


def sizes_of(op: str, counts: Tensor, parts: int | Sequence[int], balance: Balance) -> list[int]:
    """Sizes in blocks of contiguous parts.

    Args:
        op: name of the caller, for errors.
        counts: (extent,) stored blocks of each block row or column.
        parts: number of parts, or their sizes.
        balance: "extent": sizes differ by at most one; "blocks": parts store about equally many blocks.

    Raises:
        ValueError: parts are not positive, sizes do not add up to the extent, or balance is unknown.
    """
    extent = len(counts)
    if balance not in ("extent", "blocks"):
        raise ValueError(f"{op}: balance is {balance!r}; use 'extent' or 'blocks'")
    if not isinstance(parts, Sequence):
        if (parts := operator.index(parts)) < 1:
            raise ValueError(f"{op}: parts is {parts}; there must be at least one")
        if balance == "extent":
            return even_sizes(extent, parts)
        ends = counts.long().cumsum(0)
        total = int(ends[-1]) if extent else 0
        targets = torch.arange(1, parts, device=ends.device, dtype=torch.float64) * total / parts
        middles = ends.double() - counts.double() / 2  # a block row belongs to the part that its middle is in
        cuts = [0, *torch.searchsorted(middles, targets).tolist(), extent]
        return [end - begin for begin, end in itertools.pairwise(cuts)]
    sizes = [operator.index(size) for size in parts]
    if balance != "extent":
        raise ValueError(f"{op}: sizes are given, so balance={balance!r} has no meaning; pass a number of parts")
    if min(sizes, default=0) < 0 or sum(sizes) != extent:
        raise ValueError(f"{op}: sizes {sizes} must not be negative, and add up to {extent} blocks")
    return sizes


def block_counts(pattern: Pattern, dim: int) -> Tensor:
    """(extent,) stored blocks of each block row (dim 0) or block column (dim 1), of all items together."""
    if dim == 0:
        lengths = pattern.crow_indices.diff()
        return lengths if lengths.dim() == 1 else lengths.sum(0)
    return torch.bincount(pattern.col_indices, minlength=pattern.n_block_cols)


def submatrix_index(pattern: Pattern, dim: int, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pattern of some block rows (dim 0) or block columns (dim 1), in the order of `chosen`.

    Args:
        pattern: of one matrix, or of items with a pattern each.
        chosen: (n,) int64, without duplicates.

    Returns:
        crow_indices, col_indices: of the dtype of the pattern's.
        positions: (nnz,) int64 of the stored blocks in the pattern.

    Synchronizes.
    """
    rows, cols = pattern.n_block_rows, pattern.n_block_cols
    items = pattern.crow_indices.shape[0] if pattern.batch else 1
    row, col, device = pattern.rows(), pattern.col_indices.long(), pattern.col_indices.device
    place = torch.full((rows if dim == 0 else cols,), -1, dtype=torch.int64, device=device)
    place[chosen] = torch.arange(len(chosen), device=device)
    if dim == 0:
        new, new_rows, new_cols = place[row % max(rows, 1)], len(chosen), cols
        keys = (row // max(rows, 1) * new_rows + new) * new_cols + col
    else:
        new, new_rows, new_cols = place[col], rows, len(chosen)
        keys = row * new_cols + new
    positions = (new >= 0).nonzero().flatten()
    keys, order = keys[positions].sort()
    dtype = pattern.col_indices.dtype
    starts = torch.arange(items * new_rows + 1, device=device) * new_cols
    crow = torch.searchsorted(keys, starts).to(dtype)
    if pattern.batch:  # the last number of an item is the first one of the next
        crow = crow.as_strided((items, new_rows + 1), (new_rows, 1)).contiguous()
    return crow, (keys % max(new_cols, 1)).to(dtype), positions[order]


def submatrix(W: Any, dim: int, chosen: Tensor) -> Any:
    """The matrix of some block rows (dim 0) or block columns (dim 1), in the order of `chosen`; copies.

    Differentiable. Synchronizes.
    """
    crow, col, positions = submatrix_index(W.pattern, dim, chosen)
    values = of_bits(bits(W.values).index_select(-3, positions), W.dtype)
    scales = W.scales
    if W.scaled_per == "block":
        scales = W.scales.index_select(-1, positions)
    shape = list(W.shape)
    shape[dim - 2] = len(chosen) * W.blocksize[dim]
    return W._make(crow, col, values, shape, check=W.check, checked=True, scales=scales)


def split(W: Any, dim: int, parts: int | Sequence[int], balance: Balance = "extent") -> list:
    """See BsrMatrix.split."""
    extents = len(W.shape)
    if not -extents <= dim < extents:
        raise IndexError(f"BsrMatrix.split: dim is {dim}; the matrix has {extents} dimensions")
    dim = dim % extents - (extents - 2)
    if dim < 0:
        raise ValueError("BsrMatrix.split: dim is the batch's; unbind() returns the items")
    if W.base is not None:
        return [part.t() for part in split(W.base, 1 - dim, parts, balance)]
    if W.check:
        W.check_indices()
    sizes = sizes_of("BsrMatrix.split", block_counts(W.pattern, dim), parts, balance)
    begins = [0, *itertools.accumulate(sizes)]
    if dim == 0 and W.batch is None:
        return _row_views(W, begins)
    device = W.device
    return [submatrix(W, dim, torch.arange(begin, end, device=device)) for begin, end in itertools.pairwise(begins)]


def _row_views(W: Any, begins: list[int]) -> list:
    """Contiguous block rows, which share col_indices and values."""
    crow, parts = W.crow_indices, []
    cuts = crow[torch.tensor(begins, device=crow.device)].tolist()
    for (first, last), (begin, end) in zip(itertools.pairwise(begins), itertools.pairwise(cuts), strict=True):
        scales = W.scales[begin:end] if W.scaled_per == "block" else W.scales
        parts.append(W._make(
            crow[first : last + 1] - begin, W.col_indices[begin:end], W.values[begin:end],
            ((last - first) * W.blocksize[0], W.shape[1]), check=W.check, checked=W.checked, even=W.even, scales=scales,
        ))  # fmt: skip
    return parts
