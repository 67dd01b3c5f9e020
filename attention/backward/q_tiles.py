"""Which query tiles a tile of K and V is seen by: the iterator that backward's mainloops ask.

The transpose of forward/kv_tiles.py and block_source.py: a tile of scores is *partial* where some of its elements are
masked. Tiles come in ascending order, of a block mask the partial ones first, with two exceptions.

Without a mask each KV tile starts at a different query tile and wraps around. KV tiles that run at the same time would
otherwise add to the same part of dq_accum at the same time. With a causal mask they start on the diagonal, so they are
spread already.

Where sums have one order (turns.py) and there is a right bound, there are two ways in which no tile of K waits long.
*Up*: the tiles of K of a head are begun from the last one on, add in that order, and go up from the diagonal. Tile n
then comes to each query tile right after tile n + 1, and all can begin at once; but the longest tiles come last.
*Down*: they are begun and add from the first one on, and go down from the last query tile, with which all begin, one
after the other. With a window they begin with other ones, and do not wait for each other: all heads go down. Without a
left bound the last heads go down, since what is begun last should be short, and all others up.

    causal            | partial: the diagonal   | full: all after it |
    sliding window    | partial: the right edge | full: the body     | partial: the left edge |

Rows past the end need no mask: their LSE is inf, so that their P is 0.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import zero_of


@dataclass(frozen=True)
class QTiles:
    """The query tiles that see one tile of K and V."""

    count: Int32
    first: Int32  # number of the first one
    full: Int32  # tiles from this one on are full,
    full_end: Int32  # up to before this one
    n: Int32  # the tile of K
    reach: Int32 | None  # the first row's leftmost column; None without a left bound
    reach_right: Int32 | None  # its rightmost one, where some heads go up
    rows: Int32
    cols: Int32
    begin: Int32 | None  # the one that is visited first, before the others wrap around; None: the first one
    down: Int32 | None  # whether they come in descending order; None: they do not
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]

    def at(self, i) -> Int32:
        return self.first + self.place(i)

    def turn(self, number) -> Int32:
        """How many tiles of K add to a query tile before this one (turns.py)."""
        before = self.n
        if self.reach is not None:
            before = self.n - cutlass.max(number * self.tile_m + self.reach, 0) // self.tile_n
        if self.reach_right is None:
            return before
        last_row = cutlass.min((number + 1) * self.tile_m, self.rows) - 1
        last = cutlass.min(last_row + self.reach_right, self.cols - 1) // self.tile_n  # tile of K that the tile sees
        return select_(self.down == 1, before, last - self.n)

    def place(self, i) -> Int32:
        """Of the i-th tile, in ascending order."""
        if self.begin is not None:
            i = i + self.begin
            return i - self.count * Int32(i >= self.count)
        return i if self.down is None else select_(self.down == 1, self.count - 1 - i, i)

    def is_partial(self, i):
        i = self.place(i)
        return (i < self.full) | (i >= self.full_end)


@dataclass(frozen=True)
class WindowRows:
    """Row i sees columns i + offset - left to i + offset + right, of those that exist; offset is SeqlenInfo.offset."""

    window: cutlass.Constexpr  # forward.config.WindowKind: which of the bounds there are
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    left: Int32
    right: Int32
    around: cutlass.Constexpr[bool] = False  # whether tiles of K begin with different ones of their query tiles
    down: cutlass.Constexpr[bool] = False  # whether all heads go down
    # Where only the last heads do: the first of them, and how many heads of Q an item has; of packed sequences, which
    # are one item, 0.
    last_heads: tuple[Int32, Int32 | int] | None = None

    def for_tile(self, n, h, b, seqlen) -> QTiles:
        """The tiles that see tile n of K and V. Their order depends on the head, their number on the item's lengths."""
        first = n * self.tile_n
        after = cutlass.min(first + self.tile_n, seqlen.cols)
        begin, end = Int32(0), seqlen.rows
        full, full_end = Int32(0), seqlen.rows
        if self.window.right:
            begin = cutlass.max(first - seqlen.offset - self.right, 0)
            full = cutlass.max(after - 1 - seqlen.offset - self.right, 0)
        if self.window.left:
            end = cutlass.max(cutlass.min(end, after - seqlen.offset + self.left), 0)
            full_end = cutlass.max(cutlass.min(full_end, first - seqlen.offset + self.left + 1), 0)
        tile_begin, tile_end = begin // self.tile_m, (end + self.tile_m - 1) // self.tile_m
        count = cutlass.max(tile_end - tile_begin, 0) * Int32((begin < end) & (first < seqlen.cols))
        full = (full + self.tile_m - 1) // self.tile_m - tile_begin
        # The last rows' tile may go past the end: rows there have no scores.
        full_end = (full_end + (self.tile_m - 1) * Int32(full_end == seqlen.rows)) // self.tile_m - tile_begin
        # Columns past the end have scores of 0, which are none.
        full_end = full_end * Int32(first + self.tile_n <= seqlen.cols)
        reach = seqlen.offset - self.left if self.window.left else None
        around = n * (self.tile_n // self.tile_m) % cutlass.max(count, 1) if self.around else None
        reach_right, down = None, Int32(1) if self.down else None
        if self.last_heads is not None:
            first_head, heads = self.last_heads
            reach_right, down = seqlen.offset + self.right, Int32(b * heads + h >= first_head)
        bounds = reach, reach_right, seqlen.rows, seqlen.cols
        return QTiles(count, tile_begin, full, full_end, n, *bounds, around, down, self.tile_m, self.tile_n)

    def bounds(self, column, seqlen) -> tuple:
        """(begin, end) of the rows that see a column; none see one past the end."""
        begin, end = Int32(0), seqlen.rows
        if self.window.right:
            begin = column - seqlen.offset - self.right
        if self.window.left:
            end = cutlass.min(end, column - seqlen.offset + self.left + 1)
        return begin, end * Int32(column < seqlen.cols)


@dataclass(frozen=True)
class BlockQTiles:
    """The query tiles of the blocks of one column: those of its partial blocks, then those of its full ones."""

    count: Int32
    blocks: Int32
    partial: Int32  # how many blocks are partial
    partial_index: cute.Tensor  # (B, H, Mk, width)
    full_index: cute.Tensor  # (B, H, Mk, width)
    item: Int32  # which of B,
    head: Int32  # of H
    column: Int32  # and of Mk
    n: Int32  # the tile of K
    ranks: cute.Tensor | None  # BlockRows'
    tiles_k: cutlass.Constexpr[int]  # tiles of K a block
    steps: cutlass.Constexpr[int]  # query tiles a block

    @cute.jit
    def at(self, i) -> Int32:
        """Number of the i-th tile; past the last one, the number of some other tile.

        Addresses of the lists are computed each time, by each thread for itself: they would take a dozen registers all
        through a mainloop, and there are still fewer of those that all threads of a warp share.
        """
        block = cutlass.max(cutlass.min(i // self.steps, self.blocks - 1), 0)
        zero = zero_of(block + cute.arch.lane_idx())
        place = self.item + zero, self.head + zero, self.column + zero
        row = Int32(0)
        if block < self.partial:
            row = Int32(self.partial_index[(*place, block)])
        elif block < self.blocks:
            row = Int32(self.full_index[(*place, block - self.partial)])
        return row * self.steps + i % self.steps

    def turn(self, number) -> Int32:
        """How many tiles of K before this one a query tile sees (turns.py)."""
        zero = zero_of(number + cute.arch.lane_idx())
        rank = Int32(self.ranks[self.item + zero, self.head + zero, number // self.steps, self.column + zero])
        return rank * self.tiles_k + self.n % self.tiles_k

    def is_partial(self, i):
        return i < self.partial * self.steps


@dataclass(frozen=True)
class BlockRows:
    """A BlockMask's lists by columns. Extents of 1 for the batch or the heads serve all items or heads."""

    partial_count: cute.Tensor  # (B, H, Mk) int32
    partial_index: cute.Tensor  # (B, H, Mk, width)
    full_count: cute.Tensor
    full_index: cute.Tensor
    ranks: cute.Tensor | None  # (B, H, Mq, Mk) int32: blocks listed before this one in its row; where turns are kept
    mask_tensors: tuple  # what the element mask reads
    tiles_k: cutlass.Constexpr[int]  # tiles of K a block
    steps: cutlass.Constexpr[int]  # query tiles a block

    def for_tile(self, n, h, b, seqlen) -> BlockQTiles:
        """The tiles that see tile n of K and V in head h of item b."""
        batch, heads = self.partial_count.shape[0], self.partial_count.shape[1]
        at = cutlass.min(b, batch - 1), cutlass.min(h, heads - 1), n // self.tiles_k
        partial, full = (cute.arch.make_warp_uniform(t[at]) for t in (self.partial_count, self.full_count))
        blocks = partial + full
        lists, counts = (self.partial_index, self.full_index), (blocks * self.steps, blocks, partial)
        return BlockQTiles(*counts, *lists, *at, n, self.ranks, self.tiles_k, self.steps)
