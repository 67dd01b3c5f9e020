"""Plans of block-sparse GEMM calls: checks of the arguments, and the selection of a kernel."""

import math
from dataclasses import replace
from typing import Any

import torch

from cute_kernels import checks, reference
from cute_kernels.dtypes import FLOAT8, NAMES_OF_INDEX, NAMES_OF_OPERANDS, default_out_dtype
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.matmul.cost import resident_clusters
from cute_kernels.matmul.epilogue.terms import (
    acc_dtype,
    bias_kind,
    check_accumulation_dtype,
    check_fast_accum,
    check_narrow,
    scale_kind,
    spec_of,
)
from cute_kernels.matmul.heuristics import choose
from cute_kernels.matmul.plan import Plan, along_k, bias_view, launch_views, scale_view, split_view, stage, vector_view
from cute_kernels.matmul.precision import PARTS, check_precision
from cute_kernels.matmul.problem import Extents, Problem
from cute_kernels.operand import Layout, flatten_batch, folds_into_rows, layout_of_tensor, major
from cute_kernels.runtime.device import device_arch, forced_path, plans_kernel
from cute_kernels.runtime.families import family_of
from cute_kernels.tile.element import VECTOR_BYTES

from . import alignment, families  # noqa: F401 (importing families registers them)
from .arguments import GATED, BsrArgs
from .bsr_gemm import tile_order
from .bsr_gemm.dependent_launch import may_follow
from .checks import RUN_MULTIPLE, check_group_numbers

NARROW = ("bsr_matmul", "bsr_linear")  # support FP8 outputs
WITH_PRECISION = ("bsr_matmul", "bsr_linear")  # multiply float32 as they are told
# The tensors of a launch, in the order of the kernel's arguments; scales: W's.
LAUNCH = ("b", "out", "bias", "residual", "scales", "scale_b", "scale_out", "amax", "z")


def plan_bsr(args: BsrArgs, with_z: bool = False, chained: bool = False, interleaved: bool = False) -> Plan:
    """Check a call's arguments and select its kernel, without launching it. args.W is a BsrMatrix or Bsr24."""
    op, W, b, out, linear, name = args.op, args.W, args.b, args.out, args.linear, args.operand
    checks.check_tensor(f"{op}: {name}", b)
    if b.dim() < (1 if linear else 2):
        raise ValueError(f"{op}: {name} has {b.dim()} dimensions, too few")
    precision, kernel = args.precision if op in WITH_PRECISION else False, plans_kernel(W.device)
    checks.check_operands(op, kernel=kernel, also=tuple(FLOAT8), precision=precision, **{"W": W.stored, name: b})
    check_precision(op, args.precision, W.dtype)
    M, K = W.shape[-2:]
    inner = b.shape[-1] if linear else b.shape[-2]
    if inner != K:
        raise ValueError(f"{op}: W is {M}x{K} and {name} {tuple(b.shape)}: {K} columns of W meet {inner}")
    if op == "bsr_grouped_linear":
        _check_groups(op, W, b, args.expert_ids)
        batch = ()
    else:
        batch = _batch(op, W, name, b)
    if args.gated:
        check_gated(W)
    features = M // 2 if args.gated else M
    shape = (*batch, *b.shape[-2:-1], features) if linear else (*batch, M, b.shape[-1])
    wide, narrow = default_out_dtype(W.dtype), tuple(FLOAT8) if op in NARROW else ()
    out_dtype = checks.check_out_dtype(op, out, args.out_dtype, wide, narrow)
    check_narrow(op, args, out_dtype, wide)
    if W.structured:
        check_structured(op, args.accumulation_dtype, out_dtype in FLOAT8, args.precision)
    checks.check_result(op, "out", out, shape, out_dtype)
    checks.check_result(op, "residual", args.residual, shape, out_dtype)
    spec = _epilogue(args, with_z)
    tensors = dict(zip(BsrArgs._fields[2:], args.tensors, strict=False))
    tensors |= {name: b, f"scale_{name}": tensors.pop("scale_b")}
    checks.check_device(op, W.device, **tensors)
    plan = Plan(op, shape, out_dtype, W.device)
    if math.prod(shape) == 0:
        plan.empty = True
    elif kernel:
        _plan_kernel(plan, args, spec, chained, interleaved)
    return plan


def _batch(op: str, W, name: str, b) -> tuple:
    """The result's batch dimensions: b's, or the items of W, which b then has too or has none."""
    if W.batch is None:
        return tuple(b.shape[:-2])
    items = W.shape[0]
    if b.dim() != 2 and tuple(b.shape[:-2]) != (items,):
        raise ValueError(
            f"{op}: W is a batch of {items} items, so {name} needs 2 dimensions, for all of them, or 3 with {items} "
            f"matrices; it has shape {tuple(b.shape)}"
        )
    return (items,)


def _check_groups(op: str, W, x, expert_ids) -> None:
    """Check expert_ids, the matrix of W for each group of x's rows; its values are not checked."""
    if W.batch is None:
        raise ValueError(f"{op}: W is one matrix of shape {W.shape}; pass a batch (E, M, K), or use bsr_linear")
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be (T, K), got {tuple(x.shape)}; flatten its leading dimensions")
    check_group_numbers(op, expert_ids)
    runs, rows = len(expert_ids), x.shape[0]
    if (rows % runs if runs else rows) or rows and rows // runs % RUN_MULTIPLE:
        raise ValueError(
            f"{op}: {rows} rows of x for {runs} expert_ids: each run must have the same number of rows, a multiple of "
            f"{RUN_MULTIPLE}; pad each expert's rows with zeros"
        )


def check_structured(op: str, accumulation_dtype, narrow: bool, precision=None) -> None:
    """Raise ValueError for arguments that a Bsr24 does not support. narrow: True for an FP8 output."""
    if accumulation_dtype is not None:
        raise ValueError(f"{op}: a Bsr24 always accumulates in FP32; leave accumulation_dtype out")
    if precision is not None:
        raise ValueError(f"{op}: precision requires float32 values, which a Bsr24 cannot have; leave it out")
    if narrow:
        raise ValueError(f"{op}: a Bsr24 does not support FP8 outputs; use cute_kernels.quantize")


def check_gated(W) -> None:
    """Raise ValueError for a BsrMatrix or Bsr24 that bsr_gated_linear does not support."""
    if W.batch is not None:
        raise ValueError(f"{GATED}: W is a batch; use bsr_linear, and multiply by torch")
    if W.shape[0] % (2 * reference.GATE):
        raise ValueError(
            f"{GATED}: W has {W.shape[0]} rows; {reference.GATE} of the gate and {reference.GATE} that it multiplies "
            "come in turn, so they must be a multiple of both"
        )


def _epilogue(args: BsrArgs, with_z: bool):
    """The epilogue's facts, after the checks of its terms."""
    op, W, b, bias, linear, M = args.op, args.W, args.b, args.bias, args.linear, args.W.shape[-2]
    if bias is not None:
        checks.check_tensor(f"{op}: bias", bias)
    items = W.batch is not None and bias is not None and tuple(bias.shape) == (W.shape[0], M, 1)[: 2 if linear else 3]
    if linear and bias is not None and not items and tuple(bias.shape) != (M,):
        several = "" if W.batch is None else f" or ({W.shape[0]}, {M})"
        found = f"bias has shape {tuple(bias.shape)}, must be ({M},){several}"
        raise ValueError(f"{op}: {found}, one value an output feature")
    wide = default_out_dtype(W.dtype)
    kind = bias_kind(
        op, bias[0] if bias is not None and items else bias, -1 if linear else M, M if linear else b.shape[-1], wide
    )
    if kind and (items or linear):
        kind = "row"  # the kernel's rows are W's
    spec = spec_of(op, args, kind, _scale_kinds(args), with_z)
    return replace(spec, bias_items=True) if items else spec


def _scale_kinds(args: BsrArgs) -> tuple:
    """EpilogueSpec's (scale_m, scale_n): of W, but for scales of its blocks, and of b's columns or x's rows."""
    op, W = args.op, args.W
    check_fast_accum(op, args.use_fast_accum, W.dtype)
    check_accumulation_dtype(op, args.accumulation_dtype, W.dtype)
    kind = scale_kind(op, f"scale_{args.operand}", args.scale_b, torch.atleast_2d(args.b))
    if W.scaled_per == "block" and args.use_fast_accum:
        raise ValueError(
            f"{op}: use_fast_accum with a scale for each block of W: they multiply sums when those are promoted to "
            'fp32, which fast ones are not; use W.float().quantize(per="tensor"), or leave use_fast_accum out'
        )
    of_w = "tensor" if W.scaled_per == "tensor" else None
    return of_w, kind if kind in (None, "tensor") else "column"


def _problem(plan: Plan, args: BsrArgs, spec) -> Problem:
    """The problem that a kernel is selected for; fills in the plan's views of tensors."""
    W, b, out, bias, residual, linear, name = *args[1:4], args.bias, args.residual, args.linear, args.operand
    fold = W.batch is None
    plan.notes += alignment.note("W.values", W.stored, "copied to an aligned buffer in each call")
    if fold and out is not None and out.dim() > 2:
        stage(plan, out, not folds_into_rows(out) if linear else flatten_batch(out, 3)[1])
    d = torch.empty(plan.out_shape, dtype=plan.out_dtype, device="meta") if out is None or plan.staged else out
    views: dict[str, Any] = {}
    if fold:
        views = {"b": _view_of(name, b, linear, plan), "out": _view_of("out", d, linear, plan)}
        views["residual"] = None if residual is None else _view_of("residual", residual, linear, plan)
    if bias is not None:
        views["bias"] = _bias_of_items(bias, W) if spec.bias_items else bias_view(bias)
    bm, bk = W.blocksize
    plan.split_blocks = args.precision == "3xtf32"
    if plan.split_blocks:
        bk *= PARTS
    if W.shape[-1] == 0:  # no stored blocks, and b has no elements to point at: zeros that nothing reads
        plan.notes.append("K is 0: the kernel sums over nothing")
        columns = bk
        rows = 1 if b.dim() == 1 else math.prod(b.shape[:-1]) if fold else b.shape[-2]
        N = rows if linear else b.shape[-1]  # K-major on either side, which suits TMA at any N
        views["b"] = lambda t: t.new_zeros(N, columns) if linear else t.new_zeros(N, columns).t()
    elif plan.split_blocks:
        plan.notes.append("W.values are copied: 3xtf32 multiplies the TF32 parts of each block's numbers, side by side")
        views["b"] = split_view(name, views.get("b"), plan, linear, True, W.blocksize[1])
    elif W.dtype in FLOAT8 or W.dtype == torch.float32:
        views["b"] = along_k(name, b, views.get("b"), plan, linear)
    tensors: dict[str, Any] = {"b": b, "out": d, "residual": residual}
    vb, vd, vr = (t if views.get(key) is None or t is None else views[key](t) for key, t in tensors.items())
    layouts: Any = [layout_of_tensor(t) for t in (vb, vd)]
    # (row, col) of the torch tensor in the kernel's modes
    names = (("n", "k"), ("n", "m")) if linear else (("k", "n"), ("m", "n"))
    majors: Any = tuple(major(lay, pair) for lay, pair in zip(layouts, names, strict=True))
    if residual is not None:
        spec = replace(spec, residual=major(layout_of_tensor(vr), names[1]))
    M, K = W.shape[-2], W.shape[-1] // W.blocksize[1] * bk
    run = 0 if args.expert_ids is None else b.shape[0] // len(args.expert_ids)
    N, vector = vb.shape[-2] if linear else vb.shape[-1], VECTOR_BYTES // W.stored.element_size()
    index_dtype, scaled = NAMES_OF_INDEX[W.crow_indices.dtype], W.scaled_per == "block"
    block = BlockFacts(bm, bk, index_dtype, W.batch, run, permuted=W.base is not None, scaled=scaled)
    problem = Problem(
        Extents(M, N, K, vd.shape[0] if vd.dim() == 3 else 1),
        NAMES_OF_OPERANDS[W.dtype],
        NAMES_OF_OPERANDS[plan.out_dtype],
        (Layout("row", vector, vector), *layouts),
        ("k" if W.base is None else "m", *majors),
        (W.stored.dim(), vb.dim(), vd.dim()),
        spec,
        block,
        linear,
        W.density,
        W.stats,
        args.use_fast_accum,
        structured=W.structured,
        acc_dtype=acc_dtype(args),
        promoted=args.precision == "3xtf32",
    )
    views["scale_b"] = scale_view(args.scale_b, () if fold and linear else plan.out_shape[:-2], problem.extents.L)
    views |= {"scale_out": vector_view(args.scale_out), "scales": _scales_view(W), "z": views.get("out")}
    plan.views = _launch_views(args, views, spec.stores_z)
    return problem


def _plan_kernel(plan: Plan, args: BsrArgs, spec, chained: bool, interleaved: bool) -> None:
    """Fill in the kernel of a plan: the views of its tensors, facts and compiled function."""
    from cute_kernels.runtime.families import function_for

    W, problem = args.W, _problem(plan, args, spec)
    arch, sms = device_arch(args.b.get_device())
    try:
        plan.facts, *counts, notes = choose(problem, arch, sms, forced_path())
    except ValueError as reason:
        if not args.gated and W.structured:
            raise ValueError(f"{plan.op}: {reason}; W.to_bsr() is a BsrMatrix of the same numbers") from None
        if not args.gated:
            raise
        plain = args._replace(op="bsr_linear", activation=None, out=None)
        plan_bsr(plain._replace(out_dtype=plan.out_dtype if W.dtype in FLOAT8 else None))  # or it raises
        plan.unfused = True
        plan.notes.append(f"not fused: the gate follows a plain GEMM ({reason})")
        return
    if plan.facts.gate_apart:
        plan.notes.append(f"gate: both halves are rounded to {plan.out_dtype} before it, as the plain product's are")
    # W's values are copied to another address in each call, or they may be read before b is there.
    if chained and may_follow(plan.facts) and not W.stored.data_ptr() % VECTOR_BYTES:
        plan.facts = replace(plan.facts, chained=True)
    plan.group, plan.max_ctas = plan.facts.counts(*counts)
    plan.notes += notes
    cfg, steps = plan.facts.config, plan.facts.k_tiles_per_block
    plan.family = family_of(plan.facts)
    # A count of CTAs that divides the rows keeps even ones in step (family.in_step); of uneven ones it gives the
    # same to a CTA in every panel.
    _, plan.uneven_ctas = plan.facts.counts(None, resident_clusters(cfg, sms) * cfg.cluster)
    if plan.family.orders:
        tiles = tile_order.Tiles(
            row_tiles=-(-W.blocksize[0] // cfg.tile_m) // cfg.cluster_m,
            steps=steps,
            tiles_n=-(-problem.extents.N // (cfg.tile_n * cfg.cluster_n)),
            batch=problem.extents.L,
            group=plan.group,
            workers=resident_clusters(cfg, sms) if plan.facts.path == "sm_90" else None,
            interleaved=interleaved,
        )
        count = max(tiles.row_tiles, 1) * W.n_block_rows * tiles.tiles_n * tiles.batch  # or fewer, of joined block rows
        if tiles.workers is None or count > tiles.workers:  # else each worker has one tile, and an order is none
            plan.tiles = tiles

    def first_call(*arguments):
        """Compiles when it is called: an uneven pattern takes `ordered` instead."""
        plan.function = function_for(plan.facts)
        plan.function(*arguments)

    plan.function = first_call


def _launch_views(args: BsrArgs, views: dict, with_z: bool) -> tuple:
    """CallPlan.views; see dispatch.call for the tensors of a launch."""
    present = [name for name, t in zip(BsrArgs._fields[5:10], args.tensors[3:], strict=False) if t is not None]
    names = ["b", "out", *present, *["scales"] * (args.W.stored_scales is not None), *["z"] * with_z]
    return launch_views(names, views, [name for name in LAUNCH if name in names])


def _scales_view(W):
    """View of W's scales: (1,), or of block scales (blocks,). Without blocks there is one, or one for each item."""
    items = W.shape[0] if W.batch == "values" and W.scaled_per == "block" else 1
    return lambda t: t.view(-1) if t.numel() else t.new_ones(items)


def _bias_of_items(bias, W):
    """A bias (L, M) or (L, M, 1) as the kernel takes it: (L, M), contiguous."""
    shape = W.shape[:2]
    return None if bias.dim() == 2 and bias.is_contiguous() else lambda t: t.reshape(shape).contiguous()


def _view_of(name: str, t, linear: bool, plan: Plan):
    """The kernel's view of b or out: None if unchanged, a matrix, or a batch (L, rows, cols)."""
    if t.dim() == 2:
        return None
    if linear and t.dim() == 1:
        return lambda t: t[None]
    if linear and folds_into_rows(t):  # (..., K) is one matrix (tokens, K)
        return lambda t: flatten_batch(t, 2)[0]
    if linear:
        plan.notes.append(f"{name} is copied: its leading dimensions, strides {t.stride()}, do not fold into one")
        return lambda t: flatten_batch(t, 2)[0]
    _, copied = flatten_batch(t, 3)
    if copied:
        plan.notes.append(f"{name} is copied: its batch dimensions, strides {t.stride()}, have no single stride")
    return lambda t: flatten_batch(t, 3)[0]
