"""Products of 8-bit floats: their operands, what they must be in fp64, and torch._scaled_mm; caches for attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

from cute_kernels import quantize
from cute_kernels.reference import of_elements
from cute_kernels.testing.reference import truth
from sparse_collective import BsrMatrix

from .peers import SEMI_STRUCTURED, Call, Operands, made, peer
from .peers_attention import Attention

SCALED_MM = "torch._scaled_mm"
BLOCKS = "1x128 and 128x128"  # of a, and of b


class Scaled(Operands):
    """(A scale_a) @ (B scale_b) into bfloat16, of quantised numbers that are made once, when first asked for.

    Args:
        a, b: (M, K) and (N, K) wide numbers, or functions that make them; the product is with b's transpose.
        per: "tensor", "row" or BLOCKS: how many scales there are, of b's rows as well.
    """

    def __init__(self, a, b, per: str, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__(lambda: self.quantised[0], lambda: self.quantised[2].t())
        self.wide, self.per, self.dtype = (a, b), per, dtype

    @cached_property
    def quantised(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(a, its scale, b, its scale)."""
        kinds = self.per.split(" and ") if self.per == BLOCKS else (self.per, self.per)
        a, b = (quantize(made(x), dtype=self.dtype, per=per) for x, per in zip(self.wide, kinds, strict=True))
        return *a, *b

    @cached_property
    def scale_a(self) -> Tensor:
        """(1,) or (M, 1); of blocks (M, K / 128), contiguous along M, as torch wants them."""
        scale = self.quantised[1]
        return scale.t().contiguous().t() if self.per == BLOCKS else scale

    @cached_property
    def scale_b(self) -> Tensor:
        """(1,) or (1, N), contiguous; of blocks (K / 128, N / 128), contiguous along K."""
        scale = self.quantised[3]
        if self.per == BLOCKS:
            return scale.t()
        return scale if self.per == "tensor" else scale.t().contiguous()

    def out(self) -> Tensor:
        return self.b.new_empty(self.a.shape[0], self.b.shape[1], dtype=torch.bfloat16)

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        """(rows, reference): some rows of the output, and what they must be, in fp64."""
        rows = self.rows
        a, scale_a, scale_b = self.a[rows], self.scale_a, self.scale_b
        scale_a = scale_a if self.per == "tensor" else scale_a[rows]
        if self.per == BLOCKS:
            scale_a, scale_b = of_elements(scale_a, a), of_elements(scale_b, self.b)
        return rows, truth(a.double() * scale_a.double(), self.b.double() * scale_b.double())

    def with_error(self, call: Call) -> Call:
        """`call`, whose note says how far its result is from fp64: in Frobenius norm, and at most over the largest."""
        return replace(call, note=f"error {shown(errors(call()[self.sample[0]], self.sample[1]))}")


class ScaledSparse(Operands):
    """A @ B into bfloat16 as a linear layer with the block-sparse A stores it, of operands that are quantised once.

    Args:
        a: (M, K) BsrMatrix of wide numbers, which get a scale for each stored block; or a function that makes it.
        x: (N, K) wide numbers, which get a scale for each row; B is their transpose. Or a function that makes them.
    """

    def __init__(self, a, x) -> None:
        super().__init__(a, lambda: made(x).t(), transposed=True)

    @cached_property
    def quantised(self) -> tuple[BsrMatrix, Tensor, Tensor]:
        """(A, the transpose of B, its scales (N, 1))."""
        return self.a.quantize(per="block"), *quantize(self.b.t(), per="row")

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        """(rows, reference): some rows of the output, and what they must be, in fp64."""
        a, x, scale = self.quantised
        return self.rows, truth(a.to_dense()[self.rows].double(), (x.double() * scale.double()).t())

    with_error = Scaled.with_error


class CachedAttention(Attention):
    """One query an item to caches in pages, of 8-bit floats with a scale for each head, and of the same in bfloat16.

    Args:
        q: (B, 1, H, D), or a function that makes it.
        pages: (B keys / page_size, page_size, Hkv, D) wide numbers of K, or a function that makes such; V's are others.
    """

    def __init__(self, q, pages, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__(q, lambda: self.gathered(0), lambda: self.gathered(1))
        self._pages, self.dtype = pages, dtype

    @cached_property
    def quantised(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(pages, scales (Hkv,)) of K and of V."""
        found = []
        for _ in range(2):
            wide = made(self._pages).float()
            scale = wide.abs().amax((0, 1, 3)) / torch.finfo(self.dtype).max
            found.append(((wide / scale[:, None]).to(self.dtype), scale))
        return tuple(found)

    @cached_property
    def tables(self) -> dict[str, Tensor]:
        """Pages in any order, and lengths: all rows."""
        pages, rows = self.quantised[0][0].shape[:2]
        batch = self.q.shape[0]
        order = torch.randperm(pages, device=self.q.device).to(torch.int32).view(batch, -1)
        lengths = torch.full((batch,), order.shape[1] * rows, dtype=torch.int32, device=self.q.device)
        return {"seqused_k": lengths, "page_table": order}

    def gathered(self, which: int) -> Tensor:
        """(B, keys, Hkv, D) of fp32, dequantised: K or V."""
        pages, scale = self.quantised[which]
        rows = pages.view(torch.uint8)[self.tables["page_table"].long()].view(self.dtype)
        return (rows.float() * scale[:, None]).flatten(1, 2)

    def narrow_call(self) -> tuple[tuple, dict]:
        """(q, k, v) and terms of attention to the 8-bit caches."""
        (k, k_descale), (v, v_descale) = self.quantised
        q, k, v = (t.transpose(1, 2) for t in (self.q, k, v))
        return (q, k, v), self.tables | {"k_descale": k_descale, "v_descale": v_descale}

    def wide_call(self) -> tuple[tuple, dict]:
        """The same of caches of q's dtype."""
        kv = ((pages.float() * scale[:, None]).to(self.q.dtype) for pages, scale in self.quantised)
        return tuple(t.transpose(1, 2) for t in (self.q, *kv)), self.tables


def errors(out: Tensor, exact: Tensor) -> tuple[float, float]:
    """(norm of the difference over the norm, its maximum over the largest element)."""
    off = out.double() - exact
    return (off.norm() / exact.norm()).item(), (off.abs().max() / exact.abs().max()).item()


def shown(found: tuple[float, float]) -> str:
    return f"{found[0]:.2e} (at most {found[1]:.2e})"


def scaled_mm_call(x: Scaled, fast: bool, out: Tensor) -> Callable[[], Tensor]:
    """torch._scaled_mm into `out`."""
    a, b, scale_a, scale_b = x.a, x.b, x.scale_a, x.scale_b
    scale_a, scale_b = (s.view(()) if s.numel() == 1 else s for s in (scale_a, scale_b))
    return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=fast, out=out)


@peer(SEMI_STRUCTURED)
def semi_structured(x: Scaled) -> Call:
    """torch._scaled_mm of a cuSPARSELt tensor of the pruned a, with one scale for each operand."""
    a = SparseSemiStructuredTensorCUSPARSELT.from_dense(x.a)
    terms = x.b, x.scale_a, x.scale_b, None, None, torch.bfloat16  # by position: torch's function for it wants seven
    return Call(lambda: torch._scaled_mm(a, *terms), note=a.BACKEND)


@peer(SCALED_MM)
def scaled_mm(x: Scaled, fast: bool = False) -> Call:
    """torch._scaled_mm of the same operands, scales and kind of sums."""
    return x.with_error(Call(scaled_mm_call(x, fast, x.out())))
