"""The order of work tiles: every tile once, and workers that finish together; the kernel that makes it; the op with it.

Without a GPU torch's table is checked, and the kernel's arithmetic held to it; with one the kernels run.
"""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.scheduler import TileScheduler
from sparse_collective import bsr_matmul
from sparse_collective.tile_order import kernel
from sparse_collective.tile_order.family import order_of
from sparse_collective.tile_order.kernel import Divisors, Mark, Placement, fits, work_order_on_gpu
from sparse_collective.tile_order.reference import LONG, MOST_CHUNKS, OVERHEAD, Tiles, work_order

from . import cases
from .bsr_parts import BOTH_OPS, INDEX_DTYPES, bsr, operands
from .products import check


def crow_of(lengths):
    return torch.tensor([0, *torch.as_tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


PROBLEMS = {
    "lengths": st.lists(st.integers(0, 50), min_size=1, max_size=40),
    "row_tiles": st.integers(1, 4),
    "tiles_n": st.integers(1, 9),
    "batch": st.integers(1, 3),
    "group": st.integers(1, 12),
    "workers": st.sampled_from((None, 1, 7, 66)),
}


@given(**PROBLEMS)
def test_every_tile_comes_once(lengths, row_tiles, tiles_n, batch, group, workers):
    """And a worker that has no tile in a round has none after it."""
    tiles = {"row_tiles": row_tiles, "tiles_n": tiles_n, "batch": batch, "group": group}
    order = work_order(crow_of(lengths), steps=2, workers=workers, **tiles)
    tiles_m = len(lengths) * row_tiles
    count = tiles_m * tiles_n * batch
    assert order.dtype == torch.int32 and order.shape[1] == 2
    assert sorted(m + n * tiles_m for m, n in order.tolist() if m >= 0) == list(range(count))
    if workers is None:
        assert len(order) == count
        return
    assert len(order) == -(-count // workers) * workers and bool((order[:-workers] >= 0).all())
    for first in range(min(workers, 3)):
        scheduler = TileScheduler(tiles_m, tiles_n, batch, 1, order.numpy())
        end = TileScheduler.end.__wrapped__(scheduler, first, workers)
        assert len(range(first, end, workers)) == int((order[first::workers, 0] >= 0).sum())


@pytest.mark.parametrize("workers", [66, 132])
@pytest.mark.parametrize(
    ("name", "lengths", "least"),
    [
        ("even", [8] * 64, 0.96),
        ("a tenth holds half", [43] * 6 + [4] * 58, 0.96),
        ("power law", [round(64 / (i + 1) ** 0.8) for i in range(64)], 0.88),
        ("half empty", [0] * 32 + [16] * 32, 0.88),
    ],
)
def test_workers_finish_together(workers, name, lengths, least):
    """Mean over longest; what 64 block rows by 22 columns on so many workers leave over is in the figure."""
    torch.manual_seed(0)
    lengths = [lengths[i] for i in torch.randperm(64)]
    tiles = {"row_tiles": 1, "tiles_n": 22, "batch": 1, "group": 1}
    order = work_order(crow_of(lengths), steps=2, workers=workers, **tiles)[:, 0].view(-1, workers)
    cost = torch.tensor(lengths) * 2 + OVERHEAD
    loads = torch.where(order >= 0, cost[order.clamp(min=0)], 0).sum(0)
    assert loads.double().mean() / loads.max() >= least


def test_panels_stay_together():
    """Rows of one length: each round takes the next tiles of the panels, so B is passed over as before."""
    order = work_order(crow_of([5] * 16), row_tiles=1, steps=1, tiles_n=8, batch=1, group=2, workers=16)
    assert [sorted(set(row)) for row in order[:, 1].view(-1, 16).tolist()] == [
        [n, n + 1] for n in (0, 0, 2, 2, 4, 4, 6, 6)
    ]


@BOTH_OPS
@pytest.mark.parametrize("pattern", ["power_law", "empty_rows", "one_full_row", "no_blocks", "bernoulli"])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (256, 64), (48, 112)], ids=str)
def test_products(device, path, pattern, block, op):
    """More work tiles than multiprocessors."""
    W = bsr(pattern, block, device, grid=(1024 // block[0] + 1, 512 // block[1] + 1))
    check(op, *operands(op, W, 1000))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["power_law", "one_full_row", "empty_rows"])
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
def test_many_rounds(path, block, pattern):
    """Every worker does several tiles, of lengths from none to all."""
    W = bsr(pattern, block, "cuda", grid=(2560 // block[0], 1024 // block[1]))
    check(bsr_matmul, *operands(bsr_matmul, W, 8000))


@pytest.mark.parametrize(("mask", "even"), [(cases.uniform(8, 9, 3), True), (cases.power_law(8, 9), False)])
def test_a_check_tells_whether_rows_are_even(mask, even):
    W = bsr(mask, (16, 16))
    assert not W.even, "not known yet"
    W.check_indices()
    assert W.even is even


# -- the kernel -----------------------------------------------------------------------------------------------


@given(steps=st.integers(1, 3), **PROBLEMS)
def test_the_kernels_steps_give_the_same_table(lengths, **tiles):
    crow = crow_of(lengths)
    assert torch.equal(emulated_order(crow, **tiles), work_order(crow, **tiles))


@pytest.mark.parametrize("workers", [1, 5, 132, kernel.MOST_WORKERS])
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_the_kernels_steps_of_larger_problems(rows, workers):
    """Several rounds a chunk, and so slots taken to and fro; panels and classes that end inside a chunk."""
    crow = crow_of(torch.randint(0, 40, (rows,)) // torch.randint(1, 20, (rows,)))
    tiles = {"row_tiles": 2, "steps": 2, "tiles_n": 43, "batch": 2, "group": 8, "workers": workers}
    assert torch.equal(emulated_order(crow, **tiles), work_order(crow, **tiles))


def emulated_order(crow, *, row_tiles, steps, tiles_n, batch, group, workers):
    """The kernel step by step, all threads at once, by its own arithmetic."""
    with mock.patch.object(kernel, "cutlass", SimpleNamespace(min=np.minimum, max=np.maximum)):
        to_workers, workers, group = workers is not None, workers or 1, min(group, tiles_n)
        rows, tiles_m = len(crow) - 1, (len(crow) - 1) * row_tiles
        entries = -(-tiles_m * tiles_n * batch // workers) * workers
        rounds = -(-(entries // workers) // MOST_CHUNKS)
        by = Divisors(tiles_m, row_tiles, tiles_n, group, workers, rounds * workers)
        placement = Placement(tiles_m, row_tiles, tiles_n, batch, group, workers, rounds, by)

        cost = np.diff(crow.long().numpy()) * steps + OVERHEAD
        keys, long = sorted_rows(cost), int((cost * rows >= LONG * cost.sum()).sum()) * row_tiles
        column, tile = placement.split(np.arange(placement.items))
        rank = tile // row_tiles
        position = entry = placement.position(column, tile, long)
        table = np.full((entries, 2), -1)
        if to_workers:
            chunk, chunks = position // placement.chunk_items, -(-entries // placement.chunk_items)
            bounds = np.minimum(np.arange(chunks + 1) * placement.chunk_items, placement.items)
            marks = [[np.broadcast_to(part, bounds.shape) for part in placement.mark(bounds, long, s)] for s in (0, 1)]
            marks = np.array(marks)  # (class, part, chunk)
            short, _ = placement.class_of(tile, long)
            begin, end = (Mark(*(marks[short, part, chunk + i] for part in range(3))) for i in (0, 1))
            round_, slot = placement.slot(placement.place(column, tile, long, chunk, begin, end), chunk)
            costs = np.zeros((chunks, workers), dtype=np.int64)
            np.add.at(costs, (chunk, slot), -(keys[rank] >> 32))
            entry = round_ * workers + assign_slots(costs)[chunk, slot]
        table[entry] = np.stack([(keys[rank] & 0xFFFFFFFF) * row_tiles + tile % row_tiles, column], 1)
        return torch.from_numpy(table).int()


def sorted_rows(cost):
    """Keys of rows as the kernel's network of exchanges leaves them."""
    bits = max(1, (len(cost) - 1).bit_length())
    keys = np.full(1 << bits, kernel.NO_ROW)
    keys[: len(cost)] = -cost << 32 | np.arange(len(cost))
    for k in range(1, bits + 1):
        for j in range(k):
            low, high = kernel.pair(np.arange(1 << (bits - 1)), k - 1 - j)
            swap = (keys[low] > keys[high]) == ((low >> k) & 1 == 0)
            keys[low], keys[high] = np.where(swap, keys[high], keys[low]), np.where(swap, keys[low], keys[high])
    assert (np.diff(keys[: len(cost)]) > 0).all()
    return keys


def assign_slots(costs):
    """The worker of each slot, (chunks, workers), from the slots' costs."""
    workers = np.arange(costs.shape[1])
    loads, taken = workers.copy(), np.zeros_like(costs)
    for chunk in range(len(costs)):
        rank = (loads < loads[:, None]).sum(1)
        loads = loads + costs[chunk, rank] * kernel.MOST_WORKERS
        taken[chunk, rank] = workers
    return taken


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("workers", [None, 1, 7, 66, 132, kernel.MOST_WORKERS])
@pytest.mark.parametrize(
    ("rows", "row_tiles", "tiles_n", "batch", "group"),
    [
        (1, 1, 1, 1, 1), (1, 2, 3, 2, 8), (64, 1, 43, 1, 8), (63, 2, 9, 3, 4), (512, 1, 32, 1, 4), (1025, 1, 5, 2, 2),
        (4096, 1, 16, 1, 3), (kernel.MOST_ROWS, 1, 2, 1, 1),
    ],
)  # fmt: skip
def test_the_kernel_orders_as_torch_does(rows, row_tiles, tiles_n, batch, group, workers, index_dtype):
    tiles = {"row_tiles": row_tiles, "steps": 2, "tiles_n": tiles_n, "batch": batch, "group": group, "workers": workers}
    long = torch.randint(0, 300, (rows,)) // torch.randint(1, 30, (rows,))
    for lengths in (long, torch.full((rows,), 5), torch.zeros(rows, dtype=torch.int64)):
        crow = crow_of(lengths).to("cuda", index_dtype)
        assert torch.equal(work_order_on_gpu(crow, **tiles)[0], work_order(crow, **tiles))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "workers"), [(64, 132), (64, kernel.MOST_WORKERS + 1), (kernel.MOST_ROWS + 1, 9)])
def test_beyond_the_kernels_limits_torch_orders(rows, workers):
    W = bsr(cases.power_law(rows, 8), (16, 16), "cuda")
    tiles = {"row_tiles": 1, "steps": 1, "tiles_n": 20, "batch": 1, "group": 4, "workers": workers}
    assert torch.equal(order_of(W, Tiles(**tiles)).cpu(), work_order(W.crow_indices.cpu(), **tiles))


def test_what_the_kernel_serves():
    tiles = {"row_tiles": 2, "steps": 1, "tiles_n": 20, "batch": 3, "group": 4, "workers": 132}
    assert fits(1, **tiles) and fits(kernel.MOST_ROWS, **tiles) and fits(64, **{**tiles, "workers": None})
    assert not fits(kernel.MOST_ROWS + 1, **tiles)
    assert not fits(64, **{**tiles, "workers": kernel.MOST_WORKERS + 1})
    assert not fits(64, **{**tiles, "tiles_n": kernel.MOST_ITEMS // 64})
