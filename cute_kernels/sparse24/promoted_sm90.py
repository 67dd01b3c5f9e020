"""The sm_90 FP8 mainloop with a 2:4 sparse A and promoted accumulation: each K-tile's partial sum is added in FP32.

FP8 WGMMA keeps some 14 bits of its accumulators' mantissas (matmul/mainloops/promoted_sm90.py). So it writes the
partial sum of a K-tile
 to a fragment, which CUDA cores add to the tile's accumulators. A K-tile of 256 columns has 128 nonzero terms per
partial sum, as many as the dense mainloop; one of 128 columns has 64.

    consumer groups    wait full[s] -> read this thread's metadata
                       -> for each slab of 64 rows and part of at most 128 columns:
                              issue the K-tile's WGMMAs, commit -> wait until they are done -> add
                       -> release empty[s] -> s += 1

The wait after each WGMMA is needed for its metadata, too, which it reads while it runs (mainloop_sm90). A warpgroup's
own WGMMAs do not overlap with its additions, but the other warpgroup's do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ..tile.ptx import read_after_wait
from .format import SPAN
from .mainloop_sm90 import LINE, Sparse24MainloopSm90


class PromotedSparse24MainloopSm90(Sparse24MainloopSm90):
    """Steps of one work tile; loads are those of Sparse24MainloopSm90. A WGMMA has at most 128 columns.

    scaled: True if each K-tile's partial sum is multiplied by the scale of its block as it is added (k_tiles.scale).
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
        """The scale of K-tile i's block; i may be past the last K-tile. 1.0, which is not used, if blocks have no
        scale."""
        return k_tiles.scale(i) if self.scaled else Float32(1.0)

    @cute.jit
    def add_k_tile(self, acc: cute.Tensor, part: cute.Tensor, tCrA: tuple, tCrB: Int32, stage: Int32, scale: Float32):
        """Multiply and accumulate a stage, one WGMMA group at a time."""
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
                read_after_wait(sums)  # added before the next WGMMA overwrites the fragment
