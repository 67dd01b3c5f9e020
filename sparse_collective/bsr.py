"""Block-sparse row (BSR) matrices: the format, its checks, and its conversions.

A BSR matrix of shape (M, K) with (bm, bk) blocks is three tensors. Block-row r owns the blocks p in
[crow_indices[r], crow_indices[r + 1]). Block p starts at row r * bm and column col_indices[p] * bk; values[p]
holds its elements, row-major. Names and layout are those of `torch.sparse_bsr`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cute_kernels.config import PAIRED_ROWS
from cute_kernels.sweep_tile import CHUNK, CONSUMERS, ROWS

from . import balance
from .pairs import PairPlan, pair_plan, starts_of
from .sweep import SweepPlan, sweep_plan

__all__ = ["BsrMatrix", "random_bsr"]

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
BLOCK_MULTIPLE = 16  # the K extent of a 16-bit tensor-core MMA; also keeps every row of a block 16-byte aligned
ALIGNMENT = 16  # bytes; what TMA and 128-bit loads need of a base address
INT32_MAX = 2**31 - 1
MOST_PLANS = 64  # kept for one matrix: one for each kernel and width of the other operand

_LEARNT = WeakTensorKeyDictionary()  # crow_indices of known patterns, with what BsrMatrix.recall takes over


class BsrMatrix:
    """An (M, K) matrix of which only some (bm, bk) blocks are stored.

    Shares the three tensors with the caller and never copies them. The attributes are read-only, the indices
    must not be written to, the values may be updated in place. Gradients flow through `values`.

    Args:
        crow_indices: (M / bm + 1,) int32 or int64; where each block-row begins in `col_indices`, then nnz.
        col_indices: (nnz,) of the same dtype; each block's column, strictly increasing inside a block-row.
        values: (nnz, bm, bk) bfloat16, float16 or float32; bm and bk are multiples of 16.
        shape: (M, K), with M % bm == 0 and K % bk == 0.
        check: whether operations call `check_indices` before they first read this matrix. With False, indices
            out of range make a kernel read memory that is not the matrix's.

    All but the contents of the indices is checked here, without a device synchronisation.

    Raises:
        TypeError: an argument is not a strided tensor, or has an unsupported dtype.
        ValueError: a device, dimension, stride, length, extent or address is wrong.
    """

    crow_indices: Tensor  # (M / bm + 1,)
    col_indices: Tensor  # (nnz,)
    values: Tensor  # (nnz, bm, bk)
    shape: tuple[int, int]  # (M, K)
    blocksize: tuple[int, int]  # (bm, bk)
    nnz: int  # stored blocks
    n_block_rows: int  # M / bm
    n_block_cols: int  # K / bk
    check: bool
    checked: bool  # whether check_indices has passed
    even: bool  # whether all block rows are known to hold equally many blocks
    listed: float | None  # share of block columns that a group of rows needs, where known: heuristics.sweep_cost
    paired: float | None  # share of block columns that a pair of block rows needs, where known: heuristics.cost
    key: tuple  # what an op's plan depends on, hashable
    plans: dict | None  # what kernels must know of the pattern, made when first needed; None where it is not kept
    __slots__ = ("crow_indices", "col_indices", "values", "shape", "blocksize", "nnz", "plans", "even", "listed")
    __slots__ += ("paired", "n_block_rows", "n_block_cols", "check", "checked", "key", "__weakref__")

    def __init__(
        self,
        crow_indices: Tensor,
        col_indices: Tensor,
        values: Tensor,
        shape: Sequence[int],
        *,
        check: bool = True,
    ) -> None:
        _check_tensors(crow_indices, col_indices, values)
        shape = _pair(shape, "shape")
        nnz, *blocksize = values.shape
        rows, cols = _block_grid(shape, blocksize)
        if len(crow_indices) != rows + 1:
            raise ValueError(f"crow_indices has {len(crow_indices)} entries; {rows} rows need {rows + 1}")
        if len(col_indices) != nnz:
            raise ValueError(f"col_indices has {len(col_indices)} entries; the {nnz} blocks need {nnz}")
        if nnz > INT32_MAX:
            raise ValueError(f"{nnz} blocks do not fit in int32, at most {INT32_MAX}; use larger blocks")
        if nnz > rows * cols:
            raise ValueError(f"values has {nnz} blocks, but shape {shape} has only {rows * cols}")
        self._set(crow_indices=crow_indices, col_indices=col_indices, values=values, shape=shape)
        self._set(blocksize=tuple(blocksize), nnz=nnz, n_block_rows=rows, n_block_cols=cols)
        self._set(check=bool(check), checked=False, even=False, plans={})
        self._set_listed(None)
        self._set_paired(None)

    def _set(self, **attributes: object) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _set_listed(self, listed: float | None) -> None:
        dtypes = self.values.dtype, self.crow_indices.dtype
        self._set(listed=listed, key=(self.shape, self.blocksize, self.nnz, *dtypes, self.device, listed))

    def _set_paired(self, paired: float | None) -> None:
        """After _set_listed, whose key it extends."""
        self._set(paired=paired, key=(*self.key, paired))

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
        listed: float | None = None,
        paired: float | None = None,
    ) -> BsrMatrix:
        """An instance whose indices are, or with checked=False may be, right by construction."""
        matrix = cls(crow, col, values, shape, check=check)
        matrix._set(checked=checked, even=even)
        matrix._set_listed(listed)
        matrix._set_paired(paired)
        if even or listed is not None:
            matrix._remember()
        return matrix

    @classmethod
    def from_torch(cls, t: Tensor, *, check: bool = True) -> BsrMatrix:
        """The matrix in a 2-D `torch.sparse_bsr` tensor, sharing its tensors. Differentiable.

        Raises:
            TypeError: `t` is no tensor or has another layout.
            ValueError: `t` is batched, has dense dimensions, or is refused by the constructor.
        """
        if not isinstance(t, Tensor):
            raise TypeError(f"from_torch needs a torch.sparse_bsr tensor, got {type(t).__name__}")
        if t.layout is not torch.sparse_bsr:
            also = ", or use BsrMatrix.from_dense" if t.layout is torch.strided else ""
            raise TypeError(f"t must be sparse_bsr, not {t.layout}; pass t.to_sparse_bsr((bm, bk)){also}")
        if t.crow_indices().dim() != 1:
            raise ValueError(f"from_torch needs one matrix, got a batch of shape {tuple(t.shape)}; pass t[i]")
        if t.dense_dim():
            raise ValueError(f"from_torch needs no dense dimensions, got {t.dense_dim()} in {tuple(t.shape)}")
        return cls(t.crow_indices(), t.col_indices(), t.values(), t.shape, check=check)

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        blocksize: Sequence[int],
        *,
        mask: Tensor | None = None,
        density: float | None = None,
        index_dtype: torch.dtype = torch.int32,
    ) -> BsrMatrix:
        """Copies the chosen blocks of a dense matrix. Differentiable.

        Args:
            dense: (M, K) bfloat16, float16 or float32, of any strides.
            blocksize: (bm, bk).
            mask: (M / bm, K / bk) bool on the device of `dense`, True where a block is kept. Synchronises.
            density: in [0, 1]; keeps the round(density * number of blocks) blocks of largest Frobenius norm.
                NaN ranks first; of equal norms the earlier block, in row-major order.
            index_dtype: torch.int32 or torch.int64.

        With neither, keeps the blocks that hold a non-zero element (NaN is non-zero). Synchronises.

        Raises:
            TypeError: `dense` or `mask` is no strided tensor, or a dtype is not supported.
            ValueError: both mask and density are given, or an extent, a device or the density is wrong.
        """
        if not _is_strided(dense):
            raise TypeError(f"dense must be a strided tensor, got {_describe(dense)}")
        if dense.dim() != 2:
            raise ValueError(f"dense must have 2 dimensions (M, K), got shape {tuple(dense.shape)}")
        _check_dtypes(dense.dtype, index_dtype)
        if mask is not None and density is not None:
            raise ValueError("mask and density are both given; pass at most one of them")
        blocksize = _pair(blocksize, "blocksize")
        rows, cols = _block_grid(dense.shape, blocksize)
        blocks = _block_view(dense, blocksize)  # (rows, cols, bm, bk)
        if density is not None:
            _check_density(density)
            norms = torch.linalg.vector_norm(blocks.detach(), dim=(2, 3), dtype=torch.float64).flatten()
            order = norms.argsort(descending=True, stable=True)
            kept = order[: round(density * rows * cols)].sort().values
            row, col = kept // max(cols, 1), kept % max(cols, 1)
        else:
            if mask is None:
                mask = (blocks.detach() != 0).any(dim=3).any(dim=2)
            if not _is_strided(mask) or mask.dtype is not torch.bool:
                raise TypeError(f"mask must be a strided bool tensor, got {_describe(mask)}")
            if mask.shape != (rows, cols) or mask.device != dense.device:
                got = f"{tuple(mask.shape)} on {mask.device}"
                raise ValueError(f"mask must have shape {(rows, cols)} on {dense.device}, got {got}")
            row, col = mask.nonzero(as_tuple=True)
        values = blocks[row, col].contiguous()  # (nnz, bm, bk)
        return cls._make(_row_starts(row, rows, index_dtype), col.to(index_dtype), values, dense.shape)

    def to_torch(self) -> Tensor:
        """The same matrix as a `torch.sparse_bsr` tensor sharing the three tensors. Differentiable."""
        parts = self.crow_indices, self.col_indices, self.values
        return torch.sparse_bsr_tensor(*parts, self.shape, check_invariants=False)

    def to_dense(self) -> Tensor:
        """A new (M, K) tensor of the dtype of `values`, zero outside the blocks. Differentiable.

        Raises:
            ValueError: the indices are wrong (see `check_indices`).
        """
        if self.check:
            self.check_indices()
        dense = self.values.new_zeros(self.shape)
        blocks = _block_view(dense, self.blocksize)  # (rows, cols, bm, bk)
        blocks[self.row_of_block().long(), self.col_indices.long()] = self.values
        return dense

    def transpose(self) -> BsrMatrix:
        """A new (K, M) matrix with (bk, bm) blocks; copies indices and values. Differentiable.

        Raises:
            ValueError: the indices are wrong (see `check_indices`).
        """
        if self.check:
            self.check_indices()
        # Blocks lie in row order, so a stable sort by column leaves the rows of each column increasing.
        col, order = self.col_indices.sort(stable=True)
        crow = _row_starts(col, self.n_block_cols, col.dtype)
        values = self.values[order].transpose(1, 2).contiguous()  # (nnz, bk, bm)
        state = {"check": self.check, "checked": self.checked}
        return self._make(crow, self.row_of_block()[order], values, self.shape[::-1], **state)

    def to(self, target: torch.device | torch.dtype | str | int) -> BsrMatrix:
        """This matrix on another device, or with values of another dtype and the same index tensors.

        Returns self where nothing changes. Differentiable.

        Raises:
            TypeError: `target` is a dtype that values cannot have.
        """
        if isinstance(target, torch.dtype):
            _check_dtypes(target, self.crow_indices.dtype)
            crow, col = self.crow_indices, self.col_indices
        else:
            crow, col = self.crow_indices.to(target), self.col_indices.to(target)
        values = self.values.to(target)
        if crow is self.crow_indices and col is self.col_indices and values is self.values:
            return self
        state = {"check": self.check, "checked": self.checked, "even": self.even, "listed": self.listed}
        state["paired"] = self.paired
        return self._make(crow, col, values, self.shape, **state)

    def derived(self, key: tuple, make: Callable[[], tuple]) -> tuple:
        """`make()`, a tuple of tensors made of the indices alone, on their device; kept under `key`.

        Made again if an index tensor has been changed in place. While a CUDA graph is captured, what is not there yet
        becomes part of the graph and is not kept.
        """
        if self.plans is None:
            return make()
        versions = self.crow_indices._version, self.col_indices._version
        found = self.plans.get(key)
        cuda = self.device.type == "cuda"
        if found is not None and found[1] == versions:
            if cuda and found[2] != torch._C._cuda_getCurrentRawStream(self.device.index):
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(found[3])
                for tensor in found[0]:
                    tensor.record_stream(stream)
            return found[0]
        made = make()
        if not cuda:
            self.plans[key] = (made, versions, None, None)
        elif not torch.cuda.is_current_stream_capturing():
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            stream = torch.cuda.current_stream(self.device)
            self.plans[key] = (made, versions, stream.cuda_stream, stream.record_event())
        return made

    def sweep_plan(self, cluster: int, b_k_major: bool) -> SweepPlan:
        """What the sweep kernel must know of the pattern (see sweep.py), for clusters of so many CTAs.

        `b_k_major`: whether the dense operand is contiguous along K.
        """
        return self.derived(("sweep", cluster, b_k_major), lambda: self._make_sweep_plan(cluster, b_k_major))

    def _make_sweep_plan(self, cluster: int, b_k_major: bool) -> SweepPlan:
        pattern = self.crow_indices, self.col_indices, self.shape, self.blocksize
        if self.device.type == "cuda":
            from .sweep_plan import MOST_CHUNKS, sweep_plan_on_gpu

            if -(-self.shape[1] // CHUNK) <= MOST_CHUNKS:
                return sweep_plan_on_gpu(*pattern, cluster, b_k_major)
        return sweep_plan(*pattern, cluster, b_k_major)

    def pair_plan(self) -> PairPlan:
        """What the kernel over pairs of block rows must know of the pattern (see pairs.py)."""
        return self.derived(("pairs",), self._make_pair_plan)

    def _make_pair_plan(self) -> PairPlan:
        pattern = self.crow_indices, self.col_indices, self.n_block_cols
        if self.device.type == "cuda":
            from .pairs_plan import MOST_COLUMNS, pair_plan_on_gpu

            if self.n_block_cols <= MOST_COLUMNS:
                return pair_plan_on_gpu(*pattern)
        return pair_plan(*pattern)

    def work_order(self, tiles: balance.Tiles, paired: bool = False) -> Tensor:
        """In which order work tiles come, so that all workers finish together; see balance.work_order.

        With `paired` rows are pairs of block rows, as long as their lists of columns.

        On a GPU one kernel makes the same table, and torch that of problems beyond its limits (order_kernel.fits).
        """

        def make() -> tuple[Tensor]:
            starts = starts_of(self.pair_plan()) if paired else self.crow_indices
            if self.device.type == "cuda":
                from .order_kernel import fits, work_order_on_gpu

                if fits(len(starts) - 1, **tiles._asdict()):
                    return (work_order_on_gpu(starts, **tiles._asdict()),)
            return (balance.work_order(starts, **tiles._asdict()),)

        return self.derived((*tiles, "pairs") if paired else tiles, make)[0]

    def check_indices(self) -> None:
        """Checks the contents of the indices, whatever `check` is. Remembers success, so it costs once.

        Runs a few small kernels on the tensors' device and synchronises once. Several threads may call it:
        each finds the remembered success or repeats the same read-only work.

        Raises:
            ValueError: names the first position that breaks the format, and its value.
            RuntimeError: the current stream is capturing a CUDA graph, where nothing can synchronise.
        """
        if self.checked:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "this BsrMatrix has unchecked indices, and a CUDA graph cannot capture the check, which "
                "synchronises; call check_indices() before the capture, or build the matrix with check=False"
            )
        crow, col, nnz = self.crow_indices, self.col_indices, self.nnz
        # (nnz + 1,); clamped so that a wrong crow ends in a flag and not in a write out of bounds.
        starts_row = torch.zeros(nnz + 1, dtype=torch.bool, device=col.device)
        starts_row.index_fill_(0, crow.clamp(0, nnz).long(), True)
        flags = [
            crow[0] != 0,
            crow[-1] != nnz,
            (crow[1:] < crow[:-1]).any(),
            ((col < 0) | (col >= self.n_block_cols)).any(),
            ((col[1:] <= col[:-1]) & ~starts_row[1:nnz]).any(),
        ]
        lengths = crow.diff()
        flags.append((lengths == lengths[:1]).all())
        shares = self._columns_listed(), self._columns_paired()
        *wrong, even, listed, paired = torch.stack([*(flag.long() for flag in flags), *shares]).tolist()
        if any(wrong):
            raise ValueError(self._first_index_error())
        self._set(checked=True, even=bool(even))
        self._set_listed(round(listed / max(1, self._row_groups() * self.n_block_cols), 2))
        cells = -(-self.n_block_rows // 2) * self.n_block_cols
        self._set_paired(round(paired / max(1, cells), 3) if self.blocksize[0] == PAIRED_ROWS else None)
        self._remember()

    def _remember(self) -> None:
        known = weakref.ref(self.col_indices), self.blocksize, self.even, (self.listed, self.paired), self.plans
        _LEARNT[self.crow_indices] = known

    def recall(self) -> None:
        """For a matrix that lives for one call: take over what check_indices found out about the same index tensors.

        Otherwise nothing is known of the pattern, and no plan is kept.
        """
        nothing = False, (None, None), None
        col, blocksize, *learnt = _LEARNT.get(self.crow_indices) or (lambda: None, None, *nothing)
        if col() is not self.col_indices or blocksize != self.blocksize:
            learnt = nothing
        even, (listed, paired), plans = learnt
        self._set(even=even, plans=plans)
        self._set_listed(listed)
        self._set_paired(paired)

    def _row_groups(self) -> int:
        """How many groups of rows the sweep kernel has without a cluster; each needs some of the block columns."""
        return -(-self.shape[0] // max(self.blocksize[0], ROWS * CONSUMERS))

    def _columns_listed(self) -> Tensor:
        """In how many block columns all such groups have a block, on the device; of wrong indices any number."""
        return self._columns_of(self._row_groups(), max(self.blocksize[0], ROWS * CONSUMERS))

    def _columns_paired(self) -> Tensor:
        """The same of pairs of block rows, where there is a kernel for them."""
        if self.blocksize[0] != PAIRED_ROWS:
            return torch.zeros((), dtype=torch.int64, device=self.device)
        return self._columns_of(-(-self.n_block_rows // 2), 2 * PAIRED_ROWS)

    def _columns_of(self, groups: int, rows: int) -> Tensor:
        """In how many block columns groups of so many rows have a block, summed over groups."""
        cols = self.n_block_cols
        if self.nnz == 0:
            return torch.zeros((), dtype=torch.int64, device=self.device)
        crow = self.crow_indices.clamp(0, self.nnz).contiguous()
        numbers = torch.arange(self.nnz, dtype=crow.dtype, device=crow.device)
        row = (torch.searchsorted(crow, numbers, right=True) - 1).clamp(0, self.n_block_rows - 1)
        group = row * self.blocksize[0] // rows
        needed = torch.zeros(groups * cols, dtype=torch.bool, device=crow.device)
        return needed.index_fill_(0, group * cols + self.col_indices.long().clamp(0, cols - 1), True).sum()

    def _first_index_error(self) -> str:
        """What is wrong first, crow_indices before col_indices. Copies the indices to the host."""
        crow, col, nnz, cols = self.crow_indices.cpu(), self.col_indices.cpu(), self.nnz, self.n_block_cols
        if crow[0] != 0:
            return f"crow_indices[0] is {crow[0]}; it must be 0"
        for r in (crow[1:] < crow[:-1]).nonzero().flatten()[:1].tolist():
            return f"crow_indices[{r + 1}] is {crow[r + 1]}, less than crow_indices[{r}] = {crow[r]}"
        if crow[-1] != nnz:
            return f"crow_indices[{len(crow) - 1}], the last, is {crow[-1]}; it must be nnz = {nnz}"
        row = torch.repeat_interleave(crow.diff())  # (nnz,)
        for p in ((col < 0) | (col >= cols)).nonzero().flatten()[:1].tolist():
            return f"col_indices[{p}] is {col[p]}, in block-row {row[p]}; it must be in [0, {cols})"
        for p in ((col[1:] <= col[:-1]) & (row[1:] == row[:-1])).nonzero().flatten()[:1].tolist():
            found = f"col_indices[{p + 1}] is {col[p + 1]} after {col[p]}, both in block-row {row[p]}"
            return f"{found}; the columns of a block-row must be sorted and without duplicates"
        return "the indices were wrong when checked but have been written to since; they must not change"

    def row_of_block(self) -> Tensor:
        """(nnz,) block-row of each stored block, in the dtype of the indices; does not synchronise."""
        rows = torch.arange(self.n_block_rows, dtype=self.crow_indices.dtype, device=self.device)
        return torch.repeat_interleave(rows, self.crow_indices.diff(), output_size=self.nnz)

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0.0 for a matrix without elements."""
        return self.nnz / max(self.n_block_rows * self.n_block_cols, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where all three tensors are."""
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """Whether the values require a gradient."""
        return self.values.requires_grad

    def __repr__(self) -> str:
        facts = f"shape={self.shape}, blocksize={self.blocksize}, nnz={self.nnz}, density={self.density:.4g}"
        types = f"dtype={self.dtype}, device='{self.device}', index_dtype={self.crow_indices.dtype}"
        return f"{type(self).__name__}({facts}, {types})"

    def __getstate__(self) -> tuple:
        return self.crow_indices, self.col_indices, self.values, self.shape, self.check

    def __setstate__(self, state: tuple) -> None:
        # Unchecked again: nothing vouches for what was stored.
        *arguments, check = state
        BsrMatrix.__init__(self, *arguments, check=check)


def random_bsr(
    shape: Sequence[int],
    blocksize: Sequence[int],
    *,
    per_row: int | None = None,
    density: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    index_dtype: torch.dtype = torch.int32,
    scale: float = 1.0,
) -> BsrMatrix:
    """A matrix of normal random values, of standard deviation `scale`, in randomly placed blocks.

    Args:
        shape, blocksize: (M, K) and (bm, bk).
        per_row: stores this many blocks in each block-row, in columns drawn uniformly; does not synchronise.
        density: stores each block with this probability. Synchronises. Give either per_row or density.
        dtype, index_dtype: of the values and of the indices.
        device, generator: where all is drawn, and by what; the generator must be of that device.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: extents do not divide, or not exactly one of per_row and density is given and in range.
    """
    _check_dtypes(dtype, index_dtype)
    shape, blocksize = _pair(shape, "shape"), _pair(blocksize, "blocksize")
    rows, cols = _block_grid(shape, blocksize)
    if (per_row is None) == (density is None):
        raise ValueError(f"give either per_row or density, got per_row={per_row} and density={density}")
    scores = torch.rand(rows, cols, device=device, generator=generator)
    if per_row is not None:
        if not 0 <= operator.index(per_row) <= cols:
            raise ValueError(f"per_row is {per_row}; it must be in [0, {cols}], the blocks in a block-row")
        col = scores.argsort(dim=1)[:, :per_row].sort(dim=1).values.flatten()
        crow = torch.arange(rows + 1, dtype=index_dtype, device=scores.device) * per_row
    else:
        _check_density(density)
        row, col = (scores < density).nonzero(as_tuple=True)
        crow = _row_starts(row, rows, index_dtype)
    values = torch.randn(len(col), *blocksize, dtype=dtype, device=scores.device, generator=generator)
    return BsrMatrix._make(crow, col.to(index_dtype), values.mul_(scale), shape, even=per_row is not None)


def _block_view(dense: Tensor, blocksize: Sequence[int]) -> Tensor:
    """A view (M / bm, K / bk, bm, bk) of an (M, K) tensor of any strides."""
    (m, k), (bm, bk) = dense.shape, blocksize
    return dense.unflatten(1, (k // bk, bk)).unflatten(0, (m // bm, bm)).transpose(1, 2)


def _row_starts(row: Tensor, n_rows: int, index_dtype: torch.dtype) -> Tensor:
    """(n_rows + 1,) where each row begins in the sorted (nnz,) `row`; no synchronisation, unlike bincount."""
    starts = torch.arange(n_rows + 1, dtype=row.dtype, device=row.device)
    return torch.searchsorted(row, starts, out_int32=index_dtype is torch.int32)


def _is_strided(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def _describe(x: object) -> str:
    return f"a {x.layout} tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def _pair(x: Sequence[int], name: str) -> tuple[int, int]:
    try:
        first, second = map(operator.index, x)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be two integers, got {x!r}") from None
    return first, second


def _block_grid(shape: Sequence[int], blocksize: Sequence[int]) -> tuple[int, int]:
    """(M / bm, K / bk), or a ValueError where such blocks are unsupported or do not tile the matrix."""
    for name, side in zip(("bm", "bk"), blocksize, strict=True):
        if side <= 0 or side % BLOCK_MULTIPLE:
            raise ValueError(f"block side {name} is {side}; use a positive multiple of {BLOCK_MULTIPLE}")
    for name, extent, side in zip(("M", "K"), shape, blocksize, strict=True):
        if extent < 0 or extent % side:
            raise ValueError(f"{name} is {extent}, no multiple of {side}; pad it to {-(-extent // side) * side}")
    return shape[0] // blocksize[0], shape[1] // blocksize[1]


def _check_dtypes(value_dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    if value_dtype not in VALUE_DTYPES:
        raise TypeError(f"values cannot be {value_dtype}; use one of {', '.join(map(str, VALUE_DTYPES))}")
    if index_dtype not in INDEX_DTYPES:
        raise TypeError(f"indices cannot be {index_dtype}; use one of {', '.join(map(str, INDEX_DTYPES))}")


def _check_density(density: float) -> None:
    if not 0 <= density <= 1:
        raise ValueError(f"density is {density}; it must be in [0, 1]")


def _check_tensors(crow_indices: Tensor, col_indices: Tensor, values: Tensor) -> None:
    """What the constructor asks of each tensor by itself, and of the three together."""
    tensors = {"crow_indices": (crow_indices, 1), "col_indices": (col_indices, 1), "values": (values, 3)}
    for name, (t, _) in tensors.items():
        if not _is_strided(t):
            raise TypeError(f"{name} must be a strided tensor, got {_describe(t)}")
    _check_dtypes(values.dtype, crow_indices.dtype)
    if col_indices.dtype is not crow_indices.dtype:
        got = f"{crow_indices.dtype} and {col_indices.dtype}"
        raise TypeError(f"crow_indices and col_indices must have the same dtype, got {got}; convert one")
    for name, (t, dim) in tensors.items():
        if t.dim() != dim:
            raise ValueError(f"{name} must have {dim} dimension(s), got shape {tuple(t.shape)}")
        if t.device != values.device:
            raise ValueError(f"{name} is on {t.device}, values on {values.device}; move them to one device")
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {t.stride()}; pass {name}.contiguous()")
    if offset := values.data_ptr() % ALIGNMENT:
        raise ValueError(f"values is {offset} bytes off {ALIGNMENT}-byte alignment; pass values.clone()")
