"""gemm of a Sparse24 as torch.library knows it, for torch.compile and opcheck: the matrix crosses the schema as its two
tensors. Eager calls go around it."""

import torch

from ..arguments import GemmArgs
from ..checks import check_no_grad, scaled
from ..dtypes import default_out_dtype
from ..runtime import library
from ..runtime.arguments import terms_of, with_keywords
from ..torch_op import function_named, named_function
from . import dispatch
from .format import KEPT, Sparse24

NAME = "cute_kernels::sparse24_gemm"
INPUTS = "Tensor values, Tensor metadata, Tensor b"
OP_TERMS = "bias", "activation", "residual", "alpha", "beta", "out_dtype", "epilogue"
TERMS = terms_of(GemmArgs, OP_TERMS)


def _run(values: tuple):
    return dispatch.gemm(GemmArgs._make(values))


def _matrix(values, metadata) -> Sparse24:
    return Sparse24(values, metadata, (values.shape[0], KEPT * values.shape[1]))


def _fake(values, metadata, b, *, out_dtype, **terms):
    torch._check(b.dim() == 2, lambda: f"{dispatch.OP}: b has {b.dim()} dimensions; it must be a matrix (K, N)")
    columns = KEPT * values.shape[1]
    torch._check(b.shape[0] == columns, lambda: f"{dispatch.OP}: {columns} columns meet {b.shape[0]} rows")
    return b.new_empty((values.shape[0], b.shape[1]), dtype=out_dtype or default_out_dtype(b.dtype))


def _flops(values, metadata, b, *_, **__) -> int:
    return 2 * values.numel() * b.shape[-1]


run = with_keywords(
    GemmArgs, _run, "values, metadata, b", function_named, {"matrix": _matrix}, a="matrix(values, metadata)"
)
library.register(NAME, INPUTS, TERMS, run, _fake, flops=_flops)


def traced_gemm(args: GemmArgs):
    """gemm of a Sparse24 inside a torch.compile trace."""
    a = args.a
    if scaled(a.values, args.scale_a, args.scale_b, args.use_fast_accum):
        raise RuntimeError(
            f"{dispatch.OP} of float8, to which scales and use_fast_accum belong, is not traced by torch.compile; call "
            "it under torch.compiler.disable"
        )
    check_no_grad(dispatch.OP, a.values, *args.inputs[1:])
    args = args._replace(alpha=float(args.alpha), beta=float(args.beta), epilogue=named_function(args.epilogue))
    terms = tuple(getattr(args, name) for name in OP_TERMS)
    return library.call(NAME, (a.values, a.metadata, args.b), args.out, terms)
