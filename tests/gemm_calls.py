"""A GEMM call of any op with its exact result, and checks of what it returns.

`check` makes a call of given tensors and checks it. `gemm_call` returns the `Call`, which tests repeat or capture.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor

import cute_kernels
from attention.decode.heuristics import splits as forced_splits
from cute_kernels import Sparse24, explain, gemm
from cute_kernels.dtypes import FLOAT8, default_out_dtype
from cute_kernels.testing import reference
from cute_kernels.testing.reference import assert_as_good_as_torch, dense_of, poisoned, poisoned_empty
from sparse_collective import Bsr24, bsr_grouped_linear, bsr_linear, bsr_matmul, sddmm

from .gemm_errors import ACTIVATION_SLOPE, FP64, assert_within, dequantized, error_bound
from .guard_zones import Wrong, Zones
from .sparse_collective.sddmm_cases import sampled_truth

OPS = {op.__name__: op for op in (gemm, bsr_matmul, bsr_linear, bsr_grouped_linear, sddmm)}
LINEAR = ("bsr_linear", "bsr_grouped_linear")
# Arguments that are not terms of the epilogue
OPTIONS = {"scale_a", "scale_b", "scale_x", "precision", "accumulation_dtype", "use_fast_accum", "out_dtype"}
OPTIONS |= {"scale_out", "return_amax", "expert_ids"}


@dataclass
class Call:
    """`op(*args, out=out, **terms)`. `judge(plan, *results)` raises AssertionError for a wrong result of the operands
    as they are; of these `renew` changes `moving`. `truth()` of a GEMM: the exact result, and torch's."""

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
        """Return the op's result; before the call its output holds `before`, or is full of NaN."""
        with self.forced(), poisoned_empty() if self.out is None else contextlib.nullcontext():
            if self.out is not None:
                self.out.fill_(torch.nan) if self.before is None else self.out.copy_(self.before)
            return self.op(*self.args, **self.given())

    def run(self) -> tuple[Tensor, ...]:
        """The results, each in memory of its own."""
        found = replace(self, out=torch.empty_like(self.out))()
        return found if isinstance(found, tuple) else (found,)

    def plan(self):
        """The call's plan, by cute_kernels.explain: it compiles the kernel."""
        with self.forced():
            return explain(inspect.unwrap(self.op), *self.args, **self.given())

    def renew(self, turn: int) -> None:
        """Other numbers of the same scale in one operand, in place."""
        self.moving.copy_(-self.moving.roll(1 + turn, 0))
        self.zones.inputs = [(name, bits, bits.clone()) for name, bits, _ in self.zones.inputs]

    def complaint(self, results: Iterable[Tensor] | None = None) -> str:
        """Description of what is wrong with the results, by default those of a run; "" if nothing is."""
        results = self.run() if results is None else results
        try:
            self.judge(None, *results)
        except AssertionError:
            try:
                self.judge(self.plan(), *results)  # which names the tiles at fault
            except AssertionError as error:
                return str(error)
        return ""


def dense_matrix(W, dtype: torch.dtype | None) -> Tensor:
    """The dense matrix, or the batch of them, that W is: dequantized, in `dtype`, or as it is for None."""
    if isinstance(W, Tensor):
        return W.to_dense() if dtype is None else W.to_dense().to(dtype)
    if isinstance(W, Bsr24):
        W = W.to_bsr()
    if W.base is not None:
        return dense_matrix(W.base, dtype).mT
    values, scales = W.values, getattr(W, "scales", None)
    if dtype is not None:
        values = values.to(dtype)
        if scales is not None:
            values = values * (scales if scales.shape == (1,) else scales[..., None, None]).to(dtype)
    pattern = {"crow_indices": W.crow_indices, "col_indices": W.col_indices, "shape": W.shape}
    return dense_of(SimpleNamespace(base=None, values=values, blocksize=W.blocksize, **pattern))


def plainly(op: str, args: tuple, terms: dict, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, dict]:
    """The dense GEMM that a call is: (left, right, terms of the epilogue), dequantized, in `dtype` if it is given.

    A grouped GEMM is a batch of its groups.
    """
    fused = {name: value for name, value in terms.items() if name not in OPTIONS}
    scale = terms.get("scale_x" if op in LINEAR else "scale_b")

    def operand(x, scale, of_b=False):
        return x if dtype is None else dequantized(x, scale, dtype, of_b)

    if op == "gemm":
        a, b = args
        a = a.to_dense() if isinstance(a, Sparse24) else a
        return operand(a, terms.get("scale_a")), operand(b, scale, True), fused
    if op == "bsr_matmul":
        return dense_matrix(args[0], dtype), operand(args[1], scale, True), fused
    (x, W), experts = args, terms.get("expert_ids")
    x, weights, bias = operand(x, scale), dense_matrix(W, dtype).mT, terms.get("bias")
    if experts is not None:
        number = experts.clamp(0, len(weights) - 1).long()
        x = x.unflatten(0, (len(number), -1)) if len(number) else x.new_zeros(0, 1, x.shape[-1])
        weights = torch.where((number == experts)[:, None, None], weights[number], 0.0)
        bias = bias[number] if bias is not None and bias.dim() == 2 else bias
    bias = bias[:, None] if bias is not None and bias.dim() == 2 else bias
    return x if x.dim() > 1 else x[None], weights, fused | {"bias": bias}


def gemm_call(
    op: Callable, args: tuple, terms: dict, out=None, dtype=None, zones: Zones | None = None, before=None
) -> Call:
    """A call of one of OPS. Its truth is that of these terms, even if the call's own are changed later.

    `dtype`: of the output that the op allocates, by default the op's own. The judge also looks at `zones`. `before`:
    contents of `out` that an op adds to.
    """
    name, expected, zones = op.__name__, dict(terms), zones or Zones()
    moving = next(arg for arg in args[::-1] if isinstance(arg, Tensor) and arg.is_floating_point())
    dtype = out.dtype if out is not None else dtype or terms.get("out_dtype") or default_out_dtype(moving.dtype)

    def unfold(t: Tensor) -> Tensor:
        """The result in the op's own shape."""
        if name == "bsr_grouped_linear":
            return t.flatten(0, 1)
        return t[0] if name == "bsr_linear" and args[0].dim() == 1 else t

    def truth() -> tuple[Tensor, Tensor]:
        if name == "sddmm":
            return sampled_truth(args, expected, before, dtype)
        found = []
        for wide in (FP64, torch.float32):
            left, right, fused = plainly(name, args, expected, wide)
            found.append(unfold(reference.truth(left, right, **fused, dtype=wide)))
        return found[0], found[1].to(dtype)

    def bound_of(plan) -> Tensor | None:
        if name == "sddmm":
            return None
        left, right, _ = plainly(name, args, expected, FP64)
        bound = error_bound(left, right, moving.dtype in FLOAT8, expected, plan and plan.facts)
        return None if bound is None else ACTIVATION_SLOPE * abs(expected.get("alpha", 1.0)) * unfold(bound)

    def judge_within(result, amax, exact, bound) -> None:
        """Compare element by element, and the largest magnitude."""
        zones.check()
        if bound is None:  # FP8 output of an FP32 result
            bound = torch.full_like(exact, 1e-4 * exact.abs().max().item() if exact.numel() else 0.0)
        scale = expected.get("scale_out")
        try:
            assert_within(result, exact, bound, 1.0 if scale is None else scale.item())
            if amax is not None:
                assert amax.shape == (1,) and amax.dtype == torch.float32
                largest, slack = (t.max().item() if t.numel() else 0.0 for t in (exact.abs(), bound))
                assert abs(amax.item() - largest) <= 2 * slack + 1e-6 * largest, f"amax {amax.item()} of {largest}"
        except AssertionError as error:
            raise Wrong("result", str(error)) from None

    def judge(plan, result: Tensor, amax: Tensor | None = None) -> None:
        """As assert_as_good_as_torch and Zones.check, with one wait for the GPU; or element by element."""
        exact, by_torch = truth()
        if result.shape != exact.shape or result.dtype != dtype:
            raise Wrong("result", f"{tuple(result.shape)} {result.dtype}, not {tuple(exact.shape)} {dtype}")
        bound = bound_of(plan)
        if bound is not None or dtype in FLOAT8:
            judge_within(result, amax, exact, bound)
            return
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
    """Check one GEMM, whose output is NaN before; return its plan."""
    call = gemm_call(op, args, terms, out, out_dtype)
    if out is None:
        _, by_torch = call.truth()
        call.out = poisoned(*by_torch.shape, dtype=by_torch.dtype, device=by_torch.device)
    plan, found = call.plan(), call()
    found = found if isinstance(found, tuple) else (found,)
    assert found[0] is call.out
    call.judge(plan, *found)
    return plan


def assert_right(result: Tensor, op: Callable, *args, **terms) -> None:
    """`result` is what a call of the op gives."""
    gemm_call(op, args, terms, dtype=result.dtype).judge(None, result)
