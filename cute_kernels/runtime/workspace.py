"""Memory of zeros, from which the thread blocks of a kernel draw numbers.

One buffer of zeros for each device, stream and dtype, kept as long as the process lives: every kernel leaves zeros
behind, and the kernels of a stream follow each other, so all of them use it. It grows when a call needs more. Nothing
but a fault stops a kernel before it has left zeros, and a fault ends the CUDA context.

A CUDA graph may be replayed beside other calls, so a call under capture gets a buffer of its own from the graph's
memory, and zeroing it becomes part of the graph: a few microseconds a replay.
"""

import torch

from .graphs import lasting_memory
from .torch_compat import raw_stream

_BUFFERS: dict[tuple, torch.Tensor] = {}  # (device, stream, dtype) -> (words,), all zero between calls


def zeros(device: torch.device, words: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """At least so many zeros, for a kernel on the current stream that leaves them zero."""
    if device.type != "cuda":
        return torch.zeros(words, dtype=dtype, device=device)  # tests, with torch in the kernel's place
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=dtype, device=device)
    key = device.index, raw_stream(device.index), dtype
    found = _BUFFERS.get(key)
    if found is None or len(found) < words:
        # The old one may still be in use: torch hands its memory to later work on this stream only.
        with lasting_memory(device):
            found = _BUFFERS[key] = torch.zeros(words, dtype=dtype, device=device)
    return found
