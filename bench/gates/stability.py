"""The stability gate: hundreds of launches, on one stream, on many, from many threads, and out of CUDA graphs.

Each result of varied shapes is compared with the truth. What runs at once is compared with what ran alone, bit for bit:
results do not depend on what else the GPU does. At the end the same work again must not hold more memory.
"""

import gc
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from ..rows import reason
from .correctness import paths, spread
from .gate import Gate, judged, need_gpu
from .products import BF16, FP16, OPS, Call, Product
from .products_attention import Attend, AttendCall

NAME = "stability"
LAUNCHES, QUICK_LAUNCHES = 400, 100
ATTENTION, QUICK_ATTENTION = 80, 16  # launches of attention besides
THREADS, STREAMS, ROUNDS = 4, 4, 25
BLOCKS = ((128, 128), (64, 64), (32, 32))
PATTERNS = ("uniform", "bernoulli", "empty_rows", "power_law", "banded", "one_full_row")
GROWTH = 16 << 20  # bytes of the device that the driver may take or give back for itself, such as local memory


def products(count: int, seed: int = 0) -> list[Product]:
    """Random shapes from a few families, so that the shapes are many and the kernels to compile are few."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        op = ("gemm", "gemm", "bsr_matmul", "bsr_linear")[i % 4]
        n = 8 * draw.randint(1, 96)
        if op == "gemm":
            m, k = draw.randint(1, 800), 8 * draw.randint(1, 128)
            found.append(Product(op, m, n, k, draw.choice(("nn", "nt"))))
            continue
        block = draw.choice(BLOCKS)
        m, k = (side * draw.randint(1, 768 // side) for side in block)
        dtype = FP16 if op == "bsr_linear" else BF16
        found.append(Product(op, m, n, k, "nn", block, draw.choice(PATTERNS), dtype, dtype))
    return found


def attention_products(quick: bool, families: Iterable[str | None], seed: int = 0) -> list[Attend]:
    """The same of attention: each form's random lengths and heads, on one path after the other."""
    draw, families = random.Random(seed), list(families)
    found = []
    for i in range(QUICK_ATTENTION if quick else ATTENTION):
        batch, kv_heads, cols = draw.randint(2, 5), draw.randint(1, 3), draw.randint(1, 700)
        heads, rows = kv_heads * draw.randint(1, 4), draw.randint(1, 700)
        sizes = batch, heads, kv_heads, rows, cols
        case = (
            Attend("dense", *sizes, 64, causal=True),
            Attend("packed", *sizes, 64, causal=True),
            Attend("blocks", *sizes, 64, block=(128, 128)),
            Attend("cache", batch, heads, kv_heads, draw.randint(1, 9), 16 * (cols // 16 + 1), 128, page=16),
        )[i % 4]
        found.append(replace(case, path=families[i // 4 % len(families)]))
    return found


def concurrent(families: Iterable[str | None]) -> list[Product | Attend]:
    """What runs at once: every op, large enough that launches overlap."""
    cases = [
        Product("gemm", 1000, 776, 1032, "nn", terms="bias+gelu"),
        Product("bsr_matmul", 1024, 520, 1024, "nn", (128, 128), "power_law"),
        Product("gemm", 520, 1000, 776, "nt"),
        Product("bsr_linear", 768, 264, 1024, "nn", (64, 64), "empty_rows", FP16, FP16, "bias"),
        Attend("dense", 3, 8, 2, 1000, 1100, 64, causal=True),
        Attend("packed", 9, 8, 2, 1000, 1000, 64, causal=True),
        Attend("blocks", 2, 12, 2, 1000, 1100, 64, block=(128, 128)),
        Attend("cache", 4, 8, 2, 2, 4096, 128, splits=7, page=16),
    ]
    return spread(cases, families)


def varied(cases: Iterable[Product | Attend], ops: Mapping[str, Callable] = OPS, device: str = "cuda") -> list[str]:
    """One after another, each against the truth; what is wrong."""
    problems = []
    for case in cases:
        call = case.call(device)
        if complaint := call.complaint(call.run(ops)):
            problems.append(f"{case.name}: {complaint.splitlines()[0]}")
    return problems


def on_streams(calls: list, alone: list[torch.Tensor], ops: Mapping[str, Callable], streams: list) -> list[str]:
    """Several streams at once, fed from one thread."""
    torch.cuda.synchronize()
    results = []
    for i in range(ROUNDS * len(calls)):
        with torch.cuda.stream(streams[(i + i // len(calls)) % len(streams)]):
            results.append((i % len(calls), calls[i % len(calls)].run(ops)))
    torch.cuda.synchronize()
    return different("streams", results, calls, alone)


def on_threads(calls: list, alone: list[torch.Tensor], ops: Mapping[str, Callable], streams: list) -> list[str]:
    """Several threads at once, a stream each."""
    results, problems = [], []

    def work(first: int):
        try:
            with torch.cuda.stream(streams[first]):
                for i in range(first, first + ROUNDS):
                    results.append((i % len(calls), calls[i % len(calls)].run(ops)))
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


def different(where: str, results: list, calls: list, alone: list[torch.Tensor]) -> list[str]:
    """Which calls gave other bits than alone, and how often."""
    wrong = [index for index, out in results if not torch.equal(out, alone[index])]
    return [
        f"{where}: {calls[index].product.name}: {wrong.count(index)} results differ from the one made alone"
        for index in sorted(set(wrong))
    ]


def in_graphs(calls: list[Call | AttendCall], ops: Mapping[str, Callable]) -> list[str]:
    """All calls captured in one CUDA graph, replayed on new inputs; each replay against the truth."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call.run(ops) for call in calls]  # the poison is captured as well: every replay starts from NaN
    problems = []
    for turn in range(3):
        for call in calls:
            call.renew(turn)
        graph.replay()
        torch.cuda.synchronize()
        for call, out in zip(calls, outs, strict=True):
            if complaint := call.complaint(out):
                problems.append(f"graph, replay {turn}: {call.product.name}: {complaint.splitlines()[0]}")
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


def check(
    *, quick: bool = False, ops: Mapping[str, Callable] = OPS, families: Iterable[str | None] | None = None
) -> Gate:
    """All of it with `ops`, on every path, on the GPU."""
    need_gpu()
    families = paths() if families is None else list(families)
    cases = products(QUICK_LAUNCHES if quick else LAUNCHES)
    # Four products make a turn of all ops; the next turn takes the next path.
    runs = [replace(case, path=families[i // 4 % len(families)]) for i, case in enumerate(cases)]
    runs += attention_products(quick, families)
    problems = varied(runs, ops)
    calls = [case.call("cuda") for case in concurrent(families)]
    alone = [call.run(ops) for call in calls]
    at_once = 2 * ROUNDS * (len(calls) + THREADS)
    # The same streams twice: each keeps its workspace for good.
    streams, others = ([torch.cuda.Stream() for _ in range(count)] for count in (STREAMS, THREADS))
    problems += [*on_streams(calls, alone, ops, streams), *on_threads(calls, alone, ops, others)]
    before = held()
    problems += [*on_streams(calls, alone, ops, streams), *on_threads(calls, alone, ops, others)]
    problems += growth(before, held())
    problems += in_graphs(calls, ops)
    return judged(
        NAME,
        problems,
        f"{len(runs)} shapes, {at_once} launches on {STREAMS} streams and {THREADS} threads at once, "
        f"{len(calls)} products in a CUDA graph: right, and no memory kept",
        f"{len(problems)} faults in {len(runs)} shapes, {at_once} launches at once and a CUDA graph",
    )
