"""Bsr24: a block-sparse matrix with 2:4 structured sparsity inside of its stored blocks.

A BsrMatrix (M, K) with blocks (bm, bk), of which two of every four neighbours in a row are stored, is two things:

    compressed    the BsrMatrix (M, K / 2) with blocks (bm, bk / 2) of what is stored: the pattern, and half the values
    metadata      (nnz, bk / 64, bm / 64, 128) int32: which two of four they are, as sparse WGMMA and mma.sp read it

BsrMatrix's own module imports this one, which knows it as a LikeTensor.

Of 64 rows and 64 columns metadata are 128 words, in the order of cute_kernels.sparse24.format. Those of a row tile of a
block and 64 columns are one piece of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT8
from cute_kernels.sparse24.format import GROUP, KEPT, SLAB, SPAN, WORDS, compress, expand, pack_metadata, prune_2_4
from cute_kernels.sparse24.format import unpack_metadata as unpack

from .. import checks as arguments
from ..like_tensor import FUNCTIONS, LikeTensor

WORKS = (
    "with a Bsr24 W these work: W @ b, torch.matmul(W, b), torch.nn.functional.linear(x, W, bias), bsr_matmul, "
    "bsr_linear, bsr_gated_linear and bsr_grouped_linear of sparse_collective; for anything else take W.to_bsr()"
)


class Bsr24:
    """An (M, K) matrix, or a batch (L, M, K), of which some (bm, bk) blocks are stored, and half of each.

    `W.prune_2_4()` of a BsrMatrix W makes one, and `Bsr24.from_bsr(W)` of one whose blocks are 2:4 sparse already.
    `bsr_matmul(V, b)` and `bsr_linear(x, V)` multiply it, as do V @ b and torch.nn.functional.linear(x, V, bias).
    Kernels multiply bfloat16 and float16, by sparse WGMMA on sm_90 and by mma.sp on sm_80 and newer, and float8 on
    sm_89 and sm_90, of blocks whose bk is a multiple of 128, with scales as a BsrMatrix has them. On the CPU torch
    multiplies the stored blocks, in all dtypes. torch.compile takes products of 16 bits. There is no gradient and no
    transposed view: these raise.

    Args:
        compressed: (M, K / 2) BsrMatrix with blocks (bm, bk / 2), or a batch: of every four neighbours in a row of a
            block the two that are stored, in their order. bm and bk are multiples of 64. No transposed view. Of float8
            its scales are those of the whole blocks.
        metadata: int32 on its device, contiguous, (nnz, bk / 64, bm / 64, 128); of a batch with one pattern
            (L, nnz, bk / 64, bm / 64, 128). Its contents are not looked at.

    `sparse_collective.nn.Bsr24Linear` is a module that holds one. A module of one's own keeps four buffers, which
    state_dict() then has: `crow_indices`, `col_indices`, `values` and `metadata`;
    `Bsr24(BsrMatrix(crow_indices, col_indices, values, (M, K // 2)), metadata)` is the way back, and copies nothing.
    torch.save and torch.load(weights_only=True) take the matrix itself.

    Raises:
        TypeError: compressed is no BsrMatrix, or metadata are no int32 tensor.
        ValueError: compressed is a transposed view, blocks are no multiples of 64, or metadata do not fit.
    """

    structured = True  # see BsrMatrix
    base = numbers = None  # what only a BsrMatrix may have
    __slots__ = ("compressed", "metadata")

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
        """The compressed form of W, whose stored blocks are 2:4 sparse; copies, but for scales. No gradient passes.

        On a GPU it waits for the device once, to check the values.

        Raises:
            TypeError: W is no BsrMatrix.
            ValueError: blocks are no multiples of 64, or a group of 4 has more than 2 elements that are not zero.
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
        """A new BsrMatrix of the same numbers, with zeros inside of its blocks where nothing is stored."""
        bm, bk = self.blocksize
        values = expand(self.values, unpack_blocks(self.metadata, bm, bk, self.dtype.itemsize))
        return _of_pattern(self.compressed, values, self.shape)

    def quantize(self, dtype: torch.dtype = torch.float8_e4m3fn, per: str = "block") -> Bsr24:
        """The same matrix with 8-bit values and their scales, as BsrMatrix.quantize makes them; raises as it does."""
        return self._with(self.compressed.quantize(dtype, per))

    def to_dense(self) -> Tensor:
        """A new (M, K) or (L, M, K) tensor, with zeros where nothing is stored."""
        return self.to_bsr().to_dense()

    def to(self, *args, **kwargs) -> Bsr24:
        """On another device, or with values of another dtype, by BsrMatrix.to; itself where nothing changes.

        Metadata are shared where the device and their order stay: that of float8 is another. Raises as BsrMatrix.to
        does.
        """
        return self._with(self.compressed.to(*args, **kwargs))

    def _with(self, compressed: LikeTensor) -> Bsr24:
        """The same blocks with other values; itself where nothing changes."""
        if compressed is self.compressed:
            return self
        metadata = self.metadata.to(compressed.device)
        if (self.dtype in FLOAT8) != (compressed.dtype in FLOAT8):
            places = unpack_blocks(metadata, *self.blocksize, self.dtype.itemsize)
            metadata = pack_blocks(places, compressed.dtype.itemsize)
        return Bsr24(compressed, metadata)

    def cuda(self, device: torch.device | int | None = None, non_blocking: bool = False) -> Bsr24:
        """On a GPU, the current one unless told."""
        return self._with(self.compressed.cuda(device, non_blocking))

    def cpu(self) -> Bsr24:
        """On the CPU."""
        return self.to("cpu")

    def check_indices(self) -> None:
        """As BsrMatrix.check_indices; products call it before they first read this matrix."""
        self.compressed.check_indices()

    def __matmul__(self, b: Tensor) -> Tensor:
        """bsr_matmul(self, b); of a vector b (K,) the vector (M,)."""
        return FUNCTIONS[torch.matmul](self, b)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """TypeError: there is no transposed view, which x @ W would multiply."""
        return FUNCTIONS[torch.matmul](x, self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """torch.matmul(W, b) and torch.nn.functional.linear(x, W, bias); TypeError of any other function."""
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
        """(bm, bk), of the whole block."""
        return self.compressed.blocksize[0], KEPT * self.compressed.blocksize[1]

    @property
    def key(self) -> tuple:
        """What an op's plan depends on, hashable."""
        return "2:4", *self.compressed.key

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """(crow_indices, col_indices, metadata)"""
        return *self.compressed.indices, self.metadata

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; of a stored block half is stored."""
        return self.compressed.density

    @property
    def nbytes(self) -> int:
        """Of values, metadata, indices and scales."""
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
        """Nothing vouches for what was stored: it is checked as the constructor does."""
        self.__init__(*state)


def _forward(name: str, text: str) -> property:
    return property(lambda self: getattr(self.compressed, name), doc=text)


for _name, _text in {
    "crow_indices": "(M / bm + 1,) or (L, M / bm + 1); see BsrMatrix.",
    "col_indices": "(nnz,) each block's column.",
    "values": "(nnz, bm, bk / 2), or (L, nnz, bm, bk / 2) of a batch with one pattern.",
    "stored": "What kernels read: the values.",
    "scales": "Of float8 values: (1,), or one for each stored block; see BsrMatrix.",
    "stored_scales": "What kernels read: the scales.",
    "scaled_per": "What a scale is for; see BsrMatrix.",
    "batch": "None, or in which form a batch is stored; see BsrMatrix.",
    "nnz": "Stored blocks.",
    "n_block_rows": "M / bm.",
    "n_block_cols": "K / bk.",
    "dtype": "Of the values.",
    "device": "Where all tensors are.",
    "requires_grad": "Whether the values require a gradient, which products refuse.",
    "check": "Whether operations check the indices before they first read this matrix.",
    "checked": "Whether check_indices has passed.",
    "even": "Whether all block rows are known to hold equally many blocks.",
    "stats": "Of block columns that its rows need, where known.",
    "plans": "What kernels must know of the pattern.",
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
    """What a BsrMatrix must be to have a compressed form."""
    if not isinstance(W, LikeTensor):
        raise TypeError(f"{name} must be a BsrMatrix, got {type(W).__name__}; see BsrMatrix.from_dense")
    check_blocks(name, *W.blocksize)


def _made(W: LikeTensor, values: Tensor, places: Tensor) -> Bsr24:
    """Of W's pattern."""
    shape = (*W.shape[:-1], W.shape[-1] // KEPT)
    return Bsr24(_of_pattern(W, values, shape), pack_blocks(places, values.dtype.itemsize))


def _of_pattern(W: LikeTensor, values: Tensor, shape: tuple) -> LikeTensor:
    """A matrix of the same pattern and scales with narrower or wider blocks. Its indices are copies: what is known of a
    pattern is kept with its tensors, and depends on the blocks' sides."""
    known = {"check": W.check, "checked": W.checked, "even": W.even, "stats": W.stats}
    return type(W)._make(W.crow_indices.clone(), W.col_indices.clone(), values, shape, **known, scales=W.scales)


def metadata_of_block(bm: int, bk: int) -> tuple[int, int, int]:
    """The shape of a block's metadata."""
    return bk // SPAN, bm // SLAB, WORDS


def pack_blocks(places: Tensor, width: int) -> Tensor:
    """(..., bk / 64, bm / 64, 128) int32 of the places (..., bm, bk / 4, 2) of stored elements of so many bytes."""
    *outer, bm, groups, _ = places.shape
    spans, slabs, words = metadata_of_block(bm, groups * GROUP)
    places = places.flatten(0, -3)  # of all blocks, one below the other
    packed = pack_metadata(places, width)[:spans, : len(places) // SLAB]
    return packed.unflatten(1, (-1, slabs)).transpose(0, 1).reshape(*outer, spans, slabs, words).contiguous()


def unpack_blocks(metadata: Tensor, bm: int, bk: int, width: int) -> Tensor:
    """The places (..., bm, bk / 4, 2) int64 that pack_blocks packed."""
    blocks = metadata.flatten(0, -4)
    below = blocks.transpose(0, 1).flatten(1, 2)  # (bk / 64, slabs of all blocks, 128)
    return unpack(below, len(blocks) * bm, bk, width).view(*metadata.shape[:-3], bm, bk // GROUP, KEPT)


# torch.load(weights_only=True) then makes instances, by __setstate__.
torch.serialization.add_safe_globals([Bsr24])
