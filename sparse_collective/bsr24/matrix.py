"""Bsr24: a block-sparse matrix with 2:4 structured sparsity inside its stored blocks.

A BsrMatrix (M, K) with blocks (bm, bk), of which two of every four neighbors in a row are stored, has two parts:

    compressed    a BsrMatrix (M, K / 2) with blocks (bm, bk / 2): the pattern and the stored half of the values
    metadata      (nnz, bk / 64, bm / 64, 128) int32: positions of the stored two of four, as sparse WGMMA and mma.sp
                  read them

BsrMatrix's own module imports this one, which knows it as a LikeTensor.

64 rows and 64 columns have 128 words of metadata, in the layout of cute_kernels.sparse24.format. The metadata of a row
tile of a block and 64 columns is contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.annotations import BlockScaleKind
from cute_kernels.dtypes import FLOAT8
from cute_kernels.runtime.torch_compat import forward_operator
from cute_kernels.sparse24.format import GROUP, KEPT, SLAB, SPAN, WORDS, compress, expand, pack_metadata, prune_2_4
from cute_kernels.sparse24.format import unpack_metadata as unpack

from .. import checks as arguments
from ..like_tensor import FUNCTIONS, LikeTensor

WORKS = (
    "supported with a Bsr24 W: W @ b, torch.matmul(W, b), torch.nn.functional.linear(x, W, bias), bsr_matmul, "
    "bsr_linear, bsr_gated_linear and bsr_grouped_linear of sparse_collective; for anything else use W.to_bsr()"
)


class Bsr24:
    """An (M, K) matrix, or a batch (L, M, K), with some (bm, bk) blocks stored, and each stored block 2:4 sparse.

    Make one with `W.prune_2_4()` from a BsrMatrix W, or with `Bsr24.from_bsr(W)` if W's blocks are 2:4 sparse already.
    `bsr_matmul(V, b)`, `bsr_linear(x, V)`, V @ b and torch.nn.functional.linear(x, V, bias) multiply it.

    | dtype | supported |
    | --- | --- |
    | bfloat16, float16 | sm_90 (sparse WGMMA), sm_80 and newer (mma.sp), torch.compile |
    | FP8, scales as in a BsrMatrix | sm_89 and sm_90, blocks whose bk is a multiple of 128 |
    | all dtypes | CPU, by torch |

    Gradients and transposed views are not supported; they raise.

    Args:
        compressed: (M, K / 2) BsrMatrix with blocks (bm, bk / 2), or a batch: the two stored elements of every four
            neighbors in a row of a block, in their order. bm and bk are multiples of 64. Not a transposed view. FP8
            scales apply to the whole blocks.
        metadata: int32 on the same device, contiguous, (nnz, bk / 64, bm / 64, 128), or for a batch with one pattern
            (L, nnz, bk / 64, bm / 64, 128). Its contents are not checked.

    `sparse_collective.nn.Bsr24Linear` is a module that holds one. Your own module can keep `crow_indices`,
    `col_indices`, `values` and `metadata` as buffers, so that state_dict() contains them;
    `Bsr24(BsrMatrix(crow_indices, col_indices, values, (M, K // 2)), metadata)` restores the matrix without copies.
    torch.save and torch.load(weights_only=True) support the matrix itself.

    Raises:
        TypeError: compressed is not a BsrMatrix, or metadata is not an int32 tensor.
        ValueError: compressed is a transposed view, blocks are not multiples of 64, or metadata does not fit.
    """

    structured = True  # see BsrMatrix
    base = None  # attribute of a BsrMatrix that a Bsr24 never has
    __slots__ = ("compressed", "metadata")

    if TYPE_CHECKING:  # the attributes that `compressed` has, defined below

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, compressed: LikeTensor, metadata: Tensor):
        if not isinstance(compressed, LikeTensor):
            raise TypeError(f"Bsr24: compressed must be a BsrMatrix, got {type(compressed).__name__}")
        if compressed.base is not None:
            raise ValueError("Bsr24: compressed is a transposed view; its blocks must be stored as (bm, bk / 2)")
        bm, bk = compressed.blocksize[0], KEPT * compressed.blocksize[1]
        check_blocks("Bsr24", bm, bk)
        if not arguments.is_strided(metadata) or metadata.dtype != torch.int32:
            raise TypeError(f"Bsr24: metadata must be a tensor of torch.int32, got {arguments.describe(metadata)}")
        expected = (*compressed.values.shape[:-2], *metadata_of_block(bm, bk))
        if tuple(metadata.shape) != expected or not metadata.is_contiguous():
            found = f"shape {tuple(metadata.shape)} and strides {metadata.stride()}"
            raise ValueError(f"Bsr24: metadata have {found}; they must be {expected}, contiguous")
        if metadata.device != compressed.device:
            raise ValueError(f"Bsr24: metadata are on {metadata.device}, values on {compressed.device}")
        self.compressed, self.metadata = compressed, metadata

    @classmethod
    def from_bsr(cls, W: LikeTensor) -> Bsr24:
        """Compress W, whose stored blocks are 2:4 sparse; copies all but the scales. No gradient passes.

        On a GPU it synchronizes once, to check the values.

        Raises:
            TypeError: W is not a BsrMatrix.
            ValueError: blocks are not multiples of 64, or a group of 4 has more than 2 nonzero elements.

        Example:
            V = Bsr24.from_bsr(W)  # of blocks that were pruned in training; else W.prune_2_4()
        """
        check_matrix("Bsr24.from_bsr: W", W)
        values, places, crowded = compress(W.values.detach())
        if crowded.any():
            *_, block, row, group = (int(i) for i in crowded.nonzero()[0])
            raise ValueError(
                f"Bsr24.from_bsr: {int(crowded.sum())} groups of {GROUP} columns have more than {KEPT} nonzeros, the "
                f"first in row {row} of stored block {block}, columns {GROUP * group} to {GROUP * group + GROUP - 1}; "
                f"W.prune_2_4() leaves {KEPT} of each"
            )
        return _made(W, values, places)

    def to_bsr(self) -> LikeTensor:
        """A new BsrMatrix with the same numbers, zero at the positions that are not stored."""
        bm, bk = self.blocksize
        values = expand(self.values, unpack_blocks(self.metadata, bm, bk, self.dtype.itemsize))
        return _of_pattern(self.compressed, values, self.shape)

    def quantize(self, dtype: torch.dtype = torch.float8_e4m3fn, per: BlockScaleKind = "block") -> Bsr24:
        """Quantize to FP8 values with scales, like BsrMatrix.quantize, with its errors."""
        return self._with(self.compressed.quantize(dtype, per))

    def to_dense(self) -> Tensor:
        """A new (M, K) or (L, M, K) tensor, zero at the positions that are not stored."""
        return self.to_bsr().to_dense()

    def to(self, *args, **kwargs) -> Bsr24:
        """Convert device or dtype like BsrMatrix.to, with its errors; returns self if nothing changes.

        Metadata is shared unless the device or its layout changes (FP8 has another layout).
        """
        return self._with(self.compressed.to(*args, **kwargs))

    def _with(self, compressed: LikeTensor) -> Bsr24:
        """The same blocks with other values; self if nothing changes."""
        if compressed is self.compressed:
            return self
        metadata = self.metadata.to(compressed.device)
        if (self.dtype in FLOAT8) != (compressed.dtype in FLOAT8):
            places = unpack_blocks(metadata, *self.blocksize, self.dtype.itemsize)
            metadata = pack_blocks(places, compressed.dtype.itemsize)
        return Bsr24(compressed, metadata)

    def cuda(self, device: torch.device | int | None = None, non_blocking: bool = False) -> Bsr24:
        """Copy to a GPU, by default the current one."""
        return self._with(self.compressed.cuda(device, non_blocking))

    def cpu(self) -> Bsr24:
        """Copy to the CPU."""
        return self.to("cpu")

    def check_indices(self) -> None:
        """Check the indices like BsrMatrix.check_indices; ops call it before they first read this matrix."""
        self.compressed.check_indices()

    def __matmul__(self, b: Tensor) -> Tensor:
        """bsr_matmul(self, b); a vector b (K,) gives a vector (M,)."""
        return FUNCTIONS[torch.matmul](self, b)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """Raise TypeError: x @ W would need a transposed view, which is not supported."""
        return FUNCTIONS[torch.matmul](x, self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Implement torch.matmul(W, b) and torch.nn.functional.linear(x, W, bias); others raise TypeError."""
        func, args = forward_operator(func, args)
        if func not in FUNCTIONS:
            raise TypeError(f"{getattr(func, '__name__', func)} does not take a Bsr24; {WORKS}")
        return FUNCTIONS[func](*args, **(kwargs or {}))

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, K) or (L, M, K)."""
        *rows, columns = self.compressed.shape
        return (*rows, KEPT * columns)

    @property
    def blocksize(self) -> tuple[int, int]:
        """(bm, bk) of the whole block."""
        return self.compressed.blocksize[0], KEPT * self.compressed.blocksize[1]

    @property
    def form(self) -> tuple:
        """Hashable key of the properties that an op's plan depends on besides pattern.stats."""
        return "2:4", *self.compressed.form

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """(crow_indices, col_indices, metadata)"""
        return *self.compressed.indices, self.metadata

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; half of each stored block is stored."""
        return self.compressed.density

    @property
    def nbytes(self) -> int:
        """Bytes of values, metadata, indices and scales."""
        tensors = self.values, self.metadata, self.crow_indices, self.col_indices, self.scales
        return sum(t.nbytes for t in tensors if t is not None)

    def __repr__(self) -> str:
        return repr(self.compressed).replace(
            f"BsrMatrix(shape={self.compressed.shape}, blocksize={self.compressed.blocksize}",
            f"Bsr24(shape={self.shape}, blocksize={self.blocksize}",
        )

    def __getstate__(self) -> tuple:
        return self.compressed, self.metadata

    def __setstate__(self, state: tuple) -> None:
        """Restore a pickled matrix, checked like the constructor's arguments."""
        Bsr24.__init__(self, *state)


def _forward(name: str, text: str) -> property:
    return property(lambda self: getattr(self.compressed, name), doc=text)


for _name, _text in {
    "crow_indices": "(M / bm + 1,) or (L, M / bm + 1); see BsrMatrix.",
    "col_indices": "(nnz,) each block's column.",
    "values": "(nnz, bm, bk / 2), or (L, nnz, bm, bk / 2) for a batch with one pattern.",
    "stored": "The values, as kernels read them.",
    "scales": "Scales of FP8 values: (1,), or one per stored block; see BsrMatrix.",
    "stored_scales": "The scales, as kernels read them.",
    "scaled_per": "The unit that has a scale; see BsrMatrix.",
    "batch": "None, or the form in which a batch is stored; see BsrMatrix.",
    "nnz": "Number of stored blocks.",
    "n_block_rows": "M / bm.",
    "n_block_cols": "K / bk.",
    "dtype": "Dtype of the values.",
    "device": "Device of all tensors.",
    "requires_grad": "True if the values require a gradient, which GEMMs refuse.",
    "check": "True if ops check the indices before they first read this matrix.",
    "checked": "True once check_indices has passed.",
    "even": "True if all block rows are known to have equally many blocks.",
    "stats": "Statistics of the block columns that its rows need, if known.",
    "pattern": "The indices of `compressed`, with half the columns.",
}.items():
    setattr(Bsr24, _name, _forward(_name, _text))


def pruned(W: LikeTensor) -> Bsr24:
    """BsrMatrix.prune_2_4."""
    check_matrix("BsrMatrix.prune_2_4: W", W)
    values, places, _ = compress(prune_2_4(W.values.detach()))
    return _made(W, values, places)


def check_blocks(name: str, bm: int, bk: int) -> None:
    if bm % SLAB or bk % SPAN:
        raise ValueError(
            f"{name}: blocks of {bm}x{bk}; metadata are those of multiples of {SLAB} rows and {SPAN} columns"
        )


def check_matrix(name: str, W) -> None:
    """Raise unless W is a BsrMatrix with blocks that can be compressed."""
    if not isinstance(W, LikeTensor):
        raise TypeError(f"{name} must be a BsrMatrix, got {type(W).__name__}; see BsrMatrix.from_dense")
    check_blocks(name, *W.blocksize)


def _made(W: LikeTensor, values: Tensor, places: Tensor) -> Bsr24:
    """A Bsr24 with W's pattern and scales."""
    shape = (*W.shape[:-1], W.shape[-1] // KEPT)
    return Bsr24(_of_pattern(W, values, shape), pack_blocks(places, values.dtype.itemsize))


def _of_pattern(W: LikeTensor, values: Tensor, shape: tuple) -> LikeTensor:
    """A matrix with the same pattern and scales and with blocks of another width. Its indices are copies, since tables
    derived from a pattern are cached with its tensors and depend on the block shape."""
    known = {"check": W.check, "checked": W.checked, "even": W.even, "stats": W.stats}
    return type(W)._make(W.crow_indices.clone(), W.col_indices.clone(), values, shape, **known, scales=W.scales)


def metadata_of_block(bm: int, bk: int) -> tuple[int, int, int]:
    """The shape of a block's metadata."""
    return bk // SPAN, bm // SLAB, WORDS


def pack_blocks(places: Tensor, width: int) -> Tensor:
    """Pack places (..., bm, bk / 4, 2) to (..., bk / 64, bm / 64, 128) int32. width: bytes of an element."""
    *outer, bm, groups, _ = places.shape
    spans, slabs, words = metadata_of_block(bm, groups * GROUP)
    places = places.flatten(0, -3)  # all blocks stacked along rows
    packed = pack_metadata(places, width)[:spans, : len(places) // SLAB]
    return packed.unflatten(1, (-1, slabs)).transpose(0, 1).reshape(*outer, spans, slabs, words).contiguous()


def unpack_blocks(metadata: Tensor, bm: int, bk: int, width: int) -> Tensor:
    """The places (..., bm, bk / 4, 2) int64 that pack_blocks packed."""
    blocks = metadata.flatten(0, -4)
    below = blocks.transpose(0, 1).flatten(1, 2)  # (bk / 64, slabs of all blocks, 128)
    return unpack(below, len(blocks) * bm, bk, width).view(*metadata.shape[:-3], bm, bk // GROUP, KEPT)


# torch.load(weights_only=True) then makes instances, by __setstate__.
torch.serialization.add_safe_globals([Bsr24])
