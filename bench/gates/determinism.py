"""The determinism gate: the same bits on every run.

Products take turns, so that each finds the caches, the memory and the clocks as another kernel left them; in between
comes a product of torch's of changing size. One SHA-256 of all bytes of the output is kept for each run. Then each is
run a thousand times, compared with its first result where it lies: what goes wrong once in hundreds of runs is seen.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch

from tests import reference

from .correctness import paths, spread
from .gate import Gate, judged
from .products import BF16, FP16, FP32, OPS, Call, Product
from .products_attention import Attend, AttendCall

NAME = "determinism"
RUNS = 20
REPEATS = 1000


def products(device: str, quick: bool = False) -> list[Product | Attend]:
    """Dense products, sparse ones, attention: of many tiles each on a GPU; small on the CPU, where no kernel runs."""
    scale = 1 if device == "cpu" else 4
    found = [
        Product("gemm", 256 * scale, 384 * scale, 256 * scale, "nt", terms="bias+gelu"),
        Product("bsr_matmul", 256 * scale, 264 * scale, 256 * scale, "nn", (128, 128), "empty_rows"),
        Product("bsr_linear", 256 * scale, 136 * scale, 256 * scale, "nn", (32, 32), "power_law", terms="bias"),
        Product("gemm", 200 * scale, 136 * scale, 520, "tn", dtype=FP16, out_dtype=FP32),
        Product("bsr_linear", 512 * scale, 72 * scale, 560, "nn", (512, 112), "uniform", BF16, FP32),
    ]
    return (found[:3] if quick else found) + attention_products(scale)


def attention_products(scale: int = 4) -> list[Attend]:
    """What could differ between runs: CTAs that draw their tiles, of all three schedules, and parts that are combined.

    With a scale of 4 there are more tiles than 132 SMs have CTAs, so that tiles are drawn.
    """
    side = 250 * scale
    return [
        Attend("dense", 3, 2 * scale, 2, side, side + 100, 128, causal=True),
        Attend("blocks", 2, 3 * scale, 1, side, side + 100, 128, block=(128, 128)),
        Attend("blocks", 2, 3 * scale, 1, side, side + 100, 64, block=(64, 64)),
        Attend("packed", 9, 2 * scale, 2, side, side, 64, causal=True),
        Attend("cache", 4, 8, 2, 2, 1024 * scale, 128, causal=True, splits=7, page=64),
        Attend("cache", 4, 8, 2, 2, 1024 * scale, 64, splits=16),
    ]


def digest(t: torch.Tensor) -> str:
    """SHA-256 of a tensor's elements in row-major order."""
    return hashlib.sha256(t.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def disturb(turn: int, device: str) -> None:
    """Other work: memory written, a product of another size, and a block of another size left to the allocator."""
    torch.zeros((1 + turn % 5) << (24 if device == "cuda" else 12), dtype=torch.uint8, device=device)
    x = torch.ones(64 + 40 * (turn % 7), 128, device=device)
    torch.mm(x, x.t())


def bits(t: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def repeats(call: Call | AttendCall, runs: int, ops: Mapping[str, Callable] = OPS) -> int:
    """How many of `runs` runs gave other bits than the first one; the host waits for the GPU at the end only.

    Whatever torch allocates is full of NaN beforehand: outputs, and parts that a second kernel combines.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=call.device)
    first = None
    for turn in range(runs):
        disturb(turn, call.device.type)
        with reference.poisoned_empty():
            found = bits(call.run(ops))
        first = found if first is None else first
        wrong += (found != first).any()
    return int(wrong)


def check(
    cases: Iterable[Product | Attend] | None = None,
    *,
    quick: bool = False,
    runs: int = RUNS,
    many: int | None = None,
    ops: Mapping[str, Callable] = OPS,
    device: str | None = None,
    families: Iterable[str | None] | None = None,
) -> Gate:
    """Compute every case `runs` times on every path, in turns; more than one hash is a failure. Then each `many` times,
    by default REPEATS, twice on the CPU; other bits than the first are a failure."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    many = (REPEATS if device == "cuda" else 2) if many is None else many
    cases = products(device, quick) if cases is None else list(cases)
    families = paths() if families is None else list(families)
    calls = [case.call(device) for case in spread(cases, families)]
    hashes = [Counter() for _ in calls]
    for turn in range(runs):
        for call, found in zip(calls, hashes, strict=True):
            disturb(turn, device)
            found[digest(call.run(ops))] += 1
    problems = [
        f"{call.product.name}: {len(found)} different results in {runs} runs ({', '.join(map(str, found.values()))})"
        for call, found in zip(calls, hashes, strict=True)
        if len(found) > 1
    ]
    for call in calls:
        if wrong := repeats(call, many, ops):
            problems.append(f"{call.product.name}: {wrong} of {many} results differ from the first")
    changed = len({line.rpartition(": ")[0] for line in problems})
    where = "" if device == "cuda" else ", of the CPU reference: no kernel ran"
    return judged(
        NAME,
        problems,
        f"{len(calls)} products, one hash each in {runs} runs, the same bits in {many} more{where}",
        f"{changed} of {len(calls)} products changed between {runs} or {many} runs{where}",
    )
