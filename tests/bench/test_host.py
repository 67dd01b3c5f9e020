"""`python -m bench host` on a CPU: how many Python calls each row makes, and the command itself.

CALLS holds the number of Python calls per row, with the torch version of constraints.txt and Python 3.11: ours for
eager rows, ours minus torch's in the same run for compiled rows, since torch's own part differs between its versions. A
row may make 5 % more than that, at least two calls.

`python -m tests.bench.test_host` prints the table as it is now, to be copied here after a change that saves calls, or
that adds some on purpose: the commit then says what for, since each call costs 30 to 100 ns.
"""

import contextlib
import json
import math
import shutil
import sys
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile

from bench import __main__ as command
from bench import cases_host, host, peers, record
from bench.cases_host import FA4, LIMITS, OURS, TORCH, HostCase
from cute_kernels.runtime import call_plan

from ..emulator import emulate

CALLS = {
    "gemm, eager": 24,
    "bsr_linear, eager": 28,
    "bsr_matmul, eager": 28,
    "BsrLinear, eager": 35,
    "attention, causal, eager": 30,
    "SwiGLU, eager": 80,
    "block_sparse_attention of FlexAttention's mask, eager": 80,
    "gemm, eager backward": 127,
    "BsrLinear, eager backward": 177,
    "BsrLinear, GELU, eager backward": 203,
    "SwiGLU, eager backward": 324,
    "attention, causal, eager backward": 158,
    "block_sparse_attention of FlexAttention's mask, eager backward": 296,
    "gemm, compiled": 15,
    "bsr_linear, compiled": 27,
    "bsr_matmul, compiled": 28,
    "BsrLinear, compiled": 31,
    "attention, causal, compiled": 21,
    "SwiGLU, compiled": 53,
    "SwiGLU, reduce-overhead": 50,
    "gemm, compiled backward": 47,
    "BsrLinear, compiled backward": 122,
    "BsrLinear, GELU, compiled backward": 149,
    "SwiGLU, compiled backward": 229,
    "attention, causal, compiled backward": 65,
}
EAGER = [title for title in CALLS if "eager" in title]
COMPILED = [title for title in CALLS if title not in EAGER]


def most(title: str) -> int:
    """The limit of a row's Python calls."""
    return CALLS[title] + max(2, math.ceil(0.05 * CALLS[title]))


@pytest.fixture(scope="module")
def rows() -> dict[str, HostCase]:
    """title -> row"""
    return {case.title: case for case in cases_host.cases("cpu")}


def test_every_row_has_a_limit(rows):
    assert set(rows) == set(CALLS)
    assert all(case.limit == LIMITS[case.form] for case in rows.values())


# -- Python calls --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fresh_inductor():
    """Inductor without its cache on disk, which may hold code that calls the ops as they were.

    Its own C++ kernels do nothing, and no instruction set is probed: compiling C++ would take most of the time.
    """
    empty = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda self, *args, **options: lambda *tensors: None)
    torch.compiler.reset()
    with empty, mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: []):
        with inductor.patch(force_disable_caches=True):
            yield
    torch.compiler.reset()


def python_calls(case: HostCase) -> float:
    """The number that CALLS holds."""
    eager = case.title in EAGER
    with host.launches_replaced(), contextlib.nullcontext() if eager else fresh_inductor():
        calls = host.counted(case)["calls"]
    return calls[OURS] - (0 if eager else calls[TORCH])


@pytest.mark.parametrize("title", EAGER)
def test_python_calls_of_eager_rows(rows, title):
    calls = python_calls(rows[title])
    assert calls == int(calls), "the number differs from call to call"
    assert calls <= most(title), f"{title}: {calls:g} Python calls, were {CALLS[title]}; see the head of this file"


@pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="inductor needs a C++ compiler (CXX)")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("title", COMPILED)
def test_python_calls_of_compiled_rows(rows, title):
    more = python_calls(rows[title])
    assert more <= most(title), (
        f"{title}: {more:g} more Python calls than torch, were {CALLS[title]}; see the head of this file"
    )


def test_python_calls_are_counted_exactly():
    def inner() -> int:
        return abs(-1)  # one C function

    profiler = sys.getprofile()
    assert host.python_calls(inner) == 2 * host.COUNTED
    assert sys.getprofile() is profiler


# -- the context without launches ----------------------------------------------------------------------------


def patched() -> dict[tuple[str, str], object]:
    """(module, name) -> what `launches_replaced` replaces there."""
    names = "function_for", "device_arch", "plans_kernel", "has_kernel", "_PLANS"
    packages = [(name, m) for name, m in list(sys.modules.items()) if name.partition(".")[0] in host.PACKAGES]
    return {(name, each): getattr(m, each) for name, m in packages for each in names if hasattr(m, each)}


@pytest.mark.parametrize("raises", [False, True])
def test_launches_replaced_restores_everything(rows, raises):
    def results() -> list[torch.Tensor]:
        with torch.no_grad():
            return [rows[title].ours(*rows[title].inputs) for title in EAGER if "backward" not in title]

    before, expected = patched(), results()
    plans = {key: dict(value.plans) for key, value in before.items() if key[1] == "_PLANS"}
    try:
        with host.launches_replaced():
            inside = patched()
            results()
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    after = patched()
    assert all(inside[key] is not value for key, value in before.items())
    assert all(after[key] is value for key, value in before.items())
    # Modules that were first imported in the context hold no replacement either.
    assert not [key for key, value in after.items() if getattr(value, "__module__", "").startswith("bench")]
    assert all(after[key].plans == value for key, value in plans.items())
    assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


def test_plans_of_cpu_calls_ask_for_no_cuda_device(monkeypatch):
    """torch built with CUDA raises there on a machine without a driver."""

    def no_driver() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(call_plan, "current_device", no_driver)
    plan = call_plan.CallPlan("gemm", (3, 5), torch.bfloat16, torch.device("cpu"))
    out = plan.new_out()
    assert out.shape == (3, 5) and out.dtype == torch.bfloat16 and out.is_contiguous()


# -- the command ---------------------------------------------------------------------------------------------


def test_command_without_a_gpu(monkeypatch, tmp_path, capsys):
    """Counts are shown; nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["host", "--only", "gemm, eager", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "no CUDA GPU" in shown and "gemm" in shown and "eager backward" in shown and "BsrLinear" not in shown
    assert command.main(["host", "--only", "no such row"]) == 2
    assert "'no such row'" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert command.parser().parse_args(["host", "--rounds", "3"]).rounds == 3
    with pytest.raises(SystemExit):
        command.main(["host", "--rounds", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err


@pytest.fixture
def like_gpu(monkeypatch) -> list[str]:
    """The command believes in a GPU and has five small rows; the fixture's list is the order of events."""
    events = []

    def step(name: str, size: int = 1):
        def call(x: torch.Tensor) -> torch.Tensor:
            events.append(name)
            return x * size

        return call

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("there is no kernel yet")

    def installed():
        events.append("import")
        return step("FA4")

    def absent():
        return peers.needs("flash_attn_of_no_version", "flash-attn-4")

    x = (torch.randn(1, 2, 4, 8),)
    small = [
        HostCase("attention", "eager", step("ours of attention"), step("SDPA"), x, installed),
        HostCase("attention", "eager backward", step("ours of backward"), step("SDPA"), x, absent),
        HostCase("fails", "eager", broken, step("torch"), x),
        HostCase("has no peer", "eager", step("ours"), None, x),
        HostCase("gemm", "eager", step("ours"), step("torch"), x),
    ]
    monkeypatch.setattr(host, "cases", lambda device: iter(small))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200", "commit": "abc", "date": "2026-12-02"})
    return events


def test_a_run_on_a_gpu(like_gpu, tmp_path, capsys):
    """Every row is recorded, those that fail with their reason; FlashAttention 4 is imported after all of ours ran."""
    assert command.main(["host", "--rounds", "3", "--out", str(tmp_path)]) == 1
    data = json.loads((tmp_path / "nvidia-h200" / "host.json").read_text())
    assert data["suite"] == "host" and data["environment"]["commit"] == "abc"
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == [
        "fails, eager", "has no peer, eager", "gemm, eager", "attention, eager", "attention, eager backward"
    ]  # fmt: skip
    assert rows["fails, eager"]["error"] == "RuntimeError: there is no kernel yet"
    assert set(rows["has no peer, eager"]["us"]) == {OURS, host.MM} and "ratio" not in rows["has no peer, eager"]
    gemm, forward, backward = list(rows.values())[2:]
    assert gemm["asked"] == 1.0 and gemm["rounds"] == 3 and set(gemm["us"]) == {OURS, TORCH, host.MM}
    assert gemm["ratio"] > 0 and 0 <= gemm["missed_rounds"] <= 3
    assert set(forward["us"]) == {OURS, TORCH, FA4, host.MM}
    assert backward["asked"] == 1.1 and FA4 not in backward["us"]
    assert backward["errors"][FA4].startswith("ImportError: ") and "flash-attn-4" in backward["errors"][FA4]
    imported = like_gpu.index("import")
    assert {"ours", "ours of attention", "ours of backward"} <= set(like_gpu[:imported])
    assert {"fails, eager", "has no peer, eager"} <= set(data["missed"])
    shown = capsys.readouterr().out
    assert "FAILED fails, eager: RuntimeError" in shown and "FA4, µs" in shown and "no time of FA4" in shown


if __name__ == "__main__":
    measured = {case.title: python_calls(case) for case in cases_host.cases("cpu")}
    print("\n".join(f'    "{title}": {measured[title]:g},' for title in CALLS))
