"""Heuristics for decode: the calls of attention() that dispatch to the decode kernels, and their number of splits.

Every call with seqused_k or page_table dispatches to them, and calls with short Q, which are bound by reading K and V.
"""

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import fields, replace

import torch

from cute_kernels.dtypes import FLOAT8 as NARROW
from cute_kernels.runtime import families

from ..arguments import AttentionArgs
from ..forward.config import DecodeFacts, FlashConfig, FlashFacts
from ..forward.heuristics import SM_80 as SM_80_FORWARD
from ..forward.heuristics import WIDE
from .checks import capacity

# By the larger of the two head dimensions: (tile_n, stages, CTAs per SM), with as much of K and V in flight as shared
# memory holds. With two CTAs, one loads while the other does not; two are measured at 128 only, and above it their
# rings would be too short.
SM_90 = {
    64: (128, 3, 2),
    96: (64, 4, 2),
    128: (64, 3, 2),
    192: (64, 4, 1),
    256: (64, 3, 1),
}
# Without, and with pages or a head dimension above 128, which need registers: (tile_m, tile_n, stages, warps). The
# first that fits is selected.
SM_80 = {
    False: ((64, 32, 4, 4), (64, 32, 3, 4)),
    True: ((64, 16, 6, 4), (64, 16, 4, 4)),
}
# At head dimension 512, also on sm_90: warps split the head dimension of the same rows (FlashFacts.sharers). For at
# most WIDE_FEW packed rows, without and with pages, which need registers. For more rows the forward kernel's tiles.
WIDE_FEW = 16
SM_80_WIDE_FEW = {
    False: ((16, 32, 3, 4), (16, 32, 2, 4), (16, 32, 1, 4)),
    True: ((16, 16, 6, 4), (16, 16, 4, 4), (16, 16, 2, 4)),
}
# FP8 caches, by the larger of the two head dimensions: (tile_n, stages); the first that fits is selected. A warp's tile
# of K has 3 to 4 KB, its ring 24: on sm_90 two CTAs per SM have most of 192 KB in flight.
FLOAT8 = {
    64: ((64, 3), (64, 2)),
    96: ((32, 4), (32, 3)),
    128: ((32, 3), (32, 2)),
    192: ((16, 4), (16, 3)),
    256: ((16, 3), (16, 2)),
}
FLOAT8_ROWS, FLOAT8_WARPS = 16, 4
CTAS_SM_80 = 2  # typical number of CTAs per SM
TILE_M = 64
OVERHEAD = 2.0  # start and end of a work tile, in units of KV tiles; a model
FAMILY = DecodeFacts.family
COMBINE = 1.0  # the combine kernel, in the same unit

_FORCED: contextvars.ContextVar[int | None] = contextvars.ContextVar("attention_splits", default=None)
forced_splits = _FORCED.get


@contextlib.contextmanager
def splits(count: int):
    """Force the decode kernel with `count` splits inside the block, for every call that it supports: for tests and
    timing."""
    token = _FORCED.set(count)
    try:
        yield
    finally:
        _FORCED.reset(token)


def best_splits(items: int, tiles: int, ctas: int, combine: float = COMBINE) -> int:
    """Number of splits of a sequence's KV tiles with the least estimated time, if `ctas` CTAs run at once."""
    counts = range(1, max(min(tiles, 2 * ctas), 1) + 1)
    return min(counts, key=lambda count: split_time(count, items, tiles, ctas, combine))  # the first of equals


def split_time(count: int, items: int, tiles: int, ctas: int, combine: float) -> float:
    """Estimated time of `count` splits, in units of KV tiles, if the combine kernel takes `combine`."""
    return -(-items * count // ctas) * (-(-tiles // count) + OVERHEAD) + combine * (count > 1)


def serves(q, k, sms: int) -> bool:
    """True if a call without seqused_k and page_table dispatches to the decode kernel. Depends on shapes only.

    It does if the packed rows fit in one tile; or in a few tiles, if the forward kernel would leave half of the SMs
    idle.
    """
    batch, heads, rows, _ = q.shape
    packed = heads // k.shape[1] * rows
    few = packed <= 4 * TILE_M and 2 * batch * heads * -(-rows // 128) <= sms
    return forced_splits() is not None or packed <= TILE_M or few


def pick(facts: DecodeFacts, packed_rows: int = TILE_M) -> DecodeFacts:
    """The facts with their configuration, the only one for them, except at head dimension 512."""
    dim = max(facts.head_dim, facts.head_dim_v)
    if facts.cache is not None:
        ctas = 2 if facts.spec.name == "sm_90" else 1
        configs = (FlashConfig(FLOAT8_ROWS, *c, FLOAT8_WARPS, ctas=ctas) for c in FLOAT8[dim])
        candidates = (replace(facts, path="sm_80", config=c) for c in configs)
        return next(f for f in candidates if f.smem_bytes <= f.spec.smem)
    if dim == WIDE:
        shapes = SM_80_WIDE_FEW[facts.page_size > 0] if packed_rows <= WIDE_FEW else SM_80_FORWARD[WIDE]
        candidates = (replace(facts, path="sm_80", config=FlashConfig(*c)) for c in shapes)
        return next(f for f in candidates if f.smem_bytes <= f.spec.smem)
    if facts.path == "sm_90":
        tile_n, stages, ctas = SM_90[dim]
        return replace(facts, config=FlashConfig(TILE_M, tile_n, stages, 1, ctas=ctas))
    candidates = (replace(facts, config=FlashConfig(*c)) for c in SM_80[facts.page_size > 0 or dim > 128])
    return next(f for f in candidates if f.smem_bytes <= f.spec.smem)


def choose_kernel(args: AttentionArgs, bounds: tuple, offsets: bool) -> Callable:
    """Return the `choose` callback of plan.plan_kernel: it selects the decode kernel for calls that dispatch to it.

    Args:
        bounds: the window's (left, right).
        offsets: True if the call has offsets, which the decode kernel does not support.
    """

    def choose(plan, facts: FlashFacts, extents) -> bool:
        q, k = args.q, args.k
        if args.seqused_k is not None or (not offsets and serves(q, k, extents.sms)):
            use(plan, facts, args, bounds, extents.sms)
            return True
        if k.dtype in NARROW:  # only the decode kernel supports it
            raise TypeError(
                f"attention: {k.dtype} k and v with {q.dtype} q require the decode kernel, which is selected for short "
                f"q, got {q.shape[2]} queries and {q.shape[1]} heads; pass seqused_k, which always selects it (slow "
                "for long q), or dequantize k and v, k.to(q.dtype) * k_descale"
            )
        return False

    return choose


def use(plan, facts: FlashFacts, args: AttentionArgs, bounds: tuple, sms: int) -> None:
    """Set the decode kernel of a plan that is complete otherwise; `bounds` are the window's (left, right)."""
    q, k, seqused_k, page_table = args.q, args.k, args.seqused_k, args.page_table
    spans = seqused_k is not None and seqused_k.dim() == 2
    page_size = 0 if page_table is None else k.shape[2]
    base = {f.name: getattr(facts, f.name) for f in fields(FlashFacts)}
    batch, heads, rows, _ = q.shape
    columns, qhead_per_kvhead = capacity(k, page_table), heads // k.shape[1]
    if spans:
        base["window"] = replace(facts.window, left=True)
        if bounds[0] is None:  # a bound that masks no row
            scale, cap, _, right = plan.scalars
            plan.scalars = scale, cap, columns, right
    if cache_dtype := NARROW.get(k.dtype):
        scales = {"k_descale": args.k_descale is not None, "v_descale": args.v_descale is not None}
        base |= {"cache": cache_dtype, **scales}
    facts = DecodeFacts(**base, seqlens=seqused_k is not None, spans=spans, page_size=page_size)
    if reason := families.unsupported(facts):
        raise TypeError(f"attention: {reason}")
    facts = pick(facts, qhead_per_kvhead * rows)
    tile_m = facts.config.tile_m
    if None not in bounds:
        columns = min(columns, sum(bounds) + rows)
    items = batch * k.shape[1] * -(-qhead_per_kvhead * rows // tile_m)
    ctas = sms * ctas_of(facts)
    count = forced_splits() or best_splits(items, -(-columns // facts.columns), ctas)
    plan.facts = replace(facts, split=count > 1)
    plan.scalars += (count, ctas) if facts.path == "sm_90" else (count,)
    shape = (count, *plan.out_shape) if count > 1 else None
    plan.function = with_parts(families.function_for(plan.facts), shape, q.device)
    plan.notes.append(
        f"decode: {qhead_per_kvhead} query heads packed in a tile of {tile_m} rows, K and V split among {count} CTAs"
    )
    if cache_dtype:
        plan.notes.append(f"k and v are {cache_dtype}, converted to fp16 in registers")


def ctas_of(facts: DecodeFacts) -> int:
    """Number of CTAs per SM."""
    if facts.path == "sm_90" or facts.cache:
        return facts.config.ctas
    return 1 if facts.head_dim == WIDE else CTAS_SM_80


def with_parts(function: Callable, shape: tuple | None, device: torch.device) -> Callable:
    """The compiled function with its partial results allocated: O of `shape` (splits, B, H, Sq, Dv), and LSE."""

    shapes = () if shape is None else (shape, shape[:-1])

    def whole(q, k, v, out, lse, sinks, seqlens, table, reads, *scalars):
        function(q, k, v, out, lse, sinks, seqlens, table, reads, None, None, *scalars)

    def split(q, k, v, out, lse, sinks, seqlens, table, reads, *scalars):
        parts = (torch.empty(s, dtype=torch.float32, device=device) for s in shapes)
        function(q, k, v, out, lse, sinks, seqlens, table, reads, *parts, *scalars)

    return whole if shape is None else split
