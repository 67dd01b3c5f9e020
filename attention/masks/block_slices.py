"""Slices, intersections and unions of block masks: BlockMask.crop, mask[...], mask & other and mask | other.

No function synchronizes.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparse_collective.checks import describe, is_strided

from .block_lists import grid
from .element_mask import check_extents, for_kernel, trace_mask
from .mask_mods import InBlocks, Or, Sliced, both

DIMENSIONS = ("batch index", "head", "row of blocks")


def cropped(mask, lengths):
    """See BlockMask.crop."""
    lengths, blocksize, rows, cols = grid(lengths, mask.blocksize)
    if lengths[0] > mask.lengths[0] or lengths[1] > mask.lengths[1]:
        raise ValueError(f"lengths must be at most the mask's lengths, {mask.lengths}, got {lengths}")
    return _part(mask, lengths, (0, 0), (rows, cols))


def sharded(mask, lengths, *offsets):
    """See BlockMask.shard."""
    lengths, blocksize, *blocks = grid(lengths, mask.blocksize)
    for name, offset, side, length, whole in zip(
        ("q_offset", "k_offset"), offsets, blocksize, lengths, mask.lengths, strict=True
    ):
        if offset % side:
            raise ValueError(f"{name} must be a multiple of the block size, {side}, got {offset}")
        if not 0 <= offset <= whole - length:
            raise ValueError(
                f"{name} must be in [0, {whole - length}] for a part of {length} of a mask of lengths {mask.lengths}, "
                f"got {offset}"
            )
    first = tuple(offset // side for offset, side in zip(offsets, blocksize, strict=True))
    return _part(mask, lengths, first, tuple(blocks))


def _part(mask, lengths, first: tuple[int, ...], blocks: tuple[int, ...]):
    """`blocks` rows and columns of blocks from `first` on, up to `lengths` elements."""
    (row, col), (rows, cols) = first, blocks
    partial, full = (t[..., row : row + rows, col : col + cols] for t in mask.tables())
    inside = torch.arange(1, cols + 1, device=mask.device) * mask.blocksize[1] <= lengths[1]
    return mask._of_tables(partial | (full & ~inside), full & inside, lengths, mask.blocksize, mask.mask_mod)


def intersection(mask, other):
    """See BlockMask.__and__."""
    _check_pair("&", mask, other)
    (partial, full), (other_partial, other_full) = mask.tables(), other.tables()
    some, every = (partial | full) & (other_partial | other_full), full & other_full
    return mask._of_tables(some & ~every, every, mask.lengths, mask.blocksize, both(mask.mask_mod, other.mask_mod))


def union(mask, other):
    """See BlockMask.__or__."""
    _check_pair("|", mask, other)
    (partial, full), (other_partial, other_full) = mask.tables(), other.tables()
    some, every = partial | full | other_partial | other_full, full | other_full
    mask_mod = mask.mask_mod
    if mask_mod is not other.mask_mod:
        mask_mod = Or(_within(mask, partial | full), _within(other, other_partial | other_full))
    return mask._of_tables(some & ~every, every, mask.lengths, mask.blocksize, mask_mod)


def _within(mask, listed: Tensor) -> InBlocks:
    """The elements of a mask, False in blocks that it does not list."""
    return InBlocks(mask.mask_mod, listed, mask.batch > 1, mask.heads > 1, *mask.blocksize)


def _check_pair(operator: str, mask, other) -> None:
    for name in ("lengths", "blocksize", "device"):
        if getattr(mask, name) != getattr(other, name):
            values = f"{getattr(mask, name)} and {getattr(other, name)}"
            raise ValueError(f"both masks of mask {operator} other must have the same {name}, got {values}")
    for name in ("batch", "heads"):
        sizes = getattr(mask, name), getattr(other, name)
        if sizes[0] != sizes[1] and 1 not in sizes:
            raise ValueError(
                f"{name} of both masks of mask {operator} other must be equal, or 1 in one of them, "
                f"got {sizes[0]} and {sizes[1]}"
            )


def sliced(mask, index):
    """See BlockMask.__getitem__."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) > 3:
        raise IndexError(f"a BlockMask has dimensions (B, H, Mq), got {len(index)} indices")
    sizes = mask.batch, mask.heads, mask.n_block_rows
    where = [_positions(*args, mask.device) for args in zip(index, sizes, DIMENSIONS[: len(index)], strict=False)]
    where += [None] * (3 - len(where))
    if all(positions is None for positions in where):
        return mask
    lists = list(mask.lists())
    for dim, positions in enumerate(where):
        if positions is not None:
            lists = [t.index_select(dim, positions) for t in lists]
    rows = where[2]
    block_q, length = mask.blocksize[0], mask.lengths[0]
    if rows is not None:
        part = index[2]
        length = len(rows) * block_q
        if mask.lengths[0] % block_q:
            if isinstance(part, Tensor):
                raise ValueError(
                    f"rows of blocks can be selected by a tensor only if the mask's rows are a multiple of {block_q}, "
                    f"got {mask.lengths[0]} rows; use an int or a slice"
                )
            last = range(sizes[2])[part] if isinstance(part, slice) else (range(sizes[2])[part],)
            if len(last) > 0 and last[-1] == sizes[2] - 1:
                length -= -mask.lengths[0] % block_q
    mask_mod = mask.mask_mod
    if mask_mod is not None:
        if not is_compiling():  # once sliced, the indices come from tensors and cannot be checked
            check_extents(*for_kernel(trace_mask(mask_mod, mask.device)), mask.batch, mask.heads, mask.lengths)
        items, heads, rows = [None if positions is None else positions.to(torch.int32) for positions in where]
        one_item, one_head = [positions is not None and len(positions) == 1 for positions in where[:2]]
        mask_mod = Sliced(mask_mod, items, heads, rows, one_item, one_head, block_q)
    facts = {"lengths": (length, mask.lengths[1]), "blocksize": mask.blocksize, "mask_mod": mask_mod}
    return mask._of_lists(lists, **facts)


def _clamped(at: int | None, size: int, default: int) -> int:
    """Bound of a slice as a number from 0 to size."""
    if at is None:
        return default
    return max(at + size, 0) if at < 0 else min(at, size)


def _positions(part, size: int, what: str, device: torch.device) -> Tensor | None:
    """Selected indices among `size`, int64 (n,); None for all of them."""
    if isinstance(part, Tensor):
        if not is_strided(part) or part.dtype not in (torch.int32, torch.int64) or part.dim() > 1:
            raise TypeError(
                f"a tensor that selects a {what} must be int32 or int64 of shape (n,), got {describe(part)}"
            )
        if part.device != device:
            raise ValueError(
                f"the index of a {what} must be on the mask's device, {device}, got {part.device}; move it with .to()"
            )
        return part.reshape(-1).long()
    if isinstance(part, slice):
        step = 1 if part.step is None else part.step
        if step < 1:
            raise ValueError(f"the step of a slice must be at least 1, got {step}")
        # As slice.indices, which torch.compile does not trace on torch 2.11.
        begin, end = (_clamped(at, size, default) for at, default in ((part.start, 0), (part.stop, size)))
        if (begin, end, step) == (0, size, 1):
            return None
        return torch.arange(begin, max(begin, end), step, device=device)
    try:
        number = operator.index(part)
    except TypeError:
        raise TypeError(
            f"the index of a {what} must be an int, a slice or an integer tensor, got {type(part).__name__}"
        ) from None
    if not -size <= number < size:
        broadcasts = ", which broadcasts" if size == 1 and what != DIMENSIONS[2] else ""
        raise IndexError(f"{what} must be in [{-size}, {size}) for a mask with {size}{broadcasts}, got {number}")
    number %= size
    return None if size == 1 else torch.arange(number, number + 1, device=device)
