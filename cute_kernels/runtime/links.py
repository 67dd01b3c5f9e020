"""Pushes to the buffers of other ranks: copies on a stream of their own, each of which its receiver can wait for.

Copies run on copy engines, and signals and waits are operations of the stream itself (cuStreamWriteValue32,
cuStreamWaitValue32), so none of them needs a multiprocessor beside a persistent GEMM:

    push        copy | signal           on the link's stream, which follows the current stream where it is told to
    wait        until the signal        on the current stream

Each rank counts the signals that it has received of each other rank, in memory that the others write. A turn of Peers
is a barrier also with a link in place of `ready`: every rank pushes to every other one, and waits for all pushes to it.
So a buffer that is pushed to has been read by then: its owner has pushed to this rank in the turn before.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .peers import Peers, Turn, peers_of
from .torch_compat import symmetric_buffer

__all__ = ["Link", "link_of"]

COUNTERS = 4096  # bytes of a rank's counters, one of 4 bytes for each rank

_LINKS: weakref.WeakKeyDictionary[Peers, Link] = weakref.WeakKeyDictionary()


def link_of(group: Any, device: torch.device) -> tuple[Peers, Link] | None:
    """The memory of a process group's ranks and the link to them, or None where peers_of returns None.

    All ranks must call it together the first time.
    """
    peers = peers_of(group, device)
    if peers is None:
        return None
    if peers not in _LINKS:
        _LINKS[peers] = Link(group, device, peers.rank, peers.ranks)
    return peers, _LINKS[peers]


class Link:
    """Pushes of a rank to the others of its group; see link_of.

    A use of it begins with `begin`, with the same number of pushes from each rank to each other one, and ends with
    `end`. Not for CUDA graphs: the counts that a wait compares with are new in each use.
    """

    def __init__(self, group: Any, device: torch.device, rank: int, ranks: int) -> None:
        import torch.distributed as dist
        from cuda.bindings import driver

        self.rank, self.ranks, self._driver = rank, ranks, driver
        self._counters, handle = symmetric_buffer(COUNTERS, device, group)
        self._counters.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group=group)  # no rank signals before all counters are 0
        torch.cuda.synchronize(device)
        self._addresses, self._handle = [int(pointer) for pointer in handle.buffer_ptrs], handle
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()
        self._before, self._pushes = 0, [0] * ranks  # pushes to a rank before this use, and in it
        self._turn: Any = None
        self._device = device

    def begin(self, turn: Turn) -> None:
        """Begin a turn, behind the current stream.

        Raises:
            RuntimeError: an earlier use did not end, because of an error; ranks may have counted different pushes.
        """
        if self._turn is not None:
            raise RuntimeError("an earlier call of a layer with overlap=True ended by an error; restart the processes")
        self._turn, self._current = turn, torch.cuda.current_stream(self._device)
        self._handles = self._stream.cuda_stream, self._current.cuda_stream
        self.follow()

    def follow(self) -> None:
        """Let later pushes wait for what the current stream has been given so far."""
        self._event.record(self._current)
        self._stream.wait_event(self._event)

    def push(self, rank: int, offset: int, source: int, size: int) -> None:
        """Copy `size` bytes from the address `source` to a rank's buffer, `offset` from its beginning, and signal it.

        The source must not be freed or written before the stream of `begin` has reached `end`.
        """
        self._pushes[rank] += 1
        check(self._driver.cuMemcpyAsync(self._turn.addresses[rank] + offset, source, size, self._handles[0]))
        counter, count = self._addresses[rank] + 4 * self.rank, (self._before + self._pushes[rank]) % 2**32
        check(self._driver.cuStreamWriteValue32(self._handles[0], counter, count, 0))  # 0: behind a fence

    def wait(self, rank: int, pushes: int) -> None:
        """Let the current stream wait for the first `pushes` pushes of a rank to this one in this use."""
        counter, count = self._addresses[self.rank] + 4 * rank, (self._before + pushes) % 2**32
        check(self._driver.cuStreamWaitValue32(self._handles[1], counter, count, 0))  # 0: at least, modulo 2^32

    def join(self) -> None:
        """Let the current stream wait for the pushes of a use, if one has begun, so that their sources can be freed."""
        if self._turn is None:
            return
        self._event.record(self._stream)
        self._current.wait_event(self._event)

    def end(self) -> None:
        """End a use, and join."""
        self.join()
        self._before += max(self._pushes)
        self._pushes, self._turn = [0] * self.ranks, None


def check(result: tuple) -> None:
    if int(result[0]):
        raise RuntimeError(f"CUDA driver: {result[0]}; overlap=True needs GPUs that reach each other's memory")
