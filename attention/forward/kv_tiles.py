"""KV tiles that a query tile visits: the iterator of the attention mainloops.

A tile of scores is *partial* if some of its elements are masked, and *full* if none are. The tiles come in segments of
one kind each, so that a kernel has a loop without masking for full tiles:

    causal            | partial: the diagonal        | full: all before it |
    sliding window    | partial: the right edge      | full: the body      | partial: the left edge |
    neither           | partial: the end of K        | full: all before it |

Tiles are visited from the last to the first, so the one at the end of K is among the first partial ones.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from .heads import GqaPacking, OneHead

FULL, PARTIAL, EITHER = 0, 1, 2  # EITHER: known at run time, from the tile's segment


@dataclass(frozen=True)
class KvTiles:
    """KV tiles that one query tile visits."""

    count: Int32
    last: Int32  # index of the first tile to visit, the highest one
    ends: tuple  # number of tiles up to the end of each segment
    kinds: cutlass.Constexpr[tuple]  # of the segments, PARTIAL or FULL
    first: cutlass.Constexpr[int] = PARTIAL  # kind of the first tile; masking it always needs no branch

    def at(self, i) -> Int32:
        return self.last - i

    at_partial = at

    def part(self, begin: Int32, end: Int32) -> "KvTiles":
        """The tiles visited from position `begin` to before position `end`, which must exist."""
        ends = tuple(cutlass.max(cutlass.min(e, end) - begin, 0) for e in self.ends)
        return KvTiles(end - begin, self.last - begin, ends, self.kinds)


@dataclass(frozen=True)
class WindowSource:
    """Window in which row i attends to the existing columns from i + offset - left to i + offset + right
    (SeqlenInfo.offset).

    Causal is right = 0 and no left bound. By default the last row attends to the last column, whatever the lengths.
    """

    window: cutlass.Constexpr  # config.WindowKind: the bounds in use
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    left: Int32
    right: Int32
    heads: OneHead | GqaPacking = OneHead()

    def for_tile(self, tile, seqlen) -> KvTiles:
        """KV tiles of a query tile (scheduler.QueryTile) of a sequence with these lengths (seqlen.SeqlenInfo)."""
        first, after = self.heads.queries(tile.m, self.tile_m, seqlen.rows)
        offset, cols = seqlen.offset, seqlen.cols
        end, full_end = cols, cols
        if self.window.right:
            end = cutlass.max(cutlass.min(cols, after + offset + self.right), 0)
            full_end = cutlass.max(cutlass.min(cols, first + offset + self.right + 1), 0)
        begin, full_begin = Int32(0), Int32(0)
        if self.window.left:
            begin = cutlass.min(cutlass.max(first + offset - self.left, seqlen.begin), end)
            full_begin = cutlass.min(cutlass.max(after - 1 + offset - self.left, seqlen.begin), end)
        n_end, n_begin = (end + self.tile_n - 1) // self.tile_n, begin // self.tile_n
        count = cutlass.max(n_end - n_begin, 0)
        right = cutlass.min(n_end - full_end // self.tile_n, count)  # tiles at the right edge
        ends, kinds = (right, count), (PARTIAL, FULL)
        if self.window.left:
            body = cutlass.max(n_end - (full_begin + self.tile_n - 1) // self.tile_n, right)
            ends, kinds = (right, cutlass.min(body, count), count), (PARTIAL, FULL, PARTIAL)
        return KvTiles(count, n_end - 1, ends, kinds)

    def bounds(self, row, seqlen) -> tuple:
        """(begin, end) of the columns that a row attends to."""
        row, begin, end = self.heads.query(row), Int32(0), seqlen.cols
        if self.window.right:
            end = cutlass.min(end, row + seqlen.offset + self.right + 1)
        if self.window.left:
            begin = row + seqlen.offset - self.left
            if not isinstance(seqlen.begin, int):
                begin = cutlass.max(begin, seqlen.begin)
        return begin, end
