"""A call like an earlier one is checked no more, by runtime.call_plan.PlanCache: and what is not like it still is."""

import pytest
import torch

import attention.dispatch as eager
import cute_kernels
from attention import attention, patterns, reference
from attention.decode import heuristics
from cute_kernels.runtime import call_plan
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.testing.reference import normal

from . import emulate_attention
from .parts import qkv, run, starts


@pytest.fixture(params=["torch's", "ours"], autouse=True)
def test_of_tensors(request, monkeypatch):
    """Both tests of tensors; the plans of other tests are forgotten."""
    if request.param == "ours":
        monkeypatch.setattr(call_plan, "TensorGuards", None)
    monkeypatch.setattr(eager, "_PLANS", PlanCache(operands=3))


def operands(Sq=24, Sk=40, **more):
    """q, k, v and out."""
    q, k, v = qkv(Sq, Sk, **more)
    return q, k, v, torch.zeros_like(q)


def named(*tensors) -> dict:
    return dict(zip(("q", "k", "v", "out"), tensors, strict=False))


def is_right(q, k, v, out=None, **terms) -> bool:
    got, exact = attention(q, k, v, out=out, **terms), reference.attention(q, k, v, **terms)
    return (out is None or got is out) and torch.allclose(got.float(), exact.float(), atol=0.02, rtol=0.02)


def refused(error, text, *args, **terms) -> None:
    with pytest.raises(error, match=text):
        attention(*args, **terms)


def recent(*terms) -> list:
    """The plans that attention's known calls with these terms, among others, may have."""
    found = [plans for key, plans in eager._PLANS.recent.items() if set(terms) <= set(key)]
    return [plan for plans in found for *_, plan in plans]


def forms() -> dict:
    """Every form of a call."""
    q, k, v, out = operands()
    q3, k3, out3 = (t[0].transpose(0, 1).contiguous() for t in (q, k, out))
    cu = {"cu_seqlens_q": starts([8, 16]), "cu_seqlens_k": starts([30, 10])}
    lengths, table = torch.tensor([7, 32], dtype=torch.int32), torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    pages = normal(4, 2, 16, 64)
    return {
        "allocated": named(q, k, v) | {"causal": True},
        "out": named(q, k, v, out) | {"window_size": [3, 3]},
        "k twice": named(q, k, k, out) | {"return_lse": True},
        "packed": named(q3, k3, k3.clone()) | cu,
        "packed out": named(q3, k3, k3, out3) | cu,
        "of as many": named(q3, q3, q3, out3) | dict.fromkeys(cu, cu["cu_seqlens_q"]),
        "lengths": named(q, k, v, out) | {"seqused_k": lengths},
        "spans": named(q, k, v, out) | {"seqused_k": torch.stack([lengths // 2, lengths], -1)},
        "pages": named(q, pages, pages) | {"seqused_k": lengths, "page_table": table},
        "blocks": named(q, k, v, out) | {"block_mask": patterns.causal((24, 40))},
    }


def without_kernels(monkeypatch) -> None:
    """Calls are planned as on a GPU; their kernels do nothing."""
    emulate_attention.install(monkeypatch)
    monkeypatch.setattr("cute_kernels.runtime.families.function_for", lambda facts: lambda *arguments: None)


@pytest.mark.parametrize("form", forms())
def test_a_call_like_an_earlier_one_is_not_checked_again(form, monkeypatch):
    call = forms()[form]
    if form == "blocks":
        without_kernels(monkeypatch)
    first = run(**call)
    monkeypatch.setattr(PlanCache, "checked", None)
    second = run(**call | ({"window_size": (3, 3)} if form == "out" else {}))
    assert all(torch.equal(a, b) for a, b in zip(*((t if type(t) is tuple else (t,)) for t in (first, second))))


def test_the_same_tensors_changed_in_place(emulated):
    """Everything about a tensor object may change: shape, strides, alignment and dtype."""
    q, k, v, out = operands(Sk=24, H=2)
    assert is_right(q, k, v, out, causal=True)
    k.data = normal(2, 2, 56, 64)
    refused(ValueError, "differ in heads or length", q, k, v, causal=True, out=out)
    v.set_(normal(2, 2, 56, 64))
    assert is_right(q, k, v, out, causal=True)
    q.set_(normal(2, 24, 2, 64).transpose(1, 2))
    assert not q.is_contiguous() and is_right(q, k, v, out, causal=True)
    q.set_(normal(2, 2, 24, 66)[..., :64])
    assert is_right(q, k, v, out, causal=True), "rows of 132 bytes, which are copied"
    aligned, odd = (torch.zeros(6145).bfloat16()[i : i + 6144].view(2, 2, 24, 64) for i in (0, 1))
    for memory in (odd, aligned, odd):
        q.set_(memory.copy_(normal(2, 2, 24, 64)))
        assert is_right(q, k, v, out, causal=True), "at an odd address, q is copied"
        assert is_right(q, k, v, out, causal=True, scale=0.1)
    (usual,) = recent(0.1)
    assert not usual.views, "at an aligned address q is not copied, though one was before"
    out.set_(torch.zeros(2, 2, 24, 66).bfloat16()[..., :64])
    refused(ValueError, "out's address and strides", q, k, v, causal=True, out=out)
    out.resize_(2, 2, 23, 64)
    refused(ValueError, "out has shape", q, k, v, causal=True, out=out)
    out = torch.zeros(2, 2, 24, 64).bfloat16()
    assert is_right(q, k, v, out, causal=True)
    refused(ValueError, "out's address", q, k, v, causal=True, out=odd)
    q.resize_(0, 2, 24, 64)
    refused(ValueError, "q, k and v must have the same batch size, got 0, 2 and 2", q, k, v, causal=True, out=out)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_another_tensor_in_one_place(name, emulated):
    call = named(*operands())
    t = call[name]
    attention(**call)
    for dtype in (torch.float16, torch.float64 if name == "out" else torch.float32):
        refused(TypeError, str(dtype), **call | {name: t.to(dtype)})
    refused(ValueError, "meta", **call | {name: t.to("meta")})
    refused(TypeError, "strided", **call | {name: t.to_sparse()})
    for value in ([1.0], "tensor", t.tolist()):
        refused(TypeError, f"{name} must be a torch.Tensor", **call | {name: value})
    refused(ValueError, f"{name} has shape", **call | {name: t[0]})
    attention(**call)


def test_tensors_in_other_roles():
    """As many tensors of the same metadata, given as something else."""
    q, k, v, out = operands(Sk=16)
    lengths, table = torch.tensor([7, 16], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    attention(q, k, v, out=out)
    refused(TypeError, "seqused_k must be torch.int32, got torch.bfloat16", q, k, v, seqused_k=out)
    attention(q, k, v, seqused_k=lengths)
    refused(ValueError, "page_table requires seqused_k", q, k, v, page_table=table)
    refused(ValueError, "seqused_k must have shape", q, k, v, seqused_k=table)
    refused(TypeError, "out must be a torch.Tensor", q, k, v, out=1)


def test_out_in_an_operand(emulated):
    memory = torch.zeros(6, 4, 24, 64).bfloat16()
    call = {"q": memory[:2], "k": normal(2, 4, 24, 64), "v": normal(2, 4, 24, 64)}
    for name in call:
        around = dict.fromkeys(("q", "k", "v"), normal(2, 4, 24, 64)) | {name: memory[2:4]}
        for i in (0, 4):
            attention(**around, out=memory[i : i + 2])
            attention(**around, out=memory[i : i + 2])
        for i in (1, 2, 3):
            refused(ValueError, "out shares memory with an input", **around, out=memory[i : i + 2])
    rows = torch.zeros(2, 24, 2, 4, 64).bfloat16()  # q and out take turns in memory
    q, out = rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2)
    for _ in range(2):
        assert is_right(q, call["k"], call["v"], out)
        refused(ValueError, "out shares memory with an input", q, call["k"], call["v"], out=q)


@pytest.mark.parametrize("form", ["out", "packed out", "blocks"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_gradient_asked_for_later(form, name, monkeypatch):
    call = {key: x.clone() if key in ("q", "k", "v", "out") else x for key, x in forms()[form].items()}
    if form == "blocks":
        without_kernels(monkeypatch)
    for _ in range(2):
        run(**call)
        call[name].requires_grad_()
        for _ in range(2):
            with torch.no_grad():
                run(**call)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="gradient"):
                run(**call)
        for _ in range(2):
            with torch.inference_mode():
                run(**call)
        call[name].requires_grad_(False)


def test_a_path_or_splits_forced_later(emulated):
    q, k, v, out = operands()

    def facts() -> list:
        assert is_right(q, k, v, out)
        return [plan.facts for plan in recent()]

    assert [f.path for f in facts()] == ["sm_90"]
    with cute_kernels.path("sm_80"):
        assert [f.path for f in facts()] == ["sm_90", "sm_80"]
    with heuristics.splits(3):
        assert [getattr(f, "split", False) for f in facts()] == [False, False, True]


def test_more_shapes_than_are_tried():
    calls = [operands(Sk=24 + i) for i in range(call_plan.MOST_RECENT + 3)]
    for q, k, v, out in 2 * calls:
        assert is_right(q, k, v, out)
    assert len(recent()) == call_plan.MOST_RECENT
    assert len(eager._PLANS.plans) == len(calls)


def test_terms_of_the_wrong_kind_after_right_ones():
    q, k, v, out = operands()
    attention(q, k, v, out=out, scale=0.5)
    for scale in (torch.tensor(0.5), [0.5], "0.5"):
        refused(TypeError, "scale must be a Python number", q, k, v, out=out, scale=scale)
    refused(TypeError, "causal must be True or False", q, k, v, out=out, scale=0.5, causal=[])


@pytest.mark.gpu
def test_streams_and_devices():
    """The same call on a stream of its own, where its tensors are made; and on another device, where there is one."""
    for device in range(torch.cuda.device_count()):
        for _ in range(2):
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                q, k, v, out = (t.to(f"cuda:{device}") for t in operands(512, 512, B=1))
                assert is_right(q, k, v, out, causal=True)
    if torch.cuda.device_count() > 1:
        refused(
            ValueError,
            "k is on cuda:0, the others on cuda:1",
            q.to("cuda:1"),
            k.to("cuda:0"),
            v.to("cuda:1"),
            causal=True,
        )
