"""Backward of a product's epilogue, and of gemm.

y = f(activation(z)), z = alpha * a @ b + bias + beta * residual. The forward pass saves each operand whose partner
requires a gradient and, of what the product made, the least that tells the derivative: nothing without an activation or
function, y of a ReLU, else z, which the forward kernel stores beside y. So a layer with GELU saves as many bytes as
torch's does. Where the product was computed by an op that did not store z (torch's own opcheck calls it so), backward
computes it again, and all inputs are saved.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import eager
from .dtypes import accumulator
from .epilogue_gradient.eager import epilogue_gradient
from .runtime.device import forced_path, in_forwards_path
from .runtime.transforms import differentiable_once


def saved_of(activation: str | None, epilogue) -> str:
    """What backward wants of the forward product: "y", "z" or ""."""
    if epilogue is not None:
        return "z"
    return {None: "", "relu": "y"}.get(activation, "z")


def with_saved(run: Callable, activation: str | None, epilogue) -> tuple[Tensor, Tensor | None]:
    """(y, what saved_of says of it): run(with_z) gives y, or (y, z)."""
    saved = saved_of(activation, epilogue)
    if saved == "z":
        return run(True)
    y = run(False)
    return y, y if saved == "y" else None


def through_epilogue(
    dy: Tensor,
    activation: str | None,
    epilogue,
    saved: Tensor | None,
    sums: bool,
    gradient: Callable = epilogue_gradient,
) -> tuple[Tensor, Tensor | None]:
    """(dz, the sums of its columns in fp32 or None), of dy's shape and dtype.

    gradient: epilogue_gradient, or the op of it.
    """
    if activation is None and epilogue is None:
        return dy, column_sums(dy) if sums else None
    return gradient(dy, saved, activation, epilogue, sums)


def column_sums(t: Tensor) -> Tensor:
    """Of (..., columns): (columns,), in fp32, of float64 in float64."""
    return t.unsqueeze(0).flatten(0, -2).sum(0, dtype=accumulator(t.dtype))  # reshape(-1, 0) is an error


def of_columns(bias: Tensor | None) -> bool:
    """Whether a bias has one value for each column of the result, so that its gradient is the sums of columns."""
    return bias is not None and (bias.dim() == 1 or bias.shape[0] == 1 and bias.dim() == 2 and bias.shape[1] > 1)


class Like(NamedTuple):
    """Shape and dtype of a tensor that is not saved."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Like":
        return cls(tensor.shape, tensor.dtype)


def operands_to_save(a: Tensor, b: Tensor, needed: tuple) -> tuple[Tensor | None, Tensor | None]:
    """a and b, where the gradient of the other one is needed; needed: whether those of a and b are."""
    return a if needed[1] else None, b if needed[0] else None


def sum_to(gradient: Tensor, like: Tensor | Like) -> Tensor:
    """The gradient of a tensor, of its dtype; of one that was broadcast, summed up in fp32, of fp64 in fp64."""
    if gradient.shape == like.shape:
        return gradient.to(like.dtype)
    added = gradient.dim() - len(like.shape)
    dims = [*range(added), *(i + added for i, n in enumerate(like.shape) if n == 1 != gradient.shape[i + added])]
    return gradient.sum(dims, keepdim=True, dtype=accumulator(gradient.dtype)).reshape(like.shape).to(like.dtype)


class Gemm(torch.autograd.Function):
    """gemm, differentiable once in a, b, bias and residual. Backward's products have fp32 sums, whatever forward's.

    epilogue: a Program, so that backward differentiates the function as it was in forward.
    """

    @staticmethod
    def forward(ctx, a, b, bias, activation, residual, alpha, beta, out_dtype, epilogue, accumulation_dtype, precision):
        def run(with_z):
            terms = bias, activation, residual, alpha, beta, None, out_dtype, epilogue
            return eager.gemm(a, b, *terms, with_z, accumulation_dtype=accumulation_dtype, precision=precision)

        y, saved = with_saved(run, activation, epilogue)
        ctx.save_for_backward(*operands_to_save(a, b, ctx.needs_input_grad), bias, saved)
        ctx.like = Like.of(a), Like.of(b)
        ctx.terms, ctx.path = (activation, alpha, beta, epilogue), forced_path()
        ctx.precision = precision
        return y

    @staticmethod
    @differentiable_once
    @in_forwards_path
    def backward(ctx, dy):
        product = partial(_product, precision=ctx.precision)
        return gemm_backward(
            product, epilogue_gradient, ctx.saved_tensors, ctx.like, *ctx.terms, ctx.needs_input_grad, dy
        )


def _product(a: Tensor, b: Tensor, alpha: float, precision: str | None) -> Tensor:
    return eager.gemm(a, b, None, None, None, alpha, 1.0, None, None, None, precision=precision)


def gemm_backward(
    product: Callable, gradient: Callable, saved: tuple, like: tuple, activation, alpha, beta, epilogue, needed: tuple,
    dy: Tensor,
) -> tuple:  # fmt: skip
    """The gradients of all eleven inputs of Gemm.

    Args:
        product: (a, b, alpha) -> alpha * a @ b; gradient: epilogue_gradient; or both the ops of them.
        saved: (a, b, bias, y or z); a and b are None where operands_to_save says so.
        like: (Like, Like) of a and b.
    """
    (a, b, bias, kept), (needs_a, needs_b, needs_bias, _, needs_residual, *_) = saved, needed
    like_a, like_b = like
    sums = needs_bias and of_columns(bias)
    dz, total = through_epilogue(dy, activation, epilogue, kept, sums, gradient)
    operand = dz.to(like_a.dtype)
    da = sum_to(product(operand, b.mT, alpha), like_a) if needs_a else None
    db = sum_to(product(a.mT, operand, alpha), like_b) if needs_b else None
    dbias = None
    if needs_bias:
        dbias = total.view_as(bias).to(bias.dtype) if sums else sum_to(dz, bias)
    dresidual = None
    if needs_residual:  # one that was not read has a gradient of 0, whatever dz is
        dresidual = dz * beta if beta != 0 else torch.zeros_like(dz)
    return da, db, dbias, None, dresidual, *(None,) * 6
