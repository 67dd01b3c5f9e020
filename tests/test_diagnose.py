"""The diagnosis names the tile and the warp of planted errors, and the bound refuses what it must."""

import itertools
import math

import pytest
import torch

from cute_kernels.matmul.config import BlockFacts, GemmConfig, GemmFacts
from cute_kernels.matmul.plan import Plan
from cute_kernels.scheduler import TileScheduler
from cute_kernels.testing.diagnose import Where, diagnose, kernel_view
from cute_kernels.testing.reference import assert_as_good_as_torch, normal, truth

SM80 = GemmConfig(128, 64, 32, 4, 2, 2)
SM90 = GemmConfig(128, 256, 64, 4, 2, 1)


def plan_of(config, path, shape, *, op="gemm", block=None, transposed=False, views=(), group=4, ctas=132):
    facts = GemmFacts("sm_90a", path, config, block=block, transposed=transposed)
    device = torch.device("cpu")
    return Plan(op, shape, torch.bfloat16, device, facts=facts, views=views, group=group, max_ctas=ctas)


def wrong_at(*places, shape=(512, 512), value=9.0):
    """(out, exact) of a shape, right but for the given slices."""
    exact = torch.randn(shape, dtype=torch.float64)
    out = exact.bfloat16()
    for place in places:
        out[place] = value
    return out, exact


TALL, SPLIT_N = GemmConfig(256, 128, 64, 4, 2, 1), GemmConfig(64, 256, 64, 4, 1, 2)
LOW = GemmConfig(64, 128, 64, 4, 2, 2)
FAULTS = {  # configuration, path, shape, block, the elements at fault, what is said of them
    "a warp": (
        SM80, "sm_80", (512, 512), None, (slice(128 + 64, 256), slice(64, 96)),  # lower left warp of tile (1, 1)
        ["2048 of 262144 elements are wrong, 0 of them NaN", "first at (192, 64): got 9, expected",
         "path sm_80, 128x64x32 stages 4 split 2x2", "tile row 1 of 4, column 1 of 8: 2048 of 8192 wrong",
         "warp 1 (m 1, n 0): 2048 wrong"],
    ),
    "the second 64 rows of a 2x1 split": (
        SM90, "sm_90", (512, 512), None, (slice(64, 128), slice(0, 256)),
        ["consumer warpgroup 1, 64-row slab 1 of the tile: 16384 wrong"],
    ),
    "the second columns of a 1x2 split": (
        SPLIT_N, "sm_90", (512, 512), None, (slice(64, 128), slice(128, 256)),
        ["tile row 1 of 8, column 0 of 2: 8192 of 16384",
         "consumer warpgroup 1, 64-row slab 0 of the tile: 8192 wrong"],
    ),
    "slabs alternate between warpgroups": (
        TALL, "sm_90", (512, 512), None, (slice(128, 192), slice(0, 128)),
        ["consumer warpgroup 0, 64-row slab 2 of the tile"],
    ),
    "row tiles of 64 and 48 rows in a block row": (
        LOW, "sm_80", (448, 256), (112, 64), (slice(112 + 64, 224), slice(0, 128)),
        ["blocks 112x64", "tile row 3 of 8, column 0 of 2 (block row 1): 6144 of 6144 wrong"],
    ),
    "a batch": (
        SM80, "sm_80", (3, 128, 128), None, (2, slice(0, 8), slice(0, 8)),
        ["tile row 0 of 1, column 0 of 2, batch 2: 64 of 8192 wrong"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_tile_and_its_owner_are_named(name):
    config, path, shape, block, place, lines = FAULTS[name]
    out, exact = wrong_at(place, shape=shape)
    facts = {"op": "bsr_matmul", "block": BlockFacts(*block, "int32")} if block else {}
    text = diagnose(out, exact, plan_of(config, path, shape, **facts))
    assert all(line in text for line in lines), text
    out[place] = math.nan
    text = diagnose(out, exact, plan_of(config, path, shape, **facts))
    assert "got nan" in text and "(NaN: never written, or read from outside)" in text
    assert f"{exact[place].numel()} of them NaN" in text and " NaN\n" in text


def test_tiles_come_worst_first_and_few():
    tiles = itertools.product(range(4), range(8))
    out, exact = wrong_at(*((slice(128 * i, 136 * i + 8), slice(64 * j, 72 * j + 8)) for i, j in tiles))
    lines = diagnose(out, exact, plan_of(SM80, "sm_80", (512, 512))).splitlines()
    assert len(lines) <= 12
    assert lines[3].startswith("tile row 3 of 4, column 7 of 8: 2048 of 8192 wrong")
    counts = [int(line.split(": ")[1].split()[0]) for line in lines[3:7]]
    assert counts == sorted(counts, reverse=True)
    assert lines[7] == "and 28 more of 32 tiles"
    assert lines[8].startswith("warp 0")
    assert len(diagnose(out, exact).splitlines()) == 2, "without a plan"


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1)])
def test_ping_pong_groups_follow_the_scheduler(cluster):
    config = GemmConfig(64, 64, 64, 4, 1, 1, *cluster, consumer_groups=2)
    plan = plan_of(config, "sm_90", (64 * 6, 64 * 10), ctas=8, group=3)
    where = Where(plan, (1, 64 * 6, 64 * 10))
    clusters = 8 // (cluster[0] * cluster[1])
    scheduler = TileScheduler(6 // cluster[0], 10 // cluster[1], 1, 3)
    for first in range(clusters):
        for order, index in enumerate(range(first, scheduler.count, clusters)):
            m, n, l = TileScheduler.decode.__wrapped__(scheduler, index)
            for rank_m, rank_n in itertools.product(*map(range, cluster)):
                tile = l, m * cluster[0] + rank_m, n * cluster[1] + rank_n
                assert where.consumer_group(tile) == order % 2


def test_transposed_and_folded_views():
    """A linear layer's output (..., M) is the kernel's (tokens, M), turned over."""
    block = BlockFacts(64, 64, "int32")
    config = GemmConfig(64, 128, 64, 4, 2, 2)
    out, exact = wrong_at((1, slice(None), slice(64, 128)), shape=(2, 128, 256))
    views = (0, None), (1, lambda t: t.view(-1, t.shape[-1]))
    plan = plan_of(config, "sm_80", (2, 128, 256), op="bsr_linear", block=block, transposed=True, views=views)
    assert kernel_view(exact, plan).shape == (1, 256, 256)
    text = diagnose(out, exact, plan)
    assert "first at (1, 0, 64)" in text
    assert "tile row 1 of 4, column 1 of 2 (block row 1): 8192 of 8192 wrong" in text


# The bound itself


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_passes_its_own_bound_and_small_faults_are_refused(dtype):
    for m, n, k in ((1, 1, 1), (1, 64, 300), (64, 48, 2048), (96, 80, 512)):
        a, b = normal(m, k), normal(k, n, k=k)
        exact, rounded = truth(a, b), truth(a, b, dtype=torch.float32).to(dtype)
        assert_as_good_as_torch(rounded, exact, rounded, k=k)
        assert_as_good_as_torch(exact.to(dtype), exact, rounded, k=k)
    lost_product, unwritten, infinite = (rounded.clone() for _ in range(3))
    lost_product[5, 7] -= a[5, 100].double() * b[100, 7].double() * 4
    unwritten[-1, -1], infinite[0, 0] = math.nan, math.inf
    lost_columns = truth(a[:, 16:], b[16:]).to(dtype)
    coarse = rounded.bfloat16().to(dtype) if dtype is not torch.bfloat16 else (rounded * 1.02).to(dtype)
    for bad in (lost_product, lost_columns, unwritten, infinite, coarse, torch.zeros_like(rounded), rounded.flip(0)):
        with pytest.raises(AssertionError, match="torch's"):
            assert_as_good_as_torch(bad, exact, rounded, k=k)


def test_the_message_says_where():
    a, b = normal(128, 64), normal(64, 128, k=64)
    exact, rounded = truth(a, b), truth(a, b, dtype=torch.float32).bfloat16()
    out = rounded.clone()
    out[70, 100] = math.nan
    with pytest.raises(AssertionError, match=r"largest error nan(.|\n)*first at \(70, 100\)(.|\n)*warp 3"):
        assert_as_good_as_torch(out, exact, rounded, k=64, plan=plan_of(SM80, "sm_80", (128, 128)))


def test_shape_and_dtype_are_compared():
    exact = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_good_as_torch(torch.ones(4, 5), exact, torch.ones(4, 4))
    with pytest.raises(AssertionError, match="dtype"):
        assert_as_good_as_torch(torch.ones(4, 4).half(), exact, torch.ones(4, 4))
