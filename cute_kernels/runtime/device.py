"""The target of a call: its GPU, a path forced by the caller, or an assumed GPU."""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..annotations import Path
from ..arch import PATHS, ArchSpec, arch_named, arch_of

MULTIPROCESSORS = {"sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90": 132}  # of A100, RTX 3090, RTX 4090, H100 and H200

_FORCED: contextvars.ContextVar[str | None] = contextvars.ContextVar("cute_kernels_path", default=None)
forced_path = _FORCED.get


@contextlib.contextmanager
def path(name: Path):
    """Context manager that forces a kernel path: "sm_80" (mma.sync, cp.async) or "sm_90" (WGMMA, TMA).

    The sm_80 kernels also run on newer GPUs, compiled for them. A call that the path does not support raises.

    Example:
        with path("sm_80"):
            d = gemm(a, b)
    """
    if name not in PATHS:
        raise ValueError(f"unknown path {name!r}; known are {', '.join(PATHS)}")
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


def in_forwards_path(backward):
    """Decorator of an autograd function's backward that restores the path in `ctx.path`, set by forward.

    Autograd runs the backward of CUDA tensors in its own threads, which do not have the caller's `path`. (Ops of a
    compiled backward use the GPU's default path.)
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        if ctx.path is None or ctx.path == forced_path():
            return backward(ctx, *gradients)
        with path(ctx.path):
            return backward(ctx, *gradients)

    return run


class Assumed(NamedTuple):
    """A GPU to plan for, which need not be present."""

    spec: ArchSpec
    sms: int


_ASSUMED: contextvars.ContextVar[Assumed | None] = contextvars.ContextVar("cute_kernels_assumed", default=None)
assumed = _ASSUMED.get


@contextlib.contextmanager
def assume(arch: str, sms: int | None = None):
    """Context manager in which planners plan tensors of any device for this GPU, without compiling.

    For planners only, which do not cache plans: an op called inside would launch a kernel that was not compiled.
    """
    spec = arch_named(arch)
    gpu = Assumed(spec, sms or MULTIPROCESSORS[spec.name])
    token = _ASSUMED.set(gpu)
    try:
        yield gpu
    finally:
        _ASSUMED.reset(token)


class Collected(dict):
    """Facts of requested kernels, as keys. `launches`: facts of the kernels that calls would launch, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list = []

    def function(self, facts: Any) -> Callable:
        """Note a request; the function notes a launch."""
        self[facts] = None
        return lambda *_: self.launches.append(facts)


_COLLECTED: contextvars.ContextVar[Collected | None] = contextvars.ContextVar("cute_kernels_collected", default=None)
collected = _COLLECTED.get


@contextlib.contextmanager
def collecting():
    """Context manager in which requested kernels are noted, and neither compiled nor launched; yields a Collected.
    Plans are not cached."""
    facts = Collected()
    token = _COLLECTED.set(facts)
    try:
        yield facts
    finally:
        _COLLECTED.reset(token)


def plans_kernel(device: torch.device) -> bool:
    """True if calls with tensors on this device run a kernel; other calls run the torch reference."""
    return device.type == "cuda" or assumed() is not None


def device_arch(index: int) -> tuple[ArchSpec, int]:
    """Return the architecture and the number of multiprocessors of a CUDA device, or of the assumed one."""
    if (gpu := assumed()) is not None:
        return gpu
    return _device_arch(index)


@functools.cache
def _device_arch(index: int) -> tuple[ArchSpec, int]:
    properties = torch.cuda.get_device_properties(index)
    return arch_of((properties.major, properties.minor)), properties.multi_processor_count
