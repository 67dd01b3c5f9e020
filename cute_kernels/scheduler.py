"""Tile scheduler: a linear tile index is rasterized in panels of N, so that shared operands stay in L2.

A panel is `group` tiles wide and spans all rows; inside it the index runs along N first. 132 resident CTAs then cover
about 132 / group row tiles by `group` column tiles. For a dense GEMM this is a near-square patch of D, for a
block-sparse one a panel of B (K x group x tile_n elements) that stays in L2 while all block rows read it.

Work tiles of a sparse GEMM differ in length. A table then gives their order, so that all CTAs finish together: see
sparse_collective.bsr_gemm.tile_order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_


@dataclass(frozen=True)
class TileScheduler:
    """Work tiles (m, n, l) of a GEMM, in units of cluster tiles.

    A CTA of a persistent kernel processes indices blockIdx, blockIdx + gridDim, ...; of any other kernel only blockIdx.
    All roles of a kernel decode the same index with the same function, so their tile counts cannot differ.

    With `order`, index i is the tile order[i] = (m, l * tiles_n + n). It has a whole number of rounds, each with one
    tile per worker. Only in the last round a worker may have none, marked by -1.
    """

    tiles_m: Int32
    tiles_n: Int32
    batch: Int32
    group: Int32  # tiles of N per panel
    order: cute.Tensor | None = None  # (rounds x workers, 2)
    divisors: tuple | None = None  # set by `with_divisors`

    @staticmethod
    def with_divisors(tiles_m: Int32, tiles_n: Int32, batch: Int32, group: Int32, order=None) -> "TileScheduler":
        """A scheduler whose `decode` divides by multiplication, with divisors precomputed by a kernel's host code.

        A division by a runtime value takes some 150 clocks, and a tile needs six, for its own index and the next one's:
        a twentieth of a block-sparse tile of eight K-tiles.
        """
        if order is not None:
            numbers = (tiles_n,)
        else:
            last = tiles_n - (tiles_n - 1) // group * group  # width of the last panel
            numbers = tiles_m * tiles_n, tiles_m * group, group, last
        divisors = tuple(cute.fast_divmod_create_divisor_v2(cutlass.max(n, 1)) for n in numbers)
        return TileScheduler(tiles_m, tiles_n, batch, group, order, divisors)

    @property
    def count(self):
        if self.order is not None:
            return self.order.shape[0]
        return self.tiles_m * self.tiles_n * self.batch

    @cute.jit
    def end(self, first: Int32, step: Int32):
        """End of the index range of worker `first` of `step`."""
        end = self.count
        if cutlass.const_expr(self.order is not None):
            last = end - step + first
            end = last + cutlass.min(self.order[last, 0] + 1, 1)  # one less if the last round has no tile
        return end

    @cute.jit
    def decode(self, index: Int32):
        """(m, n, l) of a linear index; the last panel may be narrower."""
        if cutlass.const_expr(self.order is not None):
            m = cutlass.max(self.order[index, 0], 0)
            rest = cutlass.max(self.order[index, 1], 0)
            l = rest // (self.tiles_n if cutlass.const_expr(self.divisors is None) else self.divisors[0])
            n = rest - l * self.tiles_n
        elif cutlass.const_expr(self.divisors is not None):
            by_batch, by_panel, by_row, by_last_row = self.divisors
            l, rest = divmod(index, by_batch)
            panel, rest = divmod(rest, by_panel)
            n0 = panel * self.group
            m, n = divmod(rest, by_row)
            last_m, last_n = divmod(rest, by_last_row)
            last = n0 + self.group > self.tiles_n
            m, n = select_(last, last_m, m), n0 + select_(last, last_n, n)
        else:
            per_batch = self.tiles_m * self.tiles_n
            l = index // per_batch
            rest = index - l * per_batch
            per_panel = self.tiles_m * self.group
            panel = rest // per_panel
            rest = rest - panel * per_panel
            n0 = panel * self.group
            width = cutlass.min(self.group, self.tiles_n - n0)
            m = rest // width
            n = n0 + rest - m * width
        return m, n, l
