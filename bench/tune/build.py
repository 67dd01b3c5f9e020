"""Candidates as compiled functions. What does not compile, spills or misses its tensor-core instruction is rejected."""

from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.runtime import inspect, keys
from cute_kernels.runtime.compile import Built, build_object, cubin_of, load_bytes
from cute_kernels.runtime.families import compile_kernel
from cute_kernels.runtime.parallel import attempt, report_of, worker_pool


def compile_candidate(facts: GemmFacts) -> tuple[bytes, str, tuple[str, ...]]:
    """The object file of a kernel, a hash of its machine code and the problems in it, from one compilation."""
    found = []

    def build() -> Built:
        built = compile_kernel(facts, keep_cubin=True)
        cubin = cubin_of(built.compiled)
        found.append((inspect.code_hash(cubin), report_of(facts, cubin, int(built.metadata["smem"])).problems))
        return built

    data, _ = build_object(build, name_of(facts))
    return data, *found[0]


def name_of(facts: GemmFacts) -> str:
    return keys.function_name(keys.entry_key(facts, keys.source_fingerprint(), keys.versions()))


class Builder:
    """Compiles in `jobs` processes, which live until `close`.

    Keeps functions, hashes of their machine code, and `reasons` against other kernels.
    """

    def __init__(self, jobs: int):
        inspect.find_nvdisasm()  # without it nothing could be judged
        self.compiled = 0
        self.codes: dict[GemmFacts, str] = {}
        self.reasons: dict[GemmFacts, str] = {}
        self._functions: dict[GemmFacts, Callable] = {}
        self._jobs, self._pool = jobs, None

    def functions(self, wanted: Iterable[GemmFacts]) -> dict[GemmFacts, Callable]:
        """The function of each kernel that is sound."""
        wanted = list(dict.fromkeys(wanted))
        missing = [facts for facts in wanted if facts not in self._functions and facts not in self.reasons]
        if missing and self._pool is None:
            self._pool = worker_pool(self._jobs)
        futures = {self._pool.submit(attempt, compile_candidate, facts): facts for facts in missing}
        for future in as_completed(futures):
            self.compiled += 1
            facts, data, code = futures[future], b"", ""
            try:
                outcome = future.result()
                data, code, problems = outcome.value or (b"", "", [outcome.error])
            except BrokenProcessPool:  # by this kernel or by one beside it: none of them is tried again
                self._pool, problems = None, ["the compiling process died"]
            if problems:
                self.reasons[facts] = "; ".join(problems)
            else:
                self._functions[facts] = load_bytes(data, name_of(facts))
                self.codes[facts] = code
        return {facts: self._functions[facts] for facts in wanted if facts in self._functions}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
