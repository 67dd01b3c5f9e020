"""What ours is measured against: torch, cuBLAS, quack and torch's Triton kernel, each as a `rows.Candidate`.

Every candidate of a row computes the product of one `Operands`, which makes its tensors when first asked and shares
them, into an output of its own. A set-up ends with `verified`: a peer that computes something else has no time but a
reason. A missing package is an ImportError that names it; whatever else a peer raises passes through.

Importing quack or FlashAttention patches CuTe DSL's tensor classes for the whole process, so both are imported by the
set-up that needs them and never here.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import explain, path
from cute_kernels.testing.reference import truth

from . import timing
from .rows import Candidate

CUBLAS = "cuBLAS"
CUBLAS_FP16_SUMS = "cuBLAS, fp16 sums"
CUBLAS_TF32, CUBLAS_FP32 = "cuBLAS, TF32", "cuBLAS, fp32"
CUBLASLT = "cuBLASLt epilogue"
QUACK = "quack, untuned"
TRITON_BSR = "torch's Triton BSR"
SEMI_STRUCTURED = "2:4 semi-structured"

SAMPLE = 64  # rows compared: enough to meet each tile, and positions in it that differ
# Rounding a sum to bf16 errs by 2^-9 of it; split-K that adds in bf16 by a few times that. A lost 128-column tile of
# 8192 columns is 0.12 in the Frobenius norm.
TOLERANCE = 0.01

QUACK_ACTIVATIONS = {None: None, "relu": "relu", "gelu_tanh": "gelu_tanh_approx", "silu": "silu"}


class WrongResult(ValueError):
    """A peer's output is not the product that was asked for."""


@dataclass(frozen=True)
class Call:
    """A candidate's call, and a `note` for the result file: the setting chosen, the backend found.

    Who wants nothing but speed repeats `bare()`, many times within one `within()`.
    """

    run: Callable[[], Tensor]
    note: str = ""
    bare: Callable[[], object] | None = None
    within: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def __call__(self) -> Tensor:
        return self.run()


class Operands:
    """activation(A @ B + bias), whose tensors are made once, when first asked for.

    Args:
        a: (M, K), a tensor or a BsrMatrix. This, b and bias are each the value or a function that makes it.
        b: (K, N), of any strides.
        bias: (N,) or None.
        activation: as cute_kernels.testing.reference knows it.
        transposed: whether the (M, N) output is stored as (N, M), as a linear layer with A as its weight does.
    """

    def __init__(self, a, b, bias=None, activation: str | None = None, *, transposed: bool = False) -> None:
        self._a, self._b, self._bias = a, b, bias
        self.activation, self.transposed = activation, transposed

    tolerance = TOLERANCE  # of what candidates compute: `compare`

    a = cached_property(lambda self: made(self._a))
    b = cached_property(lambda self: made(self._b))
    bias = cached_property(lambda self: made(self._bias))

    def verified(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return verified(call, lambda: self.sample, self.tolerance)

    def shown(self, out: Tensor) -> Tensor:
        """(M, N) of an output as an op of ours writes it."""
        return out.t() if self.transposed else out

    @property
    def rows(self) -> Tensor:
        """Some rows of the output, evenly spread."""
        count = self.a.shape[0]
        return torch.linspace(0, count - 1, min(count, SAMPLE), dtype=torch.float64).long().to(self.b.device)

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        """(rows, reference): some rows of the output, and what they must be, in fp32."""
        rows, a = self.rows, self.a if isinstance(self.a, Tensor) else self.a.to_dense()
        return rows, truth(a[rows], self.b, self.bias, self.activation, dtype=torch.float32)

    def out(self) -> Tensor:
        """A new output for one candidate."""
        shape = self.a.shape[0], self.b.shape[1]
        return self.b.new_empty(shape[::-1]).t() if self.transposed else self.b.new_empty(shape)


def made(value):
    """The value, or what it returns."""
    return value() if callable(value) else value


def compare(out: Tensor, reference: Tensor, tolerance: float = TOLERANCE, where: str = "") -> None:
    """Raise WrongResult unless `out` has the shape of the fp32 `reference`, and errs by no more than the tolerance.

    The Frobenius norm and the maximum of the difference count, both over the reference's own.
    """
    norm = largest = math.inf
    if out.shape == reference.shape:
        sizes = torch.norm, lambda t: t.abs().max()
        norm, largest = (size(out.float() - reference).item() / (size(reference).item() or 1.0) for size in sizes)
    if not (norm <= tolerance and largest <= tolerance):  # a NaN is not
        off = f"off by {norm:.2g} in norm, {largest:.2g} at most; allowed {tolerance}"
        raise WrongResult(f"wrong result{where}: {off}")


def verified(
    call: Callable[[], Tensor], expected: Callable[[], tuple], tolerance: float = TOLERANCE
) -> Callable[[], Tensor]:
    """`call`, once the `output[index]` that it returns has agreed with (index, reference) of `expected`."""
    # Memory that another candidate freed may hold the right result: what this call leaves unwritten is to be NaN.
    call().fill_(float("nan"))
    index, reference = expected()
    compare(call()[index], reference, tolerance)
    return call


def own_call(x, op: Callable, *args, out: Tensor, forced: str | None = None, **terms) -> tuple:
    """(call, plan) of an op of ours on a path, the call compared with x's reference; no plan of an op without one."""

    def on() -> contextlib.AbstractContextManager:
        return path(forced) if forced else contextlib.nullcontext()

    def run() -> Tensor:
        with on():
            op(*args, out=out, **terms)
        return x.shown(out)

    call, plan = x.verified(Call(run, bare=lambda: op(*args, **terms))), None
    with on(), contextlib.suppress(ValueError):
        plan = explain(op, *args, out=out, **terms)
    return call, plan


def needs(module: str, package: str) -> ModuleType:
    """The imported module, or an ImportError that names the package it comes from."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"{package} cannot be imported: {error}", name=error.name) from error


def peer(default: str, *, fused: Collection = ()):
    """Makes a `Candidate` of that name of a function from Operands, or Attention, to a call, which is then verified.

    Operands whose activation, None for a bias alone, is not in `fused` are refused.
    """

    def decorate(make: Callable[..., Call]) -> Callable[..., Candidate]:
        @functools.wraps(make)
        def candidate(x, flops: float, name: str = default, **options) -> Candidate:
            def setup() -> Call:
                if (x.bias is not None or x.activation) and x.activation not in fused:
                    raise NotImplementedError(f"{name} does not fuse {x.activation or 'a bias'} into its product")
                return x.verified(make(x, **options))

            return Candidate(name, flops, setup)

        return candidate

    return decorate


@peer(CUBLAS)
def cublas(x: Operands) -> Call:
    """torch.mm into a given output."""
    a, b, out = x.a, x.b, x.out()
    return Call(lambda: torch.mm(a, b, out=out))


def with_flag(x: Operands, name: str, value: bool) -> Call:
    """torch.mm into a given output, while a flag of torch.backends.cuda.matmul has this value."""
    a, b, out, flags = x.a, x.b, x.out(), torch.backends.cuda.matmul

    def run() -> Tensor:
        before = getattr(flags, name)
        setattr(flags, name, value)
        try:
            return torch.mm(a, b, out=out)
        finally:
            setattr(flags, name, before)

    return Call(run)


@peer(CUBLAS_FP16_SUMS)
def cublas_fp16_sums(x: Operands) -> Call:
    """Sums in fp16, where cuBLAS finds them faster."""
    return with_flag(x, "allow_fp16_accumulation", True)


@peer(CUBLAS_TF32)
def cublas_tf32(x: Operands) -> Call:
    """With torch.backends.cuda.matmul.allow_tf32."""
    return with_flag(x, "allow_tf32", True)


@peer(CUBLAS_FP32)
def cublas_fp32(x: Operands) -> Call:
    """Without it: by the CUDA cores."""
    return with_flag(x, "allow_tf32", False)


@peer(CUBLASLT, fused=(None, "relu", "gelu_tanh"))
def cublaslt_epilogue(x: Operands) -> Call:
    """torch's products with cuBLASLt's fused epilogues: bias, bias + relu, bias + gelu (tanh)."""
    if x.bias is None:
        raise NotImplementedError("torch fuses an activation into a product only together with a bias")
    a, b, bias, out = x.a, x.b, x.bias, x.out()
    if x.activation is None:
        return Call(lambda: torch.addmm(bias, a, b, out=out))
    gelu = x.activation == "gelu_tanh"
    return Call(lambda: torch._addmm_activation(bias, a, b, use_gelu=gelu, out=out))


@peer(QUACK, fused=QUACK_ACTIVATIONS)
def quack_gemm(x: Operands) -> Call:
    """quack.gemm_interface's gemm, or gemm_act, with the configuration that it takes for this card without tuning.

    B is (K, N) in either stride order. The first call of a shape compiles, or loads, and keeps a plan.
    """
    quack = needs("quack.gemm_interface", "quack-kernels")
    a, b, bias, out, activation = x.a, x.b, x.bias, x.out(), QUACK_ACTIVATIONS[x.activation]
    if activation is None:
        return Call(lambda: quack.gemm(a, b, out=out, bias=bias, tuned=False))
    options = {"bias": bias, "activation": activation, "store_preact": False, "tuned": False}
    return Call(lambda: quack.gemm_act(a, b, postact_out=out, **options)[1])


class Setting(NamedTuple):
    """How torch's Triton kernel runs: columns of a program's tile, warps, pipeline stages, block-rows of its raster."""

    columns: int
    warps: int
    stages: int
    group: int


# Quick mode takes the first three that fit. Tall blocks need many warps for their accumulators; small ones need many
# stages, since a stage is one block deep.
SETTINGS = (
    (128, 8, 3, 4), (256, 8, 3, 4), (128, 4, 4, 4), (64, 4, 3, 4), (64, 4, 5, 4), (64, 8, 3, 4), (64, 8, 4, 4),
    (128, 2, 4, 4), (128, 4, 2, 4), (128, 4, 3, 4), (128, 4, 5, 4), (128, 8, 2, 4), (128, 8, 4, 4), (128, 8, 4, 8),
    (256, 4, 3, 4), (256, 4, 5, 4), (256, 8, 2, 4), (256, 8, 4, 4),
)  # fmt: skip
QUICK = 3
ACCUMULATORS = 128  # fp32 of the output tile in a thread; with twice as many it spills, and takes minutes to compile


def settings_for(bm: int, n: int) -> list[Setting]:
    """The settings for blocks of bm rows and a dense operand of n columns; empty where there are none.

    The kernel has no edge, so a tile's width must divide n, and be a power of two, at least 16.
    """
    widest = n & -n
    cut = dict.fromkeys(Setting(min(columns, widest), *rest) for columns, *rest in SETTINGS)
    return [s for s in cut if s.columns >= 16 and bm * s.columns <= ACCUMULATORS * 32 * s.warps]


def fastest(make: Callable, settings: list, expected: Callable, measure: Callable = timing.interleaved):
    """(setting, call) of the setting with the least median time, of those whose `make(setting)` runs and is right.

    If none runs, raises what the first one raised; a ValueError if there is none.
    """
    calls, failures = {}, []
    for setting in settings:
        try:
            calls[setting] = verified(make(setting), expected)  # compiles, and waits for the result
        except Exception as error:
            failures.append(error)
    if not calls:
        raise failures[0] if failures else ValueError("no setting of the kernel fits this problem")
    times = measure(calls, warm_s=0.1, rounds=5)
    best = min(calls, key=lambda setting: timing.median(times[setting]))
    return best, calls[best]


@peer(TRITON_BSR)
def triton_bsr(x: Operands, quick: bool = False, measure: Callable = timing.interleaved) -> Call:
    """The Triton kernel behind `A_bsr @ b`, called directly with the fastest of a few settings, which the note names.

    Unlike `@` it takes blocks that are not square; each side must be a power of two, 16 or more.
    """
    needs("triton", "triton")  # without it torch's function is there, but the kernel behind it is not
    ops = needs("torch.sparse._triton_ops", "torch")
    ops.check_blocksize("bsr_dense_addmm", x.a.blocksize)
    a, b, out = x.a.to_torch(), x.b, x.out()

    def make(setting: Setting) -> Callable[[], Tensor]:
        meta = {"SPLIT_N": b.shape[1] // setting.columns, "GROUP_SIZE_ROW": setting.group}
        meta |= {"num_warps": setting.warps, "num_stages": setting.stages}
        # With beta = 0 the added matrix is never read, but must have the output's shape.
        return lambda: ops.bsr_dense_addmm(out, a, b, beta=0, out=out, meta=meta)

    settings = settings_for(x.a.blocksize[0], b.shape[1])[: QUICK if quick else None]
    setting, call = fastest(make, settings, lambda: x.sample, measure)
    return Call(call, note=str(setting))


@peer(SEMI_STRUCTURED)
def semi_structured(x: Operands) -> Call:
    """2:4 sparsity of a pruned A, a fixed point to compare 50 % with: half of the operations are useful."""
    a, b = torch.sparse.to_sparse_semi_structured(x.a), x.b
    return Call(lambda: torch.mm(a, b), note=a.BACKEND)
