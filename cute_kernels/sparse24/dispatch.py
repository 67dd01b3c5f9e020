"""Eager gemm with a Sparse24: validate, plan, launch, as in cute_kernels.eager."""

from dataclasses import replace
from functools import partial

import torch

from .. import checks, dispatch, reference
from ..dtypes import FLOAT8, NAMES, NAMES_OF_OPERANDS, default_out_dtype
from ..matmul.epilogue.terms import Terms, bias_kind, check_fast_accum, epilogue_program, scale_kind
from ..matmul.heuristics import choose
from ..matmul.plan import Plan, along_k, bias_view, scale_view, viewed
from ..matmul.problem import Extents, Problem
from ..operand import layout_of_tensor, major
from ..runtime.autocast import any_autocast, cast_product
from ..runtime.call_plan import PlanCache
from ..runtime.device import device_arch, forced_path, plans_kernel
from .format import Sparse24

OP = "gemm of a Sparse24"
OTHER_TERMS = {"scale_out": None, "amax": None, "precision": None}
_PLANS: PlanCache[Plan] = PlanCache()


def gemm(
    a, b, bias, activation, residual, alpha, beta, out, out_dtype, epilogue, scale_a=None, scale_b=None,
    use_fast_accum=False, accumulation_dtype=None,
):  # fmt: skip
    """ops.gemm with a Sparse24 operand."""
    _check_kind(a, b, accumulation_dtype)
    if epilogue is not None:
        epilogue = epilogue_program("gemm", epilogue)
    if a.shape[1] == 0:  # an empty sum, which the dense kernel handles
        scales = {"scale_a": scale_a, "scale_b": scale_b, "use_fast_accum": use_fast_accum}
        return dispatch.gemm(
            a.to_dense(), b, bias, activation, residual, alpha, beta, out, out_dtype, epilogue, **scales
        )
    tensors = (a.values, b) if out is None else (a.values, b, out, a.metadata)
    tensors += tuple(t for t in (bias, residual, scale_a, scale_b) if t is not None)
    try:
        terms = (
            a.values.numel(), b.numel(), activation, epilogue, type(alpha), type(beta), alpha == 1.0, out_dtype,
            forced_path(), out is None, bias is None, residual is None, scale_a is None, scale_b is None,
            use_fast_accum, type(use_fast_accum), beta == 0,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # torch raises RuntimeError of a nested tensor's numel()
        terms = None
    plan = _PLANS.known(terms, tensors, out)
    if plan is None or plan.function is None:
        given = Terms(
            bias, activation, residual, alpha, beta, epilogue, scale_a=scale_a, scale_b=scale_b,
            use_fast_accum=use_fast_accum,
        )  # fmt: skip
    if plan is None:
        plan = _PLANS.checked(OP, terms, tensors, out, partial(_plan, a, b, given, out, out_dtype), residual)
    if plan.function is None:
        if plan.empty:
            return plan.new_out() if out is None else out
        return reference.gemm(a.to_dense(), b, given.read(OP), out, plan.out_dtype)
    if residual is not None and beta == 0:
        residual = None  # see Terms.read
    if out is None:
        out = plan.new_out()
    if plan.views:
        b, bias = viewed(plan.views, b, bias)
    scales = viewed(plan.scales, scale_a, scale_b) if plan.scales else ()
    plan.function(a.values, a.metadata, b, out, *scales, bias, residual, alpha, beta, plan.group, plan.max_ctas)
    return out


def plan_gemm(a, b, *, residual=None, out=None, out_dtype=None, precision=None, **terms) -> Plan:
    """The plan of the same call of gemm, whatever its operands are."""
    if any_autocast() and out is None and precision is None:
        a, b, residual = cast_product(a, b, residual, out_dtype)
    terms |= {"residual": residual, "precision": precision}
    if not isinstance(a, Sparse24) and not isinstance(b, Sparse24):
        return dispatch.plan_gemm(a, b, out=out, out_dtype=out_dtype, **terms)
    check_wide(*(terms.pop(name, default) for name, default in OTHER_TERMS.items()))
    _check_kind(a, b, terms.pop("accumulation_dtype", None))
    if a.shape[1] == 0:
        return dispatch.plan_gemm(a.to_dense(), b, out=out, out_dtype=out_dtype, **terms)
    return _plan(a, b, Terms(**terms), out, out_dtype)


def parts(a, b) -> tuple:
    """The tensors of two operands, of which one is a Sparse24."""
    return tuple(t for x in (a, b) for t in ((x.values, x.metadata) if isinstance(x, Sparse24) else (x,)))


def _check_kind(a, b, accumulation_dtype) -> None:
    """Raise for a Sparse24 b and for accumulation_dtype, which are not supported."""
    if not isinstance(a, Sparse24):
        raise TypeError("gemm: only a may be a Sparse24, got one for b; multiply the transposes, gemm(W, a.mT).mT")
    if accumulation_dtype is not None:
        raise ValueError(
            f"{OP}: accumulation_dtype is not supported, got {accumulation_dtype}; its kernels accumulate in FP32 "
            "(leave it out), or call gemm(a.to_dense(), b)"
        )


def check_wide(scale_out, amax, precision=None) -> None:
    """Raise for scale_out, return_amax and precision, which are not supported."""
    if precision is not None:
        raise ValueError(f"{OP}: precision is for float32 operands, which are not supported (leave it out)")
    if scale_out is not None or amax is not None:
        raise ValueError(f"{OP}: scale_out and return_amax are for FP8 outputs, which are not supported; use quantize")


def _plan(a: Sparse24, b, terms: Terms, out, out_dtype) -> Plan:
    """Check a call's arguments and choose its kernel, without launching it."""
    checks.check_tensor(f"{OP}: b", b)
    if b.dim() != 2:
        raise ValueError(
            f"{OP}: b must be a matrix (K, N), got {b.dim()} dimensions; fold the batch into its columns, or multiply "
            "each matrix"
        )
    checks.check_operands(OP, kernel=plans_kernel(a.device), also=tuple(FLOAT8), a=a.values, b=b)
    (M, K), N = a.shape, b.shape[-1]
    if b.shape[0] != K:
        raise ValueError(f"{OP}: a is {tuple(a.shape)} and b {tuple(b.shape)}: {K} columns meet {b.shape[0]} rows")
    whole = torch.empty(a.shape, dtype=a.dtype, device="meta")
    scales = scale_kind(OP, "scale_a", terms.scale_a, whole), scale_kind(OP, "scale_b", terms.scale_b, b)
    check_fast_accum(OP, terms.use_fast_accum, a.dtype, scales)
    wide = default_out_dtype(a.dtype)
    out_dtype = checks.check_out_dtype(OP, out, out_dtype, wide)
    checks.check_result(OP, "out", out, (M, N), out_dtype)
    checks.check_result(OP, "residual", terms.residual, (M, N), out_dtype)
    kind = bias_kind(OP, terms.bias, M, N, wide)
    others = {"bias": terms.bias, "residual": terms.residual, "scale_a": terms.scale_a, "scale_b": terms.scale_b}
    checks.check_device(OP, a.device, out=out, **others)
    terms = terms.read(OP)
    spec = terms.spec(OP, kind, scales)
    plan = Plan("gemm", (M, N), out_dtype, a.device)
    if M * N == 0:
        plan.empty = True
    elif plans_kernel(a.device):
        _plan_kernel(plan, a, b, terms, out, spec)
    return plan


def _plan_kernel(plan: Plan, a: Sparse24, b, terms: Terms, out, spec) -> None:
    """Choose the kernel and add it to the plan."""
    from ..runtime.families import function_for

    d = torch.empty(plan.out_shape, dtype=plan.out_dtype, device="meta") if out is None else out
    of_b = along_k("b", b, None, plan, False) if a.dtype in FLOAT8 else None
    layouts = tuple(layout_of_tensor(t) for t in (a.values, b if of_b is None else of_b(b), d))
    majors = tuple(major(lay, names) for lay, names in zip(layouts, (("m", "k"), ("k", "n"), ("m", "n")), strict=True))
    if terms.residual is not None:
        spec = replace(spec, residual=major(layout_of_tensor(terms.residual), ("m", "n")))
    view = None if terms.bias is None else bias_view(terms.bias)
    if view is not None or of_b is not None:
        plan.views = of_b, view
    if spec.scales_operands:
        plan.scales = scale_view(terms.scale_a, (), 1), scale_view(terms.scale_b, (), 1)
    names = NAMES_OF_OPERANDS[a.dtype], NAMES[plan.out_dtype]
    (M, N), K = plan.out_shape, a.shape[1]
    problem = Problem(
        Extents(M, N, K), *names, layouts, majors, (2, 2, 2), spec, structured=True,
        use_fast_accum=terms.use_fast_accum,
    )  # fmt: skip
    arch, sms = device_arch(a.values.get_device())
    try:
        plan.facts, *counts, notes = choose(problem, arch, sms, forced_path())
    except ValueError as error:
        raise ValueError(f"{OP}: {error}; gemm(a.to_dense(), b) multiplies the same numbers") from None
    plan.group, plan.max_ctas = plan.facts.counts(*counts)
    plan.notes += notes
    plan.function = function_for(plan.facts)
