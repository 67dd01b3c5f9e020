"""sddmm in eager mode: validate, plan, launch."""

from functools import partial

import torch

from cute_kernels import checks
from cute_kernels.dtypes import NAMES, NAMES_OF_INDEX, accumulator
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.matmul.heuristics import choose
from cute_kernels.matmul.plan import Plan, viewed
from cute_kernels.matmul.problem import Extents, Problem
from cute_kernels.operand import Layout, layout_of_tensor, major
from cute_kernels.reference import outside_autocast
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.device import device_arch, forced_path, plans_kernel
from cute_kernels.runtime.torch_compat import uncompiled

from .. import alignment, families  # noqa: F401 (importing families registers them)
from ..bsr import BsrMatrix
from ..checks import RUN_MULTIPLE, check_group_numbers
from .config import parts_of
from .tables import groups_of

_PLANS: PlanCache[Plan] = PlanCache()
CPU_BYTES = 4 << 20  # bytes of the operands' blocks that the CPU implementation gathers at a time


@uncompiled
def sddmm(a, b, pattern, out, accumulate: bool, out_dtype, expert_ids=None):
    """ops.sddmm for calls that torch.compile does not trace."""
    if not isinstance(pattern, BsrMatrix):
        raise TypeError(f"sddmm: pattern must be a BsrMatrix, got {type(pattern).__name__}; see BsrMatrix.from_torch")
    if pattern.check and not pattern.pattern.checked:
        pattern.check_indices()
    tensors = (a, b) if out is None else (a, b, out, *pattern.indices)
    tensors = tensors if expert_ids is None else (*tensors, expert_ids)
    terms = pattern.form, pattern.pattern.stats, out is None, expert_ids is None, accumulate, out_dtype, forced_path()
    plan = _PLANS.known(terms, tensors, out)
    if plan is None:
        more = {"out": out, "accumulate": accumulate, "out_dtype": out_dtype, "expert_ids": expert_ids}
        make = partial(plan_sddmm, a, b, pattern, **more)
        plan = _PLANS.checked("sddmm", terms, tensors, out, make)
    if out is None:
        out = plan.new_out()
    if plan.empty:  # no blocks, or sums over nothing
        return out if accumulate else out.zero_()
    if plan.function is None:
        return _on_cpu(a, b, pattern, out, accumulate, expert_ids)
    if plan.views:
        a, b = viewed(plan.views, (a, b))
    cfg, block = plan.facts.config, plan.facts.block
    parts, boxes = parts_of(block.bk, cfg.box_n), cfg.boxes
    box_table = groups_of(pattern.pattern, parts, boxes)
    runs = (None, None) if expert_ids is None else runs_of(expert_ids, pattern.shape[0])
    d = alignment.aligned_copy(out, accumulate) if plan.staged else out
    residual = (d,) if accumulate else ()
    plan.function(box_table, pattern.col_indices, *runs, a, b, d, *residual, 1.0, 1.0, plan.group, plan.max_ctas)
    return out.copy_(d) if plan.staged else out


def plan_sddmm(a, b, pattern, *, out=None, accumulate=False, out_dtype=None, expert_ids=None) -> Plan:
    """Check a call's arguments and select its kernel, without launching it."""
    op = "sddmm"
    checks.check_tensor(f"{op}: a", a)
    checks.check_tensor(f"{op}: b", b)
    check_pattern(op, pattern, out, accumulate, expert_ids)
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"{op}: a and b must be matrices, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    checks.check_operands(op, kernel=plans_kernel(a.device), a=a, b=b)
    (M, N), (bm, bk) = pattern.shape[-2:], pattern.blocksize
    if expert_ids is not None:
        check_groups(op, expert_ids, a.shape[1])
    if a.shape[0] != M or b.shape[1] != N or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{op}: a is {tuple(a.shape)} and b {tuple(b.shape)}; for a pattern of shape {(M, N)} they must be "
            f"({M}, K) and (K, {N})"
        )
    out_dtype = checks.check_out_dtype(op, out, out_dtype, a.dtype)
    shape = (*pattern.stored.shape[:-2], bm, bk)
    checks.check_result(op, "out", out, shape, out_dtype)
    if out is not None and not out.is_contiguous():
        raise ValueError(f"{op}: out has strides {out.stride()}; the kernels write contiguous values")
    checks.check_device(op, a.device, pattern=pattern.stored, out=out, expert_ids=expert_ids)
    plan = Plan(op, shape, out_dtype, a.device)
    if pattern.nnz == 0 or a.shape[1] == 0:
        plan.empty = True
    elif plans_kernel(a.device):
        _plan_kernel(plan, a, b, pattern, out, accumulate, 0 if expert_ids is None else a.shape[1] // len(expert_ids))
    return plan


def check_pattern(op: str, pattern, out, accumulate: bool, expert_ids) -> None:
    """Checks that are not possible from the registered op's arguments."""
    if not isinstance(pattern, BsrMatrix):
        raise TypeError(f"{op}: pattern must be a BsrMatrix, got {type(pattern).__name__}; see BsrMatrix.from_torch")
    if pattern.base is not None:
        raise ValueError(f"{op}: pattern is a transposed view; pass its base, pattern.t(), and swap a.t() and b.t()")
    if (pattern.batch is None) != (expert_ids is None):
        kind = "one matrix" if pattern.batch is None else f"a batch of shape {pattern.shape}"
        raise ValueError(
            f"{op}: pattern is {kind}; expert_ids, the matrix of each group of K, is required for a batch only"
        )
    if accumulate and out is None:
        raise ValueError(f"{op}: accumulate=True adds to out; pass out=")


def _plan_kernel(plan: Plan, a, b, pattern, out, accumulate: bool, run: int) -> None:
    from cute_kernels.runtime.families import function_for

    (M, N), (bm, bk) = pattern.shape[-2:], pattern.blocksize
    if a.shape[1] == 1:
        plan.views = (0, _one_column), (1, _one_row)
        a, b = _one_column(a), _one_row(b)
    la, lb = layout_of_tensor(a), layout_of_tensor(b)
    granule = 16 // (4 if plan.out_dtype is torch.float32 else 2)
    ld = Layout("row", granule, granule)
    off = [] if out is None else alignment.note("out", out, "written through an aligned buffer")
    plan.staged, plan.notes = bool(off), plan.notes + off
    block = BlockFacts(bm, bk, NAMES_OF_INDEX[pattern.crow_indices.dtype], pattern.batch, run, operand="d")
    problem = Problem(
        Extents(M, N, a.shape[1]),
        NAMES[a.dtype],
        NAMES[plan.out_dtype],
        (la, lb, ld),
        (major(la, ("m", "k")), major(lb, ("k", "n")), "n"),
        (2, 2, pattern.stored.dim()),
        EpilogueSpec(residual="n" if accumulate else None),
        block,
        density=pattern.density,
    )
    arch, sms = device_arch(a.get_device())
    plan.facts, *counts, notes = choose(problem, arch, sms, forced_path())
    plan.group, plan.max_ctas = plan.facts.counts(*counts)
    plan.notes += notes
    plan.function = function_for(plan.facts)


def _one_column(t):
    """(M, 1): TMA requires aligned strides even for a mode of extent 1."""
    return t.as_strided(t.shape, (t.stride(0), -(-t.shape[0] // 8) * 8)) if t.stride(0) == 1 else t


def _one_row(t):
    """(1, N), for the same reason."""
    return t.as_strided(t.shape, (-(-t.shape[1] // 8) * 8, t.stride(1))) if t.stride(1) == 1 else t


def check_groups(op: str, expert_ids, K: int) -> None:
    """Check expert_ids, the matrix of each group of K."""
    check_group_numbers(op, expert_ids)
    if (K % len(expert_ids) or K // len(expert_ids) % RUN_MULTIPLE) if len(expert_ids) else K:
        raise ValueError(
            f"{op}: K is {K} for {len(expert_ids)} expert_ids: groups must have equal length, a multiple of "
            f"{RUN_MULTIPLE}"
        )


def runs_of(expert_ids, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(groups of K sorted by matrix, offsets of each matrix's groups); ids out of range belong to no matrix."""
    item, order = expert_ids.sort(stable=True)
    every = torch.arange(items + 1, dtype=item.dtype, device=item.device)
    return order.int(), torch.searchsorted(item, every, out_int32=True)


@outside_autocast
def _on_cpu(a, b, pattern, out, accumulate: bool, expert_ids=None):
    """SDDMM by torch, only of stored blocks, some at a time; accumulates in FP32 (float64 for float64)."""
    (bm, bk), K, wide = pattern.blocksize, a.shape[1], accumulator(a.dtype)
    if expert_ids is not None:
        return _batch_on_cpu(a, b, pattern, out, accumulate, expert_ids)
    rows, columns = pattern.row_of_block().long(), pattern.col_indices.long()
    a, b = (t.to(wide).contiguous() for t in (a, b.t()))
    a, b = a.unflatten(0, (-1, bm)), b.unflatten(0, (-1, bk))  # (M / bm, bm, K), (N / bk, bk, K)
    blocks = torch.arange(pattern.nnz, device=a.device)
    for part in blocks.split(max(1, CPU_BYTES // (a.element_size() * (bm + bk) * max(K, 1)))):
        found = a[rows[part]] @ b[columns[part]].mT
        out[part] = (found + out[part].to(wide) if accumulate else found).to(out.dtype)
    return out


def _batch_on_cpu(a, b, pattern, out, accumulate: bool, expert_ids):
    """SDDMM of a batch by torch, matrix by matrix, each over its columns of a."""
    item_of = expert_ids.repeat_interleave(a.shape[1] // len(expert_ids))
    for number, item in enumerate(pattern.unbind()):
        part = item_of == number
        if pattern.batch == "values":
            to = out[number]
        else:
            first = int(pattern.crow_indices[number, 0])
            to = out[first : first + item.nnz]
        _on_cpu(a[:, part], b[part], item, to, accumulate)
    return out
