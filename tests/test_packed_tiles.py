"""Packed sequences without a GPU: which tile an index is, a warp being arrays of 32; and what bad entries become."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from attention.forward import scheduler as compiled_module
from attention.forward import seqlen as seqlen_module
from attention.forward.seqlen import PackedSeqlens

# A copy of its own: functions of which a kernel was compiled are no longer plain.
spec = importlib.util.spec_from_file_location("attention.forward.plain_scheduler", compiled_module.__file__)
scheduler_module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scheduler_module)
PackedScheduler = scheduler_module.PackedScheduler

WARP = np.arange(32)


def shuffle_up(x, distance):
    return np.where(WARP >= distance, np.roll(x, distance), x)


@pytest.fixture
def warp(monkeypatch):
    """The plain functions under @cute.jit, with a warp's values in arrays."""
    arch = SimpleNamespace(
        lane_idx=lambda: WARP,
        shuffle_sync_up=shuffle_up,
        shuffle_sync=lambda x, lane: int(x[lane]),
        vote_ballot_sync=lambda x: sum(1 << int(i) for i in np.flatnonzero(x)),
        popc=lambda x: x.bit_count(),
        make_warp_uniform=int,
    )
    numbers = SimpleNamespace(min=np.minimum, max=np.maximum)
    for module in (scheduler_module, seqlen_module):
        monkeypatch.setattr(module, "cutlass", numbers)
        monkeypatch.setattr(module, "cute", SimpleNamespace(arch=arch))
        monkeypatch.setattr(module, "select_", np.where)
    monkeypatch.setattr(scheduler_module, "Int32", int)
    monkeypatch.setattr(scheduler_module, "range_constexpr", range)
    for name in ("find", "tiles_of_a_head"):
        monkeypatch.setattr(PackedScheduler, name, getattr(PackedScheduler, name).__wrapped__)


def cumulative(sizes) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def scheduler_of(sizes, tile_m, heads=2, shared=1, after=0) -> PackedScheduler:
    cu = cumulative(sizes)
    lengths = PackedSeqlens(cu, cu, int(cu[-1]) + after, int(cu[-1]))
    return PackedScheduler.at_most(lengths, tile_m, heads, shared)


SIZES = [[1], [0], [0, 0, 5], [128], [129, 127, 0, 1, 300], [0] * 40 + [70], [64] * 31, [64] * 32, [65] * 33]


@pytest.mark.parametrize(("tile_m", "after"), [(64, 500), (192, 0)])
@pytest.mark.parametrize("sizes", [*SIZES, 20, 64, 100], ids=lambda s: str(s)[:20])
def test_every_tile_comes_once(sizes, after, tile_m, warp):
    """Of every sequence, and of the rows after the last; no index is without a tile once they are counted."""
    if isinstance(sizes, int):
        random = np.random.default_rng(sizes)
        sizes = random.integers(0, 300, sizes) * random.integers(0, 2, sizes)
    at_most = scheduler_of(sizes, tile_m, after=after)
    rows = [*map(int, sizes), after]
    of_head = [(b, m) for b, n in enumerate(rows) for m in reversed(range(-(-n // tile_m)))]
    expected = [(h, b, m) for h in range(2) for b, m in of_head]
    counted = at_most.counted(1)
    assert counted.count == len(expected) <= at_most.count == at_most.counted(at_most.count).count
    found = [counted.decode(i) for i in range(counted.count)]
    assert [(t.h, t.b, t.m) for t in found] == expected
    # The kernel with a CTA for each index that there may be: those past the last have no rows.
    found = [at_most.decode(i) for i in range(at_most.count)]
    spans = [at_most.seqlens.of(t.b) for t in found]
    assert [(t.h, t.b, t.m) for t, s in zip(found, spans, strict=True) if s.rows] == expected
    assert all(s.cols == 0 for s in spans if not s.rows)


def test_heads_share_keys(warp):
    scheduler = scheduler_of([10, 20], 16, heads=6, shared=3).counted(1)
    assert [scheduler.decode(i).h_kv for i in range(scheduler.count)] == [0] * 9 + [1] * 9


def test_spans(warp):
    lengths = PackedSeqlens(np.array([0, 3, 3, 10]), np.array([0, 5, 9, 9]), 12, 11)
    spans = [lengths.of(b) for b in range(6)]
    assert [(int(s.q0), int(s.rows), int(s.k0), int(s.cols)) for s in spans] == [
        (0, 3, 0, 5),
        (3, 0, 5, 4),
        (3, 7, 9, 0),
        (10, 2, 9, 0),  # the rows after the last sequence
        (10, 0, 9, 0),
        (10, 0, 9, 0),
    ]
    assert int(spans[0].offset) == 2


@pytest.mark.parametrize("seed", range(12))
def test_no_span_leaves_the_tensors(seed, warp):
    """Whatever the entries are."""
    random = np.random.default_rng(seed)
    entries, size = [-(2**31), -5, 0, 7, 90, 100, 101, 2**31 - 1], random.integers(2, 70)
    cu_q, cu_k = random.choice(entries, size), random.choice(entries, size)
    lengths = PackedSeqlens(cu_q, cu_k, 100, 90)
    scheduler = PackedScheduler.at_most(lengths, 64, 2, 1)
    for tiles in (scheduler, scheduler.counted(1)):
        for index in range(tiles.count):
            tile = tiles.decode(index)
            span = lengths.of(tile.b)
            assert 0 <= span.q0 <= span.q0 + span.rows <= 100 and 0 <= span.k0 <= span.k0 + span.cols <= 90
            assert 0 <= tile.h < 2 and tile.m >= 0 and (tile.m * 64 < span.rows or not span.rows)
