"""The public ops on the emulator: inside of `on_emulator`, calls with CPU tensors take the way of a GPU's.

    with on_emulator("sm_90", sms=4):
        y = cute_kernels.gemm(a, b)          # planned for such a GPU, its kernels emulated

Plans are made for each call anew and not kept, kernels are kept as long as the process lives. Not for threads.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch

import sparse_collective.family
import sparse_collective.row_pairs.family
import sparse_collective.row_pairs.tables_family
import sparse_collective.small_blocks.tables_family
from cute_kernels.epilogue_gradient import eager as epilogue_gradient
from cute_kernels.runtime import device
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.tf32_parts import eager as tf32_parts

from ..signatures import insist_on_arguments
from .emulate import emulated, emulator


class OnGpu:
    """A BsrMatrix that says to be on a GPU, to what asks it whether a kernel may make a table of it."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, W):
        self.matrix = W

    def __getattr__(self, name):
        return getattr(self.matrix, name)


class GpuTensor(torch.Tensor):
    """A CPU tensor that says to be on a GPU; what is made of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


@contextlib.contextmanager
def on_emulator(arch: str, sms: int = 4, path: str | None = None, **settings):
    """Inside the block ops run on an emulated GPU of architecture `arch` with `sms` multiprocessors.

    `path` forces a family of kernels, as cute_kernels.path does; `settings` are emulate.emulator's.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulator(sms=sms, **settings))
        stack.enter_context(device.assume(arch, sms))
        if path:
            stack.enter_context(device.path(path))
        stack.enter_context(mock.patch.object(KernelCache, "get", lambda _, facts, build: _checked(facts)))
        stack.enter_context(mock.patch.object(PlanCache, "known", lambda *_: None))
        stack.enter_context(mock.patch.object(PlanCache, "checked", _plan_anew(PlanCache.checked)))
        for module, name, kind in (
            (sparse_collective.family, "order_of", OnGpu),
            (sparse_collective.row_pairs.family, "order_of", OnGpu),
            (sparse_collective.row_pairs.tables_family, "_make", OnGpu),
            (sparse_collective.small_blocks.tables_family, "_make", OnGpu),
            (epilogue_gradient, "epilogue_gradient", lambda dy: dy.as_subclass(GpuTensor)),
            (tf32_parts, "side_by_side", lambda x: x.as_subclass(GpuTensor)),
            (tf32_parts, "along_k", lambda x: x.as_subclass(GpuTensor)),
        ):
            stack.enter_context(mock.patch.object(module, name, _called_with(getattr(module, name), kind)))
        yield


def _checked(facts):
    """The emulated kernel, which insists on what the compiled one would."""
    run = emulated(facts)

    def call(*arguments):
        insist_on_arguments(facts, arguments)
        return run(*arguments)

    return call


def _plan_anew(checked):
    """PlanCache.checked without terms, so that it keeps nothing."""
    return lambda cache, op, terms, *call: checked(cache, op, None, *call)


def _called_with(function, kind):
    """The function, with its first argument as one of a GPU."""
    return lambda first, *more: function(kind(first), *more)
