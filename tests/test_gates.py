"""Each gate passes what is sound and finds the fault that is planted for it (planted.py)."""

import os
import random
import sys
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch

from bench.gates import correctness, determinism, gate, resources, speed, stability
from bench.gates.gate import FAILED, PASSED, SKIPPED, Skip
from bench.rows import Candidate, Case, Problem
from cute_kernels import gemm
from cute_kernels.matmul.family import DENSE
from cute_kernels.runtime.families import unsupported
from cute_kernels.runtime.parallel import inspect_kernel

from . import calls, gpu_record, planted, sanitize_cases
from .calls import attend, batched, dense, grouped, linear, matmul, on_paths, within_a_thousandth

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

# -- correctness, determinism, stability: a wrong result ------------------------------------------------------


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


@pytest.mark.parametrize(
    ("passed", "failures", "status", "verdict", "word"),
    [
        (7, [], 0, PASSED, "7 tests of the CPU references passed"),
        (6, [{"name": "t", "message": "errs"}], 1, FAILED, "1 tests of the CPU"),
        (0, [], 5, FAILED, "status 5"),
        (3, [], "timed out", FAILED, "status timed out"),
    ],
)
def test_correctness_reads_the_report_of_the_tests(monkeypatch, passed, failures, status, verdict, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = {"passed": passed, "failed": len(failures), "failures": failures, "status": status, "output": ["last"]}
    found = correctness.check(tests=lambda *args, **more: report)
    assert found.verdict == verdict and word in found.summary
    lines = [] if verdict == PASSED else [f"pytest ended with status {status}", "last"]
    assert found.details == (["t: errs"] if failures else lines)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("quick", [True, False])
def test_correctness_asks_for_tests_that_there_are(gpu, quick):
    files = [name for name in correctness.arguments(gpu, quick) if name.endswith(".py")]
    texts = [(gpu_record.ROOT / name).read_text() for name in files]
    assert files and all("mark.gpu" in text or "device" in text for text in texts if gpu)


@pytest.mark.parametrize("every", [2, 5])
def test_rare_faults_are_counted(emulated, every):
    """In the output and in the lse, among calls that are steady."""
    steady, *attending = (case() for case in on_paths([SMALL[0], SMALL[5], SMALL[5]], ["sm_90"]))
    for where, call in enumerate(attending):
        runs = []

        @wraps(call.op)
        def rare(*args, where=where, runs=runs, op=call.op, **terms):
            found = op(*args, **terms)
            runs.append(found)
            if len(runs) % every == 0:
                found[where][0, 0, 0] += 1e-2
            return found

        assert determinism.repeats([steady, replace(call, op=rare)], 14) == [0, 14 // every]
    found = determinism.check([replace(attending[0], op=rare), steady], runs=14)
    assert found.verdict == FAILED and "of 14 results differ from the first" in found.details[-1]
    assert determinism.check([steady], runs=3).verdict == PASSED
    bad = determinism.check([replace(steady, op=planted.wrong(gemm))], runs=3)
    assert bad.verdict == FAILED and "errs" in bad.details[0] or "error" in bad.details[0]


def test_what_is_repeated_is_every_form():
    """The sanitizer's cases, too: each form of attention, split and whole, and each op."""
    makers = [case.make for case in determinism.cases()]
    makers += [make for make in sanitize_cases.CASES.values() if isinstance(make, partial)]
    assert {make.func for make in makers} == {dense, matmul, linear, batched, grouped, attend}
    for found in (makers, stability.CONCURRENT):
        forms = {make.args[0] for make in found if make.func is attend}
        assert forms == {"dense", "packed", "blocks", "cache"}


def test_memory_that_is_kept_is_told():
    assert stability.growth((100, 1 << 30), (100, (1 << 30) + 4096)) == []
    assert "512 bytes more" in stability.growth((100, 0), (612, 0))[0]
    assert "bytes less" in stability.growth((100, 0), (100, 64 << 20))[0]


@pytest.mark.gpu
def test_stability(monkeypatch):
    if "PYTEST_XDIST_WORKER" in os.environ:  # other processes take and give back memory of the device meanwhile
        held = stability.held
        monkeypatch.setattr(stability, "held", lambda: (held()[0], 0))
    found = stability.check()
    assert found.verdict == PASSED, found.details


# -- resources: a spill ---------------------------------------------------------------------------------------


def test_a_spill_is_found_and_a_sound_kernel_passes():
    facts = planted.spilling()
    assert "accumulators" in unsupported(facts), "no op would ask for it"
    found = resources.check([facts])
    assert found.verdict == FAILED and found.summary.startswith("1 of 1 kernels")
    assert any("local memory (STL, LDL)" in line for line in found.details)
    found = resources.check(DENSE.catalogue("sm_90", quick=True))
    assert found.verdict == PASSED and "1 kernels (sm_90a 1)" in found.summary


def test_what_cannot_be_asked_is_skipped(monkeypatch):
    def missing():
        raise resources.inspect.MissingDisassembler("nvdisasm was not found: pip install it")

    monkeypatch.setattr(resources.inspect, "find_nvdisasm", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = gate.run({"resources": lambda: resources.check([]), "stability": stability.check})
    assert [each.verdict for each in found] == [SKIPPED] * 2
    assert "pip install" in found[0].summary and found[1].summary == "no CUDA GPU"


# -- a race ---------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("tool", ["gate", "racecheck"])
@pytest.mark.parametrize("kind", ["race", "honest"])
def test_a_race_is_found(kind, tool):
    """By the determinism gate and by the sanitizer, in a process that compiles its kernels anew."""
    command, bad, words = [sys.executable, "-m", "tests.planted", "gate", kind], 1, ""
    if tool == "racecheck":
        if gpu_record.sanitizer() is None:
            pytest.skip("compute-sanitizer was not found; the gate looks at results and hashes")
        options = ["--tool", "racecheck", "--error-exitcode", "86"]
        command, bad, words = [gpu_record.sanitizer(), *options, *command[:3], "launch", kind], 86, "launched"
    status, output = gpu_record.run(command, 250)
    assert status == (bad if kind == "race" else 0) and words in output, output
    assert "the gate itself broke" not in output, output


# -- speed: a slow-down ---------------------------------------------------------------------------------------


def row(name, *measured, asked=None):
    """A case whose measurements are `measured`, one after another."""
    return SimpleNamespace(name=name, asked=asked, measured=iter(measured))


def next_of(case):
    return next(case.measured)


def floors_of(**ratios):
    return {"margin": speed.MARGIN, "rows": {name: {"ratio": ratio, "asked": None} for name, ratio in ratios.items()}}


def noisy_ratio(slow: float, noise: float, generator: random.Random, rounds: int = 40) -> float:
    """Our rate over the peer's, of medians of timings that scatter."""
    times = [[us * generator.gauss(1, noise) for _ in range(rounds)] for us in (100.0 * slow, 95.0)]
    ours, peer = (sorted(us)[rounds // 2] for us in times)
    return peer / ours


@pytest.mark.parametrize(("slow", "ok"), [(1.0, True), (1.02, True), (1.1, False), (1.3, False)])
def test_ten_percent_is_found_through_noise(slow, ok):
    """Planted: a slow-down, in timings that scatter by 2 %. No seed of 200 hides 10 %, or fails an honest row."""
    for seed in range(200):
        generator = random.Random(seed)
        found = speed.judge("row", [noisy_ratio(slow, 0.02, generator) for _ in range(3)], floors_of(row=0.95))
        assert found.ok is ok, (seed, str(found))


def test_a_row_that_fails_is_measured_again():
    cases = [row("steady", 0.95), row("disturbed", 0.7, 0.99, 1.0), row("slow", 0.9, 0.91, 1.0)]
    rows, again = speed.compare(cases, floors_of(steady=1.0, disturbed=1.0, slow=1.0), next_of)
    assert again == ["disturbed", "slow"]
    found = [(each.name, each.ratio, each.ok) for each in rows]
    assert found == [("steady", 0.95, True), ("disturbed", 0.99, True), ("slow", 0.91, False)]


def test_the_speed_gate():
    floors = floors_of(a=1.0, b=0.9)
    floors["rows"]["a"]["asked"] = 1.1
    check = partial(speed.check, floors=floors, measure=next_of)
    found = check([row("a", 0.99, asked=1.1), row("b", 0.91)])
    assert found.verdict == PASSED and "1 below what was asked" in found.summary
    assert found.details[0] == "a: 0.990, floor 1.000 (-1.0%); asked 1.10, missed"
    found = check([row("a", 0.9, 0.9, 0.9), row("b", 0.91)])
    assert found.verdict == FAILED and "SLOWER" in found.details[0] and "SLOWER" not in found.details[1]
    found = check([row("a", 1.0), row("b", 0.9), row("new", 2.0)])
    assert found.verdict == FAILED and speed.SET_FLOORS in found.details[0]
    found = check([row("a", 1.0)])
    assert found.verdict == FAILED and found.details == ["b"]
    assert check([row("a", 1.0)], quick=True).verdict == PASSED


def test_floors(tmp_path):
    path = tmp_path / "nvidia-h200" / "floors.json"
    with pytest.raises(Skip, match="--set-floors measures and writes"):
        speed.read_floors(path)
    cases, where = [row("a", 1.0, 1.3, 1.1, asked=1.05), row("b", 0.5, 0.6, 0.7)], {"card": "H200", "sources": "abc"}
    made = speed.set_floors(cases, path, next_of, where)
    assert made == speed.read_floors(path)
    assert made == {"margin": 0.06, **where, "rows": made["rows"]}
    assert made["rows"] == {"a": {"ratio": 1.1, "asked": 1.05}, "b": {"ratio": 0.6, "asked": None}}


def test_rows_have_one_peer():
    """Of which none patches the compiler for this process, and which a row is held against."""
    found = speed.gate_cases()
    assert len({case.name for case in found}) == len(found) == 17
    for case in found:
        (peer,) = case.peers
        assert peer.name == case.against and not case.patches_dsl
    broken, ours = (SimpleNamespace(name=name, error=text) for name, text in (("quack", "no quack"), ("", "")))
    with pytest.raises(RuntimeError, match="a has no ratio to quack; quack: no quack"):
        speed.ratio_of(SimpleNamespace(name="a", ratio=None, against="quack", ours=ours, peers=[broken]))


@pytest.mark.gpu
@pytest.mark.slow
def test_ten_percent_is_found_on_the_gpu():
    """Planted: an idle kernel after ours, of a tenth of its time; measured as the gate measures."""
    size = 4096
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outs = [torch.empty(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    problem = Problem("gemm", size, size, size)
    honest = lambda: gemm(a, b, out=outs[0])  # noqa: E731
    peer = Candidate("cuBLAS", problem.flops, lambda: lambda: torch.mm(a, b, out=outs[1]))

    def case(call):
        return Case("gates", "dense", problem, lambda: (call, None), [peer], "cuBLAS")

    honest()
    floors = floors_of(dense=sorted(speed.measure(case(honest)) for _ in range(3))[1])
    assert speed.check([case(honest)], floors).verdict == PASSED
    found = speed.check([case(planted.slower(honest))], floors)
    assert found.verdict == FAILED, found
