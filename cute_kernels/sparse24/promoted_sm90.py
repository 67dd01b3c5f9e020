"""The sm_90 mainloop of 8-bit floats with a 2:4 sparse A and accurate sums: those of each K-tile are promoted to fp32.

WGMMA of 8-bit floats keeps some 14 bits of its sums' mantissas (matmul.promoted_sm90). So it writes those of a K-tile
to a fragment, which the CUDA cores add to a tile's accumulators. Of a K-tile of 256 columns these are 128 products, as
many as dense sums have that are promoted after 128 of K; one of 128 columns has 64.

    consumer groups    wait full[s] -> read this thread's metadata
                       -> for each slab of 64 rows and part of at most 128 columns:
                              issue the K-tile's WGMMAs, commit -> wait until they are done -> add
                       -> release empty[s] -> s += 1

A wait for each product is what its metadata ask for, too: they are read while it runs (mainloop_sm90). A warpgroup's
own products do not overlap with its additions, but the other one's do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ..tile.ptx import read_after_wait
from .format import SPAN
from .mainloop_sm90 import LINE, Sparse24MainloopSm90


class PromotedSparse24MainloopSm90(Sparse24MainloopSm90):
    """Steps of one work tile; loads are those of Sparse24MainloopSm90. A product has at most 128 columns.

    scaled: whether each K-tile's sums are multiplied by the scale of its block as they are added (k_tiles.scale).
    """

    columns = 128

    def __init__(self, *terms, facts, scaled: bool = False):
        super().__init__(*terms, facts=facts)
        self.part_n, self.scaled = min(self.n, self.columns), scaled
        self.steps = self.k_blocks[0] // 2
        self.spans = facts.config.tile_k // SPAN

    @cute.jit
    def mma(
        self,
        k_tiles,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        tCrA: tuple,  # operand_a
        tCrB: Int32,  # operand_b
        pipeline,
        read,
        release,
        consumer_group: cutlass.Int32,
    ):
        """Accumulate every K-tile into acc; returns the read and release states after them."""
        acc.fill(0.0)
        part = cute.make_rmem_tensor(self.part_n // 2, Float32)
        scale = self.scale(k_tiles, 0)
        for i in cutlass.range(k_tiles.count, unroll=1):
            following = self.scale(k_tiles, i + 1)
            pipeline.consumer_wait(read)
            self.add_k_tile(acc, part, tCrA, tCrB, read.index, scale)
            pipeline.consumer_release(release)
            read.advance()
            release.advance()
            scale = following
        return read, release

    def scale(self, k_tiles, i):
        """Of the block of K-tile i, which may be past the last; a number that nothing uses where blocks have none."""
        return k_tiles.scale(i) if self.scaled else Float32(1.0)

    @cute.jit
    def add_k_tile(self, acc: cute.Tensor, part: cute.Tensor, tCrA: tuple, tCrB: Int32, stage: Int32, scale: Float32):
        """Add the products of a stage, one by one."""
        slabs, parts = const_expr(cute.size(acc, mode=[1])), const_expr(cute.size(acc, mode=[2]))
        words = self.metadata_words(tCrA, stage, slabs, self.spans)
        for m in range_constexpr(slabs):
            for n in range_constexpr(parts):
                b = tCrB + (n * self.part_n * LINE >> 4)
                warpgroup.fence()
                for k in range_constexpr(self.steps):
                    self.start_step(part, self.part_n, tCrA, b, stage, [[w[m]] for w in words], k, k > 0, m)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                read_after_wait(part)
                sums = acc[None, m, n]  # (MMA,)
                for v in range_constexpr(cute.size(part)):
                    sums[v] = sums[v] + (part[v] * scale if const_expr(self.scaled) else part[v])
                read_after_wait(sums)  # added before the next product writes the fragment
