"""Attention over shards of K and V: merge their outputs, and compute their gradients from the merged output.

    parts = [attention(q, k, v, causal=True, q_offset=i, k_offset=j, return_lse=True) for j, (k, v) in shards]
    out, lse = merge(*zip(*parts))

    for j, (k, v) in shards:                      # with dout, the gradient of out
        dq_j, dk, dv = attention_backward(dout, q, k, v, out, lse, causal=True, q_offset=i, k_offset=j,
                                          grad_dtype=torch.float32)
        dq += dq_j

The scores of a shard are computed again with the LSE of all shards, so each shard's gradients are terms of a sum.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels import checks as common
from cute_kernels.runtime.device import plans_kernel
from cute_kernels.runtime.front import NeedsDispatcher, dispatched
from cute_kernels.runtime.torch_compat import uncompiled

from . import checks
from .arguments import AttentionArgs
from .block_sparse import as_block_mask
from .masks.block_mask import BlockMask
from .masks.mask_mods import window_bounds
from .masks.score_mod import bound
from .packed import check_packed
from .positions import check_offsets, lengths_at, refuse_offsets

OP = "attention_backward"


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Merge attention over shards of K and V into attention over all of them, in FP32.

    Args:
        outs: the output of each shard, (B, H, Sq, Dv) or packed (total_q, H, Dv). Dtypes may differ.
        lses: the LSE of each shard, float32 (B, H, Sq) or packed (H, total_q).
        dtype: that of the merged output; by default the one that torch promotes those of `outs` to. For a ring, pass
            all parts at once, or keep the running output in float32.

    Returns:
        (out, lse). A row that is fully masked in a shard has an output of 0 and an LSE of -inf there, which adds
        nothing. A row that is fully masked in all shards gets 0 and -inf.

    Differentiable in `outs` and `lses`. It consists of torch's functions, so torch.compile fuses it. With sinks, pass
    them to one shard only.

    Raises:
        TypeError, ValueError: there are no tensors, or their shapes, dtypes or devices differ.

    Example:
        >>> halves = [attention(q, *kv, return_lse=True) for kv in zip(k.chunk(2, 2), v.chunk(2, 2))]
        >>> out, lse = merge(*zip(*halves))
    """
    outs, lses = list(outs), list(lses)
    if len(outs) != len(lses) or not outs:
        raise ValueError(f"merge: outs and lses must be as many, at least 1, got {len(outs)} and {len(lses)}")
    packed = outs[0].dim() == 3
    rows = (outs[0].shape[1], outs[0].shape[0]) if packed else outs[0].shape[:-1]
    for name, tensors, shape in (("outs", outs, outs[0].shape), ("lses", lses, rows)):
        for i, tensor in enumerate(tensors):
            if tensor.shape != shape:
                raise ValueError(f"merge: {name}[{i}] must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
            if not tensor.is_floating_point():
                raise TypeError(f"merge: {name}[{i}] must be a floating-point tensor, got {tensor.dtype}")
            if tensor.device != outs[0].device:
                raise ValueError(f"merge: {name}[{i}] must be on {outs[0].device}, got {tensor.device}")
    if dtype is None:
        dtype = outs[0].dtype
        for out in outs:
            dtype = torch.promote_types(dtype, out.dtype)
    wide = torch.float64 if torch.float64 in (t.dtype for t in (*outs, *lses)) else torch.float32
    lses = [lse.to(wide) for lse in lses]
    largest = lses[0].detach()
    for lse in lses[1:]:
        largest = torch.maximum(largest, lse.detach())
    empty = largest == float("-inf")
    largest = largest.masked_fill(empty, 0.0)
    weights = [torch.exp(lse - largest) for lse in lses]
    total = sum(weights[1:], weights[0]).masked_fill(empty, 1.0)
    parts = [_by_row(weight / total, packed) * part.to(wide) for weight, part in zip(weights, outs, strict=True)]
    return sum(parts[1:], parts[0]).to(dtype), (largest + total.log()).masked_fill(empty, float("-inf"))


def _by_row(x: Tensor, packed: bool) -> Tensor:
    """A number of each row, of LSE's shape, so that it broadcasts over the output's columns."""
    return (x.mT if packed else x).unsqueeze(-1)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask=None,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    q_offset: int | None = None,
    k_offset: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    deterministic: bool | None = None,
    score_mod: Callable | None = None,
    grad_dtype: torch.dtype | None = None,
    dq_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of attention, or with block_mask of block_sparse_attention.

    With k and v a shard of all keys, pass `out` and `lse` of all of them, as `merge` returns these, and the options of
    the shard's forward call. dk and dv are then those of the shard, and the dq of all shards add up to that of q.

    Args:
        dout: the gradient of out, of its shape and dtype.
        q, k, v, block_mask, causal, window_size, softcap, scale, q_offset, k_offset, cu_seqlens_q, cu_seqlens_k,
            deterministic, score_mod: see attention and block_sparse_attention. Tensors that score_mod captures get no
            gradients here.
        out, lse: the output, of q's dtype, and the LSE. Sinks of the forward call need no argument: lse includes them.
        dlse: the gradient of lse, or None.
        grad_dtype: the dtype of dq, dk and dv: q's by default, or torch.float32, to add up shards without rounding.
        dq_dtype: that of dq if it differs: q's where dk and dv alone are parts of sums, as in context parallelism.

    Not differentiable: call it under torch.no_grad(), as in the backward of a torch.autograd.Function.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device or shape, before any launch. FP8 operands and caches
            (seqused_k, page_table) are not supported.
        RuntimeError: grad mode is enabled and an argument requires a gradient.

    Example:
        >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
        >>> dq, dk, dv = attention_backward(dout, q, k, v, out, lse, causal=True, grad_dtype=torch.float32)
    """
    args = AttentionArgs(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_mask=block_mask, score_mod=score_mod,
        causal=causal, window_size=tuple(window_size) if type(window_size) is list else window_size, softcap=softcap,
        scale=scale, deterministic=deterministic, q_offset=q_offset, k_offset=k_offset,
    )  # fmt: skip
    if not is_compiling():
        try:
            return _eager(args, out, lse, dout, dlse, grad_dtype, dq_dtype)
        except NeedsDispatcher:
            pass
    from .torch_op import traced_backward  # imports torch's compiler, which takes seconds

    return traced_backward(args, out, lse, dout, dlse, grad_dtype, dq_dtype)


@uncompiled
def _eager(args: AttentionArgs, out, lse, dout, dlse, grad_dtype, dq_dtype) -> tuple[Tensor, Tensor, Tensor]:
    """attention_backward outside of a trace; raises NeedsDispatcher if the registered op must serve the call."""
    from .gradients import gradients_of  # imports the DSL

    common.check_tensor(f"{OP}: q", args.q)
    score = bound(args.score_mod, args.q.device)
    captured = () if score is None else score.tensors
    tensors = *args[:3], out, lse, dout, dlse, args.cu_seqlens_q, args.cu_seqlens_k
    if dispatched(OP, *tensors, *captured):
        raise NeedsDispatcher(f"{OP} must be called as its registered op")
    common.check_no_grad(OP, *tensors, *captured)
    args = args._replace(score_mod=score)
    mask = check_backward(args, out, lse, dout, dlse, grad_dtype, dq_dtype)
    args = args._replace(block_mask=mask)
    return gradients_of(args, out, lse, dout, dlse, None, grad_dtype, dq_dtype)[:3]


def check_backward(args: AttentionArgs, out, lse, dout, dlse, grad_dtype, dq_dtype) -> BlockMask | None:
    """Check the arguments of attention_backward; return block_mask as a BlockMask, or None."""
    from .gradients import check_score

    (q, k, v), score = args[:3], args.score_mod
    checks.check_deterministic(OP, args.deterministic)
    if args.packed:
        refuse_offsets(args, "cu_seqlens_q and cu_seqlens_k", OP)
        check_packed(args)
    if args.cu_seqlens_q is not None:
        items, lengths = len(args.cu_seqlens_q) - 1, (1, 1)
    else:
        checks.check_qkv(OP, q, k, v)
        items, lengths = len(q), (q.shape[2], k.shape[2])
    if plans_kernel(q.device):
        checks.check_head_dims(OP, q, v)
        checks.check_gradient_dims(OP, q, v, True)
    for name, t in (("dout", dout), ("out", out), ("lse", lse)):
        common.check_tensor(f"{OP}: {name}", t)
    if dlse is not None:
        common.check_tensor(f"{OP}: dlse", dlse)
    common.check_device(OP, q.device, dout=dout, out=out, lse=lse, dlse=dlse)
    checks.check_results(OP, dout, dlse, q, v, out, lse, grad_dtype, dq_dtype)
    checks.check_scale(OP, args.scale, args.softcap)
    window_bounds(args.window_size, args.causal)
    offsets = None if args.packed else check_offsets(OP, args.q_offset, args.k_offset, *lengths)
    if score is not None:
        checks.check_score(args, (items, q.shape[1]), lengths_at(lengths, offsets))
        check_score(score, False, q, args.deterministic)
    if args.block_mask is None:
        return None
    checks.refuse_with_mask(OP, args)
    mask = as_block_mask(q, k, args.block_mask)
    checks.check_block_mask(OP, mask, q, k)
    checks.check_causal_blocks(OP, args.causal, offsets)
    return mask
