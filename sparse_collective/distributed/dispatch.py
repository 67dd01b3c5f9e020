"""Expert parallelism: tokens go to the ranks that hold their experts, and results come back.

A call sorts its rows (tokens times top_k) by expert. Where the ranks read each other's memory, kernels move the rows:
see peer_dispatch. Elsewhere (on the CPU, over several hosts) an all-to-all does: unicast, and no row but those that
another rank's experts multiply. Ranks exchange the numbers of rows first, which the host reads: one synchronization for
each layer, in forward alone. Rows that arrive are ordered by expert, then by rank, then as their rank sorted them: the
order of one process that has the tokens of all ranks. Gradients have it, too, and use no atomics.

What needs no numbers is launched before the host waits for them; the padded layout is computed during the transfer:

    stream      sort [ exchange numbers ] gather rows  [ layout ]                        gather   experts
    transfers                                          [ rows to other ranks ...      ]
    host                                 waits ------->  launches                                          <- time
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels.runtime.peers import peers_of

from ..expert_rows.dispatch import supports
from ..nn.feed_forward import combined
from .peer_dispatch import routed_over_peers
from .routing import Layers, Routing

__all__ = ["refuse", "routed_over_ranks"]

_BY_PEERS: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # group -> ranks read peers' memory last


class ExchangeRouting(Routing):
    """A Routing whose rows are exchanged by an all-to-all.

    slots: (T * k,) int64, the sorted row of each choice.

    After `read`:

    leaving, arriving: rows to each rank, and from each rank.

    After `lay_out`, for the A rows that arrive and the padded layout that the grouped GEMM reads:

    places: (A,) int64, the place of each row in the layout.
    sources: (rows,) int64, the row in each place; A in padding.
    expert_ids: (rows / group_rows,) int32, the expert of each run, numbered from this rank's first.
    """

    leaving: list[int]
    arriving: list[int]
    places: Tensor
    sources: Tensor
    expert_ids: Tensor

    def __init__(self, choices: Tensor, experts: int, mesh: Any) -> None:
        super().__init__(choices, experts, mesh)
        rows = torch.arange(len(self.order), device=self.order.device)
        self.slots = torch.empty_like(self.order).scatter_(0, self.order, rows)

    def read(self) -> list[list[int]]:
        rows = super().read()
        self.leaving, self.arriving = rows[self.rank], [line[self.rank] for line in rows]
        return rows

    def lay_out(self, group_rows: int) -> None:
        """Compute the padded layout, from numbers that the host has: a copy to the device and six small kernels.

        The host's part is in Python: repeat_interleave on the CPU starts all of torch's threads, which takes the 4
        processes of a host 30 ms.
        """
        begin, total, device = self.rank * self.each, sum(self.arriving), self.order.device
        own = [line[begin : begin + self.each + 1] for line in self.table]
        counts = [[end - start for start, end in itertools.pairwise(line)] for line in own]  # (ranks, experts)
        runs = [-(-sum(column) // group_rows) for column in zip(*counts, strict=True)]
        # Place of each expert's next row
        places = [group_rows * before for before in itertools.accumulate(runs[:-1], initial=0)]
        ends, shifts, row = [], [], 0  # of the rows of (rank, expert), in the order in which they arrive
        for line in counts:
            for expert, count in enumerate(line):
                shifts.append(places[expert] - row)
                row, places[expert] = row + count, places[expert] + count
                ends.append(row)
        expert_ids = [expert for expert, n in enumerate(runs) for _ in range(n)]
        numbers, pinned = ends + shifts + expert_ids, device.type != "cpu"
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=pinned).to(device, non_blocking=True)
        segments, shift, groups = host.split([len(ends), len(ends), len(expert_ids)])
        rows = torch.arange(total, device=device)
        self.places = rows + shift[torch.searchsorted(segments, rows, right=True)]
        self.sources = rows.new_full((group_rows * len(expert_ids),), total).scatter_(0, self.places, rows)
        self.expert_ids = groups.int()


def send(x: Tensor, leaving: list[int], arriving: list[int], group: Any) -> tuple[Tensor, Any]:
    """Start an all-to-all: leaving[r] rows of x (n, N) go to rank r, in the order of ranks.

    Returns:
        (rows that arrive, and behind them a row of zeros, work to wait for).
    """
    total = sum(arriving)
    out = x.new_empty(total + 1, x.shape[1])
    out[total:].zero_()
    raw = [t.view(torch.uint8) for t in (out[:total], x.contiguous())]  # gloo has no 16-bit types
    return out, dist.all_to_all_single(raw[0], raw[1], arriving, leaving, group=group, async_op=True)


class Dispatch(torch.autograd.Function):
    """Rows (rows, K) in the padded layout of this rank's experts, from the tokens x (T, K) of each rank."""

    @staticmethod
    def forward(ctx, x, routing, group_rows):
        ctx.routing = routing
        sent = x.index_select(0, routing.order.div(routing.k, rounding_mode="floor"))
        routing.read()
        out, work = send(sent, routing.leaving, routing.arriving, routing.group)
        routing.lay_out(group_rows)
        work.wait()
        return out.index_select(0, routing.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        routing = ctx.routing
        out, work = send(dy.index_select(0, routing.places), routing.arriving, routing.leaving, routing.group)
        work.wait()
        return out.index_select(0, routing.slots).unflatten(0, (-1, routing.k)).sum(1), None, None


class Return(torch.autograd.Function):
    """Results (T * k, N) of this rank's choices, from those in the padded layouts of all ranks (rows, N)."""

    @staticmethod
    def forward(ctx, y, routing):
        ctx.routing = routing
        out, work = send(y.index_select(0, routing.places), routing.arriving, routing.leaving, routing.group)
        work.wait()
        return out.index_select(0, routing.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        routing = ctx.routing
        out, work = send(dy.index_select(0, routing.order), routing.leaving, routing.arriving, routing.group)
        work.wait()
        return out.index_select(0, routing.sources), None


@torch.compiler.disable(reason="numbers of rows that ranks exchange are read on the host")
def routed_over_ranks(
    x: Tensor, choices: Tensor, weights: Tensor, experts: int, group_rows: int, layers: Layers, mesh: Any
) -> Tensor:
    """`nn.feed_forward.routed` with experts over the ranks of a mesh; all ranks must call it together.

    Args:
        x: (T, K), this rank's tokens; T differs between ranks and may be 0.
        choices: (T, k) int64, in [0, experts).
        weights: (T, k), by which the results of a token's choices are multiplied. Shapes are checked before.
        experts: of all ranks, a multiple of them; each holds as many, in the order of ranks.
        group_rows: rows of a run.
        layers: this rank's experts, from (rows, K) to as many results. They may write these to what `room()` returns.
        mesh: one-dimensional.

    Returns:
        (T, K) of x's dtype, summed in FP32 at least. Differentiable once. Synchronizes.

    Raises:
        ValueError: a choice is no expert; on all ranks.
    """
    group = mesh.get_group()
    peers = peers_of(group, x.device) if mesh.size() > 1 else None
    peers = peers if peers is not None and supports(x, weights, experts) else None
    _BY_PEERS[group] = peers is not None
    if peers is not None:
        return routed_over_peers(x, choices, weights, experts, group_rows, layers, mesh, peers)
    routing = ExchangeRouting(choices, experts, mesh)
    y = layers(Dispatch.apply(x, routing, group_rows), routing.expert_ids, None)
    return combined(Return.apply(y, routing).unflatten(0, choices.shape), weights, x.dtype)


def refuse(experts: int, mesh: Any, device: torch.device) -> None:
    """Take part in the exchange of a call of routed_over_ranks, in which this rank has an error: with a choice of no
    expert, so that all ranks raise, and none waits for this one.

    All other ranks are expected to exchange rows as in the last call.
    """
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    peers = peers_of(group, device)
    routing = Routing(torch.full((1, 1), -1, dtype=torch.int64, device=device), experts, mesh)
    if peers is not None and peers.room and _BY_PEERS.get(group, True):
        peers.acquire(peers.room).ready()  # where the others read each other's tokens; there are none of this rank
    with contextlib.suppress(ValueError):
        routing.wait()
