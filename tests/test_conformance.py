"""Every family of kernels: layouts, types, epilogues, patterns and sizes against fp64, in guarded memory, twice.

Without a GPU each call is planned as on one, with torch in the kernel's place (host_emulation.py),
which checks the host side.
"""

import contextlib
import math
import threading

import pytest
import torch

import cute_kernels
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.runtime.families import families
from cute_kernels.testing.reference import assert_as_good_as_torch, normal, poisoned
from sparse_collective import BsrMatrix, bsr_matmul

from . import host_emulation
from .conformance import FAMILIES, FEW, OPS, OPTIONS, all_pairs, axes_of, case_of, cases_of, large_cases
from .emulator.ops import on_emulator
from .gemm_calls import gemm_call
from .gemm_cases import make, run
from .sparse_collective.bsr_parts import BOTH_OPS, bsr, operands


def marked(family, *values, name=""):
    mark = "sm_89" if family.arch == "sm_89" else family.path
    return pytest.param(family, *values, marks=getattr(pytest.mark, mark), id=f"{family.name}{name}")


@pytest.fixture
def force(request, device, monkeypatch):
    """force(family, config=None): restrict the ops to these kernels, on the architecture that has them."""
    with contextlib.ExitStack() as stack:

        def restrict(family, config=None):
            if device == "cpu" and request.config.getoption("--emulator"):
                stack.enter_context(on_emulator(family.arch))
            elif device == "cpu":
                host_emulation.install(monkeypatch, family.arch)
            family.force(monkeypatch, config)

        yield restrict


def expect(family):
    """A check of plans: they are of this family."""

    def check(plan):
        assert plan.empty and family.sampled if plan.facts is None else family.owns(plan.facts)

    return check


BY_FAMILY = [
    marked(family, case, name=f" {op} {i}")
    for family in FAMILIES.values()
    for op in family.ops
    for i, case in enumerate(cases_of(family, op))
]


@pytest.mark.parametrize(("family", "case"), BY_FAMILY)
def test_products(device, force, family, case):
    force(family)
    run(case, device, 2, expect(family))


BY_CONFIGURATION = [
    marked(family, config, block, name=f" {config} {block}")
    for family in FAMILIES.values()
    for config, blocks in family.configs().items()
    for block in dict.fromkeys((blocks[0], blocks[-1]))
]


@pytest.mark.parametrize(("family", "config", "block"), BY_CONFIGURATION)
def test_every_configuration(device, force, family, config, block):
    """Each candidate, whatever the cost model picks. What it does not support is refused, and it serves some call."""
    force(family, config)
    served = 0
    for case in large_cases(family, block, device):
        try:
            run(case, device, 2, expect(family))
            served += 1
        except ValueError as error:
            assert "no kernel supports this call" in str(error)
    assert served


def test_every_family_is_here():
    """With each arithmetic that its features name, on both paths."""
    assert {kernels.family for kernels in FAMILIES.values()} == {*families(ProductFamily)}
    for path in ("sm_80", "sm_90"):
        for name in ("FP8", "to FP8", "TF32", "FP16 accumulation"):
            assert {f"dense {name} {path}", f"bsr {name} {path}"} <= {*FAMILIES}
        assert {f"skinny FP8 {path}", f"sparse24 FP8 {path}", f"bsr24 FP8 {path}", f"bsr24 {path}"} <= {*FAMILIES}


def test_all_pairs_are_met():
    axes = axes_of(FAMILIES["small blocks sm_90"], "bsr_linear")
    chosen = all_pairs(axes, lambda chosen: True)
    for x in axes:
        for y in axes:
            if x < y:
                met = {(str(c[x]), str(c[y])) for c in chosen}
                assert len(met) == len(axes[x]) * len(axes[y])
    assert len(chosen) < 150


# What must not show

SPARSE = pytest.mark.parametrize(
    "family", [marked(family) for family in FAMILIES.values() if "bsr_matmul" in family.ops and family.plain]
)
SCATTERED = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)


@BOTH_OPS
@SPARSE
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_absent_blocks_would_multiply_never_shows(device, force, family, junk, op):
    """With junk in one block column of b at a time the rows that have it are spoilt, and all others exact."""
    force(family)
    for block in family.blocks:
        W = bsr(SCATTERED, block, device, inside_nan=True)
        x = normal(8 if family.columns is FEW else 136, W.shape[1], device=device)
        for column in range(SCATTERED.shape[1]):

            def given(value):
                t = x.clone()
                t[:, column * block[1] : (column + 1) * block[1]] = value
                return (W, t.t().contiguous()) if op is bsr_matmul else (t, W)

            exact, by_torch = gemm_call(op, given(0.0), {}).truth()
            with cute_kernels.path(family.path):
                out = op(*given(junk), out=poisoned(*exact.shape, device=device))
            parts = ((t if op is bsr_matmul else t.t()).split(block[0]) for t in (out, exact, by_torch))
            for present, mine, right, theirs in zip(SCATTERED[:, column], *parts, strict=True):
                if present:
                    assert not mine.isfinite().any()
                else:
                    assert_as_good_as_torch(mine, right, theirs, k=W.shape[1])


@SPARSE
def test_a_spoilt_block_stays_in_its_row(device, force, family):
    force(family)
    for block in family.blocks:
        W, b = operands(bsr_matmul, bsr("all_blocks", block, device, grid=(3, 3)), 8)
        exact, by_torch = gemm_call(bsr_matmul, (W, b), {}).truth()
        W.values[4] = math.nan  # block (1, 1)
        with cute_kernels.path(family.path):
            out = bsr_matmul(W, b, out=poisoned(*exact.shape, device=device))
        rows = torch.arange(len(out), device=device) // block[0] == 1
        assert out[rows].isnan().all()
        assert_as_good_as_torch(out[~rows], exact[~rows], by_torch[~rows], k=W.shape[1])


def family_of(op: str, path: str):
    """The plain kernels of an op."""
    return FAMILIES[{"gemm": "dense", "sddmm": "sampled"}.get(op, "bsr") + f" {path}"]


def plain_call(op: str, path: str, device, **more):
    """A call that its family serves without being forced."""
    family = family_of(op, path)
    chosen = {axis: values[0] for axis, values in axes_of(family, op).items()}
    chosen |= {"epilogue": "column bias", "size": (200, 264, 136), "pattern": "power_law", "block": (64, 64)} | more
    return make(case_of(family, op, chosen | ({"columns": 6} if op == "bsr_grouped_linear" else {}), 0), device)


@pytest.mark.parametrize("op", ["gemm", "bsr_matmul"])
def test_nan_and_inf_stay_in_their_row_and_column(device, path, op):
    call = plain_call(op, path, device, epilogue="nothing", pattern="all_blocks")
    exact, by_torch = call.truth()
    a, b = call.args
    (a if op == "gemm" else a.values[0])[17, 3] = math.nan
    b[5, 100] = math.inf
    out = call()
    assert out[17].isnan().all() and not out[:, 100].isfinite().any()
    rows, cols = (torch.arange(n, device=device) != at for n, at in zip(out.shape, (17, 100), strict=True))
    assert_as_good_as_torch(*(t[rows][:, cols] for t in (out, exact, by_torch)), k=b.shape[0])


def test_an_item_s_nan_stays_in_it(device, path):
    for form in ("values", "patterns"):
        call = plain_call("bsr_matmul", path, device, batch=form)
        exact, by_torch = call.truth()
        call.args[1][1] = math.nan
        out = call()
        for l in (0, 2):
            assert_as_good_as_torch(out[l], exact[l], by_torch[l], k=call.args[1].shape[-2])


# Calls of every op on a GPU


def renew(call):
    """Other numbers in the same memory; returns what the call must give now."""
    for t in call.args:
        values = t.values if isinstance(t, BsrMatrix) else t
        if values.is_floating_point():
            values.copy_(normal(*values.shape, device="cuda", k=values.shape[-1]))
        else:
            values.copy_(values.roll(1))
    return call.op(*call.args, **call.terms)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
class TestCuda:
    @pytest.fixture
    def call(self, op, path):
        """A call whose kernel is compiled, and whose indices are checked."""
        call = plain_call(op, path, "cuda")
        call.judge(None, call())
        torch.cuda.synchronize()
        return call

    def test_a_graph(self, call):
        """Values, tokens and routing change between replays."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.op(*call.args, **call.given())
        for _ in range(3):
            expected = renew(call)
            call.out.fill_(math.nan)
            graph.replay()
            assert torch.equal(call.out, expected)

    def test_the_current_stream(self, call):
        """A kernel on any other stream would read the inputs before they are there."""
        expected, at = call().clone(), 1 if call.op is bsr_matmul else 0
        args = list(call.args)
        args[at] = torch.zeros_like(call.args[at])
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            args[at].copy_(call.args[at])
            out = call.op(*args, **call.terms)
        stream.synchronize()
        assert torch.equal(out, expected)

    def test_no_synchronisation(self, call):
        torch.cuda.set_sync_debug_mode("error")
        try:
            call.op(*call.args, **call.given())
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_threads(self, op, path):
        """Four threads, each with its own stream and call, the first calls compiling at the same time."""
        calls = [plain_call(op, path, "cuda", epilogue=name) for name in ("nothing", "relu", "row bias", "all")]
        failures = []

        def work(call):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                    for _ in range(20):
                        call.judge(None, call())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]

    def test_two_streams(self, op, path):
        calls = [plain_call(op, path, "cuda", epilogue=name) for name in ("nothing", "relu")]
        expected, outs = [call().clone() for call in calls], [[], []]
        streams = [torch.cuda.Stream() for _ in calls]
        torch.cuda.synchronize()
        for _ in range(20):
            for call, stream, results in zip(calls, streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(call().clone())
        torch.cuda.synchronize()
        for results, right in zip(outs, expected, strict=True):
            assert all(torch.equal(result, right) for result in results)


def test_known_plans_are_not_confused(device, path):
    """Calls that differ in one thing, each of them after all others: every epilogue, type and layout of an op."""
    for op in OPS:
        axes = axes_of(family_of(op, path), op)
        calls = [
            plain_call(op, path, device, **{axis: value})
            for axis in ("epilogue", "types", "transposed", "out", "batch")
            for value in axes[axis]
        ]
        for call in calls * 2:
            call.judge(None, call())
            assert call.plan().facts.path == path


@pytest.mark.sm_90
def test_known_plans_of_arithmetics_are_not_confused(device):
    """FP8, TF32 and FP16 accumulation: calls that differ in types, scales or another option, each after all others."""
    calls = []
    for family in (family for family in FAMILIES.values() if family.arithmetic.name and family.path == "sm_90"):
        for op in {"dense": ("gemm",), "bsr": ("bsr_linear", "bsr_matmul")}.get(family.family.name, ()):
            axes = axes_of(family, op)
            first = {axis: values[0] for axis, values in axes.items()} | {"epilogue": "column bias", "block": (64, 64)}
            first |= {"size": (200, 264, 256), "pattern": "power_law", "columns": 130}
            for axis in axes.keys() & {"types", *OPTIONS}:
                cases = [case_of(family, op, first | {axis: value}, 0) for value in axes[axis]]
                calls += [make(case, device) for case in cases if family.takes(case.signature)]
    for call in calls * 2:
        found = call()
        call.judge(call.plan(), *(found if isinstance(found, tuple) else (found,)))
    assert len(calls) > 40
