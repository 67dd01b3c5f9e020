"""Iterators over the query tiles that attend to a KV tile, for backward's mainloops.

They are the transpose of forward/kv_tiles.py and block_source.py: a tile of scores is *partial* if some of its elements
are masked. Tiles come in ascending order, or with a block mask the partial ones first, with two exceptions.

Without a mask each KV tile starts at a different query tile and wraps around. KV tiles that run at the same time would
otherwise add to the same part of dq_accum at the same time. With a causal mask they start on the diagonal, so they are
spread already.

Deterministic accumulation (semaphores.py) with a right bound has two orders in which no KV tile waits long. *Up*: the
KV tiles of a head start from the last one, accumulate in that order, and iterate upwards from the diagonal. Tile n
reaches each query tile right after tile n + 1, and all can start at once; but the longest tiles come last. *Down*: KV
tiles start and accumulate from the first one, and iterate downwards from the last query tile, with which all start, one
after the other. With a window they start at different query tiles and do not wait for each other, so all heads go down.
Without a left bound the last heads go down, since the tiles that start last should be short, and all others go up.

    causal            | partial: the diagonal   | full: all after it |
    sliding window    | partial: the right edge | full: the body     | partial: the left edge |

Rows past the end need no mask: their LSE is inf, so their P is 0.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import zero_of


@dataclass(frozen=True)
class QTiles:
    """The query tiles that attend to one KV tile."""

    count: Int32
    first: Int32  # index of the first tile
    full: Int32  # first full tile, counted from `first`
    full_end: Int32  # end of the full tiles, exclusive
    n: Int32  # the KV tile
    reach: Int32 | None  # leftmost column of row 0; None without a left bound
    reach_right: Int32 | None  # rightmost column of row 0, if some heads go up
    rows: Int32
    cols: Int32
    begin: Int32 | None  # the tile that iteration starts at before it wraps around; None: the first one
    down: Int32 | None  # 1 for descending order, 0 for ascending; None: ascending
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]

    def at(self, i) -> Int32:
        return self.first + self.place(i)

    def turn(self, number) -> Int32:
        """Number of KV tiles that accumulate into query tile `number` before this one (semaphores.py)."""
        before = self.n
        if self.reach is not None:
            before = self.n - cutlass.max(number * self.tile_m + self.reach, 0) // self.tile_n
        if self.reach_right is None:
            return before
        last_row = cutlass.min((number + 1) * self.tile_m, self.rows) - 1
        last = cutlass.min(last_row + self.reach_right, self.cols - 1) // self.tile_n  # the query tile's last KV tile
        return select_(self.down == 1, before, last - self.n)

    def place(self, i) -> Int32:
        """Position of the i-th tile in ascending order."""
        if self.begin is not None:
            i = i + self.begin
            return i - self.count * Int32(i >= self.count)
        return i if self.down is None else select_(self.down == 1, self.count - 1 - i, i)

    def is_partial(self, i):
        i = self.place(i)
        return (i < self.full) | (i >= self.full_end)


@dataclass(frozen=True)
class WindowRows:
    """Query tiles for a window: row i attends to columns i + offset - left to i + offset + right, clipped to the
    sequence; offset is SeqlenInfo.offset."""

    window: cutlass.Constexpr  # forward.config.WindowKind: the bounds that are present
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    left: Int32
    right: Int32
    around: cutlass.Constexpr[bool] = False  # True if KV tiles start at different query tiles and wrap around
    down: cutlass.Constexpr[bool] = False  # True if all heads go down
    # If only the last heads go down: the first of them, and the number of query heads per batch (0 for packed
    # sequences, which are one batch).
    last_heads: tuple[Int32, Int32 | int] | None = None

    def for_tile(self, tile, h, seqlen) -> QTiles:
        """The tiles of head h that attend to a problem.KvTile. Their order depends on the head."""
        n, b = tile.n, tile.b
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
        # The last tile is full even if it extends past the end: rows there have P = 0.
        full_end = (full_end + (self.tile_m - 1) * Int32(full_end == seqlen.rows)) // self.tile_m - tile_begin
        # A KV tile that extends past the end has no full tiles: the scores of those columns must be masked.
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
        """(begin, end) of the rows that attend to a column; empty for a column past the end."""
        begin, end = Int32(0), seqlen.rows
        if self.window.right:
            begin = column - seqlen.offset - self.right
        if self.window.left:
            end = cutlass.min(end, column - seqlen.offset + self.left + 1)
        return begin, end * Int32(column < seqlen.cols)


@dataclass(frozen=True)
class BlockQTiles:
    """The query tiles of one column of blocks: those of its partial blocks, then those of its full blocks."""

    count: Int32
    blocks: Int32
    partial: Int32  # number of partial blocks
    partial_index: cute.Tensor  # (B, H, Mk, width)
    full_index: cute.Tensor  # (B, H, Mk, width)
    item: Int32  # index in B
    head: Int32  # index in H
    column: Int32  # index in Mk
    before: Int32  # rows of blocks before those that the lists count from; see BlockRows.ranges
    n: Int32  # the KV tile
    ranks: cute.Tensor | None  # BlockRows'
    tiles_k: cutlass.Constexpr[int]  # KV tiles per block
    steps: cutlass.Constexpr[int]  # query tiles per block

    @cute.jit
    def at(self, i) -> Int32:
        """Index of the i-th tile; past the last one, the index of some other tile.

        Each thread recomputes the addresses of the lists at every call: kept in registers they would take a dozen
        throughout the mainloop, and uniform registers are even scarcer.
        """
        block = cutlass.max(cutlass.min(i // self.steps, self.blocks - 1), 0)
        zero = zero_of(block + cute.arch.lane_idx())
        place = self.item + zero, self.head + zero, self.column + zero
        row = Int32(0)
        if block < self.partial:
            row = Int32(self.partial_index[(*place, block)])
        elif block < self.blocks:
            row = Int32(self.full_index[(*place, block - self.partial)])
        return (self.before + row) * self.steps + i % self.steps

    def partial_row(self, i) -> Int32:
        """Row of blocks of the i-th tile, for a mask without full blocks: any number if there is no tile, and past the
        last one the row of some other tile. See `at` for the addresses."""
        block = cutlass.max(cutlass.min(i // self.steps, self.blocks - 1), 0)
        zero = zero_of(block + cute.arch.lane_idx())
        return self.before + Int32(self.partial_index[self.item + zero, self.head + zero, self.column + zero, block])

    def turn(self, number) -> Int32:
        """Number of KV tiles before this one that query tile `number` attends to (semaphores.py)."""
        zero = zero_of(number + cute.arch.lane_idx())
        rank = Int32(self.ranks[self.item + zero, self.head + zero, number // self.steps, self.column + zero])
        return rank * self.tiles_k + self.n % self.tiles_k

    def is_partial(self, i):
        return i < self.partial * self.steps


@dataclass(frozen=True)
class BlockRows:
    """The transposed lists of a BlockMask (by KV block). A batch or head extent of 1 is broadcast.

    With `ranges`, lists are (B, H * ranges, Mk, part): range r has rows of blocks r * part to before (r + 1) * part,
    and its lists count from the first of these.
    """

    partial_count: cute.Tensor  # (B, H, Mk) int32
    partial_index: cute.Tensor  # (B, H, Mk, width)
    full_count: cute.Tensor
    full_index: cute.Tensor
    ranks: cute.Tensor | None  # (B, H, Mq, Mk) int32: nonzero blocks before this one in its row; deterministic
    mask_tensors: tuple  # captured by the element mask
    tiles_k: cutlass.Constexpr[int]  # KV tiles per block
    steps: cutlass.Constexpr[int]  # query tiles per block
    ranges: Int32 | None = None  # number of ranges of query rows; BackwardFacts.ranges

    def for_tile(self, tile, h, seqlen) -> BlockQTiles:
        """The tiles of head h that attend to a problem.KvTile."""
        batch, heads = self.partial_count.shape[0], self.partial_count.shape[1]
        head, before = cutlass.min(h, heads - 1), Int32(0)
        if self.ranges is not None:
            head = cutlass.min(h, heads // self.ranges - 1) * self.ranges + tile.range
            before = tile.range * self.partial_index.shape[3]
        at = cutlass.min(tile.b, batch - 1), head, tile.n // self.tiles_k
        partial, full = (cute.arch.make_warp_uniform(t[at]) for t in (self.partial_count, self.full_count))
        blocks = partial + full
        lists, counts = (self.partial_index, self.full_index), (blocks * self.steps, blocks, partial)
        return BlockQTiles(*counts, *lists, *at, before, tile.n, self.ranks, self.tiles_k, self.steps)
