"""Each gate passes what is sound and finds the fault that is planted for it (planted.py)."""

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

BOTH = ("sm_80", "sm_90")
SMALL = [  # every op
    partial(dense, 200, 136, 72, dtype=torch.float16),
    partial(matmul, (64, 64), "empty_rows", 5, 4, 136, out_dtype=torch.float32),
    partial(linear, (32, 32), "power_law", 4, 3, 40, terms="bias+gelu"),
    partial(batched, True, 40),
    partial(grouped, False),
    partial(attend, "dense", 2, 8, 2, 200, 333, 64, causal=True),
    partial(attend, "packed", 5, 4, 2, 200, 333, 64, window=(70, 30)),
    partial(attend, "blocks", 2, 4, 2, 300, 430, 64, block=(64, 64)),
    partial(attend, "cache", 4, 8, 2, 3, 512, 64, causal=True, splits=3, page=16),
    partial(attend, "dense", 2, 4, 2, 333, 200, 192, 128, softcap=5.0, lse=False),
]
cases = pytest.mark.parametrize("case", on_paths(SMALL, BOTH), ids=lambda case: case.name)

# -- correctness, determinism, stability: a wrong result ------------------------------------------------------


@cases
def test_a_wrong_element_is_found(emulated, case):
    """Planted: 1e-2 in one element; and an element that is never written. A second run is right again."""
    call = case()
    assert call.complaint() == ""
    assert replace(call, op=planted.wrong(call.op)).complaint()
    assert "NaN" in replace(call, op=planted.wrong(call.op, float("nan"))).complaint()
    assert torch.equal(calls.bits(call.run()), calls.bits(case().run())), "operands follow from the name"
    call.renew(0)
    assert call.complaint() == "" and call.complaint(case().run()), "other operands have another truth"


def test_terms_are_those_of_the_op(emulated):
    for terms in ("bias+residual+gelu", "row bias+silu", "alpha+residual+beta", "squared_relu"):
        call = dense(136, 72, 64, terms=terms)
        assert call.complaint() == "" and replace(call, terms={}).complaint(), terms


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
    ("report", "verdict", "word"),
    [
        ({"passed": 7, "failed": 0, "status": 0}, PASSED, "7 tests of the CPU references passed"),
        ({"passed": 6, "failed": 1, "status": 1, "failures": [("t", "errs")]}, FAILED, "1 tests of the CPU"),
        ({"passed": 0, "failed": 0, "status": 5}, FAILED, "status 5"),
        ({"passed": 3, "failed": 0, "status": "timed out"}, FAILED, "status timed out"),
    ],
)
def test_correctness_reads_the_report_of_the_tests(monkeypatch, report, verdict, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    failures = [{"name": name, "message": message} for name, message in report.get("failures", [])]
    found = correctness.check(tests=lambda *args, **more: {**report, "failures": failures, "output": ["last line"]})
    assert found.verdict == verdict and word in found.summary
    assert found.details == (["t: errs"] if failures else [] if verdict == PASSED else found.details)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("quick", [True, False])
def test_correctness_asks_for_tests_that_there_are(gpu, quick):
    files = [name for name in correctness.arguments(gpu, quick) if name.endswith(".py")]
    texts = [(gpu_record.ROOT / name).read_text() for name in files]
    assert files and all("mark.gpu" in text or "device" in text for text in texts if gpu)


def test_a_failing_test_is_found(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_a(): assert False, 'errs'")
    given = [str(tmp_path), "--rootdir", str(tmp_path), "-m", "not gpu", "-p", "no:cacheprovider"]
    found = gpu_record.tests([*given, "-o", "markers=gpu: x"], 60, show=False)
    assert found["failed"] == 1 and "errs" in found["failures"][0]["message"] and found["output"]


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
    forms = {make.args[0] for make in makers if make.func is attend}
    assert forms == {"dense", "packed", "blocks", "cache"}
    assert {make.func for make in makers} == {dense, matmul, linear, batched, grouped, attend}


def test_varied_shapes(emulated, monkeypatch):
    names = [[case.name for case in on_paths(stability.products(24), ["sm_80"])] for _ in range(2)]
    assert names[0] == names[1] and len(set(names[0])) == 24
    makers = [*stability.products(24), *stability.attention(8)]
    found = [calls.Case(make, BOTH[i // 4 % 2]) for i, make in enumerate(makers)]
    assert stability.varied(found, "cpu") == []

    made = calls.Case.__call__

    def off(case, device):
        call = made(case, device)
        return replace(call, op=planted.wrong(call.op, 0.1)) if "linear" in case.name else call

    monkeypatch.setattr(calls.Case, "__call__", off)
    bad = stability.varied(found[:8], "cpu")
    assert len(bad) == 2 and all(" linear " in line for line in bad)


def test_stability_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = gate.run({"stability": stability.check})
    assert (found.verdict, found.summary) == (SKIPPED, "no CUDA GPU")


def test_memory_that_is_kept_is_told():
    assert stability.growth((100, 1 << 30), (100, (1 << 30) + 4096)) == []
    assert "512 bytes more" in stability.growth((100, 0), (612, 0))[0]
    assert "bytes less" in stability.growth((100, 0), (100, 64 << 20))[0]


@pytest.mark.gpu
def test_quick_stability():
    found = stability.check(quick=True)
    assert found.verdict == PASSED, found.details


# -- resources: a spill ---------------------------------------------------------------------------------------


def test_a_spill_is_found():
    facts = planted.spilling()
    assert "accumulators" in unsupported(facts), "no op would ask for it"
    found = resources.check([facts])
    assert found.verdict == FAILED and found.summary.startswith("1 of 1 kernels")
    assert any("local memory (STL, LDL)" in line for line in found.details)


def test_a_sound_kernel_passes():
    found = resources.check(DENSE.catalogue("sm_90", quick=True))
    assert found.verdict == PASSED and "1 kernels (sm_90a 1)" in found.summary


def test_no_disassembler(monkeypatch):
    def missing():
        raise resources.inspect.MissingDisassembler("nvdisasm was not found: pip install it")

    monkeypatch.setattr(resources.inspect, "find_nvdisasm", missing)
    (found,) = gate.run({"resources": lambda: resources.check([])})
    assert found.verdict == SKIPPED and "pip install" in found.summary


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
@pytest.mark.parametrize("kind", ["race", "honest"])
def test_a_race_is_found(kind):
    """By the determinism gate, in a process that compiles its kernels anew."""
    status, output = gpu_record.run([sys.executable, "-m", "tests.planted", "gate", kind], 250)
    assert status == (1 if kind == "race" else 0), output
    assert "the gate itself broke" not in output, output


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["race", "honest"])
def test_a_race_is_found_by_racecheck(kind):
    tool = gpu_record.sanitizer()
    if tool is None:
        pytest.skip("compute-sanitizer was not found; test_a_race_is_found looks at results and hashes")
    command = [tool, "--tool", "racecheck", "--error-exitcode", "86", sys.executable, "-m", "tests.planted"]
    status, output = gpu_record.run([*command, "launch", kind], 250)
    assert "launched" in output, output
    assert status == (86 if kind == "race" else 0), output


# -- speed: a slow-down ---------------------------------------------------------------------------------------


def row(name, measured, asked=None):
    """A case whose measurements are `measured`, one after another."""
    return SimpleNamespace(name=name, asked=asked, measured=iter(measured))


def next_of(case):
    return next(case.measured)


def noisy_ratio(slow: float, noise: float, generator: random.Random, rounds: int = 40) -> float:
    """Our rate over the peer's, of medians of timings that scatter."""
    times = [[us * generator.gauss(1, noise) for _ in range(rounds)] for us in (100.0 * slow, 95.0)]
    ours, peer = (sorted(us)[rounds // 2] for us in times)
    return peer / ours


@pytest.mark.parametrize(("slow", "ok"), [(1.0, True), (1.02, True), (1.1, False), (1.3, False)])
def test_ten_percent_is_found_through_noise(slow, ok):
    """Planted: a slow-down, in timings that scatter by 2 %. No seed of 200 hides 10 %, or fails an honest row."""
    floors = {"row": {"ratio": 0.95, "asked": None}}
    for seed in range(200):
        generator = random.Random(seed)
        ratios = [noisy_ratio(slow, 0.02, generator) for _ in range(3)]
        (found,) = speed.judge({"row": ratios}, floors, speed.MARGIN)
        assert found.ok is ok, (seed, str(found))


def test_a_row_that_fails_is_measured_again():
    floors = {"margin": 0.06, "rows": {"steady": {"ratio": 1.0}, "disturbed": {"ratio": 1.0}, "slow": {"ratio": 1.0}}}
    cases = [row("steady", [0.95]), row("disturbed", [0.7, 0.99, 1.0]), row("slow", [0.9, 0.91, 1.0])]
    rows, again = speed.compare(cases, floors, next_of)
    assert again == ["disturbed", "slow"]
    assert [(r.name, r.ratio, r.ok) for r in rows] == [
        ("steady", 0.95, True),
        ("disturbed", 0.99, True),
        ("slow", 0.91, False),
    ]


def test_the_speed_gate():
    floors = {"margin": 0.06, "rows": {"a": {"ratio": 1.0, "asked": 1.1}, "b": {"ratio": 0.9, "asked": None}}}
    found = speed.check([row("a", [0.99], 1.1), row("b", [0.91])], floors, measure=next_of)
    assert found.verdict == PASSED and "1 below what was asked" in found.summary
    assert found.details[0] == "a: 0.990, floor 1.000 (-1.0%); asked 1.10, missed"
    found = speed.check([row("a", [0.9] * 3), row("b", [0.91])], floors, measure=next_of)
    assert found.verdict == FAILED and "SLOWER" in found.details[0] and "SLOWER" not in found.details[1]
    found = speed.check([row("a", [1.0]), row("b", [0.9]), row("new", [2.0])], floors, measure=next_of)
    assert found.verdict == FAILED and speed.SET_FLOORS in found.details[0]
    found = speed.check([row("a", [1.0])], floors, measure=next_of)
    assert found.verdict == FAILED and found.details == ["b"]
    assert speed.check([row("a", [1.0])], floors, quick=True, measure=next_of).verdict == PASSED


def test_floors(tmp_path):
    path = tmp_path / "nvidia-h200" / "floors.json"
    with pytest.raises(Skip, match="--set-floors measures and writes"):
        speed.read_floors(path)
    cases = [row("a", [1.0, 1.3, 1.1], 1.05), row("b", [0.5, 0.6, 0.7])]
    made = speed.set_floors(cases, path, next_of, {"card": "NVIDIA H200", "sources": "abc"})
    assert made == speed.read_floors(path)
    assert made == {
        "margin": 0.06,
        "card": "NVIDIA H200",
        "sources": "abc",
        "rows": {"a": {"ratio": 1.1, "asked": 1.05}, "b": {"ratio": 0.6, "asked": None}},
    }


def test_rows_have_one_peer():
    """Of which none patches the compiler for this process, and which a row is held against."""
    found = speed.gate_cases()
    assert len({case.name for case in found}) == len(found) == 17
    for case in found:
        (peer,) = case.peers
        assert peer.name == case.against and not case.patches_dsl


def test_no_peer_is_no_ratio():
    broken = SimpleNamespace(name="quack", error="ImportError: no quack")
    missing = SimpleNamespace(
        name="a", ratio=None, against="quack", ours=SimpleNamespace(error="", name=""), peers=[broken]
    )
    with pytest.raises(RuntimeError, match="a has no ratio to quack; quack: ImportError"):
        speed.ratio_of(missing)


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
    ratio = sorted(speed.measure(case(honest)) for _ in range(3))[1]
    floors = {"margin": speed.MARGIN, "rows": {"dense": {"ratio": ratio, "asked": None}}}
    assert speed.check([case(honest)], floors).verdict == PASSED
    found = speed.check([case(planted.slower(honest))], floors)
    assert found.verdict == FAILED, found
