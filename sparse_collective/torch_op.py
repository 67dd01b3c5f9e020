"""The block-sparse ops as torch.library knows them: a BsrMatrix crosses the schema as its tensors and columns."""

import functools

import torch

from cute_kernels.checks import check_no_grad, narrow
from cute_kernels.dtypes import default_out_dtype
from cute_kernels.gradients import of_columns, saved_of, shaped
from cute_kernels.runtime import library
from cute_kernels.runtime.front import check_traced
from cute_kernels.torch_op import (
    called_narrow,
    epilogue_gradient,
    function_named,
    named_function,
    result_to_save,
    wants_z,
)

from .bsr import BsrMatrix
from .dispatch import GATED, call
from .gradients import before_epilogue, bias_gradient, operand_gradient, values_gradient
from .sddmm_kernel import dispatch as sampled

NAME = "sparse_collective::bsr"
MATRIX = "bool transposed, Tensor crow_indices, Tensor col_indices, Tensor values, SymInt columns, bool check"
INPUTS = f"str op, {MATRIX}, Tensor b"
TERMS = (
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, ScalarType? out_dtype=None, str? epilogue=None, "
    "Tensor? expert_ids=None, ScalarType? accumulation_dtype=None"
)
MATRIX_ARGUMENTS = 6
GRADIENTS = (None,) * 15  # of all inputs and terms


def _run(
    op, transposed, crow, col, values, columns, check, b, *, out, bias, activation, residual, out_dtype, epilogue,
    expert_ids, accumulation_dtype, with_z=False,
):  # fmt: skip
    W = _matrix(transposed, crow, col, values, columns, check)
    if epilogue is not None:
        epilogue = function_named(epilogue)
    if out is None and out_dtype is not None and not with_z:
        out = b.new_empty(_shape(op, transposed, crow, col, values, columns, check, b), dtype=out_dtype)
    terms = bias, activation, residual, out, epilogue, expert_ids, with_z, None, False, accumulation_dtype
    return call(op, W, b, *terms)


def _fake(op, *inputs, out_dtype, **terms):
    *matrix, b = inputs
    inner, columns = b.shape[-2] if op == "bsr_matmul" else b.shape[-1], _extents(*matrix)[1]
    torch._check(inner == columns, lambda: f"{op}: {columns} columns of W meet {inner}")
    return b.new_empty(_shape(op, *matrix, b), dtype=out_dtype or default_out_dtype(b.dtype))


def _setup_context(ctx, inputs, output):
    op, *inputs = inputs
    matrix, inputs = inputs[:MATRIX_ARGUMENTS], inputs[MATRIX_ARGUMENTS:]
    b, bias, activation, residual, _, epilogue, expert_ids, accumulation_dtype = inputs
    transposed, crow, col, values, columns, check = matrix
    saved = result_to_save(output, activation, epilogue)
    if saved is not None or not saved_of(activation, epilogue):
        residual = None  # backward reads it only to compute z again
    ctx.save_for_backward(crow, col, values, b, bias, residual, expert_ids, saved)
    ctx.call = op, transposed, columns, check, activation, epilogue, accumulation_dtype


def _backward(ctx, dy, *_):
    op, transposed, columns, check, activation, epilogue, accumulation_dtype = ctx.call
    if op == GATED:
        raise RuntimeError(f"{op} as an op has no gradient; the function of this name goes through bsr_linear for one")
    crow, col, values, b, bias, residual, expert_ids, kept = ctx.saved_tensors
    given, ops = len(ctx.needs_input_grad), torch.ops.sparse_collective  # without the last ones that are their defaults
    needed = (*ctx.needs_input_grad, *(False,) * (len(GRADIENTS) - given))
    needs_values, needs_b, needs_bias, needs_residual = needed[4], needed[7], needed[8], needed[10]
    inputs = op, transposed, crow, col, values, columns, check, b
    if kept is None and saved_of(activation, epilogue):
        kept = ops.bsr(*inputs, bias, None, residual, dy.dtype, None, expert_ids, accumulation_dtype)
    sums = bias.dtype if needs_bias and of_columns(bias) else None
    dz, total = before_epilogue(op, dy, activation, epilogue, kept, sums, epilogue_gradient)
    gradients = list(GRADIENTS)
    if needs_values:
        gradients[4] = ops.bsr_values_gradient(*inputs, dz, expert_ids)
    if needs_b:
        gradients[7] = ops.bsr_operand_gradient(*inputs, dz, expert_ids)
    if needs_bias:
        gradients[8] = bias_gradient(op, dz, bias, expert_ids) if sums is None else shaped(total, bias)
    if needs_residual:
        gradients[10] = dz
    return tuple(gradients[:given])


def _fake_with_z(*inputs, **terms):
    return _fake(*inputs, **terms), _fake(*inputs, **terms)


def _flops(op, *inputs, **_) -> int:
    """Two for each stored element and column of b that it meets."""
    crow, values, b = inputs[1], inputs[3], inputs[MATRIX_ARGUMENTS]
    items = _items(crow, values)
    if op == "bsr_grouped_linear":  # a token meets one item
        return 2 * values.numel() // items[0] * b.shape[0]
    if items:
        return 2 * values.numel() * b.shape[-1 if op == "bsr_matmul" else -2]
    rows = b.shape[-2] if op == "bsr_matmul" else b.shape[-1]
    return 2 * values.numel() * (b.numel() // max(rows, 1))


GRADIENT = _setup_context, _backward
library.register(NAME, INPUTS, TERMS, _run, _fake, gradient=GRADIENT, flops=_flops)
with_z = functools.partial(_run, with_z=True)
library.register_pair(f"{NAME}_and_z", INPUTS, TERMS, with_z, _fake_with_z, GRADIENT, _flops)


def _run_scaled(op, *inputs, scales, out, epilogue, **terms):
    *matrix, b = inputs
    return call(op, _matrix(*matrix, scales), b, out=out, epilogue=function_named(epilogue), **terms)


SCALED = "sparse_collective::scaled_bsr"
SCALED_TERMS = f"Tensor? scales=None, Tensor? scale_b=None, bool use_fast_accum=False, {TERMS}, str? precision=None"
library.register(SCALED, INPUTS, SCALED_TERMS, _run_scaled, _fake, flops=_flops)


def _run_narrow(op, *inputs, scales, amax, out, epilogue, **terms):
    *matrix, b = inputs
    found = b.new_empty(int(amax), dtype=torch.float32)
    more = {"out": out, "epilogue": function_named(epilogue), "amax": found if amax else None}
    return call(op, _matrix(*matrix, scales), b, **terms, **more), found


def _fake_narrow(op, *inputs, amax, **terms):
    return _fake(op, *inputs, **terms), inputs[-1].new_empty(int(amax), dtype=torch.float32)


NARROW, NARROW_TERMS = "sparse_collective::narrow_bsr", f"Tensor? scale_out=None, bool amax=False, {SCALED_TERMS}"
library.register(NARROW, INPUTS, NARROW_TERMS, _run_narrow, _fake_narrow, more="Tensor", flops=_flops)


def _gradient_op(name: str, gradient, of: int) -> None:
    """An op for one gradient, of the shape of the tensor in this place of INPUTS."""

    def run(op, *inputs):
        *matrix, b, dz, expert_ids = inputs
        return gradient(op, _matrix(*matrix), b, dz, expert_ids)

    schema = f"({INPUTS}, Tensor dz, Tensor? expert_ids) -> Tensor"
    name = f"sparse_collective::{name}"

    def fake(*inputs):
        return torch.empty_like(inputs[of], memory_format=torch.contiguous_format)

    library.define(name, schema, run, fake, flops=_flops)


_gradient_op("bsr_values_gradient", values_gradient, 4)
_gradient_op("bsr_operand_gradient", operand_gradient, 7)


def _run_sddmm(a, b, *matrix, out, accumulate, out_dtype, expert_ids):
    return sampled.sddmm(a, b, _matrix(False, *matrix), out, accumulate, out_dtype, expert_ids)


def _fake_sddmm(a, b, *matrix, accumulate, out_dtype, expert_ids):
    (rows, columns), values = _extents(False, *matrix), matrix[2]
    fits = a.shape[0] == rows and b.shape[1] == columns and a.shape[1] == b.shape[0]
    torch._check(fits, lambda: f"sddmm: a must be ({rows}, K) and b (K, {columns}), got {a.shape} and {b.shape}")
    return a.new_empty(values.shape, dtype=out_dtype or a.dtype)


def _sddmm_flops(a, b, crow_indices, col_indices, values, *_, **__) -> int:
    """Two for each stored element and element of K that it sums; of a batch an element of K belongs to one item."""
    items = _items(crow_indices, values)
    return 2 * values.numel() * a.shape[1] // (items[0] if items else 1)


SDDMM = "sparse_collective::sddmm"
SDDMM_INPUTS = "Tensor a, Tensor b, Tensor crow_indices, Tensor col_indices, Tensor values, SymInt columns, bool check"
SDDMM_TERMS = "bool accumulate=False, ScalarType? out_dtype=None, Tensor? expert_ids=None"
library.register(SDDMM, SDDMM_INPUTS, SDDMM_TERMS, _run_sddmm, _fake_sddmm, flops=_sddmm_flops)


def traced_sddmm(a, b, pattern, out, accumulate, out_dtype, expert_ids):
    """sddmm inside a torch.compile trace, and of calls that go through the dispatcher; see traced_bsr for which
    patterns are checked in each call."""
    sampled.check_pattern("sddmm", pattern, out, accumulate, expert_ids)
    check_traced("sddmm", a, b, out)
    check_no_grad("sddmm", a, b)
    matrix = pattern.crow_indices, pattern.col_indices, pattern.stored.detach(), pattern.shape[-1]
    inputs = a, b, *matrix, pattern.check and not pattern.checked
    return library.call(SDDMM, inputs, out, (accumulate, out_dtype, expert_ids))


def _matrix(transposed: bool, crow_indices, col_indices, values, columns: int, check: bool, scales=None) -> BsrMatrix:
    """A matrix for one call, with the Pattern of these index tensors."""
    W = BsrMatrix._of_op(crow_indices, col_indices, values, columns, check, scales)
    return W.t() if transposed else W


def _extents(transposed: bool, crow_indices, col_indices, values, columns: int, check: bool) -> tuple:
    """(M, K)"""
    rows = (crow_indices.shape[-1] - 1) * values.shape[-2]
    return (columns, rows) if transposed else (rows, columns)


def _items(crow_indices, values) -> tuple:
    """(L,) of a batch in either form, () of one matrix."""
    return tuple(values.shape[:1] if values.dim() == 4 else crow_indices.shape[:-1])


def _shape(op: str, *inputs) -> tuple:
    *matrix, b = inputs
    rows, items = _extents(*matrix)[0], _items(matrix[1], matrix[3])
    if op == GATED:
        rows = rows // 2
    if op == "bsr_matmul":
        return (*(items or b.shape[:-2]), rows, b.shape[-1])
    if items and op == "bsr_linear":
        return (*items, b.shape[-2], rows)
    return (*b.shape[:-1], rows)


def traced_bsr(op, W, b, bias, activation, residual, out, epilogue, expert_ids=None, *, accumulation_dtype=None):
    """bsr_matmul, bsr_linear or bsr_grouped_linear inside a torch.compile trace, and of calls that go through the
    dispatcher.

    A graph cannot remember that a matrix has been checked: one whose check_indices() ran before tracing is trusted,
    any other is checked in each call, with a synchronisation.
    """
    inputs, terms = flat(op, W, b, bias, activation, residual, epilogue, expert_ids, accumulation_dtype)
    if out is None and wants_z(activation, epilogue, inputs[4], b, bias, residual):
        return library.call(f"{NAME}_and_z", inputs, None, terms)[0]
    return library.call(NAME, inputs, out, terms)


def traced_scaled_bsr(
    op, W, b, bias, activation, residual, out, epilogue, expert_ids=None, *, scale_b, use_fast_accum,
    accumulation_dtype=None, out_dtype=None, scale_out=None, amax=None, precision=None,
):  # fmt: skip
    """A GEMM with FP8 operands or output, or with a precision, inside a torch.compile trace; see traced_bsr."""
    inputs, terms = flat(op, W, b, bias, activation, residual, epilogue, expert_ids, accumulation_dtype)
    *first, _, function, expert_ids, sums = terms
    scales = W.stored_scales
    what = f"{op} of float8, or with out_dtype or precision,"
    check_no_grad(what, inputs[4], scales, b, bias, residual, scale_b, scale_out, amax)
    terms = scales, scale_b, use_fast_accum, *first, out_dtype, function, expert_ids, sums, precision
    if narrow(out, out_dtype, scale_out, amax):
        return called_narrow(NARROW, inputs, out, terms, scale_out, amax)
    return library.call(SCALED, inputs, out, terms)


def flat(op, W, b, bias, activation, residual, epilogue, expert_ids, accumulation_dtype) -> tuple[tuple, tuple]:
    """(inputs, terms) of the registered op."""
    if not isinstance(W, BsrMatrix):
        raise TypeError(
            f"{op}: under torch.compile and torch.func W must be a BsrMatrix; make it outside with BsrMatrix.from_torch"
        )
    check_traced(op, W.stored, b, bias, residual)
    base = W if W.base is None else W.base
    matrix = base.crow_indices, base.col_indices, base.stored, base.shape[-1], base.check and not base.checked
    terms = bias, activation, residual, None, named_function(epilogue), expert_ids, accumulation_dtype
    return (op, W.base is not None, *matrix, b), terms
