"""Expert parallelism: tokens go to the ranks that hold their experts, and results come back.

A call sorts its rows (tokens times top_k) by expert, and moves them by an all-to-all: unicast, and no row but those
that another rank's experts multiply. Ranks exchange the numbers of rows first, which the host reads: one
synchronization for each layer, in forward alone. Rows that arrive are ordered by expert, then by rank, then as their
rank sorted them: the order of one process that has the tokens of all ranks. Gradients have it, too, and use no atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime.torch_compat import all_gather_single

from ..nn.feed_forward import combined
from ..padded_rows import Padding, spread, taken
from .transfer import AllToAll

__all__ = ["Routing", "routed_over_ranks"]

Layer = Callable[[Tensor, Tensor], Tensor]  # of padded rows (rows, K) and the expert of each run, here numbered from 0


class Routing:
    """Destinations of the rows of a call, and the numbers of rows that ranks exchange.

    order: (T * k,) int64, the choice that each sorted row is of; choice i is of token i // k.
    slots: (T * k,) int64, the sorted row of each choice.
    arriving: (ranks, experts of this rank) int64, rows that arrive from each rank, this one included.
    """

    def __init__(self, choices: Tensor, experts: int, mesh: Any) -> None:
        self.group, self.rank, self.experts = mesh.get_group(), mesh.get_local_rank(), experts
        ranks, each, keys = mesh.size(), experts // mesh.size(), choices.flatten()
        numbers = torch.arange(experts, device=keys.device, dtype=keys.dtype)
        self.order = keys.argsort(stable=True)
        self.slots = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(keys), device=keys.device))
        keys = keys[self.order]
        leaving = torch.searchsorted(keys, numbers, right=True) - torch.searchsorted(keys, numbers)
        table = leaving.new_empty(ranks * experts)
        all_gather_single(table, leaving, self.group)
        table = table.view(ranks, ranks, each)  # (from, to, expert)
        self.arriving = table[:, self.rank]
        self._rows = table.sum(-1).to("cpu", non_blocking=True)
        self._copied = None if keys.device.type == "cpu" else torch.get_device_module(keys.device).Event()
        if self._copied is not None:
            self._copied.record()

    def rows(self) -> list[list[int]]:
        """Numbers of rows from each rank to each. Synchronizes.

        Raises:
            ValueError: a choice is not an expert.
        """
        if self._copied is not None:
            self._copied.synchronize()
        rows = self._rows.tolist()
        if (known := sum(rows[self.rank])) != len(self.order):
            raise ValueError(
                f"choices must be in [0, {self.experts}), the experts of all ranks; {len(self.order) - known} of "
                f"{len(self.order)} are not"
            )
        return rows


def layout(counts: Tensor, total: int, group_rows: int) -> Padding:
    """Layout for the grouped GEMM of rows that are sorted by rank, then by expert.

    Args:
        counts: (ranks, experts) int64, rows of each.
        total: their sum.
        group_rows: rows of a run.
    """
    widths = -(-counts.sum(0) // group_rows) * group_rows  # of each expert's runs
    ends = widths.cumsum(0)
    places = ends - widths + counts.cumsum(0) - counts  # of the first row of (rank, expert)
    segments = counts.flatten().cumsum(0)
    shift = places.flatten() - segments + counts.flatten()
    numbers = torch.arange(total, device=ends.device)
    slots = numbers + shift[torch.searchsorted(segments, numbers, right=True)]
    runs = total // group_rows + min(total, counts.shape[1])
    firsts = torch.arange(runs, device=ends.device) * group_rows
    return Padding(runs * group_rows, slots, torch.searchsorted(ends, firsts, right=True, out_int32=True))


class SortRows(torch.autograd.Function):
    """x (T, K) to (T * k, K): row i is that of choice order[i]. Backward sums a token's k rows, in their order."""

    @staticmethod
    def forward(ctx, x, order, slots, k):
        ctx.save_for_backward(slots)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, dy):
        (slots,) = ctx.saved_tensors
        return dy.index_select(0, slots).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class UnsortRows(torch.autograd.Function):
    """Row order[i] of the result is row i of y."""

    @staticmethod
    def forward(ctx, y, order):
        ctx.save_for_backward(order)
        return torch.empty_like(y).index_copy_(0, order, y)

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        return dy.index_select(0, order), None


@torch.compiler.disable(reason="numbers of rows that ranks exchange are read on the host")
def routed_over_ranks(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    experts: int,
    group_rows: int,
    layers: Layer,
    mesh: Any,
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
        (T, N) of x's dtype, summed in FP32 at least. Differentiable. Synchronizes.
    """
    routing = Routing(choices, experts, mesh)
    sorted_rows = SortRows.apply(x, routing.order, routing.slots, choices.shape[1])
    y = through_experts(sorted_rows, routing, group_rows, layers)
    return combined(UnsortRows.apply(y, routing.order).unflatten(0, choices.shape), weights, x.dtype)


def through_experts(x: Tensor, routing: Routing, group_rows: int, layers: Layer) -> Tensor:
    """Results of the sorted rows."""
    rows, rank = routing.rows(), routing.rank
    leaving, arriving = rows[rank], [line[rank] for line in rows]
    x = AllToAll.apply(x, leaving, arriving, routing.group)
    padding = layout(routing.arriving, len(x), group_rows)
    y = taken(layers(spread(x, padding), padding.groups), padding)
    return AllToAll.apply(y, arriving, leaving, routing.group)
