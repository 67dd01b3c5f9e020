"""Plans of calls of the public ops, for cute_kernels.explain."""

from dataclasses import replace

from cute_kernels.matmul.epilogue.terms import new_amax
from cute_kernels.matmul.plan import Plan
from cute_kernels.runtime.autocast import any_autocast

from . import dispatch, padded_rows
from .arguments import GATED, BsrArgs
from .plan import plan_bsr


def plan_bsr_matmul(W, b, *, return_amax=False, **terms) -> Plan:
    """The plan of the same call of bsr_matmul."""
    return _explained(BsrArgs("bsr_matmul", W, b, amax=new_amax("bsr_matmul", return_amax, b), **terms))


def plan_bsr_linear(x, W, *, scale_x=None, return_amax=False, **terms) -> Plan:
    """The plan of the same call of bsr_linear."""
    amax = new_amax("bsr_linear", return_amax, x)
    return _explained(BsrArgs("bsr_linear", W, x, scale_b=scale_x, amax=amax, **terms))


def plan_bsr_gated_linear(x, W, *, activation="silu", scale_x=None, **terms) -> Plan:
    """The plan of the same call of bsr_gated_linear."""
    return _explained(BsrArgs(GATED, W, x, activation=activation, scale_b=scale_x, **terms))


def plan_bsr_grouped_linear(
    x, W, *, offs=None, expert_ids=None, group_rows=None, out=None, scale_x=None, **terms
) -> Plan:
    """The plan of the same call of bsr_grouped_linear."""
    op = "bsr_grouped_linear"
    padding = dispatch.routing(op, x, W, expert_ids, offs, group_rows)
    if padding is None:
        return _explained(BsrArgs(op, W, x, out, expert_ids, scale_b=scale_x, **terms))
    scale, rows = padded_rows.spread_scale(op, scale_x, x, padding), padded_rows.spread(x, padding)
    others = x, terms.get("bias"), scale_x, offs
    to = None if out is None else dispatch.padded_out(op, out, W, padding, *others)
    plan = _explained(BsrArgs(op, W, rows, to, padding.groups, scale_b=scale, **terms))
    plan.out_shape = (x.shape[0], W.shape[-2])
    plan.notes.append(f"offs: x is copied to a padded layout of {padding.rows} rows, and the result back from it")
    return plan


def _explained(args: BsrArgs) -> Plan:
    """The plan of a call, with the facts of the kernel that it launches."""
    args = args._replace(W=dispatch.as_bsr(args.op, args.W))
    if any_autocast() and args.out is None and args.precision is None:
        W, b, residual = dispatch.under_autocast(args.op, args.W, args.b, args.residual, args.out_dtype)
        args = args._replace(W=W, b=b, residual=residual)
    W = args.W
    if W.check and W.device.type != "meta":
        W.check_indices()  # plans depend on what it finds out
    plan = plan_bsr(args)
    if plan.facts is not None and plan.tiles and dispatch.takes_order(W):
        plan.facts = replace(plan.facts, ordered=True)
        plan.notes.append("block rows differ in length: a table orders the work tiles, the longest first")
    return plan
