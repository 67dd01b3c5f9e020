"""Each gate passes what is sound and finds the fault that is planted for it (planted.py)."""

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.gates import correctness, determinism, gate, resources, speed, stability
from bench.gates.gate import FAILED, PASSED, SKIPPED, Skip
from bench.gates.products import OPS, Product, within_a_thousandth
from bench.gates.products_attention import Attend
from bench.rows import Candidate, Case, Problem
from cute_kernels.matmul.catalogue import kernel_configurations
from cute_kernels.runtime.families import unsupported
from cute_kernels.runtime.parallel import inspect_kernel

from . import emulate, emulate_attention, gpu_record, planted

BOTH = ("sm_80", "sm_90")

# -- correctness, determinism, stability: a wrong result ------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_correct_products_pass_on_both_paths(emulated, quick):
    """Every product is one that its path takes; what it computes is torch's here."""
    found = correctness.check(quick=quick, device="cpu", families=BOTH)
    assert found.verdict == PASSED, found.details
    # A kernel costs a second to compile, and a quick run on a GPU has a minute for everything.
    built = emulate.Emulated.built | emulate_attention.EmulatedFlash.built
    assert len(built) <= (30 if quick else 240)
    ops = {product.op for product in correctness.products(quick)}
    blocks = {product.block for product in correctness.products(quick)} - {None}
    assert ops == set(OPS) and blocks >= set(correctness.BLOCKS)


def test_correctness_without_a_gpu_says_what_ran():
    found = correctness.check(quick=True, device="cpu", families=[None])
    assert found.verdict == PASSED and "CPU reference" in found.summary


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_element_is_found(device, name):
    """Planted: 1e-2 in one element, on the CPU and on a GPU."""
    families = BOTH if device == "cpu" else correctness.paths()
    ops = OPS | {name: planted.wrong(OPS[name])}
    found = correctness.check(quick=True, ops=ops, device=device, families=families)
    assert found.verdict == FAILED
    assert any(f" {name} " in line for line in found.details)
    others = [line for line in found.details if any(f" {other} " in line for other in set(OPS) - {name})]
    assert not others


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_element_among_large_ones_is_found(dtype):
    """One rounding of the largest sums to bf16 costs more than 1e-2; a small one that is off by that much is wrong."""
    case = Product("gemm", 200, 136, 72, "nn", dtype=dtype, out_dtype=dtype)
    call = case.call()
    exact = call.dense[0].double() @ call.dense[1].double()
    out = exact.to(dtype)
    assert call.complaint(out) == ""
    out.view(-1)[exact.abs().argmin()] += 1e-2
    assert call.complaint(out)


def forgets(*args, out, **terms):
    OPS["gemm"](*args, out=out, **terms)[0, 0] = float("nan")
    return out


def raises(*args, **terms):
    raise RuntimeError("misaligned address")


@pytest.mark.parametrize(("op", "why"), [(forgets, "NaN"), (raises, "misaligned address")])
def test_an_unwritten_element_and_an_exception_are_found(op, why):
    case = Product("gemm", 64, 64, 64)
    found = correctness.check([case], ops={"gemm": op}, device="cpu", families=[None])
    assert found.verdict == FAILED and why in "\n".join(found.details)


def test_the_thousandth():
    exact = torch.tensor([0.0, 3.999, 5.001]).double()
    within_a_thousandth(exact.half(), exact)  # 5.001 is rounded by 1e-3: not looked at
    within_a_thousandth(exact.float(), exact)
    for out in (exact.float() + torch.tensor([0, 0, 2e-3]), exact.half() + torch.tensor([2e-3, 0, 0]).half()):
        with pytest.raises(AssertionError, match="absolute error"):
            within_a_thousandth(out, exact)


def test_determinism(emulated):
    assert determinism.check(device="cpu", families=BOTH, runs=2).verdict == PASSED

    def unsteady(*args, out, **terms):
        OPS["gemm"](*args, out=out, **terms)
        out[3, 5] += random.random() < 0.5
        return out

    random.seed(0)
    cases = determinism.products("cpu")[:5]
    found = determinism.check(cases, device="cpu", families=["sm_90"], ops=OPS | {"gemm": unsteady})
    assert found.verdict == FAILED and "2 different results in 20 runs" in found.details[0]
    assert all("gemm" in line for line in found.details)


def test_rare_faults_are_counted(emulated):
    """Of many runs without a hash: in the output, and in the lse."""
    case = determinism.attention_products(1)[0]
    for where in ((0, 0, 0, 0), (0, 0, 0, -1)):
        runs = []

        def rare(*args, where=where, runs=runs, **terms):
            found = OPS["attention"](*args, **terms)
            runs.append(found)
            if len(runs) % 5 == 0:
                found[where] += 1e-6
            return found

        assert determinism.repeats(case.call(), 14, OPS | {"attention": rare}) == 2
    found = determinism.check([case], runs=1, many=14, ops=OPS | {"attention": rare}, device="cpu", families=["sm_90"])
    assert found.verdict == FAILED and "of 14 results differ from the first" in found.details[0]
    assert found.summary.startswith("1 of 1 products changed")


def test_a_hash_is_one_of_values_in_their_order():
    t = torch.arange(6.0).view(2, 3)
    assert determinism.digest(t) == determinism.digest(t.t().contiguous().t()) != determinism.digest(t + 0.5)


def test_varied_shapes(emulated):
    cases = [replace(case, path=BOTH[i % 2]) for i, case in enumerate(stability.products(24))]
    assert stability.products(24) == stability.products(24) and len(set(cases)) == 24
    attending = stability.attention_products(True, BOTH)
    assert attending == stability.attention_products(True, BOTH) and len(set(attending)) == 16
    cases += attending
    assert stability.varied(cases, device="cpu") == []
    bad = stability.varied(cases, OPS | {"bsr_linear": planted.wrong(OPS["bsr_linear"])}, "cpu")
    assert bad and all("bsr_linear" in line for line in bad)
    few = attending[:4]
    bad = stability.varied(few, OPS | {"attention": planted.wrong(OPS["attention"], 0.1)}, "cpu")
    assert len(bad) == 3 and all(" attention " in line for line in bad)


def test_what_runs_at_once_is_renewed(emulated):
    """Other numbers, and the truth of them."""
    for case in stability.concurrent(["sm_90"]):
        if case.op != "gemm":
            case = replace(case, rows=200, cols=192) if isinstance(case, Attend) else replace(case, m=256, k=256)
        call = case.call()
        before = call.run()
        call.renew(0)
        after = call.run()
        assert not torch.equal(before, after) and call.complaint(after) == "" and call.complaint(before)


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
    found = resources.check(kernel_configurations("sm_90", quick=True)[:1])
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
    """By the correctness or the determinism gate, in a process that compiles its kernels anew."""
    status, output = gpu_record.run([sys.executable, "-m", "tests.planted", "gates", kind], 250)
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
    honest = lambda: OPS["gemm"](a, b, out=outs[0])  # noqa: E731
    peer = Candidate("cuBLAS", problem.flops, lambda: lambda: torch.mm(a, b, out=outs[1]))

    def case(call):
        return Case("gates", "dense", problem, lambda: (call, None), [peer], "cuBLAS")

    honest()
    ratio = sorted(speed.measure(case(honest)) for _ in range(3))[1]
    floors = {"margin": speed.MARGIN, "rows": {"dense": {"ratio": ratio, "asked": None}}}
    assert speed.check([case(honest)], floors).verdict == PASSED
    found = speed.check([case(planted.slower(honest))], floors)
    assert found.verdict == FAILED, found
