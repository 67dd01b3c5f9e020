"""The index of a transposed pattern: where each block column begins, and its blocks in the order of their rows. Made
once per pattern, on its device, without waiting for it; plain torch."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..conversions import row_starts


class TransposedIndex(NamedTuple):
    """The index of the transpose, and where its blocks lie.

    crow_indices (cols + 1,), or (L, cols + 1) of items with a pattern each; col_indices (nnz,): in the dtype of the
        pattern's own.
    numbers (nnz,) int32: which stored block each of them is.
    """

    crow_indices: Tensor
    col_indices: Tensor
    numbers: Tensor


def transposed_index(crow: Tensor, col: Tensor, cols: int) -> TransposedIndex:
    """Of a checked pattern: crow (rows + 1,), or (L, rows + 1) of items with a pattern each; col (nnz,); `cols` block
    columns."""
    dtype, rows = col.dtype, crow.shape[-1] - 1
    lengths = crow.diff().flatten()
    row = torch.arange(len(lengths), dtype=lengths.dtype, device=col.device)
    row = torch.repeat_interleave(row, lengths, output_size=len(col))
    items = 1
    if crow.dim() == 2:  # one matrix in which each item has rows and columns of its own
        items = len(crow)
        col = row.long() // max(rows, 1) * cols + col
        row = row % max(rows, 1)
    # Blocks lie in row order, so a stable sort by column leaves the rows of each column increasing.
    col, order = col.sort(stable=True)
    starts = row_starts(col, items * cols, dtype)
    if crow.dim() == 2:  # an item's last number is the next one's first
        starts = starts.as_strided((items, cols + 1), (cols, 1)).contiguous()
    return TransposedIndex(starts, row[order], order.int())


@dataclass(frozen=True)
class TransposedFacts:
    """What the kernel is compiled from."""

    family: ClassVar[str] = "transposed index"
    arch: str
    index_dtype: str
