"""Zero-initialized workspace for semaphores and counters of kernels.

There is one buffer per device, stream and dtype for the lifetime of the process. Every kernel resets it to zero, and
the kernels of a stream are serialized, so all of them share it. It grows when a call needs more. Only a fault can stop
a kernel before the reset, and a fault ends the CUDA context.

A CUDA graph may be replayed concurrently with other calls. So a call under capture gets a separate buffer from the
graph's memory, and zeroing it becomes part of the graph: a few microseconds per replay.
"""

import torch

from .graphs import lasting_memory
from .torch_compat import raw_stream

_BUFFERS: dict[tuple, torch.Tensor] = {}  # (device, stream, dtype) -> (words,), all zero between calls


def zeros(device: torch.device, words: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A buffer of at least `words` zeros, for a kernel on the current stream that resets it to zero."""
    if device.type != "cuda":
        return torch.zeros(words, dtype=dtype, device=device)  # tests that emulate kernels with torch
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=dtype, device=device)
    key = device.index, raw_stream(device.index), dtype
    found = _BUFFERS.get(key)
    if found is None or len(found) < words:
        # The old one may still be in use: torch hands its memory to later work on this stream only.
        with lasting_memory(device):
            found = _BUFFERS[key] = torch.zeros(words, dtype=dtype, device=device)
    return found
