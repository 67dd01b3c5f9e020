"""Checks of selected_attention's arguments, before any kernel launch."""

import torch
from torch.compiler import is_compiling

from cute_kernels import checks as common

from .. import checks
from ..masks.mask_mods import window_bounds
from ..packed import check_sequences
from ..sinks import check_sinks
from .blocks import BLOCK_SIZES

OP = "selected_attention"


def check(q, k, v, indices, block_size, causal, softcap, scale, return_lse, sinks, cu_seqlens_q, cu_seqlens_k) -> None:
    """Check all arguments of selected_attention; inside a torch.compile trace and on the meta device only the lists and
    cu_seqlens, and the op checks q, k, v and sinks."""
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    traced = is_compiling()
    if not traced:
        for name, tensor in (("q", q), ("k", k), ("v", v), ("indices", indices)):
            common.check_tensor(f"{OP}: {name}", tensor)
        traced = q.is_meta
    if packed:
        check_sequences(OP, q, k, v, cu_seqlens_q, cu_seqlens_k)
    rank = 3 if packed else 4
    if q.dim() != rank or k.dim() != rank or v.dim() != rank:
        expected = "(total, heads, head_dim) with cu_seqlens" if packed else "(batch, heads, length, head_dim)"
        ranks = f"{q.dim()}, {k.dim()} and {v.dim()}"
        raise ValueError(f"{OP}: q, k and v must have shape {expected}, got {ranks} dimensions")
    if packed:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    check_block_size(block_size)
    window_bounds(None, causal)
    if not isinstance(return_lse, bool):
        raise TypeError(f"{OP}: return_lse must be True or False, got {return_lse!r}")
    if not traced:
        checks.check_qkv(OP, q, k, v)
        check_sinks(OP, sinks, q)
        checks.check_scale(OP, scale, softcap)
    check_indices(indices, q, k, packed)


def check_block_size(block_size, op: str = OP) -> None:
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"{op}: block_size must be one of {sizes} tokens, got {block_size!r}")


def check_indices(indices, q, k, packed: bool) -> None:
    """Check the lists against q (B, H, Sq, D) and k (B, Hkv, Sk, D); B is 1 for packed sequences."""
    if indices.dtype != torch.int32:
        raise TypeError(f"{OP}: indices must be torch.int32, got {indices.dtype}; call indices.int()")
    if indices.device != q.device:
        raise ValueError(f"{OP}: indices is on {indices.device}, q on {q.device}; move it with .to()")
    (batch, heads, rows, _), kv_heads = q.shape, k.shape[1]
    lead, names = ((rows,), "total_q") if packed else ((batch, rows), "B, Sq")
    if indices.dim() not in (len(lead) + 1, len(lead) + 2) or tuple(indices.shape[: len(lead)]) != lead:
        raise ValueError(
            f"{OP}: indices must have shape ({names}, top) or ({names}, G, top) with ({names}) = {lead}, got "
            f"{tuple(indices.shape)}"
        )
    if indices.dim() == len(lead) + 2 and indices.shape[-2] not in (1, kv_heads, heads):
        raise ValueError(
            f"{OP}: indices has {indices.shape[-2]} lists per token; it must have 1, one for each of the {kv_heads} "
            f"heads of k, or one for each of the {heads} heads of q"
        )
