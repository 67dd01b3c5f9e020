"""The benchmark's suites of attention and its gradients on a CPU: operands, work, peers, and whole runs, small.

FlashAttention 4, FlexAttention and CUDA's backends are computed by the reference or by torch.
"""

import itertools
import json
import sys
import types
from collections import Counter

import pytest
import torch
import torch._functorch.config
from torch.nn.attention import SDPBackend

from attention import attention, mask_mods, reference
from bench import __main__ as command
from bench import cases_attention as cases
from bench import cases_attention_backward as backward
from bench import findings, peers_attention, record, timing
from bench import peers_attention_backward as peers_backward
from bench.peers import Call, WrongResult, verified
from bench.peers_attention import Attention
from bench.rows import OURS
from cute_kernels.runtime.device import forced_path

FA4 = "flash_attn.cute.interface"

# -- work and operands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries, keys", [(40, 40), (1, 40), (24, 40), (40, 24)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (9, 0), (3, 4), (None, 5), (7, None)])
def test_work_and_masks_are_those_of_the_reference(queries, keys, causal, window):
    """Pairs, sampled queries, whole output and FlexAttention's mask, with grouped heads."""
    p = cases.AttentionProblem("attention", 2, queries, keys, 4, 2, 32, causal, window)
    x = cases.operands(p, device="cpu")
    seen = int(x.kept(torch.arange(queries)).sum())
    assert p.pairs == seen and p.flops == 4 * seen * 32 * 4 * 2
    assert p.kv_bytes == 2 * (x.k.numel() + x.v.numel()) and p.bytes == p.kv_bytes + 2 * 2 * x.q.numel()
    must = reference.attention(*(t.double() for t in x.heads_first), causal=causal, window_size=window).transpose(1, 2)
    torch.testing.assert_close(x.exact(), must, rtol=1e-6, atol=1e-6)
    index, sampled = x.sample
    torch.testing.assert_close(sampled.double(), must[index], rtol=1e-4, atol=1e-5)
    assert x.bounds == mask_mods.window_bounds(window, causal)
    if (mask := peers_attention.flex_mask(x)) is not None:
        zero = torch.zeros((), dtype=torch.int32)
        found = mask.mask_mod(zero, zero, torch.arange(queries)[:, None], torch.arange(keys))
        assert torch.equal(found.expand(queries, keys), x.kept(torch.arange(queries)))


# -- results are compared ---------------------------------------------------------------------------------------


def test_each_query_is_compared_by_itself():
    """The first query sees one key, and its output outweighs all others."""
    x = Attention(*(torch.randn(1, 2048, 2, 32) for _ in range(3)), True)
    wrong = x.exact().float()
    wrong[:, 1024:] *= 1.03
    verified(wrong.clone, lambda: x.sample)
    with pytest.raises(WrongResult, match="but not where queries see few keys"):
        x.verified(wrong.clone)
    x.verified(lambda: x.exact().float())


def test_a_wrong_gradient_is_found():
    """A wrong tile in rows whose gradients are small, a lost one, and memory that is left unwritten."""
    x = backward.operands(backward.dense_problem((1, 300, 2, 16), True), device="cpu")
    for place, rows, factor in ((0, slice(256, 300), 1.3), (1, slice(256, 300), 0.0), (2, slice(0, 20), 0.5)):
        call = peers_backward.timed(x, lambda: attention(*x.heads_first, causal=True).transpose(1, 2))

        def run(place=place, rows=rows, factor=factor, call=call):
            found = list(call())
            found[place] = found[place].clone()
            found[place][:, rows] *= factor
            return tuple(found)

        with pytest.raises(WrongResult, match=("dq", "dk", "dv")[place]):
            x.verified(Call(run))
        x.verified(call)
    unwritten = tuple(torch.empty_like(t) for t in x.leaves)
    with pytest.raises(WrongResult, match="dq"):
        x.verified(Call(lambda: unwritten))


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

    monkeypatch.setattr(backward, "attention", lambda q, k, v, **terms: Op.apply(q, k, v))
    backward.ours_of(backward.operands(backward.dense_problem((1, 40, 2, 16)), device="cpu"), "sm_80")
    assert set(seen) == {("sm_80", False)} and forced_path() is None


# -- whole runs -------------------------------------------------------------------------------------------------


def fa4(q, k, v, causal=False, window_size=None, learnable_sink=None, block_sparse_tensors=None):
    heads_first, mask = (t.transpose(1, 2) for t in (q, k, v)), None
    if block_sparse_tensors is None:
        out = attention(*heads_first, causal=causal, window_size=window_size, sinks=learnable_sink)
    else:
        mask = types.SimpleNamespace(**block_sparse_tensors)
        lists = (mask.mask_block_cnt, mask.mask_block_idx, mask.full_block_cnt, mask.full_block_idx)
        mask = reference.BlockMask(*lists, lengths=(q.shape[1], k.shape[1]), blocksize=mask.block_size, check=False)
        out = reference.attention(*heads_first, block_mask=mask)
    return out.transpose(1, 2).contiguous(), None


def varlen(q, k, v, *, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return attention(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k), None


def flex(q, k, v, *, block_mask, enable_gqa, kernel_options=None):
    rows, cols = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = None if block_mask is None else block_mask.mask_mod(0, 0, rows, cols)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


def interleaved(calls, *, warm_s, rounds):
    for call in calls.values():
        call()
    return {name: [10.0 + i] * rounds for i, name in enumerate(calls)}


FIRST = (2, 256, 2, 32)
SHAPES = {
    cases: {
        "FIRST": FIRST, "SPARSE": (1, 1024, 1, 32), "SM_80": (FIRST,), "SHAPES": (FIRST, (1, 128, 2, 64)),
        "SMALL": ((1, 64, 2, 32),), "WINDOW": ((1, 512, 2, 32), (100, 0)), "CACHE_HEADS": (4, 2, 32),
        "CACHES": ((2, 512, 0.88),),
    },
    backward: {
        "FIRST": FIRST, "SPARSE": (1, 1024, 1, 32), "SM_80": (FIRST,), "SHAPES": (FIRST, (1, 200, 2, 64)),
        "QUICK": ((FIRST, True),), "DOCUMENTS": (100, 60, 40), "DOCUMENT_HEADS": (2, 32), "LONG": 256,
        "WINDOW": (100, 0), "WINDOW_HEADS": (2, 32), "GPT_OSS": (4, 2, 32), "GROUPED": ((1, 128, 4, 2),),
    },
}  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch):
    """Small shapes on the CPU, peers computed by the reference, and times that are made up."""
    for name in ("flash_attn", "flash_attn.cute", FA4, "flash_attn.cute.block_sparsity"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[FA4].flash_attn_func, sys.modules[FA4].flash_attn_varlen_func = fa4, varlen
    sys.modules["flash_attn.cute.block_sparsity"].BlockSparseTensorsTorch = dict
    sdpa_kernel = peers_attention.sdpa_kernel
    monkeypatch.setattr(peers_attention, "sdpa_kernel", lambda backend: sdpa_kernel(SDPBackend.MATH))
    monkeypatch.setattr(peers_attention, "compiled", lambda key: flex)
    monkeypatch.setattr(peers_backward, "compiled", lambda key, search: flex)
    for module, shapes in SHAPES.items():
        real = module.operands
        monkeypatch.setattr(module, "operands", lambda p, blocks=None, device="", real=real: real(p, blocks, "cpu"))
        for name, value in shapes.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(findings, "ERRORS", (((1, 128, 2, 64), True),))
    for name in ("interleaved", "interleaved_graphs", "interleaved_bursts"):
        monkeypatch.setattr(timing, name, interleaved)
    monkeypatch.setattr(timing, "graphed", lambda call: call)
    monkeypatch.setattr(command.ceilings, "measure", lambda rounds: {"copy_tbs": 4.25})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200", "date": "2026-12-02"})
    with torch._functorch.config.patch(donated_buffer=True):
        yield


def run(folder, suite: str, *options: str) -> tuple[int, dict]:
    """(exit status, result file)"""
    status = command.main([suite, "--rounds", "5", "--out", str(folder), *options])
    return status, json.loads((folder / "nvidia-h200" / f"{suite}.json").read_text())


@pytest.mark.parametrize(
    ("suite", "mode"),
    [("attention", "--quick"), ("attention-backward", "--full")],
)
def test_a_run_measures_and_writes_everything(on_cpu, tmp_path, suite, mode):
    """Every peer agrees with the truth before it gets a time."""
    status, data = run(tmp_path, suite, mode)
    rows = {row["name"]: row for row in data["rows"]}
    assert status == 0 and data["suite"] == suite and len(rows) == len(data["rows"])
    for name, row in rows.items():
        errors = {t["name"]: t["error"] for t in row["timings"] if "error" in t and t["name"] != cases.COPY}
        assert not errors, f"{name}: {errors}"
        assert row["asked"] is not None and (row["ratio"] is not None or row["against"] == cases.COPY)
    assert data["checks"] and all(check["value"] is not None for check in data["checks"])
    if suite == "attention":
        (errors,) = data["errors"]
        assert set(errors["errors"]) == {OURS, peers_attention.FLASH, peers_attention.FA4}
        assert all(0 < error["rms"] < error["max"] < 0.05 for error in errors["errors"].values())


def test_rows_that_raise_say_so(on_cpu, monkeypatch, tmp_path):
    """Ours fails its row and the run; a peer fails neither."""

    def absent(*args, **terms):
        raise RuntimeError("there is no kernel yet")

    monkeypatch.setattr(backward, "block_sparse_attention", absent)
    monkeypatch.setattr(sys.modules[FA4], "flash_attn_func", absent)
    status, data = run(tmp_path, "attention-backward")
    errors = {row["name"]: row["timings"][0].get("error") for row in data["rows"]}
    assert status == 1 and {name for name in errors if errors[name]} == {n for n in errors if "block-sparse" in n}
    (row,) = (row for row in data["rows"] if row["name"].startswith("backward"))
    assert row["ratio"] is not None and {t["name"]: t.get("error") for t in row["timings"]}[peers_attention.FA4]


@pytest.mark.parametrize("only", ["window", "errors"])
def test_parts_of_a_run_write_nothing(on_cpu, tmp_path, capsys, only):
    assert command.main(["--attention", "--only", only, "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())
    assert ("Error against" in capsys.readouterr().out) == (only == "errors")


def test_fa4_is_imported_after_ours_has_run(on_cpu, monkeypatch):
    """Its import changes CuTe DSL: compile_first must have met every configuration of ours before."""
    ran, late, imported = set(), [], []
    real, needs = cases.attention, peers_attention.needs

    def ours(q, k, v, **terms):
        key = q.shape[-1], terms["causal"], terms["window_size"]
        if not imported:
            ran.add(key)
        elif key not in ran:
            late.append(key)
        return real(q, k, v, **terms)

    def noted(module, package):
        imported.extend([module] if "flash" in module else [])
        return needs(module, package)

    monkeypatch.setattr(peers_attention, "needs", noted)
    monkeypatch.setattr(cases, "attention", ours)
    args = command.parser().parse_args(["attention", "--only", "forward"])
    command.compile_first(args)
    assert ran and not imported
    for case in cases.attention_cases("quick"):
        if args.only in case.name:
            case.measure(rounds=1)
    assert imported and not late


def test_each_call_follows_every_other_one_equally_often():
    rounds = list(itertools.islice(timing.shuffled(dict.fromkeys("abcd")), 600))
    assert all(sorted(turn) == [(name, None) for name in "abcd"] for turn in rounds)
    names = [name for turn in rounds for name, _ in turn]
    follows = Counter(pair for pair in itertools.pairwise(names) if pair[0] != pair[1])
    assert len(follows) == 12 and min(follows.values()) > 0.8 * max(follows.values())
    again = itertools.islice(timing.shuffled(dict.fromkeys("abcd")), 600)
    assert list(again) == rounds


def test_bursts_take_turns_and_graphs_are_divided_by_their_calls(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order = []
    calls = {"a": lambda: order.append("a"), "b": Call(lambda: order.append("no"), bare=lambda: order.append("b"))}
    found = timing.interleaved_bursts(calls, warm_s=0.0, rounds=3)
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}
    assert "".join(order) == ("a" * timing.IN_BURST + "b" * timing.IN_BURST) * 3
    monkeypatch.setattr(timing, "interleaved", lambda calls, **_: {name: [40.0, 60.0] for name in calls})
    assert timing.interleaved_graphs({"a": None}) == {"a": [2.0, 3.0]}
