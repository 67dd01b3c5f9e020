"""Attention sinks: a logit for each head that takes part in the softmax, against scores with one more column.

Gradients of kernels: test_attention_gradients.
"""

import contextlib
import shutil

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, create_block_mask
from attention.decode import heuristics
from cute_kernels import explain
from cute_kernels.testing.reference import attention_plainly

from ..emulator import emulate
from ..emulator.ops import on_emulator
from .parts import (  # noqa: F401 (where_fixture is used by name)
    BF16,
    CAUSAL,
    FP16,
    FP64,
    cache,
    check,
    packed,
    qkv,
    where_fixture,
)

LOGITS = [0.5, 3.0, -2.0, -torch.inf, 40.0, 0.0, 1.0, -1.0]


def sinks_of(heads, dtype=torch.float32, device="cpu"):
    return torch.tensor(LOGITS[:heads], dtype=dtype, device=device)


def named(q, k, v, **terms):
    return {"q": q, "k": k, "v": v, **terms}


def blocks(device, sides, **options):
    rows, cols = 200, 300
    table = torch.zeros(-(-rows // sides[0]), -(-cols // sides[1]), dtype=torch.bool)
    table[0, ::2] = True  # the other rows see nothing, but those of mask_mod's
    return BlockMask.from_blocks(table.to(device), sides, lengths=(rows, cols), **options)


# name -> (a function of the device: the call, dtype of the sinks, splits that are forced)
CALLS = {
    "dense": (lambda d: named(*qkv(200, 264, B=1, device=d)), torch.float32, None),
    "rows that see nothing": (lambda d: named(*qkv(300, 100, device=d), **CAUSAL), BF16, None),
    "window": (lambda d: named(*qkv(200, 300, 128, H=8, B=1, device=d), window_size=(60, 3), softcap=4.0), FP16, None),
    "fp16, 192 and 128": (lambda d: named(*qkv(130, 200, 192, 128, B=1, dtype=FP16, device=d), **CAUSAL), FP16, None),
    "packed": (lambda d: packed((70, 0, 130, 5), (100, 30, 100, 0), device=d, more=(9, 0)) | CAUSAL, BF16, None),
    "blocks": (lambda d: named(*qkv(200, 300, device=d), block_mask=blocks(d, (128, 128))), torch.float32, None),
    "blocks 64": (lambda d: named(*qkv(200, 300, 128, device=d), block_mask=blocks(d, (64, 64))), BF16, None),
    "few queries": (lambda d: named(*qkv(3, 300, H=8, device=d), **CAUSAL), torch.float32, 1),
    "few queries, split": (lambda d: named(*qkv(3, 300, 128, H=8, device=d), **CAUSAL), BF16, 3),
    "cache": (lambda d: cache((230, 0, 3), 256, H=8, rows=2, device=d) | CAUSAL, BF16, 1),
    "pages, split": (lambda d: cache((230, 0, 3), 256, H=8, page_size=64, device=d), torch.float32, 3),
    "512": (lambda d: named(*qkv(70, 130, 512, B=1, H=4, device=d), window_size=(90, 3)), BF16, None),
    "512, few queries": (lambda d: named(*qkv(1, 130, 512, B=1, H=4, device=d)), torch.float32, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_sink_is_a_column_without_a_value(where, name):
    make, dtype, splits = CALLS[name]
    call = make(where)
    with heuristics.splits(splits):
        check(**call, sinks=sinks_of(call["q"].shape[1], dtype, where))


@pytest.mark.parametrize("path", [pytest.param(p, marks=getattr(pytest.mark, p)) for p in ("sm_80", "sm_90")])
@pytest.mark.parametrize("name", CALLS)
def test_a_sink_of_the_kernels(path, name):
    if shutil.which(emulate.COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    make, dtype, splits = CALLS[name]
    call = make("cpu")
    with on_emulator("sm_90", sms=3, path=path), heuristics.splits(splits):
        check(**call, sinks=sinks_of(call["q"].shape[1], dtype))


def test_rows_that_see_nothing_see_their_sink():
    q, k, v = qkv(30, 20, 16, dtype=FP64)
    out, lse = attention(q, k, v, causal=True, sinks=sinks_of(4, FP64), return_lse=True)
    assert not out[:, :, :10].any() and torch.equal(lse[0, :, 0], sinks_of(4, FP64))
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], sinks=sinks_of(4), return_lse=True)  # no column at all
    assert not out.any() and torch.equal(lse[0, :, 0], sinks_of(4))


def test_a_sink_far_above_all_scores():
    """O is 0 and LSE the sink, in fp64 and in fp32, where e^sink is inf."""
    q, k, v = qkv(5, 7, 16, dtype=torch.float32)
    out, lse = attention(q, k, v, sinks=torch.full((4,), 1000.0), return_lse=True)
    assert not out.any() and torch.equal(lse, torch.full_like(lse, 1000.0))
    if shutil.which(emulate.COMPILER) is not None:
        q, k, v = qkv(200, 264, B=1)
        with on_emulator("sm_90"):
            out, lse = attention(q, k, v, sinks=torch.full((4,), 1000.0), return_lse=True)
        assert not out.any() and torch.equal(lse, torch.full_like(lse, 1000.0))


@pytest.mark.parametrize("name", ["attention", "packed", "blocks", "nothing to see"])
def test_gradients_reach_the_sinks(name):
    """For the reference, by gradcheck; packed with rows of no sequence, whose LSE has none."""
    sinks, more = torch.randn(4, dtype=FP64, requires_grad=True), {}
    if name == "packed":
        call = packed((5, 0, 9), (7, 2, 9), D=4, more=(2, 2))
        q, k, v = (call.pop(key).double().requires_grad_() for key in "qkv")
        more = call
    else:
        q, k, v = (t.requires_grad_() for t in qkv(5, 0 if name == "nothing to see" else 7, 4, dtype=FP64))
    mask = create_block_mask(lambda b, h, q, kv: (q + kv) % 3 > 0, None, None, 5, 7)

    def call(q, k, v, sinks):
        if name == "blocks":
            return block_sparse_attention(q, k, v, mask, sinks=sinks, return_lse=True)
        out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True, **more)
        return out, lse[:, :14] if more else lse

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


def test_sinks_alone_want_a_gradient():
    q, k, v = qkv(130, 150, 64)
    sinks = sinks_of(4, BF16).requires_grad_()
    found = []
    for context in (contextlib.nullcontext(), on_emulator("sm_90")):
        if context.__class__ is not contextlib.nullcontext and shutil.which(emulate.COMPILER) is None:
            pytest.skip("the emulator needs a C++ compiler")
        with context:
            out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
            found.append(torch.autograd.grad([out.float().sum() + lse.sum()], [sinks])[0])
            assert found[-1].dtype is BF16
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
    with pytest.raises(RuntimeError, match="v or sinks requires one"):
        attention(q, k, v, seqused_k=torch.tensor([150, 7], dtype=torch.int32), sinks=sinks)


@pytest.mark.parametrize("op", ["attention", "block_sparse_attention"])
def test_sinks_under_torch_compile(op):
    q, k, v = (t.requires_grad_() for t in qkv(20, 30, 16, dtype=torch.float32))
    sinks = torch.randn(4, requires_grad=True)
    mask = BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool), lengths=(20, 30))

    def call(q, k, v, sinks):
        if op == "attention":
            return attention(q, k, v, causal=True, sinks=sinks)
        return block_sparse_attention(q, k, v, mask, causal=True, sinks=sinks)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for inputs in ((q, k, v, sinks), (q, k, v), (sinks,)):
        held = [t if any(t is x for x in inputs) else t.detach() for t in (q, k, v, sinks)]
        got, want = (torch.autograd.grad(f(*held).sin().sum(), inputs) for f in (compiled, call))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_the_reference_is_a_column_without_a_value():
    q, k, v = qkv(20, 30, 16, dtype=FP64)
    seen = torch.arange(30) <= torch.arange(20)[:, None] + 10
    found = attention(q, k, v, causal=True, sinks=sinks_of(4, FP64), return_lse=True)
    for a, b in zip(found, attention_plainly(q, k, v, seen, sinks=sinks_of(4, FP64)), strict=True):
        torch.testing.assert_close(a, b)


def test_what_sinks_must_be():
    q, k, v = qkv(4, 5, 64)
    for sinks, error, text in (
        (torch.zeros(3), ValueError, r"sinks has shape \(3,\); it must be \(4,\)"),
        (torch.zeros(4, dtype=torch.int32), TypeError, "it must be torch.float32, .* or torch.float64 on the CPU"),
        ([0.0] * 4, TypeError, "sinks"),
    ):
        with pytest.raises(error, match=text):
            attention(q, k, v, sinks=sinks)
    with pytest.raises(RuntimeError, match="requires one"):
        attention(q, k, v, sinks=torch.zeros(4, requires_grad=True), out=torch.empty_like(q, dtype=BF16))
    with on_emulator("sm_90"):
        assert "sinks: of bfloat16, in the softmax" in str(explain(attention, q, k, v, sinks=sinks_of(4, BF16)))
        with pytest.raises(TypeError, match="sinks is torch.float64; it must be .* or torch.float16, a logit"):
            attention(q, k, v, sinks=sinks_of(4, FP64))
