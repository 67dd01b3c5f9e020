"""The plan of an attention call: its checks, the kernel and its launch parameters, computed once per metadata.

Each form of a call (dense or with a KV cache, packed, block-sparse) checks its own arguments, and calls `checked_plan`
and, on a GPU, `plan_kernel`. dispatch.py looks plans up and launches their kernels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from cute_kernels.arch import ArchSpec
from cute_kernels.dtypes import NAMES, NAMES_OF_OPERANDS, accumulator
from cute_kernels.runtime import families
from cute_kernels.runtime.call_plan import CallPlan, layout_of
from cute_kernels.runtime.device import device_arch, forced_path, plans_kernel

from . import checks
from .arguments import AttentionArgs
from .forward.config import FlashFacts, GatherFacts, WindowKind
from .forward.heuristics import Extents, pick
from .masks.block_lists import MOST
from .sinks import check_sinks

LOG2E = 1.4426950408889634
OFFSETS = 4  # index of (q_offset, k_offset) in FlashPlan.scalars of a forward kernel


@dataclass(repr=False)
class FlashPlan(CallPlan):
    """The kernel of an attention call and its launch parameters."""

    lse_shape: tuple = ()
    scalars: tuple = ()  # the function's last arguments; OFFSETS is replaced in each call that has offsets
    takes_counter: bool = False  # before those; None of a schedule that is not dynamic
    sms: int = 0  # multiprocessors of the device
    order: tuple = ()  # of block masks: tile_m, l2_heads, near and sms of block_sparse.tile_order
    # For FP8 q: a function of v and cu_seqlens_k that converts v for the kernel, None if the kernel reads v itself; and
    # the shape of each scale for the kernel, None if it has that shape or is absent, () if that is so for all.
    values: Callable | None = None
    scale_shapes: tuple | None = None

    @cached_property
    def lse_layout(self) -> tuple:
        return layout_of(self.lse_shape, torch.float32)

    def kernel_lines(self) -> list[str]:
        f = self.facts
        lines = [f"configuration: {f.config}, head_dim {f.head_dim}, of v {f.head_dim_v}, {f.window}"]
        lines += [f"sinks: of {f.sinks}, in the softmax"] if f.sinks else []
        if isinstance(f, GatherFacts):
            lines.append(f"KV tiles: gathered from the union of a query tile's lists, blocks of {f.block_size}")
        return lines if f.score is None else [*lines, f"score_mod: {f.score.program}"]


def checked_plan(args: AttentionArgs, out_shape: tuple, lse_shape: tuple, columns: int) -> FlashPlan:
    """The plan of a call, without a kernel. Checks its sinks, scalars and out; the form has checked q, k and v.

    columns: number of columns that a row may see.
    """
    op, q, out = args.op, args.q, args.out
    check_sinks(op, args.sinks, q)
    out_dtype = checks.out_dtype(op, q, out)
    checks.check_scale(op, args.scale, args.softcap)
    if not isinstance(args.return_lse, bool):
        raise TypeError(f"{op}: return_lse must be True or False, got {args.return_lse!r}")
    plan = FlashPlan(op, tuple(out_shape), out_dtype, q.device, lse_shape=tuple(lse_shape))
    if out is not None:
        checks.check_out(op, out, plan.out_shape, out_dtype, q.device)
    # Without values an LSE is still one of scores.
    plan.empty = 0 in plan.out_shape[:-1] or columns == 0 or (args.v.shape[-1] == 0 and not args.return_lse)
    return plan


def gradient_of(
    t: torch.Tensor, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Memory for the gradient of t, in its dtype or `dtype`: of its strides, or contiguous where those leave gaps.

    All that computes gradients, and what tells torch.compile of them, asks here for their strides.
    """
    if torch.ops.aten.is_non_overlapping_and_dense.default(t):
        return torch.empty_like(t, device=device, dtype=dtype)
    return torch.empty(t.shape, dtype=dtype or t.dtype, device=t.device if device is None else device)


def has_kernel(tensor: torch.Tensor) -> bool:
    """True if a call with this tensor launches a kernel."""
    return plans_kernel(tensor.device)


def plan_kernel(
    plan: FlashPlan, args: AttentionArgs, *, extents, bounds=(None, None), longest=None, offsets=False, choose=None,
    **more,
) -> None:  # fmt: skip
    """Fill in the kernel: which facts, how it views the tensors, its scalars and its function.

    Args:
        extents: (heads of all items, Sq, Sk), on average where items differ.
        bounds: mask_mods.window_bounds of window_size and causal.
        longest: (Sq, Sk) at most.
        offsets: True if the kernel is given q_offset and k_offset.
        choose: choose(plan, facts, extents) may fill in another kernel, and then returns True.
        more: further fields of FlashFacts.
    """
    q, k, v, out = args[:4]
    score, sinks = args.score_mod, args.sinks
    checks.check_head_dims(plan.op, q, v)
    spec, plan.sms = device_arch(q.get_device())
    facts = FlashFacts(
        arch=spec.target,
        path=path_of(plan.op, spec),
        config=None,
        dtype=NAMES_OF_OPERANDS[q.dtype],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        window=WindowKind(*(bound is not None for bound in bounds)),
        softcap=args.softcap is not None,
        lse=args.return_lse,
        score=None if score is None else score.mod,
        sinks=None if sinks is None else NAMES[sinks.dtype],
        offsets=offsets,
        out_dtype=None if plan.out_dtype == q.dtype else NAMES[plan.out_dtype],
        **more,
    )
    views = tuple(view_of(plan, *named) for named in (("q", q), ("k", k), ("v", v), ("out", out)))
    plan.views = views if any(views) else ()
    scale = q.shape[-1] ** -0.5 if args.scale is None else args.scale
    left = right = None
    # No row is further than Sk from its first column or Sq from its last: so cut, positions and bounds add up in int32.
    if facts.blocks is None:
        limits = (MOST, MOST) if offsets else longest or extents[1:]
        left, right = (min(bound or 0, n) for bound, n in zip(bounds, reversed(limits), strict=True))
    plan.scalars = (*scalars_of(scale, args.softcap, score is not None), left, right)
    heads, rows, cols = extents
    sizes = Extents(heads, rows, cols, bounds[0], bounds[1], plan.sms)
    if choose is None or not choose(plan, facts, sizes):
        plan.facts = pick(facts, sizes)
        plan.function = families.function_for(plan.facts)
    elif plan.facts.family != FlashFacts.family:
        return
    plan.scalars += (None,)
    if plan.facts.path == "sm_90":
        plan.scalars += (plan.sms * plan.facts.config.ctas,)  # as many CTAs as run at once
        plan.takes_counter = True


def scalars_of(scale: float, softcap: float | None, score_mod: bool = False) -> tuple[float, float]:
    """Factors of the scores: the one before 2^x, and twice log2(e) scale / softcap, 0 without one.

    With a cap, scores are tanh(..) times it; what multiplies them before the cap is folded into the tanh's argument.
    A score_mod takes scaled scores: the second is then the scale.
    """
    if score_mod:
        return LOG2E, scale
    return (scale * LOG2E, 0.0) if softcap is None else (softcap * LOG2E, 2 * LOG2E * scale / softcap)


def path_of(op: str, spec: ArchSpec) -> str:
    """The family of kernels: the one forced, or the architecture's own."""
    path = forced_path() or spec.path
    if path == "sm_90" and spec.path != "sm_90":
        raise ValueError(f"{op}: {spec.name} has neither TMA nor WGMMA; its kernels are those of the sm_80 path")
    return path


def view_of(plan: CallPlan, name: str, tensor: torch.Tensor | None) -> Callable | None:
    """A function that copies or views a tensor whose strides the kernel does not support; None if it does."""
    if tensor is None:
        return None
    if not checks.tma_ready(tensor):
        plan.notes.append(
            f"{name} is copied: its last dimension is not contiguous, or its address or other strides are not "
            f"multiples of 16 bytes (strides {tensor.stride()})"
        )
        return _copied
    shape, stride = tensor.shape, tensor.stride()
    vector = 16 // tensor.element_size()
    if all(s % vector == 0 for s in stride[:-1]):
        return None
    fixed = (*(s if n > 1 else vector for n, s in zip(shape[:-1], stride[:-1], strict=True)), 1)
    return lambda t: t.as_strided(shape, fixed)  # dimensions of extent 1 may have any stride


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def without_kernel(plan: FlashPlan, reference: Callable, out, sinks=None):
    """(out, lse) by `reference`, which CPU tensors run; rows with nothing to attend to are zeros."""
    if plan.empty:  # rows with nothing to attend to
        result = torch.zeros(plan.out_shape, dtype=plan.out_dtype, device=plan.device)
        lse = empty_lse(plan.lse_shape, accumulator(plan.out_dtype), plan.device, sinks)
    else:
        result, lse = reference()
        result = result.to(plan.out_dtype)
    return result if out is None else out.copy_(result), lse


def empty_lse(shape: tuple, dtype: torch.dtype, device, sinks) -> torch.Tensor:
    """The LSE (B, H, Sq) or (H, total_q) of rows that see nothing: their sink, or -inf without sinks (H,)."""
    lse = torch.full(shape, -math.inf, dtype=dtype, device=device)
    return lse if sinks is None else lse.copy_(sinks.detach().view(-1, 1))
