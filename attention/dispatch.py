"""Eager calls: validate, plan, launch. The registered ops of torch_op.py run these functions, too.

A call whose metadata is in the plan cache costs a lookup, a test of its tensors and the launch.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels import checks as common
from cute_kernels.dtypes import FLOAT8, accumulator
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.device import forced_path
from cute_kernels.runtime.workspace import zeros

from . import checks, fp8, packed, reference
from . import plan as planning
from .arguments import ABSENT, OPTIONAL, VALUES, AttentionArgs
from .block_sparse import blocks_of, plan_block_sparse, prepared
from .decode import checks as cache_checks
from .decode import heuristics as decode
from .masks.mask_mods import window_bounds
from .masks.score_mod import bound
from .plan import OFFSETS, FlashPlan, without_kernel
from .positions import Offsets, check_offsets, lengths_at, refuse_offsets
from .selected import gather
from .selected.blocks import SelectedBlocks
from .selected.rows import as_heads, in_rows, packed_of

_PLANS: PlanCache[FlashPlan] = PlanCache(operands=3)


def attention(args: AttentionArgs) -> Tensor | tuple[Tensor, Tensor]:
    """ops.attention and ops.block_sparse_attention; a score_mod is a BoundScore. `deterministic` is backward's: forward
    is in any case."""
    out, score, cu_seqlens_q = args.out, args.score_mod, args.cu_seqlens_q
    if args.seqused_k is not None or args.page_table is not None:
        args = cache_checks.with_unit_strides(args)
    optional: Any = args[OPTIONAL]
    values: Any = args[VALUES]
    tensors: tuple = args[:3]
    given = tuple(map(type, optional))
    once = cu_seqlens_q is not None and cu_seqlens_q is args.cu_seqlens_k
    if given != ABSENT:
        more = [t for t in optional if t is not None]
        if once:
            del more[1 if out is None else 2]
        tensors = *tensors, *more
    shifted = args.q_offset is not None or args.k_offset is not None
    key = *values, given, once, shifted, forced_path(), decode.forced_splits()
    if score is not None:
        key, tensors = (*key, score.mod), tensors + score.tensors
    mask: Any = None
    masked: Any = None
    block_mask = args.block_mask
    selected = type(block_mask) is SelectedBlocks
    gathers = selected and gather.serves(args)
    if gathers:
        key, tensors = (*key, *gather.key_of(block_mask)), tensors + gather.lists_of(args)
    elif selected and block_mask.packed > 1:
        return _in_heads(attention(in_rows(args)), block_mask.packed, out)
    elif block_mask is not None:
        mask, masked, reads, facts, lists = prepared(args)
        key, tensors = facts and (*key, facts), tensors + lists
    plan = _PLANS.known(key, tensors, out)
    if plan is None or plan.function is None:
        args = args if mask is None else args._replace(block_mask=mask)
    if plan is None:
        plan = _PLANS.checked(args.op, key, tensors, out, partial(plan_attention, args))
    offsets = offsets_of(args) if shifted else None
    if plan.function is None:
        out, lse = without_kernel(plan, partial(_reference, args), out, args.sinks)
    else:
        blocks = gather.tables(args) if gathers else None
        if mask is not None:
            blocks = *blocks_of(masked, *args.q.shape[:2], *plan.order), *reads
        out, lse = launch(plan, args, blocks, offsets)
    return (out, lse) if args.return_lse else out


def _in_heads(found: Any, packed: int, out: Tensor | None) -> Any:
    """out, or (out, lse), of a call with packed rows as those of its heads."""
    if isinstance(found, tuple):
        return _in_heads(found[0], packed, out), as_heads(found[1], packed)
    found = as_heads(found, packed)
    return found if out is None else out.copy_(found)


def launch(plan: FlashPlan, args: AttentionArgs, blocks: tuple | None = None, offsets: Offsets = None) -> tuple:
    """Run the plan's kernel; returns (out, lse), lse None where none is asked for. blocks: the kernel's arguments of a
    block mask."""
    q, k, v, out = args[:4]
    if out is None:
        out = plan.new(*plan.out_layout)
    lse = plan.new(*plan.lse_layout) if plan.facts.lse else None
    reads = None if args.score_mod is None else args.score_mod.reads
    if plan.facts.family == decode.FAMILY:
        more: tuple = (args.seqused_k, args.page_table, reads)
        if plan.facts.cache is not None:
            more += cache_checks.of_heads(args.k_descale, q, k), cache_checks.of_heads(args.v_descale, q, k)
    else:
        more = args.cu_seqlens_q, args.cu_seqlens_k, blocks, reads
        if plan.scale_shapes is not None:
            more += fp8.as_planned(plan, args.descales)
    if plan.takes_counter:
        more = *more, zeros(plan.device, 1, torch.int32) if plan.facts.config.dynamic else None
    scalars = plan.scalars
    if offsets is not None and plan.facts.offsets:
        scalars = *scalars[:OFFSETS], offsets, *scalars[OFFSETS + 1 :]
    d = out
    if plan.views:
        q, k, v, d = (t if view is None else view(t) for t, view in zip((q, k, v, out), plan.views, strict=True))
    if plan.values is not None:
        v = plan.values(v, args.cu_seqlens_k)
    plan.function(q, k, v, d, lse, args.sinks, *more, *scalars)
    return out, lse


def offsets_of(args: AttentionArgs) -> Offsets:
    """(q_offset, k_offset) of a call that has a plan, which serves all offsets, so that they are checked in each."""
    lengths = args.q.shape[2], args.k.shape[2]
    offsets = check_offsets(args.op, args.q_offset, args.k_offset, *lengths)
    if args.score_mod is not None:
        args.score_mod.check(*args.q.shape[:2], lengths_at(lengths, offsets))
    return offsets


def plan_attention(args: AttentionArgs) -> FlashPlan:
    """Check a call's arguments and select its kernel, without launching it."""
    checks.check_fast(args)
    if args.score_mod is not None:
        common.check_tensor(f"{args.op}: q", args.q)
        args = args._replace(score_mod=bound(args.score_mod, args.q.device))
    if gather.gathered(args):
        return gather.plan_gathered(args)
    if packed_of(args.block_mask) > 1:
        return plan_block_sparse(in_rows(args))
    if args.block_mask is not None:
        return plan_block_sparse(args)
    return packed.plan_packed(args) if args.packed else plan_dense(args)


def plan_dense(args: AttentionArgs) -> FlashPlan:
    """plan_attention of (B, H, S, D) tensors, or of a KV cache."""
    q, k, v = args[:3]
    narrow = args.seqused_k is None and args.page_table is None and fp8.serves(args)
    if narrow:
        fp8.check(args)
    else:
        cache_checks.check_cache(args)
    if args.seqused_k is not None:
        refuse_offsets(args, "seqused_k")
    lengths = q.shape[2], cache_checks.capacity(k, args.page_table)
    offsets = check_offsets("attention", args.q_offset, args.k_offset, *lengths)
    plan = planning.checked_plan(args, (*q.shape[:3], v.shape[-1]), q.shape[:3], lengths[1])
    bounds = window_bounds(args.window_size, args.causal)
    if args.score_mod is not None:
        checks.check_score(args, (q.shape[0], q.shape[1]), lengths_at(lengths, offsets))
    if not plan.empty and planning.has_kernel(q):
        shifted = offsets is not None and (args.score_mod is not None or bounds != (None, None))
        choose = fp8.choose_kernel(args) if narrow else decode.choose_kernel(args, bounds, shifted)
        extents = q.shape[0] * q.shape[1], *lengths
        planning.plan_kernel(plan, args, extents=extents, bounds=bounds, offsets=shifted, choose=choose)
    return plan


def _reference(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch."""
    if args.q.dtype in FLOAT8:
        args = fp8.dequantised(args)
    elif args.out is not None and args.out.dtype == torch.float32:
        q, k, v = (t if t.dtype in FLOAT8 else t.float() for t in args[:3])
        args = args._replace(q=q, k=k, v=v)
    q, k, v, *_ = args
    if args.packed:
        return packed.reference_of(args)
    if checks.narrow(k, v):
        scales = (cache_checks.of_heads(scale, q, k) for scale in (args.k_descale, args.v_descale))
        k_descale, v_descale = scales
        args = args._replace(k_descale=k_descale, v_descale=v_descale)
    if args.seqused_k is not None:
        run: Any = reference.attention_cached
        return run(q, k, v, args.seqused_k, args.page_table, **args.given(run) | WITH_LSE)
    if checks.narrow(k, v):
        q = q.to(accumulator(q.dtype))
        k, v = (reference.dequantised(t, s, q.dtype) for t, s in ((k, args.k_descale), (v, args.v_descale)))
    out, lse = reference.attention(q, k, v, **args.given(reference.attention) | WITH_LSE)
    return out.to(args.q.dtype), lse


WITH_LSE = {"return_lse": True}
