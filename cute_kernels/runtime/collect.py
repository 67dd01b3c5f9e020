"""Collects the kernels of a program without launching or compiling one: the program runs on fake tensors, and each
registered op runs its host code, which plans the call and gets a function that does nothing.

Registered ops run as in an eager call, apart from their operands: floating-point tensors are fake. Integer tensors
(indices of blocks, lengths) that exist are real, because heuristics read statistics of a pattern.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from .device import Assumed, Collected, assume, collecting
from .library import IMPLEMENTATIONS
from .torch_compat import (
    TorchDispatchMode,
    fake_tensor,
    fake_tensor_mode,
    tree_leaves,
    tree_map,
    without_modes,
    writes_an_argument,
)


class Collector(TorchDispatchMode):
    """A mode inside FakeTensorMode that runs the host code of registered ops.

    `leaves` are the tensors with requires_grad that operations have read, with their gradients before.
    """

    def __init__(self, fakes) -> None:
        super().__init__()
        self.fakes = fakes
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.inside = False  # True while an op's host code runs, which makes tables of real tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in tensors:
            if t.requires_grad and t.is_leaf:
                self.leaves.setdefault(id(t), (t, t.grad))
        run = IMPLEMENTATIONS.get(func)
        if run is not None:
            inputs, named = tree_map(self.without_values, (args, kwargs))
            inside, self.inside = self.inside, True
            try:
                with without_modes(), self, torch.no_grad():
                    run(*inputs, **named)
            finally:
                self.inside = inside
        elif not self.inside and writes_an_argument(
            func
        ):  # FakeTensorMode writes to scalars with memory, such as a counter of batches
            args, kwargs = tree_map(self.fake, (args, kwargs))
        return func(*args, **kwargs)

    def without_values(self, value):
        """The fake tensor in the place of a floating-point tensor; anything else unchanged."""
        return self.fake(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def fake(self, value):
        return fake_tensor(self.fakes, value) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def collect(gpu: Assumed) -> Iterator[tuple[Collected, Collector]]:
    """Context manager in which calls on any device are planned for `gpu`; yields (facts of their kernels, the mode).

    The backward pass must run inside it, too. It runs in the calling thread, and gradients are restored at the end.
    """
    fakes = fake_tensor_mode()
    collector = Collector(fakes)
    with (
        warnings.catch_warnings(),
        torch.autograd.set_multithreading_enabled(False),
        assume(gpu.spec.name, gpu.sms),
        collecting() as facts,
        fakes,
        collector,
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            yield facts, collector
        finally:
            for leaf, gradient in collector.leaves.values():
                leaf.grad = gradient
