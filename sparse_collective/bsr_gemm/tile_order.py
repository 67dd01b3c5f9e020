"""The order of the work tiles of a sparse GEMM, such that all workers finish together.

A persistent kernel gives worker c the tiles c, c + P, c + 2P, ...; if the P workers divide the block rows, a worker
gets the same rows again and again, and one that has a long row has it in every panel. Block rows of a pruned weight
differ by half, those of a power law by a factor of ten.

Here the tiles are assigned in rounds instead, one a worker: tiles of long rows first, then panel by panel as before, so
that a panel of B stays in L2 while all rows pass over it; and in each round the worker with the least work so far gets
the longest tile. That is Graham's longest-processing-time rule (R. L. Graham, Bounds on Multiprocessing Timing
Anomalies, 1969) with as much order as a panel leaves free. The sm_80 kernels have one CTA a tile and the GPU's own
scheduler, so there the order alone is what counts.

A table takes 30 operations of torch, with workers 50 to 120, once per pattern and number of columns. They do not
synchronize.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..pattern import Pattern

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
    interleaved: bool = False


def order_of(pattern: Pattern, tiles: Tiles) -> Tensor:
    """work_order of a pattern, cached with it."""
    return pattern.derived(tiles, lambda: (work_order(pattern.crow_indices, **tiles._asdict()),), rows_alone=True)[0]


def work_order(
    crow: Tensor, *, row_tiles: int, steps: int, tiles_n: int, batch: int, group: int, workers: int | None,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """The order of all work tiles (m, n, l) = (row_tiles * block rows, tiles_n, batch), as TileScheduler takes it.

    Args:
        crow: (M / bm + 1,) of a checked pattern.
        row_tiles: tiles that a block row is high, in cluster tiles, as are tiles_n and group.
        steps: K-tiles a block is wide.
        group: columns of tiles in a panel.
        workers: persistent clusters; None for one CTA a tile.
        interleaved: False for item after item of the batch; True for all of them in turn, see interleave.

    Returns:
        (rounds * workers, 2) int32 on crow's device: m and l * tiles_n + n of each tile, -1 for none. With workers None
        (tiles, 2), the longest first, of batch items in turn if `interleaved`.
    """
    device = crow.device
    lengths, rows = (crow.diff().long() * steps + OVERHEAD).sort(descending=True, stable=True)
    tiles_m, group, panels = len(rows) * row_tiles, min(group, tiles_n), -(-tiles_n // min(group, tiles_n))
    # Row tiles from the longest to the shortest: cost and coordinate (tiles_m,)
    cost = lengths[:, None].expand(-1, row_tiles).flatten()
    m = (rows[:, None] * row_tiles + torch.arange(row_tiles, device=device)).flatten()
    short = (cost * len(rows) < LONG * lengths.sum()).long()
    tile = torch.arange(tiles_m, device=device)
    column = torch.arange(batch * tiles_n, device=device)
    # An item is column * tiles_m + tile. Its sort key: (short, l, panel, tile, column in the panel)
    n = column % tiles_n
    panel = (column // tiles_n * panels + n // group) * (tiles_m * group) + n % group
    item = (panel[:, None] + (short * (batch * panels * tiles_m) + tile) * group).flatten().argsort()
    if workers is not None:
        item = assign_rounds(item, cost, workers)
    if interleaved:
        item = interleave(item, tiles_m * tiles_n, batch, workers or 1)
    return torch.stack([m[item % tiles_m], item // tiles_m], 1).where((item >= 0)[:, None], -1).int()


def assign_rounds(item: Tensor, cost: Tensor, workers: int) -> Tensor:
    """Assign items (items,), in their order, to rounds of one a worker: (rounds * workers,), -1 at the end for none.

    item % tiles_m is an item's row tile. cost: (tiles_m,), of row tiles, descending.

    A chunk is one round or, of many rounds, a few that are assigned at once. Its items, sorted by row tile, fill its
    rounds; a slot is what one worker gets of a chunk. The longest slot goes to the worker with the least work so far,
    of equal ones to the first worker.
    """
    tiles_m = len(cost)
    rounds = -(-len(item) // workers)
    at_once = -(-rounds // MOST_CHUNKS)
    chunks = -(-rounds // at_once)
    padding = item.new_full((chunks * at_once * workers - len(item),), -1)  # sorts last, as row tile tiles_m - 1
    item = torch.cat([item, padding]).view(chunks, at_once * workers)
    by_tile = (item % tiles_m).sort(dim=1, stable=True).indices
    item = item.gather(1, by_tile).view(chunks, at_once, workers)  # (chunk, round, slot)
    # To and fro, as that is fairer; the last round stays as it is, for no worker may miss one before it.
    for chunk, last in ((slice(None, -1), at_once - 1), (slice(-1, None), rounds - (chunks - 1) * at_once - 1)):
        if last > 1:
            item[chunk, 1:last:2] = item[chunk, 1:last:2].flip(-1)
    # Work so far * workers + worker, ascending: entry r is that of the worker who gets slot r.
    load = [torch.arange(workers, device=item.device)]
    for slots in (cost[item[:-1] % tiles_m].sum(1) * workers).unbind():
        load.append((load[-1] + slots).sort().values)
    slot = (torch.stack(load) % workers).argsort(dim=1)  # of each worker, by chunk
    return item.gather(2, slot[:, None].expand_as(item)).flatten()[: rounds * workers]


def interleave(item: Tensor, per_batch_item: int, batch: int, workers: int) -> Tensor:
    """Reorder each worker's tiles, so that it has one of each batch item in turn, and that workers begin with different
    ones: at any time about equally many workers have tiles of each. The last round, which may not be full, stays.

    item: (rounds * workers,), per_batch_item of them in a batch item.
    """
    rounds = item.view(-1, workers)
    l = rounds[:-1] // per_batch_item
    each = torch.arange(batch, device=item.device)
    # How many tiles of the same batch item its worker has before
    before = (l[..., None] == each).int().cumsum(0).gather(2, l[..., None])[..., 0] - 1
    first = torch.arange(workers, device=item.device) * batch // workers
    order = (before * batch + (l - first) % batch).argsort(0)
    return torch.cat([rounds[:-1].gather(0, order), rounds[-1:]]).flatten()
