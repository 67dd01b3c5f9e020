"""Compile the kernels that gates are about to launch, in many processes, into the disk cache.

The compiler is not thread-safe and takes a second or more a kernel; a gate by itself compiles one after another. This
only saves time: what does not get compiled here, the gate compiles, or fails to.
"""

import os
from collections.abc import Iterable

from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.parallel import in_parallel

from . import correctness, determinism, stability
from .products import Product
from .products_attention import Attend

MOST_JOBS = 8  # each holds a CUDA context: some 500 MB of the device


def products(names: Iterable[str], quick: bool) -> list[Product | Attend]:
    """What the gates of these names compute, on every path of this GPU."""
    families, found = correctness.paths(), []
    if correctness.NAME in names:
        found += correctness.spread(correctness.products(quick), families)
    if determinism.NAME in names:
        found += correctness.spread(determinism.products("cuda", quick), families)
    if stability.NAME in names:
        found += stability.concurrent(families)
        found += stability.attention_products(quick, families)
    return found


def plan(product: Product | Attend) -> str:
    """Plan the call, which compiles its kernel, and describe the plan."""
    return str(product.call("cuda").plan())


def kernels(cases: Iterable[Product | Attend]) -> int:
    """How many of the cases were planned; none where this process's kernels are not kept on disk."""
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    if jobs < 2 or KernelCache().directory is None:
        return 0
    return sum(not outcome.error for outcome in in_parallel(plan, cases, jobs))
