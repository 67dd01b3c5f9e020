"""The schedule of sequence-parallel layers with simulated ranks: threads of one process, with the real Peers and Link.

Their streams, events and signals are replaced. Copies and signals of a rank run in a thread of their own, after
random delays, so that a wait that is missing shows as a wrong result.
"""

import collections
import contextlib
import queue
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cute_kernels.runtime import links, peers
from sparse_collective.distributed import overlap
from sparse_collective.distributed.overlap import Exchange

SECONDS = 20
BEFORE = 64  # bytes of an allocation before its buffer


class Stream:
    """A thread that runs what it is given, in order; with `inline`, the thread of the caller."""

    def __init__(self, device=None, inline=False):
        self.jobs, self.inline, self.given, self.behind = queue.Queue(), inline, 0, {}
        if not inline:
            threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            job = self.jobs.get()
            time.sleep(random.choice((0, 0, 0.002)))
            job()

    def give(self, job):
        self.given += 1
        job() if self.inline else self.jobs.put(job)

    def wait_event(self, event):
        self.behind[event.stream], done = event.given, event.done
        self.give(lambda: wait_until(done.is_set))


class Event:
    def record(self, stream):
        self.stream, self.given, self.done = stream, stream.given, threading.Event()
        stream.give(self.done.set)


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "a wait for a signal that does not come"
        time.sleep(1e-4)


def put(signal):
    """Signal once the one before has been taken, as torch does."""
    wait_until(lambda: not signal.is_set())
    signal.set()


def take(signal):
    wait_until(signal.is_set)
    signal.clear()


class Cluster:
    """`ranks` threads that take the place of processes; `here` is the thread's rank and its current stream."""

    def __init__(self, monkeypatch, ranks):
        self.ranks, self.here, self.barrier = ranks, threading.local(), threading.Barrier(ranks, timeout=SECONDS)
        self.pads, self.memory = [None] * ranks, None  # (ranks, size), made by rank 0 for all
        self.found = {}  # memory of all ranks by its address
        cuda = SimpleNamespace(
            Stream=Stream, Event=Event, stream=self.stream, current_stream=lambda device: self.here.stream,
            synchronize=lambda device: None,
        )  # fmt: skip
        for module in (links, peers):
            few = {name: getattr(torch, name) for name in ("tensor", "int64", "inference_mode")}
            monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, **few))
            monkeypatch.setattr(module, "symmetric_buffer", self.symmetric_buffer)
        monkeypatch.setattr(peers, "SideBySide", self.side_by_side)
        monkeypatch.setattr(dist, "get_rank", lambda group: self.here.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
        monkeypatch.setattr(dist, "barrier", lambda group: self.barrier.wait())
        monkeypatch.setattr(links, "copy", self.copy)
        monkeypatch.setattr(overlap, "add_summands", self.add_summands)

    def add_summands(self, arrived, y, places=None):
        assert places is None, "on CPUs"
        self.give(lambda: torch.sum(arrived, 0, out=y))

    @contextlib.contextmanager
    def stream(self, stream):
        """torch.cuda.stream"""
        before, self.here.stream = self.here.stream, stream
        yield
        self.here.stream = before

    def copy(self, to, x):
        """links.copy: of x behind what the thread's own stream had when the exchange began, else behind all of it."""
        own = self.here.own
        needed = self.here.given if x.data_ptr() == self.here.x.data_ptr() else own.given - 1  # its event's
        assert self.here.stream.behind[own] >= needed, "a copy of what is not there yet"
        self.give(lambda: to.copy_(x))

    def give(self, job):
        """Launch a kernel on the current stream."""
        self.here.stream.give(job)

    def side_by_side(self, addresses, device):
        return SimpleNamespace(tensor=self.found[addresses[0]])

    def symmetric_buffer(self, size, device, group):
        rank = self.here.rank
        if rank == 0:
            self.memory = torch.full((self.ranks, BEFORE + size), 255, dtype=torch.uint8)
            self.found[self.memory.data_ptr()] = self.memory
        pads = self.pads[rank] = collections.defaultdict(threading.Event)  # by sender and channel
        self.barrier.wait()
        memory, others = self.memory, list(self.pads)
        handle = SimpleNamespace(
            buffer_ptrs=[row.data_ptr() for row in memory],
            put_signal=lambda to, channel, timeout: self.give(lambda: put(others[to][rank, channel])),
            wait_signal=lambda source, channel, timeout: self.give(lambda: take(pads[source, channel])),
        )
        self.barrier.wait()
        return memory[rank, BEFORE:], handle

    def run(self, function):
        errors = []

        def body(rank):
            self.here.rank, self.here.given = rank, 0
            self.here.stream = self.here.own = Stream(inline=True)
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
        link = links.Link(group, device, memory)
        cluster.barrier.wait()
        A, B = first_weight.T, second_weights[rank]
        for number, (n, x) in enumerate(zip(tokens, xs, strict=True)):
            h, y, whole = torch.full((ranks * n, 8), torch.nan), torch.full((n, 16), torch.nan), x.view(ranks * n, 12)
            gathered = torch.full_like(whole, torch.nan) if number % 2 else None

            def first(part, rows):
                cluster.give(lambda: torch.matmul(part, A, out=h[rows]))

            def second(outs):
                cluster.give(lambda: outs.copy_((h @ B).view(outs.shape)))

            def until_end(reads=None, **layers):
                if "x" in layers:
                    cluster.here.x = layers["x"] = layers["x"].clone()
                    cluster.here.given = cluster.here.own.given
                Exchange(**layers, meanwhile=reads).push(memory, link)
                if "x" in layers:
                    layers["x"].fill_(torch.nan)  # as its memory may be used again

            def reads():
                seen.append(gathered is None or torch.equal(gathered, whole))

            seen = []
            until_end(reads, x=x[rank], first=first, gathered=gathered, second=second, y=y)
            assert seen == [True], "x of all ranks, before the sum"
            expected = sum(whole @ A @ part for part in second_weights).view(ranks, n, 16)[rank]
            assert torch.allclose(y, expected, atol=1e-4)
            assert gathered is None or torch.equal(gathered, whole)
            for kept in (None, torch.full_like(whole, torch.nan)):
                h.fill_(torch.nan)
                until_end(x=x[rank], first=first, gathered=kept)
                assert torch.allclose(h, whole @ A, atol=1e-5)
                assert kept is None or torch.equal(kept, whole)
            y.fill_(torch.nan)
            until_end(second=second, y=y)
            assert torch.allclose(y, expected, atol=1e-4)

    cluster.run(rank_of)


def test_calls_after_an_error(monkeypatch):
    """They raise before anything waits, also where they need larger buffers; x is not freed before it is copied."""
    monkeypatch.setattr(peers, "GRAIN", 256)
    cluster, group, device = Cluster(monkeypatch, 2), Group(), torch.device("cpu")

    def rank_of(rank):
        memory = peers.Peers(group, device)
        link = links.Link(group, device, memory)

        def fails(part, rows):
            raise ValueError("wrong")

        monkeypatch.setattr(overlap, "link_of", lambda group, device: cluster.here.found)
        cluster.here.found = memory, link
        cluster.barrier.wait()
        for n, error, text in ((16, ValueError, "wrong"), (4096, RuntimeError, "ended by an error; restart")):
            x = cluster.here.x = torch.ones(n, 8)
            cluster.here.given = cluster.here.own.given
            with pytest.raises(error, match=text):
                Exchange(x, fails).run(group)
            x.fill_(2)
        cluster.barrier.wait()
        assert (memory._buffers[0].own[: 16 * 8 * 4].view(torch.float32) == 1).all()

    cluster.run(rank_of)


def test_calls_after_memory_that_cannot_be_mapped(monkeypatch):
    """A round that was acquired but not used: ranks may differ in it."""
    monkeypatch.setattr(peers, "GRAIN", 256)
    cluster, group, device = Cluster(monkeypatch, 2), Group(), torch.device("cpu")

    def fails(addresses, device):
        raise RuntimeError("cannot be mapped")

    monkeypatch.setattr(peers, "SideBySide", fails)

    def rank_of(rank):
        memory = peers.Peers(group, device)
        link = links.Link(group, device, memory)
        for text in ("cannot be mapped", "ended by an error; restart"):
            with pytest.raises(RuntimeError, match=text):
                Exchange(torch.ones(16, 8), lambda part, rows: None).push(memory, link)

    cluster.run(rank_of)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sums_of_summands(ranks, dtype):
    """In the order of ranks in FP32, rounded once."""
    summands = torch.randn(ranks, 37, 264, device="cuda").to(dtype)
    expected = torch.zeros(37, 264, device="cuda")
    for t in summands:
        expected += t.float()
    places = overlap.places_by_token(summands)
    assert (places is None) == (ranks == 2)
    for rows in (places, None):
        y = torch.full_like(summands[0], torch.nan)
        overlap.add_summands(summands, y, rows)
        bound = 0 if rows is not None else 8 * torch.finfo(dtype).eps  # torch has its own order
        torch.testing.assert_close(y, expected.to(dtype), rtol=bound, atol=bound)
