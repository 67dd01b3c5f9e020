"""Moves tiles of K and V, and the gradients of these tiles back to their owners.

Rows come first in what is sent, (tokens, B, Hkv, D), so that what process s sends to process r is one piece of memory,
and what arrives is the buffer, by source, without a copy. Gradients move by all_to_all_single. K and V move together,
through the memory of runtime/peers.py where there is one, else by all_to_all_single:

    memory of process s    K for process 0 | K for 1 | ..    V for process 0 | V for 1 | ..
    process r              its own tiles to its buffers; the barrier; K and V for r of each s, by one kernel
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.runtime.peers import Peers, peers_of
from cute_kernels.runtime.torch_compat import copy_each

from .plan import ContextParallelPlan

MOST_BYTES = 2**28  # that a process sends through memory of its own; each process has two buffers of it


def gathered(k: Tensor, v: Tensor, plan: ContextParallelPlan) -> tuple[Tensor, Tensor]:
    """The buffers (B, Hkv, tiles of the buffer * tile, D) of shards of K and V (B, Hkv, local length, D)."""
    tiles = [_tiles(t, plan) for t in (k, v)]
    peers = _peers_of(tiles, plan)
    k, v = [_received(t, plan) for t in tiles] if peers is None else _read(tiles, plan, peers)
    return _rows(k), _rows(v)


def _received(tiles: Tensor, plan: ContextParallelPlan) -> Tensor:
    """The tiles of a buffer, by all-to-all."""
    own = len(plan.own)
    buffer = tiles.new_empty((len(plan.buffer), *tiles.shape[1:]))
    torch.index_select(tiles, 0, plan.own, out=buffer[:own])
    _all_to_all(buffer[own:], tiles.index_select(0, plan.sends), plan.receive_counts, plan.send_counts, plan.group)
    return buffer


def _peers_of(tiles: Sequence[Tensor], plan: ContextParallelPlan) -> Peers | None:
    """The memory through which tiles of these shapes move; None for an all-to-all. The same on all processes.

    A CUDA graph could be replayed an odd number of turns after it was captured, so it has all-to-alls.
    """
    if plan.group is None or is_compiling() or not 0 < _bytes_sent(tiles, plan) <= MOST_BYTES:
        return None
    if tiles[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return peers_of(plan.group, tiles[0].device)


def _bytes_sent(tiles: Sequence[Tensor], plan: ContextParallelPlan) -> int:
    """Bytes that the process that sends most sends."""
    return plan.most_sent * sum(t[0].numel() * t.element_size() for t in tiles)


def _read(tiles: Sequence[Tensor], plan: ContextParallelPlan, peers: Peers) -> list[Tensor]:
    """The tiles of the buffers of K and V, read from the memory of the other processes."""
    own, count, sent = len(plan.own), plan.tiles.shape[1], len(plan.sends)
    turn = peers.take(_bytes_sent(tiles, plan))
    buffers = [t.new_empty((len(plan.buffer), *t.shape[1:])) for t in tiles]
    pairs = [(_words(t), _words(buffer)) for t, buffer in zip(tiles, buffers, strict=True)]  # (tiles, words of one)
    widths = [words.shape[1] for words, _ in pairs]

    def places_in(memory: Tensor) -> list[Tensor]:
        """K and V, (most_sent, words of a tile), in the memory of a process."""
        parts = memory.view(torch.int32).split([plan.most_sent * width for width in widths])
        return [part.view(-1, width) for part, width in zip(parts, widths, strict=True)]

    for (words, buffer), place in zip(pairs, places_in(turn.own), strict=True):
        torch.index_select(words, 0, plan.sends, out=place[:sent])
        if own == count:  # ascending, so all of them in order
            buffer[:own].copy_(words)
        else:
            torch.index_select(words, 0, plan.own, out=buffer[:own])
    turn.ready()
    begins = list(accumulate(plan.receive_counts, initial=own))
    to, of = [], []
    for source in (*range(plan.rank + 1, plan.size), *range(plan.rank)):  # so that each is read by another process
        received = plan.receive_counts[source]
        if received:
            for (_, buffer), place in zip(pairs, places_in(turn.of(source)), strict=True):
                to.append(buffer[begins[source] : begins[source] + received])
                of.append(place[plan.places[source] : plan.places[source] + received])
    copy_each(to, of)
    return buffers


def _words(tiles: Tensor) -> Tensor:
    """Contiguous tiles as int32, (tiles, words of one): 4 bytes at a time, whatever their dtype."""
    tiles = tiles.flatten(1)
    if tiles.storage_offset() * tiles.element_size() % 4:
        tiles = tiles.clone()
    return tiles.view(torch.int32)


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
