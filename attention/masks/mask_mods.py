"""Element masks: functions that are True for the unmasked (query row, key column) pairs of a block.

A mask_mod is called with (b, h, q, kv), 0-d integer tensors, and returns True if row q of batch index b and head h
attends to column kv. Torch traces it (cute_kernels.traced): a captured number is a constant of the kernel, and a
captured tensor is an argument. The masks here are frozen dataclasses: two with equal numbers are equal, and `moved` and
torch.compile find their tensors.

If lengths differ, rows are aligned to the end: row q is at position q + offset, with offset = Sk - Sq.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["And", "AtPositions", "Band", "Dilated", "Elements", "GlobalTokens", "InBlocks", "MaskMod", "Or", "RowRange"]
__all__ += ["SameDocument", "Sliced", "ValidKeys"]

FAR = 2**30  # columns; the largest distance of two positions is smaller (block_lists.MOST)
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Band:
    """Columns from `left` before the row's position to `right` after it, both included; None is unbounded.

    Band(None, 0, Sk - Sq) is the causal mask.
    """

    left: int | None
    right: int | None
    offset: int = 0

    def __call__(self, b, h, q, kv):
        if self.left is None:
            if self.right is None:
                return kv >= 0
            return kv <= q + (self.offset + self.right)
        if self.right is None:
            return kv >= q + (self.offset - self.left)
        return (kv >= q + (self.offset - self.left)) & (kv <= q + (self.offset + self.right))


@dataclass(frozen=True)
class GlobalTokens:
    """The first `columns` columns, for all rows, and all columns for the rows at the first `rows` positions."""

    columns: int
    rows: int
    offset: int = 0

    def __call__(self, b, h, q, kv):
        if self.rows == 0:
            return kv < self.columns
        position = q + self.offset
        return (kv < self.columns) | ((position >= 0) & (position < self.rows))


@dataclass(frozen=True)
class Dilated:
    """Columns whose distance from the row's position is a multiple of `step`."""

    step: int
    offset: int = 0

    def __call__(self, b, h, q, kv):
        return (q + self.offset - kv) % self.step == 0


@dataclass(frozen=True, eq=False)
class SameDocument:
    """Columns of the row's document, by ids in any order: int32 (Sq,) and (Sk,), or (B, Sq) and (B, Sk)."""

    q_ids: Tensor
    kv_ids: Tensor
    batched: bool

    def __call__(self, b, h, q, kv):
        if self.batched:
            return self.q_ids[b, q] == self.kv_ids[b, kv]
        return self.q_ids[q] == self.kv_ids[kv]


@dataclass(frozen=True, eq=False)
class Elements:
    """The elements of a bool tensor with any strides: (B, H, Sq, Sk) restricted to the dimensions that are True here.

    The mask is constant along the other dimensions.
    """

    seen: Tensor
    item: bool = True
    head: bool = True
    row: bool = True
    column: bool = True

    def __call__(self, b, h, q, kv):
        index = ()
        index += (b,) if self.item else ()
        index += (h,) if self.head else ()
        index += (q,) if self.row else ()
        index += (kv,) if self.column else ()
        return self.seen[index] if index else self.seen & (kv >= 0)


@dataclass(frozen=True, eq=False)
class ValidKeys:
    """The first sizes[i] columns of each block i of `side` columns; sizes: (blocks,) int32."""

    sizes: Tensor
    side: int

    def __call__(self, b, h, q, kv):
        return kv % self.side < self.sizes[kv // self.side]


@dataclass(frozen=True, eq=False)
class RowRange:
    """Columns from begin[q] to before end[q] for row q: two int32 (Sq,), which a kernel reads once per row."""

    begin: Tensor
    end: Tensor

    def __call__(self, b, h, q, kv):
        return (kv >= self.begin[q]) & (kv < self.end[q])


@dataclass(frozen=True)
class And:
    """Conjunction of two masks."""

    first: MaskMod
    second: MaskMod

    def __call__(self, b, h, q, kv):
        return self.first(b, h, q, kv) & self.second(b, h, q, kv)


@dataclass(frozen=True)
class Or:
    """Disjunction of two masks."""

    first: MaskMod
    second: MaskMod

    def __call__(self, b, h, q, kv):
        return self.first(b, h, q, kv) | self.second(b, h, q, kv)


@dataclass(frozen=True, eq=False)
class InBlocks:
    """A mask_mod in the blocks that are True in `listed`, bool (B or 1, H or 1, Mq, Mk), and False in other blocks.

    mask_mod: None is True everywhere. items, heads: True if the table has an entry per batch index, or per head.
    """

    mask_mod: MaskMod | None
    listed: Tensor
    items: bool
    heads: bool
    block_q: int
    block_k: int

    def __call__(self, b, h, q, kv):
        item, head = b if self.items else 0, h if self.heads else 0
        listed = self.listed[item, head, q // self.block_q, kv // self.block_k]
        return listed if self.mask_mod is None else listed & self.mask_mod(b, h, q, kv)


def position_in(tiles: Tensor, side: int, index: Tensor) -> Tensor:
    """Position in a whole sequence of a row, or a column, of some of its tiles of `side`, which `tiles` numbers."""
    return tiles[index // side] * side + index % side


@dataclass(frozen=True, eq=False)
class Sliced:
    """A mask_mod for a slice of a mask: it is called with batch indices, heads and rows of the whole mask.

    items, heads, rows: int32 (n,) indices of the selected batch indices, heads and rows of blocks; None: all of them.
    one_item, one_head: True if one is selected, which is broadcast over the batch or the heads of the scores.
    """

    mask_mod: MaskMod
    items: Tensor | None
    heads: Tensor | None
    rows: Tensor | None
    one_item: bool
    one_head: bool
    block_q: int

    def __call__(self, b, h, q, kv):
        if self.items is not None:
            b = self.items[b * 0 if self.one_item else b]
        if self.heads is not None:
            h = self.heads[h * 0 if self.one_head else h]
        if self.rows is not None:
            q = position_in(self.rows, self.block_q, q)
        return self.mask_mod(b, h, q, kv)


@dataclass(frozen=True, eq=False)
class AtPositions:
    """A mask_mod for rows and columns that are tiles of a longer sequence: it is called with the positions there.

    q_tiles, k_tiles: int32 numbers of the tiles, of `tile` rows or columns, in the whole sequence.
    length: that of the whole sequence if some tiles extend past it; these positions are masked. None: no tile does.
    """

    mask_mod: MaskMod
    q_tiles: Tensor
    k_tiles: Tensor
    tile: int
    length: int | None

    def __call__(self, b, h, q, kv):
        q, kv = position_in(self.q_tiles, self.tile, q), position_in(self.k_tiles, self.tile, kv)
        if self.length is None:
            return self.mask_mod(b, h, q, kv)
        inside, last = (q < self.length) & (kv < self.length), self.length - 1
        return inside & self.mask_mod(b, h, q.clamp(max=last), kv.clamp(max=last))


def both(first: MaskMod | None, second: MaskMod | None) -> MaskMod | None:
    """And(first, second); None is a mask that is True everywhere."""
    # Comparing user-defined dataclasses could compare their tensors.
    if first is None or second is None or first is second or (type(first) is Band and first == second):
        return second if first is None else first
    return And(first, second)


def moved(mask_mod: Any, device: torch.device | str | int, copies: dict[int, Tensor] | None = None) -> Any:
    """The mask with the tensors in its dataclasses' fields on another device; itself if nothing moves.

    So the tensors of a traced mask (element_mask.BoundMask), too. Those captured by other functions are not moved.
    copies: moved tensors by the ids of theirs; one that is found twice is moved once.
    """
    copies = {} if copies is None else copies
    if isinstance(mask_mod, Tensor):
        if id(mask_mod) not in copies:
            copies[id(mask_mod)] = mask_mod.to(device)
        return copies[id(mask_mod)]
    if type(mask_mod) is tuple:
        parts = tuple([moved(part, device, copies) for part in mask_mod])
        return mask_mod if all(a is b for a, b in zip(parts, mask_mod, strict=True)) else parts
    if not dataclasses.is_dataclass(mask_mod) or isinstance(mask_mod, type):
        return mask_mod
    changed = {}
    for field in dataclasses.fields(mask_mod):
        value = getattr(mask_mod, field.name)
        new = moved(value, device, copies)
        if new is not value:
            changed[field.name] = new
    return dataclasses.replace(mask_mod, **changed) if changed else mask_mod


def window_bounds(window_size: Sequence[int | None] | None, causal: bool = False) -> tuple[int | None, int | None]:
    """(left, right) of window_size, None if unbounded; causal makes right at most 0. All ops and patterns call it.

    FlashAttention's convention: row q, at position p = q + Sk - Sq, attends to columns p - left to p + right, both
    included. -1 is unbounded there, and is converted to None.

    Raises:
        TypeError: `causal` is not a bool, or `window_size` is neither None nor two ints or None.
        ValueError: a bound is less than -1.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    left = right = None
    if window_size is not None:
        try:
            left, right = window_size
            left, right = [None if x is None else operator.index(x) for x in (left, right)]
        except (TypeError, ValueError):
            raise TypeError(
                f"window_size must be (left, right), each an int or None (unbounded), got {window_size!r}; "
                "the last w columns are (w - 1, 0)"
            ) from None
        for name, x in (("left", left), ("right", right)):
            if x is not None and x < -1:
                raise ValueError(f"window_size's {name} bound must be at least 0, or None or -1 (unbounded), got {x}")
        left, right = [None if x is None or x == -1 or x >= FAR else x for x in (left, right)]
    return left, 0 if causal else right
