"""Which tiles of K and V a query tile visits, against masks made element by element."""

import dataclasses
import functools
import itertools

import pytest
import torch

from attention.forward.choose import L2_BYTES
from attention.forward.config import FlashConfig, FlashFacts, WindowKind
from attention.forward.kv_tiles import FULL, WindowSource
from attention.forward.scheduler import QueryScheduler, QueryTile
from attention.forward.seqlen import SeqlenInfo

from .emulate_blocks import number
from .reference import band_mask

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 128, 129, 200)
BOUNDS = [(None, None), (None, 0), (0, 0), (5, 0), (16, 3), (0, 40), (100, None), (None, 1), (31, 100)]
TILES = [(16, 16), (64, 16), (32, 64), (128, 64)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_tiles_against_a_mask(bounds, tile):
    """Every visible element lies in a visited tile, a full tile has no masked one, and only the first is cut off."""
    (left, right), (tile_m, tile_n) = bounds, tile
    source = WindowSource(WindowKind(left is not None, right is not None), tile_m, tile_n, left or 0, right or 0)
    for sq, sk in itertools.product(LENGTHS, LENGTHS):
        mask = band_mask(sq, sk, left, right)
        for m in range(-(-sq // tile_m)):
            part = mask[m * tile_m : (m + 1) * tile_m]
            tiles = source.for_tile(QueryTile(m, 0, 0, 0), SeqlenInfo(0, sq, sk))
            count, ends = number(tiles.count), [number(e) for e in tiles.ends]
            where = f"Sq {sq}, Sk {sk}, query tile {m}: {count} tiles, ends {ends}"
            assert count >= 0 and ends == sorted(ends) and ends[0] >= 0 and ends[-1] == count, where
            assert len(ends) == len(tiles.kinds)
            visited = torch.zeros(sk, dtype=torch.bool)
            for i in range(count):
                n = number(tiles.at(i))
                assert 0 <= n * tile_n < sk, where
                kind = tiles.kinds[next(s for s, end in enumerate(ends) if i < end)]
                columns = part[:, n * tile_n : (n + 1) * tile_n]
                assert i == 0 or columns.shape[1] == tile_n, where
                if kind == FULL:
                    assert columns.shape[1] == tile_n and bool(columns.all()), f"{where}: {i} is not full"
                visited[n * tile_n : (n + 1) * tile_n] = True
            assert not part[:, ~visited].any(), f"{where}: visible elements in tiles that are not visited"


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_bounds_of_a_row(bounds):
    left, right = bounds
    source = WindowSource(WindowKind(left is not None, right is not None), 64, 64, left or 0, right or 0)
    for sq, sk in itertools.product(LENGTHS[:8], LENGTHS[:8]):
        mask = band_mask(sq, sk, left, right)
        for row in range(sq):
            begin, end = (number(x) for x in source.bounds(row, SeqlenInfo(0, sq, sk)))
            assert [begin <= c < end for c in range(sk)] == mask[row].tolist()


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
