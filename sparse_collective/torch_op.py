"""The block-sparse ops as torch.library knows them: a BsrMatrix crosses the schema as its tensors and columns."""

import torch

from cute_kernels.runtime import library
from cute_kernels.torch_op import function_named, named_function

from .bsr import BsrMatrix
from .eager import call

NAME = "sparse_collective::bsr"
INPUTS = "str op, Tensor crow_indices, Tensor col_indices, Tensor values, SymInt columns, bool check, Tensor b"
TERMS = (
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, ScalarType? out_dtype=None, str? epilogue=None, "
    "Tensor? groups=None"
)


def _run(op, crow_indices, col_indices, values, columns, check, b, *, out, out_dtype, epilogue, **terms):
    W = _matrix(crow_indices, col_indices, values, columns, check)
    if out is None:
        out = b.new_empty(_shape(op, crow_indices, values, b), dtype=out_dtype or b.dtype)
    return call(op, W, b, out=out, epilogue=function_named(epilogue), **terms)


def _fake(op, crow_indices, col_indices, values, columns, check, b, *, out_dtype, **terms):
    inner = b.shape[-2] if op == "bsr_matmul" else b.shape[-1]
    torch._check(inner == columns, lambda: f"{op}: {columns} columns of W meet {inner}")
    return b.new_empty(_shape(op, crow_indices, values, b), dtype=out_dtype or b.dtype)


library.register(NAME, INPUTS, TERMS, _run, _fake)


def _matrix(crow_indices, col_indices, values, columns: int, check: bool) -> BsrMatrix:
    """A matrix for one call. What was learnt of these very index tensors, and their plans, it takes over."""
    shape = (*_items(crow_indices, values), _rows(crow_indices, values), columns)
    W = BsrMatrix(crow_indices, col_indices, values, shape, check=check)
    W.recall()
    return W


def _rows(crow_indices, values) -> int:
    return (crow_indices.shape[-1] - 1) * values.shape[-2]


def _items(crow_indices, values) -> tuple:
    """(L,) of a batch in either form, () of one matrix."""
    return tuple(values.shape[:1] if values.dim() == 4 else crow_indices.shape[:-1])


def _shape(op: str, crow_indices, values, b) -> tuple:
    rows, items = _rows(crow_indices, values), _items(crow_indices, values)
    if op == "bsr_matmul":
        return (*(items or b.shape[:-2]), rows, b.shape[-1])
    if items and op == "bsr_linear":
        return (*items, b.shape[-2], rows)
    return (*b.shape[:-1], rows)


def traced_bsr(op, W, b, bias, activation, residual, out, epilogue, groups=None):
    """bsr_matmul, bsr_linear or bsr_grouped_linear inside a torch.compile trace.

    A graph cannot remember that a matrix has been checked: one whose check_indices() ran before tracing is trusted,
    any other is checked in each call, with a synchronisation.
    """
    if not isinstance(W, BsrMatrix):
        raise TypeError(f"{op}: under torch.compile W must be a BsrMatrix; make it outside with BsrMatrix.from_torch")
    matrix = (W.crow_indices, W.col_indices, W.values, W.shape[-1], W.check and not W.checked)
    terms = bias, activation, residual, None, named_function(epilogue), groups
    return library.call(NAME, (op, *matrix, b), out, terms)
