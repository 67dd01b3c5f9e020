"""Parallel compilation in processes, because the compiler is not thread-safe.

Workers are spawned, not forked: the compiler's threads and a CUDA context do not survive a fork. Inputs are facts and
outputs are bytes or a report, all picklable. A kernel that fails is reported in its `Outcome` and does not stop the
others.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from . import inspect
from .compile import build_object, cubin_of
from .families import compile_kernel, families, family_of
from .linked import link
from .packages import import_module

MOST_ERROR_TEXT = 1500  # characters; the compiler's messages can hold a whole module


@dataclass(frozen=True)
class Outcome:
    """Result of one item: a value, or an error."""

    item: Any
    value: Any
    error: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """Resources of a compiled kernel, and its problems."""

    resources: inspect.Resources
    dynamic_smem: int
    problems: tuple[str, ...]


def inspect_kernel(facts: Any) -> Report:
    """Compile the kernel of `facts` and read its machine code."""
    built = compile_kernel(facts, keep_cubin=True)
    return report_of(facts, cubin_of(built.compiled), int(built.metadata["smem"]))


def report_of(facts: Any, cubin: bytes, dynamic_smem: int) -> Report:
    """Read a kernel's machine code; raises inspect.MissingDisassembler without nvdisasm."""
    family, resources = family_of(facts), inspect.resources(cubin, facts.arch)
    problems = inspect.problems(
        resources,
        tensor_core=family.tensor_core(facts),
        dynamic_smem=dynamic_smem,
        smem_limit=family.smem_limit(facts),
        warp_specialised=family.warp_specialised(facts),
        overlaps_wgmmas=family.overlaps_wgmmas(facts),
    )
    problems = family.judge(facts, cubin, resources, problems)
    return Report(resources, dynamic_smem, tuple(problems))


def compile_object(named: tuple[Any, str]) -> tuple[bytes, dict[str, Any]]:
    """Compile a kernel: its object file, with a function of the given name, and its metadata."""
    facts, name = named
    return build_object(lambda: compile_kernel(facts), name)


def compile_library(named: tuple[Any, str]) -> tuple[bytes, dict[str, Any]]:
    """`compile_object` for a bundle: a shared library if there is a C compiler."""
    data, metadata = compile_object(named)
    return link(data), metadata


def attempt(function: Callable[[Any], Any], item: Any) -> Outcome:
    """Call `function`; exceptions are converted to text, since some of the compiler's cannot be pickled."""
    start = time.perf_counter()
    value, error = None, ""
    try:
        value = function(item)
    except Exception as exception:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(exception)).strip()
        error = f"{type(exception).__name__}: {plain[:MOST_ERROR_TEXT]}"
    return Outcome(item, value, error, time.perf_counter() - start)


class WorkerPool(ProcessPoolExecutor):
    """Process pool that can be stopped at once; an interrupted compilation would run on for seconds."""

    def submit(self, function, /, *args, **kwargs):
        # A process may be started here and inherits this mask, so that only the parent handles Ctrl-C. It would run the
        # parent's script again, up to `if __name__ == "__main__"`, if it found a __main__ with a file.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            return super().submit(function, *args, **kwargs)
        finally:
            sys.modules["__main__"] = script
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for submitted work; with `cancel_futures`, cancel pending work and kill running processes."""
        if cancel_futures:
            for process in list((self._processes or {}).values()):
                if process.pid is not None:  # it has been started
                    _kill(process.pid)
        super().shutdown(wait, cancel_futures=cancel_futures)


def _kill(pid: int) -> None:
    """Kill a worker and its children. A worker without its own process group has started none."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def worker_pool(jobs: int) -> WorkerPool:
    """Processes to submit `attempt` to, with the families of this process."""
    modules = tuple(dict.fromkeys(type(family).__module__ for family in families()))
    context = multiprocessing.get_context("spawn")
    return WorkerPool(jobs, context, initializer=_start_worker, initargs=(modules,))


def _start_worker(modules: tuple[str, ...]) -> None:
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # the compiler prints to stdout, which may be JSON output
    for module in modules:
        import_module(module)


def _end_with_parent() -> None:
    """Terminate this process when its parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def in_parallel(
    function: Callable[[Any], Any], items: Iterable[Any], jobs: int, *, own_process: bool = False
) -> Generator[Outcome, None, None]:
    """Yield the outcome of each item as it finishes; `function` must be a module-level function.

    Stopping the iteration, or an interrupt, ends the processes. A single job runs in this process, where a compilation
    handles Ctrl-C only at its end; with `own_process` it runs in a worker.
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
                why = "a compiler process died while compiling this kernel or a concurrent one"
                yield Outcome(futures[future], None, why, 0.0)
    finally:
        pool.shutdown(cancel_futures=True)
