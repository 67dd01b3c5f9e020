"""Conversion of transformers' mask functions to kernel masks: a band, padding, packed sequences, or a traced function.

transformers describes a mask by a function of (batch, head, query, key) positions, composed of its own closures, the
lengths and offsets of queries and keys, and a padding mask. Common compositions are recognized (kinds.py); any other
stays a function, and is traced by torch, like masks of FlexAttention. A tensor with an element per score is created for
at most 64 rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from transformers import masking_utils

from attention import BlockMask, create_block_mask
from attention.masks.block_lists import tables_of_rows
from attention.masks.mask_mods import Band, Elements, MaskMod, RowRange, both
from cute_kernels.runtime.derived import captured

from .distributed import PlannedMask, active
from .kinds import CAUSAL, Kind, kind_of

MOST_DECODE_ROWS = 64
ORIGIN = "_cute_kernels_mask"


@dataclass(frozen=True, eq=False)
class ItemRowRange:
    """Columns from begin[b, q] to before end[b, q] for row q of batch index b: two int32 (B, Sq)."""

    begin: Tensor
    end: Tensor

    def __call__(self, b, h, q, kv):
        return (kv >= self.begin[b, q]) & (kv < self.end[b, q])


class Mask(FlexBlockMask):
    """A layer's mask on its way through transformers, created once for all layers of its kind.

    It subclasses FlexAttention's BlockMask only because transformers passes masks created ahead of the model's forward
    pass (static caches) through if they are a BlockMask or a 4-D tensor. All tensors for kernels are created on first
    use, on the mask's device and without synchronizing.

    For a model that reads its mask (indexers of DeepSeek-V3.2 and Qwen4) it acts as the bool tensor (batch, 1, rows,
    columns) of attn_implementation="sdpa": attributes, methods, operators and torch functions are those of `dense`.
    They return a tensor, which `attend` accepts as a mask, too.

    Attributes:
        batch, lengths: batch size, and (rows, columns): of the queries, and of the keys that the layer's cache returns.
        shift: row i is at column i + shift; an int, or a 0-d tensor for a static cache.
        skipped: number of columns of the sequence before the first cached one (sliding caches).
        kind: the band of `function`; None if it is not one.
        padding: (B, columns) bool, True for tokens; None: no padding.
        begin: (B,) int32, the column of each sequence's first token, if all later columns are tokens; in decode only.
        trailing: True if the padding is known to be after each sequence's tokens.
    """

    def __init__(self, batch, lengths, shift, skipped, kind, function, padding, device, begin=None, trailing=False):
        self.batch, self.lengths, self.shift, self.skipped = batch, lengths, shift, skipped
        self.kind, self.function, self.padding, self.mask_device = kind, function, padding, device
        self.begin, self.trailing = begin, trailing
        self.cached = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, 1, *self.lengths

    @property
    def ndim(self) -> int:
        return 4

    @property
    def device(self) -> torch.device:
        return self.mask_device

    def contiguous(self) -> Mask:
        return self

    def dense(self) -> Tensor:
        """Bool (batch, 1, rows, columns), True where a score is unmasked."""
        return self._once("dense", lambda: self.block_mask().to_dense(self.batch).expand(self.batch, -1, -1, -1))

    def __getattr__(self, name: str):
        """Attributes of a tensor that this class does not have. Those of a BlockMask do not exist."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(
                f"the attention mask of {__name__} has no attribute {name!r}: it is not a FlexAttention BlockMask, "
                'and torch.Tensor does not have it; use attn_implementation="sdpa" or "eager" for models that read it'
            )
        return getattr(self.dense(), name)

    def __getitem__(self, index) -> Tensor:  # type: ignore[override]  # acts as a tensor, see above
        return self.dense()[index]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*_dense(args), **{key: _dense(x) for key, x in (kwargs or {}).items()})

    def to(self, device, *_, **__) -> Mask:
        """The mask itself, or its cached copy on another device: layers of one model may be on several devices."""
        device = torch.device(device)
        if device == self.device:
            return self
        kind = self.kind
        if kind is not None and kind.sequences is not None:
            kind = Kind(kind.left, kind.right, kind.sequences.to(device))
        if kind is None:
            raise ValueError(
                "a mask with a custom mask function cannot be moved to another device; keep its layers on one device"
            )
        moved = (t.to(device) if isinstance(t, Tensor) else t for t in (self.shift, self.padding, self.begin))
        shift, padding, begin = moved
        terms = (
            self.batch,
            self.lengths,
            shift,
            self.skipped,
            kind,
            self.function,
            padding,
            device,
            begin,
            self.trailing,
        )
        return self._once(("to", device), lambda: Mask(*terms))

    def __repr__(self) -> str:
        what = self.function if self.kind is None else self.kind
        return f"Mask({what}, lengths={self.lengths}, shift={self.shift}, padding={self.padding is not None})"

    __str__ = __repr__

    def _once(self, key, make: Callable):
        value = self.cached.get(key)
        if value is None:
            value = self.cached[key] = make()
        return value

    def up_to(self, columns: int) -> Mask:
        """The mask of the first columns only; without padding."""
        terms = (self.batch, (self.lengths[0], columns), self.shift, self.skipped, self.kind, self.function)
        return self._once(("up to", columns), lambda: Mask(*terms, None, self.device))

    def is_band(self) -> bool:
        """True if the kind's bounds define the whole mask."""
        return self.kind is not None and self.kind.sequences is None and self.padding is None

    def seqused_k(self, batch: int) -> Tensor:
        """(batch,) int32: number of columns up to the last row's own column."""

        def make() -> Tensor:
            last = self.shift + self.lengths[0]
            if isinstance(last, Tensor):
                return last.to(device=self.device, dtype=torch.int32).expand(batch).contiguous()
            return torch.full((batch,), last, dtype=torch.int32, device=self.device)

        return self._once(("seqused_k", batch), make)

    def spans_k(self, batch: int) -> Tensor:
        """(batch, 2) int32: columns from each sequence's first token to the last row's own column."""
        begin = self.begin.expand(batch)
        return self._once(("spans_k", batch), lambda: torch.stack([begin, self.seqused_k(batch)], -1))

    def block_mask(self) -> BlockMask:
        """The whole mask as a block mask of these lengths."""

        def make() -> BlockMask:
            if self._uses_elements():
                return BlockMask.from_elements(self.elements(), lengths=self.lengths)
            some, every, mask_mod = self.tables((128, 128))
            if mask_mod is None:
                return BlockMask.from_blocks(some, lengths=self.lengths)
            return BlockMask.from_blocks(some, lengths=self.lengths, partial=~every, mask_mod=mask_mod)

        return self._once("block mask", make)

    def within(self, blocks: BlockMask) -> BlockMask:
        """The intersection of this mask and a block mask of the same lengths, cached."""
        made = self._once(("within", id(blocks)), lambda: (self.intersection(blocks), blocks))
        return made[0]  # holding blocks keeps its id unique

    def intersection(self, blocks: BlockMask) -> BlockMask:
        """The same, created in each call."""
        if self._uses_elements():
            return BlockMask.from_elements(blocks.to_dense() & self.elements(), lengths=self.lengths)
        some, every, mask_mod = self.tables(blocks.blocksize)
        if mask_mod is None:
            return blocks
        partial, full = blocks.tables()
        listed, mask_mod = partial | full, both(blocks.mask_mod, mask_mod)
        shape = torch.broadcast_shapes(listed.shape, some.shape)
        edges = (partial | ~every).expand(shape)
        return BlockMask.from_blocks(
            (listed & some).expand(shape), blocks.blocksize, lengths=self.lengths, partial=edges, mask_mod=mask_mod
        )

    def _uses_elements(self) -> bool:
        """True if a tensor of elements is created: numbers in a mask are constants of a kernel, and in decode they
        change with every token."""
        return self.kind is not None and self.lengths[0] <= MOST_DECODE_ROWS

    def elements(self) -> Tensor:
        """Bool (B or 1, 1, rows, columns), True where a score is unmasked."""
        if self.kind is None:
            return self.dense()
        begin, end, _ = self._bands()
        column = torch.arange(self.lengths[1], dtype=torch.int32, device=self.device)
        seen = (column >= begin[..., None]) & (column < end[..., None])  # (rows, columns) or (B, rows, columns)
        seen = seen[(None,) * (3 - seen.dim())][:, None]
        return seen if self.padding is None else seen & self.padding[:, None, None]

    def tables(self, blocksize) -> tuple[Tensor, Tensor, MaskMod | None]:
        """Tables (B or 1, 1, Mq, Mk) of blocks with any unmasked element and of blocks with all elements unmasked, and
        the element mask."""
        return self._once(("tables", blocksize), lambda: self._tables(blocksize))

    def _tables(self, blocksize) -> tuple:
        rows, columns = self.lengths
        if self.kind is None:
            mask_mod = self.function
            if self.padding is not None:
                mask_mod = masking_utils.and_masks(mask_mod, masking_utils.padding_mask_function(self.whole_padding()))
            if not isinstance(self.shift, int) or self.shift or self.skipped:
                offsets: Any = (self._number(n) for n in (self.shift + self.skipped, self.skipped))
                mask_mod = masking_utils.add_offsets_to_mask_function(mask_mod, *offsets)
            rows, columns = self.lengths
            mask = create_block_mask(mask_mod, self.batch, None, rows, columns, self.device, blocksize)
            partial, full = mask.tables()
            return partial | full, full, mask_mod
        begin, end, mask_mod = self._bands()
        if begin.dim() == 1:
            begin, end = begin[None], end[None]
        none = torch.zeros_like(begin[0])
        parts = [tables_of_rows(b, e, none, self.lengths, blocksize) for b, e in zip(begin, end, strict=True)]
        some, every = (torch.stack(t)[:, None] for t in zip(*parts, strict=True))
        if self.padding is not None:
            past = -columns % blocksize[1]
            tokens = torch.nn.functional.pad(self.padding, (0, past)).unflatten(1, (-1, blocksize[1]))
            some = some & tokens.any(-1)[:, None, None]
            every = every & tokens.all(-1)[:, None, None]
            mask_mod = both(mask_mod, Elements(self.padding, head=False, row=False))
        return some, every, mask_mod

    def _bands(self) -> tuple[Tensor, Tensor, MaskMod | None]:
        """The columns [begin, end) of each row, int32 (rows,) or (B, rows), and the equivalent element mask."""
        (rows, columns), kind = self.lengths, self.kind
        position = torch.arange(rows, dtype=torch.int32, device=self.device) + self.shift
        begin = torch.zeros_like(position) if kind.left is None else position - kind.left
        end = torch.full_like(position, columns) if kind.right is None else position + kind.right + 1
        if kind.sequences is not None:
            numbers = kind.sequences.contiguous()  # sorted along a row
            first, past = (torch.searchsorted(numbers, numbers, right=right).int() for right in (False, True))
            begin, end = torch.maximum(begin, first), torch.minimum(end, past)
        begin, end = (t.int().clamp(0, columns).contiguous() for t in (begin, end))
        if kind.sequences is not None:
            return begin, end, ItemRowRange(begin, end)
        if kind.left is None and kind.right is None:
            return begin, end, None
        constant = isinstance(self.shift, int) and self.shift == 0
        return begin, end, Band(kind.left, kind.right) if constant else RowRange(begin, end)

    def _number(self, n: int | Tensor) -> Tensor:
        """A number as a tensor, which a kernel reads: an int would be a constant, with one kernel per value."""
        return n if isinstance(n, Tensor) else torch.full((), n, dtype=torch.int32, device=self.device)

    def whole_padding(self) -> Tensor:
        """The padding by position in the whole sequence, as mask functions index it."""
        return torch.nn.functional.pad(self.padding, (self.skipped, 0)) if self.skipped else self.padding


def _dense(x):
    if isinstance(x, (tuple, list)):  # an index is a tuple
        return tuple(map(_dense, x)) if isinstance(x, tuple) else [_dense(part) for part in x]
    return x.dense() if isinstance(x, Mask) else x


def _operator(name: str) -> Callable:
    operator = getattr(Tensor, name)
    return lambda mask, *others: operator(mask.dense(), *_dense(others))


def _and(mask: Mask, other) -> Tensor:
    """The intersection, a tensor with the mask as an attribute: Qwen4's layers select keys of their mask by it."""
    both_masks = mask.dense() & _dense(other)
    if not is_compiling():
        setattr(both_masks, ORIGIN, mask)
    return both_masks


for _name in ("or", "ror", "xor", "rxor", "invert", "mul", "rmul"):
    setattr(Mask, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("and", "rand"):
    setattr(Mask, f"__{_name}__", _and)


@torch.compiler.disable(reason="masks are created by reading the closures that transformers composes")
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = CAUSAL,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Mask | PlannedMask:
    """The mask function that `register` registers with transformers, which documents the arguments (sdpa_mask).

    Locates the padding and packed sequences once, like transformers' own mask functions, which synchronizes; not during
    CUDA graph capture.
    torch.compile breaks the graph of a model here, and compiles the rest; it does not if the mask is created ahead of
    the forward pass, as generate() does for static caches.
    """
    kind = kind_of(mask_function)
    if (plans := active()) is not None:
        return plans.mask(batch_size, (q_length, kv_length), q_offset, kind, attention_mask)
    if kind is not None and kind.sequences is not None and _is_one(kind.sequences):
        kind = Kind(kind.left, kind.right)
    shift = q_offset - kv_offset  # a new tensor: a static cache increments its own in place
    padding, begin, trailing = None, None, False
    if attention_mask is not None:
        end = kv_offset + kv_length
        whole: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = whole[:, kv_offset:end]
        if not captured(padding):
            padding, begin, trailing = _located(padding, kind, shift, q_length)
    lengths, device = (q_length, kv_length), torch.device(device)
    return Mask(batch_size, lengths, shift, kv_offset, kind, mask_function, padding, device, begin, trailing)


def _is_one(sequences: Tensor) -> bool:
    """True if each batch index has one sequence: under torch.compile transformers does not look, and assumes several.
    Synchronizes."""
    return not captured(sequences) and bool((sequences == sequences[:, :1]).all())


def _located(padding: Tensor, kind: Kind | None, shift: int | Tensor, rows: int) -> tuple:
    """(padding, begin, trailing) of Mask, with one synchronization; None for a padding that masks no visible column."""
    column = torch.arange(padding.shape[1], device=padding.device)
    causal = kind is not None and kind.right == 0
    token = padding
    if causal:  # columns after the last row's are masked for all rows: in a static cache most of them
        last = shift + rows
        token = padding | (column >= (last.to(padding.device) if isinstance(last, Tensor) else last))
    if not causal:
        return (None if bool(token.all()) else padding), None, False
    begin = padding.int().argmax(-1)
    found = token.all(), (token | (column < begin[:, None])).all(), (padding[:, 1:] <= padding[:, :-1]).all()
    whole, behind, trailing = torch.stack(found).tolist()
    if whole:
        return None, None, False
    decodes = kind is not None and kind.sequences is None and rows <= MOST_DECODE_ROWS
    return padding, (begin.int() if behind and decodes else None), trailing
