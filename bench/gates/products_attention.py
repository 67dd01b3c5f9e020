"""The attention that gates compute, as products.py has products of matrices: plain data, a name, the same operands.

All forms of the ops are here: dense tensors, packed sequences, caches with lengths and with pages, block masks. What a
call must not read is NaN: rows of a cache past an item's length, and pages that no item has.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention
from attention.decode.choose import splits as forced_splits
from attention.masks.mask_mods import SameDocument, window_bounds
from cute_kernels import explain
from tests import reference

from .products import BF16, OPS, SHORT, under

SPARE = 3  # pages that no item has
KERNEL_OPS = {"attention": attention, "block_sparse_attention": block_sparse_attention}
FORMS = ("dense", "packed", "cache", "blocks")


@dataclass(frozen=True)
class Attend:
    """One call of attention() or block_sparse_attention().

    `form` is one of FORMS. `rows` and `cols` are Sq and Sk; of packed sequences and of caches the longest item's: the
    second one is empty, the others are drawn. `page` is a cache's page size, 0 without pages. `block` makes a block
    mask whose partial blocks see their own document by ids in tensors, and in which every third head's first row of
    blocks is empty. `splits` is among how many CTAs decoding is split, 0 as the op thinks best. `path` forces a family
    of kernels.
    """

    form: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    cols: int
    head_dim: int
    head_dim_v: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    lse: bool = True
    splits: int = 0
    page: int = 0
    block: tuple[int, int] | None = None
    dtype: torch.dtype = BF16
    path: str | None = None

    def __post_init__(self):
        if self.form not in FORMS:
            raise ValueError(f"form {self.form!r}; there are {', '.join(FORMS)}")

    @property
    def op(self) -> str:
        return "block_sparse_attention" if self.form == "blocks" else "attention"

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def extents(self) -> tuple[int, int]:
        """How long the contiguous modes are."""
        return self.dims

    @property
    def name(self) -> str:
        shape = f"B{self.batch} H{self.heads}/{self.kv_heads} {self.rows}x{self.cols} D{self.head_dim}"
        extra = (
            f"Dv{self.head_dim_v}" if self.head_dim_v else "",
            SHORT[self.dtype],
            "causal" if self.causal else "",
            f"window {self.window}" if self.window else "",
            f"softcap {self.softcap}" if self.softcap else "",
            "" if self.lse else "no lse",
            f"{self.splits} splits" if self.splits else "",
            f"pages of {self.page}" if self.page else "",
            f"{self.block[0]}x{self.block[1]}" if self.block else "",
        )
        return " ".join(filter(None, (self.path, self.op, self.form, shape, *extra)))

    def call(self, device: str = "cpu") -> "AttendCall":
        """Operands drawn on the CPU from the product's name."""
        reference.seed(self.name)
        args, tensors = getattr(self, f"_{self.form}")()
        args = tuple(t.to(device) for t in args)
        terms = {"causal": self.causal, "softcap": self.softcap, "return_lse": self.lse}
        if self.form != "blocks":
            terms["window"] = self.window
        terms |= {name: t.to(device) for name, t in tensors.items()}
        return AttendCall(self, args, terms, torch.device(device))

    def lengths(self, longest: int) -> list[int]:
        """Of each item: the first is the longest, the second empty."""
        drawn = torch.randint(1, longest + 1, (self.batch,)).tolist()
        return [longest, 0, *drawn[2:]][: self.batch]

    def _dense(self) -> tuple[tuple, dict]:
        D, Dv = self.dims
        shapes = (self.heads, self.rows, D), (self.kv_heads, self.cols, D), (self.kv_heads, self.cols, Dv)
        return tuple(reference.normal(self.batch, *shape, dtype=self.dtype) for shape in shapes), {}

    def _packed(self) -> tuple[tuple, dict]:
        """Sequences of which one has no rows, another no columns; then rows and columns of no sequence."""
        rows, cols = self.lengths(self.rows), self.lengths(self.cols)
        cols[1:] = [*cols[2:], 0] if self.batch > 2 else cols[1:]
        (D, Dv), (total_q, total_k) = self.dims, (sum(rows) + 5, sum(cols) + 7)
        shapes = (total_q, self.heads, D), (total_k, self.kv_heads, D), (total_k, self.kv_heads, Dv)
        starts = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (rows, cols))
        tensors = tuple(reference.normal(*shape, dtype=self.dtype) for shape in shapes)
        return tensors, dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))

    def _cache(self) -> tuple[tuple, dict]:
        """Pages are shuffled; entries of the table past an item's rows name no page."""
        (q, *kv), _ = self._dense()
        lengths = self.lengths(self.cols)
        for b, length in enumerate(lengths):
            for t in kv:
                t[b, :, length:] = float("nan")
        tensors = {"seqlens_k": torch.tensor(lengths, dtype=torch.int32)}
        if self.page:
            each = self.cols // self.page
            order = torch.randperm(self.batch * each + SPARE)[: self.batch * each]
            kv = [self._pages(t, order) for t in kv]
            table = order.view(self.batch, each).to(torch.int32)
            for b, length in enumerate(lengths):
                first = -(-length // self.page)
                table[b, first::2], table[b, first + 1 :: 2] = -1, 2**30
            tensors["block_table"] = table
        return (q, *kv), tensors

    def _pages(self, t: Tensor, order: Tensor) -> Tensor:
        """(B, Hkv, Sk, D) -> (pages, Hkv, page, D), the heads of a row side by side in memory."""
        pages = reference.poisoned(len(order) + SPARE, self.page, t.shape[1], t.shape[3], dtype=t.dtype)
        pages[order] = t.transpose(1, 2).reshape(len(order), self.page, t.shape[1], t.shape[3])
        return pages.transpose(1, 2)

    def _blocks(self) -> tuple[tuple, dict]:
        args, _ = self._dense()
        lengths = self.rows, self.cols
        grid = tuple(-(-n // side) for n, side in zip(lengths, self.block, strict=True))
        kept, partial = (torch.rand(self.batch, self.heads, *grid) < share for share in (0.6, 0.5))
        kept[:, ::3, 0] = False
        ids = (torch.randint(0, 3, (self.batch, n), dtype=torch.int32).sort(-1).values for n in lengths)
        terms = {"lengths": lengths, "mask_mod": SameDocument(*ids, True)}
        if not self.causal:  # with it the blocks that it cuts ask mask_mod, full ones too
            terms["partial"] = partial
        mask = BlockMask.from_blocks(kept, self.block, **terms)
        return (*args, mask), {}


@dataclass
class AttendCall:
    """A product with its operands, as the op takes them."""

    product: Attend
    args: tuple
    terms: dict
    device: torch.device

    def __post_init__(self):
        self.shape = (*self.args[0].shape[:-1], self.product.dims[1])  # of out

    def forced(self, call: Callable):
        """The call's result under the product's path, with its splits."""
        if self.product.splits:
            with forced_splits(self.product.splits):
                return under(self.product.path, call)
        return under(self.product.path, call)

    def run(self, ops: Mapping[str, Callable] = OPS) -> Tensor:
        """What the op gives in an output that was full of NaN; with an lse, that is one more column: see OPS."""
        out = reference.poisoned(*self.shape, dtype=self.product.dtype, device=self.device)
        return self.forced(lambda: ops[self.product.op](*self.args, out=out, **self.terms))

    def plan(self):
        """What cute_kernels.explain says of the call: it compiles the kernel."""
        out = reference.poisoned(*self.shape, dtype=self.product.dtype, device=self.device)
        return self.forced(lambda: explain(KERNEL_OPS[self.product.op], *self.args, out=out, **self.terms))

    def renew(self, turn: int) -> None:
        """Other numbers of the same scale in q and v, in place."""
        q, _, v = self.args[:3]
        q.copy_(q.roll(1 + turn, -1))
        v.neg_()

    def complaint(self, found: Tensor) -> str:
        """What is wrong with a result, "" if nothing is.

        The output errs at most twice as much as torch does which rounds each step to the dtype (FlashAttention's
        measure); each element by itself by no more than rounding the weights and the output may cost; rows that see
        nothing are zero.
        """
        out, lse = found, None
        if self.product.lse:
            out, lse = found[..., :-1].to(self.product.dtype), found[..., -1]
        exact, by_torch, spread, exact_lse = self.truth()
        try:
            reference.assert_as_good_as_torch(out, exact, by_torch, k=self.product.cols)
            near_each(out, exact, spread)
            if lse is not None:
                right_lse(out, lse, exact_lse)
        except AssertionError as error:
            return str(error)
        return ""

    def truth(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(exact output, torch's, sums of weight * |v|, exact lse), all but torch's in fp64; rows come before heads
        where sequences are packed."""
        exact, spread = (torch.zeros(self.shape, dtype=torch.float64, device=self.device) for _ in range(2))
        by_torch = torch.zeros(self.shape, dtype=self.product.dtype, device=self.device)
        exact_lse = torch.full(self.shape[:-1], -torch.inf, dtype=torch.float64, device=self.device)
        for where, q, k, v, seen in self.pieces():
            wide = tuple(t.double() for t in (q, k, v))
            cap = {"softcap": self.product.softcap}
            rounded, _ = reference.attention_plainly(q, k, v, seen, **cap)
            out, lse = reference.attention_plainly(*wide, seen, **cap)
            weighed, _ = reference.attention_plainly(*wide[:2], wide[2].abs(), seen, **cap)
            for whole, part in ((exact, out), (by_torch, rounded), (spread, weighed), (exact_lse, lse)):
                whole[where] = part.transpose(1, 2)[0] if self.product.form == "packed" else part
        return exact, by_torch, spread, exact_lse

    def pieces(self) -> Iterator[tuple]:
        """(where in the output, q, k, v, which scores are seen) of batches of items of one length."""
        q, k, v, *more = self.args
        terms, form = self.terms, self.product.form
        if form in ("dense", "blocks"):
            seen = self.band(q.shape[2], k.shape[2])
            if more:
                seen = seen & more[0].to_dense(*q.shape[:2])
            yield slice(None), q, k, v, seen
        elif form == "packed":
            starts = (terms[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
            for a, b, c, d in zip(*(x for each in starts for x in (each[:-1], each[1:])), strict=True):
                parts = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
                yield slice(a, b), *parts, self.band(b - a, d - c)
        else:
            for b, length in enumerate(terms["seqlens_k"].tolist()):
                kv = (k[b : b + 1], v[b : b + 1])
                if self.product.page:
                    pages = terms["block_table"][b, : -(-length // self.product.page)].long()
                    kv = (t[pages].transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
                parts = (t[:, :, :length] for t in kv)
                yield slice(b, b + 1), q[b : b + 1], *parts, self.band(q.shape[2], length)

    def band(self, rows: int, cols: int) -> Tensor:
        """(rows, cols) bool: what causal and window let each row see."""
        bounds = window_bounds(self.product.window, self.product.causal)
        return reference.band_mask(rows, cols, *bounds, device=self.device)


def near_each(out: Tensor, exact: Tensor, spread: Tensor) -> None:
    """Each element by itself: half an ulp of each weight and half of the result's own, and a floor for fp32 sums."""
    error = (out.double() - exact).abs()
    wrong = ~(error <= torch.finfo(out.dtype).eps * spread + 1e-4)  # NaN is wrong
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} elements err more than rounding weights and output may cost, first at {first}: "
            f"got {out[first].item():.6g}, expected {exact[first].item():.6g}"
        )


def right_lse(out: Tensor, lse: Tensor, exact: Tensor) -> None:
    """A few fp32 ulp of the largest; -inf, and an output of 0, in just the rows that see nothing."""
    empty = exact.isneginf()
    if not torch.equal(lse.isneginf(), empty) or out[empty].count_nonzero():
        raise AssertionError("rows that see nothing have an output of 0 and an lse of -inf, and no other rows")
    exact, lse = (t.double().masked_fill(empty, 0.0) for t in (exact, lse))
    wrong, allowed = (lse - exact).abs().max().item(), 1e-4 * (1 + exact.abs().max().item())
    if not wrong <= allowed:
        raise AssertionError(f"lse errs by {wrong:.3g}, allowed {allowed:.3g}")
