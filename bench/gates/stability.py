"""The stability gate: every op at once on many streams, from many threads, and out of a CUDA graph.

What runs at once is compared with what ran alone, bit for bit: results do not depend on what else the GPU does. The
same work again must not hold more memory. Shapes of every kind are the correctness gate's.
"""

import gc
import threading
from functools import partial

import torch

from tests.calls import FP16, Call, Case, attend, bits, dense, linear, matmul, on_paths, paths

from ..rows import reason
from .gate import Gate, judged, need_gpu

NAME = "stability"
THREADS, STREAMS, ROUNDS = 4, 4, 25
GROWTH = 16 << 20  # bytes of the device that the driver may take or give back for itself, such as local memory
CONCURRENT = [  # every op, large enough that launches overlap
    partial(dense, 1000, 776, 1032, terms="bias+gelu"),
    partial(matmul, (128, 128), "power_law", 8, 8, 520),
    partial(dense, 520, 1000, 776, "nt"),
    partial(linear, (64, 64), "empty_rows", 12, 16, 264, dtype=FP16, terms="bias"),
    partial(attend, "dense", 3, 8, 2, 1000, 1100, 64, causal=True),
    partial(attend, "packed", 9, 8, 2, 1000, 1000, 64, causal=True),
    partial(attend, "blocks", 2, 12, 2, 1000, 1100, 64, block=(128, 128)),
    partial(attend, "cache", 4, 8, 2, 2, 4096, 128, splits=7, page=16),
]


def cases() -> list[Case]:
    return on_paths(CONCURRENT, paths())


def on_streams(calls: list[Call], alone: list[torch.Tensor], streams: list) -> list[str]:
    """Several streams at once, fed from one thread."""
    torch.cuda.synchronize()
    results = []
    for i in range(ROUNDS * len(calls)):
        with torch.cuda.stream(streams[(i + i // len(calls)) % len(streams)]):
            results.append((i % len(calls), calls[i % len(calls)].run()))
    torch.cuda.synchronize()
    return different("streams", results, calls, alone)


def on_threads(calls: list[Call], alone: list[torch.Tensor], streams: list) -> list[str]:
    """Several threads at once, a stream each."""
    results, problems = [], []

    def work(first: int):
        try:
            with torch.cuda.stream(streams[first]):
                for i in range(first, first + ROUNDS):
                    results.append((i % len(calls), calls[i % len(calls)].run()))
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            problems.append(f"thread {first}: {reason(error)}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems + different("threads", results, calls, alone)


def different(where: str, results: list, repeated: list[Call], alone: list[torch.Tensor]) -> list[str]:
    """Which calls gave other bits than alone, and how often."""
    wrong = [index for index, found in results if not torch.equal(bits(found), alone[index])]
    return [
        f"{where}: {repeated[index].name}: {wrong.count(index)} results differ from the one made alone"
        for index in sorted(set(wrong))
    ]


def in_graphs(calls: list[Call]) -> list[str]:
    """All calls captured in one CUDA graph, replayed on new inputs; each replay against the truth."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call.run() for call in calls]  # the poison is captured as well: every replay starts from NaN
    problems = []
    for turn in range(3):
        for call in calls:
            call.renew(turn)
        graph.replay()
        torch.cuda.synchronize()
        for call, found in zip(calls, outs, strict=True):
            if complaint := call.complaint(found):
                problems.append(f"graph, replay {turn}: {call.name}: {complaint.splitlines()[0]}")
    return problems


def held() -> tuple[int, int]:
    """Bytes that tensors hold, and bytes of the whole device that are taken, with nothing cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def growth(before: tuple[int, int], after: tuple[int, int]) -> list[str]:
    """What is said of memory that was held before and after the same work."""
    tensors, device = (late - early for early, late in zip(before, after))
    problems = [f"memory: tensors hold {tensors:,} bytes more after the same work again"] if tensors > 0 else []
    if device > GROWTH:
        problems.append(f"memory: the device has {device:,} bytes less after the same work again")
    return problems


def check(*, quick: bool = False) -> Gate:
    """All of it, on every path of the GPU, after each call alone was right; `quick` changes nothing."""
    need_gpu()
    repeated = [case("cuda") for case in cases()]
    problems = [f"{call.name}: {text.splitlines()[0]}" for call in repeated if (text := call.complaint())]
    alone = [bits(call.run()) for call in repeated]
    # The same streams twice: each keeps its workspace for good.
    streams, others = ([torch.cuda.Stream() for _ in range(count)] for count in (STREAMS, THREADS))

    def at_the_same_time() -> list[str]:
        return [*on_streams(repeated, alone, streams), *on_threads(repeated, alone, others)]

    problems += at_the_same_time()
    before = held()
    problems += at_the_same_time()
    problems += growth(before, held()) + in_graphs(repeated)
    done = f"{2 * ROUNDS * (len(repeated) + THREADS)} launches on {STREAMS} streams and {THREADS} threads at once, "
    done += f"{len(repeated)} calls in a CUDA graph"
    return judged(NAME, problems, f"{done}: right, and no memory kept", f"{len(problems)} faults in {done}")
