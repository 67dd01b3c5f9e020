"""Variable-length attention over packed sequences (cu_seqlens) for ops.attention: validate, plan, launch."""

from functools import partial

import torch

from cute_kernels import checks as common
from cute_kernels.dtypes import accumulator
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.device import forced_path

from . import checks, fp8, reference
from . import plan as planning
from .masks.mask_mods import window_bounds
from .plan import FlashPlan, empty_lse, launch, without_kernel
from .sinks import check_sinks

OP = "attention"
MOST = 2**31 - 1024  # tiles and positions are int32, and a tile may begin at the last row
LEAST_TILE = 64  # rows of the smallest query tile
_PLANS: PlanCache[FlashPlan] = PlanCache(operands=3)


def attention_packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, *, return_lse, out, score=None, scales=None, fast=False, **terms
):
    """See ops.attention; terms are causal, window_size, softcap and scale, `score` a score_mod.BoundScore.

    scales: dequantization scales of FP8 q, k and v, each or None; None for 16-bit operands.
    """
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k, sinks
    once = cu_seqlens_q is cu_seqlens_k
    mod = None if score is None else score.mod
    key = *terms.values(), return_lse, forced_path(), out is None, once, mod, sinks is None, fast
    if scales is not None:
        key += tuple(s is None for s in scales)
    given = (q, k, v) if out is None else (q, k, v, out)
    given += (cu_seqlens_q,) if once else (cu_seqlens_q, cu_seqlens_k)
    if score is not None:
        given += score.tensors
    given += () if sinks is None else (sinks,)
    if scales is not None:
        given += fp8.given(scales)
    plan = _PLANS.known(key, given, out)
    if plan is None:
        more = {"return_lse": return_lse, "out": out, "score": score, "scales": scales, "fast": fast}
        make = partial(plan_packed, *tensors, **terms, **more)
        plan = _PLANS.checked(OP, key, given, out, make)
    if plan.function is not None:
        more = cu_seqlens_q, cu_seqlens_k, None, None if score is None else score.reads
        if scales is not None:
            more += fp8.as_planned(plan, scales)
        out, lse = launch(plan, q, k, v, out, more, sinks)
    else:
        compute = partial(_reference, plan, *tensors, terms | {"score_mod": score}, scales)
        out, lse = without_kernel(plan, compute, out, sinks)
    return (out, lse) if return_lse else out


def plan_packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks=None, *, causal=False, window_size=None, softcap=None, scale=None,
    return_lse=False, out=None, score=None, scales=None, fast=False,
) -> FlashPlan:  # fmt: skip
    """Check a call's arguments and choose its kernel, without launching it."""
    checks.check_fast(OP, q, k, v, fast)
    out_dtype = None
    if scales is not None:
        fp8.check_operands(OP, q, k, v)
        out_dtype = fp8.out_dtype(OP, q, out)
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if scales is not None:
        fp8.check_scales(OP, q, scales, len(cu_seqlens_q) - 1, (q.shape[1], k.shape[1], k.shape[1]))
    check_sinks(OP, sinks, q)
    (rows, heads, _), cols, sequences = q.shape, len(k), len(cu_seqlens_q) - 1
    shapes = (rows, heads, v.shape[-1]), (heads, rows)
    plan = planning.checked_plan(OP, q, k, v, *shapes, cols, softcap, scale, return_lse, out, out_dtype)
    plan.empty |= sequences == 0
    bounds = window_bounds(window_size, causal)
    if score is not None:
        checks.check_score(OP, score, (sequences, heads), (1, 1), softcap)
        score = score.kept_inside
    if plan.empty or not planning.has_kernel(q):
        return plan
    if (rows // LEAST_TILE + sequences + 1) * heads > MOST or rows + cols > MOST:
        raise ValueError(
            f"{OP}: {rows} rows and {cols} columns of {sequences} sequences and {heads} heads are more than the "
            "kernels can count; split them into several calls"
        )
    terms = {"bounds": bounds, "softcap": softcap, "scale": scale, "lse": return_lse, "longest": (rows, cols)}
    extents = heads * sequences, -(-rows // sequences), -(-cols // sequences)
    terms |= {"packed": True, "score": score, "sinks": sinks}
    if scales is not None:
        terms["choose"] = fp8.choose_kernel(q, k, v, scales, out_dtype, fast, sequences)
    planning.plan_kernel(plan, q, k, v, out, extents=extents, **terms)
    plan.notes.append(
        f"packed: {sequences} sequences, whose lengths the GPU reads; at most "
        f"{rows // plan.facts.config.tile_m + sequences + 1} query tiles a head"
    )
    return plan


def check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k) -> None:
    """q (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv); cu_seqlens (B + 1,) int32."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError(f"{OP}: cu_seqlens_q and cu_seqlens_k must both be given; pass one tensor twice if they agree")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_tensor(f"{OP}: {name}", tensor)
        if tensor.dim() != 3:
            raise ValueError(
                f"{OP}: {name} has shape {tuple(tensor.shape)}; with cu_seqlens it must be (total, heads, head_dim)"
            )
    more = fp8.alike(v) if q.dtype == fp8.E4M3 else {}
    checks.check_qkv(OP, *(t.transpose(0, 1)[None] for t in (q, k, v)), **more)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.check_tensor(f"{OP}: {name}", tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{OP}: {name} is {tensor.dtype}; it must be torch.int32")
        if tensor.dim() != 1 or len(tensor) == 0:
            raise ValueError(f"{OP}: {name} must have shape (sequences + 1,), got {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{OP}: {name} has stride {tensor.stride(0)}; call .contiguous()")
        common.check_device(OP, q.device, **{name: tensor})
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"{OP}: cu_seqlens_q is of {len(cu_seqlens_q) - 1} sequences and cu_seqlens_k of {len(cu_seqlens_k) - 1}"
        )


def _reference(plan, q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, terms, scales=None) -> tuple:
    """(out, lse): the reference, and in rows after the last sequence what those have that see nothing."""
    if scales is not None:
        q, k, v = fp8.dequantised_packed(q, k, v, scales, cu_seqlens_q, cu_seqlens_k)
    out = torch.zeros(plan.out_shape, dtype=q.dtype, device=q.device)
    wide = accumulator(q.dtype)
    lse = empty_lse(plan.lse_shape, wide, q.device, sinks)
    rows, cols = int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])
    packed = q[:rows], k[:cols], v[:cols], cu_seqlens_q, cu_seqlens_k
    out[:rows], lse[:, :rows] = reference.attention_packed(*packed, **terms, sinks=sinks, return_lse=True)
    return out, lse
