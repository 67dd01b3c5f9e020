"""Autograd of attention: eager calls whose q, k, v or sinks require a gradient.

Saved are q, k, v, the output, each row's LSE and the tensors of the mask (saved_mask.py), nothing quadratic; backward
computes the scores again. CPU tensors run the torch reference of the same formulas.
"""

import torch
from torch import Tensor

from cute_kernels.runtime.device import forced_path, in_forwards_path
from cute_kernels.runtime.transforms import differentiable_once

from . import dispatch, reference
from .backward.dispatch import Terms, backward
from .masks.mask_mods import window_bounds
from .masks.saved_mask import saved_mask
from .plan import gradient_of, has_kernel
from .positions import check_offsets


class Attention(torch.autograd.Function):
    """attention and block_sparse_attention with LSE, differentiable once in q, k, v, sinks and the tensors that
    score_mod captures. Does not support torch.func transforms."""

    @staticmethod
    def forward(ctx, call, q, k, v, sinks, *captured):
        run, options, mask, cu_q, cu_k = call
        more = {} if cu_q is None and cu_k is None else {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        if mask is None:
            out, lse = run(q, k, v, **options, **more, sinks=sinks, return_lse=True)
            of_mask = ()
        else:
            mask = dispatch.as_block_mask(q, k, mask)  # as it is now: backward uses these tables
            out, lse = run(q, k, v, mask, **options, **more, sinks=sinks, return_lse=True)
            mask, of_mask = saved_mask(mask, options["causal"], has_kernel(q))
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, sinks, *of_mask, *captured)
        if captured:  # saved above, and freed with what is saved
            options = options | {"score_mod": options["score_mod"].with_tensors(())}
        ctx.call, ctx.path = (options, mask), forced_path()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    @in_forwards_path
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_q, cu_k, sinks, *captured = ctx.saved_tensors
        options, mask = ctx.call
        if mask is not None:
            of_mask, captured = captured[: mask.count], captured[mask.count :]
            options = options | {"causal": mask.causal}
            mask = mask.restored(of_mask)
        _, needs_q, needs_k, needs_v, needs_sinks, *wanted = ctx.needs_input_grad
        sinks = sinks if needs_sinks else None
        sums = None
        if captured:
            sums = sums_of(q, captured, [slot for slot, wants in enumerate(wanted) if wants])
            options = options | {"score_mod": options["score_mod"].with_tensors(captured)}
        call = q, k, v, out, lse, dout, dlse, cu_q, cu_k, mask
        dq, dk, dv, dsinks = gradients_of(*call, **options, sinks=sinks, sums=sums)
        of_captured = (sums[slot].to(t.dtype) if slot in sums else None for slot, t in enumerate(captured))
        found = dq if needs_q else None, dk if needs_k else None, dv if needs_v else None
        return None, *found, dsinks, *of_captured


_apply = super(torch.autograd.Function, Attention).apply  # without torch.func's part, some 3 us a call


def differentiable(run, q, k, v, mask, options: dict, sinks=None, cu_q=None, cu_k=None) -> tuple[Tensor, Tensor]:
    """(out, lse) of eager.attention or eager.block_sparse_attention with these options, with gradients."""
    score = options.get("score_mod")
    call = run, options, mask, cu_q, cu_k
    if score is None:
        return _apply(call, q, k, v, sinks)
    check_score(score, score.wants_gradients, q, options["deterministic"])
    return _apply(call, q, k, v, sinks, *score.tensors)


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
    q, k, v, out, lse, dout, dlse, cu_q, cu_k, mask, *, causal=False, window_size=None, softcap=None, scale=None,
    deterministic=None, sinks=None, score_mod=None, sums=None, q_offset=None, k_offset=None,
    grad_dtype=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dQ, dK, dV, dsinks) of a call; dout or dlse may be None. See backward.dispatch for the tensors.

    sinks: the call's sinks if they need a gradient; None: dsinks is None.
    score_mod: a BoundScore. sums: accumulators of the gradients of its captured tensors, by slot.
    grad_dtype: dtype of dQ, dK and dV, instead of q's.
    """
    if dout is None and dlse is None:
        return tuple(None if t is None else gradient_of(t).zero_() for t in (q, k, v, sinks))
    if dout is None:
        dout = torch.zeros_like(out)
    offsets = None
    if q_offset is not None or k_offset is not None:
        offsets = check_offsets("attention", q_offset, k_offset, q.shape[2], k.shape[2])
    if not has_kernel(q):
        more = {"sinks": sinks} if score_mod is None else {"sinks": sinks, "score": score_mod, "sums": sums}
        if offsets is not None:
            more["offsets"] = offsets
        if grad_dtype is not None:
            more["grad_dtype"] = grad_dtype
        more |= {"bounds": window_bounds(window_size, causal), "softcap": softcap, "scale": scale}
        return _of_reference(q, k, v, out, lse, dout, dlse, cu_q, cu_k, mask, **more)
    if mask is not None:
        mask = dispatch.as_block_mask(q, k, mask)
    terms = Terms(window_bounds(window_size, causal), softcap, scale, in_one_order(deterministic), offsets=offsets)
    if grad_dtype is not None and grad_dtype is not q.dtype:
        terms = terms._replace(grad_dtype=grad_dtype)
    return backward(dout, q, k, v, out, lse, dlse, terms, (cu_q, cu_k), mask, causal, sinks, score_mod, sums)


def in_one_order(deterministic: bool | None) -> bool:
    """`deterministic`, or torch's global setting if it is None."""
    if deterministic is not None:
        return deterministic
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _of_reference(q, k, v, out, lse, dout, dlse, cu_q, cu_k, mask, **terms) -> tuple:
    tensors = q, k, v, out, lse, dout, dlse
    if cu_q is not None:
        found = reference.gradients_packed(*tensors, cu_q, cu_k, **terms)
    else:
        block_mask = None if mask is None else dispatch.as_block_mask(q, k, mask)
        found = reference.gradients(*tensors, **terms, block_mask=block_mask)
    dtype = terms.get("grad_dtype")
    return *(gradient_of(t, dtype=dtype).copy_(g) for t, g in zip((q, k, v), found[:3], strict=True)), found[3]
