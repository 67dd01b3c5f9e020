"""gemm in eager mode: validate, plan, launch.

Plans are cached by the metadata of a call. A call with a cached plan costs a look-up and the launch.
"""

import math
from dataclasses import replace
from functools import partial

import torch

from . import checks, reference
from .arguments import GemmArgs, split
from .dtypes import FLOAT8, NAMES_OF_OPERANDS, default_out_dtype
from .matmul.epilogue.terms import (
    acc_dtype,
    bias_kind,
    check_accumulation_dtype,
    check_fast_accum,
    check_narrow,
    scale_kind,
    spec_of,
)
from .matmul.heuristics import choose
from .matmul.plan import Plan, along_k, bias_view, launch_views, scale_view, split_view, stage, vector_view, viewed
from .matmul.precision import check_precision
from .matmul.problem import Extents, Problem
from .operand import broadcast_shapes, flatten_batch, folds_into_rows, layout_of_tensor, major
from .runtime.call_plan import PlanCache
from .runtime.device import device_arch, forced_path, plans_kernel
from .runtime.torch_compat import uncompiled
from .source import check_source
from .tile.element import VECTOR_BYTES

_PLANS: PlanCache[Plan] = PlanCache()


@uncompiled
def gemm(values: tuple, with_z: bool = False):
    """ops.gemm for calls that torch.compile does not trace. With with_z, which excludes out, returns (y, z); see
    gradients.

    values: all fields of GemmArgs, with a Program as epilogue.
    """
    key, tensors, terms, a, b, out, amax, alpha, beta = split(values)
    if with_z:
        key = key and (key, "z")
    plan = _PLANS.known(key, tensors, out)
    if plan is None:
        args = GemmArgs(*values)
        op = "gemm" if args.source is None else "gemm with a source"
        plan = _PLANS.checked(op, key, tensors, out, partial(plan_gemm, args, with_z), args.residual)
    if amax is not None:
        amax.zero_()
    if plan.function is None:
        return without_kernel(plan, GemmArgs(*values), with_z)
    if out is None:
        out = plan.new_out()
    d = plan.new_out() if plan.staged else out
    if with_z:
        z = plan.new_out()
        terms += (z,)
    if plan.views:
        plan.function(*viewed(plan.views, (a, b, d, *terms)), alpha, beta, plan.group, plan.max_ctas)
    elif terms:
        plan.function(a, b, d, *terms, alpha, beta, plan.group, plan.max_ctas)
    else:  # a call with a list of arguments takes 0.1 us more
        plan.function(a, b, d, alpha, beta, plan.group, plan.max_ctas)
    if with_z:
        return out, z
    return out.copy_(d) if plan.staged else out


def without_kernel(plan: Plan, args: GemmArgs, with_z: bool = False):
    """Run a plan without a kernel: the reference for CPU tensors, nothing for an empty result."""
    if not plan.empty:
        return reference.gemm(args, plan.out_dtype, with_z)
    if with_z:
        return plan.new_out(), plan.new_out()
    return plan.new_out() if args.out is None else args.out


def plan_gemm(args: GemmArgs, with_z: bool = False) -> Plan:
    """Check a call's arguments and select its kernel, without launching it."""
    a, b, out = args.a, args.b, args.out
    checks.check_tensor("gemm: a", a)
    checks.check_tensor("gemm: b", b)
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"gemm: a has {a.dim()} and b {b.dim()} dimensions; both need at least 2 (use unsqueeze)")
    kernel, precision = plans_kernel(a.device), args.precision
    checks.check_operands("gemm", kernel=kernel, also=tuple(FLOAT8), precision=precision, a=a, b=b)
    check_precision("gemm", precision, a.dtype)
    (M, K), N = a.shape[-2:], b.shape[-1]
    if b.shape[-2] != K:
        raise ValueError(f"gemm: a is {tuple(a.shape)} and b {tuple(b.shape)}: {K} columns meet {b.shape[-2]} rows")
    try:
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(f"gemm: the batches of a {tuple(a.shape)} and b {tuple(b.shape)} do not broadcast") from None
    scales = scale_kind("gemm", "scale_a", args.scale_a, a), scale_kind("gemm", "scale_b", args.scale_b, b)
    check_fast_accum("gemm", args.use_fast_accum, a.dtype, scales)
    check_accumulation_dtype("gemm", args.accumulation_dtype, a.dtype)
    wide = default_out_dtype(a.dtype)
    out_dtype = checks.check_out_dtype("gemm", out, args.out_dtype, wide, tuple(FLOAT8))
    check_narrow("gemm", args, out_dtype, wide)
    check_source(args.source, precision, scales, (M, K))
    shape = (*batch, M, N)
    checks.check_result("gemm", "out", out, shape, out_dtype)
    checks.check_result("gemm", "residual", args.residual, shape, out_dtype)
    kind = bias_kind("gemm", args.bias, M, N, wide)
    checks.check_device("gemm", a.device, **dict(zip(GemmArgs._fields, args.tensors, strict=False)))
    spec = spec_of("gemm", args, kind, scales, with_z)
    plan = Plan("gemm", shape, out_dtype, a.device)
    if math.prod(shape) == 0:
        plan.empty = True
    elif kernel:
        _plan_kernel(plan, args, batch, spec)
    return plan


def _plan_kernel(plan: Plan, args: GemmArgs, batch, spec) -> None:
    """Fill in the kernel of a plan: the views of its tensors, facts and compiled function."""
    from .runtime.families import function_for

    a, b, out, residual = args.a, args.b, args.out, args.residual if spec.residual else None
    K, N = a.shape[-1], b.shape[-1]
    stage(plan, out, out is not None and out.dim() > 3 and flatten_batch(out, 3)[1])
    d = torch.empty(plan.out_shape, dtype=plan.out_dtype, device="meta") if out is None or plan.staged else out
    results = [t for t in (d, residual) if t is not None]
    # A batch of A with one B is one tall matrix if the strides allow it and neither a bias nor a source is per row.
    fold = math.prod(b.shape[:-2]) == 1 and spec.bias != "row" and args.source is None
    fold = fold and all(folds_into_rows(t) for t in (a, *results))
    tensors = {"a": a, "b": b, "out": d, "residual": residual}
    views = {name: _view_of(name, t, batch, fold, plan) for name, t in tensors.items() if t is not None}
    if args.bias is not None:
        views["bias"] = bias_view(args.bias)
    unread = set() if spec.residual else {"residual"}
    if K == 0:  # multiply one K-tile of zeros, so that the epilogue runs as usual
        plan.notes.append("K is 0: the kernel multiplies a K-tile of zeros")
        kinds = {"scale_m": spec.scale_m, "scale_n": spec.scale_n}
        for name, (mode, kind) in zip(("scale_a", "scale_b"), kinds.items(), strict=True):
            if kind in ("1x128", "128x128"):  # no blocks, no scales
                unread.add(name)
                spec = replace(spec, **{mode: None})
        rows = (d if views["out"] is None else views["out"](d)).shape[-2]
        step = VECTOR_BYTES // a.element_size()  # for TMA, at any N
        views |= {"a": lambda t: t.new_zeros(rows, step), "b": lambda t: t.new_zeros(N, step).t()}
    elif args.precision == "3xtf32":
        views["a"] = split_view("a", views["a"], plan, True, False)
        views["b"] = split_view("b", views["b"], plan, False, True)
    elif a.dtype in FLOAT8 or a.dtype == torch.float32:
        views |= {name: along_k(name, tensors[name], views[name], plan, name == "a") for name in "ab"}
    va, vb, vd, vr = (t if views.get(name) is None else views[name](t) for name, t in tensors.items())
    layouts = layout_of_tensor(va), layout_of_tensor(vb), layout_of_tensor(vd)
    majors = major(layouts[0], ("m", "k")), major(layouts[1], ("k", "n")), major(layouts[2], ("m", "n"))
    if residual is not None:
        spec = replace(spec, residual=major(layout_of_tensor(vr), ("m", "n")))
    L = vd.shape[0] if vd.dim() == 3 else 1
    views["scale_a"] = scale_view(args.scale_a, batch, L, spec.scale_m)
    views["scale_b"] = scale_view(args.scale_b, batch, L, spec.scale_n)
    views |= {"scale_out": vector_view(args.scale_out), "z": views["out"]}
    names = [name for name, t in zip(GemmArgs._fields, args.tensors, strict=False) if name == "out" or t is not None]
    names += ["z"] * spec.stores_z
    plan.views = launch_views(names, views, [name for name in names if name not in unread])
    problem = Problem(
        Extents(vd.shape[-2], N, va.shape[-1], L),
        NAMES_OF_OPERANDS[a.dtype],
        NAMES_OF_OPERANDS[plan.out_dtype],
        layouts,
        majors,
        (va.dim(), vb.dim(), vd.dim()),
        spec,
        use_fast_accum=args.use_fast_accum,
        acc_dtype=acc_dtype(args),
        promoted=args.precision == "3xtf32",
        source=args.source if K else None,
    )
    arch, sms = device_arch(a.get_device())
    plan.facts, *counts, notes = choose(problem, arch, sms, forced_path())
    plan.group, plan.max_ctas = plan.facts.counts(*counts)
    plan.notes += notes
    plan.function = function_for(plan.facts)


def _view_of(name: str, t, batch, fold: bool, plan: Plan):
    """The kernel's view of a tensor: None if unchanged, otherwise a function of the tensor."""
    if t.dim() == 2:
        return None
    if fold or math.prod(t.shape[:-2]) == 1 < math.prod(batch):
        return _as_matrix
    wide = t.expand(*batch, *t.shape[-2:])
    _, copied = flatten_batch(wide, 3)
    if copied:
        plan.notes.append(f"{name} is copied: its batch dimensions, broadcast to {tuple(batch)}, have no single stride")
    return lambda t: flatten_batch(t.expand(*batch, *t.shape[-2:]), 3)[0]


def _as_matrix(t):
    return flatten_batch(t, 2)[0]
