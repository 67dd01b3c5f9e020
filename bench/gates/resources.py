"""The resources gate: registers, spills, stack, shared memory and tensor-core instructions, read from cubins.

Compiling needs no GPU, so this gate holds every architecture's kernels, whatever machine it runs on.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import attention.families  # noqa: F401  (importing registers the kernels)
import sparse_collective.families  # noqa: F401
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.families import families, family_of
from cute_kernels.runtime.parallel import Report, in_parallel, inspect_kernel

from .gate import Gate, Skip, judged

NAME = "resources"
QUICK = ("sm_80", "sm_90")  # the other architectures take the sm_80 path's kernels


def catalogues(quick: bool, package: tuple[str, ...] = ()) -> list:
    """Each architecture's kernels, of all families or of some packages'; with `quick` a few typical ones."""
    found = [f for f in families() if not package or type(f).__module__.partition(".")[0] in package]
    archs = QUICK if quick else ARCHS
    return [facts for arch in archs for family in found for facts in family.catalogue(arch, quick)]


def without_collections(compiled: Callable[..., Report], facts) -> Report:
    """compiled(facts) without garbage collections: searching through what tracing builds takes a sixth of the time."""
    gc.disable()
    try:
        return compiled(facts)
    finally:
        gc.enable()


def check(
    facts: Iterable | None = None,
    *,
    quick: bool = False,
    package: tuple[str, ...] = (),
    compiled: Callable[..., Report] = inspect_kernel,
) -> Gate:
    """Compile the kernels of `facts`, by default of `catalogues`, in a process a CPU, and read their machine code.

    `compiled` does it for the facts of one kernel, and is a function of a module.
    """
    try:
        inspect.find_nvdisasm()
    except inspect.MissingDisassembler as error:
        raise Skip(str(error)) from None
    facts = catalogues(quick, package) if facts is None else list(facts)
    problems, bad, count, most = [], 0, Counter(), 0
    for outcome in in_parallel(partial(without_collections, compiled), facts, os.cpu_count() or 1):
        found = [outcome.error] if outcome.error else outcome.value.problems
        count[outcome.item.arch] += 1
        if outcome.value:
            most = max(most, outcome.value.resources.registers)
        if found:
            bad += 1
            problems += [
                f"{outcome.item.arch} {family_of(outcome.item).title(outcome.item)}",
                *(f"    {problem}" for problem in found),
            ]
    kernels = ", ".join(f"{arch} {n}" for arch, n in sorted(count.items()))
    return judged(
        NAME,
        problems,
        f"{len(facts)} kernels ({kernels}): none spills, all use the tensor cores, at most {most} registers at entry",
        f"{bad} of {len(facts)} kernels should not be shipped",
    )
