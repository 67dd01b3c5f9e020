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

NAME = "stability"
LAUNCHES, QUICK_LAUNCHES = 400, 100
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


def concurrent(families: Iterable[str | None]) -> list[Product]:
    """What runs at once: every op, large enough that launches overlap."""
    cases = [
        Product("gemm", 1000, 776, 1032, "nn", terms="bias+gelu"),
        Product("bsr_matmul", 1024, 520, 1024, "nn", (128, 128), "power_law"),
        Product("gemm", 520, 1000, 776, "nt"),
        Product("bsr_linear", 768, 264, 1024, "nn", (64, 64), "empty_rows", FP16, FP16, "bias"),
    ]
    return spread(cases, families)


def varied(cases: Iterable[Product], ops: Mapping[str, Callable] = OPS, device: str = "cuda") -> list[str]:
    """One after another, each against the truth; what is wrong."""
    problems = []
    for case in cases:
        call = case.call(device)
        if complaint := call.complaint(call.run(ops)):
            problems.append(f"{case.name}: {complaint.splitlines()[0]}")
    return problems


def on_streams(calls: list[Call], alone: list[torch.Tensor], ops: Mapping[str, Callable]) -> list[str]:
    """Several streams at once, fed from one thread."""
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    torch.cuda.synchronize()
    results = []
    for i in range(ROUNDS * len(calls)):
        with torch.cuda.stream(streams[i % STREAMS]):
            results.append((i % len(calls), calls[i % len(calls)].run(ops)))
    torch.cuda.synchronize()
    return different("streams", results, calls, alone)


def on_threads(calls: list[Call], alone: list[torch.Tensor], ops: Mapping[str, Callable]) -> list[str]:
    """Several threads at once, a stream each."""
    results, problems = [], []

    def work(first: int):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(first, first + ROUNDS):
                    results.append((i % len(calls), calls[i % len(calls)].run(ops)))
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            problems.append(f"thread {first}: {reason(error)}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems + different("threads", results, calls, alone)


def different(where: str, results: list, calls: list[Call], alone: list[torch.Tensor]) -> list[str]:
    """Which calls gave other bits than alone, and how often."""
    wrong = [index for index, out in results if not torch.equal(out, alone[index])]
    return [
        f"{where}: {calls[index].product.name}: {wrong.count(index)} results differ from the one made alone"
        for index in sorted(set(wrong))
    ]


def in_graphs(calls: list[Call], ops: Mapping[str, Callable]) -> list[str]:
    """All calls captured in one CUDA graph, replayed on new inputs; each replay against the truth."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call.run(ops) for call in calls]  # the poison is captured as well: every replay starts from NaN
    problems = []
    for turn in range(3):
        for call in calls:
            renew(call, turn)
        graph.replay()
        torch.cuda.synchronize()
        for call, out in zip(calls, outs, strict=True):
            if complaint := call.complaint(out):
                problems.append(f"graph, replay {turn}: {call.product.name}: {complaint.splitlines()[0]}")
    return problems


def renew(call: Call, turn: int) -> None:
    """Other numbers of the same scale in the call's last dense operand, in place."""
    x = next(arg for arg in call.args[::-1] if isinstance(arg, torch.Tensor))
    x.copy_(-x.roll(1 + turn, 0))


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
    problems = varied(runs, ops)
    calls = [case.call("cuda") for case in concurrent(families)]
    alone = [call.run(ops) for call in calls]
    at_once = 2 * ROUNDS * (len(calls) + THREADS)
    problems += [*on_streams(calls, alone, ops), *on_threads(calls, alone, ops)]
    before = held()
    problems += [*on_streams(calls, alone, ops), *on_threads(calls, alone, ops)]
    problems += growth(before, held())
    problems += in_graphs(calls, ops)
    return judged(
        NAME,
        problems,
        f"{len(runs)} shapes, {at_once} launches on {STREAMS} streams and {THREADS} threads at once, "
        f"{len(calls)} products in a CUDA graph: right, and no memory kept",
        f"{len(problems)} faults in {len(runs)} shapes, {at_once} launches at once and a CUDA graph",
    )
