"""Deals: the tokens that each process has. They are dealt in tiles, equally many to each, in ascending order.

    tiles of 1 process       0  1  2  3 | 4  5  6  7 | 8  9 10 11       work of a causal mask: 10, 26, 42
    head_tail                0  1 10 11 | 2  3  8  9 | 4  5  6  7                              26, 26, 26
    longest_first            0  5  6 11 | 1  4  7 10 | 2  3  8  9                              26, 26, 26

`contiguous` moves least, and balances masks whose rows are all alike, such as windows. `head_tail` balances causal
masks. `longest_first` balances any mask: rows are dealt by their number of blocks, the longest first, to and fro.

All functions compute on the device of the table and do not synchronize.
"""

import torch
from torch import Tensor

DEALS = ("contiguous", "head_tail", "longest_first")
# A tile of K and V of one head takes some 220 ns over NVLink (64 KB, 300 GB/s), a block of scores of 128 x 128 some
# 14 ns. With 4 query heads for each KV head, a tile that moves costs as much as 4 blocks of each head.
BLOCKS_PER_TILE = 4


def padded(tiles: int, size: int, deal: str) -> int:
    """The number of tiles, with empty ones at the end, that so many processes share equally."""
    each = -(-tiles // size)
    return (each + each % 2 if deal == "head_tail" else each) * size


def dealt(work: Tensor, size: int, deal: str) -> Tensor:
    """Tiles of each process, int64 (size, tiles of one), ascending; those from len(work) on are empty.

    Args:
        work: (tiles,) blocks of each row of tiles.
    """
    tiles = torch.arange(padded(len(work), size, deal), device=work.device)
    if deal == "contiguous":
        return tiles.view(size, -1)
    if deal == "head_tail":
        chunks = tiles.view(2 * size, -1)
        return torch.cat([chunks[:size], chunks[size:].flip(0)], 1)
    work = torch.nn.functional.pad(work, (0, len(tiles) - len(work)), value=-1)
    rounds = work.sort(descending=True, stable=True).indices.view(-1, size)
    return torch.cat([rounds[0::2], rounds[1::2].flip(1)]).T.sort(1).values


def needed(listed: Tensor, tiles: Tensor) -> Tensor:
    """Tiles of K and V that each process needs, bool (size, tiles), of the listed blocks (tiles, tiles).

    The last dimension includes the empty tiles, which no process needs.
    """
    count = len(listed)
    rows = torch.nn.functional.pad(listed, (0, tiles.numel() - count, 0, 1))  # the last row is that of empty tiles
    return rows[tiles.clamp(max=count)].any(1)


def cost(work: Tensor, listed: Tensor, tiles: Tensor) -> Tensor:
    """Time of the slowest process, in blocks of a head, float32 ()."""
    blocks = torch.nn.functional.pad(work, (0, tiles.numel() - len(work)))[tiles].sum(1)
    need = needed(listed, tiles)
    own = need.gather(1, tiles).sum(1)
    moved = need.sum(1) - own
    return (blocks + BLOCKS_PER_TILE * moved).max().float()
