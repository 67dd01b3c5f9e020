"""One measured row: a product, ours, and every peer that can compute it, timed in turns.

A peer is a name, the floating-point operations it does usefully, and a `setup` that makes its call. A peer that is not
installed, refuses the problem or crashes becomes a `Timing` that says so; only ours must run.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from . import timing

OURS = "ours"
FASTEST = "the fastest peer"  # what a row may be held against, instead of a peer of that name


@dataclass(frozen=True)
class Problem:
    """What is computed, as result files name it. `block` is None and `density` 1 for a dense product."""

    op: str  # gemm, bsr_matmul, bsr_linear, ...; of a layer or a model what it is
    M: int
    N: int
    K: int
    block: tuple[int, int] | None = None
    density: float = 1.0
    layout: str = "NN"  # of a dense product: whether B is (K, N) or the transpose of (N, K)
    dtype: str = "bfloat16"
    path: str | None = None  # "sm_80" where that family of kernels was forced
    epilogue: str = ""  # "bias+gelu_tanh"; "" for none
    items: int = 1  # of W, among which each run of columns has one
    pattern: str = "uniform"  # of the kept blocks: equally many in each row, at random; or one of patterns.PATTERNS
    products: int = 1  # of these extents, in any order: of a layer, forward and backward, three

    @property
    def flops(self) -> float:
        """The useful ones: two for each multiply-add with a stored element."""
        return 2.0 * self.M * self.N * self.K * self.density * self.products

    @property
    def bytes(self) -> float:
        """The least that passes through device memory: stored elements of every A, all of B and D, once."""
        read = self.items * self.M * self.K * self.density + self.K * self.N
        return self.products * ((1.0 if self.dtype.startswith("float8") else 2.0) * read + 2.0 * self.M * self.N)


@dataclass
class Candidate:
    """Something to time. `setup` returns the call; what it raises becomes the reason why there is no time."""

    name: str
    flops: float
    setup: Callable[[], Callable[[], object]]


@dataclass
class Timing:
    """Times of one candidate in microseconds; `error` instead where there are none."""

    name: str
    flops: float
    us: list[float] = field(default_factory=list)
    error: str = ""
    note: str = ""  # the setting or the backend that a peer chose

    @property
    def median(self) -> float:
        return timing.median(self.us)

    @property
    def tflops(self) -> float:
        """Useful floating-point operations over the median time."""
        return self.flops / self.median / 1e6

    @property
    def spread(self) -> dict:
        return timing.spread(self.us)

    def as_dict(self) -> dict:
        if self.error:
            return {"name": self.name, "error": self.error}
        figures = {"useful_flops": self.flops, "tflops": round(self.tflops, 1)}
        return {"name": self.name, **self.spread, **figures} | ({"note": self.note} if self.note else {})


@dataclass
class Row:
    """A measured case. `ratio` is our useful rate over that of the peer called `against`, or of FASTEST of all."""

    suite: str
    name: str
    problem: Problem
    ours: Timing
    peers: list[Timing]
    against: str
    asked: float | None
    plan: str

    def peer(self, name: str) -> Timing | None:
        timed = [peer for peer in self.peers if not peer.error]
        if name == FASTEST:
            return max(timed, key=lambda peer: peer.tflops, default=None)
        return next((peer for peer in timed if peer.name == name), None)

    @property
    def rival(self) -> Timing | None:
        """The peer that the row is held against, if it has a time."""
        return self.peer(self.against)

    @property
    def ratio(self) -> float | None:
        return None if self.rival is None or self.ours.error else self.ours.tflops / self.rival.tflops

    def line(self) -> str:
        """One line, for a log."""
        if self.ours.error:
            return f"{self.name}: {self.ours.error}"
        figures = f"{self.ours.median:.1f} us, {self.ours.tflops:.0f} TFLOP/s"
        beside = "no time for its peer" if self.ratio is None else f"{self.ratio:.3f} of {self.rival.name}"
        return f"{self.name}: {figures}, {beside}"

    def as_dict(self) -> dict:
        return {
            "suite": self.suite,
            "name": self.name,
            "problem": asdict(self.problem) | {"flops": self.problem.flops, "bytes": self.problem.bytes},
            "against": self.against,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "asked": self.asked,
            "configuration": self.plan,
            "timings": [timing.as_dict() for timing in (self.ours, *self.peers)],
        }


@dataclass
class Case:
    """A row to be measured. `ours` returns (call, plan)."""

    suite: str
    name: str
    problem: Problem
    ours: Callable[[], tuple[Callable[[], object], object]]
    peers: list[Candidate]
    against: str
    asked: float | None = None
    patches_dsl: bool = False  # a peer's import changes CuTe DSL for the process: ours are to be compiled before
    timer: Callable | None = None  # another than timing.interleaved, which has its arguments and result

    def measure(self, rounds: int, warm_s: float = 1.0) -> Row:
        """Set up everybody, then time all of them in turns. What ours raises is raised, a wrong result of it too."""
        call, plan = self.ours()
        calls, peers = {OURS: call}, []
        for peer in self.peers:
            peers.append(Timing(peer.name, peer.flops))
            try:
                calls[peer.name] = peer.setup()
                peers[-1].note = getattr(calls[peer.name], "note", "")
            except Exception as error:
                peers[-1].error = reason(error)
        times = (self.timer or timing.interleaved)(calls, warm_s=warm_s, rounds=rounds)
        ours = Timing(OURS, self.problem.flops, times[OURS], note=getattr(call, "note", ""))
        for peer in peers:
            peer.us = times.get(peer.name, [])
        shown = f"{plan.facts.path} {plan.facts.config}" if plan and plan.facts else ""
        return Row(self.suite, self.name, self.problem, ours, peers, self.against, self.asked, shown)

    def failed(self, error: BaseException) -> Row:
        """The row of a case whose `measure` raised: nobody has a time, and ours says why."""
        ours = Timing(OURS, self.problem.flops, error=reason(error))
        return Row(self.suite, self.name, self.problem, ours, [], self.against, self.asked, "")


def reason(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
