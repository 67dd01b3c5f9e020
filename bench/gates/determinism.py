"""The determinism gate: the same bits on every run.

Products take turns, so that each finds the caches, the memory and the clocks as another kernel left them; in between
comes a product of torch's of changing size. One SHA-256 of all bytes of the output is kept for each run.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch

from .correctness import paths, spread
from .gate import Gate, judged
from .products import BF16, FP16, FP32, OPS, Product

NAME = "determinism"
RUNS = 20


def products(device: str, quick: bool = False) -> list[Product]:
    """A dense product and three sparse ones, of many tiles each on a GPU; small on the CPU, where no kernel runs."""
    scale = 1 if device == "cpu" else 4
    found = [
        Product("gemm", 256 * scale, 384 * scale, 256 * scale, "nt", terms="bias+gelu"),
        Product("bsr_matmul", 256 * scale, 264 * scale, 256 * scale, "nn", (128, 128), "empty_rows"),
        Product("bsr_linear", 256 * scale, 136 * scale, 256 * scale, "nn", (32, 32), "power_law", terms="bias"),
        Product("gemm", 200 * scale, 136 * scale, 520, "tn", dtype=FP16, out_dtype=FP32),
        Product("bsr_linear", 512 * scale, 72 * scale, 560, "nn", (512, 112), "uniform", BF16, FP32),
    ]
    return found[:3] if quick else found


def digest(t: torch.Tensor) -> str:
    """SHA-256 of a tensor's elements in row-major order."""
    return hashlib.sha256(t.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def disturb(turn: int, device: str) -> None:
    """Other work: memory written, a product of another size, and a block of another size left to the allocator."""
    torch.zeros((1 + turn % 5) << (24 if device == "cuda" else 12), dtype=torch.uint8, device=device)
    x = torch.ones(64 + 40 * (turn % 7), 128, device=device)
    torch.mm(x, x.t())


def check(
    cases: Iterable[Product] | None = None,
    *,
    quick: bool = False,
    runs: int = RUNS,
    ops: Mapping[str, Callable] = OPS,
    device: str | None = None,
    families: Iterable[str | None] | None = None,
) -> Gate:
    """Compute every case `runs` times on every path, in turns; more than one hash is a failure."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
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
    where = "" if device == "cuda" else ", of the CPU reference: no kernel ran"
    return judged(
        NAME,
        problems,
        f"{len(calls)} products, one hash each in {runs} runs{where}",
        f"{len(problems)} of {len(calls)} products changed between {runs} runs{where}",
    )
