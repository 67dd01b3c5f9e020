"""Backward pass of the block-sparse GEMMs.

y = epilogue(z), z = W b + terms. With dz the gradient of z (see cute_kernels.gradients): the gradient of W's values is
dz b' sampled at W's pattern (SDDMM), that of b is W's transposed view times dz. Both cache their tables with the
pattern, and do not synchronize.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels.dtypes import accumulator
from cute_kernels.epilogue_gradient.dispatch import epilogue_gradient
from cute_kernels.gradients import column_sums, of_columns, saved_of, shaped, sum_to, through_epilogue
from cute_kernels.runtime.device import forced_path, in_forwards_path
from cute_kernels.runtime.torch_compat import uncompiled
from cute_kernels.runtime.transforms import differentiable_once

from . import dispatch
from .arguments import BsrArgs
from .bsr import BsrMatrix
from .checks import RUN_MULTIPLE
from .sddmm_kernel.dispatch import sddmm
from .sddmm_kernel.tables import rows_of


class Bsr(torch.autograd.Function):
    """bsr_matmul, bsr_linear or bsr_grouped_linear, differentiable once in values, b, bias and residual.

    z is a second output where backward reads it, as of cute_kernels.gradients.Gemm. Not to be applied under a
    transform of torch.func; see `differentiable`.
    """

    @staticmethod
    def forward(ctx, values, stored, b, bias, residual, expert_ids):
        args = BsrArgs._make(values)
        op, W, activation, epilogue = args.op, args.W, args.activation, args.epilogue
        saved = "" if activation is None and epilogue is None else saved_of(activation, epilogue)
        result = dispatch.call(values, saved == "z")
        kept = result[1] if saved == "z" else result if saved == "y" else None
        _, needs_values, needs_b, *_ = ctx.needs_input_grad
        if stored is not W.stored or not lives_on(stored):
            W = W.without_values()  # an attribute of ctx lives as long as the loss, what is saved until backward
        ctx.like = None if needs_values else torch.empty_like(b, device="meta")
        kept_values = stored if needs_b or W.batch is not None else None
        ctx.save_for_backward(kept_values, b if needs_values else None, bias, expert_ids, kept)
        ctx.set_materialize_grads(False)
        ctx.pattern = versions_of(W)
        ctx.call, ctx.path, ctx.dtype = (op, W, activation, epilogue), forced_path(), stored.dtype
        return result

    @staticmethod
    @differentiable_once
    @in_forwards_path
    def backward(ctx, dy, _=None):
        if dy is None:  # a later autograd function's backward returned None
            return (None,) * len(ctx.needs_input_grad)
        op, W, activation, epilogue = ctx.call
        values, b, bias, expert_ids, saved = ctx.saved_tensors
        if versions_of(W) != ctx.pattern:
            raise RuntimeError(
                f"{op}: the indices of W, needed for gradient computation, have been modified by an inplace operation; "
                "call backward() before the pattern changes, or give the new pattern tensors of its own"
            )
        if values is not None and values is not W.stored:
            W = W.holding(values.to(W.dtype))
        _, needs_values, needs_b, needs_bias, needs_residual, _ = ctx.needs_input_grad
        sums = bias.dtype if needs_bias and of_columns(bias) else None
        dz, total = before_epilogue(op, dy, activation, epilogue, saved, sums)
        dvalues = values_gradient(op, W, b, dz, expert_ids) if needs_values else None
        db = operand_gradient(op, W, b if ctx.like is None else ctx.like, dz, expert_ids) if needs_b else None
        dbias = None
        if needs_bias:
            dbias = bias_gradient(op, dz, bias, expert_ids) if sums is None else shaped(total, bias)
        if dvalues is not None and dvalues.dtype is not ctx.dtype:
            dvalues = dvalues.to(ctx.dtype)
        return None, dvalues, db, dbias, dz if needs_residual else None, None


def versions_of(W: BsrMatrix) -> list[int] | None:
    """Versions of the index tensors; None if torch does not count them, as for tensors of inference mode."""
    try:
        return [t._version for t in W.indices]
    except RuntimeError:
        return None


def lives_on(t: Tensor) -> bool:
    """True if a tensor takes memory whether autograd keeps it or not."""
    return type(t) is Parameter or t.requires_grad and t.is_leaf


_apply = super(torch.autograd.Function, Bsr).apply  # what Bsr.apply is without torch.func's part, some 3 us a call


@uncompiled
def differentiable(values: tuple, source: Tensor | None = None) -> Tensor:
    """An op without out, of arguments that autograd watches and no transform of torch.func.

    values: all fields of BsrArgs, with a Program as epilogue. source: the values that torch.autocast cast to W's dtype.
        If they live on without autograd, they are saved instead of the copy, and backward casts them again: a copy for
        each use would be kept until backward.
    """
    _, W, b, _, expert_ids, bias, residual, *_ = values
    stored = W.stored if source is None or not lives_on(source) else source
    result = _apply(values, stored, b, bias, residual, expert_ids)
    return result[0] if type(result) is tuple else result


def before_epilogue(
    op: str, dy: Tensor, activation: str | None, epilogue, saved: Tensor | None, sums: torch.dtype | None,
    gradient: Callable = epilogue_gradient,
) -> tuple[Tensor, Any]:  # fmt: skip
    """through_epilogue, in which rows of a grouped GEMM without a gradient have none before a user's function either.

    Padding is such rows. A function may have an infinite derivative there, as torch.sqrt has at 0, and 0 * inf = NaN
    would reach the gradients of W and of the bias.
    """
    if op != "bsr_grouped_linear" or epilogue is None:
        return through_epilogue(dy, activation, epilogue, saved, sums, gradient)
    dz, _ = through_epilogue(dy, activation, epilogue, saved, None, gradient)
    dz = dz.masked_fill((dy == 0).all(-1, keepdim=True), 0)
    return dz, None if sums is None else column_sums(dz, sums)


def operand_gradient(op: str, W: BsrMatrix, b: Tensor, dz: Tensor, expert_ids: Tensor | None) -> Tensor:
    """Gradient of b or x: W' dz."""
    dz = dz if dz.dtype is W.dtype else dz.to(W.dtype)
    db = dispatch.call(BsrArgs(op, W.t(), dz, expert_ids=expert_ids))
    return db if db.dtype is b.dtype and db.shape == b.shape else sum_to(db, b.shape, b.dtype)


def values_gradient(op: str, W: BsrMatrix, b: Tensor, dz: Tensor, expert_ids: Tensor | None) -> Tensor:
    """Gradient of W's stored values: dz b' at the stored blocks, with their shape and dtype."""
    if expert_ids is not None:  # (T, M) and (T, K), of which runs of rows are an item's
        left, right = (dz.to(W.dtype), b) if W.base is None else (b, dz.to(W.dtype))
        return sddmm(left.t(), right, W if W.base is None else W.base, None, False, None, expert_ids)
    if dz.dtype is not W.dtype:
        dz = dz.to(W.dtype)
    if op == "bsr_linear" and W.base is None and W.batch is None and dz.dim() == b.dim() == 2:
        return sddmm(dz.mT, b, W, None, False, None)
    if op == "bsr_linear":  # as bsr_matmul has them
        b, dz = b.mT if b.dim() > 1 else b[:, None], dz.mT if dz.dim() > 1 else dz[:, None]
    if W.batch is None:
        left, right = beside(dz), beside(b)  # (M, columns), (K, columns)
        if W.base is not None:  # what is stored is the transpose
            return sddmm(right, left.mT, W.base, None, False, None)
        return sddmm(left, right.mT, W, None, False, None)
    pattern = single(W) if W.base is None else single(W.base)
    if W.batch == "values" and dz.shape[-1] % RUN_MULTIPLE == 0 and b.dim() == 3:  # each item is a run of columns
        numbers = torch.arange(len(dz), dtype=torch.int32, device=dz.device)
        left, right = (t.mT.flatten(0, 1) for t in (dz, b))  # (columns of all items, M or K)
        left, right = (left, right) if W.base is None else (right, left)
        return sddmm(left.t(), right, W if W.base is None else W.base, None, False, None, numbers)
    if W.batch == "values":
        out = torch.empty_like(W.stored)
        for item, (left, right) in enumerate(zip(dz, b.expand(len(dz), *b.shape[-2:]), strict=True)):
            left, right = (left, right) if W.base is None else (right, left)
            sddmm(left, right.mT, pattern, out[item], False, None)
        return out
    left, right = dz, b.expand(len(dz), *b.shape[-2:])
    left, right = (left, right) if W.base is None else (right, left)
    return sddmm(left.flatten(0, 1), right.flatten(0, 1).mT, pattern, None, False, None)


def beside(t: Tensor) -> Tensor:
    """(..., rows, columns) with the matrices side by side, (rows, all columns)."""
    if t.dim() == 2:
        return t
    return t.flatten(0, -3).transpose(0, 1).flatten(1)


def single(W: BsrMatrix) -> BsrMatrix:
    """The pattern of a batch as one matrix without values: the one that all items share, or all along the diagonal."""

    pattern = W.pattern
    if W.batch == "values":
        indices = W.crow_indices, W.col_indices
        return BsrMatrix._of(pattern, indices, W.stored[0].detach(), None, pattern.shape, W.check).without_values()

    def make() -> tuple[BsrMatrix]:
        items, M, K = W.shape
        indices = rows_of(pattern), pattern.col_indices + W.row_of_block() // W.n_block_rows * W.n_block_cols
        state: dict[str, Any] = {"check": W.check, "checked": W.checked}
        return (BsrMatrix._make(*indices, W.stored.detach(), (items * M, items * K), **state).without_values(),)

    return pattern.derived("single", make, lambda made: made[0].indices)[0]


def bias_gradient(op: str, dz: Tensor, bias: Tensor, expert_ids: Tensor | None) -> Tensor:
    """Gradient of a bias for all rows, per row, or per matrix of a batch."""
    if op == "bsr_matmul" or bias.dim() == 1:
        return sum_to(dz, bias.shape, bias.dtype)
    wide = accumulator(dz.dtype)
    if expert_ids is None:  # (L, M) of dz (L, N, M)
        return dz.sum(-2, dtype=wide).to(bias.dtype)
    if dz.shape[0] == 0:
        return torch.zeros_like(bias)
    # expert_ids.shape[0] and not len(expert_ids), which would fix the number of tokens of a compiled graph.
    runs = dz.unflatten(0, (expert_ids.shape[0], -1)).sum(1, dtype=wide)
    items = expert_ids.clamp(0, bias.shape[0] - 1).long()  # the nearest item's, where there is no such number
    total = runs.new_zeros(bias.shape)
    if runs.is_cuda:  # sorts, where index_add_ has atomics
        return total.index_put_((items,), runs, accumulate=True).to(bias.dtype)
    return total.index_add_(0, items, runs).to(bias.dtype)
