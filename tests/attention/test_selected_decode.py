"""selected_attention with a KV cache against FP64: the reference, host side of GPU calls, the emulator, and GPUs."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from attention import selected_attention
from attention.decode import heuristics
from attention.selected import reference
from attention.selected.decode.family import SELECTED_DECODE
from cute_kernels import explain
from cute_kernels.dtypes import FLOAT8
from cute_kernels.testing.reference import poisoned_empty

from ..emulator.emulate import COMPILER
from ..emulator.ops import on_emulator
from .parts import FP16, FP32, assert_right, cache, captured, nothing_waits, qkv
from .parts import where_fixture as where_fixture
from .selected_parts import lists, seen_of
from .test_fp8_cache import narrow

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = [0, 1, 127, 300, 512]


def call_of(block_size, top, groups=None, lengths=LENGTHS, capacity=512, kind=None, **operands) -> dict:
    """Arguments of a call with a cache; lists name blocks of the whole capacity, and a few that do not exist."""
    call = cache(lengths, capacity, **operands)
    if kind is not None:
        call = narrow(call, kind, ())
    device, lead = call["q"].device, call["q"].shape[::2][:2]
    lead = (*lead,) if groups is None else (*lead, groups)
    indices = lists(*lead, top=top, blocks=-(-capacity // block_size) + 1, device=device)
    indices[-1:] = torch.arange(top, dtype=torch.int32, device=device)  # the longest sequence sees something
    return call | {"indices": indices, "block_size": block_size}


def check(call: dict, **terms) -> None:
    """One call into poisoned memory against FP64, and once more: bitwise identical."""
    with poisoned_empty():
        out, lse = selected_attention(**call, return_lse=True, **terms)
        again = selected_attention(**call, **terms)
    assert torch.equal(out, again)
    call, causal = dict(call), terms.pop("causal", False)
    indices, block_size, seqused_k = (call.pop(name) for name in ("indices", "block_size", "seqused_k"))
    table = call.pop("page_table", None)
    q, scales = call.pop("q"), [call.pop(name, None) for name in ("k_descale", "v_descale")]
    for b, length in enumerate(seqused_k.tolist()):
        one, kv = slice(b, b + 1), []
        for t, scale in zip((call["k"], call["v"]), scales, strict=True):
            if table is not None:
                t = t[table[b, : -(-length // t.shape[2])].long()].transpose(0, 1).flatten(1, 2)[None]
            t = (t if table is not None else t[one])[:, :, :length]
            if scale is not None:
                t = t.double() * scale.double().expand(q.shape[0], t.shape[1])[one, :, None, None]
            kv.append(t)
        seen = seen_of(indices[one], block_size, q.shape[1], length, causal)
        mask = SimpleNamespace(to_dense=lambda *_, seen=seen: seen)
        if scales[0] is None:
            assert_right(out[one], lse[one], q[one], *kv, block_mask=mask, **terms)
        else:
            operands = (t.cpu() for t in (q[one].double(), *kv, indices[one]))
            expected = reference.selected_attention(*operands, block_size, causal=causal, **terms)
            torch.testing.assert_close(out[one].double().cpu(), expected[0], atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[one].double().cpu(), expected[1], atol=1e-3, rtol=1e-3)


CALLS = {  # name -> arguments of call_of, terms of the call, numbers of splits
    "tokens": ({"block_size": 1, "top": 100, "D": 128, "rows": 2}, {}, (1, 3)),
    "QSA": ({"block_size": 4, "top": 60, "H": 24, "D": 256, "page_size": 64}, {"causal": True}, (1, 3)),
    "MSA": ({"block_size": 128, "top": 3, "groups": 2, "H": 32, "D": 128, "page_size": 64}, {"causal": True}, (1, 2)),
    "NSA": ({"block_size": 64, "top": 5, "groups": 2, "H": 32, "D": 192, "Dv": 128}, {"causal": True}, (1, 2)),
    "a list per head": ({"block_size": 16, "top": 8, "groups": 8, "H": 8, "rows": 3}, {"causal": True}, (1, 2)),
    "pages of 16": ({"block_size": 64, "top": 4, "page_size": 16, "rows": 4, "D": 96}, {"causal": True}, (2,)),
    "40 heads a list": ({"block_size": 16, "top": 9, "H": 40, "heads": 1}, {}, (2,)),
    "cap, scale": ({"block_size": 4, "top": 30, "rows": 2, "D": 128}, {"softcap": 3.0, "scale": 0.3}, (3,)),
    "fp16": ({"block_size": 16, "top": 9, "dtype": FP16}, {"causal": True}, (2,)),
    "16 tokens": ({"block_size": 64, "top": 4, "rows": 16}, {"causal": True}, (1,)),
    "E4M3": ({"block_size": 64, "top": 4, "H": 32, "D": 128, "page_size": 64, "kind": E4M3}, {"causal": True}, (1, 3)),
    "E5M2": ({"block_size": 1, "top": 80, "rows": 2, "kind": E5M2}, {"causal": True}, (2,)),
    "E4M3, D 256": ({"block_size": 4, "top": 60, "H": 24, "D": 256, "page_size": 32, "kind": E4M3}, {}, (2,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(where, name):
    operands, terms, splits = CALLS[name]
    call = call_of(**operands, device=where)
    for count in splits:
        with heuristics.splits(count):
            check(call, **terms)


@pytest.mark.parametrize("splits", [1, 2])
def test_sinks(where, splits):
    sinks = torch.tensor([0.5, 3.0, -2.0, -torch.inf], device=where)
    with heuristics.splits(splits):
        check(call_of(4, 12, page_size=16, rows=2, device=where), causal=True, sinks=sinks)


def test_nothing_to_read(where):
    out, lse = selected_attention(**call_of(16, 4, lengths=[0, 0], device=where), return_lse=True)
    assert not out.count_nonzero() and lse.isneginf().all()
    call = call_of(16, 4, device=where)
    assert not selected_attention(**call | {"indices": call["indices"] * 0 - 1}).count_nonzero()
    assert not selected_attention(**call | {"indices": call["indices"][..., :0]}).count_nonzero()


def test_entries_that_are_no_block(where):
    call = call_of(64, 3, lengths=[300, 500], device=where)
    more = [call["indices"].new_full((2, 1, 1), n) for n in (9, -2, 2**31 - 1, -(2**31))]
    with heuristics.splits(1):
        expected = selected_attention(**call)
        found = selected_attention(**call | {"indices": torch.cat([*more, call["indices"]], -1)})
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["QSA", "MSA", "NSA", "a list per head", "E4M3", "E5M2"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_emulated_kernels(arch, name):
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    operands, terms, _ = CALLS[name]
    call = call_of(**operands | {"lengths": [0, 300]})
    expected = selected_attention(**call, return_lse=True, **terms)
    with on_emulator(arch, sms=3), heuristics.splits(2):
        found = selected_attention(**call, return_lse=True, **terms)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), right.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("name", "splits"),
    [("QSA", 3), ("QSA", 7), ("MSA", 8), ("40 heads a list", 6), ("16 tokens", 5), ("E4M3, D 256", 4), ("tokens", 9)],
)
def test_emulated_clusters(name, splits):
    """Splits that combine in a cluster, some of which have no tile; and more than a cluster has."""
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    operands, terms, _ = CALLS[name]
    call = call_of(**operands | {"lengths": [0, 300], "rows": 3 if name == "16 tokens" else operands.get("rows", 1)})
    expected = selected_attention(**call, return_lse=True, **terms)
    with on_emulator("sm_90", sms=3), heuristics.splits(splits), poisoned_empty():
        found, again = (selected_attention(**call, return_lse=True, **terms) for _ in range(2))
    for mine, other, right in zip(found, again, expected, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine.float(), right.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("splits", [1, 2])
def test_emulated_sinks(splits):
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    sinks = torch.tensor([0.5, 3.0, -2.0, -torch.inf])
    call = call_of(4, 12, page_size=16, rows=2, lengths=[0, 300]) | {"sinks": sinks}
    expected = selected_attention(**call, return_lse=True, causal=True)
    with on_emulator("sm_90", sms=3), heuristics.splits(splits):
        found = selected_attention(**call, return_lse=True, causal=True)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), right.float(), atol=2e-2, rtol=2e-2)


# Heuristics


@pytest.mark.parametrize(
    ("H", "heads", "D", "block_size", "top", "groups", "splits"),
    [(24, 2, 256, 4, 513, 1, 6), (64, 4, 128, 128, 16, 4, 6), (64, 4, 128, 64, 16, 4, 6)],
    ids=["QSA", "MSA", "NSA"],
)
def test_plans(H, heads, D, block_size, top, groups, splits):
    """Plans of 8 sequences of 131,072 keys in pages of 64."""
    q, k, v = (torch.empty(n, h, s, D, dtype=torch.bfloat16, device="meta")
               for n, h, s in ((8, H, 1), (16384, heads, 64), (16384, heads, 64)))  # fmt: skip
    indices = torch.empty(8, 1, groups, top, dtype=torch.int32, device="meta")
    cached = {
        "seqused_k": torch.empty(8, dtype=torch.int32, device="meta"),
        "page_table": torch.empty(8, 2048, dtype=torch.int32, device="meta"),
    }
    plan = explain(selected_attention, q, k, v, indices, block_size, causal=True, arch="sm_90", **cached)
    assert plan.facts.cluster == plan.scalars[-1] == splits and not plan.facts.split
    assert f"lists split among {splits} CTAs of a cluster" in str(plan)
    assert plan.facts.smem_bytes <= SELECTED_DECODE.smem_limit(plan.facts)


# torch


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_under_torch_compile(fresh_dynamo, device, backend, return_lse):
    call = call_of(16, 5, page_size=32, rows=2, device=device)

    def attend(q):
        found = selected_attention(**call | {"q": q * 2}, causal=True, return_lse=return_lse)
        return found if return_lse else (found + 1,)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(call["q"]), attend(call["q"]), rtol=1e-2, atol=1e-2)


def test_opcheck():
    from attention.selected.decode import torch_op

    call = call_of(16, 5, page_size=32, rows=2)
    call |= {name: call[name].nan_to_num(0.0) for name in "kv"}
    given = [call.get(name) for name in torch_op.TENSORS]
    op = torch.ops.attention.selected_attention_cached.default
    torch.library.opcheck(op, (call["indices"], 16, *given, True, None, None, True))


def test_meta():
    call = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in call_of(16, 5).items()}
    out, lse = selected_attention(**call, return_lse=True)
    assert out.is_meta and out.shape == call["q"].shape and lse.shape == out.shape[:3]


def test_no_gradient():
    call = call_of(16, 5)
    call["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k.*torch.no_grad"):
        selected_attention(**call)
    with torch.no_grad():
        selected_attention(**call)


@pytest.mark.gpu
def test_a_graph_reads_the_lists_and_lengths_at_each_replay(path):
    call = call_of(4, 60, groups=2, page_size=64, device="cuda")
    attend = lambda: selected_attention(**call, causal=True)  # noqa: E731
    attend()
    with nothing_waits():
        attend()
    graph, out = captured(attend)
    for lengths in ([512, 0, 3, 127, 300], [1, 2, 500, 511, 64]):
        call["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        call["page_table"].copy_(torch.randint(0, len(call["k"]), call["page_table"].shape, dtype=torch.int32))
        call["k"].nan_to_num_(0.0), call["v"].nan_to_num_(0.0)
        call["indices"].copy_(lists(5, 1, 2, top=60, blocks=128, device="cuda"))
        graph.replay()
        assert torch.equal(out, attend())


# Errors

ERRORS = {
    "long": ({"q": qkv(17, 17, B=5)[0], "indices": lists(5, 17, top=2, blocks=2)}, ValueError, "17 tokens.*at most 16"),
    "pairs": ({"seqused_k": torch.zeros(5, 2, dtype=torch.int32)}, ValueError, r"seqused_k must have shape \(5,\)"),
    "no lengths": ({"seqused_k": None, "page_table": torch.zeros(5, 2, dtype=torch.int32)}, ValueError, "requires seq"),
    "a scale": ({"k_descale": torch.ones(1)}, TypeError, "k and v of an FP8 cache"),
    "a scale alone": ({"seqused_k": None, "k_descale": torch.ones(1)}, TypeError, "require a KV cache; pass seqused_k"),
    "packed": ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, TypeError, "cu_seqlens_q.*not supported with a KV"),
    "int64": ({"indices": lists(5, 1, top=2, blocks=2).long()}, TypeError, r"torch.int32.*indices.int\(\)"),
    "a list": ({"indices": [1]}, TypeError, "indices must be a torch.Tensor, got list"),
    "block size": ({"block_size": 32}, ValueError, "one of 1, 4, 16, 64, 128 tokens, got 32"),
    "causal": ({"causal": 1}, TypeError, "causal must be True or False"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic must be True, False or None"),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
    "sinks": ({"sinks": torch.zeros(3, dtype=FP32)}, ValueError, "sinks has shape"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    changes, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        selected_attention(**call_of(16, 4) | changes)


def test_head_dimension_512():
    call = call_of(16, 4, D=512, lengths=[40])
    assert selected_attention(**call).shape == (1, 4, 1, 512)
    with pytest.raises(TypeError, match="head_dim 512 is not supported with a KV cache"):
        explain(selected_attention, **call, arch="sm_90")


def test_fp8_dtypes():
    assert {E4M3, E5M2} <= set(FLOAT8)
