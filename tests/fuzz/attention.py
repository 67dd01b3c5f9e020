"""Random calls of attention for the fuzz: dense, packed, block-sparse, cached and paged, in guarded memory.

As fuzz_products: a `Family` holds what kernels are compiled from, a `Case` what may change from call to call. Rows of q
and k may be NaN: then the rows of the result that see them must be NaN, with an LSE of NaN, and no others.
"""

import itertools
import random
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import cute_kernels
from attention import BlockMask, attention, block_sparse_attention
from attention.decode import heuristics
from cute_kernels.testing.reference import assert_as_good_as_torch, attention_plainly, band_mask, normal, seed

from ..attention.mask_parts import elements
from ..attention.parts import paged, starts
from ..conformance import DTYPES
from ..guard_zones import Placement, Wrong, Zones
from .gemm import placements

OPS = ("attention", "packed attention", "block_sparse_attention", "cached attention", "paged attention")
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (128, 64), (96, 64), (96, 192))
HEADS = ((3, 3), (8, 2), (4, 1), (2, 2), (6, 3), (9, 3))
BLOCKSIZES = ((128, 128), (64, 64), (128, 64), (64, 128))
PAGES = (16, 32, 64, 128)
UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # by how much rounding a number may change it


@dataclass(frozen=True)
class Family:
    op: str
    path: str
    dtype: str
    dims: tuple[int, int]
    causal: bool
    window: bool  # whether there is one
    softcap: float | None
    lse: bool
    splits: int | None = None  # forced
    page_size: int = 0
    blocksize: tuple[int, int] | None = None
    sinks: str | None = None  # their dtype
    cache: str | None = None  # that of k and v where they are of 8 bits

    @property
    def name(self) -> str:
        return f"{self.op} {self.path}"


@dataclass(frozen=True)
class Case:
    """One call. `rows` and `cols`: how many each item has of q, and of k and v. Packed: of each sequence."""

    family: Family
    heads: tuple[int, int]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    capacity: int  # rows of a cache; of pages, how many an item's table has
    window: tuple[int, int] | None
    density: float  # of a block mask
    nan_q: tuple[float, ...]  # which rows are NaN, from 0 to 1 through all of them
    nan_k: tuple[float, ...]
    places: tuple[Placement, Placement, Placement, Placement]  # of q, k, v and out
    give_out: bool
    seed: int


def families(seed: int = 0, each: int = 18) -> list[Family]:
    """`each` of them for every op and path, drawn once: each term goes through all its values in turn."""
    draw, found = random.Random(seed), []
    for op, path in itertools.product(OPS, ("sm_90", "sm_80")):

        def turns(*values):
            row = [values[i % len(values)] for i in range(each)]
            draw.shuffle(row)
            return row

        cached, blocks = op in ("cached attention", "paged attention"), op == "block_sparse_attention"
        terms = (
            turns("bf16", "bf16", "fp16"), turns(*DIMS), turns(False, True), turns(False, False, not blocks),
            turns(None, None, 5.0), turns(True, True, False), turns(None, 1, 3) if cached else turns(None),
            turns(*PAGES) if op.startswith("paged") else turns(0), turns(*BLOCKSIZES) if blocks else turns(None),
            turns(None, None, "bf16", "fp32"),
        )  # fmt: skip
        families = [Family(op, path, *each) for each in zip(*terms, strict=True)]
        if cached:  # drawn apart, so that the others stay what they were
            kinds = [(None, "e4m3", None, "e5m2")[i % 4] for i in range(each)]
            random.Random(f"{seed} {op} {path}").shuffle(kinds)
            families = [replace(family, cache=kind) for family, kind in zip(families, kinds, strict=True)]
        found += families
    return found


# -- drawing ---------------------------------------------------------------------------------------------------


def lengths(most: int):
    near = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257]).filter(lambda n: n <= most)
    return st.one_of(near, st.integers(0, most))


fractions = st.one_of(st.just(()), st.just(()), st.lists(st.floats(0, 1, width=16), max_size=2).map(tuple))


@st.composite
def cases(draw, family: Family, most: int = 300):
    f = family
    packed, cached = f.op == "packed attention", f.op in ("cached attention", "paged attention")
    heads, items = draw(st.sampled_from(HEADS)), draw(st.integers(1, 3))
    if packed and draw(st.booleans()):
        items, most = draw(st.integers(4, 40)), most // 5  # more than the lanes of a warp
    few = st.integers(0 if packed else 1, 9)
    capacity = 0
    if packed:
        rows = tuple(draw(st.one_of(lengths(most // 2), few)) for _ in range(items))
        cols = tuple(draw(lengths(most // 2)) for _ in range(items))
        shapes = [
            (sum(rows), heads[0], f.dims[0]), (sum(cols), heads[1], f.dims[0]), (sum(cols), heads[1], f.dims[1]),
            (sum(rows), heads[0], f.dims[1]),
        ]  # fmt: skip
    else:
        one_row = draw(few) if cached else draw(st.one_of(lengths(most), few))
        rows = (one_row,) * items
        if cached:
            cols = tuple(draw(lengths(2 * most)) for _ in range(items))
            capacity = max(*cols, 1) + draw(st.sampled_from([0, 0, 1, 40]))
        else:
            cols = (draw(lengths(most)),) * items
        if f.op == "paged attention":
            capacity = -(-capacity // f.page_size)
        batch = items * capacity + 2 if f.page_size else items
        length = f.page_size or capacity or cols[0]
        shapes = [
            (items, heads[0], rows[0], f.dims[0]), (batch, heads[1], length, f.dims[0]),
            (batch, heads[1], length, f.dims[1]), (items, heads[0], rows[0], f.dims[1]),
        ]  # fmt: skip
    swap = draw(st.booleans())  # (B, S, H, D) in memory
    aligns = (draw(st.sampled_from([8, 8, 8, 1])), *(draw(st.sampled_from([8, 8, 8, 1])),) * 2, 8)
    places = []
    for shape, align in zip(shapes, aligns, strict=True):
        place = draw(placements(shape, align))
        if swap:
            order, i = [*place.order], len(shape) - 3
            order[i : i + 2] = order[i + 1], order[i]
            place = Placement(tuple(order), place.pads, place.before)
        places.append(place)
    window = (draw(st.integers(0, most)), draw(st.sampled_from([-1, 0, 5, 70]))) if f.window else None
    density, nans = draw(st.sampled_from([0.1, 0.5, 1.0])), (draw(fractions), draw(fractions))
    give_out, seed = draw(st.sampled_from([True, True, True, False])), draw(st.integers(0, 2**31))
    return Case(f, heads, rows, cols, capacity, window, density, *nans, tuple(places), give_out, seed)


# -- running ---------------------------------------------------------------------------------------------------


def with_nan_rows(t: Tensor, at: tuple[float, ...]) -> Tensor:
    """t (.., rows, D), in which the rows at these fractions of all rows of all heads are NaN."""
    rows = t.numel() // t.shape[-1]
    if rows:
        t.view(rows, -1)[[min(int(x * rows), rows - 1) for x in at]] = torch.nan
    return t


def band(case: Case, rows: int, cols: int, device) -> Tensor:
    """(rows, cols) bool: what a sequence's rows see of its own columns."""
    left, right = (None if n == -1 else n for n in case.window or (-1, -1))
    return band_mask(rows, cols, left, 0 if case.family.causal else right, device)


def run(case: Case, device: str = "cpu") -> None:
    """Make the call; raise Wrong, or what the op raises."""
    f = case.family
    seed(case.seed)
    zones, dtype = Zones(device), DTYPES[f.dtype]
    terms = {"causal": f.causal, "softcap": f.softcap, "return_lse": f.lse}
    if f.window:
        terms["window_size"] = case.window
    make = {"packed attention": packed, "block_sparse_attention": block_sparse}.get(f.op, batched)
    given, plain, seen, more = make(case, zones, {"dtype": dtype, "device": device})
    if f.sinks:
        sinks = normal(case.heads[0], dtype=DTYPES[f.sinks], device=device)
        terms["sinks"] = zones.input(sinks, name="sinks")
    expect = Expected(*plain, seen, f.softcap, terms.get("sinks"))
    shape = expect.exact.shape
    if f.op == "packed attention":
        shape = shape[2], shape[1], shape[3]
    if case.give_out:
        terms["out"] = zones.output(shape, dtype, case.places[3])
    places = [case.places[0], *(twice(place) if f.cache else place for place in case.places[1:3])]
    named = zip(given, places, ("q", "k", "v"), strict=True)
    tensors = [zones.input(*each) for each in named]
    with cute_kernels.path(f.path), heuristics.splits(f.splits):
        op = block_sparse_attention if f.op == "block_sparse_attention" else attention
        result = op(*tensors, **terms, **more)
    out, lse = result if f.lse else (result, None)
    if case.give_out and out is not terms["out"]:
        raise Wrong("result", "out was given, and something else came back")
    if out.shape != shape or out.dtype is not dtype:
        raise Wrong("result", f"{tuple(out.shape)} {out.dtype}, not {tuple(shape)} {f.dtype}")
    if f.op == "packed attention":
        out, lse = out.transpose(0, 1)[None], lse if lse is None else lse[None]
    expect.judge(out, lse, zones)


def batched(case: Case, zones: Zones, kind: dict) -> tuple:
    """(operands, q, k and v plainly, what each row sees, other terms): of attention, of a cache and of pages."""
    f, device = case.family, kind["device"]
    B, (H, Hkv), size = len(case.rows), case.heads, f.page_size
    length = case.capacity * size if size else case.capacity or case.cols[0]
    q = with_nan_rows(normal(B, H, case.rows[0], f.dims[0], **kind), case.nan_q)
    k, v = (normal(B, Hkv, length, d, **kind) for d in f.dims)
    k = with_nan_rows(k, case.nan_k)
    seen = torch.zeros(B, 1, case.rows[0], length, dtype=torch.bool, device=device)
    for b, (rows, cols) in enumerate(zip(case.rows, case.cols, strict=True)):
        seen[b, 0, :, :cols] = band(case, rows, cols, device)
        k[b, :, cols:], v[b, :, cols:] = torch.nan, torch.nan
    stored, more = (k, v), {}
    if f.cache:
        stored, (k, v), more = narrow(case, k, v)
        more = {name: zones.input(t, name=name) for name, t in more.items()}
    given = q, *stored
    if size:
        pages = B * case.capacity + 2
        order = torch.randperm(pages, device=device)[: B * case.capacity]
        given = q, *(paged(t, order, pages, size) for t in stored)
        table = order.view(B, case.capacity).to(torch.int32)
        for b, cols in enumerate(case.cols):
            table[b, -(-cols // size) :] = 2**30
        more["page_table"] = zones.input(table, name="page_table")
    if f.op != "attention":
        # Lengths that cannot be count as the nearest one that can.
        lengths = [n - 1 if n == 0 and case.seed % 2 else n + case.seed % 3 * (n == length) for n in case.cols]
        if case.seed % 4 == 3:  # of first rows, too
            lengths = [(n * (b + case.seed % 5) // 7, n) for b, n in enumerate(lengths)]
            for b, (first, _) in enumerate(lengths):
                seen[b, 0, :, : max(first, 0)] = False
        more["seqused_k"] = zones.input(torch.tensor(lengths, dtype=torch.int32, device=device), name="seqused_k")
    return given, (q, k, v), seen, more


def narrow(case: Case, k: Tensor, v: Tensor) -> tuple:
    """(k and v of 8 bits, what they are with their scales, the scales): powers of 2, so that nothing is rounded."""
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[case.family.cache]
    shape = [(1,), k.shape[1:2], k.shape[:2]][case.seed // 7 % 3]
    stored = tuple(t.to(kind) for t in (k, v))
    scales = [2.0 ** torch.randint(-2, 3, shape, device=k.device).float() for _ in range(2)]
    wide = tuple(t.to(k.dtype) * s[..., None, None].to(k.dtype) for t, s in zip(stored, scales, strict=True))
    return stored, wide, dict(zip(("k_descale", "v_descale"), scales, strict=True))


def twice(place: Placement) -> Placement:
    """For elements of 8 bits the same bytes as for 16."""
    return replace(place, pads=tuple(2 * n for n in place.pads), before=2 * place.before)


def packed(case: Case, zones: Zones, kind: dict) -> tuple:
    """The same of packed sequences, as one item of all rows and columns."""
    f, device = case.family, kind["device"]
    (H, Hkv), (D, Dv) = case.heads, f.dims
    more = 3 if case.seed % 3 == 0 else 0  # rows and columns of no sequence, at the end
    total, columns = sum(case.rows) + more, sum(case.cols) + more
    q = with_nan_rows(normal(total, H, D, **kind), case.nan_q)
    k, v = with_nan_rows(normal(columns, Hkv, D, **kind), case.nan_k), normal(columns, Hkv, Dv, **kind)
    seen = torch.zeros(1, 1, total, columns, dtype=torch.bool, device=device)
    row = col = 0
    for rows, cols in zip(case.rows, case.cols, strict=True):
        seen[0, 0, row : row + rows, col : col + cols] = band(case, rows, cols, device)
        row, col = row + rows, col + cols
    cu = {"cu_seqlens_q": starts(case.rows, device), "cu_seqlens_k": starts(case.cols, device)}
    plain = tuple(t.transpose(0, 1)[None] for t in (q, k, v))
    return (q, k, v), plain, seen, {name: zones.input(t, name=name) for name, t in cu.items()}


def block_sparse(case: Case, zones: Zones, kind: dict) -> tuple:
    """The same of a block mask, one pattern for all items, or one for each item and head."""
    f, device = case.family, kind["device"]
    B, (H, Hkv), (D, Dv), lengths = len(case.rows), case.heads, f.dims, (case.rows[0], case.cols[0])
    q = with_nan_rows(normal(B, H, lengths[0], D, **kind), case.nan_q)
    k, v = (normal(B, Hkv, lengths[1], d, **kind) for d in (D, Dv))
    grid = (-(-n // side) for n, side in zip(lengths, f.blocksize, strict=True))
    blocks = torch.rand(*((B, H) if case.seed % 2 else (1, 1)), *grid, device=device) < case.density
    seen = elements(blocks, f.blocksize, lengths) & band(case, *lengths, device)
    mask = BlockMask.from_blocks(blocks, f.blocksize, lengths=lengths)
    operands = q, with_nan_rows(k, case.nan_k), v
    return operands, operands, seen, {"block_mask": mask}


class Expected:
    """Expected (B, H, Sq, Dv) of a call: exactly, as torch computes it in the operands' dtype, and where NaN."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float | None, sinks: Tensor | None = None
    ):
        group, self.columns = q.shape[1] // k.shape[1], k.shape[2]
        nan_q, nan_k = (t.isnan().any(-1) for t in (q, k.repeat_interleave(group, 1)))
        self.nan = (seen & (nan_q[..., None] | nan_k[:, :, None])).any(-1)  # rows
        q, k, v = (t.nan_to_num(0.0) for t in (q, k, v))
        terms = {"softcap": softcap, "sinks": sinks}
        self.exact, self.lse = attention_plainly(*(t.double() for t in (q, k, v)), seen, **terms)
        self.by_torch, _ = attention_plainly(q, k, v, seen, **terms)
        for t in (self.exact, self.by_torch):
            t.masked_fill_(self.nan[..., None], 0.0)
        self.empty = self.lse.isneginf() & ~self.nan

    def judge(self, out: Tensor, lse: Tensor | None, zones: Zones) -> None:
        """Raise Wrong unless out errs at most twice as torch does, or by rounding, and lse by a few fp32 ulp."""
        numbers = zones.counts()
        if out.numel():
            nan = self.nan[..., None]
            plain = torch.where(nan, 0.0, out)
            ours, theirs = (t.double() - self.exact for t in (plain, self.by_torch))
            finite = torch.where(self.nan | self.empty, 0.0, self.lse)
            error = finite.new_zeros(())
            wrong_lse = nan_lse = error
            if lse is not None:
                error = (torch.where(self.nan | self.empty, 0.0, lse.double()) - finite).abs().max()
                wrong_lse = (lse.isneginf() != self.empty).count_nonzero()
                nan_lse = (lse.isnan() != self.nan).count_nonzero()
            numbers += [
                (out.isnan() != nan).count_nonzero(), nan_lse, wrong_lse,
                (out.masked_fill(~self.empty[..., None], 0.0) != 0).count_nonzero(), error, finite.abs().max(),
                ours.abs().max(), theirs.abs().max(), ours.norm(), theirs.norm(), self.exact.abs().max(),
            ]  # fmt: skip
        numbers = torch.stack([n.double() for n in numbers]).tolist()
        buffers = len(zones.inputs) + len(zones.outputs)
        zones.complain([int(n) for n in numbers[:buffers]])
        if out.numel():
            self.complain(*numbers[buffers:], plain)

    def complain(self, nan_out, nan_lse, wrong_lse, empty, error, most, *errors_and_out) -> None:
        *errors, out = errors_and_out
        largest, their_largest, norm, their_norm, magnitude = errors
        if nan_out:
            raise Wrong("NaN in out", f"{nan_out:.0f} elements are NaN and should not be, or are not and should")
        if nan_lse:
            raise Wrong("NaN in lse", f"{nan_lse:.0f} of {int(self.nan.sum())} rows of NaN, and of all others")
        if wrong_lse or empty:
            raise Wrong("result", f"rows that see nothing: {wrong_lse:.0f} of lse, {empty:.0f} elements of out")
        if not error <= 2e-5 * (1 + most):
            raise Wrong("result", f"lse errs by {error:.3g}, at most {2e-5 * (1 + most):.3g} is allowed")
        rounding = UNIT[out.dtype] * magnitude
        if not (largest <= 2 * max(their_largest, rounding) and norm <= 2 * max(their_norm, rounding)):
            try:
                assert_as_good_as_torch(out, self.exact, self.by_torch, k=self.columns)
            except AssertionError as failure:
                raise Wrong("result", str(failure)) from None
