"""What the kernel over pairs of block rows must know of a pattern: which columns a pair needs, and which stored blocks
each of its rows has there. Made once per pattern, on its device, without waiting for it.

Pair g is the block rows 2g and 2g + 1; of an odd number of rows the last pair has one. A column that both have is one
entry of two blocks, so a pair has at most as many entries as blocks, and they lie where its blocks lie.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch


class PairTables(NamedTuple):
    """The pattern as the kernel reads it; all int32, on the pattern's device.

    ends (pairs, 3): where, counted from the pair's first entry, those of both rows end, those of the upper row alone,
        and those of the lower row alone, which is how many there are.
    entries (3, max(nnz, 1)): column, number of the upper row's block, number of the lower's, from crow_indices[2g] on;
        columns ascend in each of the three parts. The number of a block that is absent is nnz. Places past a
        pair's last entry may hold anything.
    """

    ends: torch.Tensor
    entries: torch.Tensor


def starts_of(plan: PairTables) -> torch.Tensor:
    """(pairs + 1,) int32, the pairs' numbers of entries summed up: what tile_order takes for crow_indices."""
    starts = plan.ends.new_zeros(len(plan.ends) + 1)
    torch.cumsum(plan.ends[:, 2], 0, dtype=torch.int32, out=starts[1:])
    return starts


def pair_tables(crow: torch.Tensor, col: torch.Tensor, columns: int) -> PairTables:
    """The plan of a checked pattern: crow (M / bm + 1,), col (nnz,), `columns` of blocks; plain torch."""
    nnz, device, rows = col.numel(), col.device, len(crow) - 1
    pairs = -(-rows // 2)
    if nnz == 0:
        entries = torch.zeros(3, 1, dtype=torch.int32, device=device)
        return PairTables(torch.zeros(pairs, 3, dtype=torch.int32, device=device), entries)
    numbers = torch.arange(nnz, dtype=crow.dtype, device=device)
    row = torch.searchsorted(crow, numbers, right=True) - 1
    # By pair and column; of two equal keys the upper row's block comes first.
    key, block = torch.sort(row // 2 * columns + col, stable=True)
    lower = row[block] % 2
    same = torch.zeros(nnz + 1, dtype=torch.bool, device=device)
    same[1:-1] = key[1:] == key[:-1]
    first, second = same[1:], same[:-1]  # of two blocks of one column
    absent = torch.full_like(block, nnz)
    entry = torch.stack([
        key % columns,
        torch.where(lower == 0, block, absent),
        torch.where(first, block.roll(-1), torch.where(lower == 1, block, absent)),
    ])  # fmt: skip
    # The second of two blocks is no entry; it goes last, so that as many places are taken as there are blocks.
    kind = torch.where(second, 3, torch.where(first, 0, 1 + lower))
    order, place = torch.sort((key // columns * 4 + kind) * columns + key % columns, stable=True)
    firsts = torch.arange(pairs, device=device)[:, None] * 4 + torch.arange(4, device=device)
    bounds = torch.searchsorted(order, firsts * columns)  # (pairs, 4)
    ends = (bounds[:, 1:] - bounds[:, :1]).int()
    return PairTables(ends, entry[:, place].int().contiguous())


@dataclass(frozen=True)
class PairTablesFacts:
    """What a plan kernel is compiled from."""

    family: ClassVar[str] = "row pair tables"
    arch: str
    index_dtype: str
