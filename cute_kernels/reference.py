"""The same products in plain torch: what CPU tensors run, and what tests compare with. Sums are in fp32, of fp64 in
fp64."""

import torch

from . import functions
from .dtypes import accumulator
from .traced.evaluate import evaluate


def apply_epilogue(acc, bias, activation, residual, alpha, beta, function):
    """The epilogue's terms, in their order, on an fp32 or fp64 accumulator (..., M, N); function: a Program."""
    x = acc * alpha if alpha != 1.0 else acc
    if bias is not None:
        x = x + bias.to(x.dtype)
    if residual is not None:
        x = x + beta * residual.to(x.dtype)
    if activation is not None:
        x = functions.ACTIVATIONS[activation](x)
    if function is not None:
        x = evaluate(function, [x]).expand(x.shape)  # a constant is one number
    return x


def gemm(a, b, terms, out, out_dtype):
    """a (..., M, K) @ b (..., K, N) with the epilogue; rounds once, to the output's dtype. terms: matmul.terms.Terms,
    of which the epilogue is a Program."""
    wide = accumulator(a.dtype)
    return finish(torch.matmul(a.to(wide), b.to(wide)), terms, out, out_dtype)


def finish(acc, terms, out, out_dtype):
    """The epilogue of an accumulator, rounded once; into `out`, or contiguous."""
    t = terms
    result = apply_epilogue(acc, t.bias, t.activation, t.residual, t.alpha, t.beta, t.epilogue)
    return result.to(out_dtype).contiguous() if out is None else out.copy_(result)
