"""Predictions of context-parallel attention on more GPUs."""

import json

import pytest

from bench import simulate


@pytest.mark.parametrize("name", ["causal", "packed causal, 16 documents", "12.5 % of 128x128 per head", "window 4096"])
def test_time_that_nothing_moves_in_is_shared_out(name):
    """Without cost of moving, efficiency is the balance of the blocks, which a deal finds within some percent."""
    entry = simulate.predicted(name, 131072, 4, [1.0, 2.0], [1.0, 1.0], 1e12, 1e12)
    assert 0.85 < entry["forward"] <= 1 and abs(entry["forward"] - entry["backward"]) < 1e-3
    slow = simulate.predicted(name, 131072, 4, [1.0, 2.0], [1.0, 1.0], 1e-3, 1e12)
    assert slow["forward"] < entry["forward"]


def test_a_file_of_rows(tmp_path, capsys):
    row = {
        "name": "attention, causal, 64k tokens, sharded", "ranks": 4, "one_gpu_ms": [100.0, 300.0], "moved_mb": 200.0,
        "forward": 0.95, "backward": 0.96, "gather_ms": 1.0, "reduce_ms": 2.0,
    }  # fmt: skip
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": [row, {"name": "TP", "ranks": 4}]}))
    without = simulate.simulate(tmp_path / "distributed.json", [])[0]
    shards = {"name": "attention, causal, 64k tokens, 4 shards on one GPU", "ranks": 1, "over_whole": [1.1, 0.9]}
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": [shards, row]}))
    first, second = simulate.simulate(tmp_path / "distributed.json", [64])
    assert first["measured"] == [0.95, 0.96] and first["moved_mb"] == pytest.approx(201.3, abs=0.1)
    assert first["forward"] < without["forward"] - 0.08 and first["backward"] > without["backward"] + 0.08
    assert second["ranks"] == 64 and second["length"] == 64 * simulate.TOKENS and second["deal"] == "head_tail"
    assert "causal" in capsys.readouterr().out
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": [{"name": "TP", "ranks": 4}]}))
    assert simulate.simulate(tmp_path / "distributed.json", [64]) == []
    assert "no rows of context-parallel attention" in capsys.readouterr().out
