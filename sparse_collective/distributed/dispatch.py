"""Expert parallelism: tokens go to the ranks that hold their experts, and results come back.

A call sorts its rows (tokens times top_k) by expert, and moves them by an all-to-all: unicast, and no row but those
that another rank's experts multiply. Ranks exchange the numbers of rows first, which the host reads: one
synchronization for each layer, in forward alone. Rows that arrive are ordered by expert, then by rank, then as their
rank sorted them: the order of one process that has the tokens of all ranks. Gradients have it, too, and use no atomics.

What needs no numbers is launched before the host waits for them; the padded layout is computed during the transfer:

    stream      sort [ exchange numbers ] gather rows  [ layout ]                        gather   experts
    transfers                                          [ rows to other ranks ...      ]
    host                                 waits ------->  launches                                          <- time
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels.runtime.torch_compat import all_gather_single

from ..nn.feed_forward import combined, sorted_choices

__all__ = ["Routing", "routed_over_ranks"]

Layers = Callable[[Tensor, Tensor], Tensor]  # of padded rows (rows, K) and the expert of each run, here numbered from 0


class Routing:
    """Destinations of the rows of a call, and the numbers of rows that ranks exchange.

    order: (T * k,) int64, the choice that each sorted row is of; choice i is of token i // k.
    slots: (T * k,) int64, the sorted row of each choice.

    After `read`:

    leaving, arriving: rows to each rank, and from each rank.
    table: for each rank, where the rows of each expert begin, and the numbers of those of no expert.

    After `lay_out`, for the A rows that arrive and the padded layout that the grouped GEMM reads:

    places: (A,) int64, the place of each row in the layout.
    sources: (rows,) int64, the row in each place; A in padding.
    expert_ids: (rows / group_rows,) int32, the expert of each run, numbered from this rank's first.
    """

    leaving: list[int]
    table: list[list[int]]
    arriving: list[int]
    places: Tensor
    sources: Tensor
    expert_ids: Tensor

    def __init__(self, choices: Tensor, experts: int, mesh: Any) -> None:
        self.group, self.rank, self.experts, self.k = mesh.get_group(), mesh.get_local_rank(), experts, choices.shape[1]
        self.each = experts // mesh.size()
        keys, self.order = sorted_choices(choices, experts)
        # Where each expert's rows begin. Before the first and behind the last are choices that are no expert.
        numbers = torch.arange(experts + 2, device=keys.device, dtype=keys.dtype)
        begins = torch.searchsorted(keys, numbers)  # (experts + 2,)
        table = begins.new_empty(mesh.size() * len(begins))
        all_gather_single(table, begins, self.group)
        self._table = table.view(mesh.size(), -1).to("cpu", non_blocking=True)
        self._copied = None if keys.device.type == "cpu" else torch.get_device_module(keys.device).Event()
        if self._copied is not None:
            self._copied.record()
        self.slots = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(keys), device=keys.device))

    def read(self) -> list[list[int]]:
        """Wait for the numbers of rows, from each rank to each. Synchronizes.

        Raises:
            ValueError: a choice of a rank is not an expert; on all ranks, so that none waits for those that raised.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self.table = table = self._table.tolist()
        wrong = {rank: line[0] + line[-1] - line[-2] for rank, line in enumerate(table)}
        if any(wrong.values()):
            ranks = dist.get_process_group_ranks(self.group)
            found = ", ".join(f"{n} of {table[rank][-1]} on rank {ranks[rank]}" for rank, n in wrong.items() if n)
            raise ValueError(f"choices must be in [0, {self.experts}), the experts of all ranks; {found} are not")
        cuts = range(0, self.experts + 1, self.each)
        rows = [[line[end] - line[begin] for begin, end in itertools.pairwise(cuts)] for line in table]
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
        weights: (T, k), by which the results of a token's choices are multiplied.
        experts: of all ranks, a multiple of them; each holds as many, in the order of ranks.
        group_rows: rows of a run.
        layers: this rank's experts, from (rows, K) to (rows, N).
        mesh: one-dimensional.

    Returns:
        (T, N) of x's dtype, summed in FP32 at least. Differentiable once. Synchronizes.
    """
    routing = Routing(choices, experts, mesh)
    y = layers(Dispatch.apply(x, routing, group_rows), routing.expert_ids)
    return combined(Return.apply(y, routing).unflatten(0, choices.shape), weights, x.dtype)
