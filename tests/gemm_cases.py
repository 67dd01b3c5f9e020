"""Calls of products as plain data, their truth in fp64, and what is wrong with a result.

A `Signature` holds what kernels are compiled from, a `Case` what may change from call to call: extents, strides,
patterns and numbers. `make` gives a case's `Call`, in guarded memory; `run` makes it, too. `check` takes tensors.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import cute_kernels
from attention.decode.heuristics import splits as forced_splits
from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels.testing.patterns import PATTERNS
from cute_kernels.testing.reference import (
    assert_as_good_as_torch,
    dense_of,
    exact_and_torch,
    normal,
    poisoned,
    poisoned_empty,
    seed,
)
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul, sddmm

from .guard_zones import Placement, Wrong, Zones
from .sparse_collective.sddmm_cases import sampled_truth

OPS = {op.__name__: op for op in (gemm, bsr_matmul, bsr_linear, bsr_grouped_linear, sddmm)}
LINEAR = ("bsr_linear", "bsr_grouped_linear")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
A, B, OUT, RESIDUAL = range(4)  # whose places a case has
ITEM_PATTERNS = ("power_law", "no_blocks", "empty_rows", "bernoulli", "all_blocks")  # of a batch, one after the other


# -- calls of any op -------------------------------------------------------------------------------------------


@dataclass
class Call:
    """`op(*args, out=out, **terms)`. `judge(plan, *results)` raises AssertionError for a wrong result of the operands
    as they are; of these `renew` changes `moving`. `truth()` of a product: the exact result, and torch's."""

    op: Callable
    args: tuple
    terms: dict
    out: Tensor | None  # None: the op allocates it
    moving: Tensor
    judge: Callable[..., None]
    truth: Callable[[], tuple[Tensor, Tensor]] | None = None
    zones: Zones = field(default_factory=Zones)  # in which operands and output lie
    name: str = ""
    path: str | None = None
    splits: int = 0  # among how many CTAs decoding is split; 0: as the op thinks best
    before: Tensor | None = None  # what `out` holds before the call, which adds to it; None: NaN

    @contextlib.contextmanager
    def forced(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.path:
                stack.enter_context(cute_kernels.path(self.path))
            if self.splits:
                stack.enter_context(forced_splits(self.splits))
            yield

    def given(self) -> dict:
        return self.terms if self.out is None else self.terms | {"out": self.out}

    def __call__(self):
        """What the op returns; beforehand its output holds `before`, or is full of NaN."""
        with self.forced(), poisoned_empty() if self.out is None else contextlib.nullcontext():
            if self.out is not None:
                self.out.fill_(torch.nan) if self.before is None else self.out.copy_(self.before)
            return self.op(*self.args, **self.given())

    def run(self) -> tuple[Tensor, ...]:
        """The results, each in memory of its own."""
        found = replace(self, out=torch.empty_like(self.out))()
        return found if isinstance(found, tuple) else (found,)

    def plan(self):
        """What cute_kernels.explain says of the call: it compiles the kernel."""
        with self.forced():
            return explain(inspect.unwrap(self.op), *self.args, **self.given())

    def renew(self, turn: int) -> None:
        """Other numbers of the same scale in one operand, in place."""
        self.moving.copy_(-self.moving.roll(1 + turn, 0))
        self.zones.inputs = [(name, bits, bits.clone()) for name, bits, _ in self.zones.inputs]

    def complaint(self, results: Iterable[Tensor] | None = None) -> str:
        """What is wrong with the results, by default those of a run; "" if nothing is."""
        results = self.run() if results is None else results
        try:
            self.judge(None, *results)
        except AssertionError:
            try:
                self.judge(self.plan(), *results)  # which names the tiles at fault
            except AssertionError as error:
                return str(error)
        return ""


def plainly(op: str, args: tuple, terms: dict) -> tuple[Tensor, Tensor, dict]:
    """The product of dense matrices that a call is, (left, right, terms); a grouped one is a batch of its runs."""
    if op == "gemm":
        return *args, terms
    if op == "bsr_matmul":
        return dense_of(args[0]), args[1], terms
    (x, W), experts = args, terms.get("expert_ids")
    weights, bias = dense_of(W).mT, terms.get("bias")
    if experts is not None:
        number = experts.clamp(0, len(weights) - 1).long()
        x = x.unflatten(0, (len(number), -1)) if len(number) else x.new_zeros(0, 1, x.shape[-1])
        weights = torch.where((number == experts)[:, None, None], weights[number], 0.0)
        bias = bias[number] if bias is not None and bias.dim() == 2 else bias
    bias = bias[:, None] if bias is not None and bias.dim() == 2 else bias
    terms = {name: value for name, value in terms.items() if name != "expert_ids"} | {"bias": bias}
    return x if x.dim() > 1 else x[None], weights, terms


def product(
    op: Callable, args: tuple, terms: dict, out=None, dtype=None, zones: Zones | None = None, before=None
) -> Call:
    """A call of one of OPS. Its truth is that of these terms, whatever becomes of the call's own.

    `dtype`: of the output that the op allocates, the operands' unless told. The judge also looks at `zones`. `before`:
    what an op that adds to `out` finds there.
    """
    name, expected, zones = op.__name__, dict(terms), zones or Zones()
    moving = next(arg for arg in args[::-1] if isinstance(arg, Tensor) and arg.is_floating_point())
    dtype = out.dtype if out is not None else dtype or moving.dtype

    def truth() -> tuple[Tensor, Tensor]:
        if name == "sddmm":
            return sampled_truth(args, expected, before, dtype)
        left, right, fused = plainly(name, args, expected)
        found = exact_and_torch(left, right, dtype, **fused)
        if name == "bsr_grouped_linear":
            return tuple(t.flatten(0, 1) for t in found)
        return tuple(t[0] for t in found) if name == "bsr_linear" and args[0].dim() == 1 else found

    def judge(plan, result: Tensor) -> None:
        """As assert_as_good_as_torch and Zones.check, with one wait for the GPU."""
        exact, by_torch = truth()
        if result.shape != exact.shape or result.dtype != dtype:
            raise Wrong("result", f"{tuple(result.shape)} {result.dtype}, not {tuple(exact.shape)} {dtype}")
        numbers = zones.counts()
        if exact.numel():
            ours, theirs = (t.double() - exact for t in (result, by_torch))
            numbers += [ours.abs().max(), theirs.abs().max(), ours.norm(), theirs.norm()]
        numbers = torch.stack([n.double() for n in numbers]).tolist() if numbers else []
        zones.complain([int(n) for n in numbers[: len(zones.inputs) + len(zones.outputs)]])
        if exact.numel():
            largest, their_largest, norm, their_norm = numbers[-4:]
            if not (largest <= 2 * their_largest and norm <= 2 * their_norm):  # NaN is never <=
                try:
                    k = (args[0] if name != "bsr_linear" else args[1]).shape[-1]
                    assert_as_good_as_torch(result, exact, by_torch, k=k, plan=plan)
                except AssertionError as error:
                    raise Wrong("result", str(error)) from None

    return Call(op, args, dict(terms), out, moving, judge, truth, zones, before=before)


def check(op: Callable, *args, out=None, out_dtype=None, **terms):
    """One product of tensors into memory that is full of NaN, against the truth; its plan."""
    call = product(op, args, terms, out, out_dtype)
    if out is None:
        _, by_torch = call.truth()
        call.out = poisoned(*by_torch.shape, dtype=by_torch.dtype, device=by_torch.device)
    plan, result = call.plan(), call()
    assert result is call.out
    call.judge(plan, result)
    return plan


def assert_right(result: Tensor, op: Callable, *args, **terms) -> None:
    """`result` is what a call of the op gives."""
    product(op, args, terms, dtype=result.dtype).judge(None, result)


# -- cases of products -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature:
    """`align`: of operands' strides, addresses and, on the sm_80 path, contiguous extents, in elements; `align_out` the
    same of out's strides and address. `majors`: whether the two dense operands and out are transposed in memory."""

    op: str
    path: str | None
    dtype: str
    out_dtype: str
    align: int = 8
    align_out: int = 8
    majors: tuple[bool, bool, bool] = (False,) * 3
    bias: str | None = None  # "col", "row" or, of a batch, "items"
    activation: str | None = None
    residual: bool = False  # of sddmm: it adds to out
    block: tuple[int, int] | None = None
    batch: str | None = None  # of gemm "both", of W "values" or "patterns"
    run: int = 0
    index: str = "int32"
    bias_dtype: str | None = None  # the operands', unless told
    scaled: bool = False  # gemm's alpha and beta
    function: bool = False  # a user's own epilogue
    view: bool = False  # W is the transposed view of another matrix

    @property
    def name(self) -> str:
        return f"{self.op} {self.path}"


@dataclass(frozen=True)
class Case:
    """One call. gemm: a (m, k) @ b (k, n). Others: W, or a pattern, of m x k blocks, and n tokens, or runs of them."""

    signature: Signature
    m: int
    n: int
    k: int
    items: int = 1
    density: float = 0.5
    leading: tuple[int, ...] | None = None  # bsr_linear: x is (*leading, K), () for one dimension; None: (n, K)
    # Of a, b, out and residual; W has no place in it. None: without gaps.
    places: tuple[Placement, Placement, Placement, Placement] | None = None
    give_out: bool = True
    seed: int | None = None  # None: what torch draws next, on the CPU
    pattern: str | None = None  # in place of blocks at random


def leaky(x):
    return F.where(x > 0.0, x, 0.1 * x)


def in_memory(dims: int, transposed: bool) -> tuple[int, ...]:
    """The order of dimensions, of which the last two may be transposed."""
    order = [*range(dims)]
    if transposed:
        order[-2:] = order[:-3:-1]
    return tuple(order)


def matrix(case: Case, zones: Zones, device) -> BsrMatrix:
    """W in guarded memory, or what it is a view of."""
    f, L = case.signature, case.items if case.signature.batch == "patterns" else 1
    rows, cols = (case.k, case.m) if f.view else (case.m, case.k)
    bm, bk = f.block[::-1] if f.view else f.block
    if case.pattern:
        first = ITEM_PATTERNS.index(case.pattern) if L > 1 and case.pattern in ITEM_PATTERNS else 0
        names = [case.pattern, *(ITEM_PATTERNS[(first + l) % len(ITEM_PATTERNS)] for l in range(1, L))]
        mask = torch.stack([PATTERNS[name](rows, cols) for name in names]).to(device)
    else:
        mask = torch.rand(L, rows, cols, device=device) < case.density
    ends = mask.new_zeros(L * rows + 1, dtype=torch.int64)
    ends[1:] = mask.sum(-1).flatten().cumsum(0)
    numbers = torch.arange(L, device=device)[:, None] * rows + torch.arange(rows + 1, device=device)
    crow, col = ends[numbers], mask.nonzero()[:, 2]
    sums = max(1, round(len(col) / max(1, L * case.m) * f.block[1]))  # terms of an element of a typical row
    items = (case.items,) if f.batch == "values" else ()
    values = normal(*items, len(col), bm, bk, dtype=DTYPES[f.dtype], device=device, k=sums)
    index, lead = getattr(torch, f.index), (case.items,) if f.batch else ()
    parts = {"crow": (crow if f.batch == "patterns" else crow[0]).to(index), "col": col.to(index), "values": values}
    W = BsrMatrix(*(zones.input(t, name=name) for name, t in parts.items()), (*lead, rows * bm, cols * bk))
    return W.t() if f.view else W


def make(case: Case, device: str = "cpu") -> Call:
    """The call of a case: operands in guarded memory, and the truth."""
    f, zones, drawn = case.signature, Zones(device), "cpu" if case.seed is None else device
    if case.seed is not None:
        seed(case.seed)
    places, majors = case.places or (None,) * 4, (*f.majors, False)

    def place(which: int, shape) -> Placement:
        return places[which] or Placement(in_memory(len(shape), majors[which]))

    def given(name: str, which: int | None, *shape, dtype=f.dtype, k=1) -> Tensor:
        values = normal(*shape, dtype=DTYPES[dtype], device=drawn, k=k)
        return zones.input(values, Placement() if which is None else place(which, shape), name)

    linear, lead, terms = f.op in LINEAR, (case.items,) if f.batch and not f.run else (), {"activation": f.activation}
    if f.op == "gemm":
        args = given("a", A, *lead, case.m, case.k), given("b", B, *lead, case.k, case.n, k=case.k)
        shape = *lead, case.m, case.n
    elif f.op == "sddmm":
        W, tokens = matrix(case, zones, drawn), case.n * max(f.run, 1)
        args = given("a", A, W.shape[-2], tokens, k=tokens), given("b", B, tokens, W.shape[-1]), W
        shape, terms = W.values.shape, {"accumulate": f.residual}
    else:
        W, tokens = matrix(case, zones, drawn), case.n * max(f.run, 1)
        M, K = W.shape[-2:]
        if linear:
            shape = *((*lead, tokens) if case.leading is None else case.leading), M
            args = given("x", B, *shape[:-1], K), W
        else:
            shape = *lead, M, tokens
            args = W, given("b", B, *lead, K, tokens)
    if f.bias:
        items = (case.items,) if f.bias == "items" else ()
        bias = (*items, shape[-1]) if linear or f.bias == "col" else (*items, shape[-2], 1)
        terms["bias"] = given("bias", None, *bias, dtype=f.bias_dtype or f.dtype)
    if f.scaled:
        terms |= {"alpha": 0.5, "beta": -1.5}
    if f.function:
        terms["epilogue"] = leaky
    before = None
    if f.residual and f.op == "sddmm":
        before = normal(*shape, dtype=DTYPES[f.out_dtype], device=drawn).to(device)
    elif f.residual:
        terms["residual"] = given("residual", RESIDUAL, *shape, dtype=f.out_dtype)
    if f.run:
        experts = torch.randint(-1, case.items + 1, (case.n,), dtype=torch.int32, device=drawn)
        terms["expert_ids"] = zones.input(experts, name="expert_ids")
    out = None
    if case.give_out or f.out_dtype != f.dtype:
        out = zones.output(shape, DTYPES[f.out_dtype], place(OUT, shape))
    return replace(product(OPS[f.op], args, terms, out, zones=zones, before=before), path=f.path)


def run(case: Case, device: str = "cpu", runs: int = 1, expect: Callable = None) -> None:
    """Make the call; raise Wrong, or what the op raises. With `runs` all others give the bits of the first.

    `expect` is given the plan first.
    """
    call = make(case, device)
    if expect is not None:
        expect(call.plan())
    result = call()
    if call.out is not None and result is not call.out:
        raise Wrong("result", "out was given, and something else came back")
    call.judge(None, result)
    first = result.clone() if runs > 1 else None
    for _ in range(runs - 1):
        if not torch.equal(call(), first):
            raise Wrong("other bits", "the same call gave another result")
