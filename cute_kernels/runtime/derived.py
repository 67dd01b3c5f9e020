"""What is made of tensors once, on their device, and kept: across streams, and beside CUDA graphs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .torch_compat import raw_stream

MOST = 64  # values of one owner


class Again(NamedTuple):
    """What `make` may return: a value, and how to make it anew in its own tensors."""

    value: Any
    again: Callable  # of the owner that asks


class Entry(NamedTuple):
    """A value that is kept."""

    value: Any
    state: Any
    stream: torch.cuda.Stream | None  # that it was made on
    number: int | None  # the stream's
    done: torch.cuda.Event | None  # when it was finished there
    again: Callable | None


class Derived:
    """Values by key, kept as long as this object. What they are made of is its owner's business.

    Several threads may ask for the same value: each finds it or makes it, and one of them is kept.
    """

    __slots__ = ("kept", "most")

    def __init__(self, most: int = MOST):
        self.kept: dict[Any, Entry] = {}
        self.most = most

    def get(self, key, source: torch.Tensor, make: Callable, tensors_of: Callable, state=(), owner=None):
        """`make()`, kept under `key`, and made again when `state` is another; None: nothing is known, and none is kept.

        `source` is one of the tensors that it is made of: is_cuda takes 0.05 us, a device's type 0.25.

        What `make` returns as Again is made again in the same tensors, by `again(owner)`: as what it was made of was
        written in place, nobody can have use for what it was before. So on the stream that it was made on; on others
        and in a capture it is made by `make`.

        While a CUDA graph is captured, what is not there yet becomes part of the graph and is not kept; what is there
        was finished before, for torch.cuda.graph synchronises. Another stream waits for what one has made, and
        `tensors_of(value)` are its tensors, whose memory is not used again before that stream is done with them.
        """
        if state is None:
            return _value(make())
        found = self.kept.get(key)
        cuda = source.is_cuda
        here = cuda and found is not None and found.number == raw_stream(source.get_device())
        if found is not None and found.state == state:
            if (
                cuda and not here and not torch.cuda.is_current_stream_capturing()
            ):  # it may not wait for what is outside
                stream = torch.cuda.current_stream(source.device)
                stream.wait_event(found.done)
                for tensor in tensors_of(found.value):
                    tensor.record_stream(stream)
            return found.value
        if cuda and torch.cuda.is_current_stream_capturing():
            return _value(make())
        if here and found.again is not None:
            found.again(owner)
            found.done.record(found.stream)
            self.kept[key] = Entry(found.value, state, *found[2:])
            return found.value
        made = make()
        value, again = made if type(made) is Again else (made, None)
        if len(self.kept) >= self.most and key not in self.kept:
            self.kept.pop(next(iter(list(self.kept)), None), None)  # the oldest
        if cuda:
            stream = torch.cuda.current_stream(source.device)
            self.kept[key] = Entry(value, state, stream, stream.cuda_stream, stream.record_event(), again)
        else:
            self.kept[key] = Entry(value, state, None, None, None, None)
        return value


def _value(made):
    return made.value if type(made) is Again else made


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


def written(*tensors: torch.Tensor) -> None:
    """Count a kernel's write in place as torch counts its own: what is kept of a tensor is made again."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
