"""block_sparse_attention: checks, the kernel's facts, and cached tensors derived from a mask.

The cache holds the mask combined with causal, the order of query tiles, and the key of the element mask. They are
computed on the mask's device without synchronizing with it, and live as long as the mask.
"""

from functools import partial
from typing import Any

import torch

from cute_kernels.runtime.derived import state_of
from cute_kernels.runtime.front import check_plain, check_supported
from cute_kernels.traced.record import Traced
from sparse_collective.bsr import BsrMatrix

from . import checks, fp8
from . import plan as planning
from .arguments import AttentionArgs
from .forward.config import BlockKind
from .forward.heuristics import heads_in_l2
from .masks import cache as mask_cache
from .masks.block_lists import CONSTANTS
from .masks.block_mask import BlockMask
from .masks.element_mask import check_extents, for_kernel, trace_mask
from .masks.mask_mods import Band, both, window_bounds
from .masks.tile_order import NEAR_BYTES, order_of_tiles, sections_of
from .plan import FlashPlan
from .positions import Offsets, check_offsets, lengths_at
from .selected.blocks import SelectedBlocks, mask_of
from .selected.tables.dispatch import ordered as ordered_by_row

OP = "block_sparse_attention"
Q_NAME, K_NAME = f"{OP}: q", f"{OP}: k"  # in errors
MOST_TILES = 2**31 - 1
NOT_TRACED: Any = (None, None, None)


def element_of(mask: BlockMask, batch: int, heads: int, offsets: Offsets = None) -> tuple:
    """(ElementMask, the tensors that it reads) of mask_mod as it is now, for so many items and heads, and positions
    that begin at `offsets`; (None, ()) without one.

    The mask caches the latest trace of mask_mod, the element mask, and what was checked: (batch, heads) -> lengths.

    Raises:
        NeedsDispatcher: it captures a tensor without memory of its own.
    """
    if mask.mask_mod is None:
        return None, ()
    cached = mask.derived
    known, element, checked = cached.facts or NOT_TRACED
    now = trace_mask(mask.mask_mod, mask.device)
    if now is not known:
        check_plain(OP, now.tensors)
        element, checked = for_kernel(now), {}
        cached.facts = now, element, checked
    known, lengths = checked.get((batch, heads)), lengths_at(mask.lengths, offsets)
    if known is None or lengths[0] > known[0] or lengths[1] > known[1]:
        lengths = lengths if known is None else (max(lengths[0], known[0]), max(lengths[1], known[1]))
        check_extents(element[0], element[1], batch, heads, lengths)
        checked[batch, heads] = lengths
    return element


def latest_trace(mask: BlockMask) -> Traced | None:
    """The trace of mask_mod that the latest kernel was launched with."""
    facts = mask.derived.facts
    return None if facts is None else facts[0]


def contents_of(mask: BlockMask) -> tuple | None:
    """State of a BlockMask's lists for its cache. Those of equal rows are the caller's tensor, which forward reads in
    each call, so that a caller who writes the next step's lists to it gets the right output."""
    return state_of(mask.kv_indices, mask.full_kv_indices) if mask.equal_rows else ()


def with_causal(mask: BlockMask) -> BlockMask:
    """mask.with_causal(), cached. A mask with another mask_mod that shares the cache shares its tables."""

    def make() -> tuple:
        rows, columns = mask.lengths
        return mask.with_causal(), mask.mask_mod, Band(None, 0, columns - rows)

    state = contents_of(mask)
    masked, mask_mod, band = mask.derived.get("causal", mask.kv_num_blocks, make, lambda value: value[0].lists(), state)
    return masked if mask_mod is mask.mask_mod else masked.with_mask_mod(both(mask.mask_mod, band))


def tile_order(
    mask: BlockMask, batch: int, heads: int, tile_m: int, l2_heads: int, near: int, sms: int
) -> torch.Tensor:
    """block_source.OrderedScheduler's table: int32 (tiles, 3), the query tiles in the order in which they are begun.

    Rows of equal length keep their order, whatever their blocks are: it is cached for all masks of the shape.
    """
    counts = [mask.kv_num_blocks, mask.kv_num_blocks + mask.full_kv_num_blocks]
    if not mask.equal_rows:
        counts += sections_of(mask.lists(), mask.n_block_cols, near)
    partial_blocks, blocks, *sections = by_tile(torch.stack(counts), mask, batch, heads, tile_m)
    order = order_of_tiles(blocks, mask.n_block_cols, sms, l2_heads, mask.n_block_cols // near + 1, *sections)
    return torch.stack([order.to(torch.int32), partial_blocks.flatten()[order], blocks.flatten()[order]], -1)


def by_tile(counts: torch.Tensor, mask: BlockMask, batch: int, heads: int, tile_m: int) -> torch.Tensor:
    """Numbers (n, B or 1, H or 1, Mq) of the rows of blocks as those of the query tiles, (n, B * H, tiles).

    Tiles have the numbers of scheduler.QueryScheduler, the last rows first.
    """
    tiles_m, each = -(-mask.lengths[0] // tile_m), mask.blocksize[0] // tile_m
    if each > 1:
        counts = counts.repeat_interleave(each, -1, output_size=tiles_q(mask, tile_m))
    return counts[..., :tiles_m].flip(-1).expand(-1, batch, heads, tiles_m).reshape(-1, batch * heads, tiles_m)


def tiles_q(mask: BlockMask, tile_m: int) -> int:
    return mask.n_block_rows * (mask.blocksize[0] // tile_m)


def blocks_of(mask: BlockMask, batch: int, heads: int, tile_m: int, l2_heads: int, near: int, sms: int) -> tuple:
    """Kernel arguments of a mask: columns, how many may be partial, block_source.OrderedScheduler's table.

    The columns, as large as the mask's lists, are made once; each batch, number of heads and tile has its own table.
    A mask of equal rows launches nothing, once masks of its shape are known.
    """

    cached, width, key = mask.derived, mask.kv_indices.shape[-1], (batch, heads, tile_m, l2_heads, near, sms)
    if mask.equal_rows:  # nothing but the columns depends on what the lists hold
        index = mask.kv_indices if width else mask.full_kv_indices
        facts = mask.device, mask.lengths, mask.blocksize, index.shape, width, *key
        return index, width, CONSTANTS.get(facts, index, lambda: (tile_order(mask, *key),), tuple)[0]

    if mask.by_row:  # and used once
        tiles = -(-mask.lengths[0] // tile_m), mask.blocksize[0] // tile_m
        return mask.kv_indices, width, ordered_by_row(mask.kv_num_blocks, batch, heads, *tiles, l2_heads)

    def make() -> tuple:
        index = cached.get("columns", mask.kv_num_blocks, columns, tuple)[0]
        return index, width, tile_order(mask, *key)

    def columns() -> tuple:
        return (torch.cat([mask.kv_indices, mask.full_kv_indices], -1),)

    return cached.get(key, mask.kv_num_blocks, make, lambda value: (value[0], value[2]))


def as_block_mask(q, k, block_mask) -> BlockMask:
    """The block_mask argument of block_sparse_attention as a BlockMask for q and k.

    A mask that is as many rows as columns longer is cropped: each row keeps its position, counted from either end.
    """
    if type(q) is not torch.Tensor or type(k) is not torch.Tensor:
        checks.check_tensor(Q_NAME, q)
        checks.check_tensor(K_NAME, k)
    mask = block_mask if isinstance(block_mask, BlockMask) else _converted(q, k, block_mask)
    if q.dim() == 4 and q.size(2) != mask.lengths[0] and k.dim() == 4:
        lengths = q.size(2), k.size(2)
        if mask.lengths[0] - lengths[0] == mask.lengths[1] - lengths[1] > 0:
            make = partial(mask.crop, lengths)
            return mask.derived.get(("crop", *lengths), mask.kv_num_blocks, make, BlockMask.lists, contents_of(mask))
    return mask


def _converted(q, k, block_mask) -> BlockMask:
    """Another form of mask as a BlockMask of the lengths that it has."""
    if isinstance(block_mask, mask_cache.FlexBlockMask):
        return mask_cache.of_flex(block_mask)
    if isinstance(block_mask, BsrMatrix):
        return mask_cache.of_bsr(block_mask)
    if isinstance(block_mask, SelectedBlocks):
        packed = block_mask.packed  # the mask of rows that are heads of tokens (selected/rows.py)
        return mask_of(block_mask, q.shape[1] // packed, (q.shape[-2] * packed, k.shape[-2]))
    if isinstance(block_mask, mask_cache.ElementTensor):
        return mask_cache.of_elements(block_mask.seen, (q.shape[-2], k.shape[-2]))
    if isinstance(block_mask, torch.Tensor):
        if type(block_mask) is not torch.Tensor or block_mask.is_nested:
            check_supported(OP, block_mask)
        if block_mask.layout is torch.sparse_bsr:
            return mask_cache.of_torch_bsr(block_mask)
        return mask_cache.of_blocks(block_mask, (q.shape[-2], k.shape[-2]))
    return checks.refuse_mask(block_mask)


def prepared(args: AttentionArgs) -> tuple:
    """The block mask of a call, before its plan is looked up.

    Returns:
        (mask, masked, reads, facts, lists): block_mask as a BlockMask; the same with causal; the tensors, and then the
        numbers, that its element mask reads; what a plan depends on, None without a kernel or if an argument is wrong;
        and the tensors that `out` must not overlap.
    """
    q = args.q
    mask = masked = as_block_mask(q, args.k, args.block_mask)
    reads: tuple = ()
    lists: tuple = ()
    facts = None
    if planning.has_kernel(q):
        try:
            if args.causal:  # whose bound may be a number that the kernel reads, or a constant
                masked = with_causal(mask)
            offsets = check_offsets(OP, args.q_offset, args.k_offset, *mask.lengths)
            element, reads = element_of(masked, q.shape[0], q.shape[1], offsets)
            facts = mask.lengths, mask.blocksize, mask.batch, mask.heads, mask.device, element
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            pass  # the checks will say what is wrong
    if args.out is not None:
        lists = *mask.lists(), *(t for t in reads if isinstance(t, torch.Tensor))
    return mask, masked, reads, facts, lists


def plan_block_sparse(args: AttentionArgs) -> FlashPlan:
    """dispatch.plan_attention of a call with a block mask."""
    q, k, v = args[:3]
    mask = as_block_mask(q, k, args.block_mask)
    checks.refuse_with_mask(OP, args)
    narrow = fp8.serves(args)
    if narrow:
        fp8.check(args)
    else:
        if args.k_descale is not None or args.v_descale is not None:
            checks.check_wide(args, "a block mask and a 16-bit q")
        checks.check_qkv(OP, q, k, v)
    plan = planning.checked_plan(args, (*q.shape[:3], v.shape[-1]), q.shape[:3], k.shape[2])
    checks.check_block_mask(OP, mask, q, k)
    window_bounds(None, args.causal)  # checks causal
    offsets = check_offsets(OP, args.q_offset, args.k_offset, *mask.lengths)
    checks.check_causal_blocks(OP, args.causal, offsets)
    if args.score_mod is not None:
        checks.check_score(args, (q.shape[0], q.shape[1]), lengths_at(mask.lengths, offsets))
    if plan.empty or not planning.has_kernel(q):
        return plan
    masked = with_causal(mask) if args.causal else mask
    element, _ = element_of(masked, q.shape[0], q.shape[1], offsets)
    shifted = offsets is not None and (args.score_mod is not None or mask.mask_mod is not None)
    terms = {"offsets": shifted, "choose": fp8.choose_kernel(args) if narrow else None}
    extents = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    planning.plan_kernel(plan, args, extents=extents, **terms, blocks=BlockKind(*mask.blocksize, element))
    tile_m = plan.facts.config.tile_m
    row_bytes = plan.facts.kv_row_bytes
    l2_heads = heads_in_l2(k.shape[2], row_bytes) * (q.shape[1] // k.shape[1])
    plan.order = tile_m, l2_heads, max(NEAR_BYTES // (row_bytes * mask.blocksize[1]), 1), plan.sms
    tiles = extents[0] * -(-extents[1] // tile_m)
    if tiles > MOST_TILES:
        raise ValueError(f"{OP}: {tiles} tiles of queries are too many; at most {MOST_TILES} are numbered")
    return plan
