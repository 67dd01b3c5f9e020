"""What is made of tensors once, on their device, and kept: across streams, and beside CUDA graphs."""

from collections.abc import Callable

import torch

MOST = 64  # values of one owner


class Derived:
    """Values by key, kept as long as this object. What they are made of is its owner's business.

    Several threads may ask for the same value: each finds it or makes it, and one of them is kept.
    """

    __slots__ = ("kept", "most")

    def __init__(self, most: int = MOST):
        self.kept: dict = {}  # key -> (value, state, the stream that it was made on, when it was finished there)
        self.most = most

    def get(self, key, source: torch.Tensor, make: Callable, tensors_of: Callable, state=()):
        """`make()`, kept under `key`, and made again when `state` is another; None: nothing is known, and none is kept.

        `source` is one of the tensors that it is made of: is_cuda takes 0.05 us, a device's type 0.25.

        While a CUDA graph is captured, what is not there yet becomes part of the graph and is not kept; what is there
        was finished before, for torch.cuda.graph synchronises. Another stream waits for what one has made, and
        `tensors_of(value)` are its tensors, whose memory is not used again before that stream is done with them.
        """
        if state is None:
            return make()
        found = self.kept.get(key)
        cuda = source.is_cuda
        if found is not None and found[1] == state:
            elsewhere = cuda and found[2] != torch._C._cuda_getCurrentRawStream(source.get_device())
            if elsewhere and not torch.cuda.is_current_stream_capturing():  # a capture may not wait for what is outside
                stream = torch.cuda.current_stream(source.device)
                stream.wait_event(found[3])
                for tensor in tensors_of(found[0]):
                    tensor.record_stream(stream)
            return found[0]
        value = make()
        if cuda and torch.cuda.is_current_stream_capturing():
            return value
        if len(self.kept) >= self.most and key not in self.kept:
            self.kept.pop(next(iter(list(self.kept)), None), None)  # the oldest
        if cuda:
            stream = torch.cuda.current_stream(source.device)
            self.kept[key] = value, state, stream.cuda_stream, stream.record_event()
        else:
            self.kept[key] = value, state, None, None
        return value


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
