"""A cache of tensors derived from other tensors, safe across streams and CUDA graph captures.

A cache is an attribute of its owner (a BsrMatrix, a BlockMask, FlexAttention's mask), or belongs to a tensor
(`of_tensor`) and has its lifetime.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .graphs import lasting_memory
from .torch_compat import (
    DisableFuncTorch,
    functorch_active,
    in_graph_trace,
    is_transformed,
    raw_stream,
)

MOST = 64  # values per owner, besides pinned ones


class Entry(NamedTuple):
    """A cached value."""

    value: Any
    state: Any
    number: int | None  # handle of the stream that it was computed on
    done: Any  # torch.cuda.Event recorded on that stream after the computation; None if it was on the CPU
    pinned: bool = False  # returned during a capture; a CUDA graph reads its tensors at each replay


class Derived:
    """Cached values by key, with the lifetime of this object.

    `facts` holds further data of the owner. A copy of the owner, or a pickle, has None instead of this object.

    At most `most` values are cached, and the oldest is evicted first. Values that were returned during a CUDA graph
    capture are pinned: they are neither evicted nor written to, and live as long as this object, even if a newer value
    replaces them.

    Thread-safe: several threads may compute the same value at once, and one result is cached.
    """

    __slots__ = ("facts", "kept", "most", "replaced")

    def __init__(self, most: int = MOST):
        self.kept: dict[Any, Entry] = {}
        self.replaced: tuple = ()  # pinned values whose key has a newer value
        self.most = most
        self.facts: Any = None

    def __reduce__(self) -> tuple:
        return type(None), ()

    def get(self, key, source: torch.Tensor, make: Callable, tensors_of: Callable, state=()):
        """Return `make()`, cached under `key`, and recomputed if `state` differs; with state None nothing is cached.

        Args:
            source: one of the tensors that the value is derived from (is_cuda takes 0.05 us, a device's type 0.25).
            tensors_of: value -> its tensors, for record_stream.

        Under FakeTensorMode and make_fx nothing is looked up or cached. Inside a torch.func transform, and in inference
        mode, values are computed from plain tensors, so that later calls outside can use them.

        During a CUDA graph capture, a missing value becomes part of the graph and is not cached. A cached one was
        complete before, since torch.cuda.graph synchronizes. Other streams wait for the stream that computed the value,
        and its memory is not reused before they have finished with it.
        """
        if state is None or in_graph_trace():
            return plain_result(source, make)
        found = self.kept.get(key)
        if found is not None and found.state == state:
            if source.is_cuda:
                here = found.number == raw_stream(source.get_device())
                if not (here and found.pinned):
                    if torch.cuda.is_current_stream_capturing():  # a capture must not wait for outside work
                        self.kept[key] = found._replace(pinned=True)
                    elif not here:
                        stream = torch.cuda.current_stream(source.device)
                        stream.wait_event(found.done)
                        for tensor in tensors_of(found.value):
                            tensor.record_stream(stream)
            return found.value
        if captured(source):
            return plain_result(source, make)
        with lasting_memory(source.device):
            value = plain_result(source, make)
        number = done = None
        if source.is_cuda:
            stream = torch.cuda.current_stream(source.device)
            number, done = stream.cuda_stream, stream.record_event()
        self._keep(key, Entry(value, state, number, done))
        return value

    def _keep(self, key, entry: Entry) -> None:
        """Cache an entry, and evict the oldest one that is not pinned if there are too many."""
        found = self.kept.get(key)
        if found is not None and found.pinned:
            self.replaced += (found.value,)
        elif found is None and len(self.kept) >= self.most:
            evictable = [k for k, e in list(self.kept.items()) if not e.pinned]
            if len(evictable) >= self.most:
                self.kept.pop(evictable[0], None)
        self.kept[key] = entry


class OfTensors:
    """A table from tensor objects to values, each with the lifetime of its tensor.

    A WeakTensorKeyDictionary takes 1.5 us, this 0.2.
    """

    def __init__(self, make: Callable):
        self.make = make
        self.found: dict[int, tuple] = {}  # id of a tensor -> (weak reference to it, its value)

    def known(self, tensor: torch.Tensor):
        """The value of this tensor object, or None if it has none. The value must not refer to the tensor."""
        found = self.found.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def __call__(self, tensor: torch.Tensor, *arguments):
        """The value of this tensor object: the known one, or make(*arguments)."""
        value = self.known(tensor)
        if value is not None:
            return value
        number = id(tensor)

        def forget(reference) -> None:
            if self.found.get(number, (None,))[0] is reference:
                self.found.pop(number, None)

        value = self.make(*arguments)
        self.found[number] = weakref.ref(tensor, forget), value
        return value


of_tensor = OfTensors(Derived)  # the cache of a tensor object


def plain_result(source: torch.Tensor, make: Callable):
    """make(), outside torch.func transforms that do not transform `source`; they would wrap the result."""
    if not functorch_active() or is_transformed(source):
        return make()
    with DisableFuncTorch():
        return make()


def state_of(*tensors: torch.Tensor) -> tuple | None:
    """A value that changes if one of the tensors is written to; None if torch does not track versions.

    It detects in-place operations on a tensor or on tensors that share its version counter (views, detach()), and new
    memory (`tensor.data = ...`). It does not detect writes through `.data`, NumPy or a kernel. Inference tensors have
    no version counter.
    """
    try:
        return tuple([(t._version, t.data_ptr()) for t in tensors])
    except RuntimeError:  # an inference tensor, or one without memory
        return None


def captured(tensor: torch.Tensor) -> bool:
    """True if operations on this tensor are being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
