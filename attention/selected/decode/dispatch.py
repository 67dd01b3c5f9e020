"""selected_attention with a KV cache: checks, plan and launch of the decode kernel; the reference of CPU tensors."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels import checks as common
from cute_kernels.checks import watched
from cute_kernels.dtypes import FLOAT8, accumulator
from cute_kernels.runtime import families
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.device import forced_path
from cute_kernels.runtime.torch_compat import uncompiled

from ... import checks, reference
from ... import plan as planning
from ...arguments import OPTIONAL, AttentionArgs
from ...decode import checks as cache_checks
from ...decode.heuristics import forced_splits
from ...forward.config import FlashFacts
from ...masks.mask_mods import window_bounds
from ...plan import FlashPlan, without_kernel
from ..checks import OP, check_block_size, check_indices
from ..reference import selected_attention as selected_reference
from .config import ROWS, WIDE_16, SelectedDecodeFacts, with_splits

MOST_TOKENS = 16  # query tokens per sequence
NO_GRADIENT = (
    f"{OP}: gradients are not supported with seqused_k, page_table or FP8 k and v, and q, k, v or sinks requires one; "
    "call it under torch.no_grad(), or pass BF16 or FP16 k and v without seqused_k, which have gradients"
)

_PLANS: PlanCache[FlashPlan] = PlanCache(operands=3)


class CacheArgs(AttentionArgs):
    """Arguments of a call with a KV cache, except its lists."""

    __slots__ = ()

    @property
    def op(self) -> str:
        return OP


@uncompiled
def attend(args: CacheArgs, indices: Tensor, block_size: int) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of selected_attention with seqused_k; lse is None unless return_lse."""
    if args.seqused_k is not None or args.page_table is not None:
        unit: Any = cache_checks.with_unit_strides(args)
        args = unit
    optional: Any = args[OPTIONAL]
    tensors = *args[:3], indices, *(t for t in optional if t is not None)
    given = tuple(map(type, optional))
    key = block_size, args.causal, args.softcap, args.scale, args.return_lse, given, forced_path(), forced_splits()
    plan = _PLANS.known(key, tensors, None)
    if plan is None:
        plan = _PLANS.checked(OP, key, tensors, None, partial(plan_selected, args, indices, block_size))
    if plan.function is None:
        out, lse = without_kernel(plan, partial(_reference, args, indices, block_size), None, args.sinks)
        return out, lse if args.return_lse else None
    q, k, v = args[:3]
    d = out = plan.new_out()
    lse = plan.new(*plan.lse_layout) if plan.facts.lse else None
    if plan.views:
        q, k, v, _ = (t if view is None else view(t) for t, view in zip((q, k, v, out), plan.views, strict=True))
    lists = indices if indices.dim() == 4 else indices.unsqueeze(2)
    scales = (cache_checks.of_heads(scale, q, k) for scale in (args.k_descale, args.v_descale))
    plan.function(q, k, v, d, lse, args.sinks, lists, args.seqused_k, args.page_table, *scales, *plan.scalars)
    return out, lse


def has_decode_kernel(tokens: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> bool:
    """True if a call with seqused_k, this number of query tokens per sequence and BF16 or FP16 tensors has a kernel;
    kernels have no backward."""
    few = tokens <= MOST_TOKENS and max(q.shape[-1], v.shape[-1]) <= max(WIDE_16)
    return few and not watched(q, k, v, sinks)


def plan_selected(args: CacheArgs, indices: Tensor, block_size: int) -> FlashPlan:
    """Check the arguments of a call with a KV cache and select its kernel, without launching it."""
    q, k, v = args[:3]
    if args.seqused_k is None and args.page_table is None:
        raise TypeError(
            f"{OP}: k_descale, v_descale and FP8 k and v require a KV cache; pass seqused_k, the number of valid "
            "tokens in each sequence, or dequantize k and v, as (k.float() * k_descale).to(q.dtype)"
        )
    cache_checks.check_cache(args)
    common.check_tensor(f"{OP}: indices", indices)
    check_block_size(block_size)
    window_bounds(None, args.causal)  # checks causal
    check_indices(indices, q, k, False)
    seqused_k: Any = args.seqused_k
    if seqused_k.dim() != 1:
        raise ValueError(
            f"{OP}: seqused_k must have shape ({q.shape[0]},), got {tuple(seqused_k.shape)}: blocks are counted from "
            "row 0 of each sequence; left padding is not supported"
        )
    if q.shape[2] > MOST_TOKENS:
        raise ValueError(
            f"{OP}: q has {q.shape[2]} tokens per sequence; with seqused_k at most {MOST_TOKENS} are supported, since "
            "each token reads its own blocks. For a prefill pass k and v of whole sequences without seqused_k, or "
            "packed sequences with cu_seqlens_q and cu_seqlens_k"
        )
    columns = cache_checks.capacity(k, args.page_table)
    plan = planning.checked_plan(args, (*q.shape[:3], v.shape[-1]), q.shape[:3], columns)
    plan.empty |= indices.shape[-1] == 0
    if not plan.empty and planning.has_kernel(q):
        choose = partial(_choose, args, indices, block_size)
        planning.plan_kernel(plan, args, extents=(q.shape[0] * q.shape[1], q.shape[2], columns), choose=choose)
    return plan


def _choose(args: CacheArgs, indices: Tensor, block_size: int, plan: FlashPlan, facts: FlashFacts, extents) -> bool:
    """`choose` of plan.plan_kernel."""
    (batch, heads, tokens, _), k = args.q.shape, args.k
    base = {f.name: getattr(facts, f.name) for f in fields(FlashFacts)}
    page_size = 0 if args.page_table is None else k.shape[2]
    cache = FLOAT8.get(k.dtype)
    scales: dict[str, Any] = {"k_descale": args.k_descale is not None, "v_descale": args.v_descale is not None}
    chosen = SelectedDecodeFacts(
        **base, seqlens=True, page_size=page_size, cache=cache, **scales, block_size=block_size
    )
    if reason := families.unsupported(chosen):
        raise TypeError(f"{OP}: {reason}")
    groups, top = indices.shape[-2] if indices.dim() == 4 else 1, indices.shape[-1]
    packed = heads // max(groups, k.shape[1])
    items = batch * tokens * (heads // packed) * -(-packed // ROWS)
    keys = min(top * block_size, extents.cols + block_size)
    plan.facts, count = with_splits(chosen, items, keys, extents.sms)
    plan.scalars = *plan.scalars[:2], 0 if args.causal else tokens, count
    shape = (count, *plan.out_shape) if plan.facts.split else None
    plan.function = with_parts(families.function_for(plan.facts), shape, args.q.device)
    plan.notes.append(
        f"decode of selected blocks: {packed} query heads of a token in a tile of {ROWS} rows, lists split among "
        f"{count} CTAs{' of a cluster' if plan.facts.cluster > 1 else ''}"
    )
    return True


def with_parts(function: Callable, shape: tuple | None, device: torch.device) -> Callable:
    """The compiled function with its partial results allocated: O of `shape` (splits, B, H, Sq, Dv), and LSE."""
    shapes = () if shape is None else (shape, shape[:-1])

    def call(q, k, v, out, lse, sinks, lists, seqused_k, table, *more):
        parts = (torch.empty(s, dtype=torch.float32, device=device) for s in shapes)
        function(q, k, v, out, lse, sinks, lists, seqused_k, table, *(parts if shapes else (None, None)), *more)

    return call


def _reference(args: CacheArgs, indices: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch."""
    q, k, v = args[:3]
    dtype = q.dtype
    if checks.narrow(k, v):
        q = q.to(accumulator(dtype))
    descales = [cache_checks.of_heads(scale, q, k) for scale in (args.k_descale, args.v_descale)]
    seqused_k: Any = args.seqused_k
    parts = []
    for b, length in enumerate(seqused_k.tolist()):
        one = slice(b, b + 1)
        rows = [t[one] if args.page_table is None else reference.pages(t, args.page_table[b].long()) for t in (k, v)]
        rows = [t[:, :, : max(length, 0)] for t in rows]
        if checks.narrow(k, v):
            rows = [
                reference.dequantised(t, s if s is None else s[one], q.dtype)
                for t, s in zip(rows, descales, strict=True)
            ]
        terms: dict[str, Any] = {
            "causal": args.causal,
            "softcap": args.softcap,
            "scale": args.scale,
            "sinks": args.sinks,
        }
        parts.append(selected_reference(q[one], rows[0], rows[1], indices[one], block_size, **terms))
    out, lse = (torch.cat(t) for t in zip(*parts, strict=True))
    return out.to(dtype), lse
