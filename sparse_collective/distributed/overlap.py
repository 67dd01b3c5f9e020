"""Sequence-parallel linear layers whose communication runs beside their GEMMs, a chunk of tokens for each rank.

GatherLinear multiplies each rank's tokens as soon as they arrive. LinearScatter sends each rank's summand as soon as it
is computed. On CUDA torch's pipelined collectives copy through symmetric memory; elsewhere plain collectives precede or
follow the GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.torch_compat import gather_and_consume, produce_and_exchange, reduce_scatter_single

from ..bsr import BsrMatrix
from ..gradients import operand_gradient, values_gradient
from ..ops import bsr_linear

__all__ = ["GatherLinear", "LinearScatter", "gathered_linear"]


class GatherLinear(torch.autograd.Function):
    """x of all ranks @ W.T + bias; x (t, K) are this rank's tokens. Returns (ranks * t, M)."""

    @staticmethod
    def forward(ctx, x, stored, bias, W, group):
        xs, y = gathered_linear(x, W, group, lambda part, out: bsr_linear(part, W, bias=bias, out=out), W.shape[0])
        ctx.save_for_backward(xs, stored)
        ctx.W, ctx.group, ctx.bias_dtype = W.without_values(), group, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        xs, stored = ctx.saved_tensors
        W, (needs_x, needs_values, needs_bias, *_) = ctx.W.holding(stored), ctx.needs_input_grad
        dy = dy.contiguous()
        dx = work = None
        if needs_x:
            summand = operand_gradient("bsr_linear", W, xs, dy, None)
            dx = summand.new_empty(len(xs) // dist.get_world_size(ctx.group), xs.shape[1])
            work = reduce_scatter_single(dx, summand, ctx.group, async_op=True)
        dvalues = values_gradient("bsr_linear", W, xs, dy, None) if needs_values else None
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        if work is not None:
            work.wait()
        return dx, dvalues, dbias, None, None


def gathered_linear(x: Tensor, W: BsrMatrix, group: Any, into: Any, columns: int) -> tuple[Tensor, Tensor]:
    """All-gather x (t, K), and compute rows of a result as their tokens arrive.

    Args:
        into: (tokens (t, K), out (t, columns)) -> None.

    Returns:
        x of all ranks (ranks * t, K), and the result (ranks * t, columns).
    """
    ranks = dist.get_world_size(group)
    xs, y = (x.new_empty(ranks * x.shape[0], width) for width in (x.shape[1], columns))
    parts = y.chunk(ranks)
    gather_and_consume(x.contiguous(), lambda part, rank: into(part, parts[rank]), xs, group)
    return xs, y


class LinearScatter(torch.autograd.Function):
    """This rank's tokens of the sum over ranks of x @ W.T; x (ranks * t, K). Returns (t, M)."""

    @staticmethod
    def forward(ctx, x, stored, W, group):
        ranks = dist.get_world_size(group)
        parts = x.chunk(ranks)
        summands = x.new_empty(x.shape[0], W.shape[0])
        y = produce_and_exchange(lambda rank, out: bsr_linear(parts[rank], W, out=out), summands, group)
        ctx.save_for_backward(x, stored)
        ctx.W, ctx.group = W.without_values(), group
        return y

    @staticmethod
    def backward(ctx, dy):
        x, stored = ctx.saved_tensors
        W, (needs_x, needs_values, *_) = ctx.W.holding(stored), ctx.needs_input_grad
        turned = W.t()
        dys, dx = gathered_linear(
            dy, turned, ctx.group, lambda part, out: bsr_linear(part, turned, out=out), x.shape[1]
        )
        dvalues = values_gradient("bsr_linear", W, x, dys, None) if needs_values else None
        return dx if needs_x else None, dvalues, None, None
