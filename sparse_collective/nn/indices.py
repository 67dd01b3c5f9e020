"""The indices of a new layer: drawn at random, or as a mask or index tensors have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks as arguments
from ..pattern import Pattern, indices_of, random_keys

__all__ = ["drawn_indices", "given_indices", "owned"]


def owned(t: Tensor) -> Tensor:
    """`t`, or a copy of a view: in its place a compiled backward gets another object, of which nothing is known."""
    return t.clone() if t._is_view() else t


def drawn_indices(patterns: int | None, rows: int, cols: int, nnz: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(crow_indices, col_indices) int32 of a random pattern of nnz blocks, or of so many patterns of nnz each.

    Returns (rows + 1,) or (patterns, rows + 1), and (patterns * nnz,). On the meta device without contents.
    """
    total = 1 if patterns is None else patterns
    if device.type == "meta":
        crow = torch.empty(total, rows + 1, dtype=torch.int32, device=device)
        col = torch.empty(total * nnz, dtype=torch.int32, device=device)
    else:
        drawn = [indices_of(random_keys(rows, cols, nnz, device), rows, cols) for _ in range(total)]
        crow = torch.stack([crow + i * nnz for i, (crow, _) in enumerate(drawn)])
        col = torch.cat([col for _, col in drawn])
    return crow if patterns is not None else crow[0], col


def given_indices(
    name: str,
    *,
    mask: Tensor | None,
    indices: Any,
    patterns: int | None,
    grid: tuple[int, int],
    blocksize: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """(crow_indices, col_indices) int32 of a mask, or of indices, which are copied and checked. Synchronizes.

    Args:
        name: of the layer, for messages.
        mask: bool, of the grid's shape; with patterns (patterns, *grid).
        indices: (crow_indices, col_indices) in place of the mask, int32 or int64.
        patterns: how many there are; None: one, without a dimension for them.
        grid, blocksize: (M / bm, K / bk) and (bm, bk).

    Raises:
        TypeError, ValueError: what was given has another type, dtype or shape, or is no pattern.
    """
    rows, cols = grid
    lead = () if patterns is None else (patterns,)
    if mask is not None:
        return _of_mask(name, mask, (*lead, rows, cols))
    try:
        crow, col = indices
    except (TypeError, ValueError):
        raise TypeError(f"{name}: indices must be (crow_indices, col_indices), got {indices!r}") from None
    for what, t in (("crow_indices", crow), ("col_indices", col)):
        if not arguments.is_strided(t) or t.dtype not in arguments.INDEX_DTYPES:
            raise TypeError(f"{name}: {what} must be an int32 or int64 tensor, got {arguments.describe(t)}")
    shape = (*lead, rows + 1)
    if tuple(crow.shape) != shape or col.dim() != 1:
        found = f"{tuple(crow.shape)} and {tuple(col.shape)}"
        raise ValueError(f"{name}: crow_indices and col_indices are {found}; they must be {shape} and (nnz,)")
    crow, col = crow.int().contiguous().clone(), col.int().contiguous().clone()
    if not crow.is_meta:
        extents = *lead, rows * blocksize[0], cols * blocksize[1]
        if error := Pattern(crow, col, extents, blocksize).error():
            raise ValueError(f"{name}: {error}")
    return crow, col


def _of_mask(name: str, mask: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if not arguments.is_strided(mask) or mask.dtype is not torch.bool:
        raise TypeError(f"{name}: mask must be a strided bool tensor, got {arguments.describe(mask)}")
    if tuple(mask.shape) != grid:
        raise ValueError(f"{name}: mask has shape {tuple(mask.shape)}; the blocks are {grid}")
    if mask.is_meta:
        raise ValueError(f"{name}: mask is on the meta device, where it says nothing; make it on the CPU")
    *lead, rows, cols = grid
    total = lead[0] if lead else 1
    crow, col = indices_of(mask.flatten().nonzero().flatten(), total * rows, cols)
    if lead:  # an item's last number is the next one's first
        crow = crow.as_strided((total, rows + 1), (rows, 1)).contiguous()
    return crow, col
