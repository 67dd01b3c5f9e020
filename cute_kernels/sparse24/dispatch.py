"""Eager gemm with a Sparse24: validate, plan, launch, as in cute_kernels.eager."""

from dataclasses import replace
from functools import partial

import torch

from .. import checks, dispatch
from ..arguments import GemmArgs, split
from ..dtypes import FLOAT8, NAMES, NAMES_OF_OPERANDS, default_out_dtype
from ..matmul.epilogue.terms import bias_kind, check_fast_accum, new_amax, scale_kind, spec_of
from ..matmul.heuristics import choose
from ..matmul.plan import Plan, along_k, bias_view, launch_views, scale_view, viewed
from ..matmul.problem import Extents, Problem
from ..operand import layout_of_tensor, major
from ..runtime.autocast import any_autocast, cast_product
from ..runtime.call_plan import PlanCache
from ..runtime.device import device_arch, forced_path, plans_kernel
from .format import Sparse24

OP = "gemm of a Sparse24"
_PLANS: PlanCache[Plan] = PlanCache()


def gemm(args: GemmArgs):
    """ops.gemm with a Sparse24 operand; its epilogue is a Program."""
    a = args.a
    if a.shape[1] == 0:  # an empty sum, which the dense kernel handles
        return dispatch.gemm(args._replace(a=a.to_dense()))
    key, tensors, terms, _, b, out, _, alpha, beta = split((a.values, *args[1:]))
    if out is not None:
        tensors = *tensors[:3], a.metadata, *tensors[3:]
    plan = _PLANS.known(key, tensors, out)
    if plan is None:
        plan = _PLANS.checked(OP, key, tensors, out, partial(_plan, args), args.residual)
    if plan.function is None:
        return dispatch.without_kernel(plan, args._replace(a=a.to_dense()))
    if out is None:
        out = plan.new_out()
    tensors = b, out, *terms
    if plan.views:
        tensors = viewed(plan.views, tensors)
    plan.function(a.values, a.metadata, *tensors, alpha, beta, plan.group, plan.max_ctas)
    return out


def plan_gemm(a, b, *, return_amax=False, **terms) -> Plan:
    """The plan of the same call of gemm, whatever its operands are."""
    args = GemmArgs(a, b, amax=new_amax("gemm", return_amax, a), **terms)
    if any_autocast() and args.out is None and args.precision is None:
        a, b, residual = cast_product(a, b, args.residual, args.out_dtype)
        args = args._replace(a=a, b=b, residual=residual)
    if not isinstance(a, Sparse24) and not isinstance(b, Sparse24):
        return dispatch.plan_gemm(args)
    check_kind(args)
    return _plan(args) if a.shape[1] else dispatch.plan_gemm(args._replace(a=a.to_dense()))


def parts(x) -> tuple:
    """The tensors of an operand, which may be a Sparse24."""
    return (x.values, x.metadata) if isinstance(x, Sparse24) else (x,)


def check_kind(args: GemmArgs) -> None:
    """Raise for a Sparse24 b and for arguments that are not supported with a Sparse24."""
    if not isinstance(args.a, Sparse24):
        raise TypeError("gemm: only a may be a Sparse24, got one for b; multiply the transposes, gemm(W, a.mT).mT")
    if args.source is not None:
        raise ValueError(f"{OP}: source is not supported; call gemm(a.to_dense(), b, source=...)")
    if args.precision is not None:
        raise ValueError(f"{OP}: precision is for float32 operands, which are not supported (leave it out)")
    if args.scale_out is not None or args.amax is not None:
        raise ValueError(f"{OP}: scale_out and return_amax are for FP8 outputs, which are not supported; use quantize")
    if args.accumulation_dtype is not None:
        raise ValueError(
            f"{OP}: accumulation_dtype is not supported, got {args.accumulation_dtype}; its kernels accumulate in FP32 "
            "(leave it out), or call gemm(a.to_dense(), b)"
        )


def _plan(args: GemmArgs) -> Plan:
    """Check a call's arguments and choose its kernel, without launching it."""
    a, b, out = args.a, args.b, args.out
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
    scales = scale_kind(OP, "scale_a", args.scale_a, whole), scale_kind(OP, "scale_b", args.scale_b, b)
    check_fast_accum(OP, args.use_fast_accum, a.dtype, scales)
    wide = default_out_dtype(a.dtype)
    out_dtype = checks.check_out_dtype(OP, out, args.out_dtype, wide)
    checks.check_result(OP, "out", out, (M, N), out_dtype)
    checks.check_result(OP, "residual", args.residual, (M, N), out_dtype)
    kind = bias_kind(OP, args.bias, M, N, wide)
    checks.check_device(OP, a.device, **dict(zip(GemmArgs._fields[1:], args.tensors[1:], strict=False)))
    spec = spec_of(OP, args, kind, scales, False)
    plan = Plan("gemm", (M, N), out_dtype, a.device)
    if M * N == 0:
        plan.empty = True
    elif plans_kernel(a.device):
        _plan_kernel(plan, args, spec)
    return plan


def _plan_kernel(plan: Plan, args: GemmArgs, spec) -> None:
    """Choose the kernel and add it to the plan."""
    from ..runtime.families import function_for

    a, b = args.a, args.b
    d = torch.empty(plan.out_shape, dtype=plan.out_dtype, device="meta") if args.out is None else args.out
    of_b = along_k("b", b, None, plan, False) if a.dtype in FLOAT8 else None
    read_b = b if of_b is None else of_b(b)
    layouts = layout_of_tensor(a.values), layout_of_tensor(read_b), layout_of_tensor(d)
    majors = major(layouts[0], ("m", "k")), major(layouts[1], ("k", "n")), major(layouts[2], ("m", "n"))
    if spec.residual is not None:
        spec = replace(spec, residual=major(layout_of_tensor(args.residual), ("m", "n")))
    views = {"b": of_b, "bias": None if args.bias is None else bias_view(args.bias)}
    views |= {name: scale_view(getattr(args, name), (), 1) for name in ("scale_a", "scale_b")}
    names = [name for name, t in zip(GemmArgs._fields, args.tensors, strict=False) if name == "out" or t is not None]
    names = names[1:]
    plan.views = launch_views(names, views, [name for name in names if name != "residual" or spec.residual])
    dtypes = NAMES_OF_OPERANDS[a.dtype], NAMES[plan.out_dtype]
    (M, N), K = plan.out_shape, a.shape[1]
    problem = Problem(
        Extents(M, N, K), *dtypes, layouts, majors, (2, 2, 2), spec, structured=True,
        use_fast_accum=args.use_fast_accum,
    )  # fmt: skip
    arch, sms = device_arch(a.values.get_device())
    try:
        plan.facts, *counts, notes = choose(problem, arch, sms, forced_path())
    except ValueError as error:
        raise ValueError(f"{OP}: {error}; gemm(a.to_dense(), b) multiplies the same numbers") from None
    plan.group, plan.max_ctas = plan.facts.counts(*counts)
    plan.notes += notes
    plan.function = function_for(plan.facts)
