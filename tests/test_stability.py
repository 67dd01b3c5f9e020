"""Every op on many streams, from many threads, and in a CUDA graph; the same work again holds no more memory.

Concurrent results are compared bitwise with those of calls that ran alone.
"""

import gc
import os
import threading
from functools import partial

import pytest
import torch

from .calls import FP16, attend, bits, dense, linear, matmul, on_paths, paths
from .gemm_calls import Call
from .repeats import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.stability]

THREADS, STREAMS, ROUNDS = 4, 4, 25
GROWTH = 16 << 20  # bytes that the driver may take or give back for itself, such as local memory
CONCURRENT = [  # large enough that launches overlap
    partial(dense, 1000, 776, 1032, terms="bias+gelu"),
    partial(matmul, (128, 128), "power_law", 8, 8, 520),
    partial(dense, 520, 1000, 776, "nt"),
    partial(linear, (64, 64), "empty_rows", 12, 16, 264, dtype=FP16, terms="bias"),
    partial(attend, "dense", 3, 8, 2, 1000, 1100, 64, causal=True),
    partial(attend, "packed", 9, 8, 2, 1000, 1000, 64, causal=True),
    partial(attend, "blocks", 2, 12, 2, 1000, 1100, 64, block=(128, 128)),
    partial(attend, "cache", 4, 8, 2, 2, 4096, 128, splits=7, page=16),
]


@pytest.fixture
def concurrent() -> list[Call]:
    calls = on_gpu(on_paths(CONCURRENT, paths()))
    for call in calls:
        assert call.complaint() == ""
    return calls


def on_streams(calls: list[Call], streams: list) -> list[tuple]:
    """(index of the call, its result) of launches on several streams from one thread."""
    torch.cuda.synchronize()
    results = []
    for i in range(ROUNDS * len(calls)):
        with torch.cuda.stream(streams[(i + i // len(calls)) % len(streams)]):
            results.append((i % len(calls), calls[i % len(calls)].run()))
    torch.cuda.synchronize()
    return results


def on_threads(calls: list[Call], streams: list) -> list[tuple]:
    """(index of the call, its result) of launches from several threads, with a stream each."""
    results, errors = [], []

    def work(first: int):
        try:
            with torch.cuda.stream(streams[first]):
                for i in range(first, first + ROUNDS):
                    results.append((i % len(calls), calls[i % len(calls)].run()))
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return results


def held() -> tuple[int, int]:
    """Bytes held by tensors, and bytes taken of the whole device, with nothing cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def test_concurrent_launches(concurrent):
    """The same streams twice: each keeps its workspace."""
    alone = [bits(call.run()) for call in concurrent]
    streams, others = ([torch.cuda.Stream() for _ in range(count)] for count in (STREAMS, THREADS))

    def run() -> tuple[int, int]:
        for results in (on_streams(concurrent, streams), on_threads(concurrent, others)):
            wrong = [concurrent[index].name for index, found in results if not torch.equal(bits(found), alone[index])]
            assert not wrong
        del results
        return held()

    before, after = run(), run()
    assert after[0] <= before[0], "tensors hold more memory after the same work"
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other processes take and give back memory
        assert after[1] - before[1] <= GROWTH, "the device has less free memory after the same work"


def test_cuda_graph(concurrent):
    """All calls captured in one graph and replayed on new inputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call.run() for call in concurrent]  # each replay starts from NaN: filling outputs is captured too
    for turn in range(3):
        for call in concurrent:
            call.renew(turn)
        graph.replay()
        torch.cuda.synchronize()
        for call, found in zip(concurrent, outs, strict=True):
            assert call.complaint(found) == "", f"replay {turn}: {call.name}"
