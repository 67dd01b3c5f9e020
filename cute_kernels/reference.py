"""The same products in plain torch: what CPU tensors run, and what tests compare with. Sums are in fp32, of fp64 in
fp64."""

import torch

from . import functions
from .dtypes import accumulator
from .traced.evaluate import evaluate

GATE = 64  # features of a gate, and of what it multiplies, in turn


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


def gemm(a, b, terms, out, out_dtype):
    """a (..., M, K) @ b (..., K, N) with the epilogue; rounds once, to the output's dtype. terms: matmul.terms.Terms,
    of which the epilogue is a Program."""
    wide = accumulator(a.dtype)
    acc = torch.matmul(a.to(wide), b.to(wide))
    for scale, dim in ((terms.scale_a, -1), (terms.scale_b, -2)):
        if scale is not None:  # (M,) and (N,) are short for (M, 1) and (1, N)
            if scale.numel() == 1:
                scale = scale.reshape(())
            acc = acc * (scale.unsqueeze(dim) if scale.dim() == 1 else scale)
    return finish(acc, terms, out, out_dtype)


def gate(z, activation):
    """Of z (..., 2 H), of whose columns 64 belong to the gate, 64 to what it multiplies, and so on: (..., H)."""
    g, u = z.unflatten(-1, (-1, 2, GATE)).unbind(-2)
    return ((g if activation is None else functions.ACTIVATIONS[activation](g)) * u).flatten(-2)


def finish(acc, terms, out, out_dtype):
    """The epilogue of an accumulator, rounded once; into `out`, or contiguous. (y, z) if the terms are with z."""
    t = terms
    if t.gated:
        result = gate(acc, t.activation)
        return result.to(out_dtype).contiguous() if out is None else out.copy_(result)
    if t.with_z:
        z = linear_terms(acc, t.bias, t.residual, t.alpha, t.beta)
        y = apply_epilogue(z, None, t.activation, None, 1.0, 1.0, t.epilogue)
        return y.to(out_dtype).contiguous(), z.to(out_dtype).contiguous()
    result = apply_epilogue(acc, t.bias, t.activation, t.residual, t.alpha, t.beta, t.epilogue)
    return result.to(out_dtype).contiguous() if out is None else out.copy_(result)
