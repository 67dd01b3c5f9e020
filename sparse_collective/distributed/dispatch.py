"""Expert parallelism: tokens go to the ranks that hold their experts, and results come back.

A call sorts its rows (tokens times top_k) by expert, and moves them by all_to_all_single: unicast, and no row but those
that another rank's experts multiply. Ranks exchange the numbers of rows first, which the host reads: one
synchronization for each layer, in forward alone. Rows that arrive are ordered by expert, then by rank, then as their
rank sorted them: the order of one process that has the tokens of all ranks. Gradients have it, too, and use no atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn.feed_forward import combined
from ..padded_rows import Padding, spread, taken

__all__ = ["routed_over_ranks"]


class Routing:
    """Destinations of the rows of a call, and the numbers of rows that ranks exchange.

    order: (T * k,) int64, the choice that each sorted row is of; choice i is of token i // k.
    slots: (T * k,) int64, the sorted row of each choice.
    arriving: (ranks, experts of this rank) int64, rows that arrive from each rank.
    """

    def __init__(self, choices: Tensor, experts: int, mesh: Any) -> None:
        self.group, ranks, flat = mesh.get_group(), mesh.size(), choices.flatten()
        self.order = flat.argsort(stable=True)
        self.slots = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(flat), device=flat.device))
        numbers = torch.arange(experts, device=flat.device, dtype=flat.dtype)
        ends = torch.searchsorted(flat[self.order], numbers, right=True)
        leaving = ends.diff(prepend=ends.new_zeros(1))
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.group)
        self.arriving = arriving.view(ranks, -1)
        self._rows = torch.stack([leaving.view(ranks, -1), self.arriving]).sum(-1).to("cpu", non_blocking=True)
        self._copied = None if flat.device.type == "cpu" else torch.get_device_module(flat.device).Event()
        if self._copied is not None:
            self._copied.record()

    def rows(self) -> tuple[list[int], list[int]]:
        """Numbers of rows that leave for each rank, and that arrive from it. Synchronizes."""
        if self._copied is not None:
            self._copied.synchronize()
        leaving, arriving = self._rows.tolist()
        return leaving, arriving

    def padding(self, total: int, group_rows: int) -> Padding:
        """The layout of rows that arrive, for the grouped GEMM.

        Args:
            total: number of rows.
            group_rows: rows of a run.
        """
        experts = self.arriving.shape[1]
        widths = -(-self.arriving.sum(0) // group_rows) * group_rows  # of each expert's runs
        ends = widths.cumsum(0)
        places = ends - widths + self.arriving.cumsum(0) - self.arriving  # of the first row of (rank, expert)
        segments = self.arriving.flatten().cumsum(0)  # as rows arrive
        shift = places.flatten() - segments + self.arriving.flatten()
        numbers = torch.arange(total, device=ends.device)
        slots = numbers + shift[torch.searchsorted(segments, numbers, right=True)]
        runs = total // group_rows + min(total, experts)
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
    """Row i of the result is y[slots[i]]; slots and order are inverse permutations."""

    @staticmethod
    def forward(ctx, y, order, slots):
        ctx.save_for_backward(order, slots)
        return y.index_select(0, slots)

    @staticmethod
    def backward(ctx, dy):
        order, slots = ctx.saved_tensors
        return UnsortRows.apply(dy, slots, order), None, None


class AllToAll(torch.autograd.Function):
    """Send leaving[r] rows of x (n, N) to rank r, in the order of ranks; returns the rows that arrive."""

    @staticmethod
    def forward(ctx, x, leaving, arriving, group):
        ctx.call = arriving, leaving, group
        out = x.new_empty(sum(arriving), x.shape[1])
        raw = [t.view(torch.uint8) for t in (out, x.contiguous())]  # gloo has no 16-bit types
        dist.all_to_all_single(raw[0], raw[1], arriving, leaving, group=group)
        return out

    @staticmethod
    def backward(ctx, dy):
        return AllToAll.apply(dy, *ctx.call), None, None, None


@torch.compiler.disable(reason="numbers of rows that ranks exchange are read on the host")
def routed_over_ranks(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    experts: int,
    group_rows: int,
    layers: Callable[[Tensor, Tensor], Tensor],
    mesh: Any,
) -> Tensor:
    """`nn.feed_forward.routed` with experts over the ranks of a mesh; all ranks must call it together.

    Args:
        x: (T, K), this rank's tokens; T differs between ranks and may be 0.
        choices: (T, k) int64, in [0, experts).
        weights: (T, k), by which the results of a token's choices are multiplied.
        experts: of all ranks, a multiple of them; each holds as many, in the order of ranks.
        group_rows: rows of a run.
        layers: from padded rows (rows, K), and the expert of each run in this rank's numbering, to (rows, N).
        mesh: one-dimensional.

    Returns:
        (T, N) of x's dtype, summed in FP32 at least. Differentiable. Synchronizes.
    """
    routing = Routing(choices, experts, mesh)
    rows = SortRows.apply(x, routing.order, routing.slots, choices.shape[1])
    leaving, arriving = routing.rows()
    rows = AllToAll.apply(rows, leaving, arriving, routing.group)
    padding = routing.padding(sum(arriving), group_rows)
    y = taken(layers(spread(rows, padding), padding.groups), padding)
    y = AllToAll.apply(y, arriving, leaving, routing.group)
    y = UnsortRows.apply(y, routing.order, routing.slots)
    return combined(y.unflatten(0, choices.shape), weights, x.dtype)
