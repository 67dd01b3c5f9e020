"""The determinism gate: the right bits, and the same ones on every run.

Calls take turns a thousand times, so that each finds the caches, the memory and the clocks as another kernel left them;
in between comes a product of torch's of changing size. Results are compared with the first where they lie: what goes
wrong once in hundreds of runs is seen.
"""

from collections.abc import Iterable

import torch

from tests import calls, reference
from tests.calls import Call, Case

from .gate import Gate, judged, need_gpu

NAME = "determinism"
RUNS, QUICK_RUNS = 1000, 200


def cases() -> list[Case]:
    return calls.on_paths([*calls.repeated_products(4), *calls.repeated_attention(4)], calls.paths())


def disturb(turn: int, device: torch.device) -> None:
    """Other work: memory written, a product of another size, and a block of another size left to the allocator."""
    torch.zeros((1 + turn % 5) << (24 if device.type == "cuda" else 12), dtype=torch.uint8, device=device)
    x = torch.ones(64 + 40 * (turn % 7), 128, device=device)
    torch.mm(x, x.t())


def repeats(repeated: list[Call], runs: int) -> list[int]:
    """How many of `runs` runs of each call gave other bits than the first; the host waits for the GPU at the end only.

    Whatever torch allocates is full of NaN beforehand: outputs, and parts that a second kernel combines.
    """
    firsts: list = [None] * len(repeated)
    wrong = [torch.zeros((), dtype=torch.int64, device=call.out.device) for call in repeated]
    for turn in range(runs):
        for i, call in enumerate(repeated):
            disturb(turn + i, call.out.device)
            with reference.poisoned_empty():
                found = calls.bits(call.run())
            if firsts[i] is None:
                firsts[i] = found
            wrong[i] += (found != firsts[i]).any()
    return [int(count) for count in wrong]


def check(repeated: Iterable[Call] | None = None, *, quick: bool = False, runs: int | None = None) -> Gate:
    """Compare each call's result with the truth, then run all of them `runs` times in turns."""
    if repeated is None:
        need_gpu()
        repeated = [case("cuda") for case in cases()]
    repeated, runs = list(repeated), runs or (QUICK_RUNS if quick else RUNS)
    problems = [f"{call.name}: {text.splitlines()[0]}" for call in repeated if (text := call.complaint())]
    for call, count in zip(repeated, repeats(repeated, runs), strict=True):
        if count:
            problems.append(f"{call.name}: {count} of {runs} results differ from the first")
    passed = f"{len(repeated)} calls are right, and give the same bits in {runs} runs"
    return judged(NAME, problems, passed, f"{len(problems)} faults of {len(repeated)} calls in {runs} runs")
