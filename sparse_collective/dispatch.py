"""The block-sparse ops as they run: validate, plan, launch.

All run a kernel with W as its A operand. bsr_matmul's b (K, N) is its B as it stands; bsr_linear's x (tokens, K) is B
given as (N, K), and the output (tokens, M) is D given transposed. Nothing is copied. W may be a batch of items;
bsr_grouped_linear is told for each run of tokens which item they multiply.
"""

import math
from dataclasses import replace
from functools import partial

import torch

from cute_kernels import checks, reference
from cute_kernels.dtypes import FLOAT8, NAMES_OF_INDEX, NAMES_OF_OPERANDS, default_out_dtype
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.matmul.cost import resident_clusters
from cute_kernels.matmul.epilogue.terms import (
    Terms,
    bias_kind,
    check_accumulation_dtype,
    check_fast_accum,
    check_narrow,
    epilogue_program,
    new_amax,
    scale_kind,
)
from cute_kernels.matmul.heuristics import choose
from cute_kernels.matmul.plan import Plan, along_k, as_vector, bias_view, scale_view, split_view, stage, viewed
from cute_kernels.matmul.precision import PARTS, check_precision, rounded
from cute_kernels.matmul.problem import Extents, Problem
from cute_kernels.operand import Layout, flatten_batch, folds_into_rows, layout_of_tensor, major
from cute_kernels.runtime.autocast import any_autocast, cast_product
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.derived import of_tensor
from cute_kernels.runtime.device import device_arch, forced_path, plans_kernel
from cute_kernels.runtime.families import family_of
from cute_kernels.tf32 import dispatch as tf32
from cute_kernels.tile.element import VECTOR_BYTES

from . import alignment, families, padded_rows  # noqa: F401 (importing families registers them)
from . import reference as bsr_reference
from .bsr import BsrMatrix
from .bsr24.matrix import Bsr24
from .bsr_gemm import tile_order
from .bsr_gemm.dependent_launch import may_follow
from .checks import RUN_MULTIPLE, check_group_numbers

GATED = "bsr_gated_linear"
NARROW = ("bsr_matmul", "bsr_linear")  # support FP8 outputs
WITH_PRECISION = ("bsr_matmul", "bsr_linear")  # multiply float32 as they are told
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


def call(
    op, W, b, bias, activation, residual, out, epilogue, expert_ids=None, with_z=False, scale_b=None,
    use_fast_accum=False, accumulation_dtype=None, out_dtype=None, scale_out=None, amax=None, precision=None,
    chained=False, fused=False,
):  # fmt: skip
    """An op of this package, where torch.compile does not trace it. With z, without out: (y, z), see gradients.

    chained: True if the kernel launched right before is a primary kernel that writes b and its scales
        (cute_kernels/tile/dependent_launch.py).
    fused: None in the place of a gate that torch would compute.
    """
    if epilogue is not None:
        epilogue = epilogue_program(op, epilogue)
    if type(W) is not BsrMatrix:
        W = as_bsr(op, W)
    if W.check and not W.pattern.checked:
        W.check_indices()  # before the plan, which depends on what the check finds out
    values = W.stored
    tensors = (b, values) if out is None else (b, values, out, *W.indices)
    if bias is not None:
        tensors += (bias,)
    if residual is not None:
        tensors += (residual,)
    if expert_ids is not None:
        tensors += (expert_ids,)
    if scale_b is not None:
        tensors += (scale_b,)
    if W.stored_scales is not None:
        tensors += (W.stored_scales,)
    if scale_out is not None:
        tensors += (scale_out,)
    if amax is not None:
        tensors += (amax,)
    try:
        terms = (
            op, W.form, W.pattern.stats, b.numel(), activation, epilogue, forced_path(), out is None, bias is None,
            residual is None, expert_ids is None, with_z, scale_b is None, use_fast_accum, type(use_fast_accum),
            accumulation_dtype, out_dtype, scale_out is None, amax is None, precision, chained,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # torch raises RuntimeError of a nested tensor's numel()
        terms = None
    plan = _PLANS.known(terms, tensors, out)
    if plan is None:
        given = Terms(
            bias, activation, residual, epilogue=epilogue, with_z=with_z, gated=op == GATED, scale_b=scale_b,
            use_fast_accum=use_fast_accum, accumulation_dtype=accumulation_dtype, scale_out=scale_out, amax=amax,
            precision=precision,
        )  # fmt: skip
        planned = partial(_plan, op, W, b, given, out, expert_ids, out_dtype, chained)
        plan = _PLANS.checked(op, terms, tensors, out, planned, residual)
    if amax is not None:
        amax.zero_()
    if plan.function is None:
        if fused and plan.unfused:
            return None
        given = Terms(
            bias, activation, residual, epilogue=epilogue, with_z=with_z, gated=op == GATED, scale_b=scale_b,
            use_fast_accum=use_fast_accum, accumulation_dtype=accumulation_dtype, scale_out=scale_out, amax=amax,
            precision=precision,
        )  # fmt: skip
        return _without_kernel(plan, W, b, given, out, expert_ids)
    if out is None:
        out = plan.new_out()
    d = result = plan.new_out() if plan.staged else out
    z = kept = plan.new_out() if with_z else None
    if plan.views:
        b, d, bias, residual, z = viewed((*plan.views, plan.views[1]), b, d, bias, residual, z)
    if W.pattern.nnz == 0:  # tensors of extent 0 have no address; crow_indices never points at this one
        values = values.new_zeros(*values.shape[:-3], 1, *values.shape[-2:])
    if values.data_ptr() & 15:
        values = alignment.aligned(values)
    if plan.split_blocks:
        values = tf32.side_by_side(values, False)
    scales = _scales(plan, W, scale_b, scale_out, amax) if plan.scales else ()
    _launch(plan, W, values, b, d, scales, bias, residual, z, expert_ids)
    if with_z:
        return out, kept
    return out.copy_(result) if plan.staged else out


def _scales(plan: Plan, W, scale_b, scale_out, amax) -> tuple:
    """Scale arguments of the kernel: those of W and b, and for an FP8 output scale_out and amax."""
    of_w = W.stored_scales
    if of_w is not None:
        # Without blocks there is one in their place, of a batch of one pattern in each item.
        items = W.shape[0] if W.batch == "values" and W.scaled_per == "block" else 1
        of_w = of_w.view(-1) if W.pattern.nnz else of_w.new_ones(items)
    given = (scale_b, scale_out, amax)[: len(plan.scales)]
    return of_w, *viewed(plan.scales, *given)


def _launch(plan: Plan, W, values, b, d, scales: tuple, bias, residual, z, expert_ids) -> None:
    """Run the plan's kernel on the tensors as it views them."""
    family, function, group, order, pattern = plan.family, plan.function, plan.group, None, W.pattern
    ctas = plan.max_ctas if pattern.even else plan.uneven_ctas
    if plan.tiles and _takes_order(W):
        function, tiles, ctas = plan.ordered or _ordered(plan)
        order, group = tile_order.order_of(pattern, tiles), 1
    tables = family.pattern(plan.facts, W, order, expert_ids)
    function(pattern.crow_indices, *tables, values, b, d, *scales, bias, residual, z, 1.0, 1.0, group, ctas)


def _takes_order(W) -> bool:
    """True if a table orders the work tiles, if the plan has `tiles`: for a single pattern, with any number of columns
    or batch items."""
    return tile_order.ENABLED and not W.pattern.even and W.pattern.tables is not None and W.batch != "patterns"


def under_autocast(op: str, W, b, residual, out_dtype) -> tuple:
    """(W, b, residual) as torch.autocast casts them; a torch.sparse_bsr W becomes the BsrMatrix that is kept for it."""
    return cast_product(as_bsr(op, W), b, residual, out_dtype)


def _explained(op: str, W, b, terms: Terms, out, expert_ids=None, out_dtype=None) -> Plan:
    """The plan of a call, with the facts of the kernel that it launches."""
    W = as_bsr(op, W)
    if any_autocast() and out is None and terms.precision is None:
        W, b, residual = under_autocast(op, W, b, terms.residual, out_dtype)
        terms = replace(terms, residual=residual)
    if W.check and W.device.type != "meta":
        W.check_indices()  # plans depend on what it finds out
    plan = _plan(op, W, b, terms, out, expert_ids, out_dtype)
    if plan.facts is not None and plan.tiles and _takes_order(W):
        plan.facts = replace(plan.facts, ordered=True)
        plan.notes.append("block rows differ in length: a table orders the work tiles, the longest first")
    return plan


def _ordered(plan: Plan) -> tuple:
    """(function, Tiles, CTAs): the plan's kernel with work tiles in the order of their length."""
    from cute_kernels.runtime.families import function_for

    workers, cfg = plan.tiles.workers, plan.facts.config
    ctas = None if workers is None else workers * cfg.cluster
    # The order is a kernel's, which may run right before: such a product follows nothing.
    plan.ordered = function_for(replace(plan.facts, ordered=True, chained=False)), plan.tiles, ctas
    return plan.ordered


def _without_kernel(plan: Plan, W, b, terms: Terms, out, expert_ids):
    """CPU tensors multiply the stored blocks by torch, a gate without a kernel is torch's; an empty result needs
    nothing at all."""
    if plan.unfused:
        y = _gate_by_torch(plan, W, b, terms)
        return y.to(plan.out_dtype) if out is None else out.copy_(y)
    if plan.empty:
        return (plan.new_out(), plan.new_out()) if terms.with_z else plan.new_out() if out is None else out
    bias = terms.bias
    if W.structured:
        W = W.to_bsr()
    if terms.precision == "tf32":
        W, b = W.with_values(rounded(W.values)), rounded(b)
    if expert_ids is not None:
        acc = bsr_reference.grouped_linear(W, b, expert_ids)
        if bias is not None and bias.dim() == 2:
            items = expert_ids.clamp(0, W.shape[0] - 1).long()  # the nearest item's, where there is no such number
            terms = replace(terms, bias=bias[items].repeat_interleave(len(b) // len(expert_ids), 0))
    elif plan.op == "bsr_matmul":
        acc = bsr_reference.product(W, b)
    else:
        tokens = b if W.batch is not None else flatten_batch(torch.atleast_2d(b), 2)[0]  # (..., K) is (tokens, K)
        acc = bsr_reference.product(W, tokens.mT).mT
        acc = acc if W.batch is not None else acc.reshape(*b.shape[:-1], W.shape[-2])
        if bias is not None and bias.dim() == 2:
            terms = replace(terms, bias=bias[:, None])
    if (scale := terms.scale_b) is not None:
        if scale.numel() == 1:
            scale = scale.reshape(())
        elif scale.dim() == 1:  # of b's columns, which are the result's, or of x's rows
            scale = scale if plan.op == "bsr_matmul" else scale[:, None]
        acc = acc * scale
    if terms.gated and W.dtype in FLOAT8:  # what kernels do
        acc = acc.to(plan.out_dtype).to(acc.dtype)
    return reference.finish(acc, terms, out, plan.out_dtype)


def _gate_by_torch(plan: Plan, W, b, terms: Terms):
    """The gate applied to an unfused GEMM: computed in FP32 for FP8, otherwise in W's dtype."""
    if W.dtype not in FLOAT8:
        return reference.gate(call("bsr_linear", W, b, None, None, None, None, None), terms.activation)
    more = {"scale_b": terms.scale_b, "out_dtype": plan.out_dtype}
    return reference.gate_of_rounded(call("bsr_linear", W, b, None, None, None, None, None, **more), terms.activation)


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
    return of_tensor(W).get("matrix", W, lambda: BsrMatrix.from_torch(W.detach()), BsrMatrix.indices.fget)


def _plan(op, W, b, terms: Terms, out, expert_ids=None, out_dtype=None, chained=False) -> Plan:
    """Check a call's arguments and choose its kernel, without launching it."""
    linear = op != "bsr_matmul"
    name = "x" if linear else "b"
    checks.check_tensor(f"{op}: {name}", b)
    if b.dim() < (1 if linear else 2):
        raise ValueError(f"{op}: {name} has {b.dim()} dimensions, too few")
    precision = terms.precision if op in WITH_PRECISION else False
    of, kernel = {"W": W.stored, name: b}, plans_kernel(W.device)
    checks.check_operands(op, kernel=kernel, also=tuple(FLOAT8), precision=precision, **of)
    check_precision(op, terms.precision, W.dtype)
    M, K = W.shape[-2:]
    inner = b.shape[-1] if linear else b.shape[-2]
    if inner != K:
        raise ValueError(f"{op}: W is {M}x{K} and {name} {tuple(b.shape)}: {K} columns of W meet {inner}")
    if op == "bsr_grouped_linear":
        _check_groups(op, W, b, expert_ids)
        batch = ()
    else:
        batch = _batch(op, W, name, b)
    if op == GATED:
        check_gated(W)
    features = M // 2 if op == GATED else M
    shape = (*batch, *b.shape[-2:-1], features) if linear else (*batch, M, b.shape[-1])
    wide, narrow = default_out_dtype(W.dtype), tuple(FLOAT8) if op in NARROW else ()
    out_dtype = checks.check_out_dtype(op, out, out_dtype, wide, narrow)
    check_narrow(op, terms, out_dtype, wide)
    if W.structured:
        check_structured(op, terms.accumulation_dtype, out_dtype in FLOAT8, terms.precision)
    checks.check_result(op, "out", out, shape, out_dtype)
    checks.check_result(op, "residual", terms.residual, shape, out_dtype)
    spec = _epilogue(op, W, b, terms)
    others = {"bias": terms.bias, "residual": terms.residual, "expert_ids": expert_ids, f"scale_{name}": terms.scale_b}
    others |= {"scale_out": terms.scale_out, "amax": terms.amax}
    checks.check_device(op, W.device, out=out, **others)
    plan = Plan(op, shape, out_dtype, W.device)
    if math.prod(shape) == 0:
        plan.empty = True
    elif plans_kernel(W.device):
        _plan_kernel(plan, W, b, terms, out, spec, expert_ids, chained)
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
        raise ValueError(f"{op}: products of a Bsr24 are summed in fp32 alone; leave accumulation_dtype out")
    if precision is not None:
        raise ValueError(f"{op}: a Bsr24 has no float32 values, which precision belongs to; leave it out")
    if narrow:
        raise ValueError(f"{op}: a Bsr24 has no float8 outputs; use cute_kernels.quantize")


def check_gated(W) -> None:
    """ValueError for a W that bsr_gated_linear does not take."""
    W = as_bsr(GATED, W)
    if W.batch is not None:
        raise ValueError(f"{GATED}: W is a batch; use bsr_linear, and multiply by torch")
    if W.shape[0] % (2 * reference.GATE):
        raise ValueError(
            f"{GATED}: W has {W.shape[0]} rows; {reference.GATE} of the gate and {reference.GATE} that it multiplies "
            "come in turn, so they must be a multiple of both"
        )


def _epilogue(op, W, b, terms: Terms):
    """The epilogue's facts, after the checks of its terms."""
    linear, M, bias = op != "bsr_matmul", W.shape[-2], terms.bias
    if bias is not None:
        checks.check_tensor(f"{op}: bias", bias)
    items = W.batch is not None and bias is not None and tuple(bias.shape) == (W.shape[0], M, 1)[: 2 if linear else 3]
    if linear and bias is not None and not items and tuple(bias.shape) != (M,):
        several = "" if W.batch is None else f" or ({W.shape[0]}, {M})"
        found = f"bias has shape {tuple(bias.shape)}, must be ({M},){several}"
        raise ValueError(f"{op}: {found}, one value an output feature")
    wide = default_out_dtype(W.dtype)
    kind = bias_kind(op, bias[0] if items else bias, -1 if linear else M, M if linear else b.shape[-1], wide)
    if kind and (items or linear):
        kind = "row"  # the kernel's rows are W's
    spec = terms.spec(op, kind, _scale_kinds(op, W, b, terms))
    return replace(spec, bias_items=True) if items else spec


def _scale_kinds(op, W, b, terms: Terms) -> tuple:
    """EpilogueSpec's (scale_m, scale_n): of W, but for scales of its blocks, and of b's columns or x's rows."""
    check_fast_accum(op, terms.use_fast_accum, W.dtype)
    check_accumulation_dtype(op, terms.accumulation_dtype, W.dtype)
    linear = op != "bsr_matmul"
    kind = scale_kind(op, "scale_x" if linear else "scale_b", terms.scale_b, torch.atleast_2d(b))
    if W.scaled_per == "block" and terms.use_fast_accum:
        raise ValueError(
            f"{op}: use_fast_accum with a scale for each block of W: they multiply sums when those are promoted to "
            'fp32, which fast ones are not; use W.float().quantize(per="tensor"), or leave use_fast_accum out'
        )
    of_w = "tensor" if W.scaled_per == "tensor" else None
    return of_w, kind if kind in (None, "tensor") else "column"


def _plan_kernel(plan: Plan, W, b, terms: Terms, out, spec, expert_ids, chained: bool) -> None:
    from cute_kernels.runtime.families import function_for

    linear, fold = plan.op != "bsr_matmul", W.batch is None
    plan.notes += alignment.note("W.values", W.stored, "copied to an aligned buffer in each call")
    bias, residual = terms.bias, terms.residual
    if fold and out is not None and out.dim() > 2:
        stage(plan, out, not folds_into_rows(out) if linear else flatten_batch(out, 3)[1])
    d = torch.empty(plan.out_shape, dtype=plan.out_dtype, device="meta") if out is None or plan.staged else out
    views = (
        _view_of("x" if linear else "b", b, linear, plan) if fold else None,
        _view_of("out", d, linear, plan) if fold else None,
        None if bias is None else _bias_of_items(bias, W) if spec.bias_items else bias_view(bias),
        None if residual is None or not fold else _view_of("residual", residual, linear, plan),
    )
    bm, bk = W.blocksize
    plan.split_blocks = terms.precision == "3xtf32"
    if plan.split_blocks:
        bk *= PARTS
    if W.shape[-1] == 0:  # no stored blocks, and b has no elements to point at: zeros that nothing reads
        plan.notes.append("K is 0: the kernel sums over nothing")
        columns = bk
        rows = 1 if b.dim() == 1 else math.prod(b.shape[:-1]) if fold else b.shape[-2]
        N = rows if linear else b.shape[-1]  # K-major on either side, which suits TMA at any N
        views = (lambda t: t.new_zeros(N, columns) if linear else t.new_zeros(N, columns).t(), *views[1:])
    elif plan.split_blocks:
        plan.notes.append("W.values are copied: 3xtf32 multiplies the TF32 parts of each block's numbers, side by side")
        views = split_view("x" if linear else "b", views[0], plan, linear, True, W.blocksize[1]), *views[1:]
    elif W.dtype in FLOAT8 or W.dtype == torch.float32:
        views = along_k("x" if linear else "b", b, views[0], plan, linear), *views[1:]
    if any(view is not None for view in views):
        plan.views = views
    vb, vd = (t if view is None else view(t) for t, view in zip((b, d), views, strict=False))
    layouts = [layout_of_tensor(t) for t in (vb, vd)]
    # (row, col) of the torch tensor in the kernel's modes
    names = (("n", "k"), ("n", "m")) if linear else (("k", "n"), ("m", "n"))
    majors = tuple(major(lay, pair) for lay, pair in zip(layouts, names, strict=True))
    if residual is not None:
        vr = residual if views[3] is None else views[3](residual)
        spec = replace(spec, residual=major(layout_of_tensor(vr), names[1]))
    M, K = W.shape[-2], W.shape[-1] // W.blocksize[1] * bk
    run = 0 if expert_ids is None else b.shape[0] // len(expert_ids)
    N, vector = vb.shape[-2] if linear else vb.shape[-1], VECTOR_BYTES // W.stored.element_size()
    problem = Problem(
        Extents(M, N, K, vd.shape[0] if vd.dim() == 3 else 1),
        NAMES_OF_OPERANDS[W.dtype],
        NAMES_OF_OPERANDS[plan.out_dtype],
        (Layout("row", vector, vector), *layouts),
        ("k" if W.base is None else "m", *majors),
        (W.stored.dim(), vb.dim(), vd.dim()),
        spec,
        BlockFacts(
            bm,
            bk,
            NAMES_OF_INDEX[W.crow_indices.dtype],
            W.batch,
            run,
            permuted=W.base is not None,
            scaled=W.scaled_per == "block",
        ),  # fmt: skip
        linear,
        W.density,
        W.stats,
        terms.use_fast_accum,
        structured=W.structured,
        acc_dtype=terms.acc_dtype,
        promoted=terms.precision == "3xtf32",
    )
    if spec.scales_operands or problem.block.scaled or plan.out_dtype in FLOAT8:
        plan.scales = (scale_view(terms.scale_b, () if fold and linear else plan.out_shape[:-2], problem.extents.L),)
    if plan.out_dtype in FLOAT8:
        plan.scales += (as_vector, as_vector)
    arch, sms = device_arch(b.get_device())
    try:
        plan.facts, *counts, notes = choose(problem, arch, sms, forced_path())
    except ValueError as reason:
        if plan.op != GATED and W.structured:
            raise ValueError(f"{plan.op}: {reason}; W.to_bsr() is a BsrMatrix of the same numbers") from None
        if plan.op != GATED:
            raise
        plain = replace(terms, activation=None, gated=False)
        _plan("bsr_linear", W, b, plain, None, out_dtype=plan.out_dtype if W.dtype in FLOAT8 else None)  # or it raises
        plan.unfused = True
        plan.notes.append(f"not fused: torch computes the gate of a plain product ({reason})")
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
            row_tiles=-(-bm // cfg.tile_m) // cfg.cluster_m,
            steps=steps,
            tiles_n=-(-N // (cfg.tile_n * cfg.cluster_n)),
            batch=problem.extents.L,
            group=plan.group,
            workers=resident_clusters(cfg, sms) if plan.facts.path == "sm_90" else None,
        )
        count = max(tiles.row_tiles, 1) * W.n_block_rows * tiles.tiles_n * tiles.batch  # or fewer, of joined block rows
        if tiles.workers is None or count > tiles.workers:  # else each worker has one tile, and an order is none
            plan.tiles = tiles

    def first_call(*args):
        """Compiles when it is called: an uneven pattern takes `ordered` instead."""
        plan.function = function_for(plan.facts)
        plan.function(*args)

    plan.function = first_call


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


def plan_bsr_matmul(
    W,
    b,
    *,
    bias=None,
    activation=None,
    residual=None,
    out=None,
    scale_b=None,
    out_dtype=None,
    return_amax=False,
    **more,
) -> Plan:
    """The plan of the same call of bsr_matmul."""
    amax = new_amax("bsr_matmul", return_amax, b)
    terms = Terms(bias, activation, residual, scale_b=scale_b, amax=amax, **more)
    return _explained("bsr_matmul", W, b, terms, out, out_dtype=out_dtype)


def plan_bsr_linear(
    x, W, *, bias=None, activation=None, out=None, scale_x=None, out_dtype=None, return_amax=False, **more
) -> Plan:
    """The plan of the same call of bsr_linear."""
    terms = Terms(bias, activation, scale_b=scale_x, amax=new_amax("bsr_linear", return_amax, x), **more)
    return _explained("bsr_linear", W, x, terms, out, out_dtype=out_dtype)


def plan_bsr_gated_linear(x, W, *, activation="silu", out=None, scale_x=None, out_dtype=None) -> Plan:
    """The plan of the same call of bsr_gated_linear."""
    terms = Terms(activation=activation, gated=True, scale_b=scale_x)
    return _explained(GATED, W, x, terms, out, out_dtype=out_dtype)


def plan_bsr_grouped_linear(
    x, W, *, offs=None, expert_ids=None, group_rows=None, bias=None, activation=None, out=None, epilogue=None,
    scale_x=None, use_fast_accum=False, accumulation_dtype=None,
) -> Plan:  # fmt: skip
    """The plan of the same call of bsr_grouped_linear."""
    op = "bsr_grouped_linear"
    more = {"epilogue": epilogue, "use_fast_accum": use_fast_accum, "accumulation_dtype": accumulation_dtype}
    padding = routing(op, x, W, expert_ids, offs, group_rows)
    if padding is None:
        return _explained(op, W, x, Terms(bias, activation, scale_b=scale_x, **more), out, expert_ids)
    scale, rows = padded_rows.spread_scale(op, scale_x, x, padding), padded_rows.spread(x, padding)
    to = None if out is None else padded_out(op, out, W, padding, x, bias, scale_x, offs)
    plan = _explained(op, W, rows, Terms(bias, activation, scale_b=scale, **more), to, padding.groups)
    plan.out_shape = (x.shape[0], W.shape[-2])
    plan.notes.append(f"offs: x is copied to a padded layout of {padding.rows} rows, and the result back from it")
    return plan
