"""The reference attention: against torch's own, against explicit formulas, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import patterns, reference
from attention.masks.block_mask import BlockMask
from attention.reference import attention, attention_packed

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def inputs(batch=2, heads=4, kv_heads=4, sq=37, sk=53, d=16, dv=16, dtype=torch.float64):
    shapes = (batch, heads, sq, d), (batch, kv_heads, sk, d), (batch, kv_heads, sk, dv)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def close(a, b, dtype=torch.float64):
    return torch.allclose(a.double(), b.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


def explicit(q, k, v, seen, softcap=None, scale=None):
    """O and LSE in fp64, one row at a time."""
    (batch, heads, sq, d), group = q.shape, q.shape[1] // k.shape[1]
    out, lse = q.new_zeros(batch, heads, sq, v.shape[-1]), q.new_full((batch, heads, sq), -math.inf)
    seen = seen.expand(batch, heads, -1, -1)
    for b in range(batch):
        for h in range(heads):
            for i in range(sq):
                mine = seen[b, h, i]
                s = k[b, h // group, mine] @ q[b, h, i] * (d**-0.5 if scale is None else scale)
                s = s if softcap is None else softcap * (s / softcap).tanh()
                if len(s):
                    lse[b, h, i] = s.exp().sum().log()
                    out[b, h, i] = s.softmax(0) @ v[b, h // group, mine]
    return out, lse


def band(sq, sk, left, right):
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    return (distance >= -(10**6 if left is None else left)) & (distance <= (10**6 if right is None else right))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", CLOSE)
def test_as_torch(dtype, kv_heads):
    q, k, v = inputs(kv_heads=kv_heads, dv=24, dtype=dtype)
    out = attention(q, k, v)
    expected = nnf.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    assert out.dtype is dtype and close(out, expected, dtype)
    square = attention(q, k[:, :, :37], v[:, :, :37], causal=True, scale=0.3)
    wide = q.double(), k[:, :, :37].double(), v[:, :, :37].double()
    expected = nnf.scaled_dot_product_attention(*wide, is_causal=True, scale=0.3, enable_gqa=True)
    assert close(square, expected, dtype)


bounds = st.none() | st.integers(0, 9)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12), st.integers(0, 12), st.booleans(), st.none() | st.tuples(bounds, bounds),
    st.sampled_from([None, 1.5]), st.sampled_from([None, 0.7]), st.sampled_from([1, 2, 4]), st.integers(1, 200),
)  # fmt: skip
def test_as_the_formula(sq, sk, causal, window, softcap, scale, kv_heads, chunk):
    q, k, v = inputs(heads=4, kv_heads=kv_heads, sq=sq, sk=sk, d=3, dv=5)
    left, right = window or (None, None)
    seen = band(sq, sk, left, right) & (band(sq, sk, None, 0) | (not causal))
    before, reference.CHUNK = reference.CHUNK, chunk
    try:
        out, lse = attention(
            q, k, v, causal=causal, window=window, softcap=softcap, scale=scale, return_lse=True
        )  # fmt: skip
    finally:
        reference.CHUNK = before
    expected, expected_lse = explicit(q, k, v, seen, softcap, scale)
    assert close(out, expected) and close(lse, expected_lse)
    empty = ~seen.any(-1)
    assert (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -math.inf).all()


def test_dtypes_of_the_results():
    for dtype in CLOSE:
        out, lse = attention(*inputs(dtype=dtype), return_lse=True)
        assert out.dtype is dtype and lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert out.shape == (2, 4, 37, 16) and lse.shape == (2, 4, 37)


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
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs())
    assert close(attention(q, k, v, causal=True), attention(*(t.contiguous() for t in (q, k, v)), causal=True))


def test_gradients():
    small = [t.requires_grad_() for t in inputs(1, 2, 1, 5, 3, 3, 2)]  # two rows see nothing
    assert torch.autograd.gradcheck(lambda *t: attention(*t, causal=True, softcap=2.0), small)


# Block masks


def by_item(b, h, q, kv):
    return (q + kv + h) % (b + 2) != 0


@pytest.mark.parametrize("chunk", [1, 30_000, 2**24])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_block_mask(kv_heads, chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    q, k, v = inputs(kv_heads=kv_heads, sq=150, sk=200, d=8, dv=8)
    row, kv = torch.arange(150)[:, None], torch.arange(200)
    masks = {
        "of all": patterns.sliding_window((150, 200), (40, 10), (64, 64)),
        "of heads": BlockMask.from_blocks(torch.rand(4, 3, 2) < 0.5, (64, 128), lengths=(150, 200)),
        "of items": patterns.documents(torch.randint(3, (2, 150)), torch.randint(3, (2, 200)), blocksize=(64, 64)),
        "elements of items": BlockMask.from_blocks(
            torch.ones(3, 2) > 0, (64, 128), lengths=(150, 200), mask_mod=by_item
        ),
    }
    for name, mask in masks.items():
        dense = mask.to_dense()
        if name == "elements of items":
            dense = by_item(torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1), row, kv)
        for causal in (False, True):
            seen = (dense & (band(150, 200, None, 0) | (not causal))).expand(2, 4, -1, -1)
            out, lse = attention(q, k, v, block_mask=mask, causal=causal, return_lse=True)
            scores = (q @ k.repeat_interleave(4 // kv_heads, 1).mT / 8**0.5).masked_fill(~seen, -math.inf)
            expected = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(4 // kv_heads, 1)
            assert close(out, expected) and close(lse, scores.logsumexp(-1)), name


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning", "ignore:return_lse is:FutureWarning")
def test_block_mask_as_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs(sq=200, sk=300, dtype=torch.float32)
    mask = create_block_mask(lambda b, h, q, kv: (q - kv).abs() < 90 + 10 * h, 1, 4, 200, 300, device="cpu")
    expected, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    out, ours = attention(q, k, v, block_mask=BlockMask.from_flex(mask), return_lse=True)
    assert close(out, expected, torch.float32) and close(ours, lse, torch.float32)


# Packed sequences


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 2), "softcap": 3.0}])
def test_packed(options):
    cu_q, cu_k = torch.tensor([[0, 7, 7, 40, 45], [0, 9, 12, 30, 30]], dtype=torch.int32)
    q, k, v = (t[0].transpose(0, 1) for t in inputs(1, 4, 2, 45, 30))
    out, lse = attention_packed(q, k, v, cu_q, cu_k, **options, return_lse=True)
    assert out.shape == (45, 4, 16) and lse.shape == (4, 45)
    for i in range(4):
        rows, cols = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = q[rows].transpose(0, 1)[None], *(t[cols].transpose(0, 1)[None] for t in (k, v))
        expected, expected_lse = attention(*one, **options, return_lse=True)
        assert torch.equal(out[rows], expected[0].transpose(0, 1)) and torch.equal(lse[:, rows], expected_lse[0])
    assert torch.equal(attention_packed(q, k, v, cu_q, cu_k, **options), out)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_is_a_block_mask_of_documents(causal):
    cu = torch.tensor([0, 50, 50, 180, 200], dtype=torch.int32)
    q, k, v = inputs(1, 4, 2, 200, 200)
    packed = attention_packed(*(t[0].transpose(0, 1) for t in (q, k, v)), cu, causal=causal, window=(60, None))
    options = {"lengths": (200, 200), "blocksize": (64, 64), "causal": causal, "window": (60, None)}
    mask = patterns.packed_documents(cu, **options)
    assert close(attention(q, k, v, block_mask=mask)[0].transpose(0, 1), packed)


def test_packed_of_nothing():
    q, k, v = (torch.zeros(0, 2, 4) for _ in range(3))
    for starts in ([0], [0, 0, 0]):
        out, lse = attention_packed(q, k, v, torch.tensor(starts, dtype=torch.int32), return_lse=True)
        assert out.shape == (0, 2, 4) and lse.shape == (2, 0)


# What is refused

Q, K, V = (torch.zeros(2, n, 8, 16) for n in (4, 2, 2))
P = torch.zeros(8, 4, 16)
REFUSED = {
    "type": (lambda: attention([], K, V), TypeError, "q must be a tensor, got list"),
    "dtype": (lambda: attention(Q.int(), K, V), TypeError, "one floating-point dtype, got q of torch.int32"),
    "dtypes": (lambda: attention(Q, K.half(), V), TypeError, "got k of torch.float16, q of torch.float32"),
    "dims": (lambda: attention(Q[0], K, V), ValueError, r"q must be \(B, heads, S, D\), got shape \(4, 8, 16\)"),
    "device": (lambda: attention(Q, K.to("meta"), V), ValueError, "k is on meta, q on cpu"),
    "head dim": (lambda: attention(Q, K[..., :8], V), ValueError, "one D"),
    "length": (lambda: attention(Q, K[:, :, :3], V), ValueError, "one length"),
    "batch": (lambda: attention(Q[:1], K, V), ValueError, "one batch size"),
    "heads": (lambda: attention(Q[:, :3], K, V), ValueError, "q's 3 heads are no multiple of k's 2"),
    "softcap": (
        lambda: attention(Q, K, V, softcap=0.0),
        ValueError,
        "softcap must be a finite positive number, got 0.0",
    ),
    "scale": (lambda: attention(Q, K, V, scale=math.inf), ValueError, "scale must be a finite number, got inf"),
    "window": (lambda: attention(Q, K, V, window=4), TypeError, "window must be .left, right.* .w - 1, 0."),
    "mask": (lambda: attention(Q, K, V, block_mask=3), TypeError, "must be a BlockMask, got int"),
    "mask lengths": (
        lambda: attention(Q, K, V, block_mask=patterns.causal((8, 9))),
        ValueError,
        r"lengths \(8, 8\) on cpu, got \(8, 9\) on cpu",
    ),
    "mask heads": (
        lambda: attention(Q, K, V, block_mask=BlockMask.from_blocks(torch.ones(2, 1, 1) > 0, lengths=(8, 8))),
        ValueError,
        "2 or 1 items and 4 or 1 heads, got 1 and 2",
    ),
    "cu dtype": (lambda: attention_packed(P, P, P, torch.tensor([0, 8])), TypeError, "cu_seqlens_q must be an int32"),
    "cu end": (
        lambda: attention_packed(P, P, P, torch.tensor([0, 7], dtype=torch.int32)),
        ValueError,
        "begin at 0, never decrease and end at 8",
    ),
    "cu lengths": (
        lambda: attention_packed(P, P, P, *(torch.tensor(x, dtype=torch.int32) for x in ([0, 8], [0, 3, 8]))),
        ValueError,
        "of as many sequences, got 2 and 3",
    ),
    "packed dims": (lambda: attention_packed(Q, P, P, None), ValueError, r"q must be \(total, heads, D\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
