"""Random BSR matrices."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from . import checks as arguments
from .bsr import BsrMatrix
from .conversions import row_starts

__all__ = ["random_bsr"]


def random_bsr(
    shape: Sequence[int],
    blocksize: Sequence[int],
    *,
    per_row: int | None = None,
    density: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    index_dtype: torch.dtype = torch.int32,
    scale: float = 1.0,
) -> BsrMatrix:
    """Create a matrix of normal random values, with standard deviation `scale`, in random blocks.

    Args:
        shape, blocksize: (M, K) and (bm, bk).
        per_row: number of blocks in each block row, in random columns; does not synchronize.
        density: probability that a block is stored; synchronizes. Pass either per_row or density.
        dtype, index_dtype: dtypes of the values and of the indices; for FP8 values see BsrMatrix.quantize.
        device, generator: the device, and a random number generator on it.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: extents are not multiples of the block's sides, or not exactly one of per_row and density is passed
            and in range.

    Example:
        W = random_bsr((1024, 1024), (64, 64), density=0.25)
    """
    arguments.check_dtypes(dtype, index_dtype, torch.empty(0, device=device).device)
    shape, blocksize = arguments.pair(shape, "shape"), arguments.pair(blocksize, "blocksize")
    rows, cols = arguments.block_grid(shape, blocksize)
    if (per_row is None) == (density is None):
        raise ValueError(f"give either per_row or density, got per_row={per_row} and density={density}")
    scores = torch.rand(rows, cols, device=device, generator=generator)
    if per_row is not None:
        if not 0 <= operator.index(per_row) <= cols:
            raise ValueError(f"per_row is {per_row}; it must be in [0, {cols}], the blocks in a block-row")
        col = scores.argsort(dim=1)[:, :per_row].sort(dim=1).values.flatten()
        crow = torch.arange(rows + 1, dtype=index_dtype, device=scores.device) * per_row
    else:
        assert density is not None
        arguments.check_density(density)
        row, col = (scores < density).nonzero(as_tuple=True)
        crow = row_starts(row, rows, index_dtype)
    values = torch.randn(len(col), *blocksize, dtype=dtype, device=scores.device, generator=generator)
    return BsrMatrix._make(crow, col.to(index_dtype), values.mul_(scale), shape, even=per_row is not None)
