"""Autograd functions of sequence-parallel layers, whose communication runs beside their GEMMs; see overlap.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.gate.dispatch import gate_gradient_into, gate_into
from cute_kernels.runtime.transforms import differentiable_once

from ..bsr import BsrMatrix
from ..gradients import values_gradient
from .overlap import Exchange, linear_into, linear_into_each

__all__ = ["FeedForward", "GatherLinear", "LinearScatter", "feed_forward", "gathered_result"]

LINEAR = "bsr_linear"


def gathered_result(x: Tensor, group: Any, columns: int, into: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """Result (ranks * t, columns) of a layer for the tokens x (t, K) of all ranks; into: (tokens, out)."""
    y = x.new_empty(dist.get_world_size(group) * len(x), columns)
    Exchange(x, first=lambda part, rows: into(part, y[rows])).run(group)
    return y


def feed_forward(x: Tensor, group: Any, into: Callable[[Tensor, Tensor], Any], down: BsrMatrix) -> Tensor:
    """This rank's tokens (t, N) of the sum over ranks of h @ down.T, where h is a layer's result for all tokens.

    into: (tokens, out) of the first layer.
    """
    h = x.new_empty(dist.get_world_size(group) * len(x), down.shape[1])
    y = x.new_empty(len(x), down.shape[0])
    Exchange(
        x,
        first=lambda part, rows: into(part, h[rows]), second=partial(linear_into_each, down, h), y=y,
    ).run(group)  # fmt: skip
    return y


class GatherLinear(torch.autograd.Function):
    """x of all ranks @ W.T + bias; x (t, K) are this rank's tokens. Returns (ranks * t, M)."""

    @staticmethod
    def forward(ctx, x, stored, bias, W, group):
        xs, y = (x.new_empty(dist.get_world_size(group) * len(x), n) for n in (x.shape[1], W.shape[0]))
        Exchange(x, first=lambda part, rows: linear_into(W, part, y[rows], bias), gathered=xs).run(group)
        ctx.save_for_backward(xs, stored)
        ctx.W, ctx.group, ctx.bias_dtype = W.without_values(), group, None if bias is None else bias.dtype
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        xs, stored = ctx.saved_tensors
        W, (needs_x, needs_values, needs_bias, *_) = ctx.W.holding(stored), ctx.needs_input_grad
        dy, dvalues = dy.contiguous(), None

        def values() -> None:
            nonlocal dvalues
            dvalues = values_gradient(LINEAR, W, xs, dy, None) if needs_values else None

        dx = None
        if needs_x:
            dx = xs.new_empty(len(xs) // dist.get_world_size(ctx.group), xs.shape[1])
            Exchange(second=partial(linear_into_each, W.t(), dy), y=dx, meanwhile=values).run(ctx.group)
        else:
            values()
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dvalues, dbias, None, None


class LinearScatter(torch.autograd.Function):
    """This rank's tokens of the sum over ranks of x @ W.T; x (ranks * t, K). Returns (t, M)."""

    @staticmethod
    def forward(ctx, x, stored, W, group):
        y = x.new_empty(len(x) // dist.get_world_size(group), W.shape[0])
        Exchange(second=partial(linear_into_each, W, x), y=y).run(group)
        ctx.save_for_backward(x, stored)
        ctx.W, ctx.group = W.without_values(), group
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, stored = ctx.saved_tensors
        W, (needs_x, needs_values, *_) = ctx.W.holding(stored), ctx.needs_input_grad
        turned, dys, dx = W.t(), dy.new_empty(len(x), dy.shape[1]), x.new_empty(x.shape)
        Exchange(
            dy, first=lambda part, rows: linear_into(turned, part, dx[rows]) if needs_x else None,
            gathered=dys,
        ).run(ctx.group)  # fmt: skip
        dvalues = values_gradient(LINEAR, W, x, dys, None) if needs_values else None
        return dx if needs_x else None, dvalues, None, None


class FeedForward(torch.autograd.Function):
    """GatherLinear, a gate and LinearScatter: this rank's tokens (t, N) of the sum of gate(x @ W.T + bias) @ down.T."""

    @staticmethod
    def forward(ctx, x, stored, bias, down_stored, W, down, activation, group):
        ranks = dist.get_world_size(group)
        xs, z, h = (x.new_empty(ranks * len(x), n) for n in (x.shape[1], W.shape[0], down.shape[1]))
        y = x.new_empty(len(x), down.shape[0])

        def first(part: Tensor, rows: slice) -> None:
            linear_into(W, part, z[rows], bias)
            gate_into(z[rows], activation, h[rows])

        second = partial(linear_into_each, down, h)
        Exchange(x, first, gathered=xs, second=second, y=y).run(group)
        ctx.save_for_backward(xs, z, h, stored, down_stored)
        ctx.matrices, ctx.activation, ctx.group = (W.without_values(), down.without_values()), activation, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        xs, z, h, stored, down_stored = ctx.saved_tensors
        W, down = (matrix.holding(t) for matrix, t in zip(ctx.matrices, (stored, down_stored), strict=True))
        needs_x, needs_values, needs_bias, needs_down = ctx.needs_input_grad[:4]
        turned, dz, dys = down.t(), torch.empty_like(z), dy.new_empty(len(xs), dy.shape[1])
        dx, dvalues, ddown = xs.new_empty(len(dy), xs.shape[1]), None, None

        def first(part: Tensor, rows: slice) -> None:
            dh = h.new_empty(len(part), h.shape[1])
            linear_into(turned, part, dh)
            gate_gradient_into(z[rows], dh, ctx.activation, dz[rows])

        def values() -> None:
            nonlocal dvalues, ddown
            ddown = values_gradient(LINEAR, down, h, dys, None) if needs_down else None
            dvalues = values_gradient(LINEAR, W, xs, dz, None) if needs_values else None

        second = {"second": partial(linear_into_each, W.t(), dz), "y": dx} if needs_x else {}
        Exchange(dy, first, gathered=dys, meanwhile=values, **second).run(ctx.group)
        dbias = dz.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx if needs_x else None, dvalues, dbias, ddown, None, None, None, None
