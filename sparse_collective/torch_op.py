"""The block-sparse ops as torch.library knows them: a BsrMatrix crosses the schema as its tensors and columns."""

import functools
from collections.abc import Callable

import torch

from cute_kernels.checks import check_no_grad
from cute_kernels.dtypes import default_out_dtype
from cute_kernels.gradients import of_columns, saved_of, shaped
from cute_kernels.runtime import library
from cute_kernels.runtime.arguments import with_keywords
from cute_kernels.runtime.front import check_traced
from cute_kernels.torch_op import (
    called,
    epilogue_gradient,
    function_named,
    named_function,
    result_to_save,
    wants_z,
)

from .arguments import GATED, OP_TERMS, TERMS, BsrArgs
from .bsr import BsrMatrix
from .dispatch import call
from .gradients import before_epilogue, bias_gradient, operand_gradient, values_gradient
from .sddmm_kernel import dispatch as sampled

NAME = "sparse_collective::bsr"
MATRIX = "bool transposed, Tensor crow_indices, Tensor col_indices, Tensor values, SymInt columns, bool check"
INPUTS = f"str op, {MATRIX}, Tensor b"
SCALES = "Tensor? scales=None"  # of W
MATRIX_ARGUMENTS = 6
FIRST = "op", "transposed", "crow_indices", "col_indices", "values", "columns", "check", "b"
NAMES = *FIRST, *OP_TERMS, "scales"  # of the op's arguments


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


def _fake(op, *inputs, out_dtype, **terms):
    *matrix, b = inputs
    inner, columns = b.shape[-2] if op == "bsr_matmul" else b.shape[-1], _extents(*matrix)[1]
    torch._check(inner == columns, lambda: f"{op}: {columns} columns of W meet {inner}")
    return b.new_empty(_shape(op, *matrix, b), dtype=out_dtype or default_out_dtype(b.dtype))


def _setup_context(ctx, inputs, output):
    given = dict(zip(NAMES, inputs, strict=False))
    activation, epilogue = given["activation"], given["epilogue"]
    saved = result_to_save(output, activation, epilogue)
    if saved is not None or not saved_of(activation, epilogue):
        given["residual"] = None  # backward reads it only to compute z again
    ctx.save_for_backward(*(given[name] for name in SAVED), saved)
    ctx.given = {name: None if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def _backward(ctx, dy, *_):
    *saved, kept = ctx.saved_tensors
    given = ctx.given | dict(zip(SAVED, saved, strict=True))
    op, activation, epilogue = given["op"], given["activation"], given["epilogue"]
    if op == GATED:
        raise RuntimeError(f"{op} as an op has no gradient; the function of this name goes through bsr_linear for one")
    needs, ops = dict(zip(NAMES, ctx.needs_input_grad, strict=False)), torch.ops.sparse_collective
    inputs, bias, expert_ids = [given[name] for name in FIRST], given["bias"], given["expert_ids"]
    if kept is None and saved_of(activation, epilogue):
        plain = given | {"activation": None, "epilogue": None, "out_dtype": dy.dtype}
        kept = ops.bsr(*inputs, *(plain[name] for name in OP_TERMS))
    sums = bias.dtype if needs.get("bias") and of_columns(bias) else None
    dz, total = before_epilogue(op, dy, activation, epilogue, kept, sums, epilogue_gradient)
    found = {}
    if needs["values"]:
        found["values"] = ops.bsr_values_gradient(*inputs, dz, expert_ids)
    if needs["b"]:
        found["b"] = ops.bsr_operand_gradient(*inputs, dz, expert_ids)
    if needs.get("bias"):
        found["bias"] = bias_gradient(op, dz, bias, expert_ids) if sums is None else shaped(total, bias)
    if needs.get("residual"):
        found["residual"] = dz
    return tuple(found.get(name) for name in needs)  # trailing defaults are not counted


def _fake_with_z(*inputs, **terms):
    return _fake(*inputs, **terms), _fake(*inputs, **terms)


def _fake_with_amax(*inputs, **terms):
    return _fake(*inputs, **terms), inputs[-1].new_empty(1, dtype=torch.float32)


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


def _with_amax(values: tuple):
    """(y, amax) of an op."""
    args = BsrArgs._make(values)
    amax = args.b.new_empty(1, dtype=torch.float32)
    return call(args._replace(amax=amax)), amax


def runner(run: Callable) -> Callable:
    """A function of the ops' arguments that calls `run` with a tuple of BsrArgs' fields."""
    W = "matrix(transposed, crow_indices, col_indices, values, columns, check, scales)"
    return with_keywords(BsrArgs, run, f"{', '.join(FIRST)}, *, scales=None", function_named, {"matrix": _matrix}, W=W)


SAVED = "crow_indices", "col_indices", "values", "b", "bias", "residual", "expert_ids"
GRADIENT = _setup_context, _backward
TERMS = f"{TERMS}, {SCALES}"
library.register(NAME, INPUTS, TERMS, runner(call), _fake, gradient=GRADIENT, flops=_flops)
with_z = functools.partial(call, with_z=True)
library.register_pair(f"{NAME}_and_z", INPUTS, TERMS, runner(with_z), _fake_with_z, GRADIENT, _flops)
AMAX = f"{NAME}_and_amax"
library.register(AMAX, INPUTS, TERMS, runner(_with_amax), _fake_with_amax, more="Tensor", flops=_flops)


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


def traced_bsr(args: BsrArgs, without_gradient: str):
    """A GEMM inside a torch.compile trace, and of calls that go through the dispatcher.

    A graph cannot remember that a matrix has been checked: one whose check_indices() ran before tracing is trusted,
    any other is checked in each call, with a synchronization.

    without_gradient: description of a call that computes no gradient; "" for others.
    """
    op, W, out, scales = args.op, args.W, args.out, None
    if not isinstance(W, BsrMatrix):
        raise TypeError(
            f"{op}: under torch.compile and torch.func W must be a BsrMatrix; make it outside with BsrMatrix.from_torch"
        )
    check_traced(op, W.stored, args.b, args.bias, args.residual)
    base = W if W.base is None else W.base
    matrix = base.crow_indices, base.col_indices, base.stored, base.shape[-1], base.check and not base.checked
    inputs = op, W.base is not None, *matrix, args.b
    if without_gradient:
        scales = W.stored_scales
        check_no_grad(without_gradient, base.stored, scales, *args.inputs, args.amax)
    name = NAME if args.amax is None else AMAX
    if out is None and wants_z(args.activation, args.epilogue, base.stored, args.b, args.bias, args.residual):
        name = f"{NAME}_and_z"
    args = args._replace(epilogue=named_function(args.epilogue))
    return called(name, inputs, out, (*[getattr(args, name) for name in OP_TERMS], scales), args.amax)
