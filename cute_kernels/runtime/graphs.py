"""Memory of tensors that outlive a call, outside the memory pools of CUDA graphs and inference mode.

torch.compile(mode="reduce-overhead") makes the first call of a graph run eagerly, with this thread's allocations routed
to the pool of the CUDA graphs. The stream is not being captured then, but only outputs of the graph may stay in that
pool: torch raises "Detected tensors in the cudagraph pool not tracked as outputs" for others, and hands their memory to
later graphs. Caches therefore allocate in a pool of this module.

If two pools are active in a thread, torch allocates from the one that was entered last (since torch 2.10).
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

from .torch_compat import compiled_with_cuda_graphs

_POOLS: dict[int, "torch.cuda.MemPool"] = {}  # by device index
_ACTIVE: set[int] = set()  # devices whose pool is in use by the thread that holds the lock
_LOCK = threading.RLock()  # torch rejects a pool that another thread is using


@contextlib.contextmanager
def lasting_memory(device: torch.device) -> Iterator[None]:
    """Allocate this thread's tensors on `device` outside torch.compile's CUDA graph pool, and as normal tensors under
    torch.inference_mode: autograd cannot save inference tensors, and they have no version counter.

    Programs that never compile with CUDA graphs allocate as usual. During a capture memory comes from the graph's pool:
    such tensors belong to the graph and must not be cached.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad(), lasting_memory(device):  # the first one enables gradients
            yield
        return
    if not compiled_with_cuda_graphs() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with _LOCK:
        if index in _ACTIVE:
            yield
            return
        if index not in _POOLS:
            with torch.cuda.device(index):
                _POOLS[index] = torch.cuda.MemPool(use_on_oom=True)  # free blocks serve other allocations then
        _ACTIVE.add(index)
        try:
            with torch.cuda.use_mem_pool(_POOLS[index], index):
                yield
        finally:
            _ACTIVE.discard(index)
