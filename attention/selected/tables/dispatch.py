"""Launch the kernels that make the tables of selected blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime import families
from cute_kernels.runtime.device import collected, device_arch

from ..unions.config import SIDE, WORD, tokens_of
from . import family  # noqa: F401 (importing it registers the family)
from .config import MOST_COLUMNS, OrderFacts, facts_for

MOST_CTAS = 2**31 - 1
FAR = 2**30  # keys; more than any position


class Tables(NamedTuple):
    """The tables of lists (B, Sq, G, top), for H heads, G if they are not copied.

    words: (B, G, Sq, n) int32, the bits of blocks.Member.
    counts: (B, H, Mq) int32, the columns of blocks of scores that a row of blocks has.
    columns: (B, H, Mq, width) int32, these columns in ascending order; later entries are undefined.
    """

    words: Tensor
    counts: Tensor
    columns: Tensor


def supports(indices: Tensor, columns: int, packed: int, side: int = SIDE) -> bool:
    """True if the kernel makes the tables of these lists, of sequences with this many columns."""
    batch, length, groups, _ = indices.shape
    return columns <= MOST_COLUMNS and batch * groups * -(-length * packed // side) <= MOST_CTAS


def selected_tables(
    indices: Tensor, block_size: int, first: Tensor | None, end: Tensor | None, columns: int, packed: int, *,
    shift: int | None, copies: int, side: int = SIDE,
) -> Tables:  # fmt: skip
    """The tables of lists (B, Sq, G, top) int32 on a GPU, of rows that are `packed` heads of each token.

    Entries that are no block are ignored, and a block that is listed twice counts once. Does not synchronize.

    first, end: (Sq,) int32, the columns of each token's sequence; None: column 0 to `columns`.
    shift: token i attends to keys up to i + shift; None: to all.
    copies: number of heads that get a list each; 1 if the lists are broadcast.
    side: rows of a row of blocks of scores; these have 128 columns.
    """
    batch, length, groups, top = indices.shape
    kv_blocks, cols, rows = -(-columns // block_size), -(-columns // SIDE), -(-length * packed // side)
    per_entry = 1 if first is None or block_size == 1 else 2
    width = min(cols, tokens_of(packed, side) * top * per_entry)
    facts = facts_for(device_arch(indices.get_device())[0].target, block_size, kv_blocks, top, first is not None)
    lists = indices if indices.stride(3) == 1 else indices.contiguous()
    shapes = (groups, length, -(-kv_blocks // WORD)), (groups * copies, rows), (groups * copies, rows, width)
    # Not of the type of `indices`, which is a fake tensor where calls are collected
    words, counts, listed = (torch.empty(batch, *n, dtype=torch.int32, device=indices.device) for n in shapes)
    if collected() is not None:  # the kernel is not launched, but torch operations may read the lists
        counts.zero_()
    last = FAR if shift is None else shift
    families.function_for(facts)(
        lists, words, counts, listed, first, end, kv_blocks, cols, packed, side, last, copies
    )  # fmt: skip
    return Tables(words, counts, listed)


def ordered(counts: Tensor, batch: int, heads: int, tiles_m: int, tiles_q: int, l2_heads: int) -> Tensor:
    """The table of block_source.OrderedScheduler, (tiles, 3) int32, of rows of partial blocks with these counts (B or
    1, H or 1, Mq). Tiles come in the order of QueryScheduler.

    tiles_m, tiles_q: query tiles of a head, and of a row of blocks.
    """
    table = counts.new_empty(batch * heads * tiles_m, 3)
    facts = OrderFacts(device_arch(counts.get_device())[0].target)
    families.function_for(facts)(counts, table, heads, tiles_m, tiles_q, min(l2_heads, batch * heads))
    return table
