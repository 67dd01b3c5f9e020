"""Selected KV blocks as a block mask.

Each query token has a list of KV blocks of `block_size` tokens. The query heads that share a KV head, and so a list,
are packed: rows of Q are tokens * heads. 128 rows, 8 tokens of 16 heads, compute the union of the lists of their
tokens, in blocks of 128 x 128 scores (backward also 64 x 128), and an element mask reads a bit per (token, KV block).
Both are built on the device of the lists, without synchronization: on a GPU by the kernel in `tables`, elsewhere by
torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime.front import check_supported

from .. import plan as planning
from ..masks.block_mask import BlockMask
from ..masks.element_mask import NUMBER, MemberKind, bound
from ..masks.mask_mods import And, Band, MaskMod, RowRange
from .tables.dispatch import selected_tables, supports
from .unions.config import SIDE, WORD

BLOCK_SIZES = (1, 4, 16, 64, 128)
CHUNK = 2**28  # bytes of memory for one part of the rows
GATHER = sum(2 ** (56 - 7 * i) for i in range(8))  # 8 bytes of 0 or 1, times this: bit 56 + i is byte i


class SelectedBlocks(NamedTuple):
    """Lists of KV blocks as a mask, which selected_attention passes to the ops of block_sparse_attention.

    indices: (B, Sq, G, top) int32; blocks are counted from the first key of the batch index or packed sequence. Entries
        that are no block of it are ignored.
    causal: True if a token attends to keys up to its position, in each sequence.
    packed: query heads that the block-sparse kernels take as rows of one head's scores (rows.py), H / Hkv or 1.
    cu_seqlens_q, cu_seqlens_k: the first row and column of each packed sequence, with B of 1; both None: B sequences.
    """

    indices: Tensor
    block_size: int
    causal: bool
    packed: int = 1
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


@dataclass(frozen=True, eq=False)
class OfTokens:
    """A mask_mod of tokens, for rows that are `packed` heads of each token."""

    mask_mod: MaskMod
    packed: int

    def __call__(self, b, h, q, kv):
        return self.mask_mod(b, h, q // self.packed, kv)


@dataclass(frozen=True, eq=False)
class Member:
    """Columns in the selected blocks of a row.

    words: (B, G, Sq, n) int32; bit i of word w is set if block 32 w + i is selected.
    share: number of heads that have the same list.
    first: (Sq,) int32, the column at which a row's block 0 begins; None: column 0.
    """

    words: Tensor
    share: int
    block_size: int
    first: Tensor | None

    def __call__(self, b, h, q, kv):
        key = kv if self.first is None else (kv - self.first[q]).clamp(min=0)
        block = key // self.block_size
        word = self.words[b, h // self.share, q, block // WORD]
        return ((word >> (block % WORD)) & 1) != 0


def mask_of(
    selected: SelectedBlocks, heads: int, lengths: tuple[int, int], kernel: bool = True, side: int = SIDE
) -> BlockMask:
    """The block mask of scores (rows of q, Sk) = lengths with this number of heads, in blocks of side x 128.

    kernel: False to use torch operations on a GPU as well, for a plan that launches nothing.
    """
    indices, block_size, causal, packed, cu_q, cu_k = selected
    check_supported("selected_attention", indices)
    (rows, columns), tokens = lengths, indices.shape[1]
    grid = -(-rows // side), -(-columns // SIDE)
    if 0 in (*indices.shape, heads, *lengths):
        none = torch.zeros(grid, dtype=torch.bool, device=indices.device)
        return BlockMask.from_blocks(none, (side, SIDE), lengths=lengths)
    first = end = shift = constant = None
    visible: MaskMod | None = None
    if cu_q is not None and cu_k is not None:
        first, end = ranges_of(cu_q, cu_k, (tokens, columns), causal)
        visible = RowRange(first, end)
    elif causal:
        shift = columns - tokens  # no list should have blocks in the future
        constant = NUMBER if shift else 0  # others are new in each step of decode or of a chunked prefill
        visible = Band(None, 0, constant)
    share = heads // indices.shape[2]
    copies = share if 1 < indices.shape[2] < heads else 1
    if kernel and planning.has_kernel(indices) and supports(indices, columns, packed, side):
        words, *lists = selected_tables(
            indices, block_size, first, end, columns, packed, shift=shift, copies=copies, side=side
        )
        make = partial(BlockMask.of_partial, *lists)
    else:
        words, listed = tables_of(indices, block_size, first, end, columns, packed, side)
        if shift is not None:
            last = (torch.arange(1, grid[0] + 1, device=indices.device) * side - 1) // packed + shift
            listed &= torch.arange(grid[1], device=indices.device) * SIDE <= last[:, None]
        make = partial(BlockMask.from_blocks, listed if copies == 1 else listed.repeat_interleave(copies, 1))
    member = Member(words, share, block_size, first)
    mask_mod: MaskMod = member if visible is None else And(visible, member)
    if packed > 1:
        mask_mod = OfTokens(mask_mod, packed)
    key = Member, share, block_size, packed, constant, first is None, indices.device
    kind = MemberKind(block_size, packed, share, causal) if has_members(selected) else None
    reads = (words,) if first is None or end is None else (words, first, end)
    mask_mod = bound(mask_mod, key, reads, kind, shift or None)
    return make(blocksize=(side, SIDE), lengths=lengths, mask_mod=mask_mod)


def has_members(selected: SelectedBlocks) -> bool:
    """True if sm_90's backward evaluates the mask by a bit for each token (backward/members.py)."""
    whole_tokens = 64 % selected.packed == 0 or selected.packed % 64 == 0
    return selected.cu_seqlens_q is None and selected.block_size in (64, SIDE) and whole_tokens


def ranges_of(cu_q: Tensor, cu_k: Tensor, lengths: tuple[int, int], causal: bool) -> tuple[Tensor, Tensor]:
    """(first, end), two int32 (rows,): the columns that each row of packed sequences may attend to, none if it belongs
    to no sequence."""
    rows, columns = lengths
    row = torch.arange(rows, dtype=torch.int32, device=cu_q.device)
    last = len(cu_q) - 2
    if last < 0:
        return row * 0, row * 0
    sequence = torch.searchsorted(cu_q, row, right=True) - 1
    outside = (sequence < 0) | (sequence > last)
    sequence = sequence.clamp(0, last)
    first, end = cu_k[sequence].clamp(0, columns), cu_k[sequence + 1].clamp(0, columns)
    if causal:  # the last row of a sequence is at its last column
        end = torch.minimum(end, end - cu_q[sequence + 1] + row + 1)
    return first.masked_fill(outside, 0), end.masked_fill(outside, 0)


def tables_of(
    indices: Tensor, block_size: int, first: Tensor | None, end: Tensor | None, columns: int, packed: int,
    side: int = SIDE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(words, listed): the membership of Member, (B, G, Sq, n) int32, and the union of the lists in blocks of side x
    128 scores, bool (B, G, Mq, Mk), of rows that are `packed` heads of each token."""
    (batch, rows, groups, top), device = indices.shape, indices.device
    blocks = -(-columns // block_size)
    count, cols = -(-blocks // WORD), -(-columns // SIDE)
    words = torch.empty(batch, groups, rows, count, dtype=torch.int32, device=device)
    # A column more for entries that are ignored
    listed = torch.zeros(batch, groups, -(-rows * packed // side) * (cols + 1), dtype=torch.bool, device=device)
    step = max(1, CHUNK // (batch * groups * (count * WORD + 32 * top)))
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        index = indices[:, part].transpose(1, 2)  # (B, G, rows of this part, top)
        ignored = (index < 0) | (index >= blocks)
        begins = index.masked_fill(ignored, 0) * block_size
        ends = begins + block_size
        if first is not None and end is not None:
            begins, ends = begins + first[part, None], torch.minimum(ends + first[part, None], end[part, None])
            ignored |= begins >= ends
        row = torch.arange(part.start * packed, part.stop * packed, packed, device=device)[:, None]
        # Heads of a token may be in two tiles, and a packed sequence may begin inside a block of scores
        tiles = {*range(0, packed - 1, side), packed - 1} if side % packed else {0}
        for column in (begins,) if first is None else (begins, ends - 1):
            column = (column // SIDE).masked_fill(ignored, cols)
            for head in tiles:
                listed.scatter_(-1, ((row + head) // side * (cols + 1) + column).flatten(2), True)
        table = torch.zeros(*index.shape[:3], count * WORD + 8, dtype=torch.uint8, device=device)
        table.scatter_(-1, index.masked_fill(ignored, count * WORD).long(), 1)
        bits = (table.view(torch.int64)[..., :-1] * GATHER >> 56) & 255
        words[:, :, part] = bits.to(torch.uint8).view(torch.int32)
    return words, listed.view(batch, groups, -1, cols + 1)[..., :cols]
