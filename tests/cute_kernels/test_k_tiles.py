"""The seam without a GPU: which K-tiles a work tile sums over, and in which order work tiles come.

The sources and the scheduler run here as they are, on Python numbers and outside any kernel, against statements made
by brute force.
"""

import itertools

import pytest
import torch

from cute_kernels.k_tiles import DenseSource, check_sharing
from cute_kernels.matmul.config import BlockFacts, GemmConfig, GemmFacts
from cute_kernels.scheduler import TileScheduler
from cute_kernels.testing.patterns import PATTERNS, mask_to_indices
from cute_kernels.tile.element import BITS_16
from sparse_collective.bsr_gemm.k_tiles import BsrSource

from ..attention.emulate_blocks import Table
from ..host_emulation import number, numbers
from ..sparse_collective.bsr_parts import FORMS, batch


def facts(bk, tile_k, bm=64):
    config = GemmConfig(64, 64, tile_k, 4, 2, 2)
    return GemmFacts("sm_80", "sm_80", config, block=BlockFacts(bm, bk, "int32"))


# MMA steps


@pytest.mark.parametrize("tile_k", [16, 32, 64])
def test_every_column_of_a_block_is_multiplied_once(tile_k):
    """Steps past the block's edge are announced by clips_k, so that they find zeros; they are few."""
    for bk in range(16, 1025, 16):
        f = facts(bk, tile_k)
        visits = [0] * (f.k_tiles_per_block * tile_k)
        for k in range(f.k_tiles_per_block):
            steps = f.k_blocks[k % len(f.k_blocks)]
            assert 1 <= steps <= tile_k // BITS_16.mma_k
            for column in range(k * tile_k, k * tile_k + steps * BITS_16.mma_k):
                visits[column] += 1
        assert visits[:bk] == [1] * bk, f"bk {bk}, tile_k {tile_k}: {f.k_blocks}"
        assert any(visits[bk:]) == f.clips_k and sum(visits[bk:]) <= bk / 8, f"bk {bk}: columns of padding"
        assert f.k_tiles_per_block % len(f.k_blocks) == 0, "the period must end with the block"
        assert len(f.k_blocks) <= 8


def test_known_periods():
    assert facts(112, 64).k_blocks == (4, 3) and facts(112, 32).k_blocks == (2, 2, 2, 1)
    assert facts(128, 64).k_blocks == (4,) and facts(16, 16).k_blocks == (1,) and facts(48, 64).k_blocks == (3,)
    dense = GemmFacts("sm_80", "sm_80", GemmConfig(64, 64, 32, 4, 2, 2))
    assert dense.k_blocks == (2,) and dense.clips_k


# Sources


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("bm", "bk", "tile_m", "tile_k"), [(64, 64, 64, 64), (128, 112, 64, 64), (48, 80, 64, 32), (512, 16, 128, 16)]
)
def test_a_bsr_row_walks_its_stored_blocks(pattern, bm, bk, tile_m, tile_k):
    """Each row tile, in order: every stored block of its block row, each of the block's K-tiles, and no other."""
    mask = PATTERNS[pattern](7, 5)
    crow, col = (t.tolist() for t in mask_to_indices(mask))
    tiles_m, steps = -(-bm // tile_m), -(-bk // tile_k)
    source = BsrSource(crow, col, tiles_m, steps)
    for m in range(7 * tiles_m):
        row, rest = divmod(m, tiles_m)
        k_tiles = source.for_tile(m, 0, source.bounds(m, 6, 0))
        assert numbers(k_tiles.out(6)) == (rest, 6, row)
        found = [k_tiles.at(i) for i in range(number(k_tiles.count))]
        stored = [(p, column) for p, column in enumerate(col) if crow[row] <= p < crow[row + 1]]
        expected = [((rest, k, p), (k, column)) for p, column in stored for k in range(steps)]
        assert [(numbers(tile.a), numbers(tile.b)) for tile in found] == expected
        assert sorted({tile[1][1] for tile in expected}) == mask[row].nonzero().flatten().tolist()


def batch_source(form, groups=None, tiles_run=1):
    """A source of two row tiles and two K-tiles a block; which blocks item l stores: {row: [(number, column), ...]}."""
    W, items = batch(form, (16, 16), names=("power_law", "no_blocks", "bernoulli", "all_blocks"), grid=(4, 5))
    stored, begin = [], 0
    for item in items:
        bounds, columns = item.crow_indices.tolist(), item.col_indices.tolist()
        stored.append([[(begin + p, columns[p]) for p in range(*bounds[r : r + 2])] for r in range(4)])
        begin += len(columns)
    crow = W.crow_indices.t() if form == "patterns" else W.crow_indices  # (rows + 1, L)
    groups = None if groups is None else Table(torch.tensor(groups, dtype=torch.int32))
    return BsrSource(Table(crow), Table(W.col_indices), 2, 2, None, form, 4, groups, tiles_run), stored


def walked(source, m, n, l) -> tuple:
    """K-tiles of a work tile: [(number of the stored block, its column), ...]; and the item it says it takes."""
    k_tiles = source.for_tile(m, l, source.bounds(m, n, l))
    assert numbers(k_tiles.out(n)) == (m % 2, n, m // 2)
    found = [k_tiles.at(i) for i in range(number(k_tiles.count))]
    blocks = [(number(tile.a[2]), number(tile.b[1])) for tile in found]
    assert [numbers(tile.a)[:2] for tile in found] == [(m % 2, i % 2) for i in range(len(found))]
    assert blocks[::2] == blocks[1::2], "both K-tiles of a block"
    return blocks[::2], number(k_tiles.l)


@pytest.mark.parametrize("form", FORMS)
def test_each_item_or_run_of_columns_walks_its_own_blocks(form):
    """A run walks none where its item's number is out of range: the item it then takes is one that exists."""
    source, stored = batch_source(form)
    for m, l in itertools.product(range(8), range(4)):
        assert walked(source, m, 0, l) == (stored[l][m // 2], l)
    groups = [2, 0, 4, 3, -1, 2**31 - 1, -(2**31), 1]
    source, stored = batch_source(form, groups, tiles_run=3)
    for m, n in itertools.product(range(8), range(3 * len(groups))):
        item = min(max(groups[n // 3], 0), 3)
        assert walked(source, m, n, 0) == (stored[item][m // 2] if item == groups[n // 3] else [], item)


def test_a_dense_tile_walks_all_of_k():
    source = DenseSource(5, 3)
    for m, l in itertools.product(range(4), range(3)):
        k_tiles = source.for_tile(m, l, source.bounds(m, 7, l))
        assert numbers(k_tiles.out(7)) == (m, 7, 0) and k_tiles.count == 5
        assert [numbers(k_tiles.at(i).a) for i in range(5)] == [(m, i, l) for i in range(5)]
        assert [numbers(k_tiles.at(i).b) for i in range(5)] == [(i, 0) for i in range(5)]
    source = DenseSource(2, 1)
    assert [numbers(source.for_tile(3, l, source.bounds(3, 0, l)).at(1).a) for l in range(4)] == [(3, 1, 0)] * 4


# The scheduler

EXTENTS = [(1, 1, 1, 1), (3, 7, 2, 4), (5, 4, 3, 4), (2, 9, 1, 20), (7, 1, 2, 3), (1, 12, 5, 5), (16, 16, 1, 8)]


@pytest.mark.parametrize(("tiles_m", "tiles_n", "batch", "group"), [*EXTENTS, (4, 10, 2, 1)])
def test_every_work_tile_comes_once(tiles_m, tiles_n, batch, group):
    """Matrix by matrix, panel by panel, in each panel row by row."""
    scheduler = TileScheduler(tiles_m, tiles_n, batch, group)
    decode = TileScheduler.decode.__wrapped__  # the plain function under @cute.jit
    found = [numbers(decode(scheduler, index)) for index in range(scheduler.count)]
    panels = [range(first, min(first + group, tiles_n)) for first in range(0, tiles_n, group)]
    assert found == [(m, n, l) for l in range(batch) for panel in panels for m in range(tiles_m) for n in panel]
    assert len(set(found)) == scheduler.count == tiles_m * tiles_n * batch


# K-tiles that adjacent tiles share


def test_a_cluster_is_refused_where_the_source_makes_no_promise():
    index = torch.zeros(2, dtype=torch.int32)
    high, grouped = BsrSource(index, index, 2, 1), BsrSource(index, index, 1, 1, groups=index, tiles_run=3)
    for source, cluster in ((DenseSource(1, 1), (2, 1)), (DenseSource(1, 1), (1, 2)), (high, (2, 1)), (high, (1, 2))):
        check_sharing(source, *cluster)
    check_sharing(object(), 1, 1)
    for source, cluster, text in (
        (
            BsrSource(index, index, 3, 1),
            (2, 1),
            "B once for 2 adjacent row tiles, so BsrSource.shared_rows must be a multiple of 2, got 3",
        ),
        (BsrSource(index, index, 1, 1), (2, 1), "shared_rows must be a multiple of 2, got 1"),
        (
            grouped,
            (1, 2),
            "A once for 2 adjacent column tiles, so BsrSource.shared_columns must be a multiple of 2, got 3",
        ),
        (object(), (2, 1), "object.shared_rows must be a multiple of 2, got 1"),
        (object(), (1, 2), "or a source that guarantees shared_columns"),
    ):
        with pytest.raises(ValueError, match=text):
            check_sharing(source, *cluster)
