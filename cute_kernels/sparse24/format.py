"""2:4 structured sparsity: at most 2 of every 4 neighbors in a row are nonzero, and only 2 are stored.

A matrix of M rows and K columns consists of two tensors:

    values      (M, K / 2): the two stored elements of each group of 4, in their order
    metadata    their positions in the group, 2 bits each, in the layout that sparse WGMMA and mma.sp read

Each group has 4 bits of metadata: bits 0 and 1 are the position of its first stored element, bits 2 and 3 that of the
second. 64 rows and 64 columns have 128 words of 32 bits, word t for thread t of a warpgroup, whose four warps have 16
rows each:

    metadata    (K / 64, M / 64, 128) int32; M rounded up to 256, K to 128

A row tile of 64, 128 or 256 rows finds its metadata of 64 columns in one contiguous piece of memory, which a warp reads
in order. Padding has the positions 0 and 1, since two equal positions are undefined.

16-bit elements (and 32-bit and 64-bit ones, which no kernel multiplies): an instruction multiplies 64 rows by 32
columns. By the PTX ISA ("Sparse WGMMA .m64nNk32 metadata layout", the figure of mma.sp.m16n8k32), lane 4 g + 2 s + h of
a warp, with g < 8, h < 2 and a sparsity selector s of 0 or 1, has

    bits 0 to 15    row g, columns 16 h to 16 h + 15: four groups, the first one in the lowest 4 bits
    bits 16 to 31   row g + 8, the same columns

The lanes of the other selector are not read. So one register per thread has the words of two consecutive instructions
along K: lanes with s = 0 hold the first one's, lanes with s = 1 the second one's.

FP8 elements: an instruction multiplies 64 rows by 64 columns. All lanes have metadata, and the sparsity selector is 0.
By the ISA ("Sparse WGMMA .m64nNk64 metadata layout", the figures of mma.sp.m16n8k64), lane 4 g + 2 h + r, with h < 2
and r < 2, has

    bits 0 to 31    row g + 8 r, columns 32 h to 32 h + 31: eight groups, the first one in the lowest 4 bits
"""

import torch
from torch import Tensor

from ..checks import check_tensor
from ..dtypes import FLOAT8
from ..tile.element import VECTOR_BYTES
from .cutlass import meta_of_cutlass, places_of_cutlass
from .like_tensor import LikeTensor, Transposed24

GROUP = 4  # columns, of which KEPT are stored
KEPT = 2
SLAB, SPAN = 64, 64  # rows and columns per WORDS words (of 32 bits) of metadata
WORDS = 128
ROWS, COLUMNS = 256, 128  # metadata rounds M and K up to these: the tallest tile, the longest K-tile
WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = (*WIDE, *FLOAT8)
FILL = 0b0100  # places 0 and 1


def prune_2_4(w: Tensor) -> Tensor:
    """Set the 2 smallest magnitudes of every 4 neighbors along the last dimension to zero.

    Args:
        w: (..., K) with a floating-point dtype, FP8 included, on any device; K must be a multiple of 4.

    Returns:
        A new tensor of w's shape and dtype. Among equal magnitudes the first ones are kept; NaN counts as the largest.
        Gradients pass to the kept elements.

    Raises:
        TypeError: w is not a floating-point tensor.
        ValueError: K is not a multiple of 4.

    Example:
        >>> prune_2_4(torch.tensor([1.0, -4.0, 2.0, 3.0]))
        tensor([ 0., -4.,  0.,  3.])
    """
    check_tensor("prune_2_4: w", w)
    if not w.is_floating_point():
        raise TypeError(f"prune_2_4: w must have a floating-point dtype, got {w.dtype}")
    check_groups("prune_2_4: w", w)
    with torch.no_grad():
        wide = w.detach() if w.dtype.itemsize > 1 else w.detach().to(torch.float32)
        magnitudes = wide.abs().unflatten(-1, (-1, GROUP))  # (..., K / 4, 4)
        order = magnitudes.argsort(dim=-1, descending=True, stable=True)
        keep = torch.zeros_like(magnitudes, dtype=torch.bool).scatter_(-1, order[..., :KEPT], True).flatten(-2)
    if w.dtype.itemsize == 1:  # torch.where does not support FP8
        return torch.where(keep, w.detach().view(torch.uint8), 0).view(w.dtype)
    return torch.where(keep, w, 0.0)


def check_groups(name: str, w: Tensor) -> None:
    if w.dim() < 1 or w.shape[-1] % GROUP:
        raise ValueError(
            f"{name} has shape {tuple(w.shape)}; its last dimension must be a multiple of {GROUP}, of which {KEPT} "
            "are kept"
        )


class Sparse24(LikeTensor):
    """A 2:4 sparse matrix: at most 2 of every 4 neighbors in a row are nonzero. `Sparse24.from_dense(w)` makes one.

    Attributes:
        values: (M, K / 2), contiguous along K / 2, rows at multiples of 16 bytes.
        metadata: int32 (K / 64, M / 64, 128), K rounded up to 128 and M to 256; see cute_kernels.sparse24.format. Its
            order differs between FP8 and wider elements.
        shape: torch.Size((M, K)).

    `gemm(W, b)` multiplies it, and with FP8 values `gemm(W, b, scale_a=scale)`. W @ b, x @ W.t(), torch.matmul and
    torch.nn.functional.linear(x, W, bias) work, too. None of them computes gradients. A Sparse24 is immutable except
    for the contents of `values`; it shares its tensors.

    Example:
        W = Sparse24.from_dense(prune_2_4(weight))  # (M, K)
        y = torch.nn.functional.linear(x, W, bias)
    """

    __slots__ = ("metadata", "shape", "values")

    def __init__(self, values: Tensor, metadata: Tensor, shape: tuple[int, int]):
        """Wrap tensors in the layout of `from_dense`.

        Raises:
            TypeError, ValueError: dtypes, shapes, strides or devices do not fit. Contents are not checked.
        """
        check_tensor("Sparse24: values", values)
        check_tensor("Sparse24: metadata", metadata)
        M, K = shape
        if values.dtype not in DTYPES:
            raise TypeError(f"Sparse24: values are {values.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if metadata.dtype != torch.int32:
            raise TypeError(f"Sparse24: metadata is {metadata.dtype}; it must be torch.int32")
        if K % GROUP:
            raise ValueError(f"Sparse24: shape is {M}x{K}; K must be a multiple of {GROUP}, of which {KEPT} are stored")
        if tuple(values.shape) != (M, K // KEPT):
            raise ValueError(f"Sparse24: values have shape {tuple(values.shape)}, of {M}x{K} it is {(M, K // KEPT)}")
        if tuple(metadata.shape) != metadata_shape(M, K) or not metadata.is_contiguous():
            raise ValueError(
                f"Sparse24: metadata has shape {tuple(metadata.shape)} and strides {metadata.stride()}; of {M}x{K} it "
                f"is {metadata_shape(M, K)}, contiguous"
            )
        # Bulk copies require such addresses. torch.compile cannot trace the check; the tensors of a compiled call
        # belong to a layer, which was checked when it was made.
        if not torch.compiler.is_compiling() and metadata.storage_offset() * metadata.itemsize % VECTOR_BYTES:
            raise ValueError(
                f"Sparse24: metadata must begin at a multiple of {VECTOR_BYTES} bytes in its storage, got an offset of "
                f"{metadata.storage_offset()} elements; pass metadata.clone()"
            )
        if metadata.device != values.device:
            raise ValueError(f"Sparse24: metadata is on {metadata.device}, values are on {values.device}")
        self.values, self.metadata, self.shape = values, metadata, torch.Size(shape)

    @classmethod
    def from_dense(cls, w: Tensor) -> "Sparse24":
        """Compress w (M, K) with any strides, K a multiple of 4, in bfloat16, float16, float32, float64, float8_e4m3fn
        or float8_e5m2.

        For FP8, quantize first: `values, scale = quantize(prune_2_4(w), per="row")`, then compress the values and pass
        the scale to gemm. On a GPU the call synchronizes once, to check w.

        Raises:
            TypeError: w has another dtype.
            ValueError: w is not a matrix, or a group of 4 has more than 2 nonzeros; see prune_2_4.
        """
        check_tensor("Sparse24.from_dense: w", w)
        if w.dtype not in DTYPES:
            raise TypeError(
                f"Sparse24.from_dense: w is {w.dtype}; use one of {', '.join(map(str, DTYPES))} (cast with .to())"
            )
        if w.dim() != 2:
            raise ValueError(f"Sparse24.from_dense: w has {w.dim()} dimensions; it must be a matrix (M, K)")
        check_groups("Sparse24.from_dense: w", w)
        M, K = w.shape
        values, places, crowded = compress(w.detach())
        if crowded.any():
            row, group = (int(i) for i in crowded.nonzero()[0])
            raise ValueError(
                f"Sparse24.from_dense: {int(crowded.sum())} groups of {GROUP} columns have more than {KEPT} nonzeros, "
                f"the first in row {row}, columns {GROUP * group} to {GROUP * group + GROUP - 1}; prune_2_4(w) leaves "
                f"{KEPT} of each"
            )
        values = rows_for_tma(values)
        return cls(values, pack_metadata(places, values.dtype.itemsize), (M, K))

    @classmethod
    def from_torch(cls, t: Tensor) -> "Sparse24":
        """Convert a tensor made by `torch.sparse.to_sparse_semi_structured`; copies the stored elements.

        For torch's CUTLASS tensors only the metadata is reordered: values are bitwise identical, and the call does not
        synchronize. For float32 torch keeps 1 of 2 elements, which is 2 of 4. cuSPARSELt's metadata layout is not
        documented, so its tensors are converted by t.to_dense().

        Raises:
            TypeError: t is not such a tensor, or has dtype int8 or FP8.
            ValueError: t has only the compressed form of its transpose.
        """
        if not isinstance(t, torch.sparse.SparseSemiStructuredTensor):
            raise TypeError(f"Sparse24.from_torch: t must be a SparseSemiStructuredTensor, got {type(t).__name__}")
        if t.dtype not in WIDE:
            raise TypeError(f"Sparse24.from_torch: t is {t.dtype}; known are {', '.join(map(str, WIDE))}")
        if t.packed is None:
            raise ValueError("Sparse24.from_torch: t is a transposed view, and has no compressed rows; pass t.t()")
        if t.meta is None or t.meta.dim() != 2:
            return cls.from_dense(t.to_dense())
        places = places_of_cutlass(t.meta)
        if t.dtype.itemsize == 4:  # four bits describe two elements, counted as four halves
            places = places[..., 0].unflatten(-1, (-1, 2)) // 2 + torch.tensor([0, 2], device=places.device)
        M, K = t.shape
        return cls(rows_for_tma(t.packed.detach().clone()), pack_metadata(places, t.dtype.itemsize), (M, K))

    def to_torch(self) -> Tensor:
        """Convert to torch.sparse.SparseSemiStructuredTensorCUTLASS, on any device; copies the stored elements.

        torch multiplies these on sm_80, sm_86 and sm_89 only. For cuSPARSELt tensors, which sm_90 supports, use
        torch.sparse.to_sparse_semi_structured(W.to_dense()).

        Raises:
            TypeError: values are neither bfloat16 nor float16 (for float32, torch keeps 1 of 2).
            ValueError: M is not a multiple of 32, K is not a multiple of 64, or either is 0.
        """
        M, K = self.shape
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"Sparse24.to_torch: values are {self.dtype}; torch keeps 2 of 4 of bfloat16 and float16")
        if M % 32 or K % 64 or M * K == 0:
            raise ValueError(f"Sparse24.to_torch: {M}x{K}; torch takes rows in multiples of 32, columns of 64; pad W")
        meta = meta_of_cutlass(self.places())
        values = self.values.clone(memory_format=torch.contiguous_format)
        return torch.sparse.SparseSemiStructuredTensorCUTLASS(self.shape, values, meta, None, None, None)

    def to_dense(self) -> Tensor:
        """(M, K), contiguous, with zeros where nothing is stored."""
        return expand(self.values, self.places())

    def t(self) -> Transposed24:
        """The (K, M) view for x @ W.t()."""
        return Transposed24(self)

    def places(self) -> Tensor:
        """(M, K / 4, 2) int64: which two of each group are stored."""
        M, K = self.shape
        return unpack_metadata(self.metadata, M, K, self.dtype.itemsize)

    def to(self, *device_or_dtype, **terms) -> "Sparse24":
        """Convert device or dtype like torch.Tensor.to; returns self if nothing changes.

        Metadata is reordered for the new dtype. For FP8 with a scale see `from_dense`.
        """
        values = self.values.to(*device_or_dtype, **terms)
        if values is self.values:
            return self
        M, K = self.shape
        metadata = reordered(self.metadata.to(values.device), (M, K), self.dtype, values.dtype)
        return type(self)(rows_for_tma(values), metadata, (M, K))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """True if the values require a gradient, which GEMMs of a Sparse24 refuse."""
        return self.values.requires_grad

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.metadata.nbytes

    def __repr__(self) -> str:
        return f"Sparse24({self.shape[0]}x{self.shape[1]}, {self.dtype}, {self.device})"


def compress(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compress w to (values (..., K / 2), places (..., K / 4, 2) int64, (..., K / 4) bool: groups with more than 2
    nonzeros).

    A group's stored elements are its first two nonzeros, filled up with its first zeros, in ascending position.
    """
    groups = as_bits(w).unflatten(-1, (w.shape[-1] // GROUP, GROUP))
    nonzero = (groups & 0x7F if w.dtype.itemsize == 1 else groups) != 0  # ignoring the sign
    places = nonzero.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)[..., :KEPT].sort(dim=-1).values
    return groups.gather(-1, places).flatten(-2).view(w.dtype), places, nonzero.sum(-1) > KEPT


def expand(values: Tensor, places: Tensor) -> Tensor:
    """Expand values (..., K / 2) at places (..., K / 4, 2) to a contiguous (..., K), zero elsewhere."""
    bits = as_bits(values)
    groups = bits.new_zeros(*places.shape[:-1], GROUP)
    pairs = bits.unflatten(-1, (places.shape[-2], KEPT))
    return groups.scatter_(-1, places, pairs).flatten(-2).view(values.dtype)


def as_bits(t: Tensor) -> Tensor:
    """t, or its bytes if it is FP8, which torch cannot gather."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def rows_for_tma(values: Tensor) -> Tensor:
    """values with rows at multiples of 16 bytes; a copy only if they are not."""
    M, columns = values.shape
    step = max(8, VECTOR_BYTES // values.dtype.itemsize)
    if values.stride(-1) == 1 and values.stride(0) % step == 0 or columns % step == 0 and values.is_contiguous():
        return values
    wide = torch.zeros(M, -(-columns // step) * step, dtype=values.dtype, device=values.device)
    wide[:, :columns] = values
    return wide[:, :columns]


def metadata_shape(M: int, K: int) -> tuple[int, int, int]:
    """Shape of the metadata of M rows and K columns."""
    return -(-K // COLUMNS) * (COLUMNS // SPAN), -(-M // ROWS) * (ROWS // SLAB), WORDS


def pack_metadata(places: Tensor, width: int) -> Tensor:
    """Pack places (M, K / 4, 2) to metadata (K / 64, M / 64, 128) int32, in the layout at the top of this file.

    width: bytes of an element."""
    M, groups, _ = places.shape
    spans, slabs, _ = metadata_shape(M, groups * GROUP)
    bits = places.new_full((slabs * SLAB, spans * SPAN // GROUP), FILL)
    bits[:M, :groups] = places[..., 0] | places[..., 1] << 2
    if width == 1:
        words = joined(bits, 8)  # (M, K / 32), of 32 bits
        # (slab, warp, row g or g + 8, g, span, half of 64 columns)
        words = words.view(slabs, 4, 2, 8, spans, 2).permute(4, 0, 1, 3, 5, 2)  # (span, slab, warp, g, half, row)
    else:
        halves = joined(bits, 4)  # (M, K / 16), of 16 bits
        # (slab, warp, row g or g + 8, g, span, selector, half of 32 columns)
        halves = halves.view(slabs, 4, 2, 8, spans, 2, 2)
        low, high = halves.permute(4, 0, 1, 3, 5, 6, 2).unbind(-1)  # (span, slab, warp, g, selector, half)
        words = low | high << 16
    return (words - ((words >> 31) << 32)).to(torch.int32).reshape(spans, slabs, WORDS)


def unpack_metadata(metadata: Tensor, M: int, K: int, width: int) -> Tensor:
    """The places (M, K / 4, 2) int64 that pack_metadata packed."""
    spans, slabs, _ = metadata.shape
    words = metadata.to(torch.int64) & 0xFFFFFFFF
    if width == 1:
        words, count = words.view(spans, slabs, 4, 8, 2, 2).permute(1, 2, 5, 3, 0, 4), 8
    else:
        words, count = words.view(spans, slabs, 4, 8, 2, 2), 4
        words = torch.stack((words & 0xFFFF, words >> 16), -1).permute(1, 2, 6, 3, 0, 4, 5)
    words = words.reshape(slabs * SLAB, spans * SPAN // (GROUP * count), 1)
    bits = (words >> 4 * torch.arange(count, device=words.device)).flatten(1)[:M, : K // GROUP]
    return torch.stack((bits & 3, bits >> 2 & 3), -1)


def joined(bits: Tensor, count: int) -> Tensor:
    """Join `count` groups of 4 bits, (M, groups), into one word each, the first group in the lowest bits."""
    return (bits.unflatten(-1, (-1, count)) << 4 * torch.arange(count, device=bits.device)).sum(-1)


def reordered(metadata: Tensor, shape: tuple[int, int], of: torch.dtype, to: torch.dtype) -> Tensor:
    """Convert metadata of a matrix of this shape from the layout of one dtype to that of another."""
    if (of.itemsize == 1) == (to.itemsize == 1):
        return metadata
    return pack_metadata(unpack_metadata(metadata, *shape, of.itemsize), to.itemsize)
