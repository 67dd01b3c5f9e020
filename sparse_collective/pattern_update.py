"""Change a block pattern in place: choose the blocks that it stores next, and move stored blocks to their new places.

Sorts, searches and gathers of torch on the indices' device. Nothing synchronizes, so a change can be part of a captured
CUDA graph. On every device the same scores give the same pattern: sorts are stable, and compare integers (see ranks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .conversions import bits, of_bits
from .pattern import INFINITE, indices_of, ranks


def update_pattern_(
    scores: Tensor, candidates: Tensor, crow: Tensor, col: Tensor, cols: int, dropped: int, even: bool
) -> Tensor:
    """Drop the stored blocks of lowest score, store as many candidates, and write the new indices in place.

    Equal scores prefer the earlier block; NaN ranks first.

    Args:
        scores: (nnz,) float32 of the stored blocks.
        candidates: (rows * cols,) float32 of all blocks. The highest are stored, except where a block is kept.
        crow, col: (rows + 1,) and (nnz,) int32; overwritten. With `even`, crow stays as it is.
        cols: number of block columns.
        dropped: number of blocks to drop; with `even`, of each block row.
        even: choose in each block row separately; all block rows hold equally many blocks.

    Returns:
        (nnz,) int64: the previous position of each block of the new pattern, -1 if it was not stored.
    """
    rows, nnz = len(crow) - 1, len(col)
    lanes = rows if even else 1
    kept = nnz // lanes - dropped
    if even:
        first = torch.arange(0, rows * cols, cols, device=col.device)[:, None]  # key of each block row's first block
        keys = first + col.view(rows, -1)
    else:
        row = torch.searchsorted(crow[1:], torch.arange(nnz, dtype=crow.dtype, device=col.device), right=True)
        keys = (row * cols + col)[None]
    order = ranks(scores).view(lanes, -1).argsort(dim=1, stable=True)
    kept_keys = keys.gather(1, order[:, :kept])
    # Kept blocks rank last among the candidates, after minus infinity, which counts as the lowest finite number.
    rank = ranks(candidates).clamp_(max=INFINITE - 1).index_fill_(0, kept_keys.flatten(), INFINITE)
    grown = rank.view(lanes, -1).argsort(dim=1, stable=True)[:, :dropped]
    if even:
        grown = grown + first
    new = torch.cat([kept_keys, grown], dim=1).sort(dim=1).values.flatten()
    origin = origins(keys.flatten(), new)
    starts, columns = indices_of(new, rows, cols)
    if not even:
        crow.copy_(starts)
    col.copy_(columns)
    return origin


def origins(old: Tensor, new: Tensor) -> Tensor:
    """(n,) int64: the position of each of the ascending keys `new` in the ascending keys `old`, -1 if it is absent.

    `old` is not empty.
    """
    place = torch.searchsorted(old, new).clamp_(max=len(old) - 1)
    return torch.where(old[place] == new, place, -1)


def moved(t: Tensor, origin: Tensor) -> Tensor:
    """The blocks of t (nnz, ...) at new positions (n, ...): each from its origin (n,), zeros for -1."""
    absent = (origin < 0).view(-1, *(1,) * (t.dim() - 1))
    return of_bits(bits(t).index_select(0, origin.clamp(min=0)).masked_fill_(absent, 0), t.dtype)
