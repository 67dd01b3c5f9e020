"""From transformers' mask functions to what kernels take: a band, padding, packed sequences, or a traced function.

transformers describes a mask by a function of (item, head, query, key) positions, composed of its own closures, beside
the lengths and offsets of queries and keys and a padding mask. The usual compositions are known (kinds.py); every other
is kept as the function, and traced by torch, as masks of FlexAttention are. No tensor with an element for each score is
made, but for at most 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from transformers import masking_utils

from attention import BlockMask, create_block_mask
from attention.masks.block_lists import tables_of_rows
from attention.masks.mask_mods import Band, Elements, MaskMod, RowRange, both
from cute_kernels.runtime.derived import captured

from .kinds import CAUSAL, Kind, kind_of

FEW = 64  # rows, of decoding


@dataclass(frozen=True, eq=False)
class ItemRowRange:
    """Row q of item b sees the columns from begin[b, q] to before end[b, q]: two int32 (B, Sq)."""

    begin: Tensor
    end: Tensor

    def __call__(self, b, h, q, kv):
        return (kv >= self.begin[b, q]) & (kv < self.end[b, q])


class Mask(FlexBlockMask):
    """A layer's mask on its way through transformers, made once for all layers of its kind.

    It is a FlexAttention BlockMask by name only: of masks that are made ahead of the model's forward pass (static
    caches), transformers passes on those and 4-D tensors. All tensors that kernels need of it are made when first
    asked for, on the mask's device and without waiting for it.

    A model that reads its mask (indexers of DeepSeek-V3.2 and Qwen4) finds the bool tensor (batch, 1, rows, columns)
    that attn_implementation="sdpa" gives it: attributes, methods, operators and torch functions are those of `dense`.
    What they return is a tensor, which `attend` takes as a mask, too.

    Attributes:
        batch, lengths: items, and (rows, columns): of the queries, and of the keys that the layer's cache returns.
        shift: row i is at column i + shift; an int, or a 0-d tensor of a static cache.
        skipped: columns of the sequence that came before the first that is kept (sliding caches).
        kind: what `function` computes, None where only the function says that.
        padding: (B, columns) bool, True of tokens; None: all are.
        begin: (B,) int32, the column of each item's first token, where all after it are tokens; of few rows alone.
    """

    def __init__(self, batch, lengths, shift, skipped, kind, function, padding, device, begin=None):
        self.batch, self.lengths, self.shift, self.skipped = batch, lengths, shift, skipped
        self.kind, self.function, self.padding, self.mask_device = kind, function, padding, device
        self.begin = begin
        self.made = {}

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
        """Bool (batch, 1, rows, columns), True where a score takes part."""
        return self._once("dense", lambda: self.block_mask().to_dense(self.batch).expand(self.batch, -1, -1, -1))

    def __getattr__(self, name: str):
        """Attributes of a tensor that this class does not have. Those of a BlockMask do not exist."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(
                f"the attention mask of {__name__} has no attribute {name!r}: it is no BlockMask of FlexAttention, and "
                'no tensor has it; use attn_implementation="sdpa" or "eager" for models that read it'
            )
        return getattr(self.dense(), name)

    def __getitem__(self, index) -> Tensor:
        return self.dense()[index]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*_dense(args), **{key: _dense(x) for key, x in (kwargs or {}).items()})

    def to(self, device, *_, **__) -> Mask:
        """Itself, or what is kept for another device: layers of one model may be on several."""
        device = torch.device(device)
        if device == self.device:
            return self
        kind = self.kind
        if kind is not None and kind.sequences is not None:
            kind = Kind(kind.left, kind.right, kind.sequences.to(device))
        if kind is None:
            raise ValueError(
                "a mask of a function of its own cannot be moved to another device; keep its layers on one"
            )
        moved = (t.to(device) if isinstance(t, Tensor) else t for t in (self.shift, self.padding, self.begin))
        shift, padding, begin = moved
        terms = self.batch, self.lengths, shift, self.skipped, kind, self.function, padding, device, begin
        return self._once(("to", device), lambda: Mask(*terms))

    def __repr__(self) -> str:
        what = self.function if self.kind is None else self.kind
        return f"Mask({what}, lengths={self.lengths}, shift={self.shift}, padding={self.padding is not None})"

    __str__ = __repr__

    def _once(self, key, make: Callable):
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = make()
        return found

    def up_to(self, columns: int) -> Mask:
        """Of the first columns alone; without padding."""
        terms = (self.batch, (self.lengths[0], columns), self.shift, self.skipped, self.kind, self.function)
        return self._once(("up to", columns), lambda: Mask(*terms, None, self.device))

    def is_band(self) -> bool:
        """Whether the kind's bounds say all."""
        return self.kind is not None and self.kind.sequences is None and self.padding is None

    def seqused_k(self, batch: int) -> Tensor:
        """(batch,) int32: up to the last row's own column."""

        def make() -> Tensor:
            last = self.shift + self.lengths[0]
            if isinstance(last, Tensor):
                return last.to(device=self.device, dtype=torch.int32).expand(batch).contiguous()
            return torch.full((batch,), last, dtype=torch.int32, device=self.device)

        return self._once(("seqused_k", batch), make)

    def spans_k(self, batch: int) -> Tensor:
        """(batch, 2) int32: from each item's first token on."""
        begin = self.begin.expand(batch)
        return self._once(("spans_k", batch), lambda: torch.stack([begin, self.seqused_k(batch)], -1))

    def block_mask(self) -> BlockMask:
        """All of it as a block mask of these lengths."""

        def make() -> BlockMask:
            if self._few_rows():
                return BlockMask.from_elements(self._elements(), lengths=self.lengths)
            some, every, mask_mod = self.tables((128, 128))
            if mask_mod is None:
                return BlockMask.from_blocks(some, lengths=self.lengths)
            return BlockMask.from_blocks(some, lengths=self.lengths, partial=~every, mask_mod=mask_mod)

        return self._once("block mask", make)

    def within(self, blocks: BlockMask) -> BlockMask:
        """What this mask and another of the same lengths both see."""

        def make() -> BlockMask:
            if self._few_rows():
                return BlockMask.from_elements(blocks.to_dense() & self._elements(), lengths=self.lengths)
            some, every, mask_mod = self.tables(blocks.blocksize)
            if mask_mod is None:
                return blocks
            partial, full = blocks.tables()
            listed, mask_mod = partial | full, both(blocks.mask_mod, mask_mod)
            shape = torch.broadcast_shapes(listed.shape, some.shape)
            options = {"partial": (partial | ~every).expand(shape), "mask_mod": mask_mod}
            return BlockMask.from_blocks(
                (listed & some).expand(shape), blocks.blocksize, lengths=self.lengths, **options
            )

        return self._once(("within", id(blocks)), lambda: (make(), blocks))[0]  # blocks stays alive, as its id does

    def _few_rows(self) -> bool:
        """Whether to make a tensor of elements: numbers in a mask are constants of a kernel, and those of decoding
        change with every token."""
        return self.kind is not None and self.lengths[0] <= FEW

    def _elements(self) -> Tensor:
        """Bool (B or 1, 1, rows, columns), of a kind that is known."""
        begin, end, _ = self._bands()
        column = torch.arange(self.lengths[1], dtype=torch.int32, device=self.device)
        seen = (column >= begin[..., None]) & (column < end[..., None])  # (rows, columns) or (B, rows, columns)
        seen = seen[(None,) * (3 - seen.dim())][:, None]
        return seen if self.padding is None else seen & self.padding[:, None, None]

    def tables(self, blocksize) -> tuple[Tensor, Tensor, MaskMod | None]:
        """Blocks of which something, and of which all is seen, (B or 1, 1, Mq, Mk), and the element mask."""
        return self._once(("tables", blocksize), lambda: self._tables(blocksize))

    def _tables(self, blocksize) -> tuple:
        rows, columns = self.lengths
        if self.kind is None:
            mask_mod = self.function
            if self.padding is not None:
                mask_mod = masking_utils.and_masks(mask_mod, masking_utils.padding_mask_function(self.whole_padding()))
            if not isinstance(self.shift, int) or self.shift or self.skipped:
                offsets = (self._number(n) for n in (self.shift + self.skipped, self.skipped))
                mask_mod = masking_utils.add_offsets_to_mask_function(mask_mod, *offsets)
            found = create_block_mask(mask_mod, self.batch, None, *self.lengths, self.device, blocksize)
            partial, full = found.tables()
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
        """The columns [begin, end) of each row, int32 (rows,) or (B, rows), and the mask that says the same."""
        (rows, columns), kind = self.lengths, self.kind
        position = torch.arange(rows, dtype=torch.int32, device=self.device) + self.shift
        begin = torch.zeros_like(position) if kind.left is None else position - kind.left
        end = torch.full_like(position, columns) if kind.right is None else position + kind.right + 1
        if kind.sequences is not None:
            numbers = kind.sequences.contiguous()  # ascending along a row
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
        """As a tensor, which a kernel reads: a number would be a constant, and each other one another kernel."""
        return n if isinstance(n, Tensor) else torch.full((), n, dtype=torch.int32, device=self.device)

    def whole_padding(self) -> Tensor:
        """The padding by position in the whole sequence, as mask functions count."""
        return torch.nn.functional.pad(self.padding, (self.skipped, 0)) if self.skipped else self.padding


def _dense(x):
    if isinstance(x, (tuple, list)):  # an index is a tuple
        return tuple(map(_dense, x)) if isinstance(x, tuple) else [_dense(part) for part in x]
    return x.dense() if isinstance(x, Mask) else x


def _operator(name: str) -> Callable:
    operator = getattr(Tensor, name)
    return lambda mask, *others: operator(mask.dense(), *_dense(others))


for _name in ("and", "rand", "or", "ror", "xor", "rxor", "invert", "mul", "rmul"):
    setattr(Mask, f"__{_name}__", _operator(f"__{_name}__"))


@torch.compiler.disable(reason="masks are made by reading the closures that transformers composes them of")
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
) -> Mask:
    """The mask function that `register` hands to transformers, which documents the arguments (sdpa_mask).

    Looks once where padding is, as transformers' own do, which waits for the GPU; not while a CUDA graph is captured.
    torch.compile breaks the graph of a model here, and compiles what follows; it does not where the mask is
    made ahead of the forward pass, as generate() does for static caches.
    """
    kind = kind_of(mask_function)
    shift = q_offset - kv_offset  # of a tensor a new one: a static cache goes on counting in its own
    padding = begin = None
    if attention_mask is not None:
        end = kv_offset + kv_length
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset:end]
        if not captured(padding):
            padding, begin = _looked_up(padding, kind, shift, q_length)
    lengths, device = (q_length, kv_length), torch.device(device)
    return Mask(batch_size, lengths, shift, kv_offset, kind, mask_function, padding, device, begin)


def _looked_up(
    padding: Tensor, kind: Kind | None, shift: int | Tensor, rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """(the padding, None where no row sees any; Mask.begin), by one look at the device."""
    column = torch.arange(padding.shape[1], device=padding.device)
    causal = kind is not None and kind.right == 0
    token = padding
    if causal:  # no row sees what comes after the last one's column: in a static cache most of it
        last = shift + rows
        token = padding | (column >= (last.to(padding.device) if isinstance(last, Tensor) else last))
    if not causal or kind.sequences is not None or rows > FEW:
        return (None if bool(token.all()) else padding), None
    begin = padding.int().argmax(-1)
    whole, behind = torch.stack([token.all(), (token | (column < begin[:, None])).all()]).tolist()
    return (None if whole else padding), (begin.int() if behind and not whole else None)
