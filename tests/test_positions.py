"""Shards of a sequence: attention with q_offset and k_offset, against the same rows and columns of the whole call."""

import shutil

import pytest
import torch

import cute_kernels
from attention import attention, block_sparse_attention, create_block_mask

from .attention_parts import qkv
from .emulator import emulate
from .emulator.ops import on_emulator

PATHS = pytest.mark.parametrize("path", ["sm_80", "sm_90"])
COMPILER = pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)")


def documents(b, h, q, kv):
    return (kv <= q) & (q // 96 == kv // 96)


class Table:
    """A mask function and a score function that read tensors by position."""

    def __init__(self, length, device="cpu"):
        self.ids = (torch.arange(length, device=device) // 150).to(torch.int32)
        self.slopes = torch.linspace(0.5, 0.1, 4, device=device)

    def mask_mod(self, b, h, q, kv):
        return (self.ids[q] == self.ids[kv]) & (kv <= q)

    def score_mod(self, score, b, h, q, kv):
        return score - self.slopes[h] * (q - kv).abs() + self.ids[q] * 0.25 + self.ids[kv] * 0.5


TERMS = {
    "causal": {"causal": True},
    "window": {"window_size": (70, 0)},
    "both sides": {"window_size": (40, 90)},
    "softcap": {"causal": True, "softcap": 2.0},
    "score_mod": {"score_mod": "score"},
    "causal score_mod": {"causal": True, "score_mod": "score"},
    "blocks": {"block_mask": documents},
    "tables": {"block_mask": "mask", "score_mod": "score"},
}


class Case:
    """A call over a whole sequence of q (B, H, Sq, D), k and v, and its shards."""

    def __init__(self, terms, length=256, Sk=None, D=64, Dv=None, H=4, B=1, dtype=torch.bfloat16, device="cpu"):
        self.tensors = qkv(length, Sk or length, D, Dv, B, H, heads=2, dtype=dtype, device=device)
        table = Table(max(length, Sk or length), device)
        self.terms = {"score_mod": table.score_mod} if terms.get("score_mod") else {}
        self.mask = None
        if mask_mod := terms.get("block_mask"):
            mask_mod = table.mask_mod if mask_mod == "mask" else mask_mod
            lengths = (t.shape[2] for t in self.tensors[:2])
            self.mask = create_block_mask(mask_mod, None, None, *lengths, device=device, BLOCK_SIZE=64)
        self.terms = {n: x for n, x in terms.items() if n not in ("score_mod", "block_mask")} | self.terms

    def call(self, q, k, v, rows=slice(None), columns=slice(None), **more):
        """(out, lse) of rows and columns of the whole; of all without a mention of positions."""
        whole = (rows, columns) == (slice(None), slice(None))
        more = self.terms | {"return_lse": True} | more
        if not whole:
            more |= {"q_offset": rows.start, "k_offset": columns.start}
            q, k, v = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        if self.mask is None:
            return attention(q, k, v, **more)
        mask = self.mask if whole else self.mask.shard((q.shape[2], k.shape[2]), rows.start, columns.start)
        return block_sparse_attention(q, k, v, mask, **more)


def shards(length: int, side: int) -> list[slice]:
    return [slice(begin, min(begin + side, length)) for begin in range(0, length, side)]


def merged(parts):
    """(out, lse) of shards of K and V, in fp64."""
    outs, lses = (torch.stack([x.double() for x in t]) for t in zip(*parts, strict=True))
    lse = lses.logsumexp(0)
    weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0))
    return (outs * weights[..., None]).sum(0), lse


def check_forward(case: Case, side: int, whole: tuple, rtol=0.02, atol=0.02) -> None:
    """Every shard of queries over all shards of keys is the same rows of the whole."""
    out, lse = whole
    q, k, _ = case.tensors
    for rows in shards(q.shape[2], side):
        parts = [case.call(*case.tensors, rows, columns) for columns in shards(k.shape[2], side)]
        part, part_lse = merged([tuple(t.cpu() for t in pair) for pair in parts])
        torch.testing.assert_close(part, out[:, :, rows], rtol=rtol, atol=atol)
        torch.testing.assert_close(part_lse, lse[:, :, rows], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", TERMS)
def test_reference(name):
    case = Case(TERMS[name], B=2, dtype=torch.float64)
    check_forward(case, 64, case.call(*case.tensors), rtol=1e-9, atol=1e-9)


@COMPILER
@PATHS
@pytest.mark.parametrize("name", ["both sides", "causal score_mod", "blocks", "tables"])
def test_kernels(name, path):
    case = Case(TERMS[name], B=1, H=2 if name == "both sides" else 4)
    whole = case.call(*(t.double() for t in case.tensors))
    with on_emulator("sm_90", sms=3, path=path):
        check_forward(case, 128, whole)


def test_alignment():
    """Without offsets the last query is at the last key; one offset makes the other 0."""
    q, k, v = qkv(100, 160, dtype=torch.float64)
    last = attention(q, k, v, causal=True)
    assert torch.equal(last, attention(q, k, v, causal=True, q_offset=60))
    assert torch.equal(attention(q, k, v, causal=True, q_offset=0), attention(q, k, v, causal=True, k_offset=0))
    out, lse = attention(q, k, v, causal=True, q_offset=50, k_offset=150, return_lse=True)
    assert not out.any() and lse.isneginf().all()
    assert torch.equal(attention(q, k, v, q_offset=3, k_offset=900), attention(q, k, v))


def test_errors():
    q, k, v = qkv(64, 64, dtype=torch.float32)
    for wrong, kind in ((1.0, TypeError), (True, TypeError), (-1, ValueError), (2**30, ValueError)):
        for name in ("q_offset", "k_offset"):
            with pytest.raises(kind, match=name):
                attention(q, k, v, causal=True, **{name: wrong})
    lengths = torch.full((2,), 64, dtype=torch.int32)
    with pytest.raises(TypeError, match="q_offset and k_offset are not supported with seqused_k"):
        attention(q, k, v, seqused_k=lengths, k_offset=0)
    starts = torch.tensor([0, 64], dtype=torch.int32)
    with pytest.raises(TypeError, match="q_offset and k_offset are not supported with cu_seqlens"):
        attention(*(t[0].mT.contiguous().mT for t in (q, k, v)), cu_seqlens_q=starts, cu_seqlens_k=starts, q_offset=0)
    mask = create_block_mask(documents, None, None, 64, 64)
    with pytest.raises(TypeError, match="causal=True is not supported"):
        block_sparse_attention(q, k, v, mask, causal=True, q_offset=64)
    table = Table(100)
    with pytest.raises(IndexError, match="goes up to 163"):
        attention(q, k, v, score_mod=table.score_mod, q_offset=100)
    with pytest.raises(ValueError, match="multiple of the blocks' side"):
        mask.shard((32, 64), 32, 0)


@pytest.mark.gpu
@PATHS
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("D, Dv", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_kernels_on_gpu(name, path, D, Dv):
    case = Case(TERMS[name], 640, D=D, Dv=Dv, B=2, device="cuda")
    with cute_kernels.path(path):
        whole = case.call(*case.tensors)
        check_forward(case, 192, [t.double().cpu() for t in whole])
