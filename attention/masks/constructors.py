"""Constructors of BlockMask from tables, lists, patterns, elements and FlexAttention's masks.

None synchronizes, except from_flex with check=True.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from cute_kernels.runtime.derived import Derived
from sparse_collective.bsr import BsrMatrix
from sparse_collective.checks import describe, is_strided, pair

from . import block_lists, convert
from .block_lists import band_tables, grid
from .mask_mods import And, Band, MaskMod, ValidKeys, both

TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class Constructors:
    """Mixin of BlockMask, which has __init__ and the attributes."""

    __slots__ = ()
    n_block_cols: int

    if TYPE_CHECKING:

        def __init__(self, *lists: Tensor | None, lengths, blocksize, mask_mod=None, check: bool = True) -> None: ...

        def _set(self, **attributes: object) -> None: ...

    @classmethod
    def _of_tables(cls, partial: Tensor, full: Tensor, lengths, blocksize, mask_mod) -> Self:
        """The mask of two bool tables (..., Mq, Mk) that are correct by construction."""
        partial, full = (t[(None,) * (4 - t.dim())] for t in (partial, full))
        lists = *block_lists.lists_of(partial), *block_lists.lists_of(full)
        return cls(*lists, lengths=lengths, blocksize=blocksize, mask_mod=mask_mod, check=False)

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        blocksize: Sequence[int] = (128, 128),
        *,
        lengths: Sequence[int] | None = None,
        partial: Tensor | None = None,
        mask_mod: MaskMod | None = None,
        causal: bool = False,
    ) -> Self:
        """Create the mask that computes these blocks. Does not synchronize.

        Args:
            blocks: (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) bool, True where a block is computed.
            blocksize: (block_q, block_k).
            lengths: (Sq, Sk); None: the extent of the blocks.
            partial: bool, broadcastable to `blocks`, True for partial blocks, in which mask_mod is evaluated. mask_mod
                must be True everywhere in the other blocks, where it is not evaluated. None: all blocks are partial.
            mask_mod: the element mask of partial blocks.
            causal: True to mask columns after the row's position, row + Sk - Sq: removes the blocks past it and makes
                the blocks that it crosses partial.

        Raises:
            TypeError: `blocks` or `partial` is not a strided bool tensor.
            ValueError: a shape, device, length or block is wrong, or `partial` is given without mask_mod.
        """
        for name, t in (("blocks", blocks), ("partial", partial)):
            if (t is not None or name == "blocks") and (not is_strided(t) or t.dtype is not torch.bool):
                raise TypeError(f"{name} must be a strided bool tensor, got {describe(t)}")
        if not 2 <= blocks.dim() <= 4:
            raise ValueError(f"blocks must be (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk), got {tuple(blocks.shape)}")
        blocksize = pair(blocksize, "blocksize")
        if lengths is None:
            lengths = tuple(n * side for n, side in zip(blocks.shape[-2:], blocksize, strict=True))
        (sq, sk), blocksize, rows, cols = grid(lengths, blocksize)
        if blocks.shape[-2:] != (rows, cols):
            raise ValueError(
                f"blocks must have shape (..., {rows}, {cols}) for lengths {(sq, sk)}, got {tuple(blocks.shape)}"
            )
        if partial is not None:
            if mask_mod is None:
                raise ValueError("partial requires mask_mod, the element mask of partial blocks; pass both")
            if partial.device != blocks.device:
                raise ValueError(
                    f"partial must be on the device of blocks, {blocks.device}, got {partial.device}; "
                    f"call partial.to({str(blocks.device)!r})"
                )
            try:
                partial = partial.expand_as(blocks)
            except RuntimeError:
                raise ValueError(
                    f"partial must broadcast to the shape of blocks, {tuple(blocks.shape)}, got {tuple(partial.shape)}"
                ) from None
        # Without a bound, the blocks that extend past the last column are the ones that `every` excludes.
        some, every = band_tables((sq, sk), blocksize, None, 0 if causal else None, blocks.device)
        masked = ~every if mask_mod is None else ~every | (True if partial is None else partial)
        if causal:
            blocks, mask_mod = blocks & some, both(mask_mod, Band(None, 0, sk - sq))
        return cls._of_tables(blocks & masked, blocks & ~masked, (sq, sk), blocksize, mask_mod)

    @classmethod
    def from_indices(
        cls,
        indices: Tensor,
        blocksize: Sequence[int] = (128, 128),
        *,
        lengths: Sequence[int],
        mask_mod: MaskMod | None = None,
        block_sizes: Tensor | None = None,
        padded: bool = False,
    ) -> Self:
        """Create the mask that computes equally many blocks in each row, such as the top k of a step of generation.

        Takes some microseconds and launches nothing: the kernels read `indices` itself, and forward attention needs
        nothing else that depends on its contents. Create it inside of what a CUDA graph captures if its contents change
        between replays.

        Args:
            indices: (B, H, Mq, top) int32, contiguous: the columns of blocks of each row, in any order. B and H may be
                1. A row must not list a column twice, which is not checked: forward would count it twice.
            blocksize, lengths: see BlockMask.
            mask_mod: the element mask of all listed blocks; None: no element is masked, but columns past the last one.
            block_sizes: (Mk,) int32, the number of valid keys in each block of columns, for tiles of a video that end
                in padding: the first keys of a block are valid, and the others are masked. Its contents may change.
                Rows of padding attend like other rows, so their outputs must be ignored, and their gradients be 0.
                None: all keys are valid.
            padded: True if rows may list fewer blocks: entries that are no column, such as -1, are ignored, wherever
                they are. Kernels then compare each column with the last one, as they do with a mask_mod. False: all
                entries are columns, which is checked on the CPU, and not on a GPU, where it would synchronize. There an
                entry that is no column is ignored, too, but if no element is masked (without mask_mod and block_sizes,
                and Sk a multiple of block_k), forward counts it as a block of keys and values that are 0. No memory
                outside of K and V is read for it, and other rows are not affected.

        Raises:
            TypeError: `indices` or block_sizes is not a strided int32 tensor, or mask_mod is not callable.
            ValueError: a shape, stride, length, device or block is wrong.
            IndexError: an entry of a list on the CPU is no column, and `padded` is False.

        Example:
            top = scores.topk(64, sorted=False).indices.int()  # (B, H, Mq, 64), of scores (B, H, Mq, Mk)
            mask = BlockMask.from_indices(top, (64, 64), lengths=(q.shape[2], k.shape[2]))
            out = block_sparse_attention(q, k, v, mask)
        """
        if not is_strided(indices) or indices.dtype is not torch.int32:
            raise TypeError(f"indices must be a strided int32 tensor, got {describe(indices)}")
        if indices.dim() != 4:
            raise ValueError(f"indices must be (B, H, Mq, top), got shape {tuple(indices.shape)}")
        lengths, blocksize = pair(lengths, "lengths"), pair(blocksize, "blocksize")
        if block_sizes is not None:
            mask_mod = _with_sizes(block_sizes, mask_mod, -(-lengths[1] // blocksize[1]), blocksize[1], indices.device)
        full = mask_mod is None and not padded and lengths[1] % blocksize[1] == 0
        mask = cls.of_equal_rows(indices, full, lengths=lengths, blocksize=blocksize, mask_mod=mask_mod)
        if not padded:
            block_lists.check_columns(indices, mask.n_block_cols)
        return mask

    @classmethod
    def of_equal_rows(cls, indices: Tensor, full: bool, **facts) -> Self:
        """The mask of `from_indices` whose blocks are all full, or all partial. facts: those of BlockMask."""
        count, none = block_lists.equal_counts(indices)
        partial, empty = (count, indices), (none, indices[..., :0])
        return cls._of_one_kind((*empty, *partial) if full else (*partial, *empty), indices, "equal_rows", **facts)

    @classmethod
    def of_partial(cls, counts: Tensor, indices: Tensor, **facts) -> Self:
        """The mask of partial blocks with these counts (B, H, Mq) and ascending columns (B, H, Mq, width), of which
        those past the counts may be anything. facts: those of BlockMask.

        For lists that a kernel made for one call: their query tiles are begun by row and not sorted by length.
        """
        _, none = block_lists.equal_counts(indices)
        return cls._of_one_kind((counts, indices, none, indices[..., :0]), indices, "by_row", **facts)

    @classmethod
    def _of_one_kind(cls, lists: tuple, indices: Tensor, flag: str, *, lengths, blocksize, mask_mod=None) -> Self:
        """The mask of four lists that differ from valid ones in the shape and strides of `indices` at most, of which
        `flag` is true if they list any block. The constructor takes three times as long."""
        (sq, sk), (block_q, block_k), rows, cols = grid(lengths, blocksize)
        batch, heads, length, width = indices.shape
        contiguous = indices.is_contiguous() and (mask_mod is None or callable(mask_mod))
        if not contiguous or length != rows or width > cols or not batch or not heads:
            return cls(*lists, lengths=lengths, blocksize=blocksize, mask_mod=mask_mod, check=False)  # raises
        mask = object.__new__(cls)
        mask._set(
            **dict(zip(TABLES, lists, strict=True)), lengths=(sq, sk), blocksize=(block_q, block_k), mask_mod=mask_mod,
            batch=batch, heads=heads, n_block_rows=rows, n_block_cols=cols, equal_rows=False, by_row=False,
            derived=Derived(),
        )  # fmt: skip
        if width > 0:
            mask._set(**{flag: True})
        return mask

    @classmethod
    def from_bsr(
        cls,
        pattern: BsrMatrix | Tensor,
        *,
        lengths: Sequence[int] | None = None,
        heads: int | None = None,
        mask_mod: MaskMod | None = None,
        causal: bool = False,
    ) -> Self:
        """Create the mask that computes the stored blocks of a BsrMatrix or torch.sparse_bsr tensor; its values are
        ignored.

        Does not synchronize, and does not validate the contents of the indices (see BsrMatrix.check_indices).

        Args:
            pattern: the matrix, with blocks with sides of 64 or 128. In a batch of L patterns, pattern l belongs to
                head l % heads of batch index l // heads.
            lengths: (Sq, Sk), which may end inside the last blocks; None: the matrix's extents.
            heads: number of heads of a batch; None: L.
            mask_mod, causal: as for from_blocks.

        Raises:
            TypeError: `pattern` is neither.
            ValueError: a side of its blocks is neither 64 nor 128, or lengths or heads do not match.
        """
        blocks, blocksize = convert.blocks_of_bsr(pattern, heads)
        return cls.from_blocks(blocks, blocksize, lengths=lengths, mask_mod=mask_mod, causal=causal)

    @classmethod
    def from_elements(
        cls, seen: Tensor, blocksize: Sequence[int] = (128, 128), *, lengths: Sequence[int] | None = None
    ) -> Self:
        """Create the mask of a bool tensor with an entry per score, True where it is unmasked. Does not synchronize.

        Reads each entry once to find the blocks, and holds `seen`, whose entries kernels read in partial blocks. So
        `seen` must not be written to.

        Args:
            seen: (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk) bool, any strides. Sq and Sk may be 1 for a mask that does not
                depend on the row or the column; `lengths` then gives their number.
            lengths: (Sq, Sk); None: those of `seen`.

        Raises:
            TypeError: `seen` is not a strided bool tensor.
            ValueError: lengths or block sizes are unsupported, or `seen` does not have these lengths.
        """
        if not is_strided(seen) or seen.dtype is not torch.bool:
            raise TypeError(f"seen must be a strided bool tensor, got {describe(seen)}")
        if not 2 <= seen.dim() <= 4:
            raise ValueError(f"seen must be (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), got {tuple(seen.shape)}")
        lengths, blocksize, _, _ = grid(tuple(seen.shape[-2:]) if lengths is None else lengths, blocksize)
        if any(actual not in (1, expected) for actual, expected in zip(seen.shape[-2:], lengths, strict=True)):
            raise ValueError(f"seen must broadcast to (..., {lengths[0]}, {lengths[1]}), got shape {tuple(seen.shape)}")
        partial, full, mask_mod = convert.of_elements(seen, lengths, blocksize)
        return cls._of_tables(partial, full, lengths, blocksize, mask_mod)

    @classmethod
    def from_flex(cls, mask: FlexBlockMask, *, check: bool = False) -> Self:
        """Convert FlexAttention's mask: its lists, not copied if they are contiguous, and its mask_mod, None for
        noop_mask.

        If Sk is not a multiple of block_k, full blocks that extend past the last column become partial, which copies;
        create_block_mask makes no such blocks. Does not synchronize unless check is True: lists passed to
        BlockMask.from_kv_blocks by hand may be unsorted.

        Raises:
            TypeError: `mask` is not a torch.nn.attention.flex_attention.BlockMask.
            ValueError: a side of its blocks is neither 64 nor 128, or, with check, a list is invalid.
        """
        lists, facts = convert.lists_of_flex(mask)
        return cls(*lists, **facts, check=check)


def _with_sizes(sizes: Tensor, mask_mod: MaskMod | None, cols: int, side: int, device) -> MaskMod:
    """mask_mod, and the mask of padding after the valid keys of each block of columns."""
    if not is_strided(sizes) or sizes.dtype is not torch.int32:
        raise TypeError(f"block_sizes must be a strided int32 tensor, got {describe(sizes)}")
    if sizes.shape != (cols,):
        raise ValueError(f"block_sizes must have shape ({cols},), the blocks of a row, got {tuple(sizes.shape)}")
    if sizes.device != device:
        raise ValueError(f"block_sizes must be on the device of indices, {device}, got {sizes.device}")
    valid = ValidKeys(sizes, side)
    return valid if mask_mod is None else And(valid, mask_mod)
