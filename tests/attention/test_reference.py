"""The reference attention against torch's own, against the whole matrix of scores, and in parts that bound memory."""

import math

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import patterns, reference
from attention.masks.block_mask import BlockMask
from attention.reference import attention, attention_packed
from cute_kernels.testing.reference import attention_plainly, band_mask

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def inputs(batch=2, heads=4, kv_heads=4, sq=37, sk=53, d=16, dv=16, dtype=torch.float64):
    shapes = (batch, heads, sq, d), (batch, kv_heads, sk, d), (batch, kv_heads, sk, dv)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def close(results, expected, dtype=torch.float64) -> bool:
    pairs = zip(results, expected, strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype]) for a, b in pairs)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", CLOSE)
def test_as_torch(dtype, kv_heads):
    q, k, v = inputs(kv_heads=kv_heads, dv=24, dtype=dtype)
    wide = [t.double() for t in (q, k, v)]
    out, lse = attention(q, k, v, return_lse=True)
    assert out.dtype is dtype and lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert close([out], [nnf.scaled_dot_product_attention(*wide, enable_gqa=True)], dtype)
    square = [(t[:, :, :37], w[:, :, :37]) for t, w in zip((q, k, v), wide, strict=True)]
    out = attention(*(t for t, _ in square), causal=True, scale=0.3)
    terms = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    assert close([out], [nnf.scaled_dot_product_attention(*(w for _, w in square), **terms)], dtype)


bounds = st.none() | st.integers(0, 9)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12), st.integers(0, 12), st.booleans(), st.none() | st.tuples(bounds, bounds),
    st.sampled_from([None, 1.5]), st.sampled_from([None, 0.7]), st.sampled_from([1, 2, 4]), st.integers(1, 200),
)  # fmt: skip
def test_as_the_formula(sq, sk, causal, window, softcap, scale, kv_heads, chunk):
    call = inputs(heads=4, kv_heads=kv_heads, sq=sq, sk=sk, d=3, dv=5)
    left, right = window or (None, None)
    seen = band_mask(sq, sk, left, right) & (band_mask(sq, sk, None, 0) | (not causal))
    scores, before = {"softcap": softcap, "scale": scale}, reference.CHUNK
    try:
        reference.CHUNK = chunk
        out, lse = attention(*call, causal=causal, window_size=window, return_lse=True, **scores)
    finally:
        reference.CHUNK = before
    assert close((out, lse), attention_plainly(*call, seen, **scores))
    empty = ~seen.any(-1)
    assert (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -math.inf).all()


def test_large_scores_do_not_overflow():
    q, k, v = inputs(dtype=torch.float32)
    out, lse = attention(q * 1e3, k, v, return_lse=True)
    scores = (q.double() * 1e3) @ k.double().mT / 4
    assert out.isfinite().all() and torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-5)


@pytest.mark.parametrize("sq, sk, batch", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (3, 3, 0)])
def test_without_elements(sq, sk, batch):
    out, lse = attention(*inputs(sq=sq, sk=sk, batch=batch), causal=True, return_lse=True)
    assert out.shape == (batch, 4, sq, 16) and (out == 0).all() or batch == 0
    assert lse.shape == (batch, 4, sq) and (lse == -math.inf).all()


def test_strides_do_not_matter():
    call = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs()]
    assert close([attention(*call, causal=True)], [attention(*(t.contiguous() for t in call), causal=True)])


def test_gradients():
    small = [t.requires_grad_() for t in inputs(1, 2, 1, 5, 3, 3, 2)]  # two rows see nothing
    assert torch.autograd.gradcheck(lambda *t: attention(*t, causal=True, softcap=2.0), small)


def by_item(b, h, q, kv):
    return (q + kv + h) % (b + 2) != 0


LENGTHS = {"lengths": (150, 200)}
MASKS = {
    "of all": lambda: patterns.sliding_window((150, 200), (40, 10), (64, 64)),
    "of heads": lambda: BlockMask.from_blocks(torch.rand(4, 3, 2) < 0.5, (64, 128), **LENGTHS),
    "of items": lambda: patterns.documents(torch.randint(3, (2, 150)), torch.randint(3, (2, 200)), blocksize=(64, 64)),
    "elements": lambda: BlockMask.from_blocks(torch.ones(3, 2) > 0, (64, 128), **LENGTHS, mask_mod=by_item),
}


@pytest.mark.parametrize("chunk", [1, 30_000, 2**24])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", MASKS)
def test_block_mask(name, kv_heads, chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    call, mask = inputs(kv_heads=kv_heads, sq=150, sk=200, d=8, dv=8), MASKS[name]()
    dense = mask.to_dense()
    if name == "elements":
        b, h, row = torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1), torch.arange(150)[:, None]
        dense = by_item(b, h, row, torch.arange(200))
    for causal in (False, True):
        seen = dense & (band_mask(150, 200, None, 0) | (not causal))
        found = attention(*call, block_mask=mask, causal=causal, return_lse=True)
        assert close(found, attention_plainly(*call, seen))


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning", "ignore:return_lse is:FutureWarning")
def test_block_mask_as_flex_attention():
    call = inputs(sq=200, sk=300, dtype=torch.float32)
    mask = create_block_mask(lambda b, h, q, kv: (q - kv).abs() < 90 + 10 * h, 1, 4, 200, 300, device="cpu")
    expected = flex_attention(*call, block_mask=mask, return_lse=True)
    found = attention(*call, block_mask=BlockMask.from_flex(mask), return_lse=True)
    assert close(found, expected, torch.float32)


@pytest.mark.parametrize("starts", [[0], [0, 0, 0]])
def test_packed_of_nothing(starts):
    q, k, v = (torch.zeros(0, 2, 4) for _ in range(3))
    out, lse = attention_packed(q, k, v, torch.tensor(starts, dtype=torch.int32), return_lse=True)
    assert out.shape == (0, 2, 4) and lse.shape == (2, 0)
