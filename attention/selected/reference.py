"""Attention to selected blocks in plain torch, in FP32, or in FP64 for FP64 inputs: what tests compare with.

It shares no code with blocks.py: for a part of the rows, a bool tensor says which scores of all keys are unmasked.
"""

from functools import partial

import torch
from torch import Tensor

from ..masks.mask_mods import Band
from ..reference import by_rows


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block_size: int,
    *,
    causal: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ops.selected_attention with these arguments, computed in parts of the rows that bound the memory.

    Differentiable in q, k, v and sinks. cu_seqlens are read on the host.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        indices = indices[:, :, None] if indices.dim() == 3 else indices
        seen = partial(_seen, indices, block_size, causal, q.shape[1:3], k.shape[2])
        return by_rows(q, k, v, seen, softcap, scale, sinks)
    outs, lses = [], []
    starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    starts[0].append(len(q))  # rows after the last sequence see no keys
    starts[1].append(starts[1][-1])
    for i in range(len(starts[0]) - 1):
        rows, columns = (slice(cu[i], cu[i + 1]) for cu in starts)
        qs, ks, vs = (t.transpose(0, 1)[None] for t in (q[rows], k[columns], v[columns]))
        out, lse = selected_attention(
            qs, ks, vs, indices[None, rows], block_size, causal=causal, softcap=softcap, scale=scale, sinks=sinks
        )
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def _seen(indices: Tensor, block_size: int, causal: bool, shape, columns: int, begin: int, end: int) -> Tensor:
    """Keys that the rows from `begin` to before `end` attend to, bool (B, H, rows, Sk)."""
    heads, rows = shape
    index = indices[:, begin:end].transpose(1, 2).long()  # (B, G, rows, top)
    blocks = -(-columns // block_size)
    index = index.masked_fill((index < 0) | (index >= blocks), blocks)
    table = torch.zeros(*index.shape[:3], blocks + 1, dtype=torch.bool, device=index.device)
    seen = table.scatter_(-1, index, True)[..., :blocks].repeat_interleave(block_size, -1)[..., :columns]
    if causal:
        row, column = (torch.arange(*n, device=index.device) for n in ((begin, end), (columns,)))
        seen = seen & Band(None, 0, columns - rows)(None, None, row[:, None], column)
    return seen.repeat_interleave(heads // seen.shape[1], 1)
