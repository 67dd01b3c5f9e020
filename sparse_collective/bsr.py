"""Block-sparse row (BSR) matrices: values and a pattern.

A BSR matrix of shape (M, K) with (bm, bk) blocks is three tensors. Block-row r owns the blocks p in
[crow_indices[r], crow_indices[r + 1]). Block p starts at row r * bm and column col_indices[p] * bk; values[p]
holds its elements, row-major. Names and layout are those of `torch.sparse_bsr`.

A batch of L items of one shape is stored in one of two forms. Of one pattern: crow_indices and col_indices are those
of a single matrix, and values[l] are the blocks of item l. Of a pattern for each item: crow_indices[l] is that of item
l and counts the blocks of all items, so that item l begins where item l - 1 ends, and items may hold different numbers
of blocks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT8
from cute_kernels.matmul.problem import NOT_KNOWN, PatternStats
from cute_kernels.picture import FULL, Pictured
from cute_kernels.runtime.front import check_supported
from cute_kernels.runtime.graphs import lasting_memory
from cute_kernels.runtime.torch_compat import in_graph_trace

from . import checks as arguments
from .conversions import Balance, Conversions, bits, of_bits
from .like_tensor import LikeTensor
from .pattern import Pattern, pattern_of, patterns_of
from .splits import split

__all__ = ["BsrMatrix"]

MOST_FORMS = 16  # forms of matrices that a pattern caches


def _of_pattern(name: str, text: str) -> Any:
    return property(lambda self: getattr(self.pattern, name), doc=text)


class BsrMatrix(Conversions, LikeTensor, Pictured):
    """An (M, K) matrix, or a batch (L, M, K), that stores some of its (bm, bk) blocks.

    Shares the three tensors with the caller and never copies them. The attributes are read-only, and the indices must
    not be written to; the values may be updated in place. Gradients flow through `values`.

    It is not a torch.Tensor, but supports W @ b, x @ W.T, torch.matmul, torch.nn.functional.linear(x, W, bias), to(),
    cuda(), half(), clone(), detach(), requires_grad_(), copy.deepcopy, torch.save and torch.load(weights_only=True)
    (after `import sparse_collective`). As a plain attribute of an nn.Module it is neither a parameter nor a buffer:
    state_dict() does not contain it, and the module's .to() does not move it. `sparse_collective.nn.BsrLinear` is the
    module that holds one.

    Args:
        crow_indices: (M / bm + 1,) int32 or int64; the start of each block row in `col_indices`, then nnz. For a batch
            with one pattern per matrix (L, M / bm + 1), counting the blocks of all matrices.
        col_indices: (nnz,) with the same dtype; the column of each block, strictly increasing in a block row.
        values: (nnz, bm, bk) bfloat16, float16, float32, float8_e4m3fn, float8_e5m2 or, on the CPU, float64; bm and bk
            are multiples of 16. For a batch with one pattern (L, nnz, bm, bk). On a GPU, each GEMM copies values that
            do not begin at a multiple of 16 bytes; values.clone() avoids that.
        shape: (M, K), with M % bm == 0 and K % bk == 0; or (L, M, K).
        check: True validates the indices (`check_indices`) before an operation first reads them. With False, indices
            out of range make a kernel read memory outside the matrix.
        scales: FP8 only; float32 dequantization scales: one element, or (nnz,), one per stored block; for a batch with
            one pattern (L, nnz). See `quantize`.

    Everything except the contents of the indices is checked here, without synchronization.

    Raises:
        TypeError: an argument is not a strided tensor, or has an unsupported dtype.
        ValueError: a device, dimension, stride, length or extent is wrong.

    Example:
        W = BsrMatrix.from_dense(torch.randn(1024, 1024), (128, 128), density=0.25)
        print(W)  # shape, blocks and a picture of the pattern
        y = torch.randn(8, 1024) @ W.T
    """

    structured = False  # whether two of every four neighbors in a row of a block are stored, as of a Bsr24
    pattern: Pattern  # the indices, shared with other matrices of the same index tensors
    crow_indices: Tensor  # (M / bm + 1,) or (L, M / bm + 1)
    col_indices: Tensor  # (nnz,)
    stored: Tensor  # what kernels read: the values; of a transposed view those of `base`
    stored_scales: Tensor | None  # the scales of `stored`: (1,), or one for each block, in the order of `stored`
    scaled_per: str | None  # granularity of the scales: "tensor" (all values) or "block" (a stored block)
    base: BsrMatrix | None  # of a transposed view, the matrix that it is the transpose of
    shape: tuple[int, ...]  # (M, K) or (L, M, K)
    batch: str | None  # "values": one pattern, values for each item; "patterns": a pattern for each; None: no batch
    check: bool
    form: tuple  # what an op's plan depends on besides pattern.stats, hashable

    def __init__(
        self,
        crow_indices: Tensor,
        col_indices: Tensor,
        values: Tensor,
        shape: Sequence[int],
        *,
        check: bool = True,
        scales: Tensor | None = None,
    ) -> None:
        batch = arguments.check_tensors(crow_indices, col_indices, values)
        scales = arguments.check_scales(scales, values)
        shape = arguments.extents(shape, batch)
        arguments.check_extents(crow_indices, col_indices, values, shape, batch)
        pattern_shape, (bm, bk) = shape if batch == "patterns" else shape[-2:], values.shape[-2:]
        pattern = pattern_of(crow_indices, col_indices, pattern_shape, (bm, bk), bool(check))
        self._fill(pattern, (crow_indices, col_indices), values, scales, shape, bool(check))

    def _set(self, **attributes: object) -> None:
        if not torch.compiler.is_compiling():
            self.__dict__.update(attributes)
            return
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _fill(
        self,
        pattern: Pattern,
        indices: tuple[Tensor, Tensor],
        stored: Tensor,
        scales: Tensor | None,
        shape: tuple[int, ...],
        check: bool,
        base: BsrMatrix | None = None,
    ) -> None:
        """Set all attributes, without checks."""
        crow, col = indices
        batch = pattern.batch or ("values" if len(shape) == 3 else None)
        scaled = None if scales is None else "tensor" if scales.shape == (1,) else "block"
        form = shape, pattern.blocksize, batch, pattern.nnz, stored.dtype, crow.dtype, stored.device, scaled
        self._set(
            pattern=pattern, crow_indices=crow, col_indices=col, stored=stored, stored_scales=scales, shape=shape,
            batch=batch, check=check, base=base, scaled_per=scaled, form=(*form, base is not None),
        )  # fmt: skip

    def _refuse(self, name: str, *_: object) -> None:
        raise AttributeError(f"BsrMatrix.{name} is read-only; build a new matrix, which copies no tensor")

    __setattr__ = __delattr__ = _refuse

    @classmethod
    def _make(
        cls,
        crow,
        col,
        values,
        shape,
        *,
        check: bool = True,
        checked: bool = True,
        even: bool = False,
        stats: PatternStats = NOT_KNOWN,
        scales: Tensor | None = None,
    ) -> BsrMatrix:
        """An instance whose indices are, or with checked=False may be, right by construction."""
        matrix = cls(crow, col, values, shape, check=check, scales=scales)
        if checked and not matrix.checked:
            matrix.pattern.trust(even, stats)
        return matrix

    @classmethod
    def _of(cls, *attributes) -> BsrMatrix:
        """An instance of tensors that are known to fit together, with the attributes that _fill takes."""
        matrix = object.__new__(cls)
        matrix._fill(*attributes)
        return matrix

    @classmethod
    def _of_op(
        cls, crow: Tensor, col: Tensor, values: Tensor, columns: int, check: bool, scales: Tensor | None
    ) -> Self:
        """The matrix of a registered op's arguments. Index tensors and forms that were checked before are not again."""
        scaled = None if scales is None else scales.shape
        form = values.shape, values.dtype, values.device, columns, scaled, crow.data_ptr(), col.data_ptr()
        known = patterns_of.found.get(id(crow))  # patterns_of.known(crow), without a call
        for reference, pattern in known[1] if known is not None and known[0]() is crow else ():
            attributes = pattern.forms.get(form)
            if attributes is None or reference() is not col or (check and pattern.outdated()):
                continue
            if values.is_contiguous() and (scales is None or scales.is_contiguous()):
                matrix = object.__new__(cls)
                matrix.__dict__.update(
                    attributes, pattern=pattern, crow_indices=crow, col_indices=col, stored=values,
                    stored_scales=scales, check=check,
                )  # fmt: skip
                return matrix
        items = values.shape[:1] if values.dim() == 4 else crow.shape[:-1]
        shape = *items, (crow.shape[-1] - 1) * values.shape[-2], columns
        matrix = cls(crow, col, values, shape, check=check, scales=scales)
        if len(matrix.pattern.forms) < MOST_FORMS:
            matrix.pattern.forms[form] = {
                name: getattr(matrix, name) for name in ("shape", "batch", "scaled_per", "form", "base")
            }
        return matrix

    def transpose(self) -> BsrMatrix:
        """Return a new (K, M) matrix, or batch, with (bk, bm) blocks; copies indices and values. Differentiable.

        Raises:
            ValueError: the indices are invalid (see `check_indices`).
        """
        view = self.t()
        state: dict[str, Any] = {"check": self.check, "checked": self.checked, "scales": view.scales}
        return self._make(view.crow_indices, view.col_indices, view.values, view.shape, **state)

    def t(self) -> BsrMatrix:
        """The transposed matrix (K, M), or batch, with (bk, bm) blocks, as a view; W.t().t() is W.

        Its index is built once per pattern, on the device, without synchronization, and cached with it. GEMMs read the
        stored blocks of the view without copies; its `values` are a copy. Differentiable.

        Example:
            dx = bsr_linear(dy, W.t())
        """
        if self.base is not None:
            return self.base
        pattern, shape = self.pattern, (*self.shape[:-2], *self.shape[:-3:-1])
        if torch.compiler.is_compiling():  # of these tensors, which are inputs of the graph; the graph's ops use `base`
            pattern = Pattern(*self.indices, pattern.shape, pattern.blocksize, caches=False).transposed()
            indices = pattern.crow_indices, pattern.col_indices
            return self._of(pattern, indices, self.stored, self.stored_scales, shape, self.check, self)
        if self.check and not (pattern.checked or self.device.type == "meta" or in_graph_trace()):
            pattern.check()
        pattern = pattern.transposed()
        view = object.__new__(BsrMatrix)
        view.__dict__.update(
            self.__dict__, pattern=pattern, crow_indices=pattern.crow_indices, col_indices=pattern.col_indices,
            shape=shape, base=self, form=(shape, pattern.blocksize, *self.form[2:-1], True),
        )  # fmt: skip
        return view

    T = mT = property(t)

    def _with_tensors(
        self, crow_indices: Tensor, col_indices: Tensor, values: Tensor, scales: Tensor | None
    ) -> BsrMatrix:
        """The same matrix in other tensors, which hold the same indices: what is known of the pattern stays known."""
        state: dict[str, Any] = {"check": self.check, "checked": self.checked, "even": self.even, "stats": self.stats}
        return self._make(crow_indices, col_indices, values, self.shape, **state, scales=scales)

    def with_values(self, values: Tensor, scales: Tensor | None = None) -> BsrMatrix:
        """Return a matrix with the same pattern and other values; nothing is checked or planned again. Differentiable.

        It shares the index tensors, and all that is cached for them.

        Args:
            values: with the shape and device of self.values, and any dtype that values can have; contiguous.
            scales: scales of FP8 values, as in the constructor; those of this matrix are not used.

        Raises:
            TypeError, ValueError: as in the constructor, and for another shape.

        Example:
            y = bsr_linear(x, W.with_values(parameter))  # in each step of a training loop
        """
        if isinstance(values, Tensor) and (values.is_nested or values.shape != self.values.shape):
            check_supported("BsrMatrix.with_values", values)
            raise ValueError(f"values must be of shape {tuple(self.values.shape)}, got {tuple(values.shape)}")
        if self.base is not None:
            state: dict[str, Any] = {"check": self.check, "checked": self.base.checked, "scales": scales}
            return self._make(self.crow_indices, self.col_indices, values, self.shape, **state)
        indices = self.crow_indices, self.col_indices
        arguments.check_tensors(*indices, values)
        return self._of(self.pattern, indices, values, arguments.check_scales(scales, values), self.shape, self.check)

    def without_values(self) -> BsrMatrix:
        """This pattern with a `stored` of the same shape, dtype and device that takes no memory and must not be read.

        For what outlives the values, as a node of autograd does; `holding` gives it values again.
        """
        return self.holding(_one_element(self.dtype, self.device).expand(self.stored.shape))

    def holding(self, stored: Tensor) -> BsrMatrix:
        """This matrix or view with another `stored` of the same shape, dtype and device; nothing is checked."""
        other = object.__new__(BsrMatrix)
        base = None if self.base is None else self.base.holding(stored)
        other.__dict__.update(self.__dict__, stored=stored, base=base)
        return other

    def split(self, dim: int, parts: int | Sequence[int], *, balance: Balance = "extent") -> list[BsrMatrix]:
        """Split into matrices of contiguous block rows (dim 0) or block columns (dim 1). Differentiable.

        Block rows of one matrix share `values` and `col_indices` with it; other parts are copies. Synchronizes.

        Args:
            dim: 0 or 1, for a batch 1 or 2; negative ones count from the end.
            parts: number of parts, or their sizes in blocks, which add up to M / bm or K / bk.
            balance: with a number of parts: "extent" for sizes that differ by at most one, "blocks" for parts that
                store about equally many blocks.

        Raises:
            IndexError: dim is out of range.
            ValueError: dim is the batch's, sizes do not add up, or balance is unknown.

        Example:
            W = random_bsr((512, 256), (64, 64), density=0.5)
            top, bottom = W.split(0, 2)
            y = torch.cat([bsr_linear(x, top), bsr_linear(x, bottom)], -1)  # bsr_linear(x, W)
        """
        return split(self, dim, parts, balance)

    def check_indices(self) -> None:
        """Validate the contents of the indices, independently of `check`. A success is cached.

        Runs a few small kernels on the tensors' device and synchronizes once. Thread-safe.

        Raises:
            ValueError: the indices are invalid; names the first invalid position and its value.
            RuntimeError: the current stream is capturing a CUDA graph, which cannot contain a synchronization.
        """
        (self if self.base is None else self.base).pattern.check()

    def row_of_block(self) -> Tensor:
        """(nnz,) block row of each stored block, in the dtype of the indices; does not synchronize.

        In a batch with a pattern per matrix, block row r of matrix l has index l * n_block_rows + r.
        """
        return self.pattern.rows().to(self.crow_indices.dtype)

    @property
    def values(self) -> Tensor:
        """(nnz, bm, bk), or (L, nnz, bm, bk) for a batch with one pattern; for a transposed view a copy."""
        return self._as_values(self.stored)

    @property
    def scales(self) -> Tensor | None:
        """(1,), or (nnz,) or (L, nnz) in the order of `values`, float32; None for values without scales."""
        scales = self.stored_scales
        if scales is None or self.base is None or self.scaled_per != "block":
            return scales
        return scales.index_select(-1, self.numbers)

    def _as_values(self, stored: Tensor) -> Tensor:
        """A tensor of the shape of `stored` as one of the shape of `values`."""
        if self.base is None:
            return stored
        turned = bits(stored).index_select(-3, self.numbers).transpose(-1, -2).contiguous()
        return of_bits(turned, stored.dtype)

    @property
    def indices(self) -> tuple[Tensor, Tensor]:
        """(crow_indices, col_indices); of a transposed view those of `base`."""
        base = self if self.base is None else self.base
        return base.crow_indices, base.col_indices

    blocksize: tuple[int, int] = _of_pattern("blocksize", "(bm, bk)")
    nnz: int = _of_pattern("nnz", "Number of stored blocks: of all items, or of the pattern that they share.")
    n_block_rows: int = _of_pattern("n_block_rows", "M / bm.")
    n_block_cols: int = _of_pattern("n_block_cols", "K / bk.")
    numbers: Any = _of_pattern("numbers", "Of a transposed view, (nnz,) int32: its blocks' places in `base`.")
    checked: bool = _of_pattern("checked", "True once check_indices has passed.")
    even: bool = _of_pattern("even", "True if all block rows are known to have equally many blocks.")
    stats: PatternStats = _of_pattern("stats", "Statistics of the block columns that its rows need, if known.")

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0.0 for a matrix without elements."""
        items = self.shape[0] if self.batch == "patterns" else 1
        return self.nnz / max(items * self.n_block_rows * self.n_block_cols, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.stored.dtype

    @property
    def device(self) -> torch.device:
        """Device of all three tensors."""
        return self.stored.device

    def __repr__(self) -> str:
        facts = f"shape={self.shape}, blocksize={self.blocksize}, nnz={self.nnz}, density={self.density:.4g}"
        facts += "" if self.batch is None else f", batch of {self.batch}"
        facts += "" if self.scaled_per is None else f", scales per {self.scaled_per}"
        types = f"dtype={self.dtype}, device='{self.device}', index_dtype={self.crow_indices.dtype}"
        return f"{type(self).__name__}({facts}, {types})"

    def _tables(self) -> tuple[Tensor, str]:
        table = FULL * self.pattern.mask().to(torch.int8)
        return table.view(-1, self.n_block_rows, self.n_block_cols), "matrix"

    def __copy__(self) -> BsrMatrix:
        return self._mapped(lambda values: values)

    def __deepcopy__(self, memo: dict) -> BsrMatrix:
        if self.base is not None:
            return copy.deepcopy(self.base, memo).t()
        tensors = self.crow_indices, self.col_indices, self.stored, self.stored_scales
        return self._with_tensors(*copy.deepcopy(tensors, memo))

    def __getstate__(self) -> tuple:
        base = self if self.base is None else self.base
        parts = base.crow_indices, base.col_indices, bits(base.stored), base.shape, base.check
        # pickle does not support FP8 (seen in torch 2.13); torch.save does.
        float8 = (self.dtype, self.stored_scales) if self.dtype in FLOAT8 else ()
        return *parts, self.base is not None, *float8

    def __setstate__(self, state: tuple) -> None:
        """Nothing vouches for what was stored: it is checked as the constructor does, and its indices before use.

        Those of a matrix with check=False, which no use checks, are checked here.
        """
        (crow, col, values, shape, check, transposed), float8 = state[:6], state[6:]
        if float8:
            values = values.view(float8[0])
        loaded = BsrMatrix(crow, col, values, shape, check=check, scales=float8[1] if float8 else None)
        if not check and loaded.device.type != "meta":
            loaded.check_indices()
        loaded = loaded.t() if transposed else loaded
        self.__dict__.update(loaded.__dict__)


@functools.lru_cache
def _one_element(dtype: torch.dtype, device: torch.device) -> Tensor:
    with lasting_memory(device):
        return torch.empty((), dtype=dtype, device=device)


# torch.load(weights_only=True) then makes instances, by __setstate__ and of nothing but tensors and numbers.
torch.serialization.add_safe_globals([BsrMatrix])
