"""Patterns that weights and masks have: which blocks are kept, as a bool (rows, cols) on the CPU, from a seed."""

import torch
from torch import Tensor

from cute_kernels.testing.patterns import mask_to_indices
from sparse_collective import BsrMatrix


def scattered(rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """The share `density` of all blocks, anywhere: rows differ as those of a pruned weight do at the least."""
    scores = torch.rand(rows * cols, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(rows * cols, dtype=torch.bool)
    mask[scores.topk(round(density * rows * cols)).indices] = True
    return mask.view(rows, cols)


def skewed(rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """A tenth of the rows, drawn at random, hold half of the blocks, at random columns."""
    generator = torch.Generator().manual_seed(seed)
    long, half = max(1, rows // 10), density * rows * cols / 2
    lengths = torch.full((rows,), round(half / max(1, rows - long)))
    lengths[torch.randperm(rows, generator=generator)[:long]] = min(cols, round(half / long))
    rank = torch.rand(rows, cols, generator=generator).argsort(1).argsort(1)
    return rank < lengths[:, None]


def banded(rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """As many blocks about the diagonal in each row; at the corners the band is moved inwards. Takes no chance."""
    width = max(1, round(density * cols))
    first = (torch.arange(rows) * cols // rows - width // 2).clamp(0, cols - width)
    columns = torch.arange(cols)
    return (columns >= first[:, None]) & (columns < first[:, None] + width)


def local_and_global(rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """Half of a row's blocks about the diagonal, half in columns that all rows share."""
    mask = banded(rows, cols, density / 2)
    shared = torch.randperm(cols, generator=torch.Generator().manual_seed(seed))[: round(density * cols / 2)]
    mask[:, shared] = True
    return mask


PATTERNS = {"scattered": scattered, "skewed": skewed, "banded": banded, "local and global": local_and_global}


def matrix(mask: Tensor, block: tuple[int, int], dtype=torch.bfloat16, device="cuda") -> BsrMatrix:
    """Normal random values in the blocks of a mask; the indices are checked."""
    crow, col = mask_to_indices(mask.to(device))
    values = torch.randn(len(col), *block, dtype=dtype, device=device)
    W = BsrMatrix(crow, col, values, (mask.shape[0] * block[0], mask.shape[1] * block[1]))
    W.check_indices()
    return W
