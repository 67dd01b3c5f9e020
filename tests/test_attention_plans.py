"""A call like an earlier one is checked no more, by runtime.call_plan.PlanCache: and what is not like it still is."""

import pytest
import torch

import attention.eager as eager
import cute_kernels
from attention import BlockMask, attention, block_sparse, block_sparse_attention, packed, reference
from attention.decode import choose
from cute_kernels.runtime import call_plan
from cute_kernels.runtime.call_plan import PlanCache

from . import emulate_attention
from .reference import normal

FULL = torch.ones(1, 1, dtype=torch.bool)


@pytest.fixture(params=["torch's", "ours"], autouse=True)
def test_of_tensors(request, monkeypatch):
    """Both tests of tensors; the plans of other tests are forgotten."""
    if request.param == "ours":
        monkeypatch.setattr(call_plan, "TensorGuards", None)
    for module in (eager, packed, block_sparse):
        monkeypatch.setattr(module, "_PLANS", PlanCache(operands=3))


def operands(B=2, H=4, heads=2, Sq=24, Sk=40, D=64):
    """q, k, v and out."""
    return normal(B, H, Sq, D), normal(B, heads, Sk, D), normal(B, heads, Sk, D), torch.zeros(B, H, Sq, D).bfloat16()


def is_right(q, k, v, out=None, **terms) -> bool:
    got, exact = attention(q, k, v, out=out, **terms), reference.attention(q, k, v, **terms)
    return (out is None or got is out) and torch.allclose(got.float(), exact.float(), atol=0.02, rtol=0.02)


def recent(*terms) -> list:
    """The plans that attention's known calls with these terms, among others, may have."""
    found = [plans for key, plans in eager._PLANS.recent.items() if set(terms) <= set(key)]
    return [plan for plans in found for *_, plan in plans]


def forms() -> dict:
    """Every form of a call."""
    q, k, v, out = operands()
    q3, k3, out3 = (t[0].transpose(0, 1).contiguous() for t in (q, k, out))
    starts = torch.tensor([0, 8, 24], dtype=torch.int32), torch.tensor([0, 30, 40], dtype=torch.int32)
    cu = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    lengths, table = torch.tensor([7, 32], dtype=torch.int32), torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    pages = normal(4, 2, 16, 64)
    mask = BlockMask.from_blocks(FULL, lengths=(24, 40))
    return {
        "allocated": lambda: attention(q, k, v, causal=True),
        "out": lambda: attention(q, k, v, out=out, window=[3, 3]),
        "k twice": lambda: attention(q, k, k, out=out, return_lse=True),
        "packed": lambda: attention(q3, k3, k3.clone(), **cu),
        "packed out": lambda: attention(q3, k3, k3, **cu, out=out3),
        "of as many": lambda: attention(q3, q3, q3, cu_seqlens_q=starts[0], cu_seqlens_k=starts[0], out=out3),
        "lengths": lambda: attention(q, k, v, seqlens_k=lengths, out=out),
        "pages": lambda: attention(q, pages, pages, seqlens_k=lengths, block_table=table),
        "blocks": lambda: block_sparse_attention(q, k, v, mask, causal=True, out=out),
    }


@pytest.mark.parametrize("form", forms())
def test_a_call_like_an_earlier_one_is_not_checked_again(form, monkeypatch):
    call = forms()[form]
    if form == "blocks":
        emulate_attention.install(monkeypatch)
        monkeypatch.setattr("cute_kernels.runtime.families.function_for", lambda facts: lambda *arguments: None)
    first = call()
    monkeypatch.setattr(PlanCache, "checked", None)
    second = call()
    assert all(torch.equal(a, b) for a, b in zip(*((t if type(t) is tuple else (t,)) for t in (first, second))))


def test_the_same_tensors_changed_in_place(emulated):
    """Of a tensor object everything may change: shape, strides, alignment and dtype."""
    q, k, v, out = operands(Sk=24, H=2)
    assert is_right(q, k, v, out, causal=True)
    k.data = normal(2, 2, 56, 64)
    with pytest.raises(ValueError, match="differ in heads or length"):
        attention(q, k, v, causal=True, out=out)
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
    with pytest.raises(ValueError, match="out's address and strides"):
        attention(q, k, v, causal=True, out=out)
    out.resize_(2, 2, 23, 64)
    with pytest.raises(ValueError, match="out has shape"):
        attention(q, k, v, causal=True, out=out)
    out = torch.zeros(2, 2, 24, 64).bfloat16()
    assert is_right(q, k, v, out, causal=True)
    with pytest.raises(ValueError, match="out's address"):
        attention(q, k, v, causal=True, out=odd)
    q.resize_(0, 2, 24, 64)
    with pytest.raises(ValueError, match="batches of 0, 2 and 2 items"):
        attention(q, k, v, causal=True, out=out)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_another_tensor_in_one_place(name, emulated):
    call = dict(zip(("q", "k", "v", "out"), operands(), strict=True))
    t = call[name]
    attention(**call)
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(TypeError, match=str(dtype)):
            attention(**call | {name: t.to(dtype)})
    with pytest.raises(ValueError, match="meta"):
        attention(**call | {name: t.to("meta")})
    with pytest.raises(TypeError, match="strided"):
        attention(**call | {name: t.to_sparse()})
    for value in ([1.0], "tensor", t.tolist()):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor"):
            attention(**call | {name: value})
    with pytest.raises(ValueError, match=f"{name} has shape"):
        attention(**call | {name: t[0]})
    attention(**call)


def test_tensors_in_other_roles():
    """As many tensors of the same metadata, given as something else."""
    q, k, v, out = operands(Sk=16)
    lengths, table = torch.tensor([7, 16], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    attention(q, k, v, out=out)
    with pytest.raises(TypeError, match="seqlens_k is torch.bfloat16"):
        attention(q, k, v, seqlens_k=out)
    attention(q, k, v, seqlens_k=lengths)
    with pytest.raises(ValueError, match="a block_table needs seqlens_k"):
        attention(q, k, v, block_table=table)
    with pytest.raises(ValueError, match="seqlens_k has shape"):
        attention(q, k, v, seqlens_k=table)
    with pytest.raises(TypeError, match="out must be a torch.Tensor"):
        attention(q, k, v, out=1)


def test_out_in_an_operand(emulated):
    memory = torch.zeros(6, 4, 24, 64).bfloat16()
    call = {"q": memory[:2], "k": normal(2, 4, 24, 64), "v": normal(2, 4, 24, 64)}
    for name in call:
        around = dict.fromkeys(("q", "k", "v"), normal(2, 4, 24, 64)) | {name: memory[2:4]}
        for i in (0, 4):
            attention(**around, out=memory[i : i + 2])
            attention(**around, out=memory[i : i + 2])
        for i in (1, 2, 3):
            with pytest.raises(ValueError, match="out shares memory with an operand"):
                attention(**around, out=memory[i : i + 2])
    rows = torch.zeros(2, 24, 2, 4, 64).bfloat16()  # q and out take turns in memory
    q, out = rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2)
    for _ in range(2):
        assert is_right(q, call["k"], call["v"], out)
        with pytest.raises(ValueError, match="out shares memory with an operand"):
            attention(q, call["k"], call["v"], out=q)


@pytest.mark.parametrize("form", ["plain", "packed", "blocks"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_gradient_asked_for_later(form, name, monkeypatch):
    call = dict(zip(("q", "k", "v", "out"), operands(B=1), strict=True))
    if form == "packed":
        call = {name: t[0].transpose(0, 1) for name, t in call.items()}
        call |= {f"cu_seqlens_{x}": torch.tensor([0, n], dtype=torch.int32) for x, n in (("q", 24), ("k", 40))}
    mask = BlockMask.from_blocks(FULL, lengths=(24, 40))
    if form == "blocks":
        emulate_attention.install(monkeypatch)
        monkeypatch.setattr("cute_kernels.runtime.families.function_for", lambda facts: lambda *arguments: None)

    def run():
        return block_sparse_attention(block_mask=mask, **call) if form == "blocks" else attention(**call)

    for _ in range(2):
        run()
        call[name].requires_grad_()
        with torch.no_grad():
            run()
            run()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="gradient"):
                run()
        with torch.inference_mode():
            run()
            run()
        call[name].requires_grad_(False)


def test_a_path_or_splits_forced_later(emulated):
    q, k, v, out = operands()

    def facts() -> list:
        assert is_right(q, k, v, out)
        return [plan.facts for plan in recent()]

    assert [f.path for f in facts()] == ["sm_90"]
    with cute_kernels.path("sm_80"):
        assert [f.path for f in facts()] == ["sm_90", "sm_80"]
    with choose.splits(3):
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
        with pytest.raises(TypeError, match="scale must be a Python number"):
            attention(q, k, v, out=out, scale=scale)
    with pytest.raises(TypeError, match="causal must be True or False"):
        attention(q, k, v, out=out, scale=0.5, causal=[])


@pytest.mark.gpu
def test_streams_and_devices():
    """The same call on a stream of its own, where its tensors are made; and on another device, where there is one."""
    for device in range(torch.cuda.device_count()):
        for _ in range(2):
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                q, k, v, out = (t.to(f"cuda:{device}") for t in operands(B=1, Sq=512, Sk=512))
                assert is_right(q, k, v, out, causal=True)
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="k is on cuda:0, the others on cuda:1"):
            attention(q.to("cuda:1"), k.to("cuda:0"), v.to("cuda:1"), causal=True)
