"""Copies to the memory of other ranks, and signals, while GEMMs run.

    push      copy | signal     on a stream of its own, after all work that the current stream had at `begin`
    keep      copy              on that stream, after all work that the current stream has
    signal    after kernels that wrote to a rank's memory, on the current stream
    wait      until a signal of a rank has come, on the current stream

Pushes run on copy engines, copies within this GPU's memory on multiprocessors. Signals are torch's (symmetric memory),
kernels of one warp: one that waits stands where the stream would wait anyway, so it takes no multiprocessor from a
GEMM.

A round of Peers is a barrier also with a link in place of `ready`: every rank sends something to every other one, and
waits for what each sends. So memory that is written to has been read by then: its owner has sent in the round before.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .peers import Peers, peers_of
from .torch_compat import symmetric_buffer

__all__ = ["PUSHED", "STORED", "Link", "link_of"]

PUSHED, STORED = 0, 1  # channels of signals, for `push` and for `signal`

_LINKS: weakref.WeakKeyDictionary[Peers, Link] = weakref.WeakKeyDictionary()


def link_of(group: Any, device: torch.device) -> tuple[Peers, Link] | None:
    """The memory of a process group's ranks and the link to them, or None where peers_of returns None.

    All ranks must call it together the first time.
    """
    peers = peers_of(group, device)
    if peers is None:
        return None
    if peers not in _LINKS:
        _LINKS[peers] = Link(group, device, peers)
    return peers, _LINKS[peers]


class Link:
    """Copies and signals of a rank to the others of its group; see link_of.

    From `begin` to `end` all ranks do the same, but for `keep`: each pushes to every other rank once, or signals every
    other rank once, or both; and it waits for each push and signal to it. Not for CUDA graphs, whose replays do not
    alternate buffers.
    """

    def __init__(self, group: Any, device: torch.device, peers: Peers) -> None:
        import torch.distributed as dist

        self.rank, self.ranks, self._timeout, self._device = peers.rank, peers.ranks, peers.timeout, device
        self._kept, self._handle = symmetric_buffer(16, device, group)  # for its signals alone
        torch.cuda.synchronize(device)
        dist.barrier(group=group)  # no rank signals before all have their memory for signals, which is 0
        torch.cuda.synchronize(device)
        self._stream, self._event = torch.cuda.Stream(device), torch.cuda.Event()
        self._current: Any = None

    def begin(self) -> None:
        """Begin, after all work of the current stream."""
        self._current = torch.cuda.current_stream(self._device)
        self._event.record(self._current)
        self._stream.wait_event(self._event)

    def check_ended(self) -> None:
        """Raise RuntimeError if an error kept the last use from its end: ranks may have sent different signals."""
        if self._current is not None:
            raise RuntimeError("an earlier call of a layer with overlap=True ended by an error; restart the processes")

    def push(self, rank: int, to: Tensor, x: Tensor) -> None:
        """Copy x to memory of a rank, and signal it. x must not be written before the stream of `begin` has reached
        `end`."""
        with torch.cuda.stream(self._stream):
            copy(to, x)
            self._handle.put_signal(rank, PUSHED, self._timeout)

    def keep(self, to: Tensor, x: Tensor) -> None:
        """Copy x to this rank's memory, behind the pushes and all work that the current stream has now. x must not be
        written, nor `to` read, before `join`."""
        self._event.record(self._current)
        self._stream.wait_event(self._event)
        with torch.cuda.stream(self._stream):
            copy(to, x)

    def signal(self, rank: int) -> None:
        """Signal a rank after all work of the current stream."""
        self._handle.put_signal(rank, STORED, self._timeout)

    def wait(self, rank: int, channel: int) -> None:
        """Let the current stream wait for a rank's push (PUSHED) or signal (STORED) to this one."""
        self._handle.wait_signal(rank, channel, self._timeout)

    def join(self) -> None:
        """Let the stream of `begin` wait for pushes and copies, so that x can be freed; nothing before `begin`."""
        if self._current is not None:
            self._event.record(self._stream)
            self._current.wait_event(self._event)

    def end(self) -> None:
        """Join, and end."""
        self.join()
        self._current = None


def copy(to: Tensor, x: Tensor) -> None:
    """Copy x on the current stream; simulated ranks replace it."""
    to.copy_(x)
