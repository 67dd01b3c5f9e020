"""Eager calls: validate, plan, launch. The registered ops of torch_op.py run these functions, too.

A call whose metadata is in the plan cache costs a lookup, a test of its tensors and the launch.
"""

from functools import partial

from cute_kernels import checks as common
from cute_kernels.dtypes import accumulator
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.device import forced_path
from cute_kernels.runtime.front import check_plain

from . import checks, fp8, reference
from . import plan as planning
from .block_sparse import as_block_mask, launch_blocks, plan_block_sparse
from .decode import checks as cache_checks
from .decode import heuristics as decode
from .masks.mask_mods import window_bounds
from .masks.score_mod import bound
from .packed import attention_packed, plan_packed
from .plan import FlashPlan, launch, without_kernel
from .positions import check_offsets, lengths_at, refuse_offsets
from .sinks import check_sinks

_PLANS: PlanCache[FlashPlan] = PlanCache(operands=3)


def attention(
    q, k, v, *, causal=False, window_size=None, softcap=None, scale=None, return_lse=False, out=None,
    cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, page_table=None, sinks=None, deterministic=None,
    score_mod=None, q_descale=None, k_descale=None, v_descale=None, use_fast_accum=False, q_offset=None, k_offset=None,
):  # fmt: skip
    """See ops.attention. `deterministic` is backward's: forward is in any case."""
    if type(window_size) is list:
        window_size = tuple(window_size)
    score = None if score_mod is None else bound_to(score_mod, q)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        _check_one_form(seqused_k, page_table, q_offset, k_offset)
        terms = {"causal": causal, "window_size": window_size, "softcap": softcap, "scale": scale, "score": score}
        scales = _scales_of_packed(q, k, v, q_descale, k_descale, v_descale)
        terms |= {"return_lse": return_lse, "out": out, "scales": scales}
        terms["fast"] = use_fast_accum
        return attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, **terms)
    terms = (
        causal, window_size, softcap, scale, return_lse, forced_path(), decode.forced_splits(),
        out is None, seqused_k is None, page_table is None, None if score is None else score.mod, sinks is None,
        q_descale is None, k_descale is None, v_descale is None, use_fast_accum, q_offset, k_offset,
    )  # fmt: skip
    tensors = (q, k, v) if out is None else (q, k, v, out)
    if seqused_k is not None or page_table is not None:
        seqused_k, page_table = cache_checks.unit_stride(seqused_k), cache_checks.unit_stride(page_table)
        tensors += (seqused_k,) if page_table is None else (seqused_k, page_table)
    if score is not None:
        tensors += score.tensors
    if sinks is not None:
        tensors += (sinks,)
    if q_descale is not None:
        tensors += (q_descale,)
    if k_descale is not None:
        tensors += (k_descale,)
    if v_descale is not None:
        tensors += (v_descale,)
    plan = _PLANS.known(terms, tensors, out)
    if plan is None:
        make = partial(
            plan_attention, q, k, v, causal=causal, window_size=window_size, softcap=softcap, scale=scale,
            return_lse=return_lse, out=out, seqused_k=seqused_k, page_table=page_table, sinks=sinks, score_mod=score,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, use_fast_accum=use_fast_accum,
            q_offset=q_offset, k_offset=k_offset,
        )  # fmt: skip
        plan = _PLANS.checked("attention", terms, tensors, out, make)
    if plan.function is None:
        terms = {"causal": causal, "window_size": window_size, "softcap": softcap, "scale": scale, "sinks": sinks}
        if q_offset is not None or k_offset is not None:
            terms |= {"q_offset": q_offset, "k_offset": k_offset}
        if seqused_k is not None:
            terms |= {"seqused_k": seqused_k, "page_table": page_table}
        if fp8.serves(q, None):
            terms["scales"] = q_descale, k_descale, v_descale
        elif checks.narrow(k, v):
            terms |= {
                "k_descale": cache_checks.of_heads(k_descale, q, k),
                "v_descale": cache_checks.of_heads(v_descale, q, k),
            }
        if score is not None:
            terms["score_mod"] = score
        out, lse = without_kernel(plan, partial(_reference, q, k, v, **terms), out, sinks)
    elif plan.facts.family == decode.FAMILY:
        more = seqused_k, page_table, None if score is None else score.reads
        if plan.facts.cache is not None:
            more += cache_checks.of_heads(k_descale, q, k), cache_checks.of_heads(v_descale, q, k)
        out, lse = launch(plan, q, k, v, out, more, sinks)
    elif plan.scale_shapes is not None:
        scales = fp8.as_planned(plan, (q_descale, k_descale, v_descale))
        more = None, None, None, None if score is None else score.reads, *scales
        out, lse = launch(plan, q, k, v, out, more, sinks)
    else:
        out, lse = launch(plan, q, k, v, out, None if score is None else (None, None, None, score.reads), sinks)
    return (out, lse) if return_lse else out


def block_sparse_attention(
    q, k, v, block_mask, *, causal=False, softcap=None, scale=None, return_lse=False, out=None, sinks=None,
    deterministic=None, score_mod=None, q_descale=None, k_descale=None, v_descale=None, use_fast_accum=False,
    q_offset=None, k_offset=None,
):  # fmt: skip
    """See ops.block_sparse_attention. `deterministic` is backward's: forward is in any case."""
    mask = as_block_mask(q, k, block_mask)
    score = None if score_mod is None else bound_to(score_mod, q)
    scales = q_descale, k_descale, v_descale
    if planning.has_kernel(q):
        out, lse = launch_blocks(
            q, k, v, mask, causal, softcap, scale, return_lse, out, sinks, score, scales, use_fast_accum,
            q_offset, k_offset,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    terms = {"causal": causal, "softcap": softcap, "scale": scale, "sinks": sinks, "score_mod": score}
    terms |= {"q_offset": q_offset, "k_offset": k_offset}
    named = dict(zip(fp8.SCALES, scales, strict=True))
    named["use_fast_accum"] = use_fast_accum
    captured = () if score is None else score.tensors
    check_plain("block_sparse_attention", (q, k, v, out, sinks, *captured, *scales))
    plan = plan_block_sparse(q, k, v, mask, **terms, **named, return_lse=return_lse, out=out)
    common.check_no_grad("block_sparse_attention", q, k, v, sinks, *captured, *scales)
    if out is not None:
        common.check_out("block_sparse_attention", out, (q, k, v, *mask.lists(), sinks, *captured, *scales))
    if fp8.serves(q, None):
        terms["scales"] = scales
    out, lse = without_kernel(plan, partial(_reference, q, k, v, **terms, block_mask=mask), out, sinks)
    return (out, lse) if return_lse else out


def plan_attention(
    q, k, v, *, causal=False, window_size=None, softcap=None, scale=None, return_lse=False, out=None,
    cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, page_table=None, sinks=None, deterministic=None,
    score_mod=None, q_descale=None, k_descale=None, v_descale=None, use_fast_accum=False, q_offset=None, k_offset=None,
) -> FlashPlan:  # fmt: skip
    """Check a call's arguments and choose its kernel, without launching it."""
    checks.check_fast("attention", q, k, v, use_fast_accum)
    if score_mod is not None:
        score_mod = bound_to(score_mod, q)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        _check_one_form(seqused_k, page_table, q_offset, k_offset)
        terms = {"causal": causal, "window_size": window_size, "softcap": softcap, "scale": scale, "score": score_mod}
        scales = _scales_of_packed(q, k, v, q_descale, k_descale, v_descale)
        terms |= {"return_lse": return_lse, "out": out, "scales": scales}
        terms["fast"] = use_fast_accum
        return plan_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, **terms)
    seqused_k, page_table = cache_checks.unit_stride(seqused_k), cache_checks.unit_stride(page_table)
    of_8_bits = seqused_k is None and page_table is None and fp8.serves(q, q_descale)
    scales, out_dtype = (q_descale, k_descale, v_descale), None
    if of_8_bits:
        fp8.check("attention", q, k, v, scales)
        out_dtype = fp8.out_dtype("attention", q, out)
    else:
        cache_checks.check_cache("attention", q, k, v, seqused_k, page_table, q_descale, k_descale, v_descale)
    check_sinks("attention", sinks, q)
    if seqused_k is not None:
        refuse_offsets("attention", "seqused_k", q_offset, k_offset)
    columns = cache_checks.capacity(k, page_table)
    lengths = q.shape[2], columns
    offsets = check_offsets("attention", q_offset, k_offset, *lengths)
    shapes = (*q.shape[:3], v.shape[-1]), tuple(q.shape[:3])
    plan = planning.checked_plan("attention", q, k, v, *shapes, columns, softcap, scale, return_lse, out, out_dtype)
    bounds = window_bounds(window_size, causal)
    if score_mod is not None:
        checks.check_score("attention", score_mod, q.shape[:2], lengths_at(lengths, offsets), softcap)
    elif bounds == (None, None):
        offsets = None  # nothing depends on positions
    if not plan.empty and planning.has_kernel(q):

        def choose(plan, facts, extents) -> bool:
            sms = extents.sms
            if seqused_k is None and (offsets is not None or not decode.serves(q, k, sms)):
                return decode.refuse_narrow(q, k)
            decode.use(plan, facts, q, k, seqused_k, page_table, bounds, sms, k_descale, v_descale)
            return True

        if of_8_bits:
            choose = fp8.choose_kernel(q, k, v, scales, out_dtype, use_fast_accum)

        terms = {"bounds": bounds, "softcap": softcap, "scale": scale, "lse": return_lse, "choose": choose}
        extents = q.shape[0] * q.shape[1], q.shape[2], columns
        terms["offsets"] = offsets
        planning.plan_kernel(plan, q, k, v, out, extents=extents, **terms, score=score_mod, sinks=sinks)
    return plan


def bound_to(score_mod, q):
    """A BoundScore: the score_mod as kernels expect it, with its captured tensors."""
    common.check_tensor("attention: q", q)
    return bound(score_mod, q.device)


def _scales_of_packed(q, k, v, *scales) -> tuple | None:
    """The dequantization scales of FP8 q, k and v, some of which may be None; None for BF16 and FP16 operands."""
    if fp8.serves(q, scales[0]):
        return scales
    checks.check_wide("attention", "packed sequences", k, v, *scales[1:])
    return None


def _check_one_form(seqused_k, page_table, q_offset, k_offset) -> None:
    """Raise if packed sequences are combined with a KV cache or with offsets."""
    refuse_offsets("attention", "cu_seqlens_q and cu_seqlens_k", q_offset, k_offset)
    if seqused_k is not None or page_table is not None:
        raise ValueError("attention: cu_seqlens and seqused_k are two forms; give one of them")


def _reference(q, k, v, scales: tuple | None = None, **terms):
    if scales is not None:
        return reference.attention(*fp8.dequantised(q, k, v, scales), **terms, return_lse=True)
    if "seqused_k" in terms:
        return reference.attention_cached(q, k, v, **terms, return_lse=True)
    if not checks.narrow(k, v):
        return reference.attention(q, k, v, **terms, return_lse=True)
    wide = q.to(accumulator(q.dtype))
    kv = (reference.dequantised(t, terms.pop(scale), wide.dtype) for t, scale in ((k, "k_descale"), (v, "v_descale")))
    out, lse = reference.attention(wide, *kv, **terms, return_lse=True)
    return out.to(q.dtype), lse
