"""Moves rows between ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AllToAll"]


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
