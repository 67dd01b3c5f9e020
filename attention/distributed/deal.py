"""Deals: the tokens that each process has. They are dealt in tiles, equally many to each, in ascending order.

    tiles of 1 process       0  1  2  3 | 4  5  6  7 | 8  9 10 11       work of a causal mask: 10, 26, 42
    head_tail                0  1 10 11 | 2  3  8  9 | 4  5  6  7                              26, 26, 26
    balanced                 4  5  6  7 | 0  1 10 11 | 2  3  8  9                              26, 26, 26

`contiguous` moves least, and balances masks whose rows are all alike, such as windows. `head_tail` balances causal
masks. `balanced` balances any mask by the number of blocks of each row, with few ranges of tiles for each process.

`dealt` computes on the device of the work, and does not synchronize.
"""

import torch
from torch import Tensor

DEALS = ("contiguous", "head_tail", "balanced")
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
    if deal == "contiguous" or len(tiles) == 0:
        return tiles.view(size, -1)
    if deal == "head_tail":
        chunks = tiles.view(2 * size, -1)
        return torch.cat([chunks[:size], chunks[size:].flip(0)], 1)
    work = torch.nn.functional.pad(work, (0, len(tiles) - len(work)))
    return torch.cat(balanced(tiles[None], work, size)).sort(1).values


def balanced(rings: Tensor, work: Tensor, parts: int) -> list[Tensor]:
    """Cut rings of tiles, int64 (rings, tiles), into `parts` pieces each, of equally many tiles and about equal work.

    Windows of a ring with a given number of tiles have, on average, their share of its work, and neighboring windows
    differ by two tiles. So some window is within half of the largest tile of its share: one piece is cut there, and the
    rest is a ring again.
    """
    if parts == 1:
        return [rings]
    n, some = rings.shape[1], parts // 2
    length = n // parts * some
    each = work[rings]
    ends = (each * n - each.sum(1, keepdim=True)).cumsum(1)  # 0 at the end; whole numbers, the same in all processes
    begin = (ends.roll(1 - length, 1) - ends.roll(1, 1)).abs_().argmin(1, keepdim=True)
    rings = rings.gather(1, (begin + torch.arange(n, device=work.device)) % n)
    if parts == 2 * some:
        return balanced(rings.view(-1, length), work, some)
    return [*balanced(rings[:, :length], work, some), *balanced(rings[:, length:], work, parts - some)]


def cuts_of(tiles: int, size: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """The cuts that `balanced` makes, if pieces stay where they are cut off, and the process that has each piece.

    Returns:
        cuts: first place of each ring, its tiles, and how many are cut off and stay first.
        order: processes by the place of their tiles.
    """
    cuts: list[tuple[int, int, int]] = []

    def cut(firsts: list[int], n: int, parts: int) -> list[int]:
        if parts == 1:
            return firsts
        some = parts // 2
        length = n // parts * some
        cuts.extend((first, n, length) for first in firsts)
        if parts == 2 * some:
            return cut([place for first in firsts for place in (first, first + length)], length, some)
        rest = [first + length for first in firsts]
        return [*cut(firsts, length, some), *cut(rest, n - length, parts - some)]

    firsts = cut([0], tiles, size)
    return cuts, sorted(range(size), key=firsts.__getitem__)


def cost(loads: list[float], counts: list[list[int]], blocks: int) -> float:
    """Time of the slowest process, in tiles of scores of all heads.

    Args:
        loads: blocks that each process computes.
        counts: for each process, how many tiles of K and V it needs of each.
        blocks: in a tile of scores, of all heads.
    """
    moved = (sum(row) - row[process] for process, row in enumerate(counts))
    return max(load / blocks + BLOCKS_PER_TILE * tiles for load, tiles in zip(loads, moved, strict=True))


def best(costs: list[float]) -> int:
    """The first of the deals within 0.5 % of the best, which moves less than the others."""
    return next(i for i, each in enumerate(costs) if each <= 1.005 * min(costs))
