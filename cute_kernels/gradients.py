"""Backward of a product's epilogue, and of gemm.

y = f(activation(z)), z = alpha * a @ b + bias + beta * residual. Saved for backward are the operands, and y where
the activation is a ReLU. Others need z, which is not stored: the product is computed once more, without them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import eager, reference
from .dtypes import accumulator
from .matmul.terms import epilogue_program

BACKWARD = {
    "gelu": lambda dy, z: torch.ops.aten.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: torch.ops.aten.gelu_backward(dy, z, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}


def saves_result(activation: str | None, epilogue) -> bool:
    """Whether backward wants y itself."""
    return activation == "relu" and epilogue is None


def through_epilogue(dy: Tensor, activation: str | None, epilogue, y: Tensor | None, z: Callable) -> Tensor:
    """The gradient of z, of dy's shape and dtype. y: where saves_result says so; z(): makes z anew."""
    if activation is None and epilogue is None:
        return dy
    if saves_result(activation, epilogue):
        return torch.ops.aten.threshold_backward(dy, y, 0)
    if epilogue is None:
        return BACKWARD[activation](dy, z())
    at = z()
    at = at.to(accumulator(at.dtype))
    # Element by element, so its derivative is that along ones.
    along = torch.func.jvp(
        lambda z: reference.apply_epilogue(z, None, activation, None, 1.0, 1.0, epilogue), (at,), (torch.ones_like(at),)
    )[1]
    return (dy * along).to(dy.dtype)


def sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of a tensor, of its dtype; of one that was broadcast, summed up in fp32, of fp64 in fp64."""
    if gradient.shape == like.shape:
        return gradient.to(like.dtype)
    return gradient.to(accumulator(gradient.dtype)).sum_to_size(like.shape).to(like.dtype)


class Gemm(torch.autograd.Function):
    """gemm, differentiable once in a, b, bias and residual."""

    @staticmethod
    def forward(ctx, a, b, bias, activation, residual, alpha, beta, out_dtype, epilogue):
        epilogue = None if epilogue is None else epilogue_program("gemm", epilogue)  # as it is now
        y = _eager_gemm(a, b, bias, activation, residual, alpha, beta, out_dtype, epilogue)
        ctx.save_for_backward(a, b, bias, residual, y if saves_result(activation, epilogue) else None)
        ctx.terms = activation, alpha, beta, epilogue
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return gemm_backward(_eager_gemm, ctx.saved_tensors, *ctx.terms, ctx.needs_input_grad, dy)


def _eager_gemm(a, b, bias, activation, residual, alpha, beta, out_dtype, epilogue):
    return eager.gemm(a, b, bias, activation, residual, alpha, beta, None, out_dtype, epilogue)


def gemm_backward(gemm: Callable, saved: tuple, activation, alpha, beta, epilogue, needed: tuple, dy: Tensor) -> tuple:
    """The gradients of all nine inputs of Gemm, whose arguments `gemm` takes."""
    (a, b, bias, residual, y), (needs_a, needs_b, needs_bias, _, needs_residual, *_) = saved, needed

    def product(a, b):
        return gemm(a, b, None, None, None, alpha, 1.0, None, None)

    def z():
        return gemm(a, b, bias, None, residual, alpha, beta, dy.dtype, None)

    dz = through_epilogue(dy, activation, epilogue, y, z)
    operand = dz.to(a.dtype)
    da = sum_to(product(operand, b.mT), a) if needs_a else None
    db = sum_to(product(a.mT, operand), b) if needs_b else None
    dbias = sum_to(dz, bias) if needs_bias else None
    dresidual = dz * beta if needs_residual else None
    return da, db, dbias, None, dresidual, None, None, None, None
