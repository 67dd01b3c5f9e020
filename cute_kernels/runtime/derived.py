"""A cache of tensors derived from other tensors, safe across streams and beside CUDA graphs.

A cache is an attribute of its owner (a BsrMatrix, a BlockMask, FlexAttention's mask), or is found by a tensor
(`of_tensor`), with which it dies.
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

MOST = 64  # values of one owner, besides pinned ones


class Entry(NamedTuple):
    """A cached value."""

    value: Any
    state: Any
    number: int | None  # of the stream that it was made on
    done: torch.cuda.Event | None  # when it was finished there
    pinned: bool = False  # handed out during a capture: a CUDA graph may read its tensors whenever it is replayed


class Derived:
    """Values by key, kept as long as this object. What they are made of is its owner's business.

    `facts` is what else the owner notes beside them. A copy of the owner, or a file, has None in this object's place.

    At most `most` values are cached, and the oldest is evicted first. Values that were handed out while a CUDA graph
    was captured are pinned: they are neither evicted nor written to, and stay alive as long as this object, also where
    a newer value has their key.

    Several threads may ask for the same value: each finds it or makes it, and one of them is kept.
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
        """`make()`, cached under `key`, and made again when `state` differs; with state None nothing is cached.

        `source` is one of the tensors that it is made of: is_cuda takes 0.05 us, a device's type 0.25.

        Under FakeTensorMode and make_fx nothing is looked up or cached. Inside of a transform of torch.func, and in
        inference mode, values are made of plain tensors, for later calls outside.

        While a CUDA graph is captured, a missing value becomes part of the graph and is not cached; a cached one was
        finished before, since torch.cuda.graph synchronizes. Another stream waits for what one has made, and
        `tensors_of(value)` are its tensors, whose memory is not used again before that stream is done with them.
        """
        if state is None or in_graph_trace():
            return _made(source, make)
        value = self.known(key, source, state, tensors_of)
        if value is not None:
            return value
        if source.is_cuda and torch.cuda.is_current_stream_capturing():
            return _made(source, make)
        with lasting_memory(source.device):
            value = _made(source, make)
        number = done = None
        if source.is_cuda:
            stream = torch.cuda.current_stream(source.device)
            number, done = stream.cuda_stream, stream.record_event()
        self._keep(key, Entry(value, state, number, done))
        return value

    def known(self, key, source: torch.Tensor, state, tensors_of: Callable):
        """What `get` would return without making it, else None; `state` is not None."""
        found = self.kept.get(key)
        if found is None or found.state != state or in_graph_trace():
            return None
        if source.is_cuda:
            here = found.number == raw_stream(source.get_device())
            if not (here and found.pinned):
                if torch.cuda.is_current_stream_capturing():  # it may not wait for what is outside
                    self.kept[key] = found._replace(pinned=True)
                elif not here:
                    stream = torch.cuda.current_stream(source.device)
                    stream.wait_event(found.done)
                    for tensor in tensors_of(found.value):
                        tensor.record_stream(stream)
        return found.value

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


_OF_TENSORS: dict[int, tuple] = {}  # id of a tensor -> (weak reference to it, its cache)


def of_tensor(tensor: torch.Tensor, most: int = MOST) -> Derived:
    """The cache of this very tensor, which dies with it. A WeakTensorKeyDictionary takes 1.5 us, this 0.2."""
    number = id(tensor)
    found = _OF_TENSORS.get(number)
    if found is not None and found[0]() is tensor:
        return found[1]

    def forget(reference) -> None:
        if _OF_TENSORS.get(number, (None,))[0] is reference:
            _OF_TENSORS.pop(number, None)

    found = _OF_TENSORS[number] = weakref.ref(tensor, forget), Derived(most)
    return found[1]


def facts_of_tensor(tensor: torch.Tensor):
    """`facts` of its cache; None where it has no cache."""
    found = _OF_TENSORS.get(id(tensor))
    return None if found is None or found[0]() is not tensor else found[1].facts


def _made(source: torch.Tensor, make: Callable):
    """make(), outside of the transforms of torch.func that do not transform `source`: they would wrap the result."""
    if not functorch_active() or is_transformed(source):
        return make()
    with DisableFuncTorch():
        return make()


def state_of(*tensors: torch.Tensor) -> tuple | None:
    """Equal for the same tensor objects as long as nothing was written to them; None where torch does not count that.

    Seen are operations in place, on a tensor or on what shares its version counter (views, detach()), and other memory
    (`tensor.data = ...`). Not seen are writes through `.data`, NumPy or a kernel, of which torch knows nothing. Of
    tensors made in inference mode torch counts nothing.
    """
    try:
        return tuple([(t._version, t.data_ptr()) for t in tensors])
    except RuntimeError:  # made in inference mode, or without memory
        return None


def captured(tensor: torch.Tensor) -> bool:
    """Whether what is made of this tensor now becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
