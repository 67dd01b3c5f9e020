"""Random products for the fuzz: gemm, bsr_matmul, bsr_linear and bsr_grouped_linear in guarded memory.

A `Family` holds what kernels are compiled from; a `Case` what may change from call to call: extents, strides, patterns
and numbers. So many cases share few kernels. A case is plain data, from which `run` makes the same call again.
"""

import itertools
import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import cute_kernels
from cute_kernels import gemm
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul

from .cases import mask_to_indices
from .guard_zones import Placement, Wrong, Zones
from .reference import assert_as_good_as_torch, exact_and_torch, normal, truth

OPS = ("gemm", "bsr_matmul", "bsr_linear", "bsr_grouped_linear")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCKS = ((128, 128), (64, 64), (32, 32), (16, 16), (48, 112), (256, 64), (64, 128))
RUNS = (64, 128, 256)


@dataclass(frozen=True)
class Family:
    """`align`: of operands' strides, addresses and, on the sm_80 path, contiguous extents, in elements; `align_out` the
    same of out's strides and address. `majors`: whether the two dense operands and out are transposed in memory."""

    op: str
    path: str
    dtype: str
    out_dtype: str
    align: int
    align_out: int
    majors: tuple[bool, bool, bool]
    bias: str | None
    activation: str | None
    residual: bool
    block: tuple[int, int] | None = None
    batch: str | None = None  # of gemm "both", of W "values" or "patterns"
    run: int = 0
    index: str = "int32"

    @property
    def name(self) -> str:
        return f"{self.op} {self.path}"


@dataclass(frozen=True)
class Case:
    """One call. gemm: a (m, k) @ b (k, n). Others: W of m x k blocks, and n tokens, or runs of tokens."""

    family: Family
    m: int
    n: int
    k: int
    items: int
    density: float
    leading: tuple[int, ...] | None  # bsr_linear: x is (*leading, K), () for one dimension; None: (n, K)
    places: tuple[Placement, Placement, Placement, Placement]  # of a, b, out, residual; W has no place in it
    give_out: bool
    seed: int


def families(seed: int = 0, each: int = 16) -> list[Family]:
    """`each` of them for every op and path, drawn once: dtypes, layouts and epilogues go through all values in turn."""
    draw, found = random.Random(seed), []
    for op, path in itertools.product(OPS, ("sm_90", "sm_80")):

        def turns(*values, count=each):
            """The values again and again, shuffled."""
            row = [values[i % len(values)] for i in range(count)]
            draw.shuffle(row)
            return row

        sparse = op != "gemm"
        linear = op in ("bsr_linear", "bsr_grouped_linear")
        aligns = turns(8) if path == "sm_90" else turns(8, 1, 8, 2, 4, 1)
        batches = turns(None, None, None, "values", "patterns") if sparse else turns(None, None, "both")
        if op == "bsr_grouped_linear":
            batches = turns("values", "patterns")
        for i, (dtype, out, align, align_out, a, b, d, bias, activation, residual, block, batch, index) in enumerate(
            zip(
                turns("bf16", "bf16", "fp16"), turns("same", "same", "fp32"), aligns, turns(8, 8, 1),
                turns(False, True), turns(False, True), turns(False, True, False),
                turns(None, "items" if linear else "col", "row" if not linear else "col"),
                turns(None, "gelu", "relu", "silu"), turns(False, False, True), turns(*BLOCKS), batches,
                turns("int32", "int32", "int64"), strict=True,
            )
        ):  # fmt: skip
            if path == "sm_80" and i % 2:
                align_out = align
            if bias == "items" and batch is None:
                bias = "col"
            found.append(
                Family(
                    op,
                    path,
                    dtype,
                    dtype if out == "same" else out,
                    align,
                    align_out,
                    (a, b, d),
                    bias,
                    activation,
                    residual and not linear,
                    block if sparse else None,
                    batch,
                    RUNS[i % 3] if op == "bsr_grouped_linear" else 0,
                    index,
                )  # fmt: skip
            )
    return found


# -- drawing ---------------------------------------------------------------------------------------------------


def multiple(n: int, of: int) -> int:
    return -(-n // of) * of


@st.composite
def placements(draw, shape, align: int, transposed: bool = False):
    """A placement in which all strides but the fastest, and the address, are multiples of `align` elements.

    With `align` below 8 the address is no multiple of more.
    """
    dims = len(shape)
    order = [*range(dims)]
    if transposed and dims >= 2:
        order[-2:] = order[:-3:-1]
    pads = [0] * dims
    if dims:
        fast = order[-1]
        pads[fast] = multiple(max(shape[fast], 1), align) - max(shape[fast], 1)
        if dims > 1:
            pads[fast] += align * draw(st.sampled_from([0, 0, 1, 2, 7]))
        for dim in order[1:-1]:
            pads[dim] = draw(st.sampled_from([0, 0, 1, 3]))
    before = align * draw(st.sampled_from([0, 1, 3])) if align == 8 else align * draw(st.sampled_from([1, 3]))
    return Placement(tuple(order), tuple(pads), before)


def extents(most: int, align: int):
    """0 and 1 now and then, else up to `most`; where copies are narrow, odd multiples of `align`."""
    if align == 8:
        near = st.integers(0, most // 8).flatmap(lambda j: st.integers(1, 17).map(lambda more: 8 * j + more))
        return st.one_of(st.sampled_from([0, 1]), near, st.integers(1, most))
    return st.one_of(st.just(0), st.integers(0, max(most // (2 * align) - 1, 0)).map(lambda j: (2 * j + 1) * align))


# On the sm_80 path a copy is as wide as the contiguous extent allows: to have few kernels, the widest or the narrowest.
wide_or_odd = st.sampled_from([lambda *n: [8 * (x // 8) for x in n], lambda *n: [x | 1 for x in n]])


@st.composite
def cases(draw, family: Family, most: int = 300):
    """`most`: the largest extent of a dense product, about."""
    f = family
    # On the sm_80 path a contiguous extent decides how wide copies are; a row of W's blocks is always wide.
    align = f.align if f.path == "sm_80" else 8
    items = draw(st.integers(1, 3)) if f.batch else 1
    density = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    leading, give_out = None, draw(st.sampled_from([True, True, True, False]))
    if f.op == "gemm":
        m, n, k = (draw(extents(most, align)) for _ in range(3))
        if f.path == "sm_80" and align == 8:
            m, n, k = draw(wide_or_odd)(m, n, k)
        lead = (items,) if f.batch else ()
        shapes = (*lead, m, k), (*lead, k, n), (*lead, m, n)
    else:
        bm, bk = f.block
        m, k = (draw(st.integers(0, max(1, most // side))) for side in f.block)
        if f.op == "bsr_grouped_linear":
            n = draw(st.integers(0, max(2, most // f.run)))
            tokens = n * f.run
        else:
            n = draw(st.one_of(extents(most, align), st.integers(0, 17) if align == 8 else st.nothing()))
            if f.path == "sm_80" and align == 8:
                (n,) = draw(wide_or_odd)(n)
            tokens = n
        M, K = m * bm, k * bk
        lead = (items,) if f.batch and f.op != "bsr_grouped_linear" else ()
        if f.op == "bsr_matmul":
            shapes = (), (*lead, K, tokens), (*lead, M, tokens)
        else:
            if f.op == "bsr_linear" and not f.batch and align == 8 and draw(st.integers(0, 3)) == 0:
                leading = draw(st.sampled_from([(), (1, n), (2, n), (3, 1), (2, 2, 3)]))
            x = (*lead, tokens) if leading is None else leading
            shapes = (), (*x, K), (*x, M)
    a, b, out, residual = shapes[0], shapes[1], shapes[2], shapes[2]
    # Folded with the others, a dimension of extent 1 is not the contiguous one, which the sm_90 path asks for.
    transposed = f.majors[1] and not (leading and leading[-1] == 1)
    places = tuple(
        draw(placements(shape, aligned, t))
        for shape, aligned, t in (
            (a, f.align, f.majors[0]),
            (b, f.align, transposed),
            (out, f.align_out, f.majors[2]),
            (residual, 1, f.majors[2]),
        )
    )
    return Case(f, m, n, k, items, density, leading, places, give_out, draw(st.integers(0, 2**31)))


# -- running ---------------------------------------------------------------------------------------------------


def matrix(case: Case, zones: Zones, device) -> tuple[BsrMatrix, torch.Tensor]:
    """W in guarded memory, and the dense matrix (.., M, K) that it is."""
    f, (bm, bk) = case.family, case.family.block
    L = case.items if f.batch == "patterns" else 1
    mask = torch.rand(L, case.m, case.k, device=device) < case.density
    L_values = case.items if f.batch == "values" else 1
    blocks = torch.zeros(L, L_values, case.m, case.k, bm, bk, dtype=DTYPES[f.dtype], device=device)
    kept = max(1, round(case.density * case.k * bk))
    l, r, c = mask.nonzero(as_tuple=True)
    values = normal(L_values, len(l), bm, bk, dtype=DTYPES[f.dtype], device=device, k=kept)
    blocks[l, :, r, c] = values.transpose(0, 1)
    dense = blocks.transpose(3, 4).reshape(L * L_values, case.m * bm, case.k * bk)
    index = getattr(torch, f.index)
    crow, col = zip(*(mask_to_indices(each, index) for each in mask), strict=True)
    crow, col = torch.stack(crow), torch.cat(col)
    if f.batch == "patterns":
        offsets = mask.flatten(1).sum(1).cumsum(0).roll(1).to(index)
        offsets[0] = 0
        crow = crow + offsets[:, None]
        shape = dense.shape
    else:
        crow, shape = crow[0], dense.shape if f.batch else dense.shape[1:]
    values = values if f.batch == "values" else values[0]
    parts = (zones.input(t, name=name) for name, t in (("crow", crow), ("col", col), ("values", values)))
    W = BsrMatrix(*parts, tuple(shape))
    return W, dense if f.batch else dense[0]


def run(case: Case, device: str = "cpu") -> None:
    """Make the call; raise Wrong, or what the op raises."""
    f = case.family
    torch.manual_seed(case.seed)
    zones, dtype, out_dtype = Zones(device), DTYPES[f.dtype], DTYPES[f.out_dtype]
    terms = {"activation": f.activation}
    place_a, place_b, place_out, place_residual = case.places
    if f.op == "gemm":
        lead = (case.items,) if f.batch else ()
        a = zones.input(normal(*lead, case.m, case.k, dtype=dtype, device=device), place_a, "a")
        b = zones.input(normal(*lead, case.k, case.n, dtype=dtype, device=device, k=case.k), place_b, "b")
        args, op, left, right, rows, cols = (a, b), gemm, a, b, case.m, case.n
    else:
        W, dense = matrix(case, zones, device)
        M, K = W.shape[-2:]
        lead = (case.items,) if f.batch and not f.run else ()
        tokens = case.n * max(f.run, 1)
        if f.op == "bsr_matmul":
            b = zones.input(normal(*lead, K, tokens, dtype=dtype, device=device), place_b, "b")
            args, op, left, right, rows, cols = (W, b), bsr_matmul, dense, b, M, tokens
        else:
            shape = (*lead, tokens) if case.leading is None else case.leading
            b = zones.input(normal(*shape, K, dtype=dtype, device=device), place_b, "x")
            args, op, left, right, rows, cols = (b, W), bsr_linear, b, dense.mT, tokens, M
    if f.bias == "items":
        bias = normal(case.items, cols, dtype=dtype, device=device)
    elif f.bias:
        bias = normal(*((cols,) if f.bias == "col" else (rows, 1)), dtype=dtype, device=device)
    if f.bias:
        terms["bias"] = zones.input(bias, name="bias")
    expected = dict(terms)
    if f.run:
        groups = torch.randint(-1, case.items + 1, (case.n,), dtype=torch.int32, device=device)
        groups = zones.input(groups, name="groups")
        args, op = (b, W, groups), bsr_grouped_linear
        exact, by_torch = (grouped(b, dense, groups, f.run, terms, t) for t in (torch.float64, torch.float32))
        by_torch = by_torch.to(out_dtype)
    else:
        if f.bias == "items":
            expected["bias"] = expected["bias"][:, None]
        if f.residual:
            residual = normal(*lead, rows, cols, dtype=out_dtype, device=device)
            terms["residual"] = expected["residual"] = zones.input(residual, place_residual, "residual")
        exact, by_torch = exact_and_torch(left, right, out_dtype, **expected)
    if case.give_out or out_dtype is not dtype:
        terms["out"] = zones.output(exact.shape, out_dtype, place_out)
    with cute_kernels.path(f.path):
        result = op(*args, **terms)
    if "out" in terms and result is not terms["out"]:
        raise Wrong("result", "out was given, and something else came back")
    judge(result, exact, by_torch, zones, k=left.shape[-1])


def grouped(x, dense, groups, rows: int, terms: dict, dtype) -> torch.Tensor:
    """bsr_grouped_linear in `dtype`: an item of W for each run of rows; what has none is multiplied by zeros."""
    items = len(dense)
    there = ((groups >= 0) & (groups < items))[:, None, None]
    number = groups.clamp(0, items - 1).long()
    runs = x.unflatten(0, (len(groups), rows))
    weights = torch.where(there, dense[number], 0.0).mT
    bias = terms.get("bias")
    if bias is not None and bias.dim() == 2:
        bias = bias[number][:, None]
    return truth(runs, weights, bias, terms["activation"], dtype=dtype).flatten(0, 1)


def judge(result, exact, by_torch, zones: Zones, *, k: int) -> None:
    """As reference.assert_as_good_as_torch and Zones.check, with one wait for the GPU."""
    if result.shape != exact.shape or result.dtype != by_torch.dtype:
        raise Wrong("result", f"{tuple(result.shape)} {result.dtype}, not {tuple(exact.shape)} {by_torch.dtype}")
    numbers = zones.counts()
    if exact.numel():
        ours, theirs = (t.double() - exact for t in (result, by_torch))
        numbers += [ours.abs().max(), theirs.abs().max(), ours.norm(), theirs.norm()]
    numbers = torch.stack([n.double() for n in numbers]).tolist()
    zones.complain([int(n) for n in numbers[: len(zones.inputs) + len(zones.outputs)]])
    if exact.numel():
        largest, their_largest, norm, their_norm = numbers[-4:]
        if not (largest <= 2 * their_largest and norm <= 2 * their_norm):  # NaN is never <=
            try:
                assert_as_good_as_torch(result, exact, by_torch, k=k)
            except AssertionError as error:
                raise Wrong("result", str(error)) from None
