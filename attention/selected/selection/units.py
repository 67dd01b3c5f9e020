"""Units of work of the kernel of block scores: pairs of a query tile and a KV tile that some of its rows see."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Place(NamedTuple):
    """A unit: list and batch as one number, query tile, KV tile."""

    item: Int32
    m: Int32
    n: Int32


class Units(NamedTuple):
    """Units in the order of lists, query tiles and KV tiles.

    per: keys of a row of K; 0 if all rows see all keys.
    first: number of the 128 positions with the last row of query tile 0, floor((position of row 0 + 127) / 128).
    """

    per: Int32
    first: Int32
    tiles_m: Int32
    tiles_n: Int32

    @cute.jit
    def visible(self, m: Int32) -> Int32:
        """KV tiles that query tile m sees."""
        count = self.tiles_n
        if self.per > 0:
            count = (self.first + m) // self.per + 1
        return count

    @cute.jit
    def before(self, m: Int32) -> Int32:
        """Units of a list before query tile m: the sum of visible(i) over i < m."""
        count = m * self.tiles_n
        if self.per > 0:
            count = m + self.sum_of_floors(self.first + m) - self.sum_of_floors(self.first)
        return count

    def sum_of_floors(self, x: Int32) -> Int32:
        """Sum of i // per over i < x."""
        whole, rest = x // self.per, x % self.per
        return self.per * (whole * (whole - 1) // 2) + whole * rest

    @cute.jit
    def find(self, unit: Int32) -> Place:
        """The place of a unit."""
        each = self.before(self.tiles_m)
        item, rest = unit // each, unit % each
        low, high = Int32(0), self.tiles_m - 1  # the last tile that does not begin after the unit
        while low < high:
            middle = (low + high + 1) // 2
            if self.before(middle) <= rest:
                low = middle
            else:
                high = middle - 1
        return Place(item, low, rest - self.before(low))

    @cute.jit
    def next(self, at: Place) -> Place:
        item, m, n = at.item, at.m, at.n + 1
        if n == self.visible(m):
            m, n = m + 1, Int32(0)
            if m == self.tiles_m:
                item, m = item + 1, Int32(0)
        return Place(item, m, n)
