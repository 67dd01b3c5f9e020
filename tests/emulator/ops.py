"""The public ops on the emulator: inside of `on_emulator`, calls with CPU tensors take the way of a GPU's.

    with on_emulator("sm_90", sms=4):
        y = cute_kernels.gemm(a, b)          # planned for such a GPU, its kernels emulated

Plans are made for each call anew and not kept, kernels are kept as long as the process lives. Not for threads.
"""

import contextlib
import shutil
from unittest import mock

import pytest
import torch

from cute_kernels.epilogue_gradient import dispatch as epilogue_gradient
from cute_kernels.runtime import device
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.tf32 import dispatch as tf32

from ..signatures import insist_on_arguments
from .emulate import COMPILER, emulated, emulator

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)")


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
        for module, name in (
            (epilogue_gradient, "epilogue_gradient"),
            (tf32, "side_by_side"),
            (tf32, "along_k"),
        ):
            stack.enter_context(mock.patch.object(module, name, _called_on_gpu(getattr(module, name))))
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


def _called_on_gpu(function):
    """The function, with its first argument as one of a GPU."""
    return lambda first, *more: function(first.as_subclass(GpuTensor), *more)
