"""Reference GEMMs in plain torch, used for CPU tensors and by tests. They accumulate in FP32 (float64 for float64)."""

import functools
from collections.abc import Callable

import torch

from . import functions
from .dtypes import FLOAT8, accumulator
from .matmul.precision import rounded
from .traced.evaluate import evaluate

BLOCK = 128  # rows or columns per block scale
GATE = 64  # columns of gate and of up, which alternate


def outside_autocast(function: Callable) -> Callable:
    """Decorator that disables torch.autocast for CPU tensors; it would round the reference's matmuls."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def linear_terms(acc, bias, residual, alpha, beta):
    """Apply the epilogue's terms before the activation, in order, to an FP32 or FP64 accumulator (..., M, N)."""
    x = acc * alpha if alpha != 1.0 else acc
    if bias is not None:
        x = x + bias.to(x.dtype)
    if residual is not None:
        x = x + beta * residual.to(x.dtype)
    return x


def apply_epilogue(acc, bias, activation, residual, alpha, beta, function):
    """Apply all terms of the epilogue; function: a Program."""
    x = linear_terms(acc, bias, residual, alpha, beta)
    if activation is not None:
        x = functions.ACTIVATIONS[activation](x)
    if function is not None:
        x = evaluate(function, [x]).expand(x.shape)  # a constant function returns one element
    return x


@outside_autocast
def gemm(args, out_dtype: torch.dtype, with_z: bool = False):
    """a (..., M, K) @ b (..., K, N) with the epilogue, rounded once, to the output's dtype.

    args: GemmArgs with a Program as epilogue.
    """
    a, b = args.a, args.b
    wide = accumulator(a.dtype)
    if args.precision == "tf32":
        a, b = rounded(a), rounded(b)
    scale_a, scale_b = args.scale_a, args.scale_b
    a_blocks = scale_a is not None and scale_a.dim() > 1 and scale_a.shape[-1] != 1
    b_blocks = scale_b is not None and scale_b.numel() != 1 and scale_b.dim() > 1
    b_blocks = b_blocks and (scale_b.shape[-2] != 1 or scale_b.shape[-1] != b.shape[-1])
    x = a.to(wide) * of_elements(scale_a, a) if a_blocks else a.to(wide)
    y = b.to(wide) * of_elements(scale_b, b) if b_blocks else b.to(wide)
    acc = torch.matmul(x, y) if args.source is None else args.source.matmul(x, y)
    for scale, blocks, dim in ((scale_a, a_blocks, -1), (scale_b, b_blocks, -2)):
        if scale is not None and not blocks:  # (M,) and (N,) mean (M, 1) and (1, N)
            if scale.numel() == 1:
                scale = scale.reshape(())
            acc = acc * (scale.unsqueeze(dim) if scale.dim() == 1 else scale)
    return finish(acc, args, out_dtype, with_z)


def of_elements(scale, x):
    """Expand scales of blocks of 128 rows or columns to one per element of x."""
    for dim in (-2, -1):
        if scale.shape[dim] not in (1, x.shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, x.shape[dim])
    return scale


def halves(z):
    """Gate and up (..., H / 64, 64) of z (..., 2 H), whose columns alternate."""
    return z.unflatten(-1, (-1, 2, GATE)).unbind(-2)


def gate(z, activation):
    """activation(gate) * up (..., H) from z (..., 2 H), whose columns alternate, 64 of gate and 64 of up."""
    g, u = halves(z)
    return ((g if activation is None else functions.ACTIVATIONS[activation](g)) * u).flatten(-2)


def gate_of_rounded(z, activation):
    """`gate` for the z of an FP8 GEMM: computed in FP32 (float64 for float64), rounded to z's dtype."""
    return gate(z.to(accumulator(z.dtype)), activation).to(z.dtype)


def narrowed(x, scale_out, amax, out_dtype):
    """x * scale_out as FP8; the largest magnitude of x is stored to amax."""
    if amax is not None:
        amax.fill_(x.abs().amax())
    if scale_out is not None:
        x = x * scale_out.reshape(()).to(x.dtype)
    top = torch.finfo(out_dtype).max
    return x.clamp(-top, top).to(out_dtype)


def finish(acc, args, out_dtype: torch.dtype, with_z: bool):
    """Apply the epilogue of a call to an accumulator and round once, into `out` or a contiguous tensor; (y, z) with z.

    FP16 accumulation is an FP32 accumulator rounded once, whereas kernels round each addition.
    """
    t = args
    residual = None if t.beta == 0 else t.residual
    if t.accumulation_dtype == torch.float16:
        acc = acc.half().float()
    if t.gated:
        result = gate(acc, t.activation)
    elif with_z:
        z = linear_terms(acc, t.bias, residual, t.alpha, t.beta)
        y = apply_epilogue(z, None, t.activation, None, 1.0, 1.0, t.epilogue)
        return y.to(out_dtype).contiguous(), z.to(out_dtype).contiguous()
    else:
        result = apply_epilogue(acc, t.bias, t.activation, residual, t.alpha, t.beta, t.epilogue)
        if out_dtype in FLOAT8:
            result = narrowed(result, t.scale_out, t.amax, out_dtype)
    return result.to(out_dtype).contiguous() if t.out is None else t.out.copy_(result)
