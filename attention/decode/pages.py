"""Where rows of K and V are in memory when they lie in pages: page_table (B, pages of an item) names the pages."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cutlass_dsl import select_

from ..forward.config import DecodeFacts


@cute.jit
def pages_of_tile(facts: cutlass.Constexpr, mTable: cute.Tensor | None, b: Int32, n: Int32) -> Int32:
    """Lane j gets the number of the page that box j of item b's tile n is in; 0 without pages."""
    page = Int32(0)
    if const_expr(mTable is not None):
        boxes = const_expr(facts.config.tile_n // facts.box)
        slot = (n * facts.config.tile_n + cute.arch.lane_idx() % boxes * facts.box) // facts.page_size
        page = mTable[b, cutlass.min(slot, mTable.shape[1] - 1)]
    return page


def box_of_tile(facts: DecodeFacts, pages: Int32, b: Int32, n: Int32, j: int) -> tuple:
    """(box, item or page): where box j of item b's tile n is; `pages` are pages_of_tile's."""
    if not facts.page_size:
        return n, b
    boxes = facts.config.tile_n // facts.box
    return (n * boxes + j) % (facts.page_size // facts.box), cute.arch.shuffle_sync(pages, j)


def place_of_row(
    facts: DecodeFacts,
    mTable: cute.Tensor,  # (B, pages of an item)
    pages: Int32,  # how many there are
    b: Int32,
    row: Int32,
    past_end: bool,  # whether the row may be past the last page of an item
) -> tuple:
    """(page, row in it, whether there is such a page; if not, the page is 0)."""
    slot, row = row // facts.page_size, row % facts.page_size
    if past_end:
        slot = cutlass.min(slot, mTable.shape[1] - 1)
    page = mTable[b, slot]
    exists = (page >= 0) & (page < pages)
    return select_(exists, page, Int32(0)), row, exists
