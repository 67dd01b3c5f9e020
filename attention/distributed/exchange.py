"""Moves tiles of K and V, and the gradients of these tiles back to their owners.

Rows come first in what is sent, (tokens, B, Hkv, D), so that what process s sends to process r is one piece of memory,
and what arrives is the buffer, by source, without a copy. Everything is unicast. What a process does with its own
tiles, it does while the others' arrive.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .plan import ContextParallelPlan


class Route(NamedTuple):
    """Attributes of a plan that transfers read; a ContextParallelPlan takes the place of one."""

    own: Tensor
    sends: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    tile: int
    local_length: int
    group: Any

    @classmethod
    def of(cls, plan: ContextParallelPlan) -> "Route":
        return cls(*(getattr(plan, name) for name in cls._fields))


class Transfer(NamedTuple):
    """An exchange with all processes: `out` receives `received` entries of each, in their order, and each gets its
    `sent` entries of x."""

    out: Tensor
    x: Tensor
    received: list[int]
    sent: list[int]


class Gather:
    """The buffers (B, Hkv, tiles of the buffer * tile, D) of shards of K and V (B, Hkv, local length, D)."""

    def __init__(self, shards: Sequence[Tensor], plan: ContextParallelPlan | Route) -> None:
        own = len(plan.own)
        count = own + sum(plan.receive_counts)
        self._plan, self._tiles = plan, [_tiles(x, plan) for x in shards]
        self._buffers = [tiles.new_empty((count, *tiles.shape[1:])) for tiles in self._tiles]
        counts = plan.receive_counts, plan.send_counts
        self.transfers = [
            Transfer(buffer[own:], tiles.index_select(0, plan.sends), *counts)
            for tiles, buffer in zip(self._tiles, self._buffers, strict=True)
        ]

    def copy_own(self) -> None:
        """Copy this process's tiles to the buffers."""
        for tiles, buffer in zip(self._tiles, self._buffers, strict=True):
            torch.index_select(tiles, 0, self._plan.own, out=buffer[: len(self._plan.own)])

    def buffers(self) -> list[Tensor]:
        """The buffers, when copy_own and the transfers are done, whose memory is freed."""
        self._tiles, self.transfers = [], []
        return [_rows(buffer) for buffer in self._buffers]


class Reduce:
    """The gradients of shards of K and V from those of all processes' buffers, (B, Hkv, tiles of the buffer * tile, D),
    which are written to.

    They are added in FP32, this process's own first and then in the order of the processes, so that results are the
    same in each run.
    """

    def __init__(self, gradients: Sequence[Tensor], plan: ContextParallelPlan | Route) -> None:
        self._plan, self._tiles = plan, [_tiles(gradient, plan) for gradient in gradients]
        counts = plan.send_counts, plan.receive_counts
        self.transfers = [
            Transfer(tiles.new_empty((len(plan.sends), *tiles.shape[1:])), tiles[len(plan.own) :], *counts)
            for tiles in self._tiles
        ]
        self._sums: list[Tensor] = []

    def add_own(self) -> None:
        """Begin with this process's summands."""
        own, count = len(self._plan.own), self._plan.local_length // self._plan.tile
        for tiles in self._tiles:
            total = tiles[:own].to(torch.promote_types(tiles.dtype, torch.float32))
            if own < count:
                total = total.new_zeros((count, *tiles.shape[1:])).index_copy_(0, self._plan.own, total)
            self._sums.append(total)

    def sums(self) -> list[Tensor]:
        """The gradients in FP32, (B, Hkv, local length, D), when add_own and the transfers are done."""
        sends, counts = self._plan.sends, self._plan.send_counts
        for total, transfer in zip(self._sums, self.transfers, strict=True):
            for places, part in zip(sends.split(counts), transfer.out.split(counts), strict=True):
                total.index_add_(0, places, part.to(total.dtype))  # no place twice
        return [_rows(total) for total in self._sums]


def gathered(shards: Sequence[Tensor], plan: ContextParallelPlan) -> list[Tensor]:
    """The buffers of shards of K and V, see Gather."""
    gather = Gather(shards, plan)
    works = begin(gather.transfers, plan.group)
    gather.copy_own()
    wait(works)
    return gather.buffers()


def reduced(gradients: Sequence[Tensor], plan: ContextParallelPlan, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The gradients of shards of K and V, of these dtypes, from those of all processes' buffers, see Reduce."""
    reduce = Reduce(gradients, plan)
    works = begin(reduce.transfers, plan.group)
    reduce.add_own()
    wait(works)
    return [total.to(dtype) for total, dtype in zip(reduce.sums(), dtypes, strict=True)]


def begin(transfers: Sequence[Transfer], group: Any) -> list[Any]:
    """Begin transfers, each by a kernel of its own. Returns what `wait` takes; in a trace they are done."""
    import torch.distributed as dist

    if is_compiling():  # where a call returns a tensor
        for transfer in transfers:
            dist.all_to_all_single(*transfer, group=group)
        return []
    return [dist.all_to_all_single(*transfer, group=group, async_op=True) for transfer in transfers]


def begin_together(transfers: Sequence[Transfer], group: Any) -> list[Any]:
    """Begin transfers, all by one kernel: beside an attention kernel, which has all other multiprocessors until it
    ends, a second one would wait. Returns what `wait` takes."""
    import torch.distributed as dist

    moves = []
    for out, x, received, sent in transfers:
        for process, (arriving, leaving) in enumerate(zip(out.split(received), x.split(sent), strict=True)):
            if len(leaving):
                moves.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=process))
            if len(arriving):
                moves.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=process))
    return dist.batch_isend_irecv(moves) if moves else []


def wait(works: Sequence[Any]) -> None:
    """Let the current stream wait for transfers that have begun."""
    for work in works:
        work.wait()


@contextmanager
def waited_for(queue: deque[list[Any]]) -> Iterator[None]:
    """Wait for the transfers in a queue if an error ends the block, so that the next ones are not taken for them."""
    try:
        yield
    except BaseException:
        while queue:
            wait(queue.popleft())
        raise


def _tiles(x: Tensor, plan: ContextParallelPlan | Route) -> Tensor:
    """(tiles, tile, B, Hkv, D) of (B, Hkv, tokens, D), contiguous."""
    return x.permute(2, 0, 1, 3).contiguous().unflatten(0, (-1, plan.tile))


def _rows(tiles: Tensor) -> Tensor:
    """(B, Hkv, tokens, D) of (tiles, tile, B, Hkv, D)."""
    return tiles.flatten(0, 1).permute(1, 2, 0, 3)
