"""Times of GPU calls that can be compared: interleaved call by call, L2 flushed, the card in its steady state.

A card under load settles at a clock that its power limit allows, and drifts there over the first second; a product
timed on a cool card and its peer timed on a warm one are not a ratio. So all candidates of a case take turns, first
without being timed until the card has settled, then with a pair of events around each call.
"""

import time

import torch

FLUSH_BYTES = 256 << 20  # several times any L2


def interleaved(calls: dict, *, warm_s: float = 1.0, rounds: int = 60) -> dict[str, list[float]]:
    """Microseconds of each call, one for each of `rounds` rounds; every round makes every call once, in order."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end:
        for call in calls.values():
            flush.zero_()
            call()
        torch.cuda.synchronize()
    events = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: [1e3 * start.elapsed_time(stop) for start, stop in pairs] for name, pairs in events.items()}


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def spread(times: list[float]) -> dict:
    """Median, tenth and ninetieth percentile, and how many rounds."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    figures = {"median_us": median(times), "p10": ordered[tenth], "p90": ordered[-1 - tenth]}
    return {name: round(value, 2) for name, value in figures.items()} | {"rounds": len(times)}


def host_cost(call, calls: int = 2000) -> float:
    """Microseconds of host time of one asynchronous call, the queue never full."""
    for _ in range(50):
        call()
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 10):
            call()
        best = min(best, (time.perf_counter() - start) / (calls // 10))
    return best * 1e6
