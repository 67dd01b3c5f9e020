"""Moves rows between ranks, at once or beside other work of the stream.

AllToAll waits for its rows. StartRows and FinishRows are the two ends of a transfer that runs beside what is called
between them. Their backward passes are the two ends of the reverse transfer: autograd runs nodes in the reverse order
of forward, so the gradients' transfer runs beside the backward pass of the same work.

    forward    StartRows   local tokens   FinishRows   tokens that arrived
    backward   finish      local tokens   start        tokens that arrived      <- time
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.torch_compat import pull_rows

__all__ = ["AllToAll", "FinishRows", "StartRows", "Transfer"]


def all_to_all(x: Tensor, leaving: list[int], arriving: list[int], group: Any, async_op: bool = False) -> Any:
    """(rows that arrive, work); leaving[r] rows of x (n, N) go to rank r, in the order of ranks."""
    out = x.new_empty(sum(arriving), x.shape[1])
    raw = [t.view(torch.uint8) for t in (out, x.contiguous())]  # gloo has no 16-bit types
    return out, dist.all_to_all_single(raw[0], raw[1], arriving, leaving, group=group, async_op=async_op)


class AllToAll(torch.autograd.Function):
    """Send leaving[r] rows of x (n, N) to rank r, in the order of ranks; returns the rows that arrive."""

    @staticmethod
    def forward(ctx, x, leaving, arriving, group):
        ctx.call = arriving, leaving, group
        return all_to_all(x, leaving, arriving, group)[0]

    @staticmethod
    def backward(ctx, dy):
        return AllToAll.apply(dy, *ctx.call), None, None, None


class Transfer:
    """One transfer of rows to other ranks; rows of this rank for itself are not part of it.

    Args:
        rows: (ranks, ranks) numbers of rows, from each rank to each.
        rank: this one.
        group: process group.

    On CUDA each rank copies its rows out of the others' symmetric memory; elsewhere it is an all_to_all_single.
    """

    def __init__(self, rows: list[list[int]], rank: int, group: Any) -> None:
        others = [[n * (i != j) for j, n in enumerate(line)] for i, line in enumerate(rows)]
        self.group, self.leaving = group, others[rank]
        self.arriving = [line[rank] for line in others]
        self.begins = [sum(line[:rank]) for line in others]
        self.room = max(map(sum, others))
        self.wait: Callable[[], Any] | None = None
        self.out: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        """Send x (n, N), rows in the order of the ranks that get them; returns memory for those that arrive."""
        x = x.contiguous()
        if x.is_cuda:
            self.out = x.new_empty(sum(self.arriving), x.shape[1])
            self.wait = pull_rows(x, list(self.out.split(self.arriving)), self.begins, self.room, self.group)
        else:
            self.out, work = all_to_all(x, self.leaving, self.arriving, self.group, async_op=True)
            self.wait = work.wait
        return self.out

    def finish(self) -> Tensor:
        """The rows that arrived."""
        out, wait, self.out, self.wait = self.out, self.wait, None, None
        assert out is not None and wait is not None
        wait()
        return out


class StartRows(torch.autograd.Function):
    """Start a transfer of x; `back` is the reverse one. The result has no contents before FinishRows."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there.start(x)

    @staticmethod
    def backward(ctx, placeholder):
        return ctx.back.finish(), None, None


class FinishRows(torch.autograd.Function):
    """The result of StartRows, when its rows are there."""

    @staticmethod
    def forward(ctx, out, there, back):
        ctx.back = back
        there.finish()
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dy):
        ctx.back.start(dy)
        return dy, None, None  # the gradient is on its way


def transfers(rows: list[list[int]], rank: int, group: Any) -> tuple[Transfer, Transfer]:
    """A transfer of so many rows, and the reverse one."""
    return Transfer(rows, rank, group), Transfer([list(line) for line in zip(*rows, strict=True)], rank, group)
