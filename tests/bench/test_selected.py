"""The benchmark of selected-block attention on a CPU: its truth, its lists, and whole runs, small.

FlashAttention 4, the Triton kernel and cuDNN frontend are computed by torch.
"""

import json
import sys
import types

import pytest
import torch
import torch.nn.functional as nnf

from attention.selected import reference
from attention.selected.gather import packed_heads
from bench import __main__ as command
from bench import cases_selected as cases
from bench import peers_selected as peers
from bench import record, timing
from bench.peers import Call, WrongResult
from bench.peers_attention_backward import BACKWARD, FORWARD, timed
from bench.peers_selected import Selected
from cute_kernels.testing.selected_blocks import similar_lists

from ..emulator.ops import needs_compiler, on_emulator

SHAPES = {
    "QSA": cases.Model("QSA", 6, 2, 32, 4, 8, 1, 4, cases.selection(8, 4, activation="relu")),
    "MSA": cases.Model("MSA", 8, 4, 32, 16, 4, 4, 4, cases.selection(4, 16, pool="max", groups=4)),
}
MODULES = {
    "flash_attn": None, "flash_attn.cute": None, "flash_attn.cute.interface": "flash_attn_func",
    "flash_attn.cute.block_sparsity": "BlockSparseTensorsTorch", "triton": None, "bench.selected_gather": "launch",
    "cudnn": None, "cudnn.block_sparse_attention": None, "cudnn.block_sparse_attention.api": None,
}  # fmt: skip


def problem(name: str, what: str = FORWARD, tokens: int = 256, similarity: float = 0.9) -> cases.SelectedProblem:
    m = SHAPES[name]
    shape = m.heads, m.kv_heads, m.head_dim, m.block_size, m.top, m.groups
    return cases.SelectedProblem("selected_attention", tokens, *shape, similarity, what, stretch=64)


def video_problem(what: str, tokens: int = 256) -> cases.SelectedProblem:
    return cases.SelectedProblem(
        "block_sparse_attention", tokens, 2, 2, 32, 16, 3, 2, 0.0, what, run=16, causal=False, stretch=16
    )


def seen_by(x: Selected) -> torch.Tensor:
    """(H, S, S) bool."""
    size = x.q.shape[1]
    table = torch.zeros(len(x.indices), x.indices.shape[1], size // x.block_size + 1, dtype=torch.bool)
    table.scatter_(-1, x.indices.long().masked_fill(x.indices < 0, table.shape[-1] - 1), True)
    seen = table[..., :-1].repeat_interleave(x.block_size, -1).repeat_interleave(x.run, 0).transpose(0, 1)
    if x.causal:
        seen = seen & torch.ones(size, size, dtype=torch.bool).tril()
    return seen.repeat_interleave(x.q.shape[2] // len(seen), 0)


def plainly(q, k, v, seen):
    """(1, S, H, D), in FP32."""
    heads_first = (t.transpose(1, 2).float() for t in (q, k, v))
    out = nnf.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2).to(q.dtype)


@needs_compiler
@pytest.mark.sm_90
def test_the_tables_are_those_of_the_call(monkeypatch):
    """Tiles have all query heads of a KV head, as in selected_attention."""
    p = cases.SelectedProblem("selected_attention", 64, 8, 2, 64, 16, 2, 2, 0.9, FORWARD, stretch=64)
    x = cases.operands(p, device="cpu")
    seen = []
    monkeypatch.setattr(cases, "union_tables", lambda args: seen.append(packed_heads(args)))
    with on_emulator("sm_90"):
        cases.making_the_mask(x)()
    assert seen == [4]


# -- truth ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["QSA", "MSA", "video"])
def test_truth_is_that_of_the_reference(form, monkeypatch):
    """Compare some tokens and keys, in parts, with autograd through the library's reference and dense masks."""
    p = video_problem(BACKWARD) if form == "video" else problem(form, BACKWARD)
    x = cases.operands(p, device="cpu")
    for name in ("_q", "_k", "_v", "_dout"):
        make = getattr(x, name)
        setattr(x, name, lambda make=make: make().double().requires_grad_())
    monkeypatch.setattr(peers, "CHUNK", 2**17)
    if form == "video":
        out = plainly(*x.leaves, seen_by(x))
    else:
        indices, terms = x.indices[None], {"causal": True}
        out = reference.selected_attention(*x.heads_first, indices, x.block_size, **terms)[0].transpose(1, 2)
    dq, dk, dv = torch.autograd.grad(out, x.leaves, x.dout)
    close = {"rtol": 1e-3, "atol": 1e-4, "check_dtype": False}
    for kv_head in range(x.k.shape[2]):
        heads = slice(kv_head * x.group, (kv_head + 1) * x.group)
        for tokens, exact in x.truth(torch.arange(0, 256, 7), kv_head):
            torch.testing.assert_close(exact.out, out[0, tokens, heads], **close)
            torch.testing.assert_close(exact.dq, dq[0, tokens, heads], **close)
        for key in (0, 77, 255):
            torch.testing.assert_close(
                x.truth_of_key(key, kv_head), (dk[0, key, kv_head], dv[0, key, kv_head]), **close
            )


@pytest.mark.parametrize("name", [*SHAPES, "video"])
def test_work_is_what_lists_show(name):
    p = video_problem(FORWARD) if name == "video" else problem(name)
    x = cases.operands(p, device="cpu")
    assert p.pairs * p.heads == int(seen_by(x).sum()) and p.flops == 4 * p.pairs * p.head_dim * p.heads
    assert p.bytes == 2 * sum(t.numel() for t in (*x.leaves, x.q)) + 4 * x.indices.numel()
    backward = video_problem(BACKWARD) if name == "video" else problem(name, BACKWARD)
    assert backward.flops == 2.5 * p.flops


def test_wrong_results_are_found():
    """Results of ours are compared with the truth, those of peers with ours, anywhere."""
    for what, names in peers.NAMES.items():
        for place, name in enumerate(names):
            x = cases.operands(problem("MSA", what), device="cpu")

            def call(factor: float = 1.0, rows=slice(None), x=x, place=place):
                found = [t.clone() for t in timed(x, lambda: plainly(*x.leaves, seen_by(x)))()]
                found[place][:, rows] *= factor
                return tuple(found)

            with pytest.raises(WrongResult, match=name):
                x.verified(Call(lambda call=call: call(1.2)))
            assert x.ours is None
            x.verified(Call(call))
            with pytest.raises(WrongResult, match=name):
                x.verified(Call(lambda call=call: call(1.5, slice(130, 140))))
            unwritten = [torch.empty_like(t) for t in x.ours]
            with pytest.raises(WrongResult, match=names[0]):
                x.verified(Call(lambda unwritten=unwritten: unwritten))


# -- whole runs -------------------------------------------------------------------------------------------------


def dense_of(lists: dict, columns: int) -> torch.Tensor:
    """(heads, rows, columns) bool of FA4's lists of tiles."""
    counts, indices = lists["mask_block_cnt"][0], lists["mask_block_idx"][0]
    assert counts.dtype == indices.dtype == torch.int32
    table = torch.zeros(*indices.shape[:2], columns, dtype=torch.bool)
    for place in (torch.arange(indices.shape[-1]) < counts[..., None]).nonzero():
        table[place[0], place[1], indices[tuple(place)]] = True
    return table


def fa4(q, k, v, *, mask_mod, aux_tensors, block_sparse_tensors, block_sparse_tensors_bwd=None):
    """Every element is seen that the mask_mod's table shows, in tiles that are listed."""
    size, heads = q.shape[1:3]
    (block_size, share, of_byte), (table,) = mask_mod, aux_tensors
    key, row = torch.arange(size), torch.arange(size)[:, None]
    block = key // block_size
    bits = table[:, :, block // of_byte] >> (block % of_byte).to(torch.uint8) & 1
    seen = bits.bool().repeat_interleave(share, 0) & (key <= row)
    rows, columns = block_sparse_tensors["block_size"]
    listed = dense_of(block_sparse_tensors, -(-size // columns))
    kept = listed.repeat_interleave(rows, 1)[:, :size].repeat_interleave(columns, 2)[..., :size]
    seen = seen & kept.expand(heads, -1, -1)
    if block_sparse_tensors_bwd is not None:
        rows, columns = block_sparse_tensors_bwd["block_size"]
        listed = dense_of(block_sparse_tensors_bwd, -(-size // rows)).mT
        kept = listed.repeat_interleave(rows, 1)[:, :size].repeat_interleave(columns, 2)[..., :size]
        assert not (seen & ~kept).any()
    return plainly(q, k, v, seen), None


def launch(q, k, v, indices, counts, out, block_size, first, *setting):
    assert torch.equal(counts, (indices >= 0).sum(-1).int())
    x = Selected(q, k, v, None, indices, block_size)
    out[:, first:] = plainly(q, k, v, seen_by(x))[:, first:]


def bsa_forward(q, k, v, lists, *, sparse_block_size):
    rows, size = (t.transpose(1, 2) for t in (q, k, v)), sparse_block_size
    seen = seen_by(Selected(q.detach().transpose(1, 2), None, None, None, lists[0].transpose(0, 1), size, size, False))
    return {"o_tensor": plainly(*rows, seen).transpose(1, 2), "lse_tensor": lists}


def bsa_backward(dout, q, k, v, out, lse, lists, *, sparse_block_size):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        out = bsa_forward(*leaves, lists, sparse_block_size=sparse_block_size)["o_tensor"]
    return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), torch.autograd.grad(out, leaves, dout), strict=True))


def taking_turns(calls, *, warm_s, rounds):
    for call in calls.values():
        call()
    return {name: [10.0 + i] * rounds for i, name in enumerate(calls)}


@pytest.fixture
def on_cpu(monkeypatch):
    """Small shapes on the CPU, peers computed by torch, and times that are made up."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_func = fa4
    sys.modules["flash_attn.cute.block_sparsity"].BlockSparseTensorsTorch = dict
    sys.modules["bench.selected_gather"].launch = launch
    bsa = sys.modules["cudnn.block_sparse_attention.api"]
    bsa.block_sparse_attention_forward, bsa.block_sparse_attention_backward = bsa_forward, bsa_backward
    monkeypatch.setattr(peers, "member_mod", lambda *terms: terms)
    monkeypatch.setattr(peers, "FA4_COLUMNS", {FORWARD: {32: 80}, BACKWARD: {32: 64}})
    monkeypatch.setattr(peers, "_best", {})
    monkeypatch.setattr(peers, "TUNED", 32)
    monkeypatch.setattr(peers.gather.__wrapped__, "__defaults__", (taking_turns,))
    monkeypatch.setattr(timing, "paced", taking_turns)
    monkeypatch.setattr(cases, "STRETCH", 64)
    monkeypatch.setattr(cases, "QSA", SHAPES["QSA"])
    monkeypatch.setattr(cases, "MSA", SHAPES["MSA"])
    monkeypatch.setattr(cases, "SHAPES", tuple((SHAPES[n], size) for n, size in (("QSA", 320), ("MSA", 256))))
    monkeypatch.setattr(cases, "VIDEO", {"VSA": (256, 2, 3, {FORWARD: 1.25, BACKWARD: 1.05})})
    monkeypatch.setattr(cases, "VIDEO_DIM", 32)
    real = cases.operands
    monkeypatch.setattr(cases, "operands", lambda p: real(p, "cpu"))
    monkeypatch.setattr(command.ceilings, "measure", lambda rounds: {"copy_tbs": 4.25})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200", "date": "2026-12-02"})


@pytest.mark.parametrize("limit", [2**31, 2**10], ids=["bytes", "bits"])
def test_a_run_measures_and_writes_everything(on_cpu, monkeypatch, tmp_path, limit):
    """Every peer agrees with ours before it gets a time; only the Triton kernel is refused, backward."""
    monkeypatch.setattr(peers, "LARGEST", limit)
    only = [] if limit > 2**20 else ["--only", "similarity 0.9"]
    status = command.main(["selected", "--full", "--rounds", "3", "--out", str(tmp_path), *only])
    assert status == 0
    if only:
        assert not list(tmp_path.iterdir())
        return
    data = json.loads((tmp_path / "nvidia-h200" / "selected.json").read_text())
    rows = {row["name"]: row for row in data["rows"]}
    assert len(rows) == len(data["rows"]) == 2 * 2 * 3 + 2
    for name, row in rows.items():
        assert f"similarity {row['problem']['similarity']:g}" in name and "similarity" in row["timings"][0]["note"]
        assert not [(t["name"], t["error"]) for t in row["timings"] if "error" in t], name
        assert row["ratio"] is not None or BACKWARD in name
    timed_too = {t["name"] for t in rows["QSA 0k forward, similarity 0.9"]["timings"]}
    assert timed_too == {"ours", cases.DENSE, cases.MASK, cases.SELECT, peers.GATHER, peers.FA4}
    assert {t["name"] for t in rows["MSA 0k backward, similarity 0.9"]["timings"]} == {"ours", cases.DENSE, peers.FA4}
    assert len(data["checks"]) == 7 and all(check["value"] is not None for check in data["checks"])


def test_peers_that_are_missing_say_so(on_cpu, monkeypatch, tmp_path):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    assert command.main(["selected", "--rounds", "3", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "nvidia-h200" / "selected.json").read_text())
    errors = {t["name"]: t["error"] for row in data["rows"] for t in row["timings"] if "error" in t}
    assert set(errors) == {peers.FA4, peers.GATHER, peers.CUDNN_BSA}
    assert all("cannot be imported" in error for error in errors.values())


def test_lists_are_the_same_on_every_run():
    p = problem("QSA")
    assert torch.equal(cases.lists.__wrapped__(p, "cpu"), cases.lists.__wrapped__(p, "cpu"))
    again = similar_lists(256, 64, 8, similarity=0.9, stretch=64)
    assert torch.equal(cases.lists.__wrapped__(p, "cpu"), again)


def test_slow_calls_take_fewer_rounds(monkeypatch):
    """Times of calls that sleep on the host, with events that read the host's clock."""
    import time

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(timing, "Flush", lambda: lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    order = []

    def sleeping(name: str, seconds: float):
        return lambda: (order.append(name), time.sleep(seconds))

    calls = {"slow": sleeping("slow", 0.05), "fast": sleeping("fast", 0.0005)}
    times = timing.paced(calls, warm_s=0.0, rounds=12, share_s=0.2)
    assert len(times["fast"]) == 12 and 3 <= len(times["slow"]) <= 4
    assert min(times["slow"]) >= 5e4 > max(times["fast"])
    after = order[2:]  # the warm-up
    assert "slow" in after[:6] and "slow" in after[-3:]  # spread over all rounds
