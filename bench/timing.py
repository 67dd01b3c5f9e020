"""Times of GPU calls that can be compared: interleaved call by call, L2 flushed, the card in its steady state.

A card under load settles at a clock that its power limit allows, and drifts there over the first second; a product
timed on a cool card and its peer timed on a warm one are not a ratio. So all candidates of a case take turns, first
without being timed until the card has settled, then with a pair of events around each call. Every round has another
order, since the clock of a long call depends on the power that the call before it took: after one of mma.sync, a
backward pass of 74 ms takes 68 on an H200. Bursts of short calls, which measure the host, keep their order.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from itertools import islice

import torch

FLUSH_BYTES = 256 << 20  # several times any L2
IN_GRAPH = 20  # calls of one CUDA graph
IN_BURST = 100  # calls between two synchronisations


class Flush:
    """Empties L2 by reading. Writing would leave up to an L2 of lines that are written back while the next call runs,
    which takes time from a call that is bound by memory (decoding 537 MB: 13 % of it)."""

    def __init__(self):
        self.read = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self.sum = torch.empty((), dtype=torch.float32, device="cuda")

    def __call__(self) -> None:
        torch.sum(self.read, dim=0, out=self.sum)


def recorded(flush: Flush, call) -> tuple:
    """Events before and after a call that finds nothing in L2."""
    flush()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    return start, stop


def microseconds(events: dict[str, list[tuple]]) -> dict[str, list[float]]:
    """Time between the events of each pair; waits for them."""
    torch.cuda.synchronize()
    return {name: [1e3 * start.elapsed_time(stop) for start, stop in pairs] for name, pairs in events.items()}


def shuffled(calls: dict) -> Iterator[list[tuple]]:
    """Names and calls of a round, again and again: each time in another order, which is the same in every run."""
    shuffle = random.Random(0)
    while True:
        yield shuffle.sample(list(calls.items()), len(calls))


def interleaved(calls: dict, *, warm_s: float = 1.0, rounds: int = 60) -> dict[str, list[float]]:
    """Microseconds of each call, one for each of `rounds` rounds; every round makes every call once."""
    flush = Flush()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end:
        for call in calls.values():
            flush()
            call()
        torch.cuda.synchronize()
    events = {name: [] for name in calls}
    for turn in islice(shuffled(calls), rounds):
        for name, call in turn:
            events[name].append(recorded(flush, call))
    return microseconds(events)


def paced(calls: dict, *, warm_s: float = 1.0, rounds: int = 60, share_s: float = 0.4) -> dict[str, list[float]]:
    """As `interleaved`, for calls of very different lengths: each takes turns in as many rounds as fit into `share_s`
    seconds, at least 3 and at most `rounds`, spread evenly over all of them."""
    flush, count, first = Flush(), {}, True
    end = time.perf_counter() + warm_s
    while first or time.perf_counter() < end:
        for name, call in calls.items():
            flush()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds = max(time.perf_counter() - start, 1e-6)
            count[name] = min(max(rounds, 3), max(3, round(share_s / seconds)))
        first = False
    most = max(count.values())
    events = {name: [] for name in calls}
    for index, turn in enumerate(islice(shuffled(calls), most)):
        for name, call in turn:
            if (index + 1) * count[name] // most > index * count[name] // most:
                events[name].append(recorded(flush, call))
    return microseconds(events)


def graphed(call, count: int = IN_GRAPH):
    """A function that replays a CUDA graph of `count` calls; for interleaved_graphs."""
    for _ in range(3):  # compiles, chooses and loads all that a capture could not
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def interleaved_graphs(calls: dict, *, warm_s: float = 1.0, rounds: int = 60) -> dict[str, list[float]]:
    """Device microseconds of each call, of what `graphed` made of them: without the host, L2 flushed for the first."""
    times = interleaved(calls, warm_s=warm_s, rounds=rounds)
    return {name: [us / IN_GRAPH for us in found] for name, found in times.items()}


def interleaved_bursts(calls: dict, *, warm_s: float = 1.0, rounds: int = 60) -> dict[str, list[float]]:
    """Wall microseconds of each call among many back to back: what the host needs, or the device if that is more.

    Bursts of the calls take turns. Of a call with `bare` and `within` (peers.Call) those are timed.
    """
    bare = {
        name: (getattr(c, "bare", None) or c, getattr(c, "within", contextlib.nullcontext)) for name, c in calls.items()
    }
    found = {name: [] for name in calls}
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end or len(next(iter(found.values()))) < rounds:
        for name, (call, within) in bare.items():
            with within():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(IN_BURST):
                    call()
                torch.cuda.synchronize()
                found[name].append((time.perf_counter() - start) / IN_BURST * 1e6)
    return {name: times[-rounds:] for name, times in found.items()}


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def spread(times: list[float]) -> dict:
    """Median, tenth and ninetieth percentile, and how many rounds."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    figures = {"median_us": median(times), "p10": ordered[tenth], "p90": ordered[-1 - tenth]}
    return {name: round(value, 2) for name, value in figures.items()} | {"rounds": len(times)}
