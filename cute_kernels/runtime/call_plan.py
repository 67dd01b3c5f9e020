"""Plan cache: the decisions of an op, cached by the metadata of the call's tensors.

An op calls `PlanCache.known`, and on a miss `PlanCache.checked`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from .. import checks
from ..overlap import extent
from .device import collected
from .front import check_plain
from .torch_compat import TensorGuards, current_device, empty_on_cuda, increment_version

MOST_PLANS = 8192  # per op: a bound for programs whose shapes never repeat
MOST_APART = 64  # distances of interleaved views per plan
MOST_RECENT = 8  # plans with the same terms, compared one after another, 0.15 us each


@dataclass(repr=False)
class CallPlan:
    """All that a call needs besides tensors and scalars. It depends on metadata, never on contents or addresses.

    `function` is None if no kernel runs: CPU tensors use the torch reference, and empty results need none.
    """

    op: str
    out_shape: tuple
    out_dtype: torch.dtype
    device: torch.device
    function: Any = None  # a Callable, or None
    facts: Any = None  # kernel parameters
    notes: list[str] = field(default_factory=list)
    views: tuple = ()  # per tensor of the call: None, or a function that returns the kernel's view
    empty: bool = False  # nothing to compute
    # For a call with out: extents in bytes of out, negated, and of three operands; (index, bytes) of each tensor after
    # out; and the (index, bytes from it to out) that do not overlap although their extents do.
    spans: tuple = ()

    @cached_property
    def out_layout(self) -> tuple:
        """Arguments of `new` for a contiguous output."""
        return layout_of(self.out_shape, self.out_dtype)

    @cached_property
    def cuda_index(self) -> int | None:
        """Index of the CUDA device if empty_on_cuda supports it, else None."""
        return self.device.index if self.device.type == "cuda" and empty_on_cuda is not None else None

    def new(self, shape: tuple, stride: tuple, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor on the plan's device; shape and stride are plain tuples."""
        # Without a driver, current_device() raises; it is only called for a CUDA plan.
        if self.cuda_index is not None and self.cuda_index == current_device():
            return empty_on_cuda(shape, stride, dtype)
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def new_out(self) -> torch.Tensor:
        return self.new(*self.out_layout)

    def kernel_lines(self) -> list[str]:
        """Description of the kernel, as lines of text."""
        return [f"configuration: {self.facts.config}"]

    def instead(self) -> str:
        """Description of a call without a kernel."""
        return "none, nothing to compute" if self.empty else "none, CPU tensors run the reference"

    def __str__(self) -> str:
        lines = [f"{self.op} -> {tuple(self.out_shape)} {self.out_dtype} on {self.device}"]
        if self.facts is None:
            lines.append(f"kernel: {self.instead()}")
        else:
            lines += [f"path: {self.facts.path}, compiled for {self.facts.arch}", *self.kernel_lines()]
        return "\n  ".join(lines + self.notes)

    __repr__ = __str__


def layout_of(shape: Sequence[int], dtype: torch.dtype) -> tuple:
    """(shape, strides, dtype) of a contiguous tensor."""
    return tuple(shape), torch.empty(shape, device="meta").stride(), dtype


Plan = TypeVar("Plan", bound=CallPlan)


class PlanCache(Generic[Plan]):
    """Plans of an op, cached by `terms` and the metadata of `tensors`: two or three operands, `out` unless it is None,
    and further tensors.

    terms: a hashable value of everything else that a plan depends on, including which tensors are passed; None if it
    cannot be computed.

    A caller that gets a plan writes to out. The cache increments out's version, like torch's in-place operations, so
    that autograd detects when a kernel overwrites a saved tensor.
    """

    def __init__(self, operands: int = 2):
        self.operands, self.three = operands, operands == 3
        self.plans: dict[tuple | None, Plan] = {}
        self.recent: dict[tuple | None, list] = {}  # terms -> a few of (test of tensors, one requires grad, plan)

    def known(self, terms: tuple | None, tensors: tuple, out) -> Plan | None:
        """The cached plan of a call with the same terms and metadata, or None.

        A plan is returned only if out overlaps no other tensor, by comparing extents: out must end before the other
        tensor begins, or begin after its end.
        """
        try:
            a, b = tensors[0].data_ptr(), tensors[1].data_ptr()
            c = tensors[2].data_ptr() if self.three else b
            d = 0 if out is None else out.data_ptr()
            if (a | b | c | d) & 15:
                terms = terms, a & 15, b & 15, c & 15, d & 15
            for tensor in tensors[self.operands :]:  # operands were checked before; the test aborts for nested tensors
                if tensor.is_nested:
                    return None
            for test, differentiable, plan in self.recent.get(terms, ()):
                if test(*tensors):
                    if out is not None:
                        before, (end_a, end_b, end_c), others, apart = plan.spans
                        if (
                            (before < d - a < end_a and (0, d - a) not in apart)
                            or (before < d - b < end_b and (1, d - b) not in apart)
                            or (before < d - c < end_c and (2, d - c) not in apart)
                        ):
                            break
                        for i, end in others:
                            if before < (away := d - tensors[i].data_ptr()) < end and (i, away) not in apart:
                                return None
                    if differentiable and torch.is_grad_enabled():
                        break
                    if out is not None:
                        increment_version((out,))
                    return plan
        except (AttributeError, IndexError, TypeError, RuntimeError):  # unhashable terms, not a tensor, a sparse tensor
            pass
        return None

    def checked(
        self, op: str, terms: tuple | None, tensors: tuple, out, make: Callable[[], Plan], residual=None
    ) -> Plan:
        """The plan of any call: a cached one, or `make()`, which checks everything except gradients and overlap.

        residual: the tensor that out may be identical to.

        Raises:
            front.NeedsDispatcher: only the registered op supports the call.
        """
        operands = tensors[: self.operands]
        caches = collected() is None
        if caches:
            check_plain(op, tensors)
        try:
            at = [0 if t is None else t.data_ptr() & 15 for t in (*(*operands, operands[-1])[:3], out)]
            terms = (terms, *at) if terms and any(at) else terms
            key = (terms, *(_metadata(t) for t in tensors)) if terms and caches else None
            plan = None if key is None else self.plans.get(key)
        except (AttributeError, IndexError, TypeError, RuntimeError):
            key = plan = None  # `make` raises the error
        if plan is None:
            plan = make()
        checks.check_no_grad(op, *(t for t in tensors if t is not out))
        if out is not None and caches:
            checks.check_out(op, out, (*operands, *tensors[self.operands + 1 :]), residual)
            plan.spans = spans_of(out, tensors, self.operands, plan.spans)
        if key is not None:
            if max(len(self.plans), len(self.recent)) >= MOST_PLANS:
                self.plans.clear()
                self.recent.clear()
            self.plans[key] = plan
            recent = self.recent.setdefault(terms, [])
            if not any(test(*tensors) for test, *_ in recent):
                recent.insert(0, (test_of(tensors), any(t.requires_grad for t in tensors), plan))
                del recent[MOST_RECENT:]
        if out is not None:
            increment_version((out,))
        return plan


def _metadata(t: torch.Tensor) -> tuple:
    return type(t), t.shape, t.stride(), t.dtype, t.device


def test_of(tensors: tuple) -> Callable:
    """Return a function of as many tensors that is True if their metadata and requires_grad equal those of `tensors`.

    torch's TensorGuards does in one C++ call what takes twenty attribute accesses in Python. It rejects duplicates.
    """
    if TensorGuards is None:
        known = [(*_metadata(t), t.requires_grad) for t in tensors]
        return lambda *others: [(*_metadata(t), t.requires_grad) for t in others] == known
    first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    places = sorted(first.values())
    test = TensorGuards(*(tensors[i] for i in places), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if len(places) == len(tensors):
        return test
    twice = [(i, first[id(t)]) for i, t in enumerate(tensors)]
    return lambda *others: all(others[i] is others[j] for i, j in twice) and test(*[others[i] for i in places])


def spans_of(out: torch.Tensor, tensors: tuple, at: int, known: tuple) -> tuple:
    """CallPlan.spans after a call in which out, tensor `at`, overlaps no other tensor; known: the previous spans."""
    before = -extent(out)
    ends = [extent(t) or before for t in tensors] if before else [0] * len(tensors)
    away = {(i, out.data_ptr() - t.data_ptr()) for i, t in enumerate(tensors) if i != at}
    apart = known[-1] if known and len(known[-1]) < MOST_APART else set()
    apart = apart | {(i, d) for i, d in away if before < d < ends[i]}
    operands = ends[:at] if at > 2 else [*ends[:at], before]
    return before, operands, list(enumerate(ends))[at + 1 :], apart
