"""gemm of a Sparse24 as torch.library knows it, for torch.compile and opcheck: the matrix crosses the schema as its two
tensors. Eager calls go around it."""

import torch

from ..checks import check_no_grad, scaled
from ..dtypes import default_out_dtype
from ..runtime import library
from ..torch_op import function_named, named_function
from . import dispatch
from .format import KEPT, Sparse24

NAME = "cute_kernels::sparse24_gemm"
INPUTS = "Tensor values, Tensor metadata, Tensor b"
TERMS = (
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, float alpha=1.0, float beta=1.0, "
    "ScalarType? out_dtype=None, str? epilogue=None"
)


def _run(values, metadata, b, *, out, epilogue, **terms):
    a = Sparse24(values, metadata, (values.shape[0], KEPT * values.shape[1]))
    return dispatch.gemm(a, b, out=out, epilogue=function_named(epilogue), **terms)


def _fake(values, metadata, b, *, out_dtype, **terms):
    torch._check(b.dim() == 2, lambda: f"{dispatch.OP}: b has {b.dim()} dimensions; it must be a matrix (K, N)")
    columns = KEPT * values.shape[1]
    torch._check(b.shape[0] == columns, lambda: f"{dispatch.OP}: {columns} columns meet {b.shape[0]} rows")
    return b.new_empty((values.shape[0], b.shape[1]), dtype=out_dtype or default_out_dtype(b.dtype))


def _flops(values, metadata, b, *_, **__) -> int:
    return 2 * values.numel() * b.shape[-1]


library.register(NAME, INPUTS, TERMS, _run, _fake, flops=_flops)


def traced_gemm(
    a, b, bias, activation, residual, alpha, beta, out, out_dtype, epilogue, scale_a=None, scale_b=None,
    use_fast_accum=False, accumulation_dtype=None,
):  # fmt: skip
    """gemm of a Sparse24 inside a torch.compile trace."""
    dispatch._check_kind(a, b, accumulation_dtype)
    if scaled(a.values, scale_a, scale_b, use_fast_accum):
        raise RuntimeError(
            f"{dispatch.OP} of float8, to which scales and use_fast_accum belong, is not traced by torch.compile; call "
            "it under torch.compiler.disable"
        )
    check_no_grad(dispatch.OP, a.values, b, bias, residual)
    terms = bias, activation, residual, float(alpha), float(beta), out_dtype, named_function(epilogue)
    return library.call(NAME, (a.values, a.metadata, b), out, terms)
