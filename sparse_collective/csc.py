"""The CSC index of a block pattern: where each block column begins, and its blocks in the order of their rows.

It is the index of the transposed matrix. Made once per pattern, on its device, without synchronizing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .conversions import row_starts


class CscIndex(NamedTuple):
    """The index of the transpose, and where its blocks are stored.

    crow_indices: (cols + 1,), or (L, cols + 1) of a batch with a pattern for each item; in the pattern's index dtype.
    col_indices: (nnz,), in the same dtype: block rows of the pattern.
    numbers: (nnz,) int32, the position of each of these blocks among the stored ones.
    """

    crow_indices: Tensor
    col_indices: Tensor
    numbers: Tensor


def csc_index(crow: Tensor, col: Tensor, cols: int) -> CscIndex:
    """Return the CSC index of a checked pattern.

    crow: (rows + 1,), or (L, rows + 1) of a batch with a pattern for each item. col: (nnz,). cols: block columns.
    """
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
    return CscIndex(starts, row[order], order.int())
