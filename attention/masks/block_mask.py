"""Block masks: the blocks of the score matrix that attention computes, and the unmasked elements of partial blocks.

Scores (Sq, Sk) are divided into blocks of (block_q, block_k): Mq = ceil(Sq / block_q) rows and Mk = ceil(Sk / block_k)
columns of blocks. Each row of blocks has two ascending lists. Full blocks have no masked element; mask_mod masks the
elements of partial blocks, or, if it is None, only columns past the last one are masked. Blocks in neither list are not
computed. The storage is that of torch's FlexAttention, so its masks are used without a copy. patterns.py contains the
usual masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from cute_kernels.picture import FULL, PARTIAL, Pictured
from cute_kernels.runtime.derived import Derived
from sparse_collective.checks import describe, is_strided

from . import block_lists, block_slices, convert
from .block_lists import grid
from .constructors import TABLES, Constructors
from .element_mask import call
from .mask_mods import MaskMod, moved

__all__ = ["BlockLists", "BlockMask", "create_block_mask"]

FACTS = ("lengths", "blocksize", "mask_mod", "batch", "heads", "n_block_rows", "n_block_cols", "equal_rows", "by_row")
NAMES = (*TABLES, *FACTS, "derived")


class BlockLists(NamedTuple):
    """The query blocks of each KV block: counts (B, H, Mk) and indices (B, H, Mk, Mq), as in FlexAttention."""

    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


class BlockMask(Constructors, Pictured):
    """The blocks of (Sq, Sk) scores to compute, per batch index and head or shared by all of them.

    Shares the tensors with the caller and never copies them. The attributes are read-only, and the tensors must not be
    written to.

    Args:
        kv_num_blocks: (B, H, Mq) int32, the number of partial blocks in each row. B and H may be 1, which broadcasts
            over the batch or the heads.
        kv_indices: (B, H, Mq, width) int32, width at most Mk: their columns of blocks, strictly increasing. Entries
            past the count are ignored.
        full_kv_num_blocks, full_kv_indices: the same for full blocks, with their own width; both None: there are no
            full blocks. A block that extends past the last column must not be full; one that extends past the last row
            may be.
        lengths: (Sq, Sk).
        blocksize: (block_q, block_k), each 64 or 128.
        mask_mod: the element mask of partial blocks: a function of (b, h, q, kv) that torch can trace, True where a
            score is unmasked, see mask_mods.py and element_mask.py. None: no element is masked.
        check: True to validate the contents of the lists, which synchronizes once. With False, results of invalid lists
            are undefined.

    Raises:
        TypeError: an argument is not a strided int32 tensor, or mask_mod is not callable.
        ValueError: a shape, stride, device, length or block is wrong, or, with check, an entry of the lists, which the
            message names.
        RuntimeError: check is True during CUDA graph capture or in torch.compile's trace, which cannot synchronize.
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
    equal_rows: bool  # known to list equally many blocks in each row, all of one kind; the other's width is 0
    by_row: bool  # lists partial blocks only, made on a GPU for one call; its query tiles need no sorting
    derived: Derived  # the cache of what is derived from the mask; its `facts` are those of block_sparse.element_of
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
            raise ValueError("full_kv_num_blocks and full_kv_indices must both be given or both be None")
        if full_kv_num_blocks is None and isinstance(kv_num_blocks, Tensor):
            full_kv_num_blocks, full_kv_indices = torch.zeros_like(kv_num_blocks), kv_indices  # entries are not read
        lists = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices
        tables: dict[str, Any] = dict(zip(TABLES, lists, strict=True))
        for name, t in tables.items():
            if not is_strided(t) or t.dtype is not torch.int32:
                raise TypeError(f"{name} must be a strided int32 tensor, got {describe(t)}")
            kind = "(B, H, Mq)" if name.endswith("num_blocks") else "(B, H, Mq, width)"
            if t.dim() != (3 if name.endswith("num_blocks") else 4):
                raise ValueError(f"{name} must be {kind}, got shape {tuple(t.shape)}")
            if t.device != kv_num_blocks.device:
                raise ValueError(
                    f"{name} must be on the device of kv_num_blocks, {kv_num_blocks.device}, got {t.device}; "
                    f"call {name}.to({str(kv_num_blocks.device)!r})"
                )
            if not t.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {t.stride()}; pass {name}.contiguous()")
            if t.shape[:3] != (*kv_num_blocks.shape[:2], rows):
                needed = (*kv_num_blocks.shape[:2], rows, *t.shape[3:])
                raise ValueError(
                    f"{name} must have shape {needed} for {lengths[0]} rows in blocks of {blocksize}, "
                    f"got {tuple(t.shape)}"
                )
            if t.shape[3:] and t.shape[3] > cols:
                raise ValueError(
                    f"{name}'s last dimension must be at most {cols}, the blocks of a row, got {t.shape[3]}"
                )
        if 0 in kv_num_blocks.shape[:2]:
            raise ValueError(f"B and H must be at least 1, got kv_num_blocks of shape {tuple(kv_num_blocks.shape)}")
        self._set(**tables, lengths=lengths, blocksize=blocksize, mask_mod=mask_mod)
        self._set(batch=kv_num_blocks.shape[0], heads=kv_num_blocks.shape[1], n_block_rows=rows, n_block_cols=cols)
        self._set(equal_rows=False, by_row=False, derived=Derived())
        if check:
            self._check()

    def _set(self, **attributes: object) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def with_mask_mod(self, mask_mod: MaskMod | None) -> BlockMask:
        """The same blocks with an equivalent mask_mod; shares the tensors derived from this mask."""
        mask = object.__new__(type(self))
        mask._set(**{name: getattr(self, name) for name in NAMES})
        mask._set(mask_mod=mask_mod)
        return mask

    def _refuse(self, name: str, *_: object) -> None:
        raise AttributeError(f"BlockMask.{name} is read-only; create a new mask, which copies no tensor")

    __setattr__ = __delattr__ = _refuse

    def _check(self) -> None:
        if is_compiling():
            raise RuntimeError(
                "torch.compile cannot trace check=True, which synchronizes; create the mask outside the compiled "
                "function, or pass check=False"
            )
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot capture check=True, which synchronizes; create the mask before the capture, or "
                "pass check=False"
            )
        if any(block_lists.flags(self).tolist()):
            raise ValueError(block_lists.first_error(self))

    def with_causal(self) -> BlockMask:
        """The intersection of this mask with the causal mask up to the row's position, row + Sk - Sq. Does not
        synchronize.

        Full blocks that the diagonal crosses become partial, so mask_mod must be True everywhere in full blocks.
        """
        partial, full = self.tables()
        edges = None if self.mask_mod is None else partial
        return self.from_blocks(
            partial | full, self.blocksize, lengths=self.lengths, partial=edges, mask_mod=self.mask_mod, causal=True
        )

    def crop(self, lengths: Sequence[int]) -> BlockMask:
        """The upper left part, of the first Sq rows and Sk columns of lengths = (Sq, Sk), as FlexAttention's _adjust.

        block_sparse_attention crops a mask automatically if it is longer than q and k by as many rows as columns.

        Raises:
            ValueError: `lengths` is longer than the mask's.
        """
        return block_slices.cropped(self, lengths)

    def shard(self, lengths: Sequence[int], q_offset: int = 0, k_offset: int = 0) -> BlockMask:
        """The part of (Sq, Sk) = lengths that begins at row q_offset and column k_offset. Does not synchronize.

        Its mask_mod still takes positions in the whole mask, so pass block_sparse_attention the same offsets:

            part = mask.shard((Sq, Sk), q_offset, k_offset)
            out = block_sparse_attention(q, k, v, part, q_offset=q_offset, k_offset=k_offset)

        Raises:
            ValueError: the part is not within the mask, or an offset is not a multiple of the block size.
        """
        return block_slices.sharded(self, lengths, q_offset, k_offset)

    def __getitem__(self, index: int | slice | Tensor | tuple) -> BlockMask:
        """Select batch indices, heads and rows of blocks, with all columns: mask[batch, heads, rows].

        Each index is an int, a slice or an int32 or int64 tensor (n,), whose values are not checked on a GPU; an int
        selects one, and no dimension is removed. mask_mod is called with the positions in the whole mask, which
        FlexAttention leaves to the user, and lengths are those of the selected rows: 128 i to 128 (i + 1) for mask[:,
        :, i] with a block_q of 128. Kernels are compiled once for all values of an index.

        Example:
            >>> mask = patterns.causal((1024, 1024))
            >>> mask[:, :, 2:4].lengths  # rows 256 to 511, for a chunk of a prefill
            (256, 1024)

        Raises:
            TypeError, IndexError, ValueError: an index has an unsupported type, is out of range, or is a slice with a
                negative step; or a tensor selects rows of blocks of which the last is shorter.
        """
        return block_slices.sliced(self, index)

    def __and__(self, other: BlockMask) -> BlockMask:
        """Return the intersection; lengths, blocksize and device must be equal, B and H may be 1 in one mask."""
        return block_slices.intersection(self, other) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """Return the union; lengths, blocksize and device must be equal, B and H may be 1 in one mask.

        In a block that only one mask lists, the mask_mod of the other must be ignored: unless both have the same
        mask_mod, kernels read for each element of a partial block which masks list its block.
        """
        return block_slices.union(self, other) if isinstance(other, BlockMask) else NotImplemented

    def tables(self) -> tuple[Tensor, Tensor]:
        """(partial, full): two new bool (B, H, Mq, Mk), True where a block is listed. Does not synchronize."""
        partial = block_lists.table_of(self.kv_num_blocks, self.kv_indices, self.n_block_cols)
        return partial, block_lists.table_of(self.full_kv_num_blocks, self.full_kv_indices, self.n_block_cols)

    def lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors of the mask: kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices."""
        return self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices

    def transposed(self) -> BlockLists:
        """The transposed lists: the rows of blocks of each column of blocks. Does not synchronize."""
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
        """Dense mask of the rows from begin to end: bool (B, H, end - begin, Sk), True where a score is unmasked.

        `batch` and `heads`, if given, are those of the scores: a mask with B or H of 1 is expanded to them, and
        mask_mod is called with them. q_offset and k_offset are the positions of the first row and column for mask_mod.
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
        """Dense mask, bool (B, H, Sq, Sk). Does not synchronize. See `elements` for the arguments."""
        return self.elements(0, self.lengths[0], batch, heads)

    def block_density(self) -> float:
        """Fraction of blocks that are listed; 0.0 without blocks. Synchronizes."""
        listed = torch.logical_or(*self.tables())
        return listed.sum().item() / max(listed.numel(), 1)

    def to_flex(self) -> FlexBlockMask:
        """Convert to a torch.nn.attention.flex_attention.BlockMask, which shares lists that are Mk wide."""
        return convert.to_flex(self)

    def to(self, device: torch.device | str | int) -> BlockMask:
        """This mask on another device, with the tensors of a mask_mod of mask_mods.py or a traced one; self if nothing
        moves.

        Tensors that another function captures stay where they are, and calls then raise TypeError.
        """
        old = self.lists()
        new, mask_mod = [t.to(device) for t in old], moved(self.mask_mod, device)
        if mask_mod is self.mask_mod and all(a is b for a, b in zip(old, new, strict=True)):
            return self
        return self._of_lists(new, lengths=self.lengths, blocksize=self.blocksize, mask_mod=mask_mod)

    def _of_lists(self, lists: Sequence[Tensor], **facts) -> BlockMask:
        """The mask of lists that were made from this mask's: of equal rows if this one is. facts: of BlockMask."""
        if self.equal_rows:
            return type(self).of_equal_rows(lists[3 if self._lists_full else 1], self._lists_full, **facts)
        return type(self)(*lists, **facts, check=False)

    @property
    def _lists_full(self) -> bool:
        """True if a mask of equal rows lists full blocks, and not partial ones."""
        return self.kv_indices.shape[-1] == 0

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.kv_num_blocks.device

    def __repr__(self) -> str:
        facts = f"batch={self.batch}, heads={self.heads}, lengths={self.lengths}, blocksize={self.blocksize}"
        mod = self.mask_mod
        name = None if mod is None else getattr(mod, "__name__", type(mod).__name__)
        return f"{type(self).__name__}({facts}, mask_mod={name}, device='{self.device}')"

    def _tables(self) -> tuple[Tensor, str]:
        partial, full = (listed.to(torch.int8) for listed in self.tables())
        return (PARTIAL * partial + FULL * full).flatten(0, 1), "batch item and head"

    def __reduce__(self) -> tuple:
        facts = {"lengths": self.lengths, "blocksize": self.blocksize, "mask_mod": self.mask_mod}
        if self.equal_rows:  # their entries may be anything
            return _rebuild, ((self.lists()[3 if self._lists_full else 1], self._lists_full), facts)
        return _rebuild, (self.lists(), facts)


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | Sequence[int] = 128,
) -> BlockMask:
    """Return the mask of all elements for which mask_mod is True, like FlexAttention's function of this name.

    Calls mask_mod for every element, in chunks that bound the memory. Does not synchronize, unless mask_mod does.

    Args:
        mask_mod: a function of (b, h, q, kv), see BlockMask.
        B, H: batch size and number of heads; None if mask_mod does not depend on them.
        Q_LEN, KV_LEN: the numbers of queries and keys.
        device: the device of the mask, torch's default device if None. FlexAttention's default is the accelerator.
        BLOCK_SIZE: the side of a block or (block_q, block_k), each 64 or 128.

    Raises:
        TypeError: mask_mod is not callable, or returns something other than a bool tensor.
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


def _rebuild(lists: tuple, facts: dict) -> BlockMask:
    if len(lists) == 2:
        return BlockMask.of_equal_rows(*lists, **facts)
    return BlockMask(*lists, **facts)  # a file may contain invalid lists, so they are checked
