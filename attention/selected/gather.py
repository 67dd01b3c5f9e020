"""Calls of selected_attention that the kernel with gathered KV tiles serves; block_sparse.py serves the others.

The forward kernels of forward/gather walk the union of the lists of each query tile's tokens, which selected/unions
makes. backward/gather/dispatch decides for backward, whose other calls use the block mask of blocks.py.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime import families
from cute_kernels.runtime.device import forced_path

from .. import checks
from .. import plan as planning
from ..arguments import AttentionArgs
from ..forward.config import FlashFacts
from ..forward.heuristics import GATHER, GATHERED, Extents, gather_facts
from ..plan import FlashPlan
from .blocks import SelectedBlocks
from .unions.config import SIDE, WORD, facts_for, tokens_of
from .unions.dispatch import union_tiles

OP = "block_sparse_attention"
DTYPES = (torch.bfloat16, torch.float16)
MOST = 2**31 - 1  # CTAs, elements of a table, and bytes from one row of K or V to the next


def serves(args: AttentionArgs) -> bool:
    """True if the kernel with gathered KV tiles serves a call whose mask are selected blocks."""
    q, k, v = args[:3]
    mask: SelectedBlocks = args.block_mask
    lists, size = mask.indices, mask.block_size
    dim = q.shape[-1]
    if (
        not planning.has_kernel(q)
        or mask.cu_seqlens_q is not None
        or q.dtype not in DTYPES
        or not q.dtype == k.dtype == v.dtype
        or not dim == k.shape[-1] == v.shape[-1]
        or dim not in GATHER
        or size not in GATHERED
        or size > GATHER[dim][0]
        or args.score_mod is not None
        or 0 in (*q.shape, *k.shape, *lists.shape)
        or q.shape[1] % k.shape[1] != 0
        or q.shape[1] // k.shape[1] > SIDE
        or lists.shape[2] not in (1, k.shape[1])  # query heads with a list of their own
        or any(t is not None for t in (args.q_offset, args.k_offset, args.window_size, *args.descales))
        or any(t.stride(2) * t.element_size() > MOST for t in (k, v))
    ):
        return False
    spec, _ = planning.device_arch(q.get_device())
    if spec.path != "sm_90" or forced_path() not in (None, "sm_90"):
        return False
    packed = packed_heads(args)
    tiles = q.shape[0] * lists.shape[2] * -(-q.shape[2] * packed // SIDE)
    keys = min(kv_blocks(args), tokens_of(packed) * lists.shape[3]) * size + SIDE  # of a union, at most
    entries = tiles * keys // size, tiles * keys // (size * min(SIDE // size, WORD)) * tokens_of(packed)
    return max(tiles, *entries) <= MOST and not families.unsupported(_unions(args, spec.target))


def _unions(args: AttentionArgs, target: str):
    """Facts of the kernel that makes the union tiles."""
    mask = args.block_mask
    return facts_for(target, mask.block_size, kv_blocks(args), mask.indices.shape[3])


def packed_heads(args: AttentionArgs) -> int:
    """Query heads of a KV head, whose rows share a tile."""
    return args.q.shape[1] // args.k.shape[1]


def kv_blocks(args: AttentionArgs) -> int:
    """Number of KV blocks of a sequence."""
    return -(-args.k.shape[2] // args.block_mask.block_size)


def key_of(mask: SelectedBlocks) -> tuple:
    """The key of a plan, besides its tensors."""
    return "gathered", mask.block_size, mask.causal


def tables(args: AttentionArgs) -> tuple:
    """Kernel arguments of the lists (forward.gather.source.with_unions); they are made without synchronization."""
    mask: SelectedBlocks = args.block_mask
    packed = packed_heads(args)
    union, counts, bits = union_tiles(mask.indices, mask.block_size, kv_blocks(args), packed)
    return union, counts, bits.flatten(3), bits.shape[-1], packed


def plan_gathered(args: AttentionArgs) -> FlashPlan:
    """dispatch.plan_attention of a call that `serves`."""
    q, k, v = args[:3]
    checks.refuse_with_mask(OP, args)
    checks.check_qkv(OP, q, k, v)
    plan = planning.checked_plan(args, (*q.shape[:3], v.shape[-1]), q.shape[:3], k.shape[2])
    extents = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    planning.plan_kernel(plan, args, extents=extents, choose=partial(_choose, args.block_mask))
    return plan


def _choose(mask: SelectedBlocks, plan: FlashPlan, facts: FlashFacts, extents: Extents) -> bool:
    """plan_kernel's `choose`: fill in the kernel."""
    plan.facts = gather_facts(facts, mask.block_size, mask.causal)
    plan.function = families.function_for(plan.facts)
    return True


def gathered(args: AttentionArgs) -> bool:
    """True if `serves` the call; False for any other mask."""
    return isinstance(args.block_mask, SelectedBlocks) and serves(args)


def lists_of(args: AttentionArgs) -> tuple[Tensor, ...]:
    """The tensors that `out` must not overlap."""
    mask: Any = args.block_mask
    return (mask.indices,) if args.out is not None else ()
