"""Attention sinks: a logit per head that takes part in the softmax, against scores with one more column."""

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention
from cute_kernels import explain

from .attention_parts import BF16, FP64, cache, packed, qkv, starts


def plainly(q, k, v, sinks, seen=None):
    """(out, lse) with a column of the sinks, whose value is 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)


def causal(rows, cols):
    return torch.arange(cols) <= torch.arange(rows)[:, None] + (cols - rows)


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_sink_is_a_column_without_a_value():
    q, k, v = qkv(20, 30, 16, dtype=FP64)
    sinks = torch.tensor([0.5, -2.0, 50.0, -torch.inf], dtype=FP64)
    close(attention(q, k, v, causal=True, sinks=sinks, return_lse=True), plainly(q, k, v, sinks, causal(20, 30)))
    out = torch.full_like(q, torch.nan)
    assert attention(q, k, v, sinks=sinks, out=out) is out
    close([out], plainly(q, k, v, sinks)[:1])


def test_rows_that_see_nothing_see_their_sink():
    q, k, v = qkv(30, 20, 16, dtype=FP64)
    sinks = torch.tensor([0.5, -2.0, 3.0, -torch.inf], dtype=FP64)
    out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :, :10].any() and torch.equal(lse[0, :, 0], sinks)


def test_gradients_reach_the_sinks():
    q, k, v = (t.requires_grad_() for t in qkv(5, 7, 4, dtype=FP64))
    sinks = torch.randn(4, dtype=FP64, requires_grad=True)

    def call(q, k, v, sinks):
        return attention(q, k, v, causal=True, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


def test_sinks_of_every_form():
    sinks = torch.randn(4)
    call = packed((5, 9), (8, 9), D=16)
    rows = starts((5, 9)).tolist()
    out, lse = attention(**call, sinks=sinks, return_lse=True)
    assert lse.shape == (4, 14)
    whole, _ = attention(**call, return_lse=True)
    assert out.dtype == whole.dtype and out[: rows[1]].float().norm() < whole[: rows[1]].float().norm()
    q, k, v = qkv(1, 64, 16)
    same = {"seqlens_k": torch.tensor([64, 64], dtype=torch.int32)}
    close([attention(q, k, v, **same, sinks=sinks)], [attention(q, k, v, sinks=sinks)])
    assert attention(**cache([64, 5], 64), sinks=sinks).isfinite().all()
    q, k, v = qkv(200, 300, 16)
    mask = BlockMask.from_blocks(torch.tensor([[True, False, True], [False, True, False]]), lengths=(200, 300))
    out = block_sparse_attention(q, k, v, mask, sinks=sinks)
    want, _ = plainly(*(t.double() for t in (q, k, v)), sinks.double(), mask.to_dense())
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.01)


def test_sinks_under_torch_compile():
    q, k, v = (t.requires_grad_() for t in qkv(20, 30, 16, dtype=torch.float32))
    sinks = torch.randn(4, requires_grad=True)

    def call(q, k, v, sinks):
        return attention(q, k, v, causal=True, sinks=sinks)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = q, k, v, sinks
    close(*(torch.autograd.grad(f(*inputs).sin().sum(), inputs) for f in (compiled, call)))


def test_what_sinks_must_be():
    q, k, v = qkv(4, 5, 16)
    for sinks, error, text in (
        (torch.zeros(3), ValueError, r"sinks has shape \(3,\); it must be \(4,\)"),
        (torch.zeros(4, dtype=torch.int32), TypeError, "must be floating-point"),
        ([0.0] * 4, TypeError, "sinks"),
    ):
        with pytest.raises(error, match=text):
            attention(q, k, v, sinks=sinks)
    with pytest.raises(RuntimeError, match="requires one"):
        attention(q, k, v, sinks=torch.zeros(4, requires_grad=True), out=torch.empty_like(q, dtype=BF16))
    assert "one more pass over out" in str(explain(attention, q, k, v, sinks=torch.zeros(4)))
