"""Whether a candidate is right, and how fast it is: the part of the tuner that needs a GPU.

Right comes first: at most twice the error of torch's fp32 product against fp64, on an output full of NaN, and the same
bits three times. Then speed, in heats beside the incumbent (search.race).

CUDA waits for a kernel that hangs, and so does the exit of the process. So a thread watches every launch and ends the
process with status 3 and the configuration on stderr. Winners of earlier problems are kept by then.
"""

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cute_kernels import gemm
from cute_kernels.matmul.choose import choose
from cute_kernels.matmul.plan import Plan, viewed
from cute_kernels.runtime import families
from cute_kernels.runtime.device import path
from sparse_collective import bsr_linear, bsr_matmul, random_bsr
from tests import calls, reference
from tests.calls import Call

from .. import timing
from .build import Builder
from .problems import DTYPES, TuneProblem
from .search import INCUMBENT, race
from .space import Candidate, Space

HANG_S = 20.0  # seconds that a launch may take; the slowest sound kernel here takes 20 ms
HANG_STATUS = 3
FACTOR = 2.0  # of torch's own error
FLOOR = 2.0**-20  # of the largest magnitude: what fp32 accumulation in another order may differ by
RUNS = 3


class BrokenDevice(RuntimeError):
    """A kernel has left the CUDA context unusable: this process cannot go on."""


@contextlib.contextmanager
def watched(what: str, seconds: float = HANG_S) -> Iterator[None]:
    """End the process with status 3 if the block takes longer than `seconds`, and say what was running."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            print(f"\nhung for {seconds:.0f} s, giving up: {what}", file=sys.stderr, flush=True)
            os._exit(HANG_STATUS)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@dataclass
class Truth:
    """A call's result in fp64, and the largest error that a candidate may make."""

    exact: torch.Tensor
    bound: float


def operands(problem: TuneProblem, device: str = "cuda") -> tuple[Call, Truth]:
    """A problem's call on random normal operands, scaled so that results are of the order of 1, and its truth."""
    reference.seed(problem.text)
    M, N, K = problem.M, problem.N, problem.K
    dtype, out_dtype = (getattr(torch, DTYPES[name]) for name in (problem.dtype, problem.out))
    kw, k = {"dtype": dtype, "device": device}, max(1, round(K * problem.kept))
    b = reference.operand(K, N, "t" if problem.op == "bsr_linear" else problem.layout[1].lower(), **kw)
    if problem.op == "gemm":
        a = reference.operand(M, K, problem.layout[0].lower(), k=k, **kw)
        op, args, dense = gemm, (a, b), (a, b)
    else:
        W = random_bsr((M, K), problem.block, per_row=problem.per_row, scale=1 / math.sqrt(k), **kw)
        op, args, dense = bsr_matmul, (W, b), (W.to_dense(), b)
        if problem.op == "bsr_linear":
            op, args, dense = bsr_linear, (b.t(), W), (b.t(), dense[0].t())
    call = calls.product(op, args, dense, out_dtype=out_dtype, terms=problem.terms, device=device)
    exact, torchs = reference.exact_and_torch(*dense, out_dtype, **call.terms)
    bound = FACTOR * float((torchs.double() - exact).abs().max()) + FLOOR * float(exact.abs().max())
    return call, Truth(exact, bound)


def launcher(plan: Plan, call: Call) -> Callable[[Callable, Candidate], object]:
    """A launch of any kernel of the call's problem into `call.out`: (function, candidate), past the ops' checks."""
    bias, residual = call.terms.get("bias"), call.terms.get("residual")
    W, b = call.args if call.op is not bsr_linear else call.args[::-1]
    rest = (W, b, call.out, bias, residual, None) if call.op is gemm else (b, call.out, bias, residual, None)
    rest = viewed(plan.views, *rest) if plan.views else rest

    def launch(function: Callable, candidate: Candidate) -> object:
        facts, tables = candidate.facts, ()
        if facts.block:
            tables = W.crow_indices, *families.family_of(facts).pattern(facts, W, None, None), W.values
        return function(*tables, *rest, 1.0, 1.0, *facts.counts(candidate.group, candidate.ctas))

    return launch


class Fitness:
    """Scores of candidates for one problem on the current GPU: their time over the heuristics' pick's.

    `rejected` holds the reasons against those that are not right. Raises BrokenDevice where a kernel destroyed the
    CUDA context, and RuntimeError where the heuristics' own pick is wrong: then there is nothing to compare with.
    """

    def __init__(self, problem: TuneProblem, space: Space, builder: Builder):
        self.problem, self.space, self.builder = problem, space, builder
        self.rejected: dict[Candidate, str] = {}
        self.best = 1.0
        call, self.truth = operands(problem)
        with path(space.path):
            self.launch, self.out = launcher(call.plan(), call), call.out
        self.incumbent = Candidate(*choose(space.problem, space.spec, space.sms, space.path)[:3])
        self._right: set[Candidate] = set()
        self._functions = {self.incumbent.facts: families.function_for(self.incumbent.facts)}
        if not self.usable(self.incumbent):
            raise RuntimeError(f"the heuristics' pick for {problem.text} is wrong: {self.rejected[self.incumbent]}")

    # -- right ------------------------------------------------------------------------------------------------

    def usable(self, candidate: Candidate) -> bool:
        """Whether a candidate compiled and is right; its first launch is here, alone and watched."""
        function = self._functions.get(candidate.facts)
        if function is None or candidate in self.rejected:
            return False
        if candidate not in self._right:
            if reason := self.wrong(candidate, function):
                self.rejected[candidate] = reason
                return False
            self._right.add(candidate)
        return True

    def wrong(self, candidate: Candidate, function: Callable) -> str:
        """Why a candidate's result cannot be used; "" if it can."""
        out, first = self.out, None
        with watched(f"{self.problem.text}: {candidate}"):
            for run in range(RUNS):
                out.fill_(math.nan)
                try:
                    self.launch(function, candidate)
                    torch.cuda.synchronize()
                except Exception as error:
                    if not device_works():
                        raise BrokenDevice(f"{self.problem.text}: {candidate} broke the device: {error}") from error
                    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if first is None:
                    first = out.clone()
                elif not torch.equal(calls.bits([out]), calls.bits([first])):
                    return f"run {run + 1} differs from the first"
            error = (first.double() - self.truth.exact).abs()
            if not bool((error <= self.truth.bound).all()):  # a NaN compares false
                return f"errs by {float(error.nan_to_num(math.inf).max()):.3g}, above {self.truth.bound:.3g}"
        return ""

    # -- fast -------------------------------------------------------------------------------------------------

    def __call__(self, wanted: Sequence[Candidate]) -> list[float]:
        """The score of each candidate: time over the incumbent's, infinity where it cannot be used."""
        self._functions |= self.builder.functions(candidate.facts for candidate in wanted)
        named = {str(number): candidate for number, candidate in enumerate(wanted) if self.usable(candidate)}
        ratios = race(self.timer(named), list(named), self.best)
        self.best = min([self.best, *ratios.values()])
        return [ratios.get(str(number), math.inf) for number in range(len(wanted))]

    def timer(self, named: dict[str, Candidate], warm_s: float = 0.05) -> Callable:
        """A race's timer: microseconds of each name and of the incumbent, in turns, L2 flushed."""
        everybody = named | {INCUMBENT: self.incumbent}

        def time(names: Sequence[str], rounds: int) -> dict[str, list[float]]:
            calls = {name: self._call(everybody[name]) for name in names}
            guilty = "; ".join(str(everybody[name]) for name in names)
            with watched(f"{self.problem.text}, one of: {guilty}", HANG_S + warm_s):
                return timing.interleaved(calls, warm_s=warm_s, rounds=rounds)

        return time

    def _call(self, candidate: Candidate) -> Callable:
        function, launch = self._functions[candidate.facts], self.launch
        return lambda: launch(function, candidate)

    def final(self, finalists: Sequence[Candidate], rounds: int = 100) -> dict[Candidate, tuple[float, float]]:
        """(µs, µs of the incumbent) of each finalist: medians of one long heat on a settled card."""
        named = {str(number): candidate for number, candidate in enumerate(finalists)}
        times = self.timer(named, warm_s=1.0)([INCUMBENT, *named], rounds)
        base = timing.median(times[INCUMBENT])
        return {candidate: (timing.median(times[name]), base) for name, candidate in named.items()}


def device_works() -> bool:
    try:
        torch.zeros(1, device="cuda").add_(1).item()
        return True
    except RuntimeError:
        return False
