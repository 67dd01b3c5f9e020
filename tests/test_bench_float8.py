"""The float8 suite's rows, small and on the CPU: what they compute, what they are held against, what is asked."""

import pytest
import torch

from bench import __main__ as command
from bench import cases_float8, cases_float8_layers, findings_float8, peers_float8
from bench.peers import WrongResult
from bench.rows import OURS
from sparse_collective import random_bsr
from sparse_collective.nn import Float8BsrLinear, Float8SwiGLU


def scaled_mm(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum, out):
    """In torch's place, with what it insists on."""
    assert a.stride(1) == b.stride(0) == 1 and scale_a.dtype == scale_b.dtype == torch.float32
    assert (scale_a.dim(), scale_b.dim()) in ((0, 0), (2, 2)) and isinstance(use_fast_accum, bool)
    assert out.dtype == out_dtype
    if scale_a.dim() == 2 and scale_a.shape[1] > 1:
        assert scale_a.shape == (a.shape[0], a.shape[1] // 128) and scale_a.stride(0) == 1 and not use_fast_accum
        assert scale_b.shape == (b.shape[0] // 128, -(-b.shape[1] // 128)) and scale_b.stride(0) == 1
        scale_a, scale_b = (s.repeat_interleave(128, 1) for s in (scale_a, scale_b.repeat_interleave(128, 0)))
        return out.copy_((a.float() * scale_a) @ (b.float() * scale_b[:, : b.shape[1]]))
    assert scale_b.is_contiguous()
    return out.copy_((a.float() * scale_a) @ (b.float() * scale_b))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (cases_float8, findings_float8):
        monkeypatch.setattr(module, "randn", lambda *shape: torch.randn(*shape, dtype=torch.bfloat16))
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(
        cases_float8, "of_rows", lambda M, K, block, per_row: random_bsr((M, K), block, per_row=per_row)
    )  # fmt: skip


def measured(case):
    case.timer = lambda calls, *, warm_s, rounds: {name: [1.0 + (name == OURS)] * rounds for name in calls}
    return case.measure(3)


def test_rows_and_what_is_asked_of_them():
    quick, full = (list(cases_float8.float8_cases(mode)) for mode in ("quick", "full"))
    asked = [1.0] * 4 + [1.08] + [1.0] * 4 + [1.08, 0.8, 1.6, 0.55, 1.4] + [0.75] * 8 + [1.75, None, 5.0, 4.0, 5.0]
    assert [case.asked for case in quick] == asked
    assert {case.name for case in quick} < {case.name for case in full} and len({c.name for c in full}) == len(full)
    for case in full:
        assert case.against in [peer.name for peer in case.peers]
    big = {case.name: case.problem for case in quick}[
        "gemm 8192x8192x8192 NT, e4m3fn, scales per row, fast accumulation"
    ]
    assert big.flops == 2 * 8192**3 and big.bytes == 4 * 8192**2


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("fast", [False, True])
def test_a_row(emulated, per, fast):
    row = measured(cases_float8.float8(136, 80, 96, per, fast, 1.0))
    assert row.ratio == 0.5 and row.plan.startswith("sm_90 ")
    assert row.ours.note.startswith("error 1.") and row.rival.note == row.ours.note
    assert findings_float8.measure([row], {}, "gemm") == {}


def test_a_row_with_scales_of_blocks(emulated):
    row = measured(cases_float8.float8(136, 256, 512, peers_float8.BLOCKS, False, 1.08))
    assert row.ratio == 0.5 and row.plan.startswith("sm_90 ")
    assert row.ours.note.startswith("error 1.") and row.rival.note.startswith("error 1.")


@pytest.mark.parametrize("against", [cases_float8.DENSE, cases_float8.WIDE])
def test_a_sparse_row(emulated, against):
    row = measured(cases_float8.sparse((64, 64), 1 / 2, against, 0.5, size=256))
    assert row.problem.density == 0.5 and row.problem.flops == 256**3 and row.plan.startswith("sm_90 ")
    assert row.ours.note.startswith("error 1.") and not row.rival.error
    assert row.ratio == (0.25 if against == cases_float8.DENSE else 0.5)
    assert findings_float8.measure([row], {}, "bsr") == {}


def test_a_row_of_few_tokens(emulated):
    case = cases_float8.few_tokens(8, (64, 64), size=256)
    row = measured(case)
    assert row.problem.flops == 2 * 8 * 256 * 64 and row.plan.startswith("sm_90 ") and "skinny" in row.plan
    assert row.ours.note.startswith("error 1.") and not row.rival.error and row.ratio == 0.5
    moved = 2 * case.peers[0].setup()().numel()
    assert moved == 256 * 64 and case.against == cases_float8.COPY


def test_a_grouped_row(emulated):
    row = measured(cases_float8.grouped(512, 256, 384, (128, 128), 0.5, experts=4, run=64))
    assert row.problem.flops == 2 * 512 * 256 * 384 / 2 and row.problem.items == 4 and row.plan.startswith("sm_90 ")
    assert row.ours.note.startswith("error 1.") and not row.rival.error and row.ratio == 0.5


def test_a_row_of_caches(emulated, monkeypatch):
    monkeypatch.setattr(cases_float8.ceilings, "copy", lambda: lambda: None)
    row = measured(cases_float8.cached(2, 1024, cases_float8.WIDE_CACHE, 1.75, heads=(8, 2, 64)))
    assert row.ratio == 0.5 and row.plan.startswith("sm_80 16x64")
    assert row.problem.kv_bytes == 2 * 2 * 1024 * 2 * 64 and row.problem.flops == 4 * 2 * 1024 * 8 * 64
    row = measured(cases_float8.cached(2, 1024, cases_float8.CACHE_COPY, heads=(8, 2, 64)))
    us = row.problem.kv_bytes / 2e6  # at 2 TB/s
    assert row.ours.flops / us == pytest.approx(row.rival.flops / (2 * cases_float8.ceilings.COPY_BYTES / 2e6))


@pytest.mark.parametrize("tokens", [1, 70])
def test_a_row_of_a_feed_forward(tokens):
    case = cases_float8_layers.feed_forward(
        256, 384, tokens, 0.5, 5.0, block=(64, 64), device="cpu", backend="aot_eager"
    )  # fmt: skip
    row = measured(case)
    assert row.problem.flops == 3 * 2 * 256 * 384 * tokens / 2 and row.ratio == 0.5 and not row.rival.error


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("gate_up", "wrong result before the gate"),
        ("quantize_gated", "wrong result of the hidden numbers"),
        ("down", "wrong result: off"),
    ],
)
def test_a_wrong_step_of_a_feed_forward(monkeypatch, wrong, words):
    """Of each step alone, whose results are a tenth too large."""
    if wrong == "quantize_gated":
        right = cases_float8_layers.quantize_gated
        monkeypatch.setattr(cases_float8_layers, wrong, lambda z: (lambda v, s: (v, s * 1.1))(*right(z)))
    else:
        kind = {"gate_up": Float8BsrLinear, "down": Float8SwiGLU}[wrong]
        right = kind._product
        monkeypatch.setattr(kind, "_product", lambda layer, x: right(layer, x) * 1.1)
    case = cases_float8_layers.feed_forward(256, 384, 70, 0.5, block=(64, 64), device="cpu")
    with pytest.raises(WrongResult, match=words):
        case.ours()


def test_a_wrong_result_is_no_row(monkeypatch):
    monkeypatch.setattr(cases_float8, "gemm", lambda a, b, out, **_: out.fill_(1.0))
    with pytest.raises(WrongResult):
        cases_float8.float8(136, 80, 96, "tensor", False).ours()


def test_errors_of_sums(monkeypatch, capsys):
    """Those of fp32 are next to none; what torch cannot do says so."""
    monkeypatch.setattr(findings_float8, "ROWS", 16)
    found = findings_float8.measure([], {}, "errors")["errors"]
    assert len(found) == 6 and all(len(line) == 4 for line in found.values())
    assert all(float(text.split()[0]) < 1e-5 for line in found.values() for text in line.values())
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in str(findings_float8.errors_of_sums())
    assert "errors of fp32 results" in capsys.readouterr().out


def test_host_calls_and_the_command():
    calls = cases_float8.host_calls()
    assert len(calls) == 6 and all(call().shape == (64, 64) for call in calls.values())
    assert command.parser().parse_args(["float8"]).suites == ("float8",)
    assert peers_float8.SCALED_MM in command.SUITES["float8"].cases("quick").__next__().against
