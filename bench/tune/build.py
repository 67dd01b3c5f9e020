"""Candidates as compiled functions: from a bundle made ahead of time, or compiled now, in processes.

A candidate that does not compile, spills, or misses its tensor-core instruction is rejected, with the reason. Code is
read with nvdisasm; on a machine that has none, only what the ELF file says counts: stack frame and shared memory.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.runtime import inspect, keys
from cute_kernels.runtime.bundle import Bundle, BundleWriter
from cute_kernels.runtime.compile import Built, build_object, cubin_of, load_bytes, load_object
from cute_kernels.runtime.families import compile_kernel
from cute_kernels.runtime.parallel import Outcome, attempt, report_of, worker_pool

SASS, ELF = "SASS", "ELF"


@dataclass(frozen=True)
class Compiled:
    """A candidate's object file, a bundle's metadata for it, and what speaks against it.

    `checked` is "SASS" where nvdisasm read the code, "ELF" where there is none: see `problems_of`.
    """

    data: bytes
    metadata: Mapping[str, Any]
    problems: tuple[str, ...]
    checked: str


def compile_candidate(named: tuple[GemmFacts, str]) -> Compiled:
    """Compile the kernel of some facts, its function under the given name, once for the object and for its checks."""
    facts, name = named
    cubins = []

    def build() -> Built:
        built = compile_kernel(facts, keep_cubin=True)
        cubins.append(cubin_of(built.compiled))
        return built

    data, metadata = build_object(build, name)
    problems, checked = problems_of(cubins[0], facts, int(metadata["smem"]))
    return Compiled(data, metadata, tuple(problems), checked)


def problems_of(cubin: bytes, facts: GemmFacts, dynamic_smem: int) -> tuple[list[str], str]:
    """What speaks against a kernel, and what was read to find it: "SASS", or without nvdisasm "ELF".

    From the ELF file alone a spill shows as a stack frame; serialised WGMMAs and a dropped setmaxnreg do not show.
    """
    try:
        return list(report_of(facts, cubin, dynamic_smem).problems), SASS
    except inspect.MissingDisassembler:
        frame = inspect.frame(cubin, facts.arch)
        return inspect.stack_problems(frame) + inspect.smem_problems(frame, dynamic_smem, facts.spec.smem), ELF


@dataclass
class Counts:
    """What became of the candidates asked for; `checked` collects how the compiled ones were."""

    compiled: int = 0
    from_bundle: int = 0
    rejected: int = 0


class Builder:
    """Compiles in `jobs` processes, which live until `close`. Remembers what it has built and what it rejected."""

    def __init__(self, jobs: int, bundle: str | Path | None = None):
        """`bundle`: a folder to look into first; BundleError if it was made from other sources or versions."""
        self.counts = Counts()
        self.checked: set[str] = set()
        self.reasons: dict[GemmFacts, str] = {}
        self._functions: dict[GemmFacts, Any] = {}
        self._bundle = None if bundle is None else Bundle(bundle)
        self._jobs, self._pool = jobs, None

    def functions(self, wanted: Iterable[GemmFacts]) -> dict[GemmFacts, Any]:
        """The callable of each kernel that is sound; of the others `reasons` says what is wrong with them."""
        wanted = list(dict.fromkeys(wanted))
        missing = [f for f in wanted if f not in self._functions and f not in self.reasons and not self._bundled(f)]
        for facts, compiled in self.compile(missing):
            self._functions[facts] = load_bytes(compiled.data, _name(facts))
        return {facts: self._functions[facts] for facts in wanted if facts in self._functions}

    def compile(self, wanted: Iterable[GemmFacts]) -> Iterable[tuple[GemmFacts, Compiled]]:
        """The sound ones among these kernels as they are compiled; the others go to `reasons`."""
        for outcome in self._outcomes([(facts, _name(facts)) for facts in wanted]):
            facts = outcome.item[0]
            self.counts.compiled += 1
            reason = outcome.error
            if not reason:
                self.checked.add(outcome.value.checked)
                reason = "; ".join(outcome.value.problems)
            if reason:
                self.reasons[facts] = reason
                self.counts.rejected += 1
            else:
                yield facts, outcome.value

    def _outcomes(self, named: list[tuple[GemmFacts, str]]) -> Iterable[Outcome]:
        if not named:
            return
        if self._pool is None:
            self._pool = worker_pool(self._jobs)
        futures = {self._pool.submit(attempt, compile_candidate, item): item for item in named}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:  # by this kernel or by one beside it: none of them is tried again
                self._pool = None
                yield Outcome(futures[future], None, "the compiling process died", 0.0)

    def _bundled(self, facts: GemmFacts) -> bool:
        """Take a kernel from the bundle, if it has it."""
        key = _key(facts)
        found = self._bundle.find(key) if self._bundle else None
        if found is None:
            return False
        self._functions[facts] = load_object(found[0], keys.function_name(key))
        self.counts.from_bundle += 1
        return True

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> "Builder":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def write_candidates(folder: str | Path, wanted: Iterable[GemmFacts], builder: Builder, progress=lambda: None) -> int:
    """Compile the sound ones among these kernels into a bundle in `folder`; returns how many there are.

    `progress` is called after each of them.
    """
    writer, count = BundleWriter(folder), 0
    for facts, compiled in builder.compile(dict.fromkeys(wanted)):
        writer.add(facts, compiled.data, dict(compiled.metadata))
        count += 1
        progress()
    writer.finish()
    return count


def _key(facts: GemmFacts) -> str:
    return keys.entry_key(facts, keys.source_fingerprint(), keys.versions())


def _name(facts: GemmFacts) -> str:
    return keys.function_name(_key(facts))
