"""Autograd of attention: eager calls whose q, k, v or sinks require a gradient.

Saved are q, k, v, the output, each row's LSE and the tensors of the mask (masks/saved_mask.py) or its lists
(selected/saved.py), nothing quadratic; backward computes the scores again. CPU tensors run the torch reference of the
same formulas.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime.device import forced_path, in_forwards_path
from cute_kernels.runtime.transforms import differentiable_once

from . import dispatch, reference
from .arguments import VALUES, AttentionArgs
from .backward.dispatch import backward, interleaves, side_of
from .backward.gather import dispatch as gathered_backward
from .block_sparse import as_block_mask
from .masks.saved_mask import saved_mask
from .plan import gradient_of, has_kernel
from .selected.blocks import SelectedBlocks, mask_of
from .selected.gather import serves
from .selected.rows import as_heads, as_rows
from .selected.saved import saved_lists


class Attention(torch.autograd.Function):
    """attention and block_sparse_attention with LSE, differentiable once in q, k, v, sinks and the tensors that
    score_mod captures. Does not support torch.func transforms."""

    @staticmethod
    def forward(ctx, args: AttentionArgs, q, k, v, sinks, *captured):
        mask: Any = None
        score = args.score_mod
        of_mask: Sequence[Tensor] = ()
        selected = type(args.block_mask) is SelectedBlocks
        packed = args.block_mask.packed if selected else 1
        saves_lists = selected and serves(args)  # backward makes its own tables of them
        if args.block_mask is not None and not saves_lists:
            mask = as_block_mask(q, k, args.block_mask)  # as it is now: backward uses these tables
        if mask is None:
            out, lse = dispatch.attention(args.with_lse())
        else:
            rows = q if packed == 1 else as_rows(q, packed)
            out, lse = dispatch.attention(args._replace(q=rows, block_mask=mask).with_lse())
            if packed > 1:
                out, lse = as_heads(out, packed), as_heads(lse, packed)
        if saves_lists:
            mask, of_mask = saved_lists(args.block_mask)
        elif mask is not None:
            mask, of_mask = saved_mask(mask, args.causal, has_kernel(q))
        ctx.save_for_backward(q, k, v, out, lse, args.cu_seqlens_q, args.cu_seqlens_k, sinks, *of_mask, *captured)
        if captured:  # saved above, and freed with what is saved
            score = score.with_tensors(())
        ctx.call, ctx.path = (mask, packed, score, *args[VALUES.start :]), forced_path()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    @in_forwards_path
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_q, cu_k, sinks, *captured = ctx.saved_tensors
        mask, packed, score, causal, *values = ctx.call
        if mask is not None:
            of_mask, captured = captured[: mask.count], captured[mask.count :]
            causal, mask = mask.causal, mask.restored(of_mask)
        _, needs_q, needs_k, needs_v, needs_sinks, *wanted = ctx.needs_input_grad
        sums: Any = None
        if captured:
            sums = sums_of(q, captured, [slot for slot, wants in enumerate(wanted) if wants])
            score = score.with_tensors(captured)
        sinks = sinks if needs_sinks else None
        tensors = q, k, v, None, cu_q, cu_k, None, None, sinks, None, None, None
        args = AttentionArgs(*tensors, mask, score, causal, *values)
        dq, dk, dv, dsinks = gradients_of(args, out, lse, dout, dlse, sums, packed=packed)
        of_captured = (sums[slot].to(t.dtype) if slot in sums else None for slot, t in enumerate(captured))
        found = dq if needs_q else None, dk if needs_k else None, dv if needs_v else None
        return None, *found, dsinks, *of_captured


_apply = super(torch.autograd.Function, Attention).apply  # without torch.func's part, some 3 us a call


def differentiable_attention(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """(out, lse) of dispatch.attention, with gradients."""
    score = args.score_mod
    if score is None:
        return _apply(args, args.q, args.k, args.v, args.sinks)
    check_score(score, score.wants_gradients, args.q, args.deterministic)
    return _apply(args, args.q, args.k, args.v, args.sinks, *score.tensors)


def check_score(score, wanted: bool, q, deterministic: bool | None) -> None:
    """Check that a score_mod has derivatives. wanted: True if its captured tensors need gradients."""
    if wanted and has_kernel(q) and in_one_order(deterministic):
        raise RuntimeError(
            "attention: gradients of tensors captured by score_mod use atomics on a GPU and are nondeterministic, and "
            "deterministic gradients are required; detach() the tensors, or set deterministic=False"
        )
    score.mod.check_derivatives()


def sums_of(q, tensors, slots) -> dict[int, Tensor]:
    """Zero-initialized accumulators for the gradients of these captured tensors."""
    return {slot: torch.zeros(tensors[slot].shape, dtype=_wide(q), device=q.device) for slot in slots}


def _wide(q) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def gradients_of(
    args: AttentionArgs,
    out,
    lse,
    dout,
    dlse,
    sums: dict[int, Tensor] | None = None,
    grad_dtype=None,
    dq_dtype=None,
    packed: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dQ, dK, dV, dsinks) of a call; dout or dlse may be None. See backward.dispatch for the tensors.

    Args:
        args: the call, with a BlockMask or SelectedBlocks; its sinks only if they need a gradient, else dsinks is None.
        sums: accumulators of the gradients of tensors that score_mod captures, by slot.
        grad_dtype: dtype of dQ, dK and dV, instead of q's; dq_dtype: that of dQ, instead of both.
        packed: query heads that are rows of the mask's scores (selected/rows.py).
    """
    q, k, v = args[:3]
    if dout is None and dlse is None:
        dq, dk, dv = (gradient_of(t).zero_() for t in (q, k, v))
        return dq, dk, dv, None if args.sinks is None else gradient_of(args.sinks).zero_()
    if dout is None:
        dout = torch.zeros_like(out)
    args = args._replace(deterministic=in_one_order(args.deterministic))
    if type(args.block_mask) is SelectedBlocks:
        if grad_dtype is dq_dtype is None and gathered_backward.serves(args, bool(args.deterministic)):
            dq, dk, dv = gathered_backward.backward(args, out, lse, dout, dlse)
            return dq, dk, dv, None
        lengths, side = (q.shape[-2] * packed, k.shape[-2]), side_of(args)
        args = args._replace(block_mask=mask_of(args.block_mask, q.shape[1] // packed, lengths, side=side))
    if packed > 1 and has_kernel(q) and interleaves(args, packed, grad_dtype, dq_dtype):
        return backward(args, out, lse, dout, dlse, sums, packed_heads=packed)
    if packed > 1:
        out, lse, dout, dlse = (t if t is None else as_rows(t, packed) for t in (out, lse, dout, dlse))
        args = args._replace(q=as_rows(q, packed))
        rows, dk, dv, dsinks = gradients_of(args, out, lse, dout, dlse, sums, grad_dtype, dq_dtype)
        dq = gradient_of(q, dtype=rows.dtype)
        dq.unflatten(1, (-1, packed)).copy_(rows.unflatten(2, (-1, packed)).transpose(2, 3))
        return dq, dk, dv, dsinks
    if has_kernel(q):
        return backward(args, out, lse, dout, dlse, sums, grad_dtype, dq_dtype)
    dq, dk, dv, dsinks = reference.gradients(args, out, lse, dout, dlse, sums, grad_dtype)
    found = zip((q, k, v), (dq, dk, dv), (dq_dtype or grad_dtype, grad_dtype, grad_dtype), strict=True)
    return *(gradient_of(t, dtype=dtype).copy_(g) for t, g, dtype in found), dsinks


def in_one_order(deterministic: bool | None) -> bool:
    """`deterministic`, or torch's global setting if it is None."""
    if deterministic is not None:
        return deterministic
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
