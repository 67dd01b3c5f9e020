"""Sparsity patterns the tests share: bool masks (rows, cols) on the CPU, True where a block is stored, by name."""

from collections.abc import Callable

import torch
from torch import Tensor


def mask_to_indices(mask: Tensor, index_dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    """(rows, cols) bool -> crow_indices (rows + 1,), col_indices (nnz,), on the device of the mask."""
    crow = torch.zeros(mask.shape[0] + 1, dtype=index_dtype, device=mask.device)
    crow[1:] = mask.sum(dim=1).cumsum(dim=0)
    return crow, mask.nonzero()[:, 1].to(index_dtype).contiguous()


def _random_columns(lengths: Tensor, cols: int, generator: torch.Generator) -> Tensor:
    """(rows,) row lengths -> a mask with that many blocks in each row, in columns drawn uniformly."""
    scores = torch.rand(len(lengths), cols, generator=generator)
    rank = scores.argsort(dim=1).argsort(dim=1)  # (rows, cols), a permutation of 0 .. cols - 1 in each row
    return rank < lengths[:, None]


def uniform(rows: int, cols: int, per_row: int, seed: int = 0) -> Tensor:
    """The same number of blocks in every row, at random columns."""
    return _random_columns(torch.full((rows,), per_row), cols, torch.Generator().manual_seed(seed))


def bernoulli(rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """Every block with the same probability."""
    return torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) < density


def power_law(rows: int, cols: int, exponent: float = 1.0, seed: int = 0) -> Tensor:
    """Row lengths cols / rank^exponent in shuffled order: one full row and a long tail of short ones."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randperm(rows, generator=generator) + 1
    return _random_columns((cols / rank.double() ** exponent).round().long(), cols, generator)


def banded(rows: int, cols: int, half_width: int = 1) -> Tensor:
    """Blocks at most half_width columns from the diagonal, which is stretched to the corners of the mask."""
    diagonal = torch.arange(rows) * cols // max(rows, 1)
    return (torch.arange(cols) - diagonal[:, None]).abs() <= half_width


def block_diagonal(rows: int, cols: int, groups: int = 2) -> Tensor:
    """Groups of rows that share a group of columns and nothing else, as the experts of a mixture do."""
    row, col = (torch.arange(n) * groups // max(n, 1) for n in (rows, cols))
    return row[:, None] == col


def empty_rows(rows: int, cols: int, density: float = 0.5, seed: int = 0) -> Tensor:
    """Bernoulli, with every other row empty, the first and the last among them."""
    mask = bernoulli(rows, cols, density, seed)
    mask[::2] = mask[-1:] = False
    return mask


def one_full_row(rows: int, cols: int) -> Tensor:
    """The middle one, and the rest empty: the worst imbalance."""
    return (torch.arange(rows)[:, None] == rows // 2).expand(rows, cols).clone()


PATTERNS: dict[str, Callable[[int, int], Tensor]] = {
    "uniform": lambda rows, cols: uniform(rows, cols, per_row=(cols + 3) // 4),
    "bernoulli": lambda rows, cols: bernoulli(rows, cols, density=0.3),
    "power_law": power_law,
    "banded": banded,
    "block_diagonal": block_diagonal,
    "empty_rows": empty_rows,
    "one_full_row": one_full_row,
    "no_blocks": lambda rows, cols: torch.zeros(rows, cols, dtype=torch.bool),
    "all_blocks": lambda rows, cols: torch.ones(rows, cols, dtype=torch.bool),
}
