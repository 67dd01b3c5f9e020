"""Which tiles of K and V a query tile visits, against masks made element by element."""

import itertools

import pytest
import torch

from attention.config import BandKind
from attention.k_tiles import FULL, BandSource
from attention.lengths import Span
from attention.scheduler import QueryTile

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 128, 129, 200)
BOUNDS = [(None, None), (None, 0), (0, 0), (5, 0), (16, 3), (0, 40), (100, None), (None, 1), (31, 100)]
TILES = [(16, 16), (64, 16), (32, 64), (128, 64)]


def number(x) -> int:
    return int(getattr(x, "value", x))


def seen(sq, sk, left, right) -> torch.Tensor:
    """(Sq, Sk): which row sees which column."""
    row, col = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None]
    mask = torch.ones(sq, sk, dtype=torch.bool)
    if left is not None:
        mask &= col >= row - left
    if right is not None:
        mask &= col <= row + right
    return mask


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_tiles_against_a_mask(bounds, tile):
    """Every visible element lies in a visited tile, a full tile has no masked one, and only the first is cut off."""
    (left, right), (tile_m, tile_n) = bounds, tile
    source = BandSource(BandKind(left is not None, right is not None), tile_m, tile_n, left or 0, right or 0)
    for sq, sk in itertools.product(LENGTHS, LENGTHS):
        mask = seen(sq, sk, left, right)
        for m in range(-(-sq // tile_m)):
            part = mask[m * tile_m : (m + 1) * tile_m]
            tiles = source.for_tile(QueryTile(m, 0, 0, 0), Span(0, sq, sk))
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
    source = BandSource(BandKind(left is not None, right is not None), 64, 64, left or 0, right or 0)
    for sq, sk in itertools.product(LENGTHS[:8], LENGTHS[:8]):
        mask = seen(sq, sk, left, right)
        for row in range(sq):
            begin, end = (number(x) for x in source.bounds(row, Span(0, sq, sk)))
            assert [begin <= c < end for c in range(sk)] == mask[row].tolist()
