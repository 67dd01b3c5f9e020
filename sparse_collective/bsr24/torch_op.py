"""Registered ops for a Bsr24, for torch.compile and opcheck: those of sparse_collective.torch_op with metadata and
without gradients."""

from cute_kernels.checks import check_no_grad
from cute_kernels.runtime import library
from cute_kernels.sparse24.format import KEPT
from cute_kernels.torch_op import function_named, named_function

from .. import torch_op
from ..dispatch import call
from .matrix import Bsr24

NAME = "sparse_collective::bsr24"
# columns: of the whole matrix; `values` has half of them
INPUTS = (
    "str op, Tensor crow_indices, Tensor col_indices, Tensor values, SymInt columns, bool check, Tensor metadata, "
    "Tensor b"
)
TERMS = (
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, ScalarType? out_dtype=None, str? epilogue=None, "
    "Tensor? expert_ids=None"
)


def _run(op, crow_indices, col_indices, values, columns, check, metadata, b, *, out, epilogue, **terms):
    compressed = torch_op._matrix(False, crow_indices, col_indices, values, columns // KEPT, check)
    return call(op, Bsr24(compressed, metadata), b, out=out, epilogue=function_named(epilogue), **terms)


def _fake(op, *inputs, **terms):
    *matrix, _, b = inputs
    return torch_op._fake(op, False, *matrix, b, **terms)


def _flops(op, crow_indices, col_indices, values, columns, check, metadata, b, *_, **__) -> int:
    return torch_op._flops(op, False, crow_indices, col_indices, values, columns, check, b)


library.register(NAME, INPUTS, TERMS, _run, _fake, flops=_flops)


def traced_bsr24(op, W, b, bias, activation, residual, out, epilogue, expert_ids=None, *, out_dtype=None):
    """A product of a Bsr24 inside a torch.compile trace; see traced_bsr for which matrices are checked in each call."""
    check_no_grad(f"{op} of a Bsr24", W.values, b, bias, residual)
    half = W.compressed
    matrix = half.crow_indices, half.col_indices, half.stored, W.shape[-1], half.check and not half.checked, W.metadata
    terms = bias, activation, residual, out_dtype, named_function(epilogue), expert_ids
    return library.call(NAME, (op, *matrix, b), out, terms)
