"""attention() as a torch user meets it: results on CPU tensors, and errors before any launch."""

import math

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, eager, patterns
from attention.checks import tma_ready
from cute_kernels import explain

from . import attention_parts
from .attention_parts import plainly
from .reference import attention_plainly

BF16 = torch.bfloat16


def qkv(Sq=33, Sk=47, **more):
    return attention_parts.qkv(Sq, Sk, **more)


@pytest.mark.parametrize("lengths", [(33, 47), (47, 33), (1, 90), (64, 64), (5, 1)])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"causal": True},
        {"window": (7, 3)},
        {"window": (7, None), "causal": True},
        {"window": (None, 5)},
        {"window": [-1, 5]},
    ],
    ids=str,
)
def test_masks(lengths, terms):
    q, k, v = qkv(Sq=lengths[0], Sk=lengths[1], Dv=96)
    out, lse = attention(q, k, v, return_lse=True, **terms)
    exact, exact_lse = plainly(q, k, v, torch.float64, **terms)
    assert out.dtype == BF16 and out.shape == (*q.shape[:3], 96) and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)
    assert torch.equal(out, attention(q, k, v, **terms))


@pytest.mark.parametrize("terms", [{"scale": 0.3}, {"softcap": 2.0}, {"scale": 0.3, "softcap": 5.0}], ids=str)
def test_scores(terms):
    q, k, v = qkv(dtype=torch.float16)
    exact = plainly(q, k, v, torch.float64, **terms)[0]
    torch.testing.assert_close(attention(q, k, v, **terms).double(), exact, atol=2e-3, rtol=2e-3)


def test_out_and_any_strides():
    call = qkv()
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in call)
    out = torch.full((2, 4, 33, 64), math.nan, dtype=BF16)
    assert attention(q, k, v, out=out) is out
    assert torch.equal(out, attention(*call))


def test_nothing_to_attend_to():
    q, k, v = qkv(Sk=0)
    out, lse = attention(q, k, v, return_lse=True)
    assert not out.count_nonzero() and lse.isneginf().all()
    assert attention(*qkv(Sq=0)).shape == (2, 4, 0, 64)
    assert attention(*qkv(B=0)).shape == (0, 4, 33, 64)


def changed(**other):
    return {**dict(zip("qkv", qkv(), strict=True)), **other}


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (changed(q=torch.zeros(3, 4, dtype=BF16)), ValueError, "must be .batch, heads, length, head_dim"),
        (changed(q=[1]), TypeError, "q must be a torch.Tensor"),
        (changed(k=torch.zeros(2, 2, 47, 64)), TypeError, "k is torch.float32 but q is torch.bfloat16"),
        (dict(zip("qkv", qkv(dtype=torch.float32), strict=True)), TypeError, "q is torch.float32"),
        (changed(k=torch.zeros(1, 2, 47, 64, dtype=BF16)), ValueError, "batches of 2, 1 and 2 items"),
        (changed(v=torch.zeros(2, 2, 46, 64, dtype=BF16)), ValueError, "differ in heads or length"),
        (changed(k=torch.zeros(2, 2, 47, 32, dtype=BF16)), ValueError, "q has head_dim 64 and k 32"),
        (dict(zip("qkv", qkv(H=3), strict=True)), ValueError, "must be a multiple"),
        (changed(q=torch.zeros(2, 4, 64, 33, dtype=BF16).mT), ValueError, "not contiguous; call .contiguous"),
        (changed(scale=0.0), ValueError, "scale is 0.0; it must be above 0"),
        (changed(scale="x"), TypeError, "scale must be a Python number"),
        (changed(softcap=-1.0), ValueError, "softcap is -1.0"),
        (changed(causal=1), TypeError, "causal must be True or False"),
        (changed(window=5), TypeError, "window must be .left, right."),
        (changed(window=(1.5, 0)), TypeError, "window must be .left, right."),
        (changed(q=torch.zeros(1, dtype=BF16).expand(2, 4, 2**29 + 1, 64)), ValueError, "at most 536870912"),
        (changed(window=(-2, 0)), ValueError, "left bound is -2"),
        (changed(return_lse=1), TypeError, "return_lse must be True or False"),
        (changed(out=torch.zeros(2, 4, 33, 32, dtype=BF16)), ValueError, "out has shape"),
        (changed(out=torch.zeros(2, 4, 33, 64)), TypeError, "out is torch.float32"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        attention(**arguments)


def test_out_may_not_be_an_operand():
    q, k, v = qkv(heads=4, Sk=33)
    with pytest.raises(ValueError, match="shares memory"):
        attention(q, k, v, out=q)


def test_gradients_are_refused():
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        attention(q, k, v)


class TestBlockSparse:
    blocks = torch.tensor([[True, False, True], [False, True, False]])  # of 128 x 128

    def expected(self, q, k, v, causal=False):
        seen = self.blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
        if causal:
            seen = seen & (torch.arange(300) <= torch.arange(200)[:, None] + 100)
        return attention_plainly(*(t.double() for t in (q, k, v)), seen)[0]

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("form", ["mask", "bool", "bsr", "flex"])
    def test_every_form(self, form, causal):
        from sparse_collective import BsrMatrix

        mask = BlockMask.from_blocks(self.blocks, lengths=(200, 300))
        if form == "bool":
            mask = self.blocks
        elif form == "bsr":
            q, k, v = qkv(Sq=256, Sk=384)
            dense = self.blocks.repeat_interleave(128, 0).repeat_interleave(128, 1).to(BF16)
            out = block_sparse_attention(q, k, v, BsrMatrix.from_dense(dense, (128, 128)), causal=causal)
            assert torch.equal(out, block_sparse_attention(q, k, v, self.blocks, causal=causal))
            return
        elif form == "flex":
            mask = mask.to_flex()
        call = qkv(200, 300)
        out, lse = block_sparse_attention(*call, mask, causal=causal, return_lse=True)
        torch.testing.assert_close(out.double(), self.expected(*call, causal), atol=1e-2, rtol=1e-2)
        assert lse.shape == (2, 4, 200)

    def test_a_window_is_a_pattern(self):
        q, k, v = qkv(200, 300)
        mask = patterns.sliding_window((200, 300), (64, 0))
        assert torch.equal(block_sparse_attention(q, k, v, mask), attention(q, k, v, window=(64, 0)))

    def test_errors(self):
        q, k, v = qkv(200, 300)
        with pytest.raises(TypeError, match="block_mask must be a BlockMask"):
            block_sparse_attention(q, k, v, [1])
        with pytest.raises(ValueError, match=r"block_mask is of lengths .256, 384., q and k of .200, 300."):
            block_sparse_attention(q, k, v, BlockMask.from_blocks(self.blocks, lengths=(256, 384)))
        mask = BlockMask.from_blocks(self.blocks.expand(3, 1, 2, 3), lengths=(200, 300))
        with pytest.raises(ValueError, match="block_mask has 3 batch items and 1 heads; it must have 2 or 1 and 4 or"):
            block_sparse_attention(q, k, v, mask)
        with pytest.raises(TypeError, match="causal must be True or False"):
            block_sparse_attention(q, k, v, self.blocks, causal=1)


def test_strides_that_tma_takes():
    q = torch.zeros(2, 4, 33, 64, dtype=BF16)
    assert tma_ready(q) and tma_ready(q.transpose(1, 2)) and tma_ready(q[:, :1])
    assert not tma_ready(q[:1].expand(2, -1, -1, -1)), "a stride of 0"
    assert not tma_ready(torch.zeros(2, 4, 33, 65, dtype=BF16)[..., :64]), "rows of 130 bytes"
    assert not tma_ready(torch.zeros(2 * 4 * 33 * 64 + 1, dtype=BF16)[1:].view(2, 4, 33, 64)), "an odd address"


def test_explain():
    assert "CPU tensors run the reference" in str(explain(attention, *qkv()))
    assert "nothing to compute" in str(explain(attention, *qkv(Sk=0)))
    blocks = torch.ones(1, 1, dtype=torch.bool)
    assert "CPU tensors run the reference" in str(explain(block_sparse_attention, *qkv(), blocks))


def test_known_calls_are_not_planned_again(monkeypatch):
    call = qkv()
    attention(*call, window=[3, 3])
    monkeypatch.setattr(eager, "plan_attention", None)
    attention(*call, window=(3, 3))
