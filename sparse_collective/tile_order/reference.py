"""In which order the work tiles of a sparse product come, so that all workers finish together.

A persistent kernel gives worker c the tiles c, c + P, c + 2P, ...; if the P workers divide the block rows, a worker
meets the same rows again and again, and one that has a long row has it in every panel. Block rows of a pruned weight
differ by half, those of a power law by a factor of ten.

Here the tiles are assigned in rounds instead, one a worker: tiles of long rows first, then panel by panel as before, so
that a panel of B stays in L2 while all rows pass over it; and in each round the worker with the least work so far gets
the longest tile. That is Graham's longest-processing-time rule (R. L. Graham, Bounds on Multiprocessing Timing
Anomalies, 1969) with as much order as a panel leaves free. The sm_80 kernels have one CTA a tile and the GPU's own
scheduler, so there the order alone is what counts.

Here with torch, a few hundred small operations that wait for no device. On a GPU one kernel makes the same table
(kernel.py); this is what it is held to, and what makes the order of problems beyond its limits.
"""

from typing import NamedTuple

import torch

# On an H200, 8192 cubed, 128x128 blocks, 12.5 %: the power law of bench/patterns.py (skewed) 317 -> 210 us, which is
# 0.96 of a uniform pattern's rate.
ENABLED = True

LONG = 2  # times the mean cost of a row's tile: rows that come first
OVERHEAD = 2  # K-tiles that a work tile costs besides its own: its store, and filling the pipeline
MOST_CHUNKS = 32  # more rounds than that are assigned several at a time


class Tiles(NamedTuple):
    """The arguments of work_order besides the pattern."""

    row_tiles: int
    steps: int
    tiles_n: int
    batch: int
    group: int
    workers: int | None


def work_order(
    crow: torch.Tensor, *, row_tiles: int, steps: int, tiles_n: int, batch: int, group: int, workers: int | None
) -> torch.Tensor:
    """The order of all work tiles (m, n, l) = (row_tiles * block rows, tiles_n, batch), as TileScheduler takes it.

    Args:
        crow: (M / bm + 1,) of a checked pattern.
        row_tiles: tiles that a block row is high, in cluster tiles, as are tiles_n and group.
        steps: K-tiles a block is wide.
        group: columns of tiles in a panel.
        workers: persistent clusters; None for one CTA a tile.

    Returns:
        (rounds * workers, 2) int32 on crow's device: m and l * tiles_n + n of each tile, -1 for none. With workers None
        (tiles, 2), the longest first.
    """
    lengths = crow.diff().long() * steps + OVERHEAD  # (rows,)
    rows, device = len(lengths), crow.device
    tiles_m = rows * row_tiles
    group = min(group, tiles_n)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    rank[torch.sort(lengths, descending=True, stable=True).indices] = torch.arange(rows, device=device)
    short = (lengths * rows < LONG * lengths.sum()).long()

    item = torch.arange(tiles_m * tiles_n * batch, device=device)
    m, n, l = item % tiles_m, item // tiles_m % tiles_n, item // (tiles_m * tiles_n)
    row = m // row_tiles
    tile = rank[row] * row_tiles + m % row_tiles  # 0 is the longest
    panels = -(-tiles_n // group)
    key = (short[row] * batch + l) * panels + n // group
    place = torch.argsort((key * tiles_m + tile) * group + n % group)
    item = item[place]
    if workers is not None:
        item = assign_rounds(item, tile[place], lengths[row][place], workers)
    return torch.stack([item % tiles_m, item // tiles_m], 1).where((item >= 0)[:, None], -1).int()


def assign_rounds(item: torch.Tensor, tile: torch.Tensor, cost: torch.Tensor, workers: int) -> torch.Tensor:
    """Rounds of one item a worker: (rounds * workers,) int64, padded with -1 in the last round.

    All are (items,); `tile` numbers row tiles by descending cost. Rounds are taken in the items' order. Who gets which
    of a round is chosen by load: row tiles ascending, and a tile's items as they come, go to loads ascending, and of
    equal loads the first worker's comes first.
    """
    rounds = -(-len(item) // workers)
    padding = rounds * workers - len(item)
    item = torch.cat([item, item.new_full((padding,), -1)])
    tile = torch.cat([tile, tile.new_full((padding,), len(tile))])
    cost = torch.cat([cost, cost.new_zeros(padding)])
    table = torch.empty_like(item).view(rounds, workers)
    load = torch.zeros(workers, dtype=cost.dtype, device=cost.device)
    at_once = -(-rounds // MOST_CHUNKS)
    for first in range(0, rounds, at_once):
        some = min(at_once, rounds - first)
        part = slice(first * workers, (first + some) * workers)
        place = torch.sort(tile[part], stable=True).indices
        costs, items = cost[part][place].view(some, workers), item[part][place].view(some, workers)
        # To and fro, as that is fairer; the last round stays as it is, for nobody may miss one before it.
        back = slice(1, some - 1, 2)
        costs[back], items[back] = costs[back].flip(1), items[back].flip(1)
        least = torch.sort(load, stable=True).indices
        table[first : first + some, least] = items
        load[least] += costs.sum(0)
    return table.flatten()
