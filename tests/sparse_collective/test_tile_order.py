"""The order of work tiles: every tile once, and workers that finish together; products whose kernels take it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.scheduler import TileScheduler
from cute_kernels.testing import patterns
from sparse_collective import bsr_linear, bsr_matmul
from sparse_collective.bsr_gemm.tile_order import LONG, MOST_CHUNKS, OVERHEAD, work_order
from sparse_collective.distributed.overlap import linear_into_each

from ..emulator.ops import needs_compiler, on_emulator
from ..gemm_calls import check
from .bsr_parts import BOTH_OPS, INDEX_DTYPES, Operations, bsr, operands


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


@given(interleaved=st.booleans(), **PROBLEMS)
def test_every_tile_comes_once(lengths, row_tiles, tiles_n, batch, group, workers, interleaved):
    """And a worker that has no tile in a round has none after it."""
    tiles = {"row_tiles": row_tiles, "tiles_n": tiles_n, "batch": batch, "group": group, "interleaved": interleaved}
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


@pytest.mark.parametrize(
    ("batch", "tiles_n", "workers"), [(2, 16, 132), (2, 8, 66), (4, 8, 66), (8, 8, 132), (8, 1, 7)]
)
@pytest.mark.parametrize("name", ["even", "power law", "one full row"])
def test_items_in_turn(name, batch, tiles_n, workers):
    """At any time all items are written. Each worker has the tiles that it has otherwise."""
    lengths = {"even": [8] * 32, "one full row": [112] + [8] * 31, "power law": [64 // (i + 1) for i in range(32)]}[
        name
    ]
    tiles = {"row_tiles": 1, "steps": 2, "tiles_n": tiles_n, "batch": batch, "group": 8, "workers": workers}
    turns, before = (
        work_order(crow_of(lengths), interleaved=interleaved, **tiles).view(-1, workers, 2)
        for interleaved in (True, False)
    )
    for worker in range(workers):
        assert sorted(turns[:, worker].tolist()) == sorted(before[:, worker].tolist())
    fewest = torch.stack([torch.bincount(one, minlength=batch).min() for one in turns[:-1, :, 1] // tiles_n])
    assert fewest.double().mean() * batch / workers >= 0.6 or workers < 2 * batch


def by_hand(lengths, *, row_tiles, steps, tiles_n, batch, group, workers) -> list[tuple[int, int]]:
    """work_order, one tile after the other."""
    cost = [length * steps + OVERHEAD for length in lengths]
    longest_first = sorted(range(len(lengths)), key=lambda row: (-cost[row], row))
    tiles = []  # sort key, place among all row tiles, coordinates, cost
    for place, (rank, i) in enumerate((rank, i) for rank in range(len(lengths)) for i in range(row_tiles)):
        row = longest_first[rank]
        short = cost[row] * len(lengths) < LONG * sum(cost)
        for l in range(batch):
            for n in range(tiles_n):
                key = short, l, n // min(group, tiles_n), place, n
                tiles.append((key, place, (row * row_tiles + i, l * tiles_n + n), cost[row]))
    tiles.sort()
    if workers is None:
        return [tile[2] for tile in tiles]
    rounds = -(-len(tiles) // workers)
    at_once = -(-rounds // MOST_CHUNKS)
    table, load = [(-1, -1)] * (rounds * workers), [0] * workers
    for first in range(0, rounds, at_once):
        chunk = sorted(tiles[first * workers : (first + at_once) * workers], key=lambda tile: tile[1])
        least, added = sorted(range(workers), key=lambda worker: load[worker]), [0] * workers
        last = min(at_once, rounds - first) - 1
        for j, tile in enumerate(chunk):
            round_, slot = divmod(j, workers)
            worker = least[workers - 1 - slot if round_ % 2 and round_ < last else slot]
            table[(first + round_) * workers + worker] = tile[2]
            added[worker] += tile[3]
        load = [a + b for a, b in zip(load, added, strict=True)]
    return table


@given(steps=st.integers(1, 3), index_dtype=st.sampled_from(INDEX_DTYPES), **PROBLEMS)
def test_the_order_is_that_of_a_loop_over_tiles(lengths, index_dtype, **tiles):
    order = work_order(crow_of(lengths).to(index_dtype), **tiles)
    assert [tuple(tile) for tile in order.tolist()] == by_hand(lengths, **tiles)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("workers", [1, 5, 132, None])
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_the_order_of_many_rounds(device, rows, workers):
    """Several rounds a chunk, which go to and fro; panels and long rows that end inside a chunk; equal lengths."""
    tiles = {"row_tiles": 2, "steps": 2, "tiles_n": 43, "batch": 2, "group": 8, "workers": workers}
    for lengths in (torch.randint(0, 40, (rows,)) // torch.randint(1, 20, (rows,)), torch.full((rows,), 5)):
        with Operations() as operations:
            order = work_order(crow_of(lengths).to(device), **tiles)
        assert not operations.asked(), "it waits for nothing"
        assert [tuple(tile) for tile in order.tolist()] == by_hand(lengths.tolist(), **tiles)


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


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["power_law", "bernoulli"])
@pytest.mark.parametrize("tokens", [1000, 3000])
def test_products_of_items_in_turn(path, tokens, pattern):
    """Results of 3 ranks, some distance apart in memory, are bitwise those of one product."""
    W = bsr(pattern, (128, 128), "cuda", grid=(16, 8))
    x = torch.randn(3 * tokens, 1024, device="cuda", dtype=W.dtype)
    memory = torch.full((3, tokens * 2048 + 4096), torch.nan, device="cuda", dtype=W.dtype)
    outs = memory[:, : tokens * 2048].unflatten(1, (tokens, 2048))
    linear_into_each(W, x, outs)
    assert torch.equal(outs.flatten(0, 1), bsr_linear(x, W)) and memory[:, tokens * 2048 :].isnan().all()


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("pattern", "block", "tokens"), [("power_law", (64, 64), 70), ("no_blocks", (48, 112), 5)])
def test_products_of_items_in_turn_on_the_emulator(arch, pattern, block, tokens):
    """Also of a transposed matrix."""
    stored = bsr(pattern, block, grid=(3, 2))
    for W in (stored, stored.t()):
        M, K = W.shape
        x, memory = torch.randn(2 * tokens, K).to(W.dtype), torch.full((2, tokens * M + 128), torch.nan, dtype=W.dtype)
        outs = memory[:, : tokens * M].unflatten(1, (tokens, M))
        with on_emulator(arch, sms=2):
            linear_into_each(W, x, outs)
            expected = bsr_linear(x, W)
        assert torch.equal(outs.flatten(0, 1), expected) and memory[:, tokens * M :].isnan().all()


@pytest.mark.parametrize(("mask", "even"), [(patterns.uniform(8, 9, 3), True), (patterns.power_law(8, 9), False)])
def test_a_check_tells_whether_rows_are_even(mask, even):
    W = bsr(mask, (16, 16))
    assert not W.even, "not known yet"
    W.check_indices()
    assert W.even is even
