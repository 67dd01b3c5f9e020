"""Rows of one GPU's mixture of experts: tokens to the padded layout and weighted sums of results, a kernel each.

    layout     rows = to_layout(x)                     backward: unweighted sums of the gradient's rows
    sums       out[t] = sum_j weights[t, j] y[place]   backward: weights times gradients of sums, in the layout, and
                                                       for weights the dot products of the latter with rows of y

Both are differentiable any number of times: their derivatives are the same kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels.runtime import front
from cute_kernels.runtime.device import collected, plans_kernel

from ..expert_rows.dispatch import (
    Segments,
    aligned,
    from_layouts,
    gradient_of_layout,
    places_of,
    supports,
    to_layout,
    values_of,
)

__all__ = ["Rows", "layout", "rows_of", "served", "sums"]


class Rows(NamedTuple):
    """Rows of a call: their number, and the place of each.

    rows: of the layout, an upper bound that depends on shapes alone.
    order: (T * k,) int64, the choice of each sorted row.
    places: (T * k,) int64, the row of the layout of each choice, -1 for those of no expert.
    """

    rows: int
    order: Tensor
    places: Tensor
    segments: Segments


def served(x: Tensor, choices: Tensor, weights: Tensor, experts: int) -> bool:
    """True if the kernels take these tensors, in an eager call on plain ones; torch's operations take the others."""
    if torch.compiler.is_compiling() or not plans_kernel(x.device) or not supports(x, weights, experts):
        return False
    if collected() is not None:  # on fake tensors
        return True
    if front.hidden():
        return False
    plain = all(type(t) in (Tensor, Parameter) and not t.is_nested and not t.is_neg() for t in (x, choices, weights))
    return plain and not x.is_meta


def rows_of(keys: Tensor, order: Tensor, experts: int, k: int, group_rows: int) -> Rows:
    """The rows of choices that are sorted by expert; see feed_forward.sorted_choices."""
    numbers = torch.arange(experts + 2, device=keys.device, dtype=keys.dtype)
    places, segments = places_of(torch.searchsorted(keys, numbers)[None], order, 0, k, group_rows)
    total = len(order)
    return Rows((total // group_rows + min(total, experts)) * group_rows, order, places, segments)


def layout(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Tokens (rows, K) in the layout, zeros in padding, and the expert of each run, int32; in padding their number."""
    return _Layout.apply(x, rows)


def sums(y: Tensor, weights: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Weighted sums (T, N) of the rows of each token's choices, in FP32, rounded once."""
    return _Sums.apply(y, weights.float(), rows, dtype)


class _Layout(torch.autograd.Function):
    """See layout."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Rows):
        ctx.rows, ctx.dtype = rows, x.dtype
        out, expert_ids = to_layout(aligned(x), rows.segments, rows.rows, x.shape[1], x.dtype, rows.order)
        ctx.mark_non_differentiable(expert_ids)
        return out, expert_ids

    @staticmethod
    def backward(ctx, dy: Tensor, _: Any):
        return _Sums.apply(dy, None, ctx.rows, ctx.dtype), None


class _Sums(torch.autograd.Function):
    """See sums; weights None are 1."""

    @staticmethod
    def forward(ctx, y: Tensor, weights: Tensor | None, rows: Rows, dtype: torch.dtype):
        ctx.rows, ctx.dtype = rows, y.dtype
        weights = None if weights is None else weights.contiguous()
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, weights)
        k = rows.segments.k
        out = y.new_empty(len(rows.order) // k, y.shape[1], dtype=dtype)
        return from_layouts(aligned(y), rows.places, weights, y.dtype, out, k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        y, weights = ctx.saved_tensors
        if weights is None:
            return _Layout.apply(grad, ctx.rows)[0].to(ctx.dtype), None, None, None
        return *_Gradients.apply(grad, weights, y, ctx.rows, ctx.dtype), None, None


class _Gradients(torch.autograd.Function):
    """Gradients of y and, unless it is None, of weights, of those of the sums."""

    @staticmethod
    def forward(ctx, grad: Tensor, weights: Tensor, y: Tensor | None, rows: Rows, dtype: torch.dtype):
        ctx.rows = rows
        ctx.save_for_backward(grad, weights, y)
        ctx.set_materialize_grads(False)
        out = grad.new_empty(rows.rows, grad.shape[1], dtype=dtype)
        dots = None if y is None else torch.empty(rows.rows, dtype=torch.float32, device=grad.device)
        flat = weights.contiguous().view(-1)
        gradient_of_layout(aligned(grad), rows.segments, grad.dtype, rows.order, flat, out, y, dots)
        return out, None if dots is None else values_of(dots, rows.places).view(weights.shape)

    @staticmethod
    def backward(ctx, dy: Tensor | None, dweights: Tensor | None):
        grad, weights, y = ctx.saved_tensors
        rows, of_grad, of_weights, of_y = ctx.rows, None, None, None
        if dy is not None:
            of_grad = _Sums.apply(dy, weights, rows, grad.dtype)
            of_weights = _Gradients.apply(grad, weights, dy, rows, dy.dtype)[1]
        if dweights is not None:
            part = _Sums.apply(y, dweights, rows, grad.dtype)
            of_grad = part if of_grad is None else of_grad + part
            of_y = _Gradients.apply(grad, dweights, None, rows, y.dtype)[0]
        return of_grad, of_weights, of_y, None, None
