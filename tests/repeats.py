"""Runs of calls that must give bitwise identical results: `faults` lists what is wrong with them."""

import os
from collections.abc import Iterable

import torch

from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.parallel import in_parallel
from cute_kernels.testing import reference

from . import calls
from .calls import Call, Case


def on_gpu(cases: Iterable[Case]) -> list[Call]:
    """The calls of cases, whose kernels are compiled first, in a process per CPU."""
    cases = list(cases)
    if KernelCache().directory is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        list(in_parallel(plan, cases, min(16, os.cpu_count() or 1)))
    return [case("cuda") for case in cases]


def plan(case: Case) -> str:
    """Plan a call, which compiles its kernel."""
    return str(case("cuda").plan())


def disturb(turn: int, device: torch.device) -> None:
    """Write memory, run a GEMM of changing size, and leave a block of changing size to the allocator."""
    torch.zeros((1 + turn % 5) << (24 if device.type == "cuda" else 12), dtype=torch.uint8, device=device)
    x = torch.ones(64 + 40 * (turn % 7), 128, device=device)
    torch.mm(x, x.t())


def differing(repeated: list[Call], runs: int) -> list[int]:
    """Number of runs of each call whose result differs from the first; the calls take turns.

    Memory that torch allocates is filled with NaN first. The host waits for the GPU only at the end.
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


def faults(repeated: list[Call], runs: int) -> list[str]:
    """Calls with wrong results, and calls whose results differ between runs."""
    found = [f"{call.name}: {text.splitlines()[0]}" for call in repeated if (text := call.complaint())]
    counts = zip(repeated, differing(repeated, runs), strict=True)
    return found + [f"{call.name}: {count} of {runs} results differ from the first" for call, count in counts if count]
