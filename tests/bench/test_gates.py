"""Gates and the checks behind them pass sound code and find planted faults (planted.py)."""

import argparse
import json
import random
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench import floors, gates, record
from bench.gates import FAILED, PASSED, SKIPPED, Gate
from bench.rows import Candidate, Case, Problem
from cute_kernels import gemm
from cute_kernels.runtime.families import unsupported
from cute_kernels.runtime.parallel import inspect_kernel

from .. import calls, gpu_record, planted
from ..calls import attend, batched, dense, grouped, linear, matmul, on_paths, within_a_thousandth

SMALL = [  # every op
    partial(dense, 200, 136, 72, dtype=torch.float16),
    partial(matmul, (64, 64), "empty_rows", 5, 4, 136, out_dtype=torch.float32),
    partial(linear, (32, 32), "power_law", 4, 3, 40, terms="bias+gelu"),
    partial(batched, True, 40),
    partial(grouped, False),
    partial(attend, "dense", 2, 8, 2, 200, 333, 64, causal=True),
    partial(attend, "packed", 5, 4, 2, 200, 333, 64, window_size=(70, 30)),
    partial(attend, "blocks", 2, 4, 2, 300, 430, 64, block=(64, 64)),
    partial(attend, "cache", 4, 8, 2, 3, 512, 64, causal=True, splits=3, page=16),
    partial(attend, "dense", 2, 4, 2, 333, 200, 192, 128, softcap=5.0, lse=False),
]


@pytest.mark.parametrize("name", ["correctness", "determinism", "stability"])
def test_the_files_of_a_gate_exist(name):
    files = gates.GATES[name].args[2]
    assert files and all((gpu_record.ROOT / "tests" / f"{file}.py").is_file() for file in files)


@pytest.mark.parametrize("case", on_paths(SMALL, ("sm_80", "sm_90")), ids=lambda case: case.name)
def test_a_wrong_element_is_found(emulated, case):
    """Planted: 1e-2 in one element; and an element that is never written. A second run is right again."""
    call = case()
    assert call.complaint() == ""
    assert replace(call, op=planted.wrong(call.op)).complaint()
    assert "NaN" in replace(call, op=planted.wrong(call.op, float("nan"))).complaint()
    assert torch.equal(calls.bits(call.run()), calls.bits(case().run())), "operands follow from the name"
    call.renew(0)
    assert call.complaint() == "" and call.complaint(case().run()), "other operands have another truth"


@pytest.mark.parametrize("terms", ["bias+residual+gelu", "row bias+silu", "alpha+residual+beta", "squared_relu"])
def test_terms_are_those_of_the_op(emulated, terms):
    call = dense(136, 72, 64, terms=terms)
    assert call.complaint() == "" and replace(call, terms={}).complaint()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_element_among_large_ones_is_found(dtype):
    """One rounding of the largest sums to bf16 costs more than 1e-2; a small one that is off by that much is wrong."""
    call = dense(200, 136, 72, dtype=dtype)
    exact = call.args[0].double() @ call.args[1].double()
    out = exact.to(dtype)
    assert call.complaint([out]) == ""
    out.view(-1)[exact.abs().argmin()] += 1e-2
    assert call.complaint([out])


def test_the_thousandth():
    exact = torch.tensor([0.0, 3.999, 5.001]).double()
    within_a_thousandth(exact.half(), exact)  # 5.001 is rounded by 1e-3: not looked at
    within_a_thousandth(exact.float(), exact)
    for out in (exact.float() + torch.tensor([0, 0, 2e-3]), exact.half() + torch.tensor([2e-3, 0, 0]).half()):
        with pytest.raises(AssertionError, match="absolute error"):
            within_a_thousandth(out, exact)


# -- machine code -----------------------------------------------------------------------------------------------


def test_a_spill_is_found():
    facts = planted.spilling()
    assert "accumulators" in unsupported(facts), "no op would ask for it"
    assert any("local memory (STL, LDL)" in problem for problem in inspect_kernel(facts).problems)


def test_the_planted_race_is_one():
    """The planted kernel has fewer barriers and fewer waits for cp.async; all else is there."""
    facts = planted.raced_facts()
    honest = inspect_kernel(facts).resources
    with planted.race():
        raced = inspect_kernel(facts).resources
    assert raced.bar < honest.bar
    assert raced.opcodes["DEPBAR"] < honest.opcodes["DEPBAR"]
    assert (raced.ldgsts, raced.hmma, raced.ldsm) == (honest.ldgsts, honest.hmma, honest.ldsm)
    assert inspect_kernel(facts).resources == honest, "the plant is gone"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["repeat", "racecheck"])
@pytest.mark.parametrize("kind", ["race", "honest"])
def test_a_race_is_found(kind, tool):
    """By repeated runs and by the sanitizer, in a process that compiles its kernels anew."""
    command, bad, words = [sys.executable, "-m", "tests.planted", "repeat", kind], 1, ""
    if tool == "racecheck":
        if gpu_record.sanitizer() is None:
            pytest.skip("compute-sanitizer was not found")
        options = ["--tool", "racecheck", "--error-exitcode", "86"]
        command, bad, words = [gpu_record.sanitizer(), *options, *command[:3], "launch", kind], 86, "launched"
    status, output = gpu_record.run(command, 250)
    assert status == (bad if kind == "race" else 0) and words in output, output
    assert "Traceback" not in output, output


# -- speed ------------------------------------------------------------------------------------------------------


def row(name, *measured):
    """A case whose measurements are `measured`, one after another."""
    return SimpleNamespace(name=name, measured=iter(measured))


def next_of(case):
    return next(case.measured)


def floors_of(**ratios):
    return {"margin": floors.MARGIN, "rows": {name: {"ratio": ratio} for name, ratio in ratios.items()}}


def noisy_ratio(slow: float, noise: float, generator: random.Random, rounds: int = 40) -> float:
    """Our rate over the peer's, from medians of scattered times."""
    times = [[us * generator.gauss(1, noise) for _ in range(rounds)] for us in (100.0 * slow, 95.0)]
    ours, peer = (sorted(us)[rounds // 2] for us in times)
    return peer / ours


@pytest.mark.parametrize(("slow", "ok"), [(1.0, True), (1.02, True), (1.1, False), (1.3, False)])
def test_ten_percent_is_found_through_noise(slow, ok):
    """Times scatter by 2 %. No seed of 200 hides 10 %, or fails an honest row."""
    for seed in range(200):
        generator = random.Random(seed)
        ratios = [noisy_ratio(slow, 0.02, generator) for _ in range(3)]
        assert floors.judge("row", ratios, floors_of(row=0.95))[0] is ok, seed


def test_a_row_that_fails_is_measured_again():
    """A row without a floor fails."""
    cases = [
        row("steady", 0.95),
        row("disturbed", 0.7, 0.99, 1.0),
        row("slow", 0.9, 0.91, 1.0),
        row("new", 2.0, 2.0, 2.0),
    ]
    good, bad = floors.compare(cases, floors_of(steady=1.0, disturbed=1.0, slow=1.0), next_of)
    assert [line.split(":")[0] for line in good] == ["steady", "disturbed"]
    assert [line.split()[0] for line in bad] == ["slow:", "new:"]


def test_floors_are_medians(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200", "sources": "abc"})
    path = floors.set_floors(tmp_path, [row("a", 1.0, 1.3, 1.1), row("b", 0.5, 0.6, 0.7)], next_of)
    assert path == tmp_path / "nvidia-h200" / "floors.json"
    assert json.loads(path.read_text())["rows"] == {"a": {"ratio": 1.1}, "b": {"ratio": 0.6}}


def test_rows_with_floors():
    """Each has one peer, which does not patch the compiler, and a floor on every card that has floors."""
    cases = floors.gate_cases()
    for case in cases:
        (peer,) = case.peers
        assert peer.name == case.against and not case.patches_dsl
    for path in record.RESULTS.glob("*/floors.json"):
        assert json.loads(path.read_text())["rows"].keys() == {case.name for case in cases}


@pytest.mark.gpu
@pytest.mark.slow
def test_ten_percent_is_found_on_the_gpu():
    """Planted: an idle kernel after ours, for a tenth of its time."""
    size = 4096
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outs = [torch.empty(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    problem = Problem("gemm", size, size, size)
    honest = lambda: gemm(a, b, out=outs[0])  # noqa: E731
    peer = Candidate("cuBLAS", problem.flops, lambda: lambda: torch.mm(a, b, out=outs[1]))

    def case(call):
        return Case("gates", "dense", problem, lambda: (call, None), [peer], "cuBLAS")

    honest()
    known = floors_of(dense=sorted(floors.measure(case(honest)) for _ in range(3))[1])
    assert not floors.compare([case(honest)], known)[1]
    assert floors.compare([case(planted.slower(honest))], known)[1]


# -- counters ---------------------------------------------------------------------------------------------------

NCU = f"""==PROF== Profiling "kernel_cutlass_kernel_GemmSm90" - 0: 0%....50%....100% - 4 passes
"ID","Process ID","Kernel Name","Grid Size","{floors.TENSOR}"
"","","","","%"
"0","4242","kernel_cutlass_kernel_GemmSm90","(132, 1, 1)","ACTIVE"
"""


def test_ncu_is_parsed():
    assert floors.parse(NCU.replace("ACTIVE", "81.25")) == 81.25
    for text in ("==WARNING== No kernels", NCU.rpartition('"0"')[0], NCU.replace(floors.TENSOR, "sm__else")):
        with pytest.raises(ValueError, match="ncu printed no"):
            floors.parse(text)
    lines, low = floors.utilization(lambda name: NCU.replace("ACTIVE", {"dense": "75.0", "bsr": "64.9"}[name]))
    assert len(lines) == 2 and low == lines[1:]


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1", floors.Skip, "ERR_NVGPUCTRPERM"),
        ("echo 'no such option' >&2; exit 1", RuntimeError, "ncu ended with 1: no such option"),
        (None, floors.Skip, "neither on PATH nor"),
    ],
)
def test_ncu_that_does_not_run(tmp_path, monkeypatch, script, error, words):
    if script:
        (tmp_path / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(floors.glob, "glob", lambda pattern: [])
    with pytest.raises(error, match=words):
        floors.profile("dense")


# -- the command ------------------------------------------------------------------------------------------------


def breaks():
    raise ValueError("a line\nand another")


def test_a_gate_that_raises_has_failed(monkeypatch):
    counts = []
    checks = {"speed": lambda: Gate("speed", PASSED, "fine"), "counters": breaks}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    good, broken = gates.run_gates(checks, lambda verdicts: counts.append(len(verdicts)))
    assert (good.verdict, broken.verdict, counts) == (PASSED, FAILED, [1, 2])
    assert "ValueError: a line and another" in broken.summary and gates.exit_status([good, broken]) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    skipped, _ = gates.run_gates(checks)
    assert skipped.verdict == SKIPPED and gates.exit_status([skipped]) == 0


@pytest.mark.parametrize(
    ("passed", "failures", "status", "verdict", "details"),
    [
        (7, [], 0, PASSED, []),
        (6, [{"name": "t", "message": "errs"}], 1, FAILED, ["t: errs"]),
        (0, [], 5, FAILED, ["last"]),
        (3, [], "timed out", FAILED, ["last"]),
    ],
)
def test_reports_of_tests_are_judged(monkeypatch, passed, failures, status, verdict, details):
    report = {"passed": passed, "failed": len(failures), "failures": failures, "status": status, "output": ["last"]}
    monkeypatch.setattr(gpu_record, "tests", lambda *args, **options: report)
    gate = gates.run_tests("stability", "stability", ["stability"], 0)
    assert (gate.verdict, gate.details) == (verdict, details)


def test_gates_in_several_calls_make_one_record(tmp_path, monkeypatch):
    where = {"card": "NVIDIA H200", "sources": "abc", "commit": "123"}
    monkeypatch.setattr(record, "environment", lambda: where)
    monkeypatch.setattr(record, "what_runs", lambda: {"sources": where["sources"]})

    def verdicts(gate):
        data = json.loads(gates.write([gate], tmp_path).read_text())
        return data["ok"], [(each["name"], each["verdict"]) for each in data["gates"]]

    assert verdicts(Gate("speed", FAILED, "slow")) == (False, [("speed", FAILED)])
    assert verdicts(Gate("resources", PASSED, "fine")) == (False, [("resources", PASSED), ("speed", FAILED)])
    assert verdicts(Gate("speed", PASSED, "fast")) == (True, [("resources", PASSED), ("speed", PASSED)])
    data = json.loads((tmp_path / "nvidia-h200" / "gates.json").read_text())
    assert data["environment"] == where and "correctness not run" in data["conclusion"]
    where["sources"] = "abd"
    assert verdicts(Gate("speed", PASSED, "fast")) == (True, [("speed", PASSED)]), "other sources"


def test_the_command(monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    gates.add_command(parser.add_subparsers())

    def run(*arguments) -> int:
        args = parser.parse_args(["gates", *arguments])
        return args.run(args)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--set-floors") == 2 and run("--only", "sped") == 2
    assert run("--only", "speed,counters,sanitizer") == 0
    assert "Nothing failed, but not everything ran" in capsys.readouterr().out
