"""From the tensors of an attention op to the kernel that runs: planned once per metadata, then looked up.

Every op goes the same way: its own checks, `checked_plan`, `plan_kernel` where there is a GPU, and in each call
`launch`, or `without_kernel` where no kernel is needed. Its `Plans` keep the plans.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from cute_kernels import checks as common
from cute_kernels.arch import ArchSpec
from cute_kernels.dtypes import NAMES
from cute_kernels.runtime import families
from cute_kernels.runtime.device import device_arch, forced_path, plans_kernel
from cute_kernels.runtime.workspace import zeros

from . import checks
from .forward.choose import Extents, pick
from .forward.config import FlashFacts, WindowKind

try:
    from torch._C._dynamo.guards import TensorGuards  # torch.compile's: has a tensor changed?
except ImportError:  # a torch that moved it: calls take 2 us longer
    TensorGuards = None

LOG2E = 1.4426950408889634
_MOST_PLANS = 8192  # of an op: a bound for programs whose shapes never repeat
_MOST_RECENT = 8  # plans with the same terms, compared one after another, 0.15 us each


@dataclass
class FlashPlan:
    """What a call runs. `function` is None for CPU tensors and for results that need no kernel."""

    op: str
    out_shape: tuple
    lse_shape: tuple
    dtype: torch.dtype
    device: torch.device
    scalars: tuple = ()  # the function's last arguments
    more: tuple = (None, None, None)  # those after LSE, of a call that gives none: cu_seqlens_q, cu_seqlens_k, blocks
    takes_counter: bool = False  # after those; None of a schedule that is not dynamic
    function: Callable | None = None
    facts: FlashFacts | None = None
    notes: list[str] = field(default_factory=list)
    views: tuple = ()  # of q, k, v and out: None, or what makes the kernel's tensor of it
    order: tuple = ()  # of block masks: query rows of a tile, heads whose tiles come together
    spans: tuple = (0, 0, 0, 0)  # bytes of q, k, v and, negative, of out, 1 where they have gaps; for calls with out
    empty: bool = False  # no row, or nothing to attend to

    @cached_property
    def out_stride(self) -> tuple:
        """Contiguous. torch.empty_strided takes less of the host's time than torch.empty, 0.3 us."""
        return torch.empty(self.out_shape, device="meta").stride()

    def __str__(self) -> str:
        lines = [f"{self.op} -> {self.out_shape} {self.dtype} on {self.device}"]
        if self.facts is None:
            lines.append("kernel: none, " + ("nothing to compute" if self.empty else "CPU tensors run the reference"))
        else:
            f = self.facts
            lines.append(f"path: {f.path}, compiled for {f.arch}")
            lines.append(f"configuration: {f.config}, head_dim {f.head_dim}, of v {f.head_dim_v}, {f.window}")
        return "\n  ".join(lines + self.notes)


class Plans:
    """The plans of one op, by `terms` and by the metadata of `tensors`: q, k, v, out unless it is None, and others.

    Terms are hashable, hold all else that a plan depends on, and say which tensors there are; None where there are
    none to be had. A call asks for `known`, and only where that has nothing for `checked`.
    """

    def __init__(self):
        self._plans: dict[tuple, FlashPlan] = {}
        self._recent: dict[tuple, list] = {}  # terms -> the latest few plans, each with a test of tensors

    def known(self, terms: tuple | None, tensors: tuple, out) -> FlashPlan | None:
        """The plan of an earlier call that differs in nothing that is checked; None where there may be none.

        Then q, k, v and out begin at multiples of 16 bytes, and out meets none of the others: it would if it began
        before the other's end, but not so far before it that out ended where the other begins.
        """
        try:
            for test, plan in self._recent.get(terms, ()):
                if test(*tensors):
                    q, k, v = tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr()
                    o = 0 if out is None else out.data_ptr()
                    end_q, end_k, end_v, before = plan.spans
                    meet = before < o - q < end_q or before < o - k < end_k or before < o - v < end_v
                    return None if meet or (q | k | v | o) & 15 else plan
        except (AttributeError, TypeError, RuntimeError):  # terms without a hash, what is no tensor, a sparse one
            pass
        return None

    def checked(self, op: str, terms: tuple | None, tensors: tuple, out, make: Callable) -> FlashPlan:
        """The plan of any call: one that is kept, or `make()`, which checks all but gradients and overlap."""
        try:
            offsets = tuple(t.data_ptr() & 15 for t in tensors[: 3 if out is None else 4])
            key = terms and (terms, offsets, *(_metadata(t) for t in tensors))
            plan = self._plans.get(key)
        except (AttributeError, TypeError, RuntimeError):
            key = plan = None  # `make` will say what is wrong
        if plan is None:
            plan = make()
        common.check_no_grad(op, *tensors[:3])
        if out is not None:
            common.check_out(op, out, *tensors[:3])
        if key is not None:
            if max(len(self._plans), len(self._recent)) >= _MOST_PLANS:
                self._plans.clear()
                self._recent.clear()
            self._plans[key] = plan
            recent = self._recent.setdefault(terms, [])
            usual = not any(offsets) and not any(t.requires_grad for t in tensors)
            if usual and not any(test(*tensors) for test, _ in recent):
                recent.insert(0, (_test_of(tensors), plan))
                del recent[_MOST_RECENT:]
        return plan


def _metadata(t: torch.Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype, t.device


def _test_of(tensors: tuple) -> Callable:
    """A function of as many tensors: whether they have the metadata of these, and none requires a gradient.

    torch's own is one call in C++ for what takes twenty attributes in Python. It is False of tensors given twice.
    """
    if TensorGuards is not None and len({id(t) for t in tensors}) == len(tensors):
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    known = [_metadata(t) for t in tensors]
    return lambda *others: [_metadata(t) for t in others] == known and not any(t.requires_grad for t in others)


def spans_of(q, k, v, out) -> tuple:
    """FlashPlan.spans of tensors."""
    *sizes, size = (max(common.dense_bytes(t), 1) for t in (q, k, v, out))
    return *sizes, -size


def checked_plan(op: str, q, k, v, out_shape, lse_shape, columns: int, softcap, scale, return_lse, out) -> FlashPlan:
    """The plan of a call, without a kernel; checks its scalars and out. `columns`: how many a row may see."""
    checks.check_scale(op, scale, softcap)
    if not isinstance(return_lse, bool):
        raise TypeError(f"{op}: return_lse must be True or False, got {return_lse!r}")
    plan = FlashPlan(op, out_shape, lse_shape, q.dtype, q.device)
    if out is not None:
        checks.check_out(op, out, plan.out_shape, q.dtype, q.device, (q, k, v))
        plan.spans = spans_of(q, k, v, out)
    plan.empty = 0 in plan.out_shape or columns == 0
    return plan


def has_kernel(tensor: torch.Tensor) -> bool:
    """Whether a call with this tensor takes a kernel."""
    return plans_kernel(tensor.device)


def plan_kernel(
    plan: FlashPlan, q, k, v, out, *, extents, bounds, softcap, scale, lse: bool, longest=None, choose=None, **more
) -> None:
    """Fill in the kernel: which facts, how it views the tensors, its scalars and its function.

    `extents` are (heads of all items, Sq, Sk), on average where items differ, and `longest` is (Sq, Sk) at
    most; `bounds` are mask_mods.window_bounds' (left, right) of a window; `more` further fields of FlashFacts.
    `choose(plan, facts, sms)` may fill in another kernel, and then returns True.
    """
    checks.check_head_dims(plan.op, q, v)
    spec, sms, _ = device_arch(q.get_device())
    facts = FlashFacts(
        arch=spec.target,
        path=path_of(plan.op, spec),
        config=None,
        dtype=NAMES[q.dtype],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        window=WindowKind(*(bound is not None for bound in bounds)),
        softcap=softcap is not None,
        lse=lse,
        **more,
    )
    views = tuple(view_of(plan, *named) for named in (("q", q), ("k", k), ("v", v), ("out", out)))
    plan.views = views if any(views) else ()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # With a cap, scores are tanh(..) times it; what multiplies them before the cap is folded into the tanh's argument.
    scale_log2, cap = (scale * LOG2E, 0.0) if softcap is None else (softcap * LOG2E, 2 * LOG2E * scale / softcap)
    left = right = None
    # No row is further than Sk from its first column or Sq from its last: so cut, positions and bounds add up in int32.
    if facts.blocks is None:
        left, right = (min(bound or 0, n) for bound, n in zip(bounds, reversed(longest or extents[1:]), strict=True))
    plan.scalars = (scale_log2, cap, left, right)
    if choose is not None and choose(plan, facts, sms):
        return
    plan.facts = pick(facts, Extents(*extents, *bounds, sms))
    if facts.path == "sm_90":
        plan.scalars += (sms * plan.facts.config.ctas,)  # as many CTAs as run at once
        plan.takes_counter = True
    plan.function = families.function_for(plan.facts)


def path_of(op: str, spec: ArchSpec) -> str:
    """The family of kernels: the one forced, or the architecture's own."""
    path = forced_path() or spec.path
    if path == "sm_90" and spec.path != "sm_90":
        raise ValueError(f"{op}: {spec.name} has neither TMA nor WGMMA; its kernels are those of the sm_80 path")
    return path


def view_of(plan: FlashPlan, name: str, tensor: torch.Tensor | None) -> Callable | None:
    """What makes the kernel's tensor of one whose strides it does not take; None where it takes them."""
    if tensor is None:
        return None
    if not checks.tma_ready(tensor):
        plan.notes.append(f"{name} is copied: its address and strides {tensor.stride()} are not multiples of 16 bytes")
        return _copied
    shape, stride = tensor.shape, tensor.stride()
    if all(s % 8 == 0 for s in stride[:-1]):
        return None
    fixed = (*(s if n > 1 else 8 for n, s in zip(shape[:-1], stride[:-1], strict=True)), 1)
    return lambda t: t.as_strided(shape, fixed)  # dimensions of extent 1 may have any stride


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def launch(plan: FlashPlan, q, k, v, out, more: tuple | None = None) -> tuple:
    """Run the plan's kernel; returns (out, lse), lse None where none is asked for.

    more: the kernel's arguments after LSE; FlashPlan.more where it is None.
    """
    more = plan.more if more is None else more
    if out is None:
        out = torch.empty_strided(plan.out_shape, plan.out_stride, dtype=plan.dtype, device=plan.device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=plan.device) if plan.facts.lse else None
    if plan.takes_counter:
        more = *more, zeros(plan.device, 1, torch.int32) if plan.facts.config.dynamic else None
    if plan.views:
        q, k, v, d = (t if view is None else view(t) for t, view in zip((q, k, v, out), plan.views, strict=True))
        plan.function(q, k, v, d, lse, *more, *plan.scalars)
    else:
        plan.function(q, k, v, out, lse, *more, *plan.scalars)
    return out, lse


def without_kernel(plan: FlashPlan, reference: Callable, out):
    """(out, lse) by `reference`, which CPU tensors run; rows with nothing to attend to are zeros."""
    if plan.empty:
        result = torch.zeros(plan.out_shape, dtype=plan.dtype, device=plan.device)
        lse = torch.full(plan.lse_shape, -math.inf, dtype=torch.float32, device=plan.device)
    else:
        result, lse = reference()
    return result if out is None else out.copy_(result), lse
