"""Moves tiles of K and V, and the gradients of these tiles back to their owners.

Rows come first in what is sent, (tokens, B, Hkv, D), so that what process s sends to process r is one piece of memory,
and what arrives is the buffer, by source, without a copy. Everything is unicast, by all_to_all_single. What a process
does with its own tiles, it does while the others' arrive.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .plan import ContextParallelPlan


def gathered(shards: Sequence[Tensor], plan: ContextParallelPlan) -> list[Tensor]:
    """The buffers (B, Hkv, tiles of the buffer * tile, D) of shards of K and V (B, Hkv, local length, D)."""
    own = len(plan.own)
    moves = []
    for x in shards:
        tiles = _tiles(x, plan)
        buffer = tiles.new_empty((len(plan.buffer), *tiles.shape[1:]))
        sent = tiles.index_select(0, plan.sends)
        transfer = _all_to_all(buffer[own:], sent, plan.receive_counts, plan.send_counts, plan.group)
        moves.append((tiles, buffer, transfer))
    for tiles, buffer, _ in moves:
        torch.index_select(tiles, 0, plan.own, out=buffer[:own])
    for *_, transfer in moves:
        _wait(transfer)
    return [_rows(buffer) for _, buffer, _ in moves]


def reduced(gradients: Sequence[Tensor], plan: ContextParallelPlan, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The gradients of shards of K and V from those of all processes' buffers: added in FP32, this process's own first
    and then in the order of the processes, so that results are the same in each run.

    Args:
        gradients: those of this process's buffers, (B, Hkv, tiles of the buffer * tile, D). They are written to.
        dtypes: of the results.
    """
    own, count = len(plan.own), plan.tiles.shape[1]
    moves = []
    for gradient in gradients:
        tiles = _tiles(gradient, plan)
        parts = tiles.new_empty((len(plan.sends), *tiles.shape[1:]))
        transfer = _all_to_all(parts, tiles[own:], plan.send_counts, plan.receive_counts, plan.group)
        moves.append((tiles, parts, transfer))
    sums = []
    for (tiles, parts, transfer), dtype in zip(moves, dtypes, strict=True):
        total = tiles[:own].to(torch.promote_types(tiles.dtype, torch.float32))
        if own < count:
            total = total.new_zeros((count, *tiles.shape[1:])).index_copy_(0, plan.own, total)
        _wait(transfer)
        for places, part in zip(plan.sends.split(plan.send_counts), parts.split(plan.send_counts), strict=True):
            total.index_add_(0, places, part.to(total.dtype))  # no place twice
        sums.append(_rows(total.to(dtype)))
    return sums


def _all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], group) -> Any:
    """Begin to fill `out` with what the processes send to this one, by process: `received` entries of each, while each
    gets its `sent` of x. Returns what `_wait` takes; in a trace `out` is filled."""
    if is_compiling():  # where a call returns a tensor
        torch.distributed.all_to_all_single(out, x, received, sent, group=group)
        return None
    return torch.distributed.all_to_all_single(out, x, received, sent, group=group, async_op=True)


def _wait(transfer: Any) -> None:
    """Let the current stream wait for a transfer."""
    if transfer is not None:
        transfer.wait()


def _tiles(x: Tensor, plan: ContextParallelPlan) -> Tensor:
    """(tiles, tile, B, Hkv, D) of (B, Hkv, tokens, D), contiguous."""
    return x.permute(2, 0, 1, 3).contiguous().unflatten(0, (-1, plan.tile))


def _rows(tiles: Tensor) -> Tensor:
    """(B, Hkv, tokens, D) of (tiles, tile, B, Hkv, D)."""
    return tiles.flatten(0, 1).permute(1, 2, 0, 3)
