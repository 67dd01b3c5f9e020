"""Addresses of rows of a paged KV cache: page_table (B, pages per sequence) contains the page indices."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cutlass_dsl import select_

from ..forward.config import DecodeFacts


@cute.jit
def pages_of_tile(facts: cutlass.Constexpr, mTable: cute.Tensor | None, b: Int32, n: Int32) -> Int32:
    """Lane j gets the page index of box j of sequence b's tile n; 0 without pages."""
    page = Int32(0)
    if const_expr(mTable is not None):
        boxes = const_expr(facts.config.tile_n // facts.box)
        slot = (n * facts.config.tile_n + cute.arch.lane_idx() % boxes * facts.box) // facts.page_size
        page = mTable[b, cutlass.min(slot, mTable.shape[1] - 1)]
    return page


def box_of_tile(facts: DecodeFacts, pages: Int32, b: Int32, n: Int32, j: int) -> tuple:
    """(box, batch index or page) of box j of sequence b's tile n; `pages` come from pages_of_tile."""
    if not facts.page_size:
        return n, b
    boxes = facts.config.tile_n // facts.box
    return (n * boxes + j) % (facts.page_size // facts.box), cute.arch.shuffle_sync(pages, j)


def place_of_row(
    facts: DecodeFacts,
    mTable: cute.Tensor,  # (B, pages per sequence)
    pages: Int32,  # number of pages
    b: Int32,
    row: Int32,
    past_end: bool,  # True if the row may be past the sequence's last page
) -> tuple:
    """(page, row in it, True if the page is valid; otherwise the page is 0)."""
    slot, row = row // facts.page_size, row % facts.page_size
    if past_end:
        slot = cutlass.min(slot, mTable.shape[1] - 1)
    page = mTable[b, slot]
    exists = (page >= 0) & (page < pages)
    return select_(exists, page, Int32(0)), row, exists
