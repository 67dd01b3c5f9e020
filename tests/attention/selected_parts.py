"""Helpers of the tests of selected-block attention: lists, calls, and which scores they unmask."""

from types import SimpleNamespace

import torch

from attention import selected_attention
from cute_kernels.testing.reference import band_mask, normal, poisoned_empty

from .parts import assert_right, qkv, starts


def lists(*lead: int, top: int, blocks: int, device="cpu") -> torch.Tensor:
    """(*lead, top) int32 of distinct blocks in any order, some of them no block, and one in a hundred lists empty."""
    found = torch.rand(*lead, max(blocks, top)).argsort(-1)[..., :top].int()
    none = torch.tensor([-1, -1, -1, -2, -(2**31), blocks, 2**31 - 1], dtype=torch.int32)
    none = none[torch.randint(len(none), found.shape)]
    found = torch.where((torch.rand(found.shape) < 0.1) | (found >= blocks), none, found)
    found[torch.rand(lead) < 0.01] = -1
    return found.to(device)


def seen_of(indices, block_size: int, heads: int, columns: int, causal: bool) -> torch.Tensor:
    """Scores (B, H, Sq, Sk) that are unmasked, from indices (B, Sq, [G,] top)."""
    indices = indices[:, :, None] if indices.dim() == 3 else indices
    block = torch.arange(columns, device=indices.device) // block_size
    seen = (indices[..., None] == block).any(-2).transpose(1, 2)  # (B, G, Sq, Sk)
    if causal:
        seen = seen & band_mask(indices.shape[1], columns, None, 0, indices.device)
    return seen.repeat_interleave(heads // seen.shape[1], 1)


def call_of(Sq, Sk, block_size, top, *, groups=None, device="cpu", **shape) -> tuple:
    """(q, k, v, indices, block_size)"""
    q, k, v = qkv(Sq, Sk, **shape, device=device)
    lead = (q.shape[0], Sq) if groups is None else (q.shape[0], Sq, groups)
    return q, k, v, lists(*lead, top=top, blocks=-(-Sk // block_size), device=device), block_size


def packed_call(rows, columns, block_size, top, *, groups=2, H=4, heads=2, D=64, more=(3, 5), device="cpu") -> tuple:
    """(q, k, v, indices, block_size) and cu_seqlens of packed sequences, with `more` rows and columns after the last"""
    total = sum(rows) + more[0], sum(columns) + more[1]
    shapes = (total[0], H, D), (total[1], heads, D), (total[1], heads, D)
    q, k, v = (normal(*shape, device=device) for shape in shapes)
    indices = lists(total[0], groups, top=top, blocks=-(-max(columns) // block_size), device=device)
    cu = {"cu_seqlens_q": starts(rows, device), "cu_seqlens_k": starts(columns, device)}
    return (q, k, v, indices, block_size), cu


def as_one_sequence(q, k, v, indices, block_size, cu_seqlens_q, cu_seqlens_k, causal) -> tuple:
    """(q, k, v, seen) of a packed call as one sequence."""
    seen = torch.zeros(1, q.shape[1], len(q), len(k), dtype=torch.bool, device=q.device)
    rows, columns = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(rows[:-1], rows[1:], columns[:-1], columns[1:], strict=True):
        seen[:, :, a:b, c:d] = seen_of(indices[None, a:b], block_size, q.shape[1], d - c, causal)
    return *(t.transpose(0, 1)[None] for t in (q, k, v)), seen


def check(q, k, v, indices, block_size, *, causal=False, **terms) -> None:
    """One call into poisoned memory against FP64."""
    with poisoned_empty():
        out, lse = selected_attention(q, k, v, indices, block_size, causal=causal, return_lse=True, **terms)
    cu = terms.pop("cu_seqlens_q", None), terms.pop("cu_seqlens_k", None)
    if cu[0] is None:
        seen = seen_of(indices, block_size, q.shape[1], k.shape[2], causal)
    else:
        assert out.is_contiguous()
        q, k, v, seen = as_one_sequence(q, k, v, indices, block_size, *cu, causal)
        out, lse = out.transpose(0, 1)[None], lse[None]
    assert_right(out, lse, q, k, v, block_mask=SimpleNamespace(to_dense=lambda *_: seen), **terms)
