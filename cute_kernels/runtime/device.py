"""Which kernels a call may take: those of its GPU, or of the path that the caller forces."""

import contextlib
import contextvars
import functools

import torch

from ..arch import PATHS, ArchSpec, arch_of

_FORCED: contextvars.ContextVar[str | None] = contextvars.ContextVar("cute_kernels_path", default=None)
forced_path = _FORCED.get


@contextlib.contextmanager
def path(name: str):
    """Force a family of kernels inside the block: "sm_80" (mma.sync, cp.async) or "sm_90" (WGMMA, TMA).

    The sm_80 kernels run on newer GPUs too, compiled for them. A call that the named path cannot serve raises.
    """
    if name not in PATHS:
        raise ValueError(f"unknown path {name!r}; there are {', '.join(PATHS)}")
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


@functools.cache
def device_arch(index: int) -> tuple[ArchSpec, int, str]:
    """(architecture, multiprocessors, name) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return arch_of((properties.major, properties.minor)), properties.multi_processor_count, properties.name
