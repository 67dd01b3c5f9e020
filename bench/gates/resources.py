"""The resources gate: registers, spills, stack, shared memory and tensor-core instructions, read from cubins.

Compiling needs no GPU, so this gate holds every architecture's kernels, whatever machine it runs on.
"""

import gc
import os
from collections import Counter
from collections.abc import Iterable

from cute_kernels.arch import ARCHS
from cute_kernels.matmul.catalogue import kernel_configurations, name_of
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.runtime import inspect
from cute_kernels.runtime.parallel import Report, in_parallel, inspect_kernel

from .gate import Gate, Skip, judged

NAME = "resources"


def inspect_at_once(facts: GemmFacts) -> Report:
    """inspect_kernel without garbage collections: looking through what tracing builds takes a sixth of the time."""
    gc.disable()
    try:
        return inspect_kernel(facts)
    finally:
        gc.enable()


def check(facts: Iterable[GemmFacts] | None = None, *, quick: bool = False, jobs: int | None = None) -> Gate:
    """Compile the kernels of `facts`, by default each architecture's catalogue, and read their machine code.

    With `quick` three kernels an architecture. `jobs` is how many processes compile, by default one a CPU.
    """
    try:
        inspect.find_nvdisasm()
    except inspect.MissingDisassembler as error:
        raise Skip(str(error)) from None
    facts = [f for arch in ARCHS for f in kernel_configurations(arch, quick)] if facts is None else list(facts)
    facts.sort(key=lambda f: f.epilogue.is_light)  # what takes longest first, so that no CPU waits at the end
    problems, bad, count, most = [], 0, Counter(), 0
    for outcome in in_parallel(inspect_at_once, facts, jobs or os.cpu_count() or 1):
        found = [outcome.error] if outcome.error else outcome.value.problems
        count[outcome.item.arch] += 1
        if outcome.value:
            most = max(most, outcome.value.resources.registers)
        if found:
            bad += 1
            problems += [f"{outcome.item.arch} {name_of(outcome.item)}", *(f"    {problem}" for problem in found)]
    kernels = ", ".join(f"{arch} {n}" for arch, n in sorted(count.items()))
    return judged(
        NAME,
        problems,
        f"{len(facts)} kernels ({kernels}): none spills, all use the tensor cores, at most {most} registers at entry",
        f"{bad} of {len(facts)} kernels should not be shipped",
    )
