"""Rows of `python -m bench distributed` on the CPU, small: each runs, in two processes with gloo."""

import itertools
import json

import pytest
import torch

from bench import __main__ as command
from bench import cases_distributed, cases_distributed_experts, distributed, record

from ..ranks import Ranks

SMALL = {"TOKENS": 64, "DIM": 128, "HIDDEN": 512, "WINDOWS": 2}
DECODER = cases_distributed.Shape(64, 256, 2, 4, 32, 16, 0.25)


def use_small(timed):
    """Give the rows small sizes, and `timed` in place of the benchmark's."""
    for cases in (cases_distributed, cases_distributed_experts):
        for name, value in (SMALL | {"DECODER": DECODER, "timed": timed}).items():
            setattr(cases, name, value)


def rows_run(device):
    """Every call of every row runs once; times are not taken."""

    def once(calls, **_):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1.0)

    use_small(once)
    for cases in (cases_distributed, cases_distributed_experts):
        for row in cases.rows():
            entry = {"name": row.name, "ranks": 2, **row.run(device)}
            assert "ms 1" in distributed.line(entry)


def both_steps_compute_the_same(device):
    """The losses of three steps, of one rank's model and of the sharded one, on the same tokens in all ranks."""
    losses = {}

    def three(calls, **_):
        losses.update({name: torch.stack([call() for _ in range(3)]) for name, call in calls.items()})
        return dict.fromkeys(calls, 1.0)

    use_small(three)
    cases_distributed.fsdp_step(device)
    assert torch.equal(losses["alone"][0], losses["sharded"][0])  # bitwise, so in the same dtypes
    torch.testing.assert_close(losses["alone"], losses["sharded"], rtol=1e-4, atol=1e-4)
    assert losses["alone"][2] < losses["alone"][0]


def test_hot_calls_are_repeated(monkeypatch):
    """Each call for hot_ms at least, by its own time; without it none is."""
    asked = []

    def medians(calls, repeats, rounds, sleep):
        asked.append((dict(repeats), rounds))
        return {"long": 250.0, "short": 30.0}

    monkeypatch.setattr(distributed, "agree", lambda ready: True)
    monkeypatch.setattr(distributed, "medians", medians)
    calls = {"long": lambda: None, "short": lambda: None}
    distributed.timed(calls, 5, hot_ms=100)
    distributed.timed(calls, 5)
    none = {"long": 0, "short": 0}
    assert asked == [(none, 1), ({"long": 1, "short": 4}, 5), (none, 5)]


def test_rows():
    ranks = Ranks(2)
    try:
        ranks.run(f"{__name__}:rows_run")
        ranks.run(f"{__name__}:both_steps_compute_the_same")
    finally:
        ranks.close()


def test_without_gpus(capsys):
    assert command.main(["distributed", "--ranks", "1024"]) == 2
    assert "needs at least 1024 CUDA GPUs" in capsys.readouterr().out


def test_no_row_of_so_many_ranks(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert command.main(["distributed", "--ranks", "1", "--only", "FSDP2"]) == 2
    assert "no row of [1] ranks has 'FSDP2' in its name" in capsys.readouterr().out


def test_rows_of_a_run_that_is_cut_off_are_kept(monkeypatch, tmp_path):
    def spawn(worker, args, nprocs, daemon):
        world, _, names, _, keep = args
        keep([{"name": names[0], "ranks": world}])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200"})
    monkeypatch.setattr(
        distributed, "all_rows", lambda: [distributed.Row("TP", dict), distributed.Row("EP", dict, (4,))]
    )
    with pytest.raises(KeyboardInterrupt):
        command.main(["distributed", "--ranks", "4", "--out", str(tmp_path)])
    data = json.loads(record.file_of(tmp_path, "NVIDIA H200", "distributed").read_text())
    assert data["rows"] == [{"name": "TP", "ranks": 4}] and data["environment"]["gpus"] == 4


def test_add(monkeypatch, tmp_path):
    """Rows are added to those of the same commit, and replace those of the same name and number of ranks."""
    here = {"card": "NVIDIA H200", "commit": "a1"} | record.what_runs()
    monkeypatch.setattr(record, "environment", lambda: dict(here))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    value = itertools.count()
    monkeypatch.setattr(
        distributed, "measure", lambda world, only, keep: [{"name": only, "ranks": world, "ms": next(value)}]
    )

    def rows_after(*arguments):
        assert command.main(["distributed", *arguments, "--out", str(tmp_path)]) == 0
        data = json.loads(record.file_of(tmp_path, "NVIDIA H200", "distributed").read_text())
        return [(row["name"], row["ranks"], row["ms"]) for row in data["rows"]]

    rows_after("--ranks", "4", "--only", "EP", "--add")
    assert rows_after("--ranks", "2", "--only", "TP", "--add") == [("TP", 2, 1), ("EP", 4, 0)]
    assert rows_after("--ranks", "4", "--only", "EP", "--add") == [("TP", 2, 1), ("EP", 4, 2)]
    here["commit"] = "a2"
    with pytest.raises(SystemExit, match=r"has another commit; pass another --out, or omit --add"):
        rows_after("--ranks", "4", "--only", "TP", "--add")
    assert rows_after("--ranks", "4") == [("", 4, 3)]
