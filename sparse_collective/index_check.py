"""Check the indices of a BSR matrix, and compute the statistics of its pattern with the same synchronization.

Everything is computed on the indices' device and read once. Functions take a BsrMatrix of which no more is known than
that its tensors' shapes fit together (arguments.py).
"""

import torch
from torch import Tensor

from cute_kernels.matmul.problem import NOT_KNOWN, STATS_ROWS, PatternStats


def check(W) -> tuple[str, bool, PatternStats]:
    """The first error or "", True if all block rows hold equally many blocks, and the statistics of the pattern."""
    crow, col, nnz, cols = rows_of_all_items(W), W.col_indices, W.nnz, W.n_block_cols
    # (nnz + 1,); clamped so that a wrong crow ends in a flag and not in a write out of bounds.
    starts_row = torch.zeros(nnz + 1, dtype=torch.bool, device=col.device)
    starts_row.index_fill_(0, crow.clamp(0, nnz).long(), True)
    lengths = crow.diff()
    flags = (
        crow[0] != 0,
        crow[-1] != nnz,
        (crow[1:] < crow[:-1]).any() | items_apart(W).any(),
        ((col < 0) | (col >= cols)).any(),
        ((col[1:] <= col[:-1]) & ~starts_row[1:nnz]).any(),
        (lengths == lengths[:1]).all(),
    )
    longest = lengths.max() if len(lengths) else crow[0]
    group_rows = max(W.blocksize[0], STATS_ROWS)
    facts = *flags, needed_columns(W, group_rows), longest
    *wrong, even, listed, longest = torch.stack([x.long() for x in facts]).tolist()
    if any(wrong):
        return first_error(W), False, NOT_KNOWN
    if W.batch == "patterns":
        return "", bool(even), NOT_KNOWN
    listed = round(listed / max(1, -(-W.shape[-2] // group_rows) * cols), 2)
    return "", bool(even), PatternStats(listed, round(longest / max(1, cols), 2))


def rows_of_all_items(W) -> Tensor:
    """crow_indices (rows + 1,), of a batch with a pattern for each item as if they lay below each other."""
    crow = W.crow_indices
    return crow if crow.dim() == 1 else torch.cat([crow[0, :1], crow[:, 1:].flatten()])


def items_apart(W) -> Tensor:
    """For each item after the first, whether it does not begin where the one before ends."""
    crow = W.crow_indices[None] if W.crow_indices.dim() == 1 else W.crow_indices
    return crow[1:, 0] != crow[:-1, -1]


def needed_columns(W, rows: int) -> Tensor:
    """In how many block columns groups of so many rows of W have a block, summed over groups.

    Of wrong indices any number; 0 of batches of patterns.
    """
    bm, cols = W.blocksize[0], W.n_block_cols
    if W.nnz == 0 or W.batch == "patterns":
        return torch.zeros((), dtype=torch.int64, device=W.col_indices.device)
    crow = W.crow_indices.clamp(0, W.nnz).contiguous()
    numbers = torch.arange(W.nnz, dtype=crow.dtype, device=crow.device)
    row = (torch.searchsorted(crow, numbers, right=True) - 1).clamp(0, W.n_block_rows - 1)
    needed = torch.zeros(-(-W.shape[-2] // rows) * cols, dtype=torch.bool, device=crow.device)
    return needed.index_fill_(0, row * bm // rows * cols + W.col_indices.long().clamp(0, cols - 1), True).sum()


def first_error(W) -> str:
    """The first error, crow_indices before col_indices. Copies the indices to the host."""
    crow, col, nnz, cols = rows_of_all_items(W).cpu(), W.col_indices.cpu(), W.nnz, W.n_block_cols
    patterns, rows = W.batch == "patterns", max(W.n_block_rows, 1)

    def entry(r: int, item: int) -> str:
        return f"crow_indices[{item}, {r - item * rows}]" if patterns else f"crow_indices[{r}]"

    def place(r: int) -> str:
        return f"block-row {r % rows} of item {r // rows}" if patterns else f"block-row {r}"

    if crow[0] != 0:
        return f"{entry(0, 0)} is {crow[0]}; it must be 0"
    for i in items_apart(W).nonzero().flatten()[:1].tolist():
        begin, end = W.crow_indices[i + 1, 0], W.crow_indices[i, -1]
        return f"crow_indices[{i + 1}, 0] is {begin}; it must be where item {i} ends, {end}"
    for r in (crow[1:] < crow[:-1]).nonzero().flatten()[:1].tolist():
        item = r // rows
        return f"{entry(r + 1, item)} is {crow[r + 1]}, less than {entry(r, item)} = {crow[r]}"
    if crow[-1] != nnz:
        last = len(crow) - 1
        return f"{entry(last, max(last - 1, 0) // rows)}, the last, is {crow[-1]}; it must be nnz = {nnz}"
    row = torch.repeat_interleave(crow.diff())  # (nnz,)
    for p in ((col < 0) | (col >= cols)).nonzero().flatten()[:1].tolist():
        return f"col_indices[{p}] is {col[p]}, in {place(int(row[p]))}; it must be in [0, {cols})"
    for p in ((col[1:] <= col[:-1]) & (row[1:] == row[:-1])).nonzero().flatten()[:1].tolist():
        found = f"col_indices[{p + 1}] is {col[p + 1]} after {col[p]}, both in {place(int(row[p]))}"
        return f"{found}; the columns of a block-row must be sorted and without duplicates"
    return "the indices were wrong when checked but have been written to since; they must not change"
