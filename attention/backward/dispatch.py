"""Eager execution of attention's backward: a plan and three kernel launches.

A call whose metadata is in the plan cache costs a lookup and the launches.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.call_plan import CallPlan, PlanCache, layout_of
from cute_kernels.runtime.device import device_arch, forced_path
from cute_kernels.runtime.families import function_for
from cute_kernels.runtime.workspace import zeros

from ..block_sparse import by_length, element_of, with_causal
from ..decode.checks import unit_stride
from ..forward.config import BlockKind, WindowKind
from ..forward.heuristics import heads_in_l2
from ..masks.block_lists import MOST
from ..masks.score_mod import BoundScore, ScoreMod
from ..plan import gradient_of, path_of, scalars_of, view_of
from ..positions import Offsets
from . import family
from .config import PREPARE_WARPS, BackwardFacts
from .heuristics import pick
from .problem import bytes_of_a_row
from .row_tiles import tiles_of_a_head

OP = "attention's backward"
_PLANS: PlanCache["BackwardPlan"] = PlanCache(operands=3)


class Terms(NamedTuple):
    """The arguments of an attention call other than its tensors."""

    bounds: tuple = (None, None)  # mask_mods.window_bounds
    softcap: float | None = None
    scale: float | None = None
    deterministic: bool = False
    score: ScoreMod | None = None
    score_sums: tuple[int, ...] = ()  # BackwardFacts'
    offsets: Offsets = None
    grad_dtype: torch.dtype | None = None  # of dQ, dK and dV; None: the operands'


@dataclass
class BackwardPlan(CallPlan):
    """The kernels of a backward pass and their launch parameters. `function` and `facts` are the main kernel's."""

    prepare: object = None
    convert: object = None
    tiles: int = 0  # query tiles of all heads
    scalars: tuple = ()  # scalar arguments of the main kernel, in order
    scale: float = 1.0
    gradients: tuple = ()  # layouts (CallPlan.new) of dQ, dK and dV
    # Layouts of (LSE, delta) of each tile's rows, FP32 (tiles, 2, tile_m); of dq_accum, FP32 (tiles, tile_m * D); and
    # of the semaphores, int32 (tiles, dq_groups), or None
    workspace: tuple = ()


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    terms: Terms,
    cu_seqlens: tuple = (None, None),
    mask=None,
    causal: bool = False,
    sinks: Tensor | None = None,
    score: BoundScore | None = None,
    sums: dict[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (dQ, dK, dV, dsinks) for CUDA tensors, with the shapes and dtypes of q, k, v and sinks; dQ, dK and dV have
    Terms.grad_dtype if it is set.

    Args:
        dout: the gradient of out, with its shape and any strides. It is copied if TMA cannot read it.
        out, lse: the results of the forward pass for q, k and v; see ops.attention for all shapes.
        dlse: the gradient of lse, FP32, or None.
        cu_seqlens: (cu_seqlens_q, cu_seqlens_k) for packed sequences.
        mask: the BlockMask.
        causal: True if the causal mask is combined with `mask`.
        sinks: (H,), if they need a gradient.
        score: the score_mod.
        sums: FP32 accumulators of the gradients of tensors that score_mod captures, by index.
    """
    packed = cu_seqlens[0] is not None
    if 0 in q.shape or 0 in k.shape or 0 in v.shape or packed and len(cu_seqlens[0]) == 1:
        found = (torch.zeros_like(t, dtype=terms.grad_dtype) for t in (q, k, v))
        return *found, _of_sinks_alone(sinks, dlse, cu_seqlens[0])
    if (dout.data_ptr() | out.data_ptr()) & 15:  # the plan's key has the alignment of q, k and v only
        dout, out = dout.clone(), out.clone()
    element, reads = None, ()
    if mask is not None:
        mask = with_causal(mask) if causal else mask
        element, reads = element_of(mask, *q.shape[:2], terms.offsets)
    if terms.offsets is not None and terms.bounds == (None, None) and score is None and element is None:
        terms = terms._replace(offsets=None)  # nothing depends on positions
    of_captured = ()
    if score is not None:
        slots = tuple(sorted(sums or ()))
        mod = score.mod if cu_seqlens[0] is None else score.mod.kept_inside
        terms, of_captured = terms._replace(score=mod, score_sums=slots), [sums[slot] for slot in slots]
    kind = None if mask is None else BlockKind(*mask.blocksize, element)
    of_sinks = None if sinks is None else NAMES[sinks.dtype]
    key = terms, kind, forced_path(), dlse is None, len(cu_seqlens[0]) if packed else 0, of_sinks
    tensors = q, k, v, dout, out
    plan = _PLANS.known(key, tensors, None)
    if plan is None:
        make = partial(plan_backward, q, k, v, dout, out, terms, kind, dlse is not None, cu_seqlens[0], of_sinks)
        plan = _PLANS.checked(OP, key, tensors, None, make)
    gradients = [plan.new(*layout) for layout in plan.gradients]
    views = gradients
    if plan.views:
        q, k, v, dout, out, *views = (
            t if view is None else view(t) for t, view in zip((*tensors, *gradients), plan.views, strict=True)
        )
    dq, dk, dv = views
    of_captured = tuple(t.view(-1) if t.dim() == 0 else t for t in of_captured) or None
    captured = None if score is None else score.reads, of_captured
    device = plan.device
    rows, sums, turns = [None if layout is None else plan.new(*layout) for layout in plan.workspace]
    order = (turns,)
    if plan.facts.path == "sm_90":
        order = *order, zeros(device, 1, torch.int32)  # the tile counter
    blocks = None
    if mask is not None:
        listed = ranks_of(mask) if plan.facts.deterministic else kv_order(mask, q.shape, k.shape[1], plan.facts)
        blocks = *lists_of(mask), listed, *reads
    sink_sums = None
    if sinks is not None:
        sink_sums = plan.new((plan.tiles, PREPARE_WARPS), (PREPARE_WARPS, 1), torch.float32)
    dlse = None if dlse is None else unit_stride(dlse.contiguous())
    plan.prepare(out, dout, lse.contiguous(), dlse, cu_seqlens[0], rows, sums, turns, sinks, sink_sums)
    plan.function(q, k, v, dout, dk, dv, rows, sums, *order, *cu_seqlens, blocks, *captured, *plan.scalars)
    plan.convert(sums, cu_seqlens[0], dq, plan.scale)
    if sinks is not None:
        items = 1 if packed else len(q)  # the tiles of a head are consecutive within a batch
        sink_sums = sink_sums.view(items, len(sinks), -1).sum((0, 2)).to(sinks.dtype)
    return *gradients, sink_sums


def plan_backward(
    q, k, v, dout, out, terms: Terms, kind: BlockKind | None, lse_gradient: bool, cu_q, sinks: str | None = None
) -> BackwardPlan:
    """Select the kernels of a backward pass. The forward pass has checked the tensors."""
    spec, sms = device_arch(q.get_device())
    packed = cu_q is not None
    facts = BackwardFacts(
        arch=spec.target,
        path=path_of(OP, spec),
        config=None,
        dtype=NAMES[q.dtype],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        window=WindowKind() if kind else WindowKind(*(bound is not None for bound in terms.bounds)),
        softcap=terms.softcap is not None,
        packed=packed,
        blocks=kind,
        deterministic=terms.deterministic,
        score=terms.score,
        score_sums=terms.score_sums,
        offsets=terms.offsets is not None,
        grad_dtype=None if terms.grad_dtype is None else NAMES[terms.grad_dtype],
    )
    facts = pick(facts)
    plan = BackwardPlan(OP, tuple(q.shape), q.dtype, q.device, facts=facts)
    named = (("q", q), ("k", k), ("v", v), ("dout", dout), ("out", out))
    results = [(f"d{name}", gradient_of(t, "meta", terms.grad_dtype)) for name, t in named[:3]]
    plan.gradients = tuple((tuple(t.shape), t.stride(), t.dtype) for _, t in results)
    views = tuple(view_of(plan, name, t) for name, t in (*named, *results))
    plan.views = views if any(views) else ()
    if packed:
        (length, heads, _), items, cols = q.shape, 1, len(k)
    else:
        items, heads, length, _ = q.shape
        cols = k.shape[2]
    sequences, block_q = len(cu_q) - 1 if packed else None, None if kind is None else kind.block_q
    plan.tiles = items * heads * tiles_of_a_head(length, facts.config.tile_m, sequences, block_q)
    config, turns = facts.config, (plan.tiles, facts.config.dq_groups)
    plan.workspace = (
        layout_of((plan.tiles, 2, config.tile_m), torch.float32),
        layout_of((plan.tiles, config.tile_m * facts.head_dim), torch.float32),
        layout_of(turns, torch.int32) if facts.deterministic else None,
    )
    plan.scale = q.shape[-1] ** -0.5 if terms.scale is None else terms.scale
    scale_log2, cap = scalars_of(plan.scale, terms.softcap, terms.score is not None)
    bounds = None, None
    if kind is None:  # a row is at most Sk from its first column and Sq from its last one
        limits = (cols, length) if terms.offsets is None else (MOST, MOST)
        bounds = (min(bound or 0, n) for bound, n in zip(terms.bounds, limits, strict=True))
    plan.scalars = scale_log2, cap, plan.scale, *bounds, terms.offsets
    if facts.path == "sm_90":
        plan.scalars += (sms * facts.config.ctas,)  # CTAs resident at the same time
    plan.prepare = function_for(family.prepare_of(facts, lse_gradient, sinks))
    plan.function = function_for(facts)
    plan.convert = function_for(family.convert_of(facts))
    return plan


def _of_sinks_alone(sinks: Tensor | None, dlse: Tensor | None, cu_seqlens_q: Tensor | None) -> Tensor | None:
    """dsinks if every row is fully masked, so that LSE (B, H, Sq) or (H, total_q) equals the sinks. Packed rows after
    the last sequence do not count."""
    if sinks is None or dlse is None:
        return None if sinks is None else torch.zeros_like(sinks)
    if cu_seqlens_q is not None:
        dlse = dlse.masked_fill(torch.arange(dlse.shape[-1], device=dlse.device) >= cu_seqlens_q[-1], 0.0)
    return dlse.sum([i for i in range(dlse.dim()) if i != dlse.dim() - 2]).to(sinks.dtype)


def lists_of(mask) -> tuple:
    """The transposed lists of a BlockMask (by KV block), cached."""
    return mask.derived.get("transposed", mask.kv_num_blocks, mask.transposed, tuple)


def ranks_of(mask) -> Tensor:
    """Number of nonzero blocks before each block in its row of a BlockMask, int32 (B, H, Mq, Mk), cached."""

    def make() -> tuple[Tensor]:
        listed = torch.logical_or(*mask.tables())
        return (listed.cumsum(-1, dtype=torch.int32) - listed.to(torch.int32),)

    return mask.derived.get("ranks", mask.kv_num_blocks, make, tuple)[0]


def kv_order(mask, shape: tuple, heads_kv: int, facts: BackwardFacts) -> Tensor:
    """The order in which KV tiles are started, int32, cached; see problem.OrderedKvScheduler. shape: Q's."""
    batch, heads, rows, _ = shape
    per_head, tile_n = heads // heads_kv, facts.config.tile_n
    l2_heads = heads_in_l2(rows, bytes_of_a_row(facts) * per_head)

    def make() -> tuple[Tensor]:
        partial, _, full, _ = lists_of(mask)
        count = (partial + full).expand(batch, heads, -1).unflatten(1, (heads_kv, per_head)).sum(2)
        tiles = tiles_of_a_head(mask.lengths[1], tile_n)
        count = count.repeat_interleave(mask.blocksize[1] // tile_n, -1)[..., :tiles].flatten(0, 1)
        return (by_length(count, mask.n_block_rows * per_head, l2_heads).to(torch.int32),)

    key = "order of K", batch, heads, heads_kv, tile_n, l2_heads
    return mask.derived.get(key, mask.kv_num_blocks, make, tuple)[0]
