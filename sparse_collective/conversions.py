"""Conversions of a BsrMatrix from and to dense tensors, torch's BSR tensors, and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from cute_kernels.annotations import BlockScaleKind
from cute_kernels.dtypes import FLOAT8
from cute_kernels.fp8.quantize import quantize

from . import checks as arguments
from .bsr24.matrix import Bsr24, pruned
from .like_tensor import LikeTensor

Balance = Literal["extent", "blocks"]  # of `split`


class Conversions(LikeTensor):
    """The conversions of BsrMatrix, which inherits them."""

    __slots__ = ()

    @classmethod
    def from_torch(cls, t: Tensor, *, check: bool = True) -> Self:
        """Create a matrix from a 2-D `torch.sparse_bsr` tensor; shares its tensors. Differentiable.

        torch does not accumulate the gradient of a leaf `t`: use from_torch(t.detach()).requires_grad_() instead. A 3-D
        tensor becomes a batch with one pattern per matrix. It shares values and col_indices; crow_indices is new, since
        torch counts the blocks of each matrix from 0.

        Raises:
            TypeError: `t` is not a tensor or has another layout.
            ValueError: `t` has several batch dimensions or dense dimensions, or the constructor raises.

        Example:
            W = BsrMatrix.from_torch(weight.to_sparse_bsr((128, 128)))
        """
        if not isinstance(t, Tensor):
            raise TypeError(f"from_torch needs a torch.sparse_bsr tensor, got {type(t).__name__}")
        if t.layout is not torch.sparse_bsr:
            also = ", or use BsrMatrix.from_dense" if t.layout is torch.strided else ""
            raise TypeError(f"t must be sparse_bsr, not {t.layout}; pass t.to_sparse_bsr((bm, bk)){also}")
        crow, col, values = t.crow_indices(), t.col_indices(), t.values()
        if crow.dim() > 2:
            raise ValueError(f"from_torch needs a matrix or one batch dimension, got shape {tuple(t.shape)}")
        if t.dense_dim():
            raise ValueError(f"from_torch needs no dense dimensions, got {t.dense_dim()} in {tuple(t.shape)}")
        if crow.dim() == 2:
            items, nnz = col.shape
            crow = crow + torch.arange(items, dtype=crow.dtype, device=crow.device)[:, None] * nnz
            col, values = col.flatten(), values.flatten(0, 1)
        return cls(crow, col, values, t.shape, check=check)

    @classmethod
    def stack(cls, matrices: Sequence[Self]) -> Self:
        """Stack matrices of one shape and block shape into a batch with one pattern per matrix; copies. Differentiable.

        Raises:
            TypeError: an element is not a BsrMatrix, or dtypes differ.
            ValueError: the list is empty, an element is a batch, or shapes, block shapes or devices differ.

        Example:
            W = BsrMatrix.stack([BsrMatrix.from_dense(w, (128, 128), density=0.25) for w in weights])
        """
        matrices = list(matrices)
        if not matrices:
            raise ValueError("stack needs at least one matrix, got none")
        for i, m in enumerate(matrices):
            if not isinstance(m, cls):
                raise TypeError(f"stack needs BsrMatrix, got {arguments.describe(m)} at {i}")
            if m.batch is not None:
                raise ValueError(f"stack needs single matrices, got a batch of shape {m.shape} at {i}; see unbind")
            for name in ("shape", "blocksize", "device", "dtype"):
                mine, first = getattr(m, name), getattr(matrices[0], name)
                if mine != first:
                    kind = TypeError if name == "dtype" else ValueError
                    raise kind(f"stack needs matrices of one {name}, got {first} at 0 and {mine} at {i}")
            if m.crow_indices.dtype is not matrices[0].crow_indices.dtype:
                raise TypeError(f"stack needs indices of one dtype, got another one at {i}")
        first, begin, crow = matrices[0], 0, []
        for m in matrices:
            crow.append(m.crow_indices + begin)
            begin += m.nnz
        values = of_bits(torch.cat([bits(m.values) for m in matrices]), matrices[0].dtype)
        parts = torch.stack(crow), torch.cat([m.col_indices for m in matrices]), values
        state: dict[str, Any] = {"check": any(m.check for m in matrices), "checked": all(m.checked for m in matrices)}
        if any(m.scaled_per for m in matrices):
            ones = values.new_ones(1, dtype=torch.float32)
            each = [(ones if m.scales is None else m.scales).expand(m.nnz) for m in matrices]
            state["scales"] = torch.cat(each)
        even = all(m.even and m.nnz == first.nnz for m in matrices)
        return cls._make(*parts, (len(matrices), *first.shape), even=even, **state)

    def unbind(self) -> list[Self]:
        """Split a batch into matrices that share col_indices and values. Differentiable.

        With one pattern per matrix this synchronizes, to read where matrices begin.

        Raises:
            ValueError: this is not a batch, or the indices are invalid (see `check_indices`).
        """
        if self.batch is None:
            raise ValueError(f"unbind needs a batch, got one matrix of shape {self.shape}")
        if self.check:
            self.check_indices()
        shape, state = self.shape[1:], {"check": self.check, "checked": self.checked, "even": self.even}
        scales, each = self.scales, self.scaled_per == "block"
        if self.batch == "values":
            pattern, state = (self.crow_indices, self.col_indices), {**state, "stats": self.stats}
            scales = scales if each else [scales] * self.shape[0]
            return [self._make(*pattern, v, shape, **state, scales=s) for v, s in zip(self.values, scales, strict=True)]
        found = []
        for crow, begin, end in zip(self.crow_indices, *self.crow_indices[:, [0, -1]].t().tolist(), strict=True):
            parts = crow - begin, self.col_indices[begin:end], self.values[begin:end]
            found.append(self._make(*parts, shape, **state, scales=scales[begin:end] if each else scales))
        return found

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        blocksize: Sequence[int],
        *,
        mask: Tensor | None = None,
        density: float | None = None,
        index_dtype: torch.dtype = torch.int32,
    ) -> Self:
        """Create a matrix from selected blocks of a dense one; copies them. Differentiable.

        Args:
            dense: (M, K) bfloat16, float16, float32, FP8 or, on the CPU, float64, with any strides.
            blocksize: (bm, bk).
            mask: (M / bm, K / bk) bool on the device of `dense`, True where a block is kept. Synchronizes.
            density: in [0, 1]; keeps the round(density * number of blocks) blocks of largest Frobenius norm.
                NaN ranks first; among equal norms the earlier block in row-major order does.
            index_dtype: torch.int32 or torch.int64.

        Without mask and density, keeps the blocks with a nonzero element (NaN is nonzero). Synchronizes.

        Raises:
            RuntimeError: under torch.compile without a density, since a graph cannot contain a synchronization.
            TypeError: `dense` or `mask` is not a strided tensor, or a dtype is not supported.
            ValueError: both mask and density are passed, or an extent, a device or the density is wrong.

        Example:
            W = BsrMatrix.from_dense(weight, (128, 128), density=0.25)
        """
        if torch.compiler.is_compiling() and density is None:
            raise RuntimeError(
                "from_dense synchronizes without density=, so torch.compile cannot trace it: call it outside of the "
                "compiled function, and inside make other values for its pattern with with_values"
            )
        if not arguments.is_strided(dense):
            raise TypeError(f"dense must be a strided tensor, got {arguments.describe(dense)}")
        if dense.dim() != 2:
            several = "; convert the items of a batch one by one, and stack them" if dense.dim() == 3 else ""
            raise ValueError(f"dense must have 2 dimensions (M, K), got shape {tuple(dense.shape)}{several}")
        arguments.check_dtypes(dense.dtype, index_dtype, dense.device, float8=True)
        if mask is not None and density is not None:
            raise ValueError("mask and density are both given; pass at most one of them")
        blocksize = arguments.pair(blocksize, "blocksize")
        rows, cols = arguments.block_grid(dense.shape, blocksize)
        blocks = block_view(bits(dense), blocksize)  # (rows, cols, bm, bk)
        if density is not None:
            arguments.check_density(density)
            numbers = of_bits(blocks.detach(), dense.dtype)
            if dense.dtype in FLOAT8:
                numbers = numbers.float()
            norms = torch.linalg.vector_norm(numbers, dim=(2, 3), dtype=torch.float64).flatten()
            order = norms.argsort(descending=True, stable=True)
            kept = order[: round(density * rows * cols)].sort().values
            row, col = kept // max(cols, 1), kept % max(cols, 1)
        else:
            if mask is None:
                numbers = blocks.detach()
                if dense.dtype in FLOAT8:
                    numbers = numbers & 0x7F  # without the sign: -0 is 0, too
                mask = (numbers != 0).any(dim=3).any(dim=2)
            if not arguments.is_strided(mask) or mask.dtype is not torch.bool:
                raise TypeError(f"mask must be a strided bool tensor, got {arguments.describe(mask)}")
            if mask.shape != (rows, cols) or mask.device != dense.device:
                got = f"{tuple(mask.shape)} on {mask.device}"
                raise ValueError(f"mask must have shape {(rows, cols)} on {dense.device}, got {got}")
            row, col = mask.nonzero(as_tuple=True)
        values = of_bits(blocks[row, col].contiguous(), dense.dtype)  # (nnz, bm, bk)
        return cls._make(row_starts(row, rows, index_dtype), col.to(index_dtype), values, dense.shape)

    def to_torch(self) -> Tensor:
        """Convert to a `torch.sparse_bsr` tensor that shares the three tensors. Differentiable.

        torch's batches have one pattern per matrix, with equally many blocks. For a batch with one pattern the indices
        are copied; for one with a pattern per matrix crow_indices is new, which synchronizes.

        Raises:
            ValueError: the matrices of a batch have different numbers of blocks, or values have scales, which
                torch.sparse_bsr does not support; .float() multiplies by them.
        """
        if self.scaled_per is not None:
            raise ValueError("a torch.sparse_bsr tensor has no scales; convert W.float(), which is values * scales")
        crow, col, values = self.crow_indices, self.col_indices, self.values
        if self.batch == "values":
            crow, col = (t.expand(self.shape[0], -1).contiguous() for t in (crow, col))
        elif self.batch == "patterns":
            items = self.shape[0]
            each = self.nnz // max(items, 1)
            begins = torch.arange(items, dtype=crow.dtype, device=crow.device) * each
            if each * items != self.nnz or bool(((crow[:, 0] != begins) | (crow[:, -1] != begins + each)).any()):
                raise ValueError(
                    "a torch.sparse_bsr batch holds equally many blocks in each item, and this one does not; "
                    "convert the matrices of unbind() one by one"
                )
            crow, col, values = crow - begins[:, None], col.view(items, each), values.unflatten(0, (items, each))
        return torch.sparse_bsr_tensor(crow, col, values, self.shape, check_invariants=False)

    def to_dense(self) -> Tensor:
        """Return a new (M, K) or (L, M, K) tensor with the dtype of `values`, zero outside the blocks. Differentiable.

        Values with scales are multiplied by them, in float32.

        Raises:
            ValueError: the indices are invalid (see `check_indices`).
        """
        if self.scaled_per is not None:
            return self.to(torch.float32).to_dense()
        if self.check:
            self.check_indices()
        values = bits(self.values)
        dense = values.new_zeros(self.shape)
        row, col = self.row_of_block().long(), self.col_indices.long()
        if self.batch == "values":
            block_view(dense, self.blocksize)[:, row, col] = values
        else:  # items below each other are one matrix
            block_view(dense.flatten(0, -2), self.blocksize)[row, col] = values
        return of_bits(dense, self.dtype)

    def quantize(self, dtype: torch.dtype = torch.float8_e4m3fn, per: BlockScaleKind = "block") -> Self:
        """Quantize to FP8 values with scales, as cute_kernels.quantize does; the pattern is the same.

        Args:
            dtype: float8_e4m3fn (magnitudes up to 448) or float8_e5m2 (57344, with two bits of mantissa instead of
                three).
            per: "block", one scale per stored block; or "tensor", one for all, which also supports use_fast_accum.

        No gradient passes: values are detached.

        Raises:
            TypeError: values are already FP8, or dtype is not FP8.
            ValueError: per is neither.

        Example:
            y = bsr_linear(quantize(x, per="row"), W.quantize())
        """
        if self.base is not None:
            return self.base.quantize(dtype, per).t()
        if per not in ("block", "tensor"):
            raise ValueError(f"BsrMatrix.quantize: per is {per!r}; known are 'block' and 'tensor'")
        values, scales = quantize(
            self.stored.detach().flatten(-2), dtype=dtype, per="row" if per == "block" else "tensor"
        )
        scales = scales.squeeze(-1) if per == "block" else scales
        return self.with_values(values.view(self.stored.shape), scales)

    def prune_2_4(self) -> Bsr24:
        """Keep and store the 2 largest magnitudes of every 4 neighbors in a row of a block: 2:4 structured sparsity.

        Tensor cores multiply it at up to twice the rate. Copies, also from a transposed view; no gradient passes. Among
        equal magnitudes the first ones are kept; NaN counts as the largest. FP8 scales are unchanged:
        W.prune_2_4().quantize() prunes before rounding. `Bsr24.from_bsr(W)` is for blocks that are already pruned.

        Raises:
            ValueError: the blocks' sides are not multiples of 64.

        Example:
            y = bsr_linear(x, W.prune_2_4())
        """
        return pruned(self)


def bits(values: Tensor) -> Tensor:
    """FP8 viewed as integers, for operations that torch does not support in FP8; other dtypes unchanged."""
    return values.view(torch.uint8) if values.dtype in FLOAT8 else values


def of_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `bits`."""
    return values if values.dtype is dtype else values.view(dtype)


def block_view(dense: Tensor, blocksize: Sequence[int]) -> Tensor:
    """A view (..., M / bm, K / bk, bm, bk) of an (..., M, K) tensor of any strides."""
    (*_, m, k), (bm, bk) = dense.shape, blocksize
    return dense.unflatten(-1, (k // bk, bk)).unflatten(-3, (m // bm, bm)).transpose(-3, -2)


def row_starts(row: Tensor, n_rows: int, index_dtype: torch.dtype) -> Tensor:
    """(n_rows + 1,) where each row begins in the sorted (nnz,) `row`; no synchronization, unlike bincount."""
    starts = torch.arange(n_rows + 1, dtype=row.dtype, device=row.device)
    return torch.searchsorted(row, starts, out_int32=index_dtype is torch.int32)
