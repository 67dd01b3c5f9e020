"""explain: the kernel, configuration and path that a call selects, and why. inspect: the resources of that kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Literal, overload

import torch

from .fp8.quantized import Quantized, unpacked_arguments
from .runtime.device import assume
from .runtime.families import family_of

if TYPE_CHECKING:
    from .matmul.plan import Plan
    from .report import KernelReport

_PLANNERS: dict[Callable, Callable] = {}  # op -> the function that plans its calls


def explains(op, planner) -> None:
    """Register the function that plans calls of `op`, which the op itself uses."""
    _PLANNERS[op] = planner


def planner_of(op):
    """The function that plans calls of `op`; raises ValueError for an unknown op."""
    try:
        return _PLANNERS[op]
    except (KeyError, TypeError):
        known = ", ".join(sorted(o.__name__ for o in _PLANNERS))
        name = getattr(op, "__name__", type(op).__name__ if isinstance(op, torch.nn.Module) else op)
        hint = "; explain(..., backward=True) supports any module or function" if callable(op) else ""
        raise ValueError(f"cannot explain {name!r}; supported ops are {known}{hint}") from None


def bound_arguments(op, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """(args, kwargs) with Quantized operands unpacked; raises TypeError if they do not match the op's signature."""
    try:
        bound = signature(op).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op.__name__}(): {error}") from None
    if not any(type(value) is Quantized for value in bound.arguments.values()):
        return args, kwargs
    bound.arguments = unpacked_arguments(op.__name__, bound.arguments)
    return bound.args, bound.kwargs


@overload
def explain(op, *args, arch: str | None = None, backward: Literal[False] = False, **kwargs) -> Plan: ...


@overload
def explain(op, *args, arch: str | None = None, backward: Literal[True], **kwargs) -> TrainingPlan: ...


def explain(op, *args, arch: str | None = None, backward: bool = False, **kwargs) -> Plan | TrainingPlan:
    """Return the plan of `op(*args, **kwargs)` without running it; print it to read it.

    `plan.facts` holds path, architecture and configuration, `plan.notes` the reasons, including copies and slow
    fallbacks. Raises the errors of the call, except those for gradients and for an `out` that overlaps an operand,
    which are checked in each call.

    With `arch` the plan is made for another GPU, by the cost model: "sm_90" for an H100 or H200, "sm_80" for an A100,
    "sm_86" for an RTX 3090, "sm_89" for an RTX 4090. This needs no GPU: tensors may be on the CPU or on torch's "meta"
    device, and nothing is compiled. Without it, planning compiles the kernel unless a cache has it.

    Args:
        op: gemm, bsr_matmul, bsr_linear, bsr_gated_linear, bsr_grouped_linear, sddmm, attention or
            block_sparse_attention. With backward=True also an nn.Module or any function that calls these.
        args, kwargs: the arguments of the call.
        arch: the GPU to plan for; default that of the tensors.
        backward: True also plans the backward pass, for contiguous gradients of all outputs with respect to the
            tensors that require one, and returns a TrainingPlan. The call runs on fake tensors (torch's
            FakeTensorMode), and compiles and launches nothing.

    Raises:
        ValueError: the op is unknown, or with backward=True no output requires a gradient.

    Example:
        a, b = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
        print(explain(gemm, a, b, arch="sm_90"))
        print(explain(gemm, a, b, activation="gelu", arch="sm_90", backward=True))
    """
    if backward:
        return _with_backward(op, args, kwargs, arch)
    planner = planner_of(op)
    args, kwargs = bound_arguments(op, args, kwargs)
    if arch is None:
        return planner(*args, **kwargs)
    with assume(arch) as (spec, sms):
        plan = planner(*args, **kwargs)
        if plan.facts is not None:
            plan.notes.append(f"planned for {spec.name} with {sms} multiprocessors, by the cost model")
        return plan


@dataclass(frozen=True)
class TrainingPlan:
    """Plan of a call and its backward pass; print it to read it.

    Attributes:
        plan: the plan of the call, as without backward=True; None for a module or a user's function.
        forward: facts of the kernels that the call launches, in order. torch's own kernels are not listed.
        backward: facts of the kernels that the backward pass launches, in order.

    `cute_kernels.report.report_of_kernel(facts)` compiles one of them and reads its machine code, as `inspect` does.
    """

    plan: Plan | None
    forward: tuple
    backward: tuple

    def __str__(self) -> str:
        lines = [] if self.plan is None else [str(self.plan)]
        parts = [("backward", self.backward)]
        if self.plan is None or len(self.forward) > 1:
            parts.insert(0, ("forward", self.forward))
        for name, kernels in parts:
            count = f"{len(kernels)} kernel{'' if len(kernels) == 1 else 's'}" if kernels else "no kernel, torch only"
            lines.append(f"{name}: {count}")
            lines += [f"  {i}. {f.family}: {family_of(f).title(f)}" for i, f in enumerate(kernels, 1)]
        return "\n".join(lines)

    __repr__ = __str__


def _with_backward(op, args: tuple, kwargs: dict, arch: str | None) -> TrainingPlan:
    """The plan of a call and its backward pass."""
    from .first_call import collected_call, target_gpu

    if not callable(op):
        planner_of(op)  # raises
    plan = None
    if not isinstance(op, torch.nn.Module) and op in _PLANNERS:
        plan = explain(op, *args, arch=arch, **kwargs)
    kernels, forward = collected_call("explain", op, args, kwargs, True, target_gpu("explain", arch))
    return TrainingPlan(plan, tuple(kernels.launches[:forward]), tuple(kernels.launches[forward:]))


def inspect(op, *args, arch: str | None = None, **kwargs) -> KernelReport:
    """Compile the kernel of `op(*args, **kwargs)`, with its epilogue or mask, and read its machine code.

    Nothing is launched. With `arch`, as in `explain`, no GPU is needed, and tensors may be on the CPU or on torch's
    "meta" device. Without it, the kernel is that of the tensors' GPU. Raises the errors of `explain`, and ValueError
    for a call that runs no kernel.

    Returns:
        Registers, spills, shared memory, instruction counts and problems; `.sass`, `.ptx` and `.cubin` are the code.

    Example:
        a = b = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
        report = inspect(gemm, a, b, epilogue=torch.sigmoid, arch="sm_90")
        print(report)
        print(report.sass)
    """
    from .report import report_of_kernel

    plan = explain(op, *args, arch=arch, **kwargs)
    if plan.facts is None:
        why = "its result is empty" if plan.empty else 'no tensor is on a GPU; name one, such as arch="sm_90"'
        raise ValueError(f"inspect: this call of {plan.op} runs no kernel: {why}")
    return report_of_kernel(plan.facts)
