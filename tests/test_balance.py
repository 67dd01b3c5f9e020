"""The order of work tiles: every tile once, and workers that finish together; and the op with it.

Without a GPU the table is made and checked, with one the kernels run by it.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_kernels
from cute_kernels.scheduler import TileScheduler
from sparse_collective import BsrMatrix, balance, bsr_linear, bsr_matmul
from sparse_collective.balance import OVERHEAD, work_order

from . import cases
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, poisoned


def crow_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    row_tiles=st.integers(1, 4),
    tiles_n=st.integers(1, 9),
    batch=st.integers(1, 3),
    group=st.integers(1, 12),
    workers=st.sampled_from((None, 1, 7, 66)),
)
def test_every_tile_comes_once(lengths, row_tiles, tiles_n, batch, group, workers):
    """And a worker that has no tile in a round has none after it."""
    tiles = {"row_tiles": row_tiles, "tiles_n": tiles_n, "batch": batch, "group": group}
    order = work_order(crow_of(lengths), steps=2, workers=workers, **tiles)
    count = len(lengths) * row_tiles * tiles_n * batch
    assert order.dtype == torch.int32 and order.shape[1] == 2
    tiles_m = len(lengths) * row_tiles
    found = [m + n * tiles_m for m, n in order.tolist() if m >= 0]
    assert sorted(found) == list(range(count))
    if workers is None:
        assert len(order) == count
        return
    assert len(order) == -(-count // workers) * workers
    assert bool((order[:-workers] >= 0).all())
    for first in range(min(workers, 3)):
        mine = order[first::workers, 0]
        end = TileScheduler.end.__wrapped__(scheduler(order, tiles_m, tiles_n, batch), first, workers)
        assert len(range(first, end, workers)) == int((mine >= 0).sum())


def scheduler(order, tiles_m, tiles_n, batch):
    return TileScheduler(tiles_m, tiles_n, batch, 1, order.numpy())


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


@pytest.mark.parametrize("path", ["sm_80", pytest.param("sm_90", marks=pytest.mark.sm_90)])
@pytest.mark.parametrize("pattern", ["power_law", "empty_rows", "one_full_row", "no_blocks", "bernoulli"])
@pytest.mark.parametrize(
    "block", [(128, 128), (64, 64), (32, 32), (256, 64), (48, 112)], ids=lambda b: f"{b[0]}x{b[1]}"
)
def test_products(monkeypatch, device, path, pattern, block):
    monkeypatch.setattr(balance, "ENABLED", True)
    mask = cases.PATTERNS[pattern](1024 // block[0] + 1, 512 // block[1] + 1)
    crow, col = cases.mask_to_indices(mask)
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    values = normal(len(col), *block, k=shape[1])
    W = BsrMatrix(crow.to(device), col.to(device), values.to(device), shape)
    dense, b = dense_of(crow, col, values, shape), normal(shape[1], 1000)
    exact, by_torch = exact_and_torch(dense, b, torch.bfloat16)
    out = poisoned(*exact.shape, device=device)
    with cute_kernels.path(path):
        bsr_matmul(W, b.to(device), out=out)
        assert_as_good_as_torch(out.cpu(), exact, by_torch, k=shape[1])
        linear = bsr_linear(b.t().contiguous().to(device), W)
        assert_as_good_as_torch(linear.t().cpu(), exact, by_torch, k=shape[1])


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["sm_80", pytest.param("sm_90", marks=pytest.mark.sm_90)])
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=lambda b: f"{b[0]}x{b[1]}")
def test_many_rounds(monkeypatch, path, block):
    """Every worker does several tiles, of lengths from none to all."""
    monkeypatch.setattr(balance, "ENABLED", True)
    mask = cases.power_law(2560 // block[0], 1024 // block[1])
    crow, col = cases.mask_to_indices(mask)
    values = normal(len(col), *block, k=1024)
    W = BsrMatrix(crow.cuda(), col.cuda(), values.cuda(), (2560, 1024))
    b = normal(1024, 8000, device="cuda")
    exact, by_torch = exact_and_torch(W.to_dense(), b, torch.bfloat16)
    out = poisoned(2560, 8000, device="cuda")
    with cute_kernels.path(path):
        bsr_matmul(W, b, out=out)
    assert_as_good_as_torch(out, exact, by_torch, k=1024)


@pytest.mark.parametrize(("mask", "even"), [(cases.uniform(8, 9, 3), True), (cases.power_law(8, 9), False)])
def test_a_check_tells_whether_rows_are_even(mask, even):
    crow, col = cases.mask_to_indices(mask)
    W = BsrMatrix(crow, col, normal(len(col), 16, 16), (128, 144))
    assert not W.even, "not known yet"
    W.check_indices()
    assert W.even is even
