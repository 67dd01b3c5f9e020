"""Backward pass of a GEMM's epilogue, and of gemm.

y = f(activation(z)), z = alpha * a @ b + bias + beta * residual. The forward pass saves each operand whose partner
requires a gradient, and the least that determines the derivative: nothing without an activation or function, y for
ReLU, otherwise z, which the forward kernel stores in addition to y. So a layer with GELU saves as many bytes as in
torch. If the forward op did not store z (torch's opcheck calls it that way), all inputs are saved and the backward pass
recomputes z.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .arguments import GemmArgs
from .dtypes import accumulator
from .epilogue_gradient.dispatch import epilogue_gradient
from .runtime.device import forced_path, in_forwards_path
from .runtime.torch_compat import uncompiled
from .runtime.transforms import differentiable_once


def saved_of(activation: str | None, epilogue) -> str:
    """Name of the forward result that the backward pass reads: "y", "z" or ""."""
    if epilogue is not None:
        return "z"
    return {None: "", "relu": "y"}.get(activation, "z")


def through_epilogue(
    dy: Tensor, activation: str | None, epilogue, saved: Tensor | None, sums: torch.dtype | None,
    gradient: Callable = epilogue_gradient,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(dz, its column sums); dz has dy's shape and dtype.

    sums: dtype of the column sums, which are accumulated in FP32; None if they are not needed.
    gradient: epilogue_gradient, or its registered op.
    """
    if activation is None and epilogue is None:
        return dy, None if sums is None else column_sums(dy, sums)
    dz, total = gradient(dy, saved, activation, epilogue, sums is not None)
    return dz, total if sums is None or total.dtype is sums else total.to(sums)


def column_sums(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of (..., columns) as (columns,) in this dtype, accumulated in FP32 (float64 for float64)."""
    if t.dim() != 2:
        t = t.unsqueeze(0).flatten(0, -2)  # reshape(-1, 0) is an error
    wide = accumulator(t.dtype)
    if dtype is t.dtype or dtype is wide:  # torch accumulates in the wider dtype and rounds once, in one kernel
        return t.sum(0, dtype=dtype)
    return t.sum(0, dtype=wide).to(dtype)


def of_columns(bias: Tensor | None) -> bool:
    """True if the bias has one value per column of the result, so that its gradient is a column sum."""
    return bias is not None and (bias.dim() == 1 or bias.shape[0] == 1 and bias.dim() == 2 and bias.shape[1] > 1)


def shaped(total: Tensor, bias: Tensor) -> Tensor:
    """Reshape column sums (N,) to the shape of the bias."""
    return total if bias.dim() == 1 else total.view(bias.shape)  # a view takes 2 us


def operands_to_save(a: Tensor, b: Tensor, needed: tuple) -> tuple[Tensor | None, Tensor | None]:
    """(a, b), each None unless the other operand's gradient is needed. needed: flags for a and b."""
    return a if needed[1] else None, b if needed[0] else None


def sum_to(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Reduce a gradient to the shape of a broadcast tensor. Sums are accumulated in FP32 (float64 for float64)."""
    if gradient.shape == shape:
        return gradient if gradient.dtype is dtype else gradient.to(dtype)
    added = gradient.dim() - len(shape)
    dims = [*range(added), *(i + added for i, n in enumerate(shape) if n == 1 != gradient.shape[i + added])]
    return gradient.sum(dims, keepdim=True, dtype=accumulator(gradient.dtype)).reshape(shape).to(dtype)


class Gemm(torch.autograd.Function):
    """gemm, differentiable once in a, b, bias and residual. Backward GEMMs always accumulate in FP32.

    If the backward pass reads z, z is a second output. Autograd then connects it with all inputs, so that a double
    backward raises for every input. Must not be applied under a torch.func transform.
    """

    @staticmethod
    def forward(ctx, values, a, b, bias, residual):
        activation, alpha, beta, _, epilogue, _, precision, *_ = values[9:]  # GemmArgs._make takes 0.5 us
        saved = "" if activation is None and epilogue is None else saved_of(activation, epilogue)
        result = dispatch.gemm(values, saved == "z")
        kept = result[1] if saved == "z" else result if saved == "y" else None
        ctx.save_for_backward(*operands_to_save(a, b, ctx.needs_input_grad[1:]), bias, kept)
        ctx.set_materialize_grads(False)
        ctx.like = a.shape, a.dtype, b.shape, b.dtype
        ctx.epilogue, ctx.precision = (activation, alpha, beta, epilogue), precision
        ctx.path = forced_path()
        return result

    @staticmethod
    @differentiable_once
    @in_forwards_path
    def backward(ctx, dy, _=None):
        if dy is None:  # a later autograd function's backward returned None
            return (None,) * len(ctx.needs_input_grad)
        precision = ctx.precision

        def product(a, b, alpha):
            return dispatch.gemm(GemmArgs(a, b, alpha=alpha, precision=precision))

        needed = ctx.needs_input_grad[1:]
        tensors, (activation, alpha, beta, epilogue) = ctx.saved_tensors, ctx.epilogue
        return None, *gemm_backward(
            product, epilogue_gradient, tensors, ctx.like, activation, alpha, beta, epilogue, needed, dy
        )


_apply = super(torch.autograd.Function, Gemm).apply  # skips Gemm.apply's torch.func handling, some 3 us a call


@uncompiled
def differentiable(values: tuple) -> Tensor:
    """gemm with an argument that requires a gradient, outside of torch.func transforms.

    values: all fields of GemmArgs. The epilogue is a Program, so that the backward pass differentiates the function as
        it was in the forward pass.
    """
    a, b, _, bias, residual, *_ = values
    result = _apply(values, a, b, bias, residual)
    return result[0] if type(result) is tuple else result


def gemm_backward(
    product: Callable, gradient: Callable, saved: tuple, like: tuple, activation, alpha, beta, epilogue, needed: tuple,
    dy: Tensor,
) -> tuple:  # fmt: skip
    """Return the gradients of a, b, bias and residual.

    Args:
        product: (a, b, alpha) -> alpha * a @ b, or its registered op.
        gradient: epilogue_gradient, or its registered op.
        saved: (a, b, bias, y or z); a and b as returned by operands_to_save.
        like: shape and dtype of a, and of b.
        needed: flags: which of the four gradients are needed.
    """
    (a, b, bias, kept), (needs_a, needs_b, needs_bias, needs_residual) = saved, needed
    shape_a, dtype, shape_b, dtype_b = like
    sums = bias.dtype if needs_bias and of_columns(bias) else None
    dz, total = through_epilogue(dy, activation, epilogue, kept, sums, gradient)
    operand = dz if dz.dtype is dtype else dz.to(dtype)
    da = sum_to(product(operand, b.mT, alpha), shape_a, dtype) if needs_a else None
    db = sum_to(product(a.mT, operand, alpha), shape_b, dtype_b) if needs_b else None
    dbias = None
    if needs_bias:
        dbias = sum_to(dz, bias.shape, bias.dtype) if sums is None else shaped(total, bias)
    dresidual = None
    if needs_residual:  # with beta=0 the residual is not read, so its gradient is 0 even if dz is NaN
        dresidual = dz if beta == 1 else dz * beta if beta != 0 else torch.zeros_like(dz)
    return da, db, dbias, dresidual
