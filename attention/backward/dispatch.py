"""Eager execution of attention's backward: a plan and three kernel launches, and with ranges.py torch operations. With
split heads (items.py) a fourth kernel adds parts of dK and dV.

A call whose metadata is in the plan cache costs a lookup and the launches.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.call_plan import CallPlan, PlanCache, layout_of
from cute_kernels.runtime.device import device_arch, forced_path
from cute_kernels.runtime.families import function_for
from cute_kernels.runtime.workspace import zeros

from .. import plan as planning
from ..arguments import VALUES, AttentionArgs
from ..block_sparse import contents_of, element_of, with_causal
from ..decode.checks import unit_stride
from ..forward.config import BlockKind, WindowKind
from ..forward.heuristics import BLOCKS_VISITED, L2_BYTES
from ..masks.bands import bounds_of
from ..masks.block_lists import MOST, equal_counts
from ..masks.mask_mods import window_bounds
from ..masks.tile_order import NEAR_BYTES, order_of_tiles, sections_of
from ..masks.transposed import dispatch as transposed
from ..plan import gradient_of, path_of, scalars_of, view_of
from ..positions import check_offsets
from ..selected.blocks import SIDE, has_members
from . import family
from .config import PREPARE_WARPS, AheadConfig, BackwardFacts
from .heuristics import pick
from .items import MOST_MEMORY, heads_of_an_item, parts_layout
from .ranges import items_of, rows_of_a_range
from .sizes import bytes_of_a_row, tiles_of_a_head
from .sums import convert, zero_sums

OP = "attention's backward"
STEP = 64  # rows of the kernels' steps at head dimension 128
MOST_LIST_BYTES = 2**30  # of transposed lists in blocks of STEP rows
PIECE = 32  # fewest rows of Q that a TMA copy has
OFFSETS = 5  # index of (q_offset, k_offset) in BackwardPlan.scalars
_PLANS: PlanCache["BackwardPlan"] = PlanCache(operands=3)


@dataclass(repr=False)
class BackwardPlan(CallPlan):
    """The kernels of a backward pass and their launch parameters. `function` and `facts` are the main kernel's."""

    prepare: Any = None
    convert: Any = None
    combine: Any = None  # adds parts of dK and dV; None unless heads are split
    tiles: int = 0  # query tiles of all heads
    scalars: tuple = ()  # scalar arguments of the main kernel, in order; OFFSETS is replaced in calls that have offsets
    scale: float = 1.0
    item_heads: int = 1  # query heads of a work item
    kv_parts: tuple = ()  # layouts of the parts of dK and dV, if heads are split
    near: int = 0  # with a block mask: rows of blocks that are near each other, see order_of_tiles
    gradients: tuple = ()  # layouts (CallPlan.new) of dQ, dK and dV
    # Layouts of (LSE, delta) of each tile's rows, FP32 (tiles, 2, tile_m); of dq_accum, FP32 (tiles, tile_m * D); and
    # of the semaphores, int32 (tiles, dq_groups), or None
    workspace: tuple = ()


def backward(
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    sums: dict[int, Tensor] | None = None,
    grad_dtype: torch.dtype | None = None,
    dq_dtype: torch.dtype | None = None,
    packed_heads: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (dQ, dK, dV, dsinks) for CUDA tensors, with the shapes and dtypes of q, k, v and sinks; dK and dV have
    grad_dtype if it is not None, dQ dq_dtype or, if that is None, grad_dtype.

    Args:
        args: the call, with a BlockMask and a BoundScore, `deterministic` a bool, and sinks if they need a gradient.
        out, lse: the results of the forward pass; see ops.attention for all shapes.
        dout: the gradient of out, with its shape and any strides. It is copied if TMA cannot read it.
        dlse: the gradient of lse, FP32, or None.
        sums: FP32 accumulators of the gradients of tensors that score_mod captures, by index.
        packed_heads: query heads whose rows are interleaved in the mask's scores, see interleaves.
    """
    (q, k, v), sinks, mask, score = args[:3], args.sinks, args.block_mask, args.score_mod
    cu_seqlens: Any = (args.cu_seqlens_q, args.cu_seqlens_k)
    dq_dtype = dq_dtype or grad_dtype
    grad_dtype, dq_dtype = (None if dtype is q.dtype else dtype for dtype in (grad_dtype, dq_dtype))
    if 0 in q.shape or 0 in k.shape or 0 in v.shape or args.packed and len(cu_seqlens[0]) == 1:
        dk, dv = (torch.zeros_like(t, dtype=grad_dtype) for t in (k, v))
        return torch.zeros_like(q, dtype=dq_dtype), dk, dv, _of_sinks_alone(sinks, dlse, args.cu_seqlens_q)
    if (dout.data_ptr() | out.data_ptr()) & 15:  # the plan's key has the alignment of q, k and v only
        dout, out = dout.clone(), out.clone()
    offsets = None
    if args.q_offset is not None or args.k_offset is not None:
        offsets = check_offsets(args.op, args.q_offset, args.k_offset, q.shape[2], k.shape[2])
    kind, reads = None, ()
    if mask is not None:
        mask = with_causal(mask) if args.causal else mask
        element, reads = element_of(mask, q.shape[0], q.shape[1] // packed_heads, offsets)
        kind = BlockKind(mask.blocksize[0], mask.blocksize[1], element)
    packed, mod = args.packed, None
    slots: tuple = ()
    of_captured: Any = ()
    if score is not None:
        sums = sums or {}
        slots = tuple(sorted(sums))
        mod, of_captured = score.mod.kept_inside if packed else score.mod, [sums[slot] for slot in slots]
    of_sinks = None if sinks is None else NAMES[sinks.dtype]
    shapes = len(cu_seqlens[0]) if packed else 0, dlse is None, offsets is None
    values: Any = args[VALUES]
    key = values, kind, mod, slots, of_sinks, grad_dtype, dq_dtype, shapes, packed_heads, forced_path()
    tensors = q, k, v, dout, out
    plan = _PLANS.known(key, tensors, None)
    if plan is None:
        facts = {"blocks": kind, "score": mod, "score_sums": slots, "packed_heads": packed_heads}
        make = partial(plan_backward, args, dout, out, facts, dlse is not None, grad_dtype, dq_dtype)
        plan = _PLANS.checked(OP, key, tensors, None, make)
    gradients = [plan.new(*layout) for layout in plan.gradients]
    views = gradients
    if plan.views:
        q, k, v, dout, out, *views = (
            t if view is None else view(t) for t, view in zip((*tensors, *gradients), plan.views, strict=True)
        )
    dq, dk, dv = views
    to_kv: tuple = (dk, dv)  # which the main kernel writes or adds to
    if plan.kv_parts:
        to_kv = tuple([plan.new(*layout) for layout in plan.kv_parts])
    elif plan.facts.ranges:
        to_kv = zero_sums(k, v)
    of_captured = tuple(t.view(-1) if t.dim() == 0 else t for t in of_captured) or None
    captured = None if score is None else score.reads, of_captured
    device = plan.device
    rows, dq_accum, turns = [None if layout is None else plan.new(*layout) for layout in plan.workspace]
    order: tuple = (turns,)
    if plan.facts.path == "sm_90":
        # the counter of items, and their query heads
        order = *order, zeros(device, 1, torch.int32), plan.item_heads if plan.facts.split_heads else None
    blocks = None
    if mask is not None:
        if plan.facts.ranges:
            blocks = *ranges_of(mask, rows_of(q, packed_heads), k.shape[1], plan.facts), *reads
        elif plan.facts.deterministic:
            blocks = *lists_of(mask), ranks_of(mask), *reads
        else:
            blocks = *lists_of(mask), kv_order(mask, rows_of(q, packed_heads), plan), *reads
    sink_sums: Any = None
    if sinks is not None:
        sink_sums = plan.new((plan.tiles, PREPARE_WARPS), (PREPARE_WARPS, 1), torch.float32)
    dlse = None if dlse is None else unit_stride(dlse.contiguous())
    scalars = plan.scalars
    if plan.facts.offsets:
        scalars = *scalars[:OFFSETS], offsets, *scalars[OFFSETS + 1 :]
    plan.prepare(out, dout, lse.contiguous(), dlse, cu_seqlens[0], rows, dq_accum, turns, sinks, sink_sums)
    plan.function(q, k, v, dout, *to_kv, rows, dq_accum, *order, *cu_seqlens, blocks, *captured, *scalars)
    if plan.facts.ranges:
        convert(to_kv, plan.scale, (dk, dv))
    plan.convert(dq_accum, cu_seqlens[0], dq, plan.scale)
    if plan.kv_parts:
        plan.combine(*to_kv, dk, dv)
    if sinks is not None:
        batch = 1 if packed else len(q)  # the tiles of a head are consecutive within a batch
        sink_sums = sink_sums.view(batch, len(sinks), -1).sum((0, 2)).to(sinks.dtype)
    dq, dk, dv = gradients
    return dq, dk, dv, sink_sums


def plan_backward(
    args: AttentionArgs, dout, out, score_and_mask: dict, lse_gradient: bool, grad_dtype, dq_dtype
) -> BackwardPlan:
    """Select the kernels of a backward pass. The forward pass has checked the tensors.

    score_and_mask: these fields of BackwardFacts.
    grad_dtype, dq_dtype: dtypes of dK and dV, and of dQ; None for q's.
    """
    (q, k, v), kind = args[:3], score_and_mask["blocks"]
    cu_q: Any = args.cu_seqlens_q
    spec, sms = device_arch(q.get_device())
    bounds = (None, None) if kind else window_bounds(args.window_size, args.causal)
    # Without one of them nothing depends on positions
    positions = bounds != (None, None) or args.score_mod is not None or (kind is not None and kind.mask is not None)
    facts = BackwardFacts(
        arch=spec.target,
        path=path_of(OP, spec),
        config=None,
        dtype=NAMES[q.dtype],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        window=WindowKind(*(bound is not None for bound in bounds)),
        softcap=args.softcap is not None,
        packed=args.packed,
        deterministic=bool(args.deterministic),
        offsets=positions and (args.q_offset is not None or args.k_offset is not None),
        grad_dtype=None if grad_dtype is None else NAMES[grad_dtype],
        **score_and_mask,
    )
    facts = pick(facts)
    per_head = q.shape[1] // facts.packed_heads // k.shape[1]
    plan = BackwardPlan(OP, tuple(q.shape), q.dtype, q.device, item_heads=per_head)
    if in_ranges(facts, args.block_mask):
        facts = pick(replace(facts, ranges=True))
    elif facts.path == "sm_90" and not facts.deterministic and facts.members is None:
        rows, columns = (len(t) if args.packed else len(t) * t.shape[2] for t in (q, k))
        tiles = -(-columns // facts.config.tile_n) * k.shape[1]
        fewest = -(-columns * (facts.head_dim + facts.head_dim_v) // (MOST_MEMORY * rows * facts.head_dim))
        plan.item_heads = heads_of_an_item(per_head, mean_steps(args, facts, bounds), tiles, sms, fewest)
        split = pick(replace(facts, split_heads=True, grad_dtype=None))
        # An item that has all heads stores its only part to FP32 gradients.
        if plan.item_heads < per_head or grad_dtype and isinstance(split.config, AheadConfig):
            facts = split
        if plan.item_heads < per_head:
            items = k.shape[1] * (per_head // plan.item_heads)
            plan.kv_parts = parts_layout(k, items), parts_layout(v, items)
    plan.facts = facts
    if kind is not None:
        plan.near = max(NEAR_BYTES // (bytes_of_a_row(facts) * kind.block_q), 1)
    named = (("q", q), ("k", k), ("v", v), ("dout", dout), ("out", out))
    dtypes = dq_dtype, grad_dtype, grad_dtype
    results = [(f"d{name}", gradient_of(t, "meta", to)) for (name, t), to in zip(named[:3], dtypes, strict=True)]
    plan.gradients = tuple((tuple(t.shape), t.stride(), t.dtype) for _, t in results)
    views = tuple(view_of(plan, name, t) for name, t in (*named, *results))
    plan.views = views if any(views) else ()
    if args.packed:
        (length, heads, _), batch, cols = q.shape, 1, len(k)
    else:
        batch, heads, length = rows_of(q, score_and_mask["packed_heads"])
        cols = k.shape[2]
    sequences, block_q = len(cu_q) - 1 if args.packed else None, None if kind is None else kind.block_q
    plan.tiles = batch * heads * tiles_of_a_head(length, facts.config.tile_m, sequences, block_q)
    config, turns = facts.config, (plan.tiles, facts.config.dq_groups)
    plan.workspace = (
        layout_of((plan.tiles, 2, config.tile_m), torch.float32),
        layout_of((plan.tiles, config.tile_m * facts.head_dim), torch.float32),
        layout_of(turns, torch.int32) if facts.deterministic else None,
    )
    plan.scale = q.shape[-1] ** -0.5 if args.scale is None else args.scale
    scale_log2, cap = scalars_of(plan.scale, args.softcap, args.score_mod is not None)
    if kind is None:  # a row is at most Sk from its first column and Sq from its last one
        limits = (MOST, MOST) if facts.offsets else (cols, length)
        bounds = min(bounds[0] or 0, limits[0]), min(bounds[1] or 0, limits[1])
    plan.scalars = scale_log2, cap, plan.scale, *bounds, None
    if facts.path == "sm_90":
        plan.scalars += (sms * facts.config.ctas,)  # CTAs resident at the same time
    sinks = None if args.sinks is None else NAMES[args.sinks.dtype]
    plan.prepare = function_for(family.prepare_of(facts, lse_gradient, sinks))
    plan.function = function_for(facts)
    plan.convert = function_for(family.convert_of(facts, None if dq_dtype is None else NAMES[dq_dtype]))
    if plan.kv_parts:
        plan.combine = function_for(family.combine_of(facts, None if grad_dtype is None else NAMES[grad_dtype]))
    return plan


def mean_steps(args: AttentionArgs, facts: BackwardFacts, bounds: tuple) -> float | None:
    """Estimated blocks of 128x128 scores of a KV tile and query head, on average; None if heads should not be split.

    That does not pay where KV tiles have the same length, as without a mask or in a window, and for block masks whose
    rows of a head stay in L2, unless the mask_mod is a band with one bound: then tiles usually have different lengths.
    The host reads neither where a mask has blocks, which may be a window, nor offsets and lengths of sequences.
    """
    sequences = 1 if args.cu_seqlens_q is None else max(len(args.cu_seqlens_q) - 1, 1)
    rows, columns = (t.shape[0] / sequences if args.packed else t.shape[2] for t in (args.q, args.k))
    if args.block_mask is not None:
        mask = facts.element_mask
        in_l2 = rows * bytes_of_a_row(facts) < L2_BYTES
        if in_l2 and (mask is None or bounds_of(mask.program) != 1):
            return None
        return rows / 128 * BLOCKS_VISITED
    left, right = bounds
    if not facts.offsets:  # bounds that mask nothing
        left = None if left is not None and left >= columns else left
        right = None if right is not None and right >= rows else right
    return None if (left is None) == (right is None) else min(rows, columns) / 128 / 2


def interleaves(args: AttentionArgs, packed_heads: int, *dtypes: torch.dtype | None) -> bool:
    """True if the kernels read and write rows that are `packed_heads` heads of each token where they are: row r of head
    h is of token r // packed_heads and head h * packed_heads + r % packed_heads. dtypes: other than q's, of gradients.
    """
    spec, _ = device_arch(args.q.get_device())
    plain = args.score_mod is None and args.sinks is None and not args.packed and not any(dtypes)
    return plain and PIECE % packed_heads == 0 and path_of(OP, spec) == "sm_90"


def side_of(args: AttentionArgs) -> int:
    """Rows of a block of scores of the mask that selected blocks become.

    The fewer tokens share a list, the shorter it is: at a similarity of 0.9, 4 tokens have 7 % fewer blocks than 8.
    """
    q, v = args.q, args.v
    rows, blocks = q.shape[:-1].numel() // STEP, -(-args.k.shape[-2] // SIDE)
    small = 4 * rows * blocks < MOST_LIST_BYTES
    return STEP if small and has_members(args.block_mask) and max(q.shape[-1], v.shape[-1]) == 128 else SIDE


def rows_of(q: Tensor, packed_heads: int) -> tuple[int, int, int]:
    """(B, H, rows) of the scores of q (B, H, Sq, D)."""
    batch, heads, rows, _ = q.shape
    return batch, heads // packed_heads, rows * packed_heads


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
    return mask.derived.get("transposed", mask.kv_num_blocks, partial(_transposed, mask), tuple, contents_of(mask))


def _transposed(mask) -> tuple:
    """mask.transposed(); by kernels if its blocks are of one kind, as those of a mask that is new in each call are."""
    counts, indices, full_counts, full_indices = mask.lists()
    of_full = indices.shape[-1] == 0
    if of_full:
        counts, indices = full_counts, full_indices
    changes = mask.equal_rows or mask.by_row
    if not (changes and planning.has_kernel(indices) and transposed.supports(indices, mask.n_block_cols)):
        return mask.transposed()
    lists = transposed.transposed_lists(counts, indices, mask.n_block_cols)
    none = equal_counts(lists[1])[1], lists[1]  # entries are not read
    return (*none, *lists) if of_full else (*lists, *none)


def in_ranges(facts: BackwardFacts, mask) -> bool:
    """True if KV tiles are processed in ranges of query rows (ranges.py)."""
    if facts.members is None or facts.path != "sm_90" or facts.deterministic or facts.grad_dtype:
        return False
    return planning.has_kernel(mask.kv_indices) and transposed.supports(mask.kv_indices, mask.n_block_cols)


def ranges_of(mask, shape: tuple, heads_kv: int, facts: BackwardFacts) -> tuple:
    """The transposed lists of a mask of selected blocks by ranges of query rows, and the order and number of work items
    (ranges.py), cached. shape: rows_of(q)."""
    batch, heads, _ = shape
    part = rows_of_a_range(facts, mask.blocksize[0], mask.n_block_rows, batch * heads, batch * heads_kv)

    def make() -> tuple:
        counts, columns, *_ = mask.lists()  # all blocks are partial
        counts, rows = transposed.transposed_lists(counts, columns, mask.n_block_cols, part)
        of_ranges = counts.unflatten(1, (-1, -(-mask.n_block_rows // part)))
        return counts, rows, torch.zeros_like(counts), rows, *items_of(of_ranges, part, batch, heads, heads_kv)

    key = "ranges", part, batch, heads, heads_kv
    return mask.derived.get(key, mask.kv_num_blocks, make, tuple, contents_of(mask))


def ranks_of(mask) -> Tensor:
    """Number of nonzero blocks before each block in its row of a BlockMask, int32 (B, H, Mq, Mk), cached."""

    def make() -> tuple[Tensor]:
        listed = torch.logical_or(*mask.tables())
        return (listed.cumsum(-1, dtype=torch.int32) - listed.to(torch.int32),)

    return mask.derived.get("ranks", mask.kv_num_blocks, make, tuple, contents_of(mask))[0]


def kv_order(mask, shape: tuple, plan: BackwardPlan) -> Tensor:
    """The order in which work items begin, int32, cached; see problem.OrderedKvScheduler. shape: rows_of(q)."""
    batch, heads, _ = shape
    tile_n = plan.facts.config.tile_n

    def make() -> tuple[Tensor]:
        lists, sms = lists_of(mask), device_arch(plan.device.index)[1]
        tiles, of_heads = tiles_of_a_head(mask.lengths[1], tile_n), sections_of(lists, mask.n_block_rows, plan.near)
        blocks, *of_heads = (
            t.expand(batch, heads, -1).unflatten(1, (-1, plan.item_heads))
            .repeat_interleave(mask.blocksize[1] // tile_n, -1)[..., :tiles] for t in (lists[0] + lists[2], *of_heads)
        )  # fmt: skip
        blocks, sections = blocks.sum(2).flatten(0, 1), [t.amin(2).flatten(0, 1) for t in of_heads]
        most, count = plan.item_heads * mask.n_block_rows, mask.n_block_rows // plan.near + 1
        return (order_of_tiles(blocks, most, sms, 1, count, *sections).to(torch.int32),)

    key = "order of K", batch, heads, plan.item_heads, tile_n, plan.near
    return mask.derived.get(key, mask.kv_num_blocks, make, tuple, contents_of(mask))[0]
