"""Memory that the processes of a group share: CUDA's symmetric memory, on one host.

A group has two buffers in each process, which alternate. A round uses one of them, in one of two ways:

    round         n                       n + 1                   n + 2
    buffer        0                       1                       0
    stream        fill | barrier | read   fill | barrier | read   fill ...        each fills its own, reads the others'
    or            write | signal | wait   write | signal | wait   write ...       each writes to the others' (links.py)

Buffer 0 is written to again in round n + 2, after the barrier or the signals of round n + 1, which no process sends
before it has read what it wanted in round n. So a round has one barrier, or one exchange of signals.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .side_by_side import SideBySide
from .torch_compat import has_mapped_memory, may_share_a_device, symmetric_buffer, timeout_ms, without_modes

__all__ = ["PeerBuffer", "Peers", "peers_of"]

GRAIN = 2**21  # bytes; buffers are multiples of it
SIZES = 64  # that are cached of a buffer, with their views
GROWTH = 1.25  # a buffer that is too small is replaced by one of this many times the bytes asked for

_FOUND: weakref.WeakKeyDictionary[Any, Peers | None] = weakref.WeakKeyDictionary()


def peers_of(group: Any, device: torch.device) -> Peers | None:
    """The memory of a process group's ranks, or None unless all have GPUs of one host that read each other's memory.

    All ranks must call it together the first time, when they compare hosts.
    """
    if device.type != "cuda":
        return None
    if group not in _FOUND:
        _FOUND[group] = Peers(group, device) if _share_a_host(group, device) else None
    return _FOUND[group]


@without_modes()  # selective checkpointing must not see what the first call alone does; so below
def _share_a_host(group: Any, device: torch.device) -> bool:
    import torch.distributed as dist

    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read()
    except OSError:
        host = ""
    ranks = dist.get_world_size(group)
    hosts_and_gpus: list[Any] = [None] * ranks
    dist.all_gather_object(hosts_and_gpus, (host, str(torch.cuda.get_device_properties(device).uuid)), group=group)
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    here = [seen.get(uuid) for _, uuid in hosts_and_gpus]
    # A process that sees its own GPU alone cannot ask for the others; CUDA IPC works all the same.
    reach = all(i is None or i == device.index or torch.cuda.can_device_access_peer(device.index, i) for i in here)
    distinct = len({uuid for _, uuid in hosts_and_gpus}) == ranks or may_share_a_device()
    one_host = bool(host) and len({host for host, _ in hosts_and_gpus}) == 1
    fits = one_host and distinct and reach and has_mapped_memory(device)
    answers: list[Any] = [None] * ranks
    dist.all_gather_object(answers, fits, group=group)
    return all(answers)


class Memory:
    """One of the two buffers of each rank.

    own: uint8 (bytes,), this process's.
    pointers: int64 (ranks,) on the device, the addresses of all ranks' buffers.
    handle: torch's, of the allocation that has the buffer.
    """

    def __init__(self, size: int, rank: int, device: torch.device, group: Any) -> None:
        self.own, self.handle = symmetric_buffer(size, device, group)
        self._device, self._addresses = device, [int(p) for p in self.handle.buffer_ptrs]  # of allocations
        self._offset = self.own.data_ptr() - self._addresses[rank]
        addresses = [address + self._offset for address in self._addresses]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(device)

    @cached_property
    def of_ranks(self) -> Tensor:
        """uint8 (ranks, bytes), all ranks' buffers; see side_by_side."""
        self._mapped = SideBySide(self._addresses, self._device)
        return self._mapped.tensor[:, self._offset :][:, : len(self.own)]


class PeerBuffer:
    """One of the two buffers of each rank, as large as a round needs.

    own: uint8 (size,), this process's buffer: filled before `ready`, or written to by the others.
    pointers: int64 (ranks,) on the device, the addresses of all ranks' buffers.
    """

    def __init__(self, memory: Memory, size: int, timeout: int) -> None:
        self.own, self.pointers = memory.own[:size], memory.pointers
        self._memory, self._timeout = memory, timeout
        self._views: dict[Any, Any] = {}

    @property
    def of_ranks(self) -> Tensor:
        """All ranks' buffers as a tensor (ranks, size) of this process's GPU, which kernels write to."""
        return self._memory.of_ranks[:, : len(self.own)]

    def views(self, key: Any, make: Callable[[], Any]) -> Any:
        """Views of it that make() returns, cached by `key`: later rounds with this buffer and size share them."""
        if key not in self._views:
            with torch.inference_mode(False), without_modes():  # or calls outside of it could not write to them
                self._views[key] = make()
        return self._views[key]

    def ready(self) -> None:
        """Barrier on the current stream: what all ranks wrote to their buffers before it can be read after it."""
        self._memory.handle.barrier(0, self._timeout)


class Peers:
    """Two buffers of each rank of a group, which alternate. See peers_of.

    All ranks call `acquire`, with equal sizes, and `ready` in the same order. The reads of a round are launched before
    the next `acquire`, on the stream that is current then, or on others that it waits for. A round on another stream
    waits for that of the last one.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        import torch.distributed as dist

        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_ms(group, device) if device.type == "cuda" else 0  # of barriers and signals
        self._group, self._device, self._round = weakref.ref(group), device, 0
        self._buffers: list[Memory | None] = [None, None]
        self._stream: Any = None  # of the last round
        self._sized: list[dict[int, PeerBuffer]] = [{}, {}]  # of each buffer, by size

    @property
    def room(self) -> int:
        """Bytes of the next buffer, the same on all ranks: so many can be acquired without growth; 0 at first."""
        kept = self._buffers[self._round % 2]
        return 0 if kept is None else len(kept.own)

    def acquire(self, size: int) -> PeerBuffer:
        """The buffer of the next round, `size` bytes of it; the same size on all ranks. A buffer that is too small is
        replaced, which synchronizes."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream
        place = self._round % 2
        self._round += 1
        kept = self._buffers[place]
        if kept is None or len(kept.own) < size:
            del kept  # frees it before the new one is made
            kept = self._buffers[place] = self._made(place, size)
        sized = self._sized[place]
        if size not in sized:
            if len(sized) == SIZES:
                sized.clear()
            sized[size] = PeerBuffer(kept, size, self.timeout)
        return sized[size]

    def undo_acquire(self) -> None:
        """Undo the last `acquire`, if its buffer is not used; this process has written to its own buffer at most."""
        self._round -= 1

    @without_modes()
    def _made(self, place: int, size: int) -> Memory:
        torch.cuda.synchronize(self._device)  # this rank has read what it wanted of the buffers that are replaced
        kept, self._buffers[place] = self._buffers[place], None
        self._sized[place].clear()
        if kept is not None:
            import torch.distributed as dist

            dist.barrier(group=self._group())  # so have the others
            torch.cuda.synchronize(self._device)
        del kept
        return Memory(-(-int(size * GROWTH) // GRAIN) * GRAIN, self.rank, self._device, self._group())
