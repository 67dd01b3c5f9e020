"""Backward of a product's epilogue, and of gemm.

y = f(activation(z)), z = alpha * a @ b + bias + beta * residual. The forward pass saves each operand whose partner
requires a gradient and, of what the product made, the least that tells the derivative: nothing without an activation or
function, y of a ReLU, else z, which the forward kernel stores beside y. So a layer with GELU saves as many bytes as
torch's does. Where the product was computed by an op that did not store z (torch's own opcheck calls it so), backward
computes it again, and all inputs are saved.
"""

from collections.abc import Callable

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


def through_epilogue(
    dy: Tensor, activation: str | None, epilogue, saved: Tensor | None, sums: torch.dtype | None,
    gradient: Callable = epilogue_gradient,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(dz, the sums of its columns), of dy's shape and dtype.

    sums: the dtype of the second, which are added up in fp32; None where they are not wanted.
    gradient: epilogue_gradient, or the op of it.
    """
    if activation is None and epilogue is None:
        return dy, None if sums is None else column_sums(dy, sums)
    dz, total = gradient(dy, saved, activation, epilogue, sums is not None)
    return dz, total if sums is None or total.dtype is sums else total.to(sums)


def column_sums(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Of (..., columns): (columns,) of this dtype, added up in fp32, of float64 in float64."""
    if t.dim() != 2:
        t = t.unsqueeze(0).flatten(0, -2)  # reshape(-1, 0) is an error
    wide = accumulator(t.dtype)
    if dtype is t.dtype or dtype is wide:  # torch accumulates in the wider dtype and rounds once, in one kernel
        return t.sum(0, dtype=dtype)
    return t.sum(0, dtype=wide).to(dtype)


def of_columns(bias: Tensor | None) -> bool:
    """Whether a bias has one value for each column of the result, so that its gradient is the sums of columns."""
    return bias is not None and (bias.dim() == 1 or bias.shape[0] == 1 and bias.dim() == 2 and bias.shape[1] > 1)


def shaped(total: Tensor, bias: Tensor) -> Tensor:
    """Sums of columns (N,) in the shape of the bias."""
    return total if bias.dim() == 1 else total.view(bias.shape)  # a view takes 2 us


def operands_to_save(a: Tensor, b: Tensor, needed: tuple) -> tuple[Tensor | None, Tensor | None]:
    """a and b, where the gradient of the other one is needed; needed: whether those of a and b are."""
    return a if needed[1] else None, b if needed[0] else None


def sum_to(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of a tensor; of one that was broadcast, summed up in fp32, of fp64 in fp64."""
    if gradient.shape == shape:
        return gradient if gradient.dtype is dtype else gradient.to(dtype)
    added = gradient.dim() - len(shape)
    dims = [*range(added), *(i + added for i, n in enumerate(shape) if n == 1 != gradient.shape[i + added])]
    return gradient.sum(dims, keepdim=True, dtype=accumulator(gradient.dtype)).reshape(shape).to(dtype)


class Gemm(torch.autograd.Function):
    """gemm, differentiable once in a, b, bias and residual. Backward's products have fp32 sums, whatever forward's.

    Where backward reads z, it is a second output: autograd then finds from it to all inputs, so that a derivative of a
    gradient raises by whichever input it is asked for. Not to be applied under a transform of torch.func.
    """

    @staticmethod
    def forward(ctx, call, a, b, bias, residual):
        activation, alpha, beta, out_dtype, epilogue, accumulation_dtype, precision = call
        saved = "" if activation is None and epilogue is None else saved_of(activation, epilogue)
        result = eager.gemm(
            a, b, bias, activation, residual, alpha, beta, None, out_dtype, epilogue, saved == "z", None, None, False,
            accumulation_dtype, None, None, precision,
        )  # fmt: skip
        kept = result[1] if saved == "z" else result if saved == "y" else None
        ctx.save_for_backward(*operands_to_save(a, b, ctx.needs_input_grad[1:]), bias, kept)
        ctx.set_materialize_grads(False)
        ctx.like = a.shape, a.dtype, b.shape, b.dtype
        ctx.call, ctx.path = call, forced_path()
        return result

    @staticmethod
    @differentiable_once
    @in_forwards_path
    def backward(ctx, dy, _=None):
        if dy is None:  # a later autograd function's backward returned None
            return (None,) * len(ctx.needs_input_grad)
        activation, alpha, beta, _, epilogue, _, precision = ctx.call

        def product(a, b, alpha):
            more = None, None, False, None, None, None, precision
            return eager.gemm(a, b, None, None, None, alpha, 1.0, None, None, None, False, *more)

        terms = ctx.saved_tensors, ctx.like, activation, alpha, beta, epilogue, ctx.needs_input_grad[1:]
        return None, *gemm_backward(product, epilogue_gradient, *terms, dy)


_apply = super(torch.autograd.Function, Gemm).apply  # Gemm.apply without torch.func's part, some 3 us a call


def differentiable(
    a, b, bias, activation, residual, alpha, beta, out_dtype, epilogue, accumulation_dtype, precision
) -> Tensor:
    """gemm of arguments that autograd watches, outside of transforms of torch.func.

    epilogue: a Program, so that backward differentiates the function as it was in forward.
    """
    call = activation, alpha, beta, out_dtype, epilogue, accumulation_dtype, precision
    result = _apply(call, a, b, bias, residual)
    return result[0] if type(result) is tuple else result


def gemm_backward(
    product: Callable, gradient: Callable, saved: tuple, like: tuple, activation, alpha, beta, epilogue, needed: tuple,
    dy: Tensor,
) -> tuple:  # fmt: skip
    """The gradients of a, b, bias and residual.

    Args:
        product: (a, b, alpha) -> alpha * a @ b; gradient: epilogue_gradient; or both the ops of them.
        saved: (a, b, bias, y or z); a and b are None where operands_to_save says so.
        like: shape and dtype of a, and of b.
        needed: of the same four, whether a gradient is.
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
    if needs_residual:  # one that was not read has a gradient of 0, whatever dz is
        dresidual = dz if beta == 1 else dz * beta if beta != 0 else torch.zeros_like(dz)
    return da, db, dbias, dresidual
