"""The public ops on the emulator: inside of `on_emulator`, calls with CPU tensors take the way of a GPU's.

    with on_emulator("sm_90", sms=4):
        y = cute_kernels.gemm(a, b)          # planned for such a GPU, its kernels emulated

Plans are made for each call anew and not kept, kernels are kept as long as the process lives. Not for threads.
"""

import contextlib
from unittest import mock

from cute_kernels.runtime import device
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.call_plan import PlanCache

from .emulate import emulated, emulator


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
        patches = [
            mock.patch.object(KernelCache, "get", lambda _, facts, build: emulated(facts)),
            mock.patch.object(PlanCache, "known", lambda *_: None),
            mock.patch.object(PlanCache, "checked", _plan_anew(PlanCache.checked)),
        ]
        for patch in patches:
            stack.enter_context(patch)
        yield


def _plan_anew(checked):
    """PlanCache.checked without terms, so that it keeps nothing."""
    return lambda cache, op, terms, tensors, out, make: checked(cache, op, None, tensors, out, make)
