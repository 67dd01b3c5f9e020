"""K split among the CTAs of a cluster: which K-tiles each takes, and the exchange of their sums."""

from dataclasses import replace

import pytest
import torch

from cute_kernels import explain, gemm
from cute_kernels.arch import ARCHS
from cute_kernels.k_tiles import DenseSource, split_k_tiles
from cute_kernels.matmul import candidates, cost
from cute_kernels.matmul.config import GemmConfig, GemmFacts
from cute_kernels.runtime.families import unsupported
from cute_kernels.testing.reference import assert_as_good_as_torch, exact_and_torch, normal, poisoned
from cute_kernels.tile.element import BITS_16
from sparse_collective.bsr_gemm.family import in_step
from sparse_collective.bsr_gemm.k_tiles import BsrSource

from ..conformance import FAMILIES
from ..emulator.ops import needs_compiler, on_emulator
from ..host_emulation import numbers

BF16 = torch.bfloat16
HIGH, LOW = candidates.split_sm90(64, ARCHS["sm_90"], BITS_16)


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("period", [1, 2, 7])
def test_every_k_tile_is_summed_once(split, period):
    """Ascending with the ranks, in whole periods, as evenly as those allow; of few of them some ranks get none."""
    for periods in range(3 * split + 2):
        whole = DenseSource(periods * period, 1).for_tile(5, 0, None)
        shares = [split_k_tiles(whole, rank, split, period) for rank in range(split)]
        assert [share.at(i) for share in shares for i in range(share.count)] == [
            whole.at(i) for i in range(whole.count)
        ]
        counts = [share.count for share in shares]
        assert all(count % period == 0 for count in counts) and max(counts) - min(counts) <= period
        assert all(share.out(3) == whole.out(3) for share in shares)


def test_blocks_whose_width_is_no_multiple_of_a_k_tile():
    """A share begins with a block where the block's K-tiles differ in width."""
    source = BsrSource([0, 0, 5], list(range(5)), 1, 2)  # 112 wide: K-tiles of 64 and 48
    for row, blocks in ((0, 0), (1, 5)):
        whole = source.for_tile(row, 0, source.bounds(row, 0, 0))
        whole = replace(whole, count=2 * blocks, begin=0, first=0, row=row, rest_m=0)
        shares = [split_k_tiles(whole, rank, 4, 2) for rank in range(4)]
        assert sum(share.count for share in shares) == 2 * blocks
        assert all(share.count == 0 or numbers(share.at(0).a)[1] == 0 for share in shares)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("split", [2, 4])
def test_the_exchange_in_any_order(monkeypatch, split):
    """Several tiles per cluster, whichever warp or copy is late."""
    config = next(c for c in HIGH if c.split == split)
    FAMILIES["dense split K sm_90"].force(monkeypatch, config)
    a, b, found = normal(130, 512), normal(512, 200, k=512), []
    for seed in range(6):
        with on_emulator("sm_90", sms=4, seed=seed):
            assert explain(gemm, a, b).facts.config == config
            found.append(gemm(a, b, out=poisoned(130, 200)))
    assert all(torch.equal(each, found[0]) for each in found)
    assert_as_good_as_torch(found[0], *exact_and_torch(a, b, BF16), k=512)


def test_what_is_refused():
    def reason(**changes):
        config = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 3, "warps_m": 2, "warps_n": 1} | changes
        return unsupported(GemmFacts("sm_90a", "sm_90", GemmConfig(**config)))

    assert reason(split=2) == reason(split=4, store_row=64) == ""
    assert "1, 2 or 4" in reason(split=3)
    assert "2 chunks of a warpgroup's store must divide evenly among 4" in reason(split=4)
    for changes in ({"cluster_m": 2}, {"cluster_n": 2}, {"warps_m": 1, "consumer_groups": 2}):
        assert "cooperative" in reason(split=2, **changes)
    assert "bytes of shared memory" in reason(split=2, stages=7)
    assert "sm_90" in unsupported(GemmFacts("sm_80", "sm_80", GemmConfig(64, 64, 32, 4, 2, 2, split=2)))
    narrow = GemmConfig(128, 64, 64, 4, 2, 1, store_row=32, split=4)
    assert "16 elements" in unsupported(GemmFacts("sm_90a", "sm_90", narrow, out_dtype="float32", aligns=(8, 8, 4)))


def test_clusters_that_run_at_once():
    """Clusters of four leave SMs idle, and the grid does not wait for them."""
    config = next(c for c in HIGH if c.split == 4)
    assert cost.resident_clusters(config, 132) == 30 and cost.resident_clusters(HIGH[0], 132) == 66
    assert cost.all_ctas(config, 132) == 120 and in_step(config, 64, 8, 132) % 4 == 0


@pytest.mark.gpu
@pytest.mark.sm_90
@pytest.mark.parametrize("config", [*HIGH, *LOW], ids=str)
def test_a_column_is_the_same_wherever_it_lies(monkeypatch, config):
    """All CTAs add in the order of K, so which of them adds makes no difference. One tile of exact numbers first."""
    FAMILIES["dense split K sm_90"].force(monkeypatch, config)
    a, b = torch.ones(64, 256, dtype=BF16, device="cuda"), torch.ones(256, 64, dtype=BF16, device="cuda")
    assert explain(gemm, a, b).facts.config == config
    assert (gemm(a, b) == 256).all()
    a, b = normal(200, 1000, device="cuda"), normal(1000, 328, device="cuda", k=1000)
    places = torch.randperm(328, device="cuda")
    assert torch.equal(gemm(a, b[:, places].contiguous()), gemm(a, b)[:, places])
