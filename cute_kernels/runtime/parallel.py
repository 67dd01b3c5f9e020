"""Many kernels compiled at once, in processes, because the compiler is not thread-safe.

Workers are spawned, not forked: the compiler's threads and a CUDA context do not survive a fork. What goes in is
facts and what comes out is bytes or a report, all of it picklable. A kernel that fails says so in its `Outcome`
and does not stop the others.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from . import inspect
from .compile import build_object, cubin_of
from .families import compile_kernel, families, family_of
from .packages import import_module

MOST_ERROR_TEXT = 1500  # characters; the compiler's messages can hold a whole module


@dataclass(frozen=True)
class Outcome:
    """What became of one item: a value, or the reason why there is none."""

    item: Any
    value: Any
    error: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """What a kernel uses against what it may use."""

    resources: inspect.Resources
    dynamic_smem: int
    problems: tuple[str, ...]


def inspect_kernel(facts: Any) -> Report:
    """Compile the kernel of `facts` and read its machine code."""
    built = compile_kernel(facts, keep_cubin=True)
    return report_of(facts, cubin_of(built.compiled), int(built.metadata["smem"]))


def report_of(facts: Any, cubin: bytes, dynamic_smem: int) -> Report:
    """Read a kernel's machine code; inspect.MissingDisassembler where nothing can."""
    family, resources = family_of(facts), inspect.resources(cubin, facts.arch)
    problems = inspect.problems(
        resources,
        tensor_core=family.tensor_core(facts),
        dynamic_smem=dynamic_smem,
        smem_limit=family.smem_limit(facts),
        warp_specialised=family.warp_specialised(facts),
    )
    problems = family.judge(facts, cubin, resources, problems)
    return Report(resources, dynamic_smem, tuple(problems))


def compile_object(named: tuple[Any, str]) -> tuple[bytes, dict[str, Any]]:
    """The object file of a kernel, its function under the given name, and its metadata: a bundle's entry."""
    facts, name = named
    return build_object(lambda: compile_kernel(facts), name)


def attempt(function: Callable[[Any], Any], item: Any) -> Outcome:
    """Call `function`; an exception becomes text, because the compiler's own do not all pickle."""
    start = time.perf_counter()
    value, error = None, ""
    try:
        value = function(item)
    except Exception as exception:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(exception)).strip()
        error = f"{type(exception).__name__}: {plain[:MOST_ERROR_TEXT]}"
    return Outcome(item, value, error, time.perf_counter() - start)


class WorkerPool(ProcessPoolExecutor):
    """Processes whose work can be ended at once: an interrupted compilation would go on for seconds."""

    def submit(self, function, /, *args, **kwargs):
        # A process may be started here. It inherits this mask: Ctrl-C is this process's to handle, from the start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(function, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for what was submitted; or, with `cancel_futures`, end what waits and what runs."""
        if cancel_futures:
            for process in list((self._processes or {}).values()):
                _kill(process.pid)
        super().shutdown(wait, cancel_futures=cancel_futures)


def _kill(pid: int) -> None:
    """End a worker with what it has started. One that has no group of its own yet has started nothing."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def worker_pool(jobs: int) -> WorkerPool:
    """Processes to submit `attempt` to, which know the families that this one knows."""
    modules = tuple(dict.fromkeys(type(family).__module__ for family in families()))
    context = multiprocessing.get_context("spawn")
    return WorkerPool(jobs, context, initializer=_start_worker, initargs=(modules,))


def _start_worker(modules: tuple[str, ...]) -> None:
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what the compiler prints: stdout may be somebody's JSON
    for module in modules:
        import_module(module)


def _end_with_parent() -> None:
    """A parent that was killed leaves nobody who would end this process."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def in_parallel(
    function: Callable[[Any], Any], items: Iterable[Any], jobs: int, *, own_process: bool = False
) -> Iterator[Outcome]:
    """The outcome of each item, as they come; `function` is a module's own.

    Whoever stops to iterate, or is interrupted, ends the processes. One job stays in this process, where a compilation
    notices Ctrl-C only at its end; with `own_process` it does not.
    """
    items = list(items)
    jobs = min(jobs, len(items))
    if jobs < 2 and not own_process:
        for item in items:
            with contextlib.redirect_stdout(sys.stderr):
                outcome = attempt(function, item)
            yield outcome
        return
    if not items:
        return
    pool = worker_pool(jobs)
    try:
        futures = {pool.submit(attempt, function, item): item for item in items}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                why = "a compiling process died, of this kernel or of one beside it"
                yield Outcome(futures[future], None, why, 0.0)
    finally:
        pool.shutdown(cancel_futures=True)
