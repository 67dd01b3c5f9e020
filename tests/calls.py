"""Calls of ops that gates and sanitizers repeat: products and attention of a few numbers each.

A `Case` is one of the makers below with its arguments, and a path. Called with a device it gives a `Call`, whose
operands are drawn on the CPU from the case's name, so that one case is one set of numbers on every machine.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention
from attention.masks.mask_mods import SameDocument, window_bounds
from cute_kernels.testing import reference
from cute_kernels.testing.reference import assert_as_good_as_torch, normal, poisoned

from . import gemm_calls, gemm_cases
from .gemm_calls import Call
from .gemm_cases import DTYPES, Signature

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPARE = 3  # pages that no item has


@dataclass(frozen=True)
class Case:
    make: partial  # of a maker: it takes the device as well
    path: str | None = None

    @property
    def name(self) -> str:
        given = [*self.make.args, *(f"{name}={value}" for name, value in self.make.keywords.items())]
        return " ".join(map(str, filter(None, (self.path, self.make.func.__name__, *given))))

    def __call__(self, device: str = "cpu") -> Call:
        reference.seed(self.name)
        return replace(self.make(device=device), name=self.name, path=self.path)


def on_paths(makers: Iterable[partial], paths: Iterable[str | None]) -> list[Case]:
    makers = list(makers)
    return [Case(make, path) for path in paths for make in makers]


def paths() -> list[str | None]:
    """The paths that this machine runs; [None] where it runs none."""
    if not torch.cuda.is_available():
        return [None]
    return ["sm_80", "sm_90"] if torch.cuda.get_device_capability() == (9, 0) else ["sm_80"]


def bits(results: Iterable[Tensor]) -> Tensor:
    """All bits of some results, for comparisons in which NaN equals itself."""
    return torch.cat([t.contiguous().view(torch.int16).flatten() for t in results])


# -- products -------------------------------------------------------------------------------------------------

NAMES = {dtype: name for name, dtype in DTYPES.items()}
TERMS = {
    "bias": {"bias": "col"},
    "row bias": {"bias": "row"},
    "residual": {"residual": True},
    "alpha": {"scaled": True},
    "beta": {"scaled": True},
    "squared_relu": {"function": True},
}


def made(op, m, n, k, *, dtype=BF16, out_dtype=None, terms="", device="cpu", items=1, pattern=None, **more) -> Call:
    """The call of one case; `terms` are names joined by +, of TERMS or an activation."""
    for term in filter(None, terms.split("+")):
        more |= TERMS.get(term, {"activation": term})
    signature = Signature(op, None, NAMES[dtype], NAMES[out_dtype or dtype], **more)
    return strict(gemm_cases.make(gemm_cases.Case(signature, m, n, k, items, pattern=pattern), device))


def strict(call: Call) -> Call:
    """A call that also judges each element by itself."""

    def judge(plan, result):
        call.judge(plan, result)
        exact, _ = call.truth()
        floor = (8 + call.args[0].shape[-1] / 16) * reference.ULP32 * max(1.0, exact.abs().max().item())
        near_each(result, exact, torch.finfo(result.dtype).eps * exact.abs() + 4 * floor)
        if call.moving.dtype is FP16:
            within_a_thousandth(result, exact)

    return replace(call, judge=judge)


def product(op, args, dense, *, out_dtype, terms: str, device) -> Call:
    """A call whose result is `dense[0] @ dense[1]`, of given operands, with a bias, a residual or an activation."""
    shape, dtype = (dense[0].shape[-2], dense[1].shape[-1]), dense[0].dtype
    named = {"bias": (shape[-1:], dtype), "residual": (shape, out_dtype)}
    found = {}
    for term in filter(None, terms.split("+")):
        found |= (
            {term: normal(*named[term][0], dtype=named[term][1]).to(device)} if term in named else {"activation": term}
        )
    out = poisoned(*shape, dtype=out_dtype, device=device)
    return strict(gemm_calls.gemm_call(op, args, found, out))


def dense(m, n, k, layouts="nn", *, batch=(), m_major=False, **more) -> Call:
    """gemm; `layouts` says of a and b whether they are row-major, "n", or the transpose of a row-major matrix, "t"."""
    majors = layouts[0] == "t", layouts[1] == "t", m_major
    items = {"batch": "both", "items": batch[0]} if batch else {}
    return made("gemm", m, n, k, majors=majors, **items, **more)


def matmul(block, pattern, rows, cols, n, **more) -> Call:
    """bsr_matmul of a W with `rows` x `cols` blocks, stored as in testing.patterns.PATTERNS[pattern]."""
    return made("bsr_matmul", rows, n, cols, block=block, pattern=pattern, **more)


def linear(block, pattern, rows, cols, n, **more) -> Call:
    """bsr_linear of n tokens."""
    return made("bsr_linear", rows, n, cols, block=block, pattern=pattern, **more)


def batch_of(op, one_pattern: bool, n: int, **more) -> Call:
    """For three items; the second is empty if each has its own pattern."""
    batch = "values" if one_pattern else "patterns"
    return made(op, 4, n, 3, block=(64, 64), pattern="power_law", batch=batch, items=3, **more)


def batched(one_pattern: bool, n: int, **more) -> Call:
    """bsr_matmul of a batch, with a bias for each row of each item."""
    return batch_of("bsr_matmul", one_pattern, n, bias="items", **more)


def grouped(one_pattern: bool, **more) -> Call:
    """bsr_grouped_linear of five runs of tokens, each of any item or of none."""
    return batch_of("bsr_grouped_linear", one_pattern, 5, run=64, **more)


def near_each(out: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """Each element by itself: the largest error of a whole matrix says nothing of a small element that is off."""
    wrong = ~((out.double() - exact).abs() <= allowed)  # NaN is wrong
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} elements err more than rounding may cost, first at {first}: "
            f"got {out[first].item():.6g}, expected {exact[first].item():.6g}"
        )


def within_a_thousandth(out: Tensor, exact: Tensor, limit: float = 1e-3) -> None:
    """fp16 operands of unit variance, one of them over sqrt(K): the absolute error is below 1e-3.

    With fp16 output only where |exact| < 4: above that its spacing is 2^-8, so one rounding may cost 2e-3.
    """
    checked = exact.abs() < (math.inf if out.dtype is FP32 else 4.0)
    error = torch.where(checked, (out.double() - exact).abs(), 0.0).max().item()
    if not error < limit:
        raise AssertionError(f"absolute error {error:.3g} of fp16 operands, must be below {limit}")


# -- attention ------------------------------------------------------------------------------------------------


def attend(
    form, batch, heads, kv_heads, rows, cols, head_dim, head_dim_v=None, *, causal=False, window_size=None,
    softcap=None, lse=True, splits=0, page=0, block=None, dtype=BF16, device="cpu",
) -> Call:  # fmt: skip
    """Attention over dense tensors, packed sequences, a cache (with pages if `page`) or blocks.

    Of packed sequences and caches `rows` and `cols` are the longest item's: the second item is empty. What a call must
    not read is NaN: rows of a cache past an item's length, and pages that no item has. In a mask of blocks, partial
    blocks see their own document, and every third head's first row of blocks is empty.
    """
    heads_of, lengths = (heads, kv_heads, kv_heads), (rows, cols, cols)
    dims = head_dim, head_dim, head_dim_v or head_dim
    terms = {"causal": causal, "softcap": softcap, "return_lse": lse}
    band = partial(reference.band_mask, device=device)
    bounds = window_bounds(window_size, causal)
    op, seen = attention, band(rows, cols, *bounds)
    if form == "packed":
        starts, args = packed(batch, heads_of, lengths, dims, dtype)
        terms |= {name: t.to(device) for name, t in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True)}
    else:
        args = [normal(batch, h, n, d, dtype=dtype) for h, n, d in zip(heads_of, lengths, dims, strict=True)]
    if form == "blocks":
        op, mask = block_sparse_attention, block_mask(batch, heads, (rows, cols), block, not causal)
        args = [*args, mask]
    else:
        terms["window_size"] = window_size
    lengths_k = item_lengths(batch, cols)
    table = None
    if form == "cache":
        for t in args[1:]:
            for b, length in enumerate(lengths_k):
                t[b, :, length:] = math.nan
        terms["seqused_k"] = torch.tensor(lengths_k, dtype=torch.int32, device=device)
        if page:
            table, args[1:] = paged(args[1:], page, lengths_k)
            terms["page_table"] = table.to(device)
    args = tuple(t.to(device) for t in args)
    q, k, v = args[:3]

    def pieces() -> Iterator[tuple]:
        """(where in the output, q, k, v, which scores are seen) of items of one length."""
        if form == "packed":
            q_starts, k_starts = (s.tolist() for s in starts)
            for a, b, c, d in zip(q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False):
                parts = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
                yield slice(a, b), *parts, band(b - a, d - c, *bounds)
        elif form == "cache":
            for b, length in enumerate(lengths_k):
                kv = k[b : b + 1], v[b : b + 1]
                if page:
                    kv = (t[table[b, : -(-length // page)].long()].transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
                yield slice(b, b + 1), q[b : b + 1], *(t[:, :, :length] for t in kv), band(rows, length, *bounds)
        else:
            yield slice(None), q, k, v, seen if form == "dense" else seen & args[3].to_dense(batch, heads)

    out = poisoned(*q.shape[:-1], dims[2], dtype=dtype, device=device)

    def judge(plan, result, lse=None):
        exact, spread = (torch.zeros(out.shape, dtype=torch.float64, device=device) for _ in range(2))
        by_torch = torch.zeros_like(out)
        exact_lse = torch.full(out.shape[:-1], -math.inf, dtype=torch.float64, device=device)
        for where, *qkv, visible in pieces():
            wide = [t.double() for t in qkv]
            rounded, _ = reference.attention_plainly(*qkv, visible, softcap=softcap)
            right, right_lse = reference.attention_plainly(*wide, visible, softcap=softcap)
            weighted, _ = reference.attention_plainly(*wide[:2], wide[2].abs(), visible, softcap=softcap)
            for whole, part in ((exact, right), (by_torch, rounded), (spread, weighted), (exact_lse, right_lse)):
                whole[where] = part.transpose(1, 2)[0] if form == "packed" else part
        assert_as_good_as_torch(result, exact, by_torch, k=cols)
        near_each(result, exact, torch.finfo(result.dtype).eps * spread + 1e-4)  # half an ulp of weights and of results
        if lse is not None:
            check_lse(result, lse.t() if form == "packed" else lse, exact_lse)

    return Call(op, args, terms, out, q, judge, splits=splits)


def item_lengths(batch: int, longest: int) -> list[int]:
    """For each item: the first is the longest, the second empty."""
    drawn = torch.randint(1, longest + 1, (batch,)).tolist()
    return [longest, 0, *drawn[2:]][:batch]


def packed(batch, heads, lengths, dims, dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(where sequences start in q and in k, [q, k, v]): one has no rows, another no columns; some rows have none."""
    rows, cols = item_lengths(batch, lengths[0]), item_lengths(batch, lengths[1])
    cols[1:] = [*cols[2:], 0] if batch > 2 else cols[1:]
    starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (rows, cols)]
    totals = sum(rows) + 5, sum(cols) + 7, sum(cols) + 7
    return starts, [normal(n, h, d, dtype=dtype) for n, h, d in zip(totals, heads, dims, strict=True)]


def paged(kv, page: int, lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """(table, [k, v]) with shuffled pages; entries past an item's rows name no page."""
    batch, _, cols, _ = kv[0].shape
    each = cols // page
    order = torch.randperm(batch * each + SPARE)[: batch * each]
    table = order.view(batch, each).to(torch.int32)
    for b, length in enumerate(lengths):
        first = -(-length // page)
        table[b, first::2], table[b, first + 1 :: 2] = -1, 2**30
    found = []
    for t in kv:  # (B, Hkv, Sk, D) -> (pages, Hkv, page, D), the heads of a row side by side in memory
        pages = poisoned(len(order) + SPARE, page, t.shape[1], t.shape[3], dtype=t.dtype)
        pages[order] = t.transpose(1, 2).reshape(len(order), page, t.shape[1], t.shape[3])
        found.append(pages.transpose(1, 2))
    return table, found


def block_mask(batch: int, heads: int, lengths: tuple[int, int], block: tuple[int, int], partly: bool) -> BlockMask:
    """With `partly` half of the blocks are partial; without, causal masking makes those partial that it cuts."""
    grid = tuple(-(-n // side) for n, side in zip(lengths, block, strict=True))
    kept, partial_blocks = (torch.rand(batch, heads, *grid) < share for share in (0.6, 0.5))
    kept[:, ::3, 0] = False
    ids = (torch.randint(0, 3, (batch, n), dtype=torch.int32).sort(-1).values for n in lengths)
    more = {"partial": partial_blocks} if partly else {}
    return BlockMask.from_blocks(kept, block, lengths=lengths, mask_mod=SameDocument(*ids, True), **more)


def check_lse(out: Tensor, lse: Tensor, exact: Tensor) -> None:
    """A few fp32 ulp of the largest; -inf, and an output of 0, in just the rows that see nothing."""
    empty = exact.isneginf()
    if not torch.equal(lse.isneginf(), empty) or out[empty].count_nonzero():
        raise AssertionError("rows that see nothing have an output of 0 and an lse of -inf, and no other rows")
    exact, lse = (t.double().masked_fill(empty, 0.0) for t in (exact, lse))
    wrong, allowed = (lse - exact).abs().max().item(), 1e-4 * (1 + exact.abs().max().item())
    if not wrong <= allowed:
        raise AssertionError(f"lse errs by {wrong:.3g}, allowed {allowed:.3g}")


# -- what is run many times -----------------------------------------------------------------------------------


def repeated_products(scale: int) -> list[partial]:
    """With a scale of 4 there are many tiles each."""
    return [
        partial(dense, 256 * scale, 384 * scale, 256 * scale, "nt", terms="bias+gelu"),
        partial(matmul, (128, 128), "empty_rows", 2 * scale, 2 * scale, 264 * scale),
        partial(linear, (32, 32), "power_law", 8 * scale, 8 * scale, 136 * scale, terms="bias"),
        partial(dense, 200 * scale, 136 * scale, 520, "tn", dtype=FP16, out_dtype=FP32),
        partial(linear, (512, 112), "uniform", scale, 5, 72 * scale, out_dtype=FP32),
    ]


def repeated_attention(scale: int) -> list[partial]:
    """Calls whose results could differ between runs: dynamic tiles of all three schedules, and combined parts.

    With a scale of 4 there are more tiles than 132 SMs have CTAs, so that tiles are drawn.
    """
    side = 250 * scale
    return [
        partial(attend, "dense", 3, 2 * scale, 2, side, side + 100, 128, causal=True),
        partial(attend, "blocks", 2, 3 * scale, 1, side, side + 100, 128, block=(128, 128)),
        partial(attend, "blocks", 2, 3 * scale, 1, side, side + 100, 64, block=(64, 64)),
        partial(attend, "packed", 9, 2 * scale, 2, side, side, 64, causal=True),
        partial(attend, "cache", 4, 8, 2, 2, 1024 * scale, 128, causal=True, splits=7, page=64),
        partial(attend, "cache", 4, 8, 2, 2, 1024 * scale, 64, splits=16),
    ]
