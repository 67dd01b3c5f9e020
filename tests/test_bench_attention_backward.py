"""The benchmark's suite of attention's backward on a CPU: its cases, their work, and a whole run on small shapes."""

import dataclasses
import json
import sys
import types

import pytest
import torch
import torch._functorch.config  # noqa: F401 (of which a test looks at an option)
from torch.nn.attention import SDPBackend

from attention import attention
from bench import __main__ as command
from bench import cases_attention_backward as cases
from bench import findings_attention_backward as findings
from bench import peers_attention, record, timing
from bench import peers_attention_backward as peers
from bench.peers import WrongResult
from bench.rows import FASTEST, OURS, Case, Row, Timing
from cute_kernels.runtime.device import forced_path

SMALL = {
    "packed": cases.TrainingProblem("attention", 1, 60, 60, 2, 2, 16, True, lengths=(25, 30, 5)),
    "window, grouped": cases.TrainingProblem("attention", 2, 70, 70, 4, 2, 16, True, (20, 0)),
    "sinks": cases.TrainingProblem("attention", 1, 70, 70, 16, 2, 16, True, sinks=True),
    "ALiBi": cases.TrainingProblem("attention", 2, 70, 70, 4, 2, 16, True, alibi=True),
}


def by_name(mode: str) -> dict[str, Case]:
    return {case.name: case for case in cases.backward_cases(mode)}


def row(name: str, ratio: float, other: str = "peer") -> Row:
    """A row at `ratio` of its only peer."""
    p = cases.dense_problem((1, 1024, 8, 64))
    others = [Timing(other, p.flops, [100.0] * 5)]
    return Row(cases.SUITE, name, p, Timing(OURS, p.flops, [100.0 / ratio] * 5), others, FASTEST, None, "sm_90")


# -- cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, count, dense", [("quick", 8, 3), ("full", 32, 16)])
def test_cases_are_what_is_asked(mode, count, dense):
    found = by_name(mode)
    assert len(found) == len(list(cases.backward_cases(mode))) == count
    for case in found.values():
        names = [peer.name for peer in case.peers]
        assert len(set(names)) == len(names) and case.problem.flops > 0 and case.problem.bytes > 0
        assert case.asked is not None and (case.against in names or case.against == FASTEST)
        assert case.patches_dsl == (peers.FA4 in names)
    assert sum(name.startswith("backward ") for name in found) == dense
    assert set(findings.OF_DENSE) <= set(found)
    assert command.parser().parse_args(["attention-backward"]).suites == ("attention-backward",)
    if mode == "full":
        asked = {name.partition(",")[0].partition(" B")[0]: case.asked for name, case in found.items()}
        assert asked["deterministic"] == 0.88 and asked["packed"] == asked["window 1024"] == 1.05
        assert asked["sinks"] == 0.98 and asked["gpt-oss"] == 1.05 and asked["sm_80 path"] == 0.95
        assert asked["block-sparse 128x128"] == 1.8 and asked["block-sparse 64x64"] == 2.0
        alibi = [case.asked for name, case in found.items() if name.startswith("score_mod ALiBi, B2 S8192 H16 D128")]
        assert alibi == [0.92, 0.90]


@pytest.mark.parametrize("name", SMALL)
def test_work_is_that_of_pairs_that_are_seen(name):
    p = SMALL[name]
    x = cases.operands(p, device="cpu")
    seen = int(x.kept(torch.arange(p.queries)).sum())
    assert p.pairs == seen and p.flops == 2.5 * 4 * seen * p.head_dim * p.heads * p.batch
    sizes = [t.numel() for t in (x.q, x.k, x.v, x.q, x.q)], [t.numel() for t in (x.q, x.k, x.v)]
    assert p.bytes == 2 * (sum(sizes[0]) + sum(sizes[1]))


# -- what is timed, and how it is compared -------------------------------------------------------------------


@pytest.mark.parametrize("what", cases.PRODUCTS)
@pytest.mark.parametrize("name", SMALL)
def test_calls_of_ours_are_right(name, what):
    problem = dataclasses.replace(SMALL[name], what=what)
    x = cases.operands(problem, device="cpu")
    call, plan = cases.ours_of(x)
    assert plan is None and len(call()) == (1 if what == peers.FORWARD else len(x.leaves))
    assert all(leaf.grad is None for leaf in x.leaves)


@pytest.mark.parametrize("what", cases.PRODUCTS)
def test_a_call_without_alibi_is_found(what):
    x = cases.operands(dataclasses.replace(SMALL["ALiBi"], what=what), device="cpu")
    assert not x.slopes.requires_grad and len(x.leaves) == 3
    call, _ = cases.ours_of(cases.sharing(x))
    with pytest.raises(WrongResult):
        x.verified(call)


def test_a_wrong_gradient_is_found():
    """One wrong tile, in rows whose gradients are small, and a lost one."""
    x = cases.operands(cases.dense_problem((1, 300, 2, 16), True), device="cpu")
    for place, rows, factor in ((0, slice(256, 300), 1.3), (1, slice(256, 300), 0.0), (2, slice(0, 20), 0.5)):

        def forward():
            return attention(*x.heads_first, causal=True).transpose(1, 2)

        call = peers.timed(x, forward)

        def run(place=place, rows=rows, factor=factor, call=call):
            found = list(call())
            found[place] = found[place].clone()
            found[place][:, rows] *= factor
            return tuple(found)

        with pytest.raises(WrongResult, match=("dq", "dk", "dv")[place]):
            x.verified(peers.Call(run))
        x.verified(call)


def test_what_is_left_unwritten_is_found():
    x = cases.operands(cases.dense_problem((1, 40, 2, 16)), device="cpu")
    q, k, v = (torch.empty_like(t) for t in x.leaves)
    with pytest.raises(WrongResult, match="dq"):
        x.verified(peers.Call(lambda: (q, k, v)))


def test_a_forced_path_is_backwards_too(monkeypatch):
    """Backward runs in another thread where there is a GPU, unless autograd is told to stay."""
    seen = []

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return attention(q, k, v)

        @staticmethod
        def backward(ctx, dout):
            seen.append((forced_path(), torch._C._is_multithreading_enabled()))
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                return torch.autograd.grad(attention(*leaves), leaves, dout)

    monkeypatch.setattr(cases, "attention", lambda q, k, v, **terms: Op.apply(q, k, v))
    x = cases.operands(cases.dense_problem((1, 40, 2, 16)), device="cpu")
    cases.ours_of(x, "sm_80")
    assert set(seen) == {("sm_80", False)} and forced_path() is None
    assert torch._C._is_multithreading_enabled()


# -- a whole run ---------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Small shapes on the CPU; FlashAttention 4, FlexAttention and CUDA's backends computed by torch's operations."""

    def fa4(q, k, v, causal=False, window_size=None, learnable_sink=None):
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out = attention(*heads_first, causal=causal, window_size=window_size, sinks=learnable_sink)
        return out.transpose(1, 2), None

    def varlen(q, k, v, *, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        return attention(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k), None

    def flex(q, k, v, *, block_mask, enable_gqa):
        rows, cols = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        mask = None if block_mask is None else block_mask.mask_mod(0, 0, rows, cols)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_func = fa4
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = varlen
    monkeypatch.setattr(peers, "compiled", lambda key, search: flex)
    math = SDPBackend.MATH
    monkeypatch.setattr(peers_attention, "sdpa_kernel", lambda backend: torch.nn.attention.sdpa_kernel(math))
    real = cases.operands
    monkeypatch.setattr(cases, "operands", lambda p, blocks=None, device="cpu": real(p, blocks, "cpu"))
    first = (2, 128, 2, 32)
    small = {"FIRST": first, "SPARSE": (1, 1024, 1, 32), "SM_80": (first,), "SHAPES": (first, (1, 200, 2, 64))}
    small |= {"QUICK": ((first, True),), "DOCUMENTS": (100, 60, 40), "DOCUMENT_HEADS": (2, 32), "LONG": 256}
    small |= {"WINDOW": (100, 0), "WINDOW_HEADS": (2, 32), "GPT_OSS": (4, 2, 32)}
    for name, value in small.items():
        monkeypatch.setattr(cases, name, value)

    def interleaved(calls, *, warm_s, rounds):
        for call in calls.values():
            call()
        return {name: [10.0 + i] * rounds for i, name in enumerate(calls)}

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(command.ceilings, "measure", lambda rounds: {"copy_tbs": 4.25})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200", "date": "2026-12-02"})
    with torch._functorch.config.patch(donated_buffer=True):
        yield


def run(tmp_path, *more) -> tuple[int, dict]:
    """(exit status, the result file)"""
    status = command.main(["attention-backward", "--rounds", "5", "--out", str(tmp_path), *more])
    return status, json.loads((tmp_path / "nvidia-h200" / "attention-backward.json").read_text())


@pytest.mark.parametrize("mode", ["--quick", "--full"])
def test_a_run_measures_and_writes_everything(on_cpu, tmp_path, capsys, mode):
    """All peers compute the same gradients before they get a time."""
    status, data = run(tmp_path, mode)
    assert status == 0 and data["suite"] == "attention-backward"
    rows = {row["name"]: row for row in data["rows"]}
    assert len(rows) == len(data["rows"]) == len(by_name(mode[2:]))
    for name, row in rows.items():
        wrong = {t["name"]: t["error"] for t in row["timings"] if "error" in t}
        assert not wrong, f"{name}: {wrong}"
        assert row["ratio"] is not None and row["asked"] is not None
    assert rows["packed, 3 documents, B1 S200 H2 D32 causal"]["problem"]["lengths"] == [100, 60, 40]
    names = [check["name"] for check in data["checks"]]
    assert names[:2] == [f"backward, geometric mean of {1 if mode == '--quick' else 4}", "backward, lowest"]
    assert len(names) == 4 and all(check["value"] is not None for check in data["checks"])
    assert "backward, lowest" in capsys.readouterr().out
    assert torch._functorch.config.donated_buffer == (mode == "--quick")  # FlexAttention needs it off


def test_a_peer_that_raises_stops_nothing(on_cpu, monkeypatch, tmp_path):
    def broken(*args, **options):
        raise RuntimeError("no kernel of this size")

    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "flash_attn_func", broken)
    status, data = run(tmp_path)
    assert status == 0
    (row,) = (row for row in data["rows"] if row["name"].startswith("backward"))
    errors = {t["name"]: t.get("error") for t in row["timings"]}
    assert errors[peers.FA4] == "RuntimeError: no kernel of this size" and row["ratio"] is not None


def test_rows_whose_op_raises_say_so(on_cpu, monkeypatch, tmp_path):
    def absent(*args, **terms):
        raise RuntimeError("there is no kernel yet")

    monkeypatch.setattr(cases, "block_sparse_attention", absent)
    status, data = run(tmp_path)
    errors = {row["name"]: row["timings"][0].get("error") for row in data["rows"]}
    assert status == 1 and {name for name, error in errors.items() if error} == set(findings.OF_DENSE)


def test_checks():
    rows = [row("backward a", 1.25), row("backward b", 0.8), row("packed", 0.1)]
    mean, lowest = findings.checks(rows)
    assert mean.value == pytest.approx(1.0) and not mean.ok and lowest.value == pytest.approx(0.8) and not lowest.ok
    (share,) = findings.checks([row(cases.sparse_name(64), 0.62, cases.OUR_DENSE)])
    assert share.ok and share.asked == 0.60
    assert not findings.checks([])
    failed = by_name("quick")["backward B2 S8192 H16 D128 full"].failed(ValueError("no"))
    assert [check.value for check in findings.checks([*rows, failed])] == [None, None]
