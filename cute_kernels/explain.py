"""explain: which kernel, configuration and path a call takes, and why. inspect: what that kernel costs."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING

from .quantized import Quantized, unpacked_arguments
from .runtime.device import assume, assumed

if TYPE_CHECKING:
    from .matmul.plan import Plan
    from .report import KernelReport

_PLANNERS = {}


def explains(op, planner) -> None:
    """Register the function that plans `op`'s calls: the one the op itself uses."""
    _PLANNERS[op] = planner


def planner_of(op):
    """The function that plans `op`'s calls; ValueError with the known ops if there is none."""
    try:
        return _PLANNERS[op]
    except (KeyError, TypeError):
        known = ", ".join(sorted(o.__name__ for o in _PLANNERS))
        raise ValueError(f"cannot explain {getattr(op, '__name__', op)!r}; known are {known}") from None


def bound_arguments(op, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """(args, kwargs) with quantized operands unpacked; TypeError, with the op's own name, if it does not take them."""
    try:
        bound = signature(op).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op.__name__}(): {error}") from None
    if not any(type(value) is Quantized for value in bound.arguments.values()):
        return args, kwargs
    bound.arguments = unpacked_arguments(op.__name__, bound.arguments)
    return bound.args, bound.kwargs


def explain(op, *args, arch: str | None = None, **kwargs) -> Plan:
    """The plan of `op(*args, **kwargs)`, without running it; print it to read it.

    Its `facts` hold path, architecture and configuration, `notes` the reasons and every slower way taken. Raises what
    the call would raise, but for gradients and an `out` that overlaps an operand, which are looked at in each call.

    With `arch`, such as "sm_90", the plan is the one that an H100 or H200 (sm_90), A100 (sm_80), RTX 3090 (sm_86) or
    RTX 4090 (sm_89) would make, by the cost model alone. That needs no GPU: tensors may be on the CPU or on torch's
    "meta" device, and nothing is compiled. Without it, planning compiles the kernel if no cache has it.
    """
    planner = planner_of(op)
    args, kwargs = bound_arguments(op, args, kwargs)
    if arch is None:
        return planner(*args, **kwargs)
    with assume(arch):
        plan = planner(*args, **kwargs)
        if plan.facts is not None:
            spec, sms = assumed()
            plan.notes.append(f"planned for {spec.name} with {sms} multiprocessors, by the cost model alone")
        return plan


def inspect(op, *args, arch: str | None = None, **kwargs) -> KernelReport:
    """Compile the kernel of `op(*args, **kwargs)`, with its epilogue or mask, and read its machine code.

    Nothing is launched. `arch` is as in `explain`: with it, no GPU is needed, and tensors may be on the CPU or on
    torch's "meta" device; without it, the kernel is the one that the tensors' own GPU runs. Raises what `explain`
    raises, and ValueError for a call that takes no kernel.
    """
    from .report import report_of_kernel  # which imports what draws tables

    plan = explain(op, *args, arch=arch, **kwargs)
    if plan.facts is None:
        why = "its result is empty" if plan.empty else 'no tensor is on a GPU; name one, such as arch="sm_90"'
        raise ValueError(f"inspect: this call of {plan.op} takes no kernel: {why}")
    return report_of_kernel(plan.facts)
