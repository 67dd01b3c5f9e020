"""The schedule of sequence-parallel layers with simulated ranks: threads of one process, with the real Peers and Link.

Their streams, events and driver calls are replaced. Copies and signals of a rank run in a thread of their own, after
random delays, so that a wait that is missing shows as a wrong result.
"""

import ctypes
import itertools
import queue
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cuda.bindings import driver

from cute_kernels.functions import ACTIVATIONS
from cute_kernels.reference import gate
from cute_kernels.runtime import links, peers
from sparse_collective.distributed import overlap
from sparse_collective.distributed.overlap import Exchange, parts_of
from sparse_collective.distributed.sequence import gate_gradient

SECONDS = 20


class Stream:
    """A thread that runs what it is given, in order; with `inline`, the thread of the caller."""

    streams: dict[int, "Stream"] = {}

    def __init__(self, device=None, inline=False):
        self.cuda_stream, self.jobs, self.inline, self.unseen = len(self.streams) + 1, queue.Queue(), inline, False
        self.streams[self.cuda_stream] = self
        if not inline:
            threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            job = self.jobs.get()
            time.sleep(random.choice((0, 0, 0.002)))
            job()

    def give(self, job):
        job() if self.inline else self.jobs.put(job)

    def wait_event(self, event):
        event.stream.unseen = False
        done = event.done
        self.give(lambda: wait_until(done.is_set))


class Event:
    def record(self, stream):
        self.stream, self.done = stream, threading.Event()
        stream.give(self.done.set)


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "a wait for a signal that does not come"
        time.sleep(1e-4)


def word(address):
    return ctypes.c_uint32.from_address(address)


class Cluster:
    """`ranks` threads that take the place of processes; `here` is the thread's rank and its current stream."""

    def __init__(self, monkeypatch, ranks):
        self.ranks, self.here, self.barrier = ranks, threading.local(), threading.Barrier(ranks, timeout=SECONDS)
        self.buffers = [None] * ranks
        cuda = SimpleNamespace(
            Stream=Stream, Event=Event, current_stream=lambda device: self.here.stream, synchronize=lambda device: None
        )
        for module in (links, peers):
            few = {name: getattr(torch, name) for name in ("tensor", "int64", "inference_mode")}
            monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, **few))
            monkeypatch.setattr(module, "symmetric_buffer", self.symmetric_buffer)
        monkeypatch.setattr(dist, "get_rank", lambda group: self.here.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
        monkeypatch.setattr(dist, "barrier", lambda group: self.barrier.wait())
        for call in (self.cuMemcpyAsync, self.cuStreamWriteValue32, self.cuStreamWaitValue32):
            monkeypatch.setattr(driver, call.__name__, call)

    def symmetric_buffer(self, size, device, group):
        buffer = self.buffers[self.here.rank] = torch.full((size,), 255, dtype=torch.uint8)
        self.barrier.wait()
        handle = SimpleNamespace(buffer_ptrs=[b.data_ptr() for b in self.buffers], kept=list(self.buffers))
        self.barrier.wait()
        return buffer, handle

    def cuMemcpyAsync(self, to, source, size, stream):
        assert not self.here.stream.unseen, "a push does not follow the GEMM that it sends"
        Stream.streams[stream].give(lambda: ctypes.memmove(to, source, size))
        return (0,)

    def cuStreamWriteValue32(self, stream, address, value, flags):
        def write():
            word(address).value = value

        Stream.streams[stream].give(write)
        return (0,)

    def cuStreamWaitValue32(self, stream, address, value, flags):
        assert flags == 0
        Stream.streams[stream].give(lambda: wait_until(lambda: (word(address).value - value) % 2**32 < 2**31))
        return (0,)

    def run(self, function):
        errors = []

        def body(rank):
            self.here.rank, self.here.stream = rank, Stream(inline=True)
            try:
                function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * SECONDS)
        if errors:
            raise errors[0]


class Group:
    pass


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_simulated_ranks(monkeypatch, ranks):
    """Both layers, the first alone, and the second alone, of changing sizes, in turn, through the same buffers."""
    monkeypatch.setattr(peers, "GRAIN", 256)
    for name, value in {"PART_TOKENS": 16, "PART_BYTES": 256, "EDGE": 4}.items():
        monkeypatch.setattr(overlap, name, value)
    cluster, group, device = Cluster(monkeypatch, ranks), Group(), torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    first_weight, second_weights = (
        torch.randn(8, 12, generator=generator),
        torch.randn(ranks, 8, 16, generator=generator),
    )
    tokens = [48, 48, 5, 70, 48, 24]
    xs = [torch.randn(ranks, n, 12, generator=generator) for n in tokens]

    def rank_of(rank):
        memory = peers.Peers(group, device)
        link = links.Link(group, device, memory.rank, memory.ranks)
        link._before = 2**32 - 3  # counts wrap around
        link._counters.view(torch.int32).fill_(-3)
        cluster.barrier.wait()
        A, B = first_weight.T, second_weights[rank]
        for number, (n, x) in enumerate(zip(tokens, xs, strict=True)):
            h, y, whole = torch.full((ranks * n, 8), torch.nan), torch.full((n, 16), torch.nan), x.view(ranks * n, 12)
            gathered = torch.full_like(whole, torch.nan) if number % 2 else None

            def first(part, rows):
                h[rows] = part @ A

            def second(rows, out):
                cluster.here.stream.unseen = True
                out.copy_(h[rows] @ B)

            def last(rows, own, others):
                y[own] = h[rows] @ B + others

            def until_end(**layers):
                calls = []
                Exchange(x, n, **layers, meanwhile=lambda: calls.append(1)).push(memory, link)
                assert calls == [1]

            until_end(columns=16, x=x[rank], first=first, gathered=gathered, second=second, last=last)
            expected = sum(whole @ A @ part for part in second_weights).view(ranks, n, 16)[rank]
            assert torch.allclose(y, expected, atol=1e-4)
            assert gathered is None or torch.equal(gathered, whole)
            h.fill_(torch.nan)
            until_end(x=x[rank], first=first)
            assert torch.allclose(h, whole @ A, atol=1e-5)
            y.fill_(torch.nan)
            until_end(columns=16, second=second, last=last)
            assert torch.allclose(y, expected, atol=1e-4)

    cluster.run(rank_of)


@pytest.mark.parametrize(
    ("tokens", "row_bytes", "parts", "pieces"),
    [(4096, 8192, 2, 2), (2048, 8192, 1, 2), (16384, 8192, 4, 4), (1024, 8192, 1, 2), (512, 8192, 1, 1), (5, 64, 1, 1)],
)
def test_parts(tokens, row_bytes, parts, pieces):
    found = parts_of(tokens, row_bytes)
    assert [len(ranges) for ranges in found] == [parts, pieces]
    for ranges in found:
        assert (ranges[0].start, ranges[-1].stop) == (0, tokens)
        assert all(a.stop == b.start and b.start % 256 == 0 for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gate_gradient(activation, dtype):
    """Bitwise equal to autograd's."""
    z, dh = torch.randn(5, 256, dtype=dtype, requires_grad=True), torch.randn(5, 128, dtype=dtype)
    (expected,) = torch.autograd.grad(gate(z, activation), z, dh)
    dz = torch.full_like(z, torch.nan)
    with torch.no_grad():
        gate_gradient(z, dh, activation, dz)
    assert torch.equal(dz, expected)
