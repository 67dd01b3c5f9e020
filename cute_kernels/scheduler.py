"""Which work tile next: a linear index walks panels of N, so that what neighbours share stays in L2.

One panel is `group` tiles wide and spans all rows; inside it the index runs along N first. 132 CTAs at work then
cover about 132 / group row tiles by `group` column tiles: for a dense product a near-square patch of D, for a
block-sparse one a panel of B (K x group x tile_n elements) that stays in L2 while every block row passes over it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class TileScheduler:
    """Work tiles (m, n, l) of a product, in units of cluster tiles.

    A persistent kernel takes index blockIdx, blockIdx + gridDim, ...; a plain one takes its blockIdx and stops.
    Every role of a kernel decodes the same index with the same function, so their tile counts cannot differ.
    """

    tiles_m: Int32
    tiles_n: Int32
    batch: Int32
    group: Int32  # tiles of N in a panel

    @property
    def count(self):
        return self.tiles_m * self.tiles_n * self.batch

    @cute.jit
    def decode(self, index: Int32):
        """(m, n, l) of a linear index; the last panel may be narrower."""
        per_batch = self.tiles_m * self.tiles_n
        l = index // per_batch
        rest = index - l * per_batch
        per_panel = self.tiles_m * self.group
        panel = rest // per_panel
        rest = rest - panel * per_panel
        n0 = panel * self.group
        width = cutlass.min(self.group, self.tiles_n - n0)
        m = rest // width
        return m, n0 + rest - m * width, l
