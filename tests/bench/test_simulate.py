"""Predictions of context-parallel attention on more GPUs."""

import json

import pytest
import torch

from attention.distributed.plan import plans
from attention.masks.block_mask import BlockMask
from bench import cases_distributed_attention as cases
from bench import simulate

PROBLEMS = {problem.name: problem for problem in cases.PROBLEMS}
NAMES = [*PROBLEMS]
CAUSAL, PACKED, RANDOM, WINDOW = NAMES


def measured(name, gather_gbs=1e12, reduce_gbs=1e12, length=131072):
    return simulate.Measured(name, length, [1.0, 2.0], [1.0, 1.0], gather_gbs, reduce_gbs)


@pytest.mark.parametrize("name", NAMES)
def test_time_that_nothing_moves_in_is_shared_out(name):
    """Without cost of moving, efficiency is the balance of the blocks, which a deal finds within some percent."""
    entry = simulate.predicted(measured(name), 131072, 4)
    assert 0.85 < entry["forward"] <= 1 and abs(entry["forward"] - entry["backward"]) < 1e-3
    slow = simulate.predicted(measured(name, gather_gbs=1e-3), 131072, 4)
    assert slow["forward"] < entry["forward"]


@pytest.mark.parametrize("size, length", [(4, 131072), (3, 65536), (16, 65536), (64, 131072)])
@pytest.mark.parametrize("name", [CAUSAL, PACKED, WINDOW])
def test_shares_are_those_of_plans(name, size, length):
    """Ranges give the deal, blocks and tiles of plan_context_parallel, whose tables have a row for each tile."""
    shares = simulate.shares_of(simulate.ranges_of(name, length, length), size)
    ranks = [*range(size)] if size <= 4 else [0, 1, 7, 8, size // 2, size - 1]
    for plan in plans(PROBLEMS[name].mask(length, torch.device("cpu")), size, ranks=ranks):
        assert plan.deal == shares.deal
        blocks = plan.mask.kv_num_blocks.sum() + plan.mask.full_kv_num_blocks.sum()
        assert int(blocks) == int(shares.blocks[plan.rank])
        host = [n for rank, n in enumerate(plan.receive_counts) if rank // 8 == plan.rank // 8]
        assert (sum(host), sum(plan.receive_counts)) == (
            int(shares.near[plan.rank]), int(shares.near[plan.rank] + shares.far[plan.rank]),
        )  # fmt: skip


@pytest.mark.parametrize("size", [4, 16])
def test_shares_of_random_blocks(size):
    """All heads together need all tiles; each rank computes about 12.5 % of the blocks of a head."""
    length = 16384
    shares = simulate.shares_of(simulate.ranges_of(RANDOM, length), size)
    listed = torch.rand(64, 128, 128, generator=torch.Generator().manual_seed(0)) < 0.125
    for plan in plans(BlockMask.from_blocks(listed), size, ranks=[0, size - 1]):
        assert plan.deal == shares.deal == "contiguous"
        blocks = int(plan.mask.kv_num_blocks.sum() + plan.mask.full_kv_num_blocks.sum()) / 64
        assert blocks == pytest.approx(float(shares.blocks[plan.rank]), rel=0.02)
        assert sum(plan.receive_counts) == int(shares.near[plan.rank] + shares.far[plan.rank])


def test_needs_of_documents_and_windows_stay():
    """Each rank receives as much with 64 and 512 ranks as with few."""
    sizes = 4, 8, 64, 512
    packed, window = (
        [simulate.predicted(measured(name, 145, 139), simulate.TOKENS * size, size) for size in sizes]
        for name in (PACKED, WINDOW)
    )
    assert {entry["deal"] for entry in packed} == {"balanced"} and {entry["moved_mb"] for entry in packed} == {61.3}
    assert max(entry["moved_mb"] for entry in window) <= 22.1


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_passes_in_stages(stages):
    """Transfers beside longer kernels cost nothing: one stage's part is left, at each end."""
    kernel, slow = torch.tensor([80.0]), 1e3
    assert simulate.forward_ms(kernel, torch.tensor([8.0]), stages) == 80 + 8 / stages
    assert simulate.backward_ms(kernel, torch.tensor([8.0]), torch.tensor([16.0]), stages) == 80 + 24 / stages
    assert simulate.forward_ms(kernel, slow * kernel, stages) == slow * 80 + 80 / stages
    moving = slow * kernel, 2 * slow * kernel
    assert simulate.backward_ms(kernel, *moving, stages) == 3 * slow * 80 + (80 if stages == 1 else 0)


def test_documents_in_random_order_cross_hosts():
    """The same documents and blocks; the measured order has none that begins on one host and ends on another."""
    names, length = (PACKED, PACKED + simulate.SHUFFLED), 64 * simulate.TOKENS
    repeated, shuffled = (simulate.ranges_of(name, length) for name in names)
    assert float(repeated.work().sum()) == float(shuffled.work().sum())
    assert not simulate.shares_of(repeated, 64).far.any() and simulate.shares_of(shuffled, 64).far.any()


def test_documents_of_a_measurement_of_another_length():
    """The benchmark's documents scale with its sequence; a longer predicted sequence has more of them."""
    mask = PROBLEMS[PACKED].mask(65536, torch.device("cpu"))
    count = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert [int(simulate.ranges_of(PACKED, n * 65536, 65536).work().sum()) for n in (1, 2, 3)] == [
        count, 2 * count, 3 * count,
    ]  # fmt: skip


def test_a_file_of_rows(tmp_path, capsys):
    row = {
        "name": "attention, causal, 64k tokens, sharded", "ranks": 4, "one_gpu_ms": [100.0, 300.0], "moved_mb": 200.0,
        "forward": 0.95, "backward": 0.96, "gather_ms": 1.0, "reduce_ms": 2.0,
    }  # fmt: skip
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": [row, {"name": "TP", "ranks": 4}]}))
    without = simulate.simulate(tmp_path / "distributed.json", [])[0]
    shards = {"name": "attention, causal, 64k tokens, 4 shards on one GPU", "ranks": 1, "over_whole": [1.1, 0.9]}
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": [shards, row | {"ranks": 2}, row]}))
    two, first, second = simulate.simulate(tmp_path / "distributed.json", [64])
    assert two["ranks"] == 2 and two["moved_mb"] == pytest.approx(134.2, abs=0.1)
    assert first["measured"] == [0.95, 0.96] and first["moved_mb"] == pytest.approx(201.3, abs=0.1)
    assert first["forward"] < without["forward"] - 0.08 and first["backward"] > without["backward"] + 0.08
    assert second["ranks"] == 64 and second["length"] == 64 * simulate.TOKENS and second["deal"] == "head_tail"
    assert "causal" in capsys.readouterr().out
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": [{"name": "TP", "ranks": 4}]}))
    assert simulate.simulate(tmp_path / "distributed.json", [64]) == []
    assert "no rows of context-parallel attention" in capsys.readouterr().out
