"""Compile the kernels that gates are about to launch, in many processes, into the disk cache.

A gate by itself compiles one kernel after another. This only saves time: what does not get compiled here, the gate
compiles, or fails to.
"""

import os
from collections.abc import Iterable

from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.parallel import in_parallel
from tests.calls import Case

from . import determinism, stability
from .correctness import MOST_JOBS


def cases(names: Iterable[str], quick: bool) -> list[Case]:
    """What the gates of these names compute, on every path of this GPU."""
    found = determinism.cases() if determinism.NAME in names else []
    return found + (stability.to_compile(quick) if stability.NAME in names else [])


def plan(case: Case) -> str:
    """Plan the call, which compiles its kernel, and describe the plan."""
    return str(case("cuda").plan())


def kernels(cases: Iterable[Case]) -> int:
    """How many of the cases were planned; none where this process's kernels are not kept on disk."""
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    if jobs < 2 or KernelCache().directory is None:
        return 0
    return sum(not outcome.error for outcome in in_parallel(plan, cases, jobs))
