"""Registered ops for a Bsr24, for torch.compile and opcheck: those of sparse_collective.torch_op with metadata and
without gradients."""

from cute_kernels.checks import check_no_grad, scaled
from cute_kernels.runtime import library
from cute_kernels.runtime.arguments import terms_of, with_keywords
from cute_kernels.sparse24.format import KEPT
from cute_kernels.torch_op import function_named, named_function

from .. import torch_op
from ..arguments import BsrArgs
from ..dispatch import call
from .matrix import Bsr24

NAME = "sparse_collective::bsr24"
# columns: of the whole matrix; `values` has half of them
INPUTS = (
    "str op, Tensor crow_indices, Tensor col_indices, Tensor values, SymInt columns, bool check, Tensor metadata, "
    "Tensor b"
)
OP_TERMS = "bias", "activation", "residual", "out_dtype", "epilogue", "expert_ids"
TERMS = terms_of(BsrArgs, OP_TERMS)


def _matrix(crow_indices, col_indices, values, columns, check, metadata) -> Bsr24:
    return Bsr24(torch_op._matrix(False, crow_indices, col_indices, values, columns // KEPT, check), metadata)


def _fake(op, *inputs, **terms):
    *matrix, _, b = inputs
    return torch_op._fake(op, False, *matrix, b, **terms)


def _flops(op, crow_indices, col_indices, values, columns, check, metadata, b, *_, **__) -> int:
    return torch_op._flops(op, False, crow_indices, col_indices, values, columns, check, b)


run = with_keywords(
    BsrArgs, call, "op, crow_indices, col_indices, values, columns, check, metadata, b", function_named,
    {"matrix": _matrix}, W="matrix(crow_indices, col_indices, values, columns, check, metadata)",
)  # fmt: skip
library.register(NAME, INPUTS, TERMS, run, _fake, flops=_flops)


def traced_bsr24(args: BsrArgs, without_gradient: str):
    """A GEMM of a Bsr24 inside a torch.compile trace; see traced_bsr."""
    op, W = args.op, args.W
    if scaled(args.b, None, args.scale_b, args.use_fast_accum):
        raise RuntimeError(
            f"{op} of a Bsr24 of float8 has no registered op, which torch.compile, torch.func and dispatch modes "
            "need; call it under torch.compiler.disable, outside of transforms and modes"
        )
    check_no_grad(without_gradient, W.values, args.b, args.bias, args.residual)
    half = W.compressed
    matrix = half.crow_indices, half.col_indices, half.stored, W.shape[-1], half.check and not half.checked, W.metadata
    args = args._replace(epilogue=named_function(args.epilogue))
    terms = tuple(getattr(args, name) for name in OP_TERMS)
    return library.call(NAME, (op, *matrix, args.b), args.out, terms)
