"""The same products in plain torch: what CPU tensors run, and what tests compare with. Sums are in fp32, of fp64 in
fp64."""

import functools
from collections.abc import Callable

import torch

from . import functions
from .dtypes import FLOAT8, accumulator
from .matmul.precision import rounded
from .traced.evaluate import evaluate

BLOCK = 128  # rows or columns that have one scale, where blocks have
GATE = 64  # features of a gate, and of what it multiplies, in turn


def outside_autocast(function: Callable) -> Callable:
    """The function with torch.autocast off for CPU tensors, whose products it would round; kernels never see it."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def linear_terms(acc, bias, residual, alpha, beta):
    """The epilogue's terms before the activation, in their order, on an fp32 or fp64 accumulator (..., M, N)."""
    x = acc * alpha if alpha != 1.0 else acc
    if bias is not None:
        x = x + bias.to(x.dtype)
    if residual is not None:
        x = x + beta * residual.to(x.dtype)
    return x


def apply_epilogue(acc, bias, activation, residual, alpha, beta, function):
    """All of the epilogue's terms; function: a Program."""
    x = linear_terms(acc, bias, residual, alpha, beta)
    if activation is not None:
        x = functions.ACTIVATIONS[activation](x)
    if function is not None:
        x = evaluate(function, [x]).expand(x.shape)  # a constant is one number
    return x


@outside_autocast
def gemm(a, b, terms, out, out_dtype):
    """a (..., M, K) @ b (..., K, N) with the epilogue; rounds once, to the output's dtype. terms: matmul.terms.Terms,
    of which the epilogue is a Program."""
    wide = accumulator(a.dtype)
    if terms.precision == "tf32":
        a, b = rounded(a), rounded(b)
    scale_a, scale_b = terms.scale_a, terms.scale_b
    a_blocks = scale_a is not None and scale_a.dim() > 1 and scale_a.shape[-1] != 1
    b_blocks = scale_b is not None and scale_b.numel() != 1 and scale_b.dim() > 1
    b_blocks = b_blocks and (scale_b.shape[-2] != 1 or scale_b.shape[-1] != b.shape[-1])
    x = a.to(wide) * of_elements(scale_a, a) if a_blocks else a.to(wide)
    y = b.to(wide) * of_elements(scale_b, b) if b_blocks else b.to(wide)
    acc = torch.matmul(x, y)
    for scale, blocks, dim in ((scale_a, a_blocks, -1), (scale_b, b_blocks, -2)):
        if scale is not None and not blocks:  # (M,) and (N,) are short for (M, 1) and (1, N)
            if scale.numel() == 1:
                scale = scale.reshape(())
            acc = acc * (scale.unsqueeze(dim) if scale.dim() == 1 else scale)
    return finish(acc, terms, out, out_dtype)


def of_elements(scale, x):
    """A scale for each element of x, of those of x's blocks of 128 rows or columns."""
    for dim in (-2, -1):
        if scale.shape[dim] not in (1, x.shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, x.shape[dim])
    return scale


def gate(z, activation):
    """Of z (..., 2 H), of whose columns 64 belong to the gate, 64 to what it multiplies, and so on: (..., H)."""
    g, u = z.unflatten(-1, (-1, 2, GATE)).unbind(-2)
    return ((g if activation is None else functions.ACTIVATIONS[activation](g)) * u).flatten(-2)


def gate_of_rounded(z, activation):
    """The same of a z of a product of 8-bit floats: in fp32, of float64 in float64, rounded to z's dtype."""
    return gate(z.to(accumulator(z.dtype)), activation).to(z.dtype)


def narrowed(x, terms, out_dtype):
    """x as 8-bit floats, times scale_out; its largest magnitude goes to amax."""
    if terms.amax is not None:
        terms.amax.fill_(x.abs().amax())
    if terms.scale_out is not None:
        x = x * terms.scale_out.reshape(()).to(x.dtype)
    top = torch.finfo(out_dtype).max
    return x.clamp(-top, top).to(out_dtype)


def finish(acc, terms, out, out_dtype):
    """The epilogue of an accumulator, rounded once; into `out`, or contiguous. (y, z) if the terms are with z.

    Sums in fp16 are fp32 ones, rounded once: kernels round each addition.
    """
    t = terms
    if t.accumulation_dtype == torch.float16:
        acc = acc.half().float()
    if t.gated:
        result = gate(acc, t.activation)
        return result.to(out_dtype).contiguous() if out is None else out.copy_(result)
    if t.with_z:
        z = linear_terms(acc, t.bias, t.residual, t.alpha, t.beta)
        y = apply_epilogue(z, None, t.activation, None, 1.0, 1.0, t.epilogue)
        return y.to(out_dtype).contiguous(), z.to(out_dtype).contiguous()
    result = apply_epilogue(acc, t.bias, t.activation, t.residual, t.alpha, t.beta, t.epilogue)
    if out_dtype in FLOAT8:
        result = narrowed(result, t, out_dtype)
    return result.to(out_dtype).contiguous() if out is None else out.copy_(result)
