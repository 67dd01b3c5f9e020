"""Attention in plain torch, in fp32, or in fp64 for fp64 inputs: what CPU tensors run, and what tests compare with.

scores = softcap(scale * q @ k^T), or score_mod of the same; O = softmax(scores where seen) @ v. A row that sees nothing
gives O = 0 and LSE = -inf, with a sink that. All of it is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT8, accumulator
from cute_kernels.reference import outside_autocast

from .arguments import AttentionArgs
from .forward.config import SCALE_TOKENS
from .masks.block_mask import BlockMask
from .masks.mask_mods import Band, window_bounds
from .masks.score_mod import BoundScore, bound
from .positions import check_offsets

__all__ = ["attention", "attention_cached", "attention_packed"]

CHUNK = 2**24  # scores that are held together
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_mask: BlockMask | None = None,
    sinks: Tensor | None = None,
    score_mod: Callable | BoundScore | None = None,
    q_offset: int | None = None,
    k_offset: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q @ k^T) @ v, by rows in parts that bound the memory.

    Args:
        q: (B, H, Sq, D) bfloat16, float16, float32 or float64, of any strides, as are k and v.
        k: (B, Hkv, Sk, D), with H a multiple of Hkv: heads h * H / Hkv and those after share k's head h.
        v: (B, Hkv, Sk, Dv).
        causal: row i sees columns up to i + Sk - Sq.
        window_size: (left, right); row i sees columns from i + Sk - Sq - left to i + Sk - Sq + right, both included, as
            FlashAttention's window_size; None, or -1, is without bound.
        softcap: c > 0; scores become c * tanh(score / c) before they are masked.
        scale: of q @ k^T; 1 / sqrt(D) where it is None.
        return_lse: also returns the natural logarithm of each row's sum of exp(score).
        block_mask: of lengths (Sq, Sk), with B or 1 items and H or 1 heads; sees what all given masks see.
        sinks: (H,), a logit for each head that is one more score of its rows, without a value.
        score_mod: (score, b, h, q, kv) -> score, of scaled scores, before masks.
        q_offset, k_offset: positions of q's first row and of k's and v's first row, for all masks and score_mod. If one
            is given the other counts as 0, and a window's row i is at column i + q_offset - k_offset.

    Returns:
        O (B, H, Sq, Dv) in q's dtype; with return_lse also LSE (B, H, Sq), fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: shapes or devices do not fit, or a number is out of range.
    """
    _check(q, k, v, 4, "(B, heads, S, D)", softcap, scale, block_mask)
    (batch, heads, sq, _), sk = q.shape, k.shape[2]
    left, right = window_bounds(window_size, causal)
    if block_mask is not None:
        if block_mask.lengths != (sq, sk) or block_mask.device != q.device:
            got = f"{block_mask.lengths} on {block_mask.device}"
            raise ValueError(f"block_mask must be of lengths {(sq, sk)} on {q.device}, got {got}")
        if block_mask.batch not in (1, batch) or block_mask.heads not in (1, heads):
            got = f"{block_mask.batch} and {block_mask.heads}"
            raise ValueError(f"block_mask must have {batch} or 1 items and {heads} or 1 heads, got {got}")
    offsets = check_offsets("attention", q_offset, k_offset, sq, sk)
    seen = partial(_seen, q.shape[:3], sk, q.device, (left, right), block_mask, offsets)
    score = _shifted(bound(score_mod, q.device), offsets)
    out, lse = by_rows(q, k, v, seen, softcap, scale, sinks, score)
    return (out, lse) if return_lse else out


def _seen(shape, sk: int, device, bounds: tuple, block_mask, offsets, begin: int, end: int) -> Tensor | None:
    """Keys that the rows from `begin` to before `end` see: a bool tensor that broadcasts to (B, H, rows, Sk); None:
    all."""
    (batch, heads, sq), mask = shape, None
    if bounds != (None, None):
        rows = torch.arange(begin, end, device=device)[:, None]
        offset = sk - sq if offsets is None else offsets[0] - offsets[1]
        mask = Band(bounds[0], bounds[1], offset)(None, None, rows, torch.arange(sk, device=device))
    if block_mask is not None:
        elements = block_mask.elements(begin, end, batch, heads, *(offsets or ()))
        mask = elements if mask is None else elements & mask
    return mask


def _shifted(score: BoundScore | None, offsets) -> BoundScore | None:
    """The score_mod, applied to rows and columns that begin at these positions."""
    if score is None or offsets is None:
        return score
    return replace(score, row_offset=offsets[0], first_column=offsets[1])


@outside_autocast
def gradients(
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    sums: dict[int, Tensor] | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dQ, dK, dV, dsinks) of a call, by the formulas that the kernels compute (FlashAttention-2, Dao 2023).

    Args:
        args: the call, with a BlockMask and a BoundScore; its sinks only if they need a gradient.
        out, lse: the results of the call.
        dout, dlse: the gradients of out and, where it has one, of lse.
        sums: of tensors that the score_mod captures, by their slots: their gradients are added to these.
        grad_dtype: that of dQ, dK and dV; q's where it is None.
    """
    if args.packed:
        return _gradients_packed(args, out, lse, dout, dlse, sums, grad_dtype)
    (q, k, v), sinks, softcap = args[:3], args.sinks, args.softcap
    bounds = window_bounds(args.window_size, args.causal)
    offsets = check_offsets(args.op, args.q_offset, args.k_offset, q.shape[2], k.shape[2])
    score = _shifted(args.score_mod, offsets)
    (batch, heads, sq, d), (kv_heads, sk, _) = q.shape, v.shape[1:]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    scale = 1 / math.sqrt(max(d, 1)) if args.scale is None else args.scale
    k, v, do, lse = (t.to(dtype) for t in (k, v, dout, lse))
    delta = (do * out.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # rows that see nothing have P of 0
    dsinks = None
    if sinks is not None:
        dsinks = -(torch.exp(sinks.to(dtype).view(-1, 1) - lse) * delta).sum((0, 2)).to(sinks.dtype)
    grad_dtype = q.dtype if grad_dtype is None else grad_dtype
    dq, dk, dv = q.new_zeros(q.shape, dtype=grad_dtype), torch.zeros_like(k), torch.zeros_like(v)
    rows = max(1, CHUNK // max(1, batch * heads * sk))
    for begin in range(0, sq, rows):
        part = slice(begin, min(begin + rows, sq))
        stacked = heads // max(kv_heads, 1) * (part.stop - begin)  # rows of all heads that share one of k
        group = (batch, kv_heads, stacked)
        qs, dos = (t[:, :, part].to(dtype).reshape(*group, t.shape[-1]) for t in (q, do))
        lses, deltas = (t[:, :, part].reshape(*group, 1) for t in (lse, delta))
        s = qs @ k.mT * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        by_head = batch, heads, part.stop - begin, sk
        plain = s.view(by_head)
        if score is not None:
            s = score.apply(plain, begin).reshape(s.shape)
        seen = _seen(q.shape[:3], sk, q.device, bounds, args.block_mask, offsets, begin, part.stop)
        p = torch.exp(s - lses)
        if seen is not None:
            p = p.masked_fill(~seen.expand(batch, heads, -1, -1).reshape(p.shape), 0.0)
        ds = p * (dos @ v.mT - deltas)
        if softcap is not None:
            ds = ds * (1 - (s / softcap) ** 2)
        if score is not None:
            ds = ds.view(by_head)
            if sums:
                score.add_gradients(sums, plain, ds, begin)
            ds = torch.where(ds == 0, 0.0, ds * score.slopes(plain, begin)).reshape(s.shape)
        dq[:, :, part] = (ds @ k * scale).view(*by_head[:3], d)
        dk += ds.mT @ qs * scale
        dv += p.mT @ dos
    return dq, dk.to(grad_dtype), dv.to(grad_dtype), dsinks


def _gradients_packed(
    args: AttentionArgs, out, lse, dout, dlse, sums, grad_dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """gradients of packed sequences; what belongs to no sequence has gradients of 0, and gives sinks none."""
    q, k, v = args[:3]
    found = tuple(torch.zeros_like(t, dtype=grad_dtype) for t in (q, k, v))
    wide, dsinks, dtype = None, None, None
    if args.sinks is not None:
        wide, dtype = args.sinks.to(lse.dtype), args.sinks.dtype
        dsinks = torch.zeros_like(wide)
    cu_q: Any = args.cu_seqlens_q
    cu_k: Any = args.cu_seqlens_k
    starts = cu_q.tolist(), cu_k.tolist()
    args = args._replace(cu_seqlens_q=None, cu_seqlens_k=None, sinks=wide)
    for b, ((i, j), (m, n)) in enumerate(zip(*map(_ranges, starts), strict=True)):
        rows, cols = slice(i, j), slice(m, n)
        qs, ks, vs, outs, douts = (
            t.transpose(0, 1)[None] for t in (q[rows], k[cols], v[cols], out[rows], dout[rows])
        )  # fmt: skip
        score = None if args.score_mod is None else args.score_mod.of_item(b)
        item = args._replace(q=qs, k=ks, v=vs, score_mod=score)
        dlses = None if dlse is None else dlse[None, :, rows]
        *parts, of_sinks = gradients(item, outs, lse[None, :, rows], douts, dlses, sums, grad_dtype)
        if dsinks is not None:
            dsinks += of_sinks
        for whole, part, where in zip(found, parts, (rows, cols, cols), strict=True):
            whole[where] = part[0].transpose(0, 1)
    dq, dk, dv = found
    return dq, dk, dv, None if dsinks is None else dsinks.to(dtype)


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    page_table: Tensor | None = None,
    *,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable | BoundScore | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to each item's own number of rows of K and V, which may lie in pages.

    Args:
        q: (B, H, Sq, D).
        k, v: (B, Hkv, capacity, D) and (.., Dv); with a page_table (pages, Hkv, page_size, D) and (.., Dv).
        seqused_k: (B,) int32; item b has that many rows, no fewer than 0 and no more than the capacity. Or (B, 2): it
            has the rows from seqused_k[b, 0] to before seqused_k[b, 1]. Read on the host.
        page_table: (B, pages of an item) int32; item b's row j is in page page_table[b, j // page_size]. A page that
            is not there is of zeros.
        k_descale, v_descale: (B, Hkv), for FP8 k and v, or None for 1.
        The others are those of `attention`, with seqused_k[b] for Sk.

    Returns:
        O (B, H, Sq, Dv) in q's dtype; with return_lse also LSE (B, H, Sq).

    Raises:
        TypeError, ValueError: as `attention` does.
    """
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softcap": softcap, "scale": scale}
    options |= {"sinks": sinks, "return_lse": True}
    parts, score, dtype = [], bound(score_mod, q.device), q.dtype
    narrow = k.dtype in FLOAT8
    if narrow:
        q = q.to(accumulator(dtype))
    for b, (first, length) in enumerate(spans_of(seqused_k)):
        rows = [t[b : b + 1] if page_table is None else pages(t, page_table[b].long()) for t in (k, v)]
        if narrow:
            scales = (s if s is None else s[b : b + 1] for s in (k_descale, v_descale))
            rows = [dequantised(t, s, q.dtype) for t, s in zip(rows, scales, strict=True)]
        of_item = None if score is None else score.of_item(b, first)
        parts.append(attention(q[b : b + 1], *(t[:, :, first:length] for t in rows), **options, score_mod=of_item))
    if not parts:
        parts = [attention(q, *(t[:0].to(q.dtype) for t in (k, v)), **options)]
    out, lse = (torch.cat(t) for t in zip(*parts, strict=True))
    out = out.to(dtype)
    return (out, lse) if return_lse else out


def dequantised(t: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize FP8 K or V (B, Hkv, S, D) by scales (B, Hkv), or (B, Hkv, blocks) per block of tokens."""
    t = t.to(dtype)
    if scale is None:
        return t
    if scale.dim() == 3:
        return t * scale.repeat_interleave(SCALE_TOKENS, -1)[:, :, : t.shape[2], None]
    return t * scale[:, :, None, None]


def spans_of(seqused_k: Tensor) -> list[tuple[int, int]]:
    """(first row, the one after the last) of each item, from 0 on."""
    pairs = seqused_k.tolist() if seqused_k.dim() == 2 else [(0, n) for n in seqused_k.tolist()]
    return [(min(max(first, 0), max(last, 0)), max(last, 0)) for first, last in pairs]


def pages(t: Tensor, numbers: Tensor) -> Tensor:
    """Rows (1, heads, rows, D) of pages (pages, heads, page_size, D)."""
    t = torch.cat([t, t.new_zeros(1, *t.shape[1:])])
    there = (numbers >= 0) & (numbers < len(t) - 1)
    return t[torch.where(there, numbers, len(t) - 1)].transpose(0, 1).flatten(1, 2)[None]


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable | BoundScore | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences, one after another; causal and window_size are aligned in each.

    Args:
        q: (total_q, H, D); k: (total_k, Hkv, D); v: (total_k, Hkv, Dv).
        cu_seqlens_q: (sequences + 1,) int32; sequence i has the rows cu_seqlens_q[i] to before cu_seqlens_q[i + 1].
            Read on the host.
        cu_seqlens_k: the same of columns; those of the rows where it is None.
        The others are those of `attention`.

    Returns:
        O (total_q, H, Dv) in q's dtype; with return_lse also LSE (H, total_q), as FlashAttention's.

    Raises:
        TypeError, ValueError: as `attention` does; cu_seqlens do not begin at 0, decrease, or do not end at the total.
    """
    _check(q, k, v, 3, "(total, heads, D)", softcap, scale, None)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    starts_q, starts_k = _starts(cu_seqlens_q, "q", len(q)), _starts(cu_seqlens_k, "k", len(k))
    if len(starts_q) != len(starts_k):
        got = f"{len(starts_q)} and {len(starts_k)} entries"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of as many sequences, got {got}")
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softcap": softcap, "scale": scale}
    options |= {"sinks": sinks, "return_lse": True}
    parts, score = [], bound(score_mod, q.device)
    # Of no sequence, which is valid, the one part that gives the results their shapes
    for b, (rows, cols) in enumerate(zip(_ranges(starts_q), _ranges(starts_k), strict=True)):
        operands = (t[i:j].transpose(0, 1)[None] for t, (i, j) in ((q, rows), (k, cols), (v, cols)))
        parts.append(attention(*operands, **options, score_mod=None if score is None else score.of_item(b)))
    out = torch.cat([o[0].transpose(0, 1) for o, _ in parts])
    return (out, torch.cat([lse[0] for _, lse in parts], dim=1)) if return_lse else out


@outside_autocast
def by_rows(q, k, v, seen: Callable[[int, int], Tensor | None], softcap, scale, sinks=None, score=None) -> tuple:
    """O and LSE; seen(begin, end) tells what those rows see, a bool tensor that broadcasts to (B, H, rows, Sk)."""
    (batch, heads, sq, d), (kv_heads, sk, dv) = q.shape, v.shape[1:]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    scale = 1 / math.sqrt(max(d, 1)) if scale is None else scale
    k, v = k.to(dtype), v.to(dtype)
    outs, lses = [], []
    rows = max(1, CHUNK // max(1, batch * heads * sk))
    for begin in range(0, max(sq, 1), rows):
        end = min(begin + rows, sq)
        group = (batch, kv_heads, heads // kv_heads * (end - begin))  # heads that share one of k are stacked
        s = q[:, :, begin:end].to(dtype).reshape(*group, d) @ k.mT * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        s = s.view(batch, heads, end - begin, sk)
        if score is not None:
            s = score.apply(s, begin)
        mask = seen(begin, end)
        if mask is not None:
            s = s.masked_fill(~mask, float("-inf"))
        largest = s.detach().amax(-1, keepdim=True) if sk else s.new_full((*s.shape[:-1], 1), float("-inf"))
        if sinks is not None:
            largest = torch.maximum(largest, sinks.detach().to(dtype).view(-1, 1, 1))
        empty = largest == float("-inf")
        largest = largest.masked_fill(empty, 0.0)
        p = torch.exp(s - largest)  # all 0 in rows that see nothing
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.to(dtype).view(-1, 1, 1) - largest)
        total = total.masked_fill(empty, 1.0)
        o = (p.view(*group, sk) @ v).view(batch, heads, end - begin, dv) / total
        outs.append(o.to(q.dtype))
        lses.append((largest + total.log()).masked_fill(empty, float("-inf")).squeeze(-1))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _ranges(starts: list[int]) -> list[tuple[int, int]]:
    return list(zip(starts[:-1], starts[1:], strict=True)) or [(0, 0)]


def _starts(cu_seqlens: Tensor, name: str, total: int) -> list[int]:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype is not torch.int32:
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens_{name} must be an int32 tensor, got {got}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"cu_seqlens_{name} must be (sequences + 1,), got shape {tuple(cu_seqlens.shape)}")
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != total or starts != sorted(starts):
        raise ValueError(f"cu_seqlens_{name} must begin at 0, never decrease and end at {total}, got {starts}")
    return starts


def _check(q, k, v, dim: int, shape: str, softcap, scale, block_mask) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
        if t.dtype not in DTYPES or t.dtype is not q.dtype:
            raise TypeError(f"q, k and v must be of one floating-point dtype, got {name} of {t.dtype}, q of {q.dtype}")
        if t.dim() != dim:
            raise ValueError(f"{name} must be {shape}, got shape {tuple(t.shape)}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}; move one")
    heads = 1 if dim == 4 else -2
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1] or (dim == 4 and k.shape[0] != q.shape[0]):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"q and k must have one D, k and v one length and heads, and all one batch size, got {shapes}")
    if k.shape[heads] < 1 or q.shape[heads] % k.shape[heads]:
        raise ValueError(f"q's {q.shape[heads]} heads are no multiple of k's {k.shape[heads]}")
    for name, x in (("softcap", softcap), ("scale", scale)):
        if x is not None and not (math.isfinite(x) and (x > 0 or name == "scale")):
            raise ValueError(f"{name} must be a finite{' positive' if name == 'softcap' else ''} number, got {x}")
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
