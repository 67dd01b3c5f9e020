"""Block masks: which blocks of the score matrix attention computes, and which elements of those it sees.

Scores (Sq, Sk) are cut into blocks of (block_q, block_k); Mq = ceil(Sq / block_q) rows of them, Mk = ceil(Sk / block_k)
columns. Of each row of blocks there are two ascending lists: of full blocks every element is seen; of partial blocks
mask_mod tells which, or, where that is None, all up to the last column. Blocks in neither list are not computed. The
storage is that of torch's FlexAttention, so its masks are taken over without a copy. patterns.py makes the usual ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from cute_kernels.runtime.derived import Derived
from sparse_collective.bsr import BsrMatrix
from sparse_collective.checks import describe, is_strided, pair

from . import block_lists, block_slices, convert
from .block_lists import band_tables, grid
from .element_mask import call
from .mask_mods import Band, MaskMod, both, moved

__all__ = ["BlockLists", "BlockMask", "create_block_mask"]

TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
NAMES = (*TABLES, "lengths", "blocksize", "mask_mod", "batch", "heads", "n_block_rows", "n_block_cols", "derived")


class BlockLists(NamedTuple):
    """The query blocks that need each KV block: counts (B, H, Mk) and indices (B, H, Mk, Mq), as in FlexAttention."""

    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


class BlockMask:
    """Which blocks of (Sq, Sk) scores are computed, for each batch item and head or for all of them.

    Shares the tensors with the caller and never copies them. The attributes are read-only, and the tensors must not be
    written to.

    Args:
        kv_num_blocks: (B, H, Mq) int32, the number of partial blocks in each row. B and H may be 1: then all batch
            items, or all heads, have the same blocks.
        kv_indices: (B, H, Mq, width) int32, width at most Mk: their columns of blocks, strictly increasing. Entries
            past the count may hold anything.
        full_kv_num_blocks, full_kv_indices: the same of full blocks, with a width of its own; both None: there are
            none. A block that goes past the last column must not be full; one that goes past the last row may be.
        lengths: (Sq, Sk).
        blocksize: (block_q, block_k), each 64 or 128.
        mask_mod: which elements of partial blocks are seen: a function of (b, h, q, kv) that torch can trace, see
            mask_mods.py and element_mask.py. None: all.
        check: whether to look at the contents of the lists, which synchronises once. With False, lists that are wrong
            make a kernel read memory that is not K's or V's.

    Raises:
        TypeError: an argument is not a strided int32 tensor, or mask_mod cannot be called.
        ValueError: a shape, stride, device, length or block is wrong, or, with check, an entry of the lists, which the
            message names.
        RuntimeError: check is True while a CUDA graph is captured or torch.compile traces, which cannot synchronize.
    """

    kv_num_blocks: Tensor  # (B, H, Mq)
    kv_indices: Tensor  # (B, H, Mq, width)
    full_kv_num_blocks: Tensor  # (B, H, Mq)
    full_kv_indices: Tensor  # (B, H, Mq, width)
    lengths: tuple[int, int]  # (Sq, Sk)
    blocksize: tuple[int, int]  # (block_q, block_k)
    mask_mod: MaskMod | None
    batch: int  # B, may be 1
    heads: int  # H, may be 1
    n_block_rows: int  # Mq
    n_block_cols: int  # Mk
    derived: Derived | None  # what kernels need to know of the mask, made when first needed
    __slots__ = (*NAMES, "__weakref__")

    def __init__(
        self,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        *,
        lengths: Sequence[int],
        blocksize: Sequence[int] = (128, 128),
        mask_mod: MaskMod | None = None,
        check: bool = True,
    ) -> None:
        lengths, blocksize, rows, cols = grid(lengths, blocksize)
        if mask_mod is not None and not callable(mask_mod):
            raise TypeError(f"mask_mod must be a function of (b, h, q, kv) or None, got {type(mask_mod).__name__}")
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise ValueError("give both full_kv_num_blocks and full_kv_indices, or neither")
        if full_kv_num_blocks is None and isinstance(kv_num_blocks, Tensor):
            full_kv_num_blocks, full_kv_indices = torch.zeros_like(kv_num_blocks), kv_indices  # no entry is read
        tables = dict(zip(TABLES, (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices), strict=True))
        for name, t in tables.items():
            if not is_strided(t) or t.dtype is not torch.int32:
                raise TypeError(f"{name} must be a strided int32 tensor, got {describe(t)}")
            kind = "(B, H, Mq)" if name.endswith("num_blocks") else "(B, H, Mq, width)"
            if t.dim() != (3 if name.endswith("num_blocks") else 4):
                raise ValueError(f"{name} must be {kind}, got shape {tuple(t.shape)}")
            if t.device != kv_num_blocks.device:
                raise ValueError(f"{name} is on {t.device}, kv_num_blocks on {kv_num_blocks.device}; move one")
            if not t.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {t.stride()}; pass {name}.contiguous()")
            if t.shape[:3] != (*kv_num_blocks.shape[:2], rows):
                needed = (*kv_num_blocks.shape[:2], rows, *t.shape[3:])
                raise ValueError(f"{name} has shape {tuple(t.shape)}; {lengths[0]} rows in {blocksize} need {needed}")
            if t.shape[3:] and t.shape[3] > cols:
                raise ValueError(f"{name} has room for {t.shape[3]} blocks in a row, which has only {cols}")
        if 0 in kv_num_blocks.shape[:2]:
            raise ValueError(f"B and H must be at least 1, got kv_num_blocks of shape {tuple(kv_num_blocks.shape)}")
        self._set(**tables, lengths=lengths, blocksize=blocksize, mask_mod=mask_mod)
        self._set(batch=kv_num_blocks.shape[0], heads=kv_num_blocks.shape[1], n_block_rows=rows, n_block_cols=cols)
        self._set(derived=None)
        if check:
            self._check()

    def _set(self, **attributes: object) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def with_mask_mod(self, mask_mod: MaskMod | None) -> BlockMask:
        """The same blocks with another form of the same mask_mod; what was derived from this mask is shared."""
        mask = object.__new__(type(self))
        mask._set(**{name: getattr(self, name) for name in NAMES})
        mask._set(mask_mod=mask_mod)
        return mask

    def _refuse(self, name: str, *_: object) -> None:
        raise AttributeError(f"BlockMask.{name} is read-only; build a new mask, which copies no tensor")

    __setattr__ = __delattr__ = _refuse

    def _check(self) -> None:
        if is_compiling():
            raise RuntimeError(
                "torch.compile cannot trace the check of these lists, which synchronizes; build the mask outside of "
                "the compiled function, or with check=False"
            )
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot capture the check of these lists, which synchronizes; build the mask before the "
                "capture, or with check=False"
            )
        if any(block_lists.flags(self).tolist()):
            raise ValueError(block_lists.first_error(self))

    @classmethod
    def _of_tables(cls, partial: Tensor, full: Tensor, lengths, blocksize, mask_mod) -> BlockMask:
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
    ) -> BlockMask:
        """The mask that computes these blocks. Does not synchronise.

        Args:
            blocks: (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) bool, True where a block is computed.
            blocksize: (block_q, block_k).
            lengths: (Sq, Sk); all of the blocks where it is None.
            partial: bool of a shape that broadcasts to that of `blocks`, True where mask_mod decides; in the other
                blocks mask_mod must see everything, and is not asked. All blocks where it is None.
            mask_mod: which elements of partial blocks are seen.
            causal: sees no column after the row's position, row + Sk - Sq: leaves out the blocks past it and adds
                those that it cuts to the partial ones.

        Raises:
            TypeError: `blocks` or `partial` is no strided bool tensor.
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
            raise ValueError(f"blocks has shape {tuple(blocks.shape)}; lengths {(sq, sk)} need (..., {rows}, {cols})")
        if partial is not None:
            if mask_mod is None:
                raise ValueError("partial is given without mask_mod, which would see everything; give both")
            if partial.device != blocks.device:
                raise ValueError(f"partial is on {partial.device}, blocks on {blocks.device}; move one")
            try:
                partial = partial.expand_as(blocks)
            except RuntimeError:
                shapes = f"{tuple(partial.shape)} to {tuple(blocks.shape)}"
                raise ValueError(f"partial must broadcast to blocks, not {shapes}") from None
        # Without a bound, blocks that go past the last column are those not seen everywhere.
        some, every = band_tables((sq, sk), blocksize, None, 0 if causal else None, blocks.device)
        decided = ~every if mask_mod is None else ~every | (True if partial is None else partial)
        if causal:
            blocks, mask_mod = blocks & some, both(mask_mod, Band(None, 0, sk - sq))
        return cls._of_tables(blocks & decided, blocks & ~decided, (sq, sk), blocksize, mask_mod)

    @classmethod
    def from_bsr(
        cls,
        pattern: BsrMatrix | Tensor,
        *,
        lengths: Sequence[int] | None = None,
        heads: int | None = None,
        mask_mod: MaskMod | None = None,
        causal: bool = False,
    ) -> BlockMask:
        """The mask that computes the stored blocks of a BsrMatrix or torch.sparse_bsr tensor; values do not matter.

        Does not synchronise, and does not look at the contents of the indices, which must be right (see
        BsrMatrix.check_indices).

        Args:
            pattern: of blocks with sides of 64 or 128. Of a batch of L items with a pattern for each, item l is that of
                head l % heads of batch item l // heads.
            lengths: (Sq, Sk), which may end inside the last blocks; the matrix's extents where it is None.
            heads: of a batch; L where it is None.
            mask_mod, causal: as from_blocks has them.

        Raises:
            TypeError: `pattern` is neither.
            ValueError: a side of its blocks is neither 64 nor 128, or lengths or heads do not fit.
        """
        blocks, blocksize = convert.blocks_of_bsr(pattern, heads)
        return cls.from_blocks(blocks, blocksize, lengths=lengths, mask_mod=mask_mod, causal=causal)

    @classmethod
    def from_elements(
        cls, seen: Tensor, blocksize: Sequence[int] = (128, 128), *, lengths: Sequence[int] | None = None
    ) -> BlockMask:
        """The mask of a bool tensor with an entry for each score, True where it is seen. Does not synchronise.

        Reads each entry once to find the blocks, and holds `seen`, of which kernels read the entries of partial blocks.
        So `seen` must not be written to.

        Args:
            seen: (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk) bool, of any strides. Sq and Sk may be 1 for a mask that does
                not depend on the row or the column; `lengths` says for how many.
            lengths: (Sq, Sk); those of `seen` where it is None.

        Raises:
            TypeError: `seen` is no strided bool tensor.
            ValueError: lengths or block sizes that BlockMask refuses, or `seen` does not have these lengths.
        """
        if not is_strided(seen) or seen.dtype is not torch.bool:
            raise TypeError(f"seen must be a strided bool tensor, got {describe(seen)}")
        if not 2 <= seen.dim() <= 4:
            raise ValueError(f"seen must be (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), got {tuple(seen.shape)}")
        lengths, blocksize, _, _ = grid(tuple(seen.shape[-2:]) if lengths is None else lengths, blocksize)
        if any(have not in (1, want) for have, want in zip(seen.shape[-2:], lengths, strict=True)):
            raise ValueError(f"seen has shape {tuple(seen.shape)}, which does not broadcast to (..., {lengths})")
        partial, full, mask_mod = convert.of_elements(seen, lengths, blocksize)
        return cls._of_tables(partial, full, lengths, blocksize, mask_mod)

    @classmethod
    def from_flex(cls, mask: FlexBlockMask, *, check: bool = False) -> BlockMask:
        """FlexAttention's mask: its lists, not copied where they are contiguous, and its mask_mod, None for noop_mask.

        Where Sk is no multiple of block_k, full blocks that go past the last column become partial ones, which copies;
        create_block_mask makes none. Does not synchronise unless the lists are to be checked: those that were given to
        BlockMask.from_kv_blocks by hand may be unsorted.

        Raises:
            TypeError: `mask` is no torch.nn.attention.flex_attention.BlockMask.
            ValueError: a side of its blocks is neither 64 nor 128, or, with check, a list is wrong.
        """
        lists, facts = convert.lists_of_flex(mask)
        return cls(*lists, **facts, check=check)

    def with_causal(self) -> BlockMask:
        """What this mask sees up to the row's position, row + Sk - Sq. Does not synchronise.

        Full blocks that the diagonal cuts become partial, so that mask_mod must see all of full blocks.
        """
        partial, full = self.tables()
        options = {} if self.mask_mod is None else {"partial": partial, "mask_mod": self.mask_mod}
        return self.from_blocks(partial | full, self.blocksize, lengths=self.lengths, causal=True, **options)

    def crop(self, lengths: Sequence[int]) -> BlockMask:
        """The upper left part, of the first Sq rows and Sk columns of lengths = (Sq, Sk), as FlexAttention's _adjust.

        block_sparse_attention crops a mask that is as many rows as columns longer than q and k by itself.

        Raises:
            ValueError: `lengths` is longer than the mask's.
        """
        return block_slices.cropped(self, lengths)

    def shard(self, lengths: Sequence[int], q_offset: int = 0, k_offset: int = 0) -> BlockMask:
        """The part of (Sq, Sk) = lengths that begins at row q_offset and column k_offset. Does not synchronise.

        Its mask_mod still takes positions in the whole, so pass block_sparse_attention the same offsets:

            part = mask.shard((Sq, Sk), q_offset, k_offset)
            out = block_sparse_attention(q, k, v, part, q_offset=q_offset, k_offset=k_offset)

        Raises:
            ValueError: the part is not within the mask, or an offset is no multiple of the blocks' side.
        """
        return block_slices.sharded(self, lengths, q_offset, k_offset)

    def __getitem__(self, index: int | slice | Tensor | tuple) -> BlockMask:
        """The part of some batch items, heads and rows of blocks, with all columns: mask[items, heads, rows].

        Each index is an int, a slice or an int32 or int64 tensor (n,), whose values are not checked on a GPU; an int
        selects one, and no dimension is removed. mask_mod is called with the positions in the whole mask, where
        FlexAttention leaves that to the user, and lengths are those of the selected rows: 128 i to 128 (i + 1) of
        mask[:, :, i] at a block_q of 128. Kernels are compiled once for all values of an index.

        Example:
            >>> mask = patterns.causal((1024, 1024))
            >>> mask[:, :, 2:4].lengths  # rows 256 to 511, for a chunk of a prefill
            (256, 1024)

        Raises:
            TypeError, IndexError, ValueError: an index is of another type, out of range, or a slice with a negative
                step; or a tensor selects rows of blocks of which the last is shorter.
        """
        return block_slices.sliced(self, index)

    def __and__(self, other: BlockMask) -> BlockMask:
        """Return the mask of what both see; lengths, blocksize and device are equal, B and H may be 1 in one."""
        return block_slices.intersection(self, other) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """Return the mask of what at least one sees; lengths, blocksize and device are equal, B and H may be 1 in one.

        Where only one mask lists a block, the mask_mod of the other must not count: unless both have the same mask_mod,
        kernels read for each element of a partial block whether a mask lists its block.
        """
        return block_slices.union(self, other) if isinstance(other, BlockMask) else NotImplemented

    def tables(self) -> tuple[Tensor, Tensor]:
        """(partial, full): two new bool (B, H, Mq, Mk), True where a block is listed. Does not synchronise."""
        partial = block_lists.table_of(self.kv_num_blocks, self.kv_indices, self.n_block_cols)
        return partial, block_lists.table_of(self.full_kv_num_blocks, self.full_kv_indices, self.n_block_cols)

    def lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors that hold it: kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices."""
        return self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices

    def transposed(self) -> BlockLists:
        """For each column of blocks, which rows of blocks need it. Does not synchronise."""
        partial, full = self.tables()
        return BlockLists(*block_lists.lists_of(partial.mT), *block_lists.lists_of(full.mT))

    def elements(
        self,
        begin: int,
        end: int,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
    ) -> Tensor:
        """Which columns rows begin to end see: bool (B, H, end - begin, Sk).

        `batch` and `heads`, where given, are those of the scores, which a mask of one item or head is repeated for, and
        mask_mod called with. q_offset and k_offset are the positions of the first row and column for mask_mod.
        """
        batch, heads = batch or self.batch, heads or self.heads
        q = torch.arange(begin, end, dtype=torch.int32, device=self.device)
        kv = torch.arange(self.lengths[1], dtype=torch.int32, device=self.device)
        row, col = q // self.blocksize[0], kv // self.blocksize[1]
        partial, full = (t.index_select(2, row).index_select(3, col) for t in self.tables())
        if self.mask_mod is not None:
            b, h = (torch.arange(n, dtype=torch.int32, device=self.device) for n in (batch, heads))
            positions = q[:, None] + q_offset, kv + k_offset
            if is_compiling():
                from .mask_op import elements as elements_of
            else:
                elements_of = call
            partial = partial & elements_of(self.mask_mod, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), *positions)
        return (partial | full).expand(batch, heads, -1, -1)

    def to_dense(self, batch: int | None = None, heads: int | None = None) -> Tensor:
        """Which elements are seen: bool (B, H, Sq, Sk). Does not synchronise. See `elements` for the arguments."""
        return self.elements(0, self.lengths[0], batch, heads)

    def block_density(self) -> float:
        """Listed blocks over all blocks; 0.0 where there are none. Synchronises."""
        blocks = self.kv_num_blocks.numel() * self.n_block_cols
        return (self.kv_num_blocks.sum() + self.full_kv_num_blocks.sum()).item() / max(blocks, 1)

    def to_flex(self) -> FlexBlockMask:
        """The same as a torch.nn.attention.flex_attention.BlockMask, which shares lists that are Mk wide."""
        return convert.to_flex(self)

    def to(self, device: torch.device | str | int) -> BlockMask:
        """This mask on another device, with the tensors of a mask_mod of mask_mods.py; self where nothing moves."""
        old = self.lists()
        new, mask_mod = [t.to(device) for t in old], moved(self.mask_mod, device)
        if mask_mod is self.mask_mod and all(a is b for a, b in zip(old, new, strict=True)):
            return self
        return type(self)(*new, lengths=self.lengths, blocksize=self.blocksize, mask_mod=mask_mod, check=False)

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.kv_num_blocks.device

    def __repr__(self) -> str:
        facts = f"batch={self.batch}, heads={self.heads}, lengths={self.lengths}, blocksize={self.blocksize}"
        mod = self.mask_mod
        name = None if mod is None else getattr(mod, "__name__", type(mod).__name__)
        return f"{type(self).__name__}({facts}, mask_mod={name}, device='{self.device}')"

    def __reduce__(self) -> tuple:
        return _rebuild, (*self.lists(), self.lengths, self.blocksize, self.mask_mod)


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | Sequence[int] = 128,
) -> BlockMask:
    """Return the mask of all elements that mask_mod sees, as FlexAttention's function of this name does.

    Calls mask_mod for every element, in chunks that bound the memory. Does not synchronize, unless mask_mod does.

    Args:
        mask_mod: a function of (b, h, q, kv), see BlockMask.
        B, H: the numbers of batch items and heads; None if mask_mod does not depend on them.
        Q_LEN, KV_LEN: the numbers of queries and keys.
        device: the device of the mask, torch's default device if None. FlexAttention's default is the accelerator.
        BLOCK_SIZE: the side of a block or (block_q, block_k), each 64 or 128.

    Raises:
        TypeError: mask_mod cannot be called, or returns something other than a bool tensor.
        ValueError: a length, a block size, B or H is wrong.

    Example:
        >>> mask = create_block_mask(lambda b, h, q, kv: kv <= q, None, None, 512, 512)
        >>> mask.block_density()
        0.625
    """
    blocksize = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    lengths, blocksize, _, _ = grid((Q_LEN, KV_LEN), blocksize)
    batch, heads = (1 if n is None else n for n in (B, H))
    if min(batch, heads) < 1:
        raise ValueError(f"B and H must be at least 1, or None for 1, got {B} and {H}")
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of (b, h, q, kv), got {type(mask_mod).__name__}")
    device = torch.empty(0).device if device is None else device  # get_default_device() cannot be compiled
    if is_compiling():
        from .mask_op import tables as tables_of  # imports torch's compiler, which takes seconds
    else:
        tables_of = block_lists.tables_of_mask_mod
    some, every = tables_of(mask_mod, (batch, heads), lengths, blocksize, device)
    return BlockMask._of_tables(some & ~every, every, lengths, blocksize, mask_mod)


def _rebuild(*parts) -> BlockMask:
    *lists, lengths, blocksize, mask_mod = parts
    return BlockMask(
        *lists, lengths=lengths, blocksize=blocksize, mask_mod=mask_mod
    )  # a file may hold wrong lists, so they are checked
