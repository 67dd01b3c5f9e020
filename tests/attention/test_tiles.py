"""KV tiles that a query tile visits, against masks made element by element; and which tile has which number.

Of dense tensors, of a cache's packed rows whose tiles are split, and of packed sequences, a warp being arrays of 32.
"""

import dataclasses
import functools
import importlib.util
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attention import seqlen as seqlen_module
from attention.decode.problem import DecodeScheduler, DecodeTile, SplitSource
from attention.forward import scheduler as compiled_module
from attention.forward.config import FlashConfig, FlashFacts, WindowKind
from attention.forward.heads import GqaPacking
from attention.forward.heuristics import L2_BYTES
from attention.forward.kv_tiles import FULL, WindowSource
from attention.forward.scheduler import QueryScheduler, QueryTile
from attention.seqlen import PackedSeqlens, SeqlenInfo
from cute_kernels.testing.reference import band_mask

from .emulate_blocks import number

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 128, 129, 200)
BOUNDS = [(None, None), (None, 0), (0, 0), (5, 0), (16, 3), (0, 40), (100, None), (None, 1), (31, 100)]
TILES = [(16, 16), (64, 16), (32, 64), (128, 64)]
every_window = pytest.mark.parametrize("bounds", BOUNDS, ids=str)


def source_of(cls, bounds, tile_m, tile_n, *more):
    left, right = bounds
    return cls(WindowKind(left is not None, right is not None), tile_m, tile_n, left or 0, right or 0, *more)


def visited(tiles, part, tile_n, always_masked=0) -> list:
    """The tiles that are visited for the rows `part` of a mask: only the first may be cut off, and full ones have no
    masked element, but for the first few, which are always masked."""
    count, ends = number(tiles.count), [number(e) for e in tiles.ends]
    assert count >= 0 and ends == sorted(ends) and ends[0] >= 0 and ends[-1] == count
    assert len(ends) == len(tiles.kinds)
    found = [number(tiles.at(i)) for i in range(count)]
    for i, n in enumerate(found):
        columns = part[:, n * tile_n : (n + 1) * tile_n]
        assert n >= 0 and columns.shape[1] > 0 and (i == 0 or columns.shape[1] == tile_n)
        if i >= always_masked and tiles.kinds[next(s for s, end in enumerate(ends) if i < end)] == FULL:
            assert columns.shape[1] == tile_n and bool(columns.all()), f"{i} is not full"
    return found


def nothing_is_hidden(part, found, tile_n) -> bool:
    hidden = torch.ones(part.shape[1], dtype=torch.bool)
    for n in found:
        hidden[n * tile_n : (n + 1) * tile_n] = False
    return not part[:, hidden].any()


def rows_are_right(source, seqlen, mask) -> bool:
    ends = [[number(x) for x in source.bounds(row, seqlen)] for row in range(len(mask))]
    return [[begin <= c < end for c in range(mask.shape[1])] for begin, end in ends] == mask.tolist()


@pytest.mark.parametrize("tile", TILES, ids=str)
@every_window
def test_tiles_against_a_mask(bounds, tile):
    """Every visible element lies in a visited tile."""
    tile_m, tile_n = tile
    source = source_of(WindowSource, bounds, tile_m, tile_n)
    for sq, sk in itertools.product(LENGTHS, LENGTHS):
        mask, seqlen = band_mask(sq, sk, *bounds), SeqlenInfo(0, sq, sk)
        for m in range(-(-sq // tile_m)):
            part = mask[m * tile_m : (m + 1) * tile_m]
            found = visited(source.for_tile(QueryTile(m, 0, 0, 0), seqlen), part, tile_n)
            assert nothing_is_hidden(part, found, tile_n), f"Sq {sq}, Sk {sk}, query tile {m}: {found}"
        if tile == (64, 16) and max(sq, sk) < 66:
            assert rows_are_right(source, seqlen, mask)


@every_window
@pytest.mark.parametrize("shared", [1, 3, 8, 70])
def test_splits_of_packed_rows(shared, bounds):
    """Each item's tiles are visited once by its splits together, and hold all that its rows see, full ones no more."""
    for sq, sk, splits in itertools.product((1, 2, 9), (0, 1, 16, 47, 129), (1, 2, 7)):
        source = source_of(SplitSource, bounds, 64, 16, GqaPacking(shared), splits)
        seqlen, packed = SeqlenInfo(0, sq, sk), band_mask(sq, sk, *bounds).repeat_interleave(shared, 0)
        for m in range(-(-sq * shared // 64)):
            part = packed[m * 64 : (m + 1) * 64]
            found = [visited(source.for_tile(DecodeTile(m, 0, 0, i), seqlen), part, 16, 1) for i in range(splits)]
            counts, visits = [len(each) for each in found], sum(found, [])
            assert max(counts) - min(counts) <= 1 and len(set(visits)) == len(visits)
            assert visits == sorted(visits, reverse=True) and nothing_is_hidden(part, visits, 16)
        assert rows_are_right(source, seqlen, packed)


# Which tile has which number


def test_every_split_once():
    scheduler = DecodeScheduler(3, 4, 5, 6)
    found = {(t.m, t.h_kv, t.b, t.split) for t in map(scheduler.decode, range(scheduler.count))}
    assert found == set(itertools.product(range(3), range(4), range(5), range(6)))


@pytest.mark.parametrize("l2_heads", [None, 1, 2, 3, 4, 8])
def test_query_tiles_by_number(l2_heads):
    """Every query tile has a number; of heads that are together all last tiles come first."""
    heads, batch, tiles_m = 4, 2, 3
    scheduler = QueryScheduler(tiles_m, heads, batch, 2, l2_heads)
    tiles = [scheduler.decode(index) for index in range(number(scheduler.count))]
    found = [tuple(number(x) for x in (t.b, t.h, t.m)) for t in tiles]
    assert sorted(found) == list(itertools.product(range(batch), range(heads), range(tiles_m)))
    assert all(number(t.h_kv) == number(t.h) // 2 for t in tiles)
    sections = [(b * heads + h) // (l2_heads or 1) for b, h, _ in found]
    assert sections == sorted(sections)
    for section in set(sections):
        order = [m for s, (_, _, m) in zip(sections, found, strict=True) if s == section]
        assert order == sorted(order, reverse=True)


def test_heads_together():
    """As many as there is room for in L2, and all that share a head of K; without a band one after the other."""
    of = functools.partial(QueryScheduler.of, q_shape=(2, 32, 8192, 128), k_shape=(2, 8, 8192, 128))
    facts = FlashFacts("sm_90a", "sm_90", FlashConfig(128, 128, 2, 2), window=WindowKind(right=True))
    assert number(of(facts).l2_heads) == L2_BYTES // (8192 * 512) * 4
    assert number(of(dataclasses.replace(facts, head_dim=64, head_dim_v=64)).l2_heads) == 64  # no more than there are
    assert number(of(facts, k_shape=(2, 8, 2**20, 128)).l2_heads) == 4
    assert of(dataclasses.replace(facts, window=WindowKind())).l2_heads is None
    assert of(dataclasses.replace(facts, path="sm_80")).l2_heads is None


# Packed sequences

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
    """For every sequence, and of the rows after the last; no index is without a tile once they are counted."""
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
