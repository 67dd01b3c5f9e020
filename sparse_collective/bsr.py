"""Block-sparse row (BSR) matrices: the format, its checks, and what is known of a pattern.

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
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT8
from cute_kernels.matmul.problem import NOT_KNOWN, PatternStats
from cute_kernels.picture import FULL, Pictured
from cute_kernels.runtime.derived import Derived, facts_of_tensor, of_tensor, state_of
from cute_kernels.runtime.front import check_supported
from cute_kernels.runtime.graphs import lasting_memory
from cute_kernels.runtime.torch_compat import in_graph_trace

from . import checks as arguments
from . import index_check
from .conversions import Conversions, bits, of_bits, row_starts
from .csc import csc_index
from .like_tensor import LikeTensor

__all__ = ["BsrMatrix", "random_bsr"]

INT32_MAX = 2**31 - 1
MOST_FORMS = 16  # of values for one pattern, that are remembered


@dataclass(eq=False)
class PatternFacts:
    """Cached facts of the pattern of two index tensors, for matrices that live for one call; stored in the cache of
    crow_indices (runtime.derived.of_tensor)."""

    col_indices: weakref.ref
    shape: tuple[int, ...]  # without the batch
    blocksize: tuple[int, int]
    even: bool
    stats: PatternStats
    plans: Derived | None
    attributes: dict[tuple, dict] = field(default_factory=dict)  # of a matrix, by the form that met_before is given


def met_before(
    crow_indices: Tensor, col_indices: Tensor, values: Tensor, form: tuple, scales: Tensor | None = None
) -> BsrMatrix | None:
    """The matrix of these, without its checks, if one of the same indices and form has passed them; see recall.

    form: the shape, dtype and device of values, and all else that the matrix was made of, hashable. scales: as the
    matrix stores them, (1,) or one for each block.
    """
    facts = facts_of_tensor(crow_indices)
    if facts is None or facts.col_indices() is not col_indices or not values.is_contiguous():
        return None
    if scales is not None and not scales.is_contiguous():
        return None
    attributes = facts.attributes.get(form)
    if attributes is None:
        return None
    matrix = object.__new__(BsrMatrix)
    tensors = {"crow_indices": crow_indices, "col_indices": col_indices, "stored": values, "stored_scales": scales}
    matrix.__dict__.update(attributes, **tensors)
    return matrix


class BsrMatrix(Conversions, LikeTensor, Pictured):
    """An (M, K) matrix, or a batch (L, M, K) of them, of which only some (bm, bk) blocks are stored.

    Shares the three tensors with the caller and never copies them. The attributes are read-only, the indices
    must not be written to, the values may be updated in place. Gradients flow through `values`.

    It is no torch.Tensor, and behaves like one where that makes sense: W @ b, x @ W.T, torch.matmul,
    torch.nn.functional.linear(x, W, bias), to(), cuda(), half(), clone(), detach(), requires_grad_(), copy.deepcopy,
    torch.save and torch.load(weights_only=True) (import sparse_collective before). As a plain attribute of an
    nn.Module it is neither a parameter nor a buffer: state_dict() leaves it out, and .to() of the module does not move
    it. `sparse_collective.nn.BsrLinear` is the module that holds one.

    Args:
        crow_indices: (M / bm + 1,) int32 or int64; where each block-row begins in `col_indices`, then nnz. Of a batch
            with a pattern for each item (L, M / bm + 1), the numbers counting the blocks of all items.
        col_indices: (nnz,) of the same dtype; each block's column, strictly increasing inside a block-row.
        values: (nnz, bm, bk) bfloat16, float16, float32, float8_e4m3fn, float8_e5m2 or, on the CPU, float64; bm and bk
            are multiples of 16. Of a batch with one pattern (L, nnz, bm, bk). At any address: on a GPU each product
            copies values that do not begin at a multiple of 16 bytes, which values.clone() spares.
        shape: (M, K), with M % bm == 0 and K % bk == 0; or (L, M, K).
        check: whether operations call `check_indices` before they first read this matrix. With False, indices
            out of range make a kernel read memory that is not the matrix's.
        scales: of float8 values alone: float32, what they are multiplied by. One element for all of them, or (nnz,),
            one for each stored block; of a batch with one pattern (L, nnz). See `quantize`.

    All but the contents of the indices is checked here, without a device synchronisation.

    Raises:
        TypeError: an argument is not a strided tensor, or has an unsupported dtype.
        ValueError: a device, dimension, stride, length or extent is wrong.
    """

    structured = False  # whether two of every four neighbours in a row of a block are stored, as of a Bsr24
    crow_indices: Tensor  # (M / bm + 1,) or (L, M / bm + 1)
    col_indices: Tensor  # (nnz,)
    stored: Tensor  # what kernels read: the values; of a transposed view those of `base`
    stored_scales: Tensor | None  # the scales of `stored`: (1,), or one for each block, in the order of `stored`
    base: BsrMatrix | None  # of a transposed view, the matrix that it is the transpose of
    numbers: Tensor | None  # of a transposed view, (nnz,) int32: which block of `base` each of its blocks is
    shape: tuple[int, ...]  # (M, K) or (L, M, K)
    blocksize: tuple[int, int]  # (bm, bk)
    batch: str | None  # "values": one pattern, values for each item; "patterns": a pattern for each; None: no batch
    nnz: int  # stored blocks: of all items, or of the pattern that they share
    n_block_rows: int  # M / bm
    n_block_cols: int  # K / bk
    check: bool
    checked: bool  # whether check_indices has passed
    even: bool  # whether all block rows are known to hold equally many blocks
    stats: PatternStats  # of block columns that its rows need, where known; what kernels are chosen by
    key: tuple  # what an op's plan depends on, hashable
    plans: Derived | None  # what kernels must know of the pattern, made when first needed; None where it is not kept

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
        *_, nnz, bm, bk = values.shape
        rows, cols = arguments.block_grid(shape[-2:], (bm, bk))
        if crow_indices.shape[-1] != rows + 1:
            raise ValueError(f"crow_indices has {crow_indices.shape[-1]} entries; {rows} rows need {rows + 1}")
        if len(col_indices) != nnz:
            raise ValueError(f"col_indices has {len(col_indices)} entries; the {nnz} blocks need {nnz}")
        items = 1 if batch is None else shape[0]
        stored = 1 if batch is None else len(values if batch == "values" else crow_indices)
        if stored != items:
            name = "values" if batch == "values" else "crow_indices"
            raise ValueError(f"{name} holds {stored} items, but shape {shape} has {items}")
        total = items * nnz if batch == "values" else nnz
        if total > INT32_MAX:
            raise ValueError(f"{total} blocks do not fit in int32, at most {INT32_MAX}; use larger blocks")
        if total > items * rows * cols:
            raise ValueError(f"values has {total} blocks, but shape {shape} has only {items * rows * cols}")
        self._set(crow_indices=crow_indices, col_indices=col_indices, stored=values, shape=shape, batch=batch)
        self._set(stored_scales=scales)
        self._set(blocksize=(bm, bk), nnz=nnz, n_block_rows=rows, n_block_cols=cols)
        self._set(check=bool(check), checked=False, even=False, plans=Derived(), base=None, numbers=None)
        self._set_stats(NOT_KNOWN)

    def _set(self, **attributes: object) -> None:
        for name, value in attributes.items():  # self.__dict__.update is faster, and torch.compile does not trace it
            object.__setattr__(self, name, value)

    def _set_stats(self, stats: PatternStats) -> None:
        dtypes = self.stored.dtype, self.crow_indices.dtype
        known = self.shape, self.blocksize, self.batch, self.nnz, *dtypes, self.device, self.scaled_per
        self._set(stats=stats, key=(*known, stats, self.base is not None))

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
        matrix._set(checked=checked, even=even)
        matrix._set_stats(stats)
        if even or stats != NOT_KNOWN or (checked and not torch.compiler.is_compiling()):
            matrix._remember()
        return matrix

    @classmethod
    def _traced(
        cls, crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, ...], blocksize: tuple[int, int], check: bool
    ) -> BsrMatrix:
        """A matrix for a compiled graph, of a module's tensors, which the module has checked: each check here would be
        traced and guarded."""
        matrix, patterns = object.__new__(cls), crow.dim() == 2
        matrix._set(
            crow_indices=crow, col_indices=col, stored=values, stored_scales=None, base=None, numbers=None,
            shape=shape, blocksize=blocksize, batch="patterns" if patterns else "values" if values.dim() == 4 else None,
            nnz=values.shape[-3], n_block_rows=shape[-2] // blocksize[0], n_block_cols=shape[-1] // blocksize[1],
            check=check, checked=False, even=False, plans=None,
        )  # fmt: skip
        matrix._set_stats(NOT_KNOWN)
        return matrix

    def transpose(self) -> BsrMatrix:
        """A new (K, M) matrix, or batch of them, with (bk, bm) blocks; copies indices and values. Differentiable.

        Raises:
            ValueError: the indices are wrong (see `check_indices`).
        """
        view = self.t()
        state = {"check": self.check, "checked": self.checked, "scales": view.scales}
        return self._make(view.crow_indices, view.col_indices, view.values, view.shape, **state)

    def t(self) -> BsrMatrix:
        """The transposed matrix (K, M), or batch of them, with (bk, bm) blocks, as a view: it shares `stored`.

        Its index is made on the device once per pattern, without synchronising, and kept with it. Products take the
        view as it is; its `values` are a copy. Of a view, the matrix that it was made of. Differentiable.
        """
        if self.base is not None:
            return self.base
        view = object.__new__(BsrMatrix)
        own = {"stored": self.stored, "stored_scales": self.stored_scales, "base": self}
        own |= {"check": self.check, "checked": self.checked}
        if torch.compiler.is_compiling():  # the graph's ops ask the base for what is kept; of this nothing is used
            crow, col, numbers, plans, _ = self._transposed_index()
            view._set(**self._transposed_facts(crow, col, numbers, plans), **own)
            return view
        made = self.derived(("transposed",), self._transposed_index, _indices_of)
        if in_graph_trace():  # extents may be symbols, which have no hash
            facts = self._transposed_facts(*made[:4])
        elif (facts := made[4].get(self.key)) is None:
            facts = made[4][self.key] = self._transposed_facts(*made[:4])
        view.__dict__.update(facts, **own)
        return view

    def _transposed_facts(self, crow: Tensor, col: Tensor, numbers: Tensor, plans: Derived) -> dict[str, object]:
        """Attributes of the transposed view that do not depend on values."""
        shape, (bm, bk) = (*self.shape[:-2], *self.shape[:-3:-1]), self.blocksize
        return {
            "crow_indices": crow, "col_indices": col, "numbers": numbers, "shape": shape, "blocksize": (bk, bm),
            "batch": self.batch, "nnz": self.nnz, "even": False, "n_block_rows": self.n_block_cols,
            "n_block_cols": self.n_block_rows, "plans": plans, "stats": NOT_KNOWN,
            "key": (shape, (bk, bm), *self.key[2:-2], NOT_KNOWN, True),
        }  # fmt: skip

    T = mT = property(t)

    def _transposed_index(self) -> tuple[Tensor, Tensor, Tensor, Derived, dict]:
        """(crow_indices, col_indices, numbers) of the transpose, a place for what kernels must know of it, and one for
        attributes of views by the matrices' keys."""
        traced = torch.compiler.is_compiling() or in_graph_trace()  # the registered op checks
        if self.check and self.device.type != "meta" and not traced:
            self.check_indices()
        return *csc_index(self.crow_indices, self.col_indices, self.n_block_cols), Derived(), {}

    def _with_tensors(
        self, crow_indices: Tensor, col_indices: Tensor, values: Tensor, scales: Tensor | None
    ) -> BsrMatrix:
        """The same matrix in other tensors, which hold the same indices: what is known of the pattern stays known."""
        state = {"check": self.check, "checked": self.checked, "even": self.even, "stats": self.stats}
        return self._make(crow_indices, col_indices, values, self.shape, **state, scales=scales)

    def with_values(self, values: Tensor, scales: Tensor | None = None) -> BsrMatrix:
        """The same pattern with other values, for a step that makes them anew: nothing is checked or planned again.

        Shares the index tensors, and what has been learnt and made of them. Differentiable.

        Args:
            values: of self.values' shape and device, of any dtype that values can have; contiguous.
            scales: theirs, if they are float8, as the constructor takes them; this matrix's are not taken over.

        Raises:
            TypeError, ValueError: as the constructor does, and for another shape.
        """
        if isinstance(values, Tensor) and (values.is_nested or values.shape != self.values.shape):
            check_supported("BsrMatrix.with_values", values)
            raise ValueError(f"values must be of shape {tuple(self.values.shape)}, got {tuple(values.shape)}")
        matrix = BsrMatrix(self.crow_indices, self.col_indices, values, self.shape, check=self.check, scales=scales)
        matrix._set(checked=self.checked, even=self.even, plans=self.plans if self.base is None else Derived())
        matrix._set_stats(self.stats)
        return matrix

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

    def known(self, key: tuple, tensors_of: Callable = tuple, *, rows_alone: bool = False):
        """The cached value that `derived` would return, or None."""
        state = state_of(self.crow_indices) if rows_alone else state_of(self.crow_indices, self.col_indices)
        if state is None or self.plans is None:
            return None
        return self.plans.known(key, self.crow_indices, state, tensors_of)

    def derived(self, key: tuple, make: Callable, tensors_of: Callable = tuple, *, rows_alone: bool = False):
        """`make()`, made of the indices alone, on their device, and `tensors_of` it its tensors; kept under `key`.

        Made again if an index tensor has been changed in place, with `rows_alone` only if crow_indices has. See Derived
        for streams and CUDA graphs.
        """
        crow = self.crow_indices
        state = state_of(crow) if rows_alone else state_of(crow, self.col_indices)
        plans = self.plans
        if plans is None:
            plans, state = Derived(), None  # nothing is kept
        return plans.get(key, crow, make, tensors_of, state)

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
        error, even, stats = index_check.check(self)
        if error:
            raise ValueError(error)
        self._set(checked=True, even=even)
        self._set_stats(stats)
        self._remember()

    def _remember(self) -> None:
        """Keep what is known of the pattern with its index tensors.

        Tables that exist are shared: compiled graphs look them up here, and their CUDA graphs may read them.
        """
        known = self._facts() if self.base is None else None
        if known is not None and known.plans is not None:
            self._set(plans=known.plans)
            if (known.even, known.stats) == (self.even, self.stats):
                return
        self._note_facts()

    def _note_facts(self) -> None:
        facts = self.shape[-2:], self.blocksize, self.even, self.stats, self.plans
        of_tensor(self.crow_indices).facts = PatternFacts(weakref.ref(self.col_indices), *facts)

    def _facts(self) -> PatternFacts | None:
        """Return what is known of a matrix with the same index tensors, shape and blocks; None if nothing is."""
        facts = facts_of_tensor(self.crow_indices)
        if facts is None or facts.col_indices() is not self.col_indices:
            return None
        return facts if (facts.shape, facts.blocksize) == (self.shape[-2:], self.blocksize) else None

    def recall(self, form: tuple | None = None) -> None:
        """For a matrix that lives for one call: take over what check_indices found out about the same index tensors.

        Otherwise nothing is known of the pattern, but tables made of it from now on are kept with the index tensors.
        With a form, met_before knows this matrix.
        """
        known = facts_of_tensor(self.crow_indices)
        if known is None or known.col_indices() is None:
            self._note_facts()
        facts = self._facts()
        even, stats, plans = (facts.even, facts.stats, facts.plans) if facts else (False, NOT_KNOWN, None)
        self._set(even=even, plans=plans)
        self._set_stats(stats)
        if facts and form is not None and len(facts.attributes) < MOST_FORMS:
            tensors = "crow_indices", "col_indices", "stored", "stored_scales"
            facts.attributes[form] = {name: value for name, value in vars(self).items() if name not in tensors}

    def row_of_block(self) -> Tensor:
        """(nnz,) block-row of each stored block, in the dtype of the indices; does not synchronise.

        In a batch with a pattern per matrix, block row r of matrix l has index l * n_block_rows + r.
        """
        lengths = self.crow_indices.diff().flatten()
        rows = torch.arange(len(lengths), dtype=lengths.dtype, device=self.device)
        return torch.repeat_interleave(rows, lengths, output_size=self.nnz)

    @property
    def values(self) -> Tensor:
        """(nnz, bm, bk), or (L, nnz, bm, bk) of a batch with one pattern; of a transposed view a copy."""
        return self._as_values(self.stored)

    @property
    def scales(self) -> Tensor | None:
        """(1,), or (nnz,) or (L, nnz) in the order of `values`, float32; None of values that have none."""
        scales = self.stored_scales
        if self.numbers is None or self.scaled_per != "block":
            return scales
        return scales.index_select(-1, self.numbers)

    @property
    def scaled_per(self) -> str | None:
        """Granularity of the scales: "tensor" (all values) or "block" (a stored block); None without scales."""
        if self.stored_scales is None:
            return None
        return "tensor" if self.stored_scales.shape == (1,) else "block"

    def _as_values(self, stored: Tensor) -> Tensor:
        """A tensor of the shape of `stored` as one of the shape of `values`."""
        if self.numbers is None:
            return stored
        turned = bits(stored).index_select(-3, self.numbers).transpose(-1, -2).contiguous()
        return of_bits(turned, stored.dtype)

    @property
    def indices(self) -> tuple[Tensor, Tensor]:
        """(crow_indices, col_indices); of a transposed view those of `base`."""
        base = self if self.base is None else self.base
        return base.crow_indices, base.col_indices

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
        items = self.shape[0] if self.batch == "patterns" else 1
        table = torch.zeros(items * self.n_block_rows, self.n_block_cols, dtype=torch.int8, device=self.device)
        table[self.row_of_block().long(), self.col_indices.long()] = FULL
        return table.view(items, self.n_block_rows, self.n_block_cols).cpu(), "matrix"

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


def _indices_of(made: tuple) -> tuple:
    return made[:3]


# torch.load(weights_only=True) then makes instances, by __setstate__ and of nothing but tensors and numbers.
torch.serialization.add_safe_globals([BsrMatrix])


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
        dtype, index_dtype: of the values and of the indices; for float8 values see BsrMatrix.quantize.
        device, generator: where all is drawn, and by what; the generator must be of that device.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: extents do not divide, or not exactly one of per_row and density is given and in range.
    """
    arguments.check_dtypes(dtype, index_dtype, torch.empty(0, device=device).device)
    shape, blocksize = arguments.pair(shape, "shape"), arguments.pair(blocksize, "blocksize")
    rows, cols = arguments.block_grid(shape, blocksize)
    if (per_row is None) == (density is None):
        raise ValueError(f"give either per_row or density, got per_row={per_row} and density={density}")
    scores = torch.rand(rows, cols, device=device, generator=generator)
    if per_row is not None:
        if not 0 <= operator.index(per_row) <= cols:
            raise ValueError(f"per_row is {per_row}; it must be in [0, {cols}], the blocks in a block-row")
        col = scores.argsort(dim=1)[:, :per_row].sort(dim=1).values.flatten()
        crow = torch.arange(rows + 1, dtype=index_dtype, device=scores.device) * per_row
    else:
        arguments.check_density(density)
        row, col = (scores < density).nonzero(as_tuple=True)
        crow = row_starts(row, rows, index_dtype)
    values = torch.randn(len(col), *blocksize, dtype=dtype, device=scores.device, generator=generator)
    return BsrMatrix._make(crow, col.to(index_dtype), values.mul_(scale), shape, even=per_row is not None)
