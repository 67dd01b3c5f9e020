"""Moves tiles of K and V, and the gradients of these tiles back to their owners.

Rows come first in what is sent, (tokens, B, Hkv, D), so that what process s sends to process r is one piece of memory,
and what arrives is the buffer, by source, without a copy. Everything is unicast, by all_to_all_single.
"""

import torch
from torch import Tensor

from .plan import ContextParallelPlan


def gathered(x: Tensor, plan: ContextParallelPlan) -> Tensor:
    """The buffer (B, Hkv, tiles of the buffer * tile, D) of a shard of K or V (B, Hkv, local length, D)."""
    tiles, own = _tiles(x, plan), len(plan.own)
    buffer = tiles.new_empty((len(plan.buffer), *tiles.shape[1:]))
    torch.index_select(tiles, 0, plan.own, out=buffer[:own])
    _all_to_all(buffer[own:], tiles.index_select(0, plan.sends), plan.receive_counts, plan.send_counts, plan.group)
    return _rows(buffer)


def reduced(gradient: Tensor, plan: ContextParallelPlan, dtype: torch.dtype) -> Tensor:
    """The gradient of a shard from those of all processes' buffers: added in FP32, this process's own first and then
    in the order of the processes, so that results are the same in each run.

    Args:
        gradient: that of this process's buffer, (B, Hkv, tiles of the buffer * tile, D). It is written to.
    """
    tiles, own, count = _tiles(gradient, plan), len(plan.own), plan.tiles.shape[1]
    parts = tiles.new_empty((len(plan.sends), *tiles.shape[1:]))
    _all_to_all(parts, tiles[own:], plan.send_counts, plan.receive_counts, plan.group)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    total = tiles[:own].to(wide)
    if own < count:
        total = total.new_zeros((count, *tiles.shape[1:])).index_copy_(0, plan.own, total)
    for places, part in zip(plan.sends.split(plan.send_counts), parts.split(plan.send_counts), strict=True):
        total.index_add_(0, places, part.to(wide))  # no place twice
    return _rows(total.to(dtype))


def _all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], group) -> None:
    """Fill `out` with what the processes send to this one, by process: `received` entries of each, while each gets its
    `sent` of x."""
    torch.distributed.all_to_all_single(out, x, received, sent, group=group)


def _tiles(x: Tensor, plan: ContextParallelPlan) -> Tensor:
    """(tiles, tile, B, Hkv, D) of (B, Hkv, tokens, D), contiguous."""
    return x.permute(2, 0, 1, 3).contiguous().unflatten(0, (-1, plan.tile))


def _rows(tiles: Tensor) -> Tensor:
    """(B, Hkv, tokens, D) of (tiles, tile, B, Hkv, D)."""
    return tiles.flatten(0, 1).permute(1, 2, 0, 3)
