"""The tuner: a search with torch in the kernels' place and a fake timer, and what it rejects."""

import argparse
import json
import random
import subprocess
import sys

import pytest
import torch

from bench import record, tune
from cute_kernels.arch import ARCHS, PATHS
from cute_kernels.matmul.config import GemmConfig, GemmFacts
from cute_kernels.matmul.heuristics import choose
from cute_kernels.runtime.families import unsupported

from .. import host_emulation

SPEC, SMS = ARCHS["sm_90"], 132
TEXTS = (
    "gemm 64x128x256 NT bf16",
    "gemm 128x64x192 TN bf16>fp32 bias+gelu",
    "gemm 96x128x64 fp16 residual",
    "bsr_matmul 256x128x256 64x64 1/2",
    "bsr_linear 256x64x256 128x64 1/4 bf16 bias+relu",
)


class Wrong(host_emulation.Emulated):
    def __call__(self, *args):
        super().__call__(*args)
        args[2][0, 0] += 100


def emulated_kernels(wanted, jobs):
    """Stands for tune.compile_all: torch computes, one kernel in three does not compile, another one is wrong."""
    functions, reasons = {}, {}
    for n, facts in enumerate(dict.fromkeys(wanted)):
        if n % 3 == 2:
            reasons[facts] = "spills"
        else:
            functions[facts] = (Wrong if n % 3 == 1 and facts.block is None else host_emulation.Emulated)(facts)
    return functions, reasons


@pytest.fixture
def on_cpu(emulated, monkeypatch):
    """Calls are planned as on an sm_90 GPU, and a candidate takes 100 µs and one for each stage of its pipeline."""

    def interleaved(calls, rounds):
        return {each: [100.0 + each.facts.config.stages] * rounds for each in calls}

    monkeypatch.setattr(tune, "DEVICE", "cpu")
    monkeypatch.setattr(tune, "device_arch", lambda index: (SPEC, SMS))
    monkeypatch.setattr(tune, "function_for", host_emulation.Emulated)
    monkeypatch.setattr(tune, "compile_all", emulated_kernels)
    monkeypatch.setattr(tune.timing, "interleaved", interleaved)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def arguments(*words):
    parser = argparse.ArgumentParser()
    tune.add_command(parser.add_subparsers())
    return parser.parse_args(["tune", *words])


@pytest.mark.parametrize("text", TEXTS)
def test_only_right_results_are_timed_and_the_fastest_is_reported(on_cpu, text):
    row = tune.tune(tune.parse(text), count=24, seed=0, jobs=1)
    assert set(row["us"]).isdisjoint(row["rejected"]) and row["best"] in row["us"] and row["heuristic"] in row["us"]
    assert row["best_us"] == min(row["us"].values()) and row["ratio"] == round(row["best_us"] / row["heuristic_us"], 4)
    assert any(reason == "spills" for reason in row["rejected"].values())
    assert any("errs by" in reason for reason in row["rejected"].values()) == text.startswith("gemm")
    assert row == tune.tune(tune.parse(text), count=24, seed=0, jobs=1), "the same seed makes the same search"


def test_results_that_change_between_runs_or_are_not_written_are_rejected(on_cpu):
    out, exact = torch.empty(4, 4, dtype=torch.bfloat16), torch.ones(4, 4, dtype=torch.float64)
    runs = iter((1.0, 1.0, 1.0078125))
    assert tune.wrong(lambda: out.fill_(next(runs)), out, exact, 0.1) == "run 3 differs from the first"
    assert tune.wrong(lambda: out[:3].fill_(1.0), out, exact, 0.1) == "errs by inf, above 0.1"
    assert tune.wrong(lambda: out.fill_(1.0), out, exact, 0.1) == ""


def test_the_command_writes_a_report_and_names_what_failed(on_cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda: {"card": "Card"})
    args = arguments(TEXTS[0], "bsr_matmul 128x128x128 48x64 1/2", "--count", "12", "--out", str(tmp_path))
    assert args.run(args) == 1
    report = json.loads((tmp_path / "card" / "tune.json").read_text())
    assert [row["problem"] for row in report["rows"]] == [TEXTS[0]] and report["seed"] == 0
    shown = capsys.readouterr().out
    assert TEXTS[0] in shown and "FAILED bsr_matmul 128x128x128 48x64 1/2: ValueError" in shown


def test_bad_problems_and_no_gpu_are_errors(monkeypatch, capsys):
    for text in ("gemm 3x4", "conv 1x2x3", "gemm 8x8x8 128x128 1/2", "bsr_matmul 128x128x128", "gemm 8x8x8 NX"):
        with pytest.raises(SystemExit):
            arguments(text)
        assert "is not OP MxNxK" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = arguments(TEXTS[0])
    assert args.run(args) == 1 and "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("path", [pytest.param(path, marks=getattr(pytest.mark, path)) for path in PATHS])
@pytest.mark.parametrize("text", TEXTS)
def test_the_space_holds_the_librarys_own_candidates_and_legal_ones_besides(emulated, monkeypatch, text, path):
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    call, _, _ = tune.operands(tune.parse(text))
    plan = call.plan()
    problem = tune.problem_of(call, plan.facts)
    assert choose(problem, SPEC, SMS, None)[0] == plan.facts, "the problem is the op's own"
    found = tune.space(problem, path, SPEC, SMS, 40, random.Random(0))
    assert len(found) == len(set(found)) == 40 and tune.Candidate(*choose(problem, SPEC, SMS, path)[:3]) in found
    assert all(unsupported(each.facts) == "" and each.facts.path == path for each in found)


@pytest.mark.slow
@pytest.mark.sm_90
def test_kernels_that_spill_are_rejected():
    sound = GemmFacts("sm_90a", "sm_90", GemmConfig(64, 64, 64, 4, 1, 1, consumer_groups=2), majors=("k", "n", "n"))
    spills = GemmFacts("sm_90a", "sm_90", GemmConfig(256, 256, 64, 2, 2, 1, ring=1), majors=("k", "n", "n"))
    functions, reasons = tune.compile_all([sound, spills], 1)
    assert list(functions) == [sound] and "stack frame" in reasons[spills]


def test_a_hang_ends_the_process():
    code = "import time; from bench.tune import watched\nwith watched('this one', 0.2): time.sleep(30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 3 and "this one" in done.stderr
