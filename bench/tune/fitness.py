"""Whether a candidate is right, and how fast it is: the part of the tuner that needs a GPU.

Right comes first: against fp64 truth, with twice the error that torch makes when it computes in fp32 and rounds once,
on an output poisoned with NaN, three times the same bits. Then speed, in heats beside the incumbent (race.py).

A kernel that hangs cannot be interrupted from outside: CUDA waits for it, and so does the exit of the process. So a
thread watches every launch, and ends the process at once with status 3 and the guilty configuration on stderr. What
was kept of earlier problems stays; a problem that was being tuned is lost, and runs again under another --seed.
"""

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from bench import timing
from cute_kernels import explain, gemm
from cute_kernels.matmul.plan import Plan
from cute_kernels.ops import viewed
from cute_kernels.reference import gemm as reference_gemm
from cute_kernels.runtime import kernels
from cute_kernels.runtime.device import path
from cute_kernels.tuned import ENABLED_VARIABLE
from sparse_collective import bsr_linear, bsr_matmul, random_bsr
from tests import reference

from .build import Builder
from .problems import DTYPES, TuneProblem
from .race import INCUMBENT, race
from .space import Candidate, Space

HANG_S = 20.0  # seconds a launch may take; the slowest sound kernel here takes 20 ms
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


@contextlib.contextmanager
def heuristics_only() -> Iterator[None]:
    """Plans inside are the heuristics' own, whatever tables there are."""
    before = os.environ.get(ENABLED_VARIABLE)
    os.environ[ENABLED_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENABLED_VARIABLE]
        else:
            os.environ[ENABLED_VARIABLE] = before


@dataclass
class Operands:
    """A call's tensors, its result in fp64, and the largest error that a candidate may make."""

    op: Callable
    args: tuple
    kwargs: dict
    out: torch.Tensor
    truth: torch.Tensor
    bound: float


def operands(problem: TuneProblem, device: str = "cuda", seed: int = 0) -> Operands:
    """Random normal operands of a problem, scaled so that results are of the order of 1."""
    g = torch.Generator(device).manual_seed(seed)
    dtype, out_dtype = (getattr(torch, DTYPES[name]) for name in (problem.dtype, problem.out))

    def randn(rows: int, cols: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(rows, cols, generator=g, device=device) * scale).to(dtype)

    M, N, K, scale = problem.M, problem.N, problem.K, 1 / math.sqrt(max(1.0, problem.K * problem.kept))
    if problem.op == "gemm":
        a = randn(M, K, scale) if problem.layout[0] == "N" else randn(K, M, scale).t()
        b = randn(K, N) if problem.layout[1] == "N" else randn(N, K).t()
        op, args, dense, shape = gemm, (a, b), (a, b), (M, N)
    else:
        kwargs = {"per_row": problem.per_row, "dtype": dtype, "device": device, "generator": g, "scale": scale}
        W = random_bsr((M, K), problem.block, **kwargs)
        if problem.op == "bsr_linear":
            x = randn(N, K)
            op, args, dense, shape = bsr_linear, (x, W), (x, W.to_dense().t()), (N, M)
        else:
            b = randn(K, N)
            op, args, dense, shape = bsr_matmul, (W, b), (W.to_dense(), b), (M, N)
    terms = {"activation": problem.activation}
    terms["bias"] = randn(1, shape[1])[0] if problem.bias else None
    residual = randn(*shape, dtype=out_dtype) if problem.residual else None
    out = torch.empty(shape, dtype=out_dtype, device=device)
    truth = reference.truth(*dense, residual=residual, **terms)
    torchs = reference_gemm(*dense, terms["bias"], problem.activation, residual, 1.0, 1.0, None, out_dtype, None)
    bound = FACTOR * float((torchs.double() - truth).abs().max()) + FLOOR * float(truth.abs().max())
    kwargs = terms | {"out": out} | ({} if residual is None else {"residual": residual})
    return Operands(op, args, kwargs, out, truth, bound)


def launcher(plan: Plan, problem: Operands) -> Callable[[Callable, Candidate], object]:
    """A launch of any kernel of the plan's problem: (function, candidate), past the ops and their checks."""
    kw, out = problem.kwargs, problem.out
    bias, residual = kw.get("bias"), kw.get("residual")
    if problem.op is gemm:
        a, b = problem.args
        tensors = viewed(plan.views, a, b, out, bias, residual) if plan.views else (a, b, out, bias, residual)
        return lambda function, candidate: function(*tensors, 1.0, 1.0, candidate.group, candidate.ctas)
    W, b = problem.args if problem.op is bsr_matmul else problem.args[::-1]
    rest = viewed(plan.views, b, out, bias, residual) if plan.views else (b, out, bias, residual)

    def launch(function: Callable, candidate: Candidate) -> object:
        tables = (W.col_indices, None, None)  # neither an order of work tiles nor groups
        if candidate.facts.config.sweep:
            facts = candidate.facts
            tables = W.sweep_plan(facts.config.cluster_m, facts.majors[1] == "k")
        elif candidate.facts.config.pairs:
            tables = (*W.pair_plan(), None)
        return function(W.crow_indices, *tables, W.values, *rest, 1.0, 1.0, candidate.group, candidate.ctas)

    return launch


@dataclass
class Fitness:
    """Scores of candidates for one problem on the current GPU: their time over the heuristics' pick's.

    `rejected` holds the reasons against those that are not right. Raises BrokenDevice where a kernel destroyed the
    CUDA context, and RuntimeError where the heuristics' own pick is wrong: then there is nothing to compare with.
    """

    problem: TuneProblem
    space: Space
    forced: str | None
    builder: Builder
    rejected: dict[Candidate, str] = field(default_factory=dict)
    best: float = 1.0

    def __post_init__(self):
        self.data = operands(self.problem)
        with heuristics_only(), path(self.forced) if self.forced else contextlib.nullcontext():
            plan = explain(self.data.op, *self.data.args, **self.data.kwargs)
        self.incumbent = Candidate(plan.facts, plan.group, plan.max_ctas)
        if self.incumbent not in (self.space.candidate(self.space.encode(c)) for c in self.space.known):
            raise RuntimeError(f"the space of {self.problem.text} lacks the heuristics' pick {self.incumbent}")
        self.launch = launcher(plan, self.data)
        self.right: dict[Candidate, bool] = {}
        self._functions = {plan.facts: kernels.function_for(plan.facts)}
        if reason := self.wrong(self.incumbent, self._functions[plan.facts]):
            raise RuntimeError(f"the heuristics' pick for {self.problem.text} is wrong: {reason}")

    # -- right ------------------------------------------------------------------------------------------------

    def wrong(self, candidate: Candidate, function: Callable) -> str:
        """Why a candidate's result cannot be used; "" if it can."""
        out, bits, first = self.data.out, {2: torch.int16, 4: torch.int32}[self.data.out.element_size()], None
        with watched(f"{self.problem.text}: {candidate}"):
            for run in range(RUNS):
                out.fill_(math.nan)
                try:
                    self.launch(function, candidate)
                    torch.cuda.synchronize()
                except Exception as error:
                    return self._refused(candidate, error)
                if first is None:
                    first = out.clone()
                elif not torch.equal(out.view(bits), first.view(bits)):
                    return f"run {run + 1} differs from the first"
            error = (first.double() - self.data.truth).abs()
            if not bool((error <= self.data.bound).all()):  # a NaN compares false
                return f"errs by {float(error.nan_to_num(math.inf).max()):.3g}, above {self.data.bound:.3g}"
        return ""

    def _refused(self, candidate: Candidate, error: Exception) -> str:
        """A launch that raised: the reason, if the device still works."""
        try:
            torch.zeros(1, device="cuda").add_(1).item()
        except Exception:
            raise BrokenDevice(f"{self.problem.text}: {candidate} broke the device: {error}") from error
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    # -- fast -------------------------------------------------------------------------------------------------

    def __call__(self, genomes: Sequence[tuple]) -> list[float]:
        """The score of each genome: time over the incumbent's, infinity where it cannot be used."""
        wanted = [self.space.candidate(genome) for genome in genomes]
        self._functions |= self.builder.functions(candidate.facts for candidate in wanted)
        sound = [candidate for candidate in dict.fromkeys(wanted) if self.usable(candidate)]
        scores = self.race(sound)
        self.best = min([self.best, *scores.values()])
        return [scores.get(candidate, math.inf) for candidate in wanted]

    def usable(self, candidate: Candidate) -> bool:
        """Whether a candidate compiled and is right; its first launch is here, alone and watched."""
        function = self._functions.get(candidate.facts)
        if function is None:
            return False
        if candidate not in self.right:
            reason = self.wrong(candidate, function)
            self.right[candidate] = not reason
            if reason:
                self.rejected[candidate] = reason
        return self.right[candidate]

    def race(self, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        named = {str(number): candidate for number, candidate in enumerate(candidates)}
        return {named[name]: ratio for name, ratio in race(self.timer(named), list(named), self.best).items()}

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
