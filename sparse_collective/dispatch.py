"""The block-sparse ops in eager mode: look up a plan and launch it.

All run a kernel with W as its A operand. bsr_matmul's b (K, N) is its B as it stands; bsr_linear's x (tokens, K) is B
given as (N, K), and the output (tokens, M) is D given transposed. Nothing is copied. W may be a batch of items;
bsr_grouped_linear is told for each run of tokens which item they multiply.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cute_kernels import checks, reference
from cute_kernels.dtypes import FLOAT8
from cute_kernels.gate.dispatch import gate
from cute_kernels.matmul.plan import Plan, viewed
from cute_kernels.matmul.precision import rounded
from cute_kernels.operand import flatten_batch
from cute_kernels.runtime.autocast import cast_product
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.derived import of_tensor
from cute_kernels.runtime.torch_compat import uncompiled
from cute_kernels.tf32 import dispatch as tf32

from . import alignment, padded_rows
from . import reference as bsr_reference
from .arguments import BsrArgs, split
from .bsr import BsrMatrix
from .bsr24.matrix import Bsr24
from .bsr_gemm import tile_order
from .plan import plan_bsr

_PLANS: PlanCache[Plan] = PlanCache()


def routing(op, x, W, expert_ids, offs, group_rows) -> padded_rows.Padding | None:
    """The padded layout for offs; None for expert_ids, for which x is padded already."""
    checks.check_tensor(f"{op}: x", x)
    if (expert_ids is None) == (offs is None):
        raise ValueError(f"{op}: give either expert_ids or offs")
    if offs is not None:
        return padded_rows.padding_for(op, x, W, offs, group_rows)
    checks.check_tensor(f"{op}: expert_ids", expert_ids)
    if group_rows is not None and expert_ids.numel() * group_rows != x.shape[0]:
        raise ValueError(
            f"{op}: x has {x.shape[0]} rows, but {expert_ids.numel()} expert_ids with group_rows={group_rows} need "
            f"{expert_ids.numel() * group_rows}; leave group_rows out, or pad each expert's rows to it"
        )
    return None


def padded_out(op, out, W, padding: padded_rows.Padding, x, *others):
    """A result in the padded layout for one that is copied to `out`, after checks of that."""
    checks.check_tensor(f"{op}: out", out)
    checks.check_result(op, "out", out, (x.shape[0], W.shape[-2]), out.dtype)
    checks.check_device(op, x.device, out=out)
    if not torch.compiler.is_compiling():
        checks.check_out(op, out, (x, getattr(W, "stored", None), *others))
    return out.new_empty(padding.rows, W.shape[-2])


@uncompiled
def call(
    values: tuple, with_z: bool = False, chained: bool = False, fused: bool = False, interleaved: bool = False
) -> Any:
    """An op of this package, where torch.compile does not trace it. With z, without out: (y, z), see gradients.

    values: all fields of BsrArgs, with a Program as epilogue.
    chained: True if the kernel launched right before is a primary kernel that writes b and its scales
        (cute_kernels/tile/dependent_launch.py).
    fused: True returns None if the gate is not fused into the GEMM.
    interleaved: True if tiles of all items of b come in turn, so that all items of the result are written all the time.
        Kernels without an order of tiles, those of small blocks, go from item to item all the same.
    """
    W = values[1]
    if type(W) is not BsrMatrix:
        W = as_bsr(values[0], W)
        values = values[0], W, *values[2:]
    if W.check and not W.pattern.checked:
        W.check_indices()  # before the plan, which depends on what the check finds out
    key, tensors, terms, op, W, b, out, expert_ids, amax = split(values)
    if with_z or chained or interleaved:
        key = key and (key, with_z, chained, interleaved)
    plan = _PLANS.known(key, tensors, out)
    if plan is None:
        args = BsrArgs(*values)
        plan = _PLANS.checked(
            op, key, tensors, out, partial(plan_bsr, args, with_z, chained, interleaved), args.residual
        )
    if amax is not None:
        amax.zero_()
    if plan.function is None:
        return None if fused and plan.unfused else _without_kernel(plan, BsrArgs(*values), with_z)
    stored = tensors[1]
    if out is None:
        out = plan.new_out()
    d = plan.new_out() if plan.staged else out
    if with_z:
        z = plan.new_out()
        terms += (z,)
    tensors = b, d, *terms
    if plan.views:
        tensors = viewed(plan.views, tensors)
    if W.pattern.nnz == 0:  # tensors of extent 0 have no address; crow_indices never points at this one
        stored = stored.new_zeros(*stored.shape[:-3], 1, *stored.shape[-2:])
    if stored.data_ptr() & 15:
        stored = alignment.aligned(stored)
    if plan.split_blocks:
        stored = tf32.side_by_side(stored, False)
    _launch(plan, W, stored, tensors, expert_ids)
    if with_z:
        return out, z
    return out.copy_(d) if plan.staged else out


def _launch(plan: Plan, W, values, tensors, expert_ids) -> None:
    """Run the plan's kernel on W's values and the further tensors as it views them."""
    family, function, group, order, pattern = plan.family, plan.function, plan.group, None, W.pattern
    ctas = plan.max_ctas if pattern.even else plan.uneven_ctas
    if plan.tiles and takes_order(W, plan.tiles.interleaved):
        function, tiles, ctas = plan.ordered or _ordered(plan)
        order, group = tile_order.order_of(pattern, tiles), 1
    tables = family.pattern(plan.facts, W, order, expert_ids)
    function(pattern.crow_indices, *tables, values, *tensors, 1.0, 1.0, group, ctas)


def takes_order(W, interleaved: bool = False) -> bool:
    """True if a table orders the work tiles, if the plan has `tiles`: for a single pattern, with any number of columns
    or batch items. Patterns with even block rows use a table only if `interleaved`."""
    uneven = interleaved or not W.pattern.even
    return tile_order.ENABLED and uneven and W.pattern.tables is not None and W.batch != "patterns"


def under_autocast(op: str, W, b, residual, out_dtype) -> tuple:
    """(W, b, residual) as torch.autocast casts them; a torch.sparse_bsr W becomes the BsrMatrix that is kept for it."""
    return cast_product(as_bsr(op, W), b, residual, out_dtype)


def _ordered(plan: Plan) -> tuple:
    """(function, Tiles, CTAs): the plan's kernel with work tiles in the order of their length."""
    from cute_kernels.runtime.families import function_for

    workers, cfg = plan.tiles.workers, plan.facts.config
    ctas = None if workers is None else workers * cfg.cluster
    # The order is a kernel's, which may run right before: such a product follows nothing.
    plan.ordered = function_for(replace(plan.facts, ordered=True, chained=False)), plan.tiles, ctas
    return plan.ordered


def _without_kernel(plan: Plan, args: BsrArgs, with_z: bool):
    """CPU tensors multiply the stored blocks by torch, a gate that is not fused follows a plain GEMM; an empty result
    needs nothing at all."""
    W, b, bias, out, expert_ids = args.W, args.b, args.bias, args.out, args.expert_ids
    if plan.unfused:
        y = _gate_apart(plan, args)
        return y.to(plan.out_dtype) if out is None else out.copy_(y)
    if plan.empty:
        return (plan.new_out(), plan.new_out()) if with_z else plan.new_out() if out is None else out
    if W.structured:
        W = W.to_bsr()
    if args.precision == "tf32":
        W, b = W.with_values(rounded(W.values)), rounded(b)
    if expert_ids is not None:
        acc = bsr_reference.grouped_linear(W, b, expert_ids)
        if bias is not None and bias.dim() == 2:
            items = expert_ids.clamp(0, W.shape[0] - 1).long()  # the nearest item's, where there is no such number
            args = args._replace(bias=bias[items].repeat_interleave(len(b) // len(expert_ids), 0))
    elif not args.linear:
        acc = bsr_reference.product(W, b)
    else:
        tokens = b if W.batch is not None else flatten_batch(torch.atleast_2d(b), 2)[0]  # (..., K) is (tokens, K)
        acc = bsr_reference.product(W, tokens.mT).mT
        acc = acc if W.batch is not None else acc.reshape(*b.shape[:-1], W.shape[-2])
        if bias is not None and bias.dim() == 2:
            args = args._replace(bias=bias[:, None])
    if (scale := args.scale_b) is not None:
        if scale.numel() == 1:
            scale = scale.reshape(())
        elif scale.dim() == 1:  # of b's columns, which are the result's, or of x's rows
            scale = scale[:, None] if args.linear else scale
        acc = acc * scale
    if args.gated and W.dtype in FLOAT8:  # what kernels do
        acc = acc.to(plan.out_dtype).to(acc.dtype)
    return reference.finish(acc, args, plan.out_dtype, with_z)


def _gate_apart(plan: Plan, args: BsrArgs):
    """The gate of a plain GEMM's result, which has W's dtype. For FP8 operands torch computes it in FP32."""
    plain = BsrArgs("bsr_linear", args.W, args.b)
    if args.W.dtype not in FLOAT8:
        return gate(call(plain), args.activation)
    return reference.gate_of_rounded(
        call(plain._replace(scale_b=args.scale_b, out_dtype=plan.out_dtype)), args.activation
    )


def as_bsr(op: str, W) -> BsrMatrix | Bsr24:
    """W as a BsrMatrix or Bsr24; one made of a torch tensor is kept as long as it lives, so it is checked once."""
    if isinstance(W, BsrMatrix | Bsr24):
        return W
    if not isinstance(W, torch.Tensor) or W.layout is not torch.sparse_bsr:
        what = f"a tensor of layout {W.layout}" if isinstance(W, torch.Tensor) else type(W).__name__
        raise TypeError(
            f"{op}: W must be a BsrMatrix or a torch.sparse_bsr tensor, got {what}; see BsrMatrix.from_dense"
        )
    if W.requires_grad and torch.is_grad_enabled():
        wrapped = "W" if W.grad_fn is not None else "W.detach()"  # torch cannot accumulate the BSR gradient of a leaf
        leaf = "" if W.grad_fn is not None else ".requires_grad_(), whose grad is that of its values"
        raise RuntimeError(
            f"{op}: W is a torch.sparse_bsr tensor that requires a gradient, which only a BsrMatrix supports; pass "
            f"BsrMatrix.from_torch({wrapped}){leaf}, or call it under torch.no_grad()"
        )
    # Of the detached tensor, because values() of one with a gradient would keep it alive
    return of_tensor(W).get("matrix", W, lambda: BsrMatrix.from_torch(W.detach()), BsrMatrix.indices.fget)  # type: ignore[attr-defined]  # a property's
