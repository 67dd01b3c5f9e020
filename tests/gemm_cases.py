"""GEMM calls as plain data: a `Signature` and a `Case`, and the calls made of them.

A `Signature` holds what kernels are compiled from, a `Case` what may change from call to call: extents, strides,
patterns and numbers. `make` returns a case's `Call`, in guarded memory; `run` also makes and checks it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_kernels import Sparse24, prune_2_4
from cute_kernels import functions as F
from cute_kernels.dtypes import FLOAT8, default_out_dtype
from cute_kernels.testing.patterns import PATTERNS
from cute_kernels.testing.reference import normal, seed
from sparse_collective import Bsr24, BsrMatrix

from .gemm_calls import LINEAR, OPS, Call, gemm_call
from .gemm_errors import factors, numbers, same_bits
from .guard_zones import Placement, Wrong, Zones

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
A, B, OUT, RESIDUAL = range(4)  # operands that a case places
ITEM_PATTERNS = ("power_law", "no_blocks", "empty_rows", "bernoulli", "all_blocks")  # of a batch, one after the other


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
    bias_dtype: str | None = None  # None: the operands', BF16 for FP8
    scaled: bool = False  # gemm's alpha and beta
    function: bool = False  # a user's own epilogue
    view: bool = False  # W is the transposed view of another matrix
    structured: bool = False  # A or W is 2:4 sparse: a Sparse24 or a Bsr24
    accumulation: str | None = None  # "fast" of FP8, or "fp16"
    precision: str | None = None  # of FP32 operands
    # FP8: of a or W, and of b or x: "tensor", "row" or "column", "1x128" or "128x128", of W "block"
    scales: tuple[str | None, str | None] = (None, None)
    amax: bool = False  # of an FP8 output, with scale_out

    @property
    def name(self) -> str:
        return f"{self.op} {self.path}"

    @property
    def vector(self) -> int:
        """Elements of an operand per 16 bytes."""
        return 16 // DTYPES[self.dtype].itemsize


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


def place(shape, align: int, transposed: bool = False, wide: bool = False) -> Placement:
    """Strides and address are multiples of `align` elements; if `wide`, rows lie further apart than they are long."""
    order, pads = in_memory(len(shape), transposed), [0] * len(shape)
    pads[order[-1]] = -max(shape[order[-1]], 1) % align + (align if wide else 0)
    return Placement(order, tuple(pads), 3 * align if wide or align < 8 else 0)


def draw(*shape: int, dtype: str, device: str, k: int = 1) -> Tensor:
    """Random operands: of magnitude 1 / sqrt(k), or FP8 numbers of many magnitudes."""
    if DTYPES[dtype] in FLOAT8:
        return numbers(*shape, dtype=DTYPES[dtype], device=device)
    return normal(*shape, dtype=DTYPES[dtype], device=device, k=k)


def holes(values: Tensor) -> Tensor:
    """2:4 sparse values, some groups with fewer than two nonzeros."""
    kept = torch.rand(values.shape, device=values.device) > 0.2
    return (prune_2_4(values).float() * kept).to(values.dtype)


def structured_a(a: Tensor, zones: Zones) -> Sparse24:
    """a, pruned and compressed, in guarded memory."""
    A = Sparse24.from_dense(holes(a))
    values = zones.input(A.values, place(A.values.shape, 16 // A.values.itemsize), "values")
    return Sparse24(values, zones.input(A.metadata, name="metadata"), A.shape)


def matrix(case: Case, zones: Zones, device) -> BsrMatrix | Bsr24:
    """W in guarded memory, or the matrix that it is a view of."""
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
    values = draw(*items, len(col), bm, bk, dtype=f.dtype, device=device, k=sums)
    index, lead = getattr(torch, f.index), (case.items,) if f.batch else ()
    parts = {"crow": (crow if f.batch == "patterns" else crow[0]).to(index), "col": col.to(index)}
    scale = {None: None, "tensor": (1,), "block": values.shape[:-2]}[f.scales[0]]
    scale = None if scale is None else zones.input(factors(*scale, device=device), name="scales")
    shape = (*lead, rows * bm, cols * bk)
    if f.structured:
        V = BsrMatrix(parts["crow"], parts["col"], holes(values), shape).prune_2_4()
        values, metadata, shape = V.values, V.metadata, (*shape[:-1], shape[-1] // 2)
    W = BsrMatrix(*(zones.input(t, name=name) for name, t in {**parts, "values": values}.items()), shape, scales=scale)
    if f.structured:
        return Bsr24(W, zones.input(metadata, name="metadata"))
    return W.t() if f.view else W


def scale_shape(kind: str | None, shape) -> tuple[int, ...] | None:
    """Shape of a scale of a (..., M, K) or b (..., K, N)."""
    if kind in (None, "tensor"):
        return kind and (1,)
    *lead, rows, columns = shape
    blocks = -(-rows // 128), -(-columns // 128)
    each = {"row": (rows, 1), "column": (1, columns), "1x128": (rows, blocks[1]), "128x128": blocks}
    return *lead, *each[kind]


def make(case: Case, device: str = "cpu") -> Call:
    """The call of a case, with operands in guarded memory."""
    f, zones, drawn = case.signature, Zones(device), "cpu" if case.seed is None else device
    if case.seed is not None:
        seed(case.seed)
    places, majors = case.places or (None,) * 4, (*f.majors, False)
    own = default_out_dtype(DTYPES[f.dtype])

    def placed(which: int, shape) -> Placement:
        return places[which] or Placement(in_memory(len(shape), majors[which]))

    def given(name: str, which: int | None, *shape, dtype=f.dtype, k=1) -> Tensor:
        values = draw(*shape, dtype=dtype, device=drawn, k=k)
        return zones.input(values, Placement() if which is None else placed(which, shape), name)

    linear, lead = f.op in LINEAR, (case.items,) if f.batch and not f.run else ()
    terms = {"activation": f.activation, "precision": f.precision}
    terms |= {"fast": {"use_fast_accum": True}, "fp16": {"accumulation_dtype": torch.float16}}.get(f.accumulation, {})
    if f.op == "gemm":
        if f.structured:
            args = (structured_a(draw(case.m, case.k, dtype=f.dtype, device=drawn), zones),)
        else:
            args = (given("a", A, *lead, case.m, case.k),)
        args += (given("b", B, *lead, case.k, case.n, k=case.k),)
        shape = *lead, case.m, case.n
        scaled = {"scale_a": (f.scales[0], args[0].shape), "scale_b": (f.scales[1], args[1].shape)}
    elif f.op == "sddmm":
        W, tokens = matrix(case, zones, drawn), case.n * max(f.run, 1)
        args = given("a", A, W.shape[-2], tokens, k=tokens), given("b", B, tokens, W.shape[-1]), W
        shape, terms, scaled = W.values.shape, {"accumulate": f.residual}, {}
    else:
        W, tokens = matrix(case, zones, drawn), case.n * max(f.run, 1)
        M, K = W.shape[-2:]
        if linear:
            shape = *((*lead, tokens) if case.leading is None else case.leading), M
            args = given("x", B, *shape[:-1], K), W
            scaled = {"scale_x": ("row" if f.scales[1] == "column" else f.scales[1], (*shape[:-1], K))}
        else:
            shape = *lead, M, tokens
            args = W, given("b", B, *lead, K, tokens)
            scaled = {"scale_b": (f.scales[1], args[1].shape)}
    terms = {name: value for name, value in terms.items() if value is not None or name == "activation"}
    for name, each in scaled.items():
        if (of := scale_shape(*each)) is not None:
            terms[name] = zones.input(factors(*of, device=drawn), name=name)
    if f.bias:
        items = (case.items,) if f.bias == "items" else ()
        bias = (*items, shape[-1]) if linear or f.bias == "col" else (*items, shape[-2], 1)
        wide = "bf16" if DTYPES[f.dtype] in FLOAT8 else f.dtype
        terms["bias"] = given("bias", None, *bias, dtype=f.bias_dtype or wide)
    if f.scaled:
        terms |= {"alpha": 0.5, "beta": -1.5}
    if f.function:
        terms["epilogue"] = leaky
    if f.amax:
        scale_out = torch.full((1,), 0.75, device=drawn)
        terms |= {"scale_out": zones.input(scale_out, name="scale_out"), "return_amax": True}
    before = None
    if f.residual and f.op == "sddmm":
        before = normal(*shape, dtype=DTYPES[f.out_dtype], device=drawn).to(device)
    elif f.residual:
        terms["residual"] = given("residual", RESIDUAL, *shape, dtype=f.out_dtype)
    if f.run:
        experts = torch.randint(-1, case.items + 1, (case.n,), dtype=torch.int32, device=drawn)
        terms["expert_ids"] = zones.input(experts, name="expert_ids")
    out = None
    if case.give_out or DTYPES[f.out_dtype] != own:
        out = zones.output(shape, DTYPES[f.out_dtype], placed(OUT, shape))
    return replace(gemm_call(OPS[f.op], args, terms, out, zones=zones, before=before), path=f.path)


def run(case: Case, device: str = "cpu", runs: int = 1, expect: Callable = None) -> None:
    """Make the call; raise Wrong, or what the op raises. With `runs`, the others must return the bits of the first.

    `expect` is given the plan first.
    """
    call, f = make(case, device), case.signature
    bounded = f.accumulation or DTYPES[f.dtype] in FLOAT8  # by what the kernel is
    plan = call.plan() if expect is not None or bounded else None
    if expect is not None:
        expect(plan)

    def made() -> tuple[Tensor, ...]:
        found = call()
        return found if isinstance(found, tuple) else (found,)

    found = made()
    if call.out is not None and found[0] is not call.out:
        raise Wrong("result", "out was given, and another tensor was returned")
    call.judge(plan if bounded else None, *found)
    first = [t.clone() for t in found] if runs > 1 else []
    for _ in range(runs - 1):
        if not all(same_bits(*pair) for pair in zip(made(), first, strict=True)):
            raise Wrong("other bits", "the same call returned another result")
