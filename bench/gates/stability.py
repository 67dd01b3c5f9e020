"""The stability gate: hundreds of launches, on one stream, on many, from many threads, and out of CUDA graphs.

Each result of varied shapes is compared with the truth. What runs at once is compared with what ran alone, bit for bit:
results do not depend on what else the GPU does. At the end the same work again must not hold more memory.
"""

import gc
import random
import threading
from functools import partial

import torch

from tests.calls import BF16, FP16, Call, Case, attend, bits, dense, linear, matmul, on_paths, paths

from ..rows import reason
from .gate import Gate, judged, need_gpu

NAME = "stability"
LAUNCHES, QUICK_LAUNCHES = 400, 100
ATTENTION, QUICK_ATTENTION = 80, 16  # launches of attention besides
THREADS, STREAMS, ROUNDS = 4, 4, 25
BLOCKS = ((128, 128), (64, 64), (32, 32))
PATTERNS = ("uniform", "bernoulli", "empty_rows", "power_law", "banded", "one_full_row")
GROWTH = 16 << 20  # bytes of the device that the driver may take or give back for itself, such as local memory


def products(count: int, seed: int = 0) -> list[partial]:
    """Random shapes from a few families, so that the shapes are many and the kernels to compile are few."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        op = (dense, dense, matmul, linear)[i % 4]
        n = 8 * draw.randint(1, 96)
        if op is dense:
            m, k = draw.randint(1, 800), 8 * draw.randint(1, 128)
            found.append(partial(dense, m, n, k, draw.choice(("nn", "nt"))))
            continue
        block = draw.choice(BLOCKS)
        rows, cols = (draw.randint(1, 768 // side) for side in block)
        dtype = FP16 if op is linear else BF16
        found.append(partial(op, block, draw.choice(PATTERNS), rows, cols, n, dtype=dtype))
    return found


def attention(count: int, seed: int = 0) -> list[partial]:
    """The same of attention: each form's random lengths and heads."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        batch, kv_heads, cols = draw.randint(2, 5), draw.randint(1, 3), draw.randint(1, 700)
        heads, rows = kv_heads * draw.randint(1, 4), draw.randint(1, 700)
        sizes = batch, heads, kv_heads, rows, cols
        pages = batch, heads, kv_heads, draw.randint(1, 9), 16 * (cols // 16 + 1)
        case = (
            partial(attend, "dense", *sizes, 64, causal=True),
            partial(attend, "packed", *sizes, 64, causal=True),
            partial(attend, "blocks", *sizes, 64, block=(128, 128)),
            partial(attend, "cache", *pages, 128, page=16),
        )[i % 4]
        found.append(case)
    return found


def in_turns(makers: list[partial]) -> list[Case]:
    """Four makers make a turn of all ops; the next turn takes the next path."""
    here = paths()
    return [Case(make, here[i // 4 % len(here)]) for i, make in enumerate(makers)]


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


def to_compile(quick: bool) -> list[Case]:
    """Cases whose kernels the gate launches, but for the products' few."""
    return on_paths(CONCURRENT, paths()) + in_turns(attention(QUICK_ATTENTION if quick else ATTENTION))


def varied(cases: list[Case], device: str = "cuda") -> list[str]:
    """One after another, each against the truth; what is wrong."""
    complaints = ((case.name, case(device).complaint()) for case in cases)
    return [f"{name}: {text.splitlines()[0]}" for name, text in complaints if text]


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
    problems = []
    if after[0] > before[0]:
        problems.append(f"memory: tensors hold {after[0] - before[0]:,} bytes more after the same work again")
    if after[1] - before[1] > GROWTH:
        problems.append(f"memory: the device has {after[1] - before[1]:,} bytes less after the same work again")
    return problems


def check(*, quick: bool = False) -> Gate:
    """All of it, on every path of the GPU."""
    need_gpu()
    cases = in_turns(products(QUICK_LAUNCHES if quick else LAUNCHES))
    cases += in_turns(attention(QUICK_ATTENTION if quick else ATTENTION))
    problems = varied(cases)
    repeated = [case("cuda") for case in on_paths(CONCURRENT, paths())]
    alone = [bits(call.run()) for call in repeated]
    at_once = 2 * ROUNDS * (len(repeated) + THREADS)
    # The same streams twice: each keeps its workspace for good.
    streams, others = ([torch.cuda.Stream() for _ in range(count)] for count in (STREAMS, THREADS))

    def at_the_same_time() -> list[str]:
        return [*on_streams(repeated, alone, streams), *on_threads(repeated, alone, others)]

    problems += at_the_same_time()
    before = held()
    problems += at_the_same_time()
    problems += growth(before, held())
    problems += in_graphs(repeated)
    return judged(
        NAME,
        problems,
        f"{len(cases)} shapes, {at_once} launches on {STREAMS} streams and {THREADS} threads at once, "
        f"{len(repeated)} calls in a CUDA graph: right, and no memory kept",
        f"{len(problems)} faults in {len(cases)} shapes, {at_once} launches at once and a CUDA graph",
    )
