"""gemm in eager mode: validate, plan, launch.

Plans are cached by the metadata of a call. A call with a cached plan costs a look-up and the launch.
"""

import math
from dataclasses import replace
from functools import partial

import torch

from . import checks, reference
from .dtypes import FLOAT8, NAMES_OF_OPERANDS, default_out_dtype
from .matmul.epilogue.terms import (
    Terms,
    bias_kind,
    check_accumulation_dtype,
    check_fast_accum,
    check_narrow,
    epilogue_program,
    new_amax,
    scale_kind,
)
from .matmul.heuristics import choose
from .matmul.plan import Plan, along_k, as_vector, bias_view, scale_view, split_view, stage, viewed
from .matmul.precision import check_precision
from .matmul.problem import Extents, Problem
from .operand import flatten_batch, folds_into_rows, layout_of_tensor, major
from .runtime.call_plan import PlanCache
from .runtime.device import device_arch, forced_path, plans_kernel
from .tile.element import VECTOR_BYTES

_PLANS: PlanCache[Plan] = PlanCache()


def gemm(
    a, b, bias, activation, residual, alpha, beta, out, out_dtype, epilogue, with_z=False, scale_a=None, scale_b=None,
    use_fast_accum=False, accumulation_dtype=None, scale_out=None, amax=None, precision=None,
):  # fmt: skip
    """ops.gemm for calls that torch.compile does not trace. With with_z, which excludes out, returns (y, z); see
    gradients."""
    if epilogue is not None:
        epilogue = epilogue_program("gemm", epilogue)
    tensors = (a, b) if out is None else (a, b, out)
    if bias is not None:
        tensors += (bias,)
    if residual is not None:
        tensors += (residual,)
    if scale_a is not None:
        tensors += (scale_a,)
    if scale_b is not None:
        tensors += (scale_b,)
    if scale_out is not None:
        tensors += (scale_out,)
    if amax is not None:
        tensors += (amax,)
    try:
        terms = (
            a.numel(), b.numel(), activation, epilogue, type(alpha), type(beta), alpha == 1.0, out_dtype, forced_path(),
            out is None, bias is None, residual is None, with_z, scale_a is None, scale_b is None, use_fast_accum,
            type(use_fast_accum), accumulation_dtype, scale_out is None, amax is None, precision,
            beta == 0,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # a nested tensor's numel() raises RuntimeError
        terms = None  # the checks of planning raise
    plan = _PLANS.known(terms, tensors, out)
    if plan is None:
        given = Terms(
            bias, activation, residual, alpha, beta, epilogue, with_z, False, scale_a, scale_b, use_fast_accum,
            accumulation_dtype, scale_out, amax, precision,
        )  # fmt: skip
        plan = _PLANS.checked("gemm", terms, tensors, out, partial(_plan, a, b, given, out, out_dtype), residual)
    if residual is not None and beta == 0:
        residual = None  # see Terms.read
    if amax is not None:
        amax.zero_()
    if plan.function is None:
        given = Terms(
            bias, activation, residual, alpha, beta, epilogue, with_z, False, scale_a, scale_b,
            accumulation_dtype=accumulation_dtype, scale_out=scale_out, amax=amax, precision=precision,
        )  # fmt: skip
        return without_kernel(plan, a, b, given, out)
    if out is None:
        out = plan.new_out()
    d = result = plan.new_out() if plan.staged else out
    z = kept = plan.new_out() if with_z else None
    if plan.views:
        a, b, d, bias, residual, z = viewed((*plan.views, plan.views[2]), a, b, d, bias, residual, z)
    if plan.scales:
        scales = viewed(plan.scales[:2], scale_a, scale_b)
        if len(plan.scales) > 2:
            scales += viewed(plan.scales[2:], scale_out, amax)
        plan.function(a, b, d, *scales, bias, residual, z, alpha, beta, plan.group, plan.max_ctas)
    else:
        plan.function(a, b, d, bias, residual, z, alpha, beta, plan.group, plan.max_ctas)
    if with_z:
        return out, kept
    return out.copy_(result) if plan.staged else out


def without_kernel(plan: Plan, a, b, terms: Terms, out):
    """Run a plan without a kernel: the reference for CPU tensors, nothing for an empty result."""
    if not plan.empty:
        return reference.gemm(a, b, terms, out, plan.out_dtype)
    if terms.with_z:
        return plan.new_out(), plan.new_out()
    return plan.new_out() if out is None else out


def plan_gemm(a, b, *, out=None, out_dtype=None, return_amax=False, **terms) -> Plan:
    """The plan of a call of gemm with the same arguments."""
    return _plan(a, b, Terms(amax=new_amax("gemm", return_amax, a), **terms), out, out_dtype)


def _plan(a, b, terms: Terms, out, out_dtype) -> Plan:
    """Check a call's arguments and select its kernel, without launching it."""
    checks.check_tensor("gemm: a", a)
    checks.check_tensor("gemm: b", b)
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"gemm: a has {a.dim()} and b {b.dim()} dimensions; both need at least 2 (use unsqueeze)")
    kernel, precision = plans_kernel(a.device), terms.precision
    checks.check_operands("gemm", kernel=kernel, also=tuple(FLOAT8), precision=precision, a=a, b=b)
    check_precision("gemm", precision, a.dtype)
    (M, K), N = a.shape[-2:], b.shape[-1]
    if b.shape[-2] != K:
        raise ValueError(f"gemm: a is {tuple(a.shape)} and b {tuple(b.shape)}: {K} columns meet {b.shape[-2]} rows")
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(f"gemm: the batches of a {tuple(a.shape)} and b {tuple(b.shape)} do not broadcast") from None
    scales = scale_kind("gemm", "scale_a", terms.scale_a, a), scale_kind("gemm", "scale_b", terms.scale_b, b)
    check_fast_accum("gemm", terms.use_fast_accum, a.dtype, scales)
    check_accumulation_dtype("gemm", terms.accumulation_dtype, a.dtype)
    wide = default_out_dtype(a.dtype)
    out_dtype = checks.check_out_dtype("gemm", out, out_dtype, wide, tuple(FLOAT8))
    check_narrow("gemm", terms, out_dtype, wide)
    shape = (*batch, M, N)
    checks.check_result("gemm", "out", out, shape, out_dtype)
    checks.check_result("gemm", "residual", terms.residual, shape, out_dtype)
    kind = bias_kind("gemm", terms.bias, M, N, wide)
    others = {"bias": terms.bias, "residual": terms.residual, "scale_a": terms.scale_a, "scale_b": terms.scale_b}
    others |= {"scale_out": terms.scale_out, "amax": terms.amax}
    checks.check_device("gemm", a.device, out=out, **others)
    terms = terms.read("gemm")
    spec = terms.spec("gemm", kind, scales)
    plan = Plan("gemm", shape, out_dtype, a.device)
    if math.prod(shape) == 0:
        plan.empty = True
    elif kernel:
        _plan_kernel(plan, a, b, terms, out, batch, spec)
    return plan


def _plan_kernel(plan: Plan, a, b, terms: Terms, out, batch, spec) -> None:
    """Fill in the kernel of a plan: the views of its tensors, facts and compiled function."""
    from .runtime.families import function_for

    K, N, residual = a.shape[-1], b.shape[-1], terms.residual
    stage(plan, out, out is not None and out.dim() > 3 and flatten_batch(out, 3)[1])
    d = torch.empty(plan.out_shape, dtype=plan.out_dtype, device="meta") if out is None or plan.staged else out
    results = [t for t in (d, residual) if t is not None]
    # A batch of A with one B is one tall matrix if the strides allow it and the bias is not per row.
    fold = math.prod(b.shape[:-2]) == 1 and spec.bias != "row" and all(folds_into_rows(t) for t in (a, *results))
    views = tuple(
        None if t is None else _view_of(name, t, batch, fold, plan)
        for name, t in (("a", a), ("b", b), ("out", d), ("bias", terms.bias), ("residual", residual))
    )
    if K == 0:  # multiply one K-tile of zeros, so that the epilogue runs as usual
        plan.notes.append("K is 0: the kernel multiplies a K-tile of zeros")
        if spec.scales_blocks:  # no blocks, no scales
            kept = (None if kind in ("1x128", "128x128") else kind for kind in (spec.scale_m, spec.scale_n))
            spec = replace(spec, **dict(zip(("scale_m", "scale_n"), kept, strict=True)))
        rows = (d if views[2] is None else views[2](d)).shape[-2]
        step = VECTOR_BYTES // a.element_size()  # for TMA, at any N
        views = (lambda t: t.new_zeros(rows, step), lambda t: t.new_zeros(N, step).t(), *views[2:])
    elif terms.precision == "3xtf32":
        of_a, of_b, *others = views
        views = split_view("a", of_a, plan, True, False), split_view("b", of_b, plan, False, True), *others
    elif a.dtype in FLOAT8 or a.dtype == torch.float32:
        views = (
            *(along_k(name, t, view, plan, name == "a") for name, t, view in zip("ab", (a, b), views, strict=False)),
            *views[2:],
        )
    if any(view is not None for view in views):
        plan.views = views
    va, vb, vd = (t if view is None else view(t) for t, view in zip((a, b, d), views, strict=False))
    layouts = tuple(layout_of_tensor(t) for t in (va, vb, vd))
    majors = tuple(major(lay, names) for lay, names in zip(layouts, (("m", "k"), ("k", "n"), ("m", "n")), strict=True))
    if residual is not None:
        vr = residual if views[4] is None else views[4](residual)
        spec = replace(spec, residual=major(layout_of_tensor(vr), ("m", "n")))
    L = vd.shape[0] if vd.dim() == 3 else 1
    if spec.scales_operands or plan.out_dtype in FLOAT8:
        kinds = zip((terms.scale_a, terms.scale_b), (spec.scale_m, spec.scale_n), strict=True)
        plan.scales = tuple(scale_view(t, batch, L, kind) if kind or t is None else _none for t, kind in kinds)
    if plan.out_dtype in FLOAT8:
        plan.scales += (as_vector, as_vector)
    problem = Problem(
        Extents(vd.shape[-2], N, va.shape[-1], L),
        NAMES_OF_OPERANDS[a.dtype],
        NAMES_OF_OPERANDS[plan.out_dtype],
        layouts,
        majors,
        (va.dim(), vb.dim(), vd.dim()),
        spec,
        use_fast_accum=terms.use_fast_accum,
        acc_dtype=terms.acc_dtype,
        promoted=terms.precision == "3xtf32",
    )
    arch, sms = device_arch(a.get_device())
    plan.facts, *counts, notes = choose(problem, arch, sms, forced_path())
    plan.group, plan.max_ctas = plan.facts.counts(*counts)
    plan.notes += notes
    plan.function = function_for(plan.facts)


def _view_of(name: str, t, batch, fold: bool, plan: Plan):
    """The kernel's view of a tensor: None if unchanged, otherwise a function of the tensor."""
    if name == "bias":
        return bias_view(t)
    if t.dim() == 2:
        return None
    if fold or math.prod(t.shape[:-2]) == 1 < math.prod(batch):
        return _as_matrix
    wide = t.expand(*batch, *t.shape[-2:])
    _, copied = flatten_batch(wide, 3)
    if copied:
        plan.notes.append(f"{name} is copied: its batch dimensions, broadcast to {tuple(batch)}, have no single stride")
    return lambda t: flatten_batch(t.expand(*batch, *t.shape[-2:]), 3)[0]


def _none(t):
    """View of block scales if K is 0: None, since the kernel then has no scale parameters."""


def _as_matrix(t):
    return flatten_batch(t, 2)[0]
