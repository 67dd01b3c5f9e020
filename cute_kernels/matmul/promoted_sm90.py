"""The sm_90 mainloop of 8-bit floats with accurate sums: those of every 128 of K are promoted to fp32.

WGMMA of 8-bit floats keeps some 14 bits of its sums' mantissas. So a warpgroup has two fragments of accumulators: WGMMA
writes the sum of a short part of K to one, and the CUDA cores add that to the other.

    consumer groups    wait full[s] -> for each slab of 64 rows and part of at most 128 columns:
                           issue the WGMMAs of 128 of K, commit -> wait until they are done -> add
                       -> release empty[s] -> s += 1

A thread holds at most 128 + 64 accumulators. A warpgroup's own products do not overlap with its additions, but the
other one's do: of 64x128x128 a product is 256 clocks of the tensor cores, its addition 64 of each scheduler. So both
warpgroups share a tile, and none waits for the other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ..tile.hopper import start_product
from ..tile.ptx import read_after_wait
from .mainloop_sm90 import MainloopSm90

STEPS = 4  # MMA steps of 32 of K whose sum is promoted


def of_step(fragment: cute.Tensor, k: int) -> cute.Tensor:
    """(MMA, 1) of MMA step k of (MMA, MMA_K)."""
    return cute.append_ones(fragment[None, k], up_to_rank=2)


class PromotedMainloopSm90(MainloopSm90):
    """Steps of one work tile; loads are those of the plain mainloop."""

    columns = 128

    @cute.jit
    def mma(
        self,
        k_tiles,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        tCrA: cute.Tensor,  # (MMA, MMA_M, MMA_K, PIPE)
        tCrB: cute.Tensor,  # (MMA, MMA_N, MMA_K, PIPE)
        pipeline,
        read,
        release,
        consumer_group: cutlass.Int32,
    ):
        """Accumulate every K-tile into acc; returns the read and release states after them."""
        acc.fill(0.0)
        part = cute.make_rmem_tensor((acc.shape[0], 1, 1), Float32)  # (MMA, 1, 1)
        for _ in cutlass.range(k_tiles.count // len(self.k_blocks), unroll=1):
            for j in range_constexpr(len(self.k_blocks)):
                pipeline.consumer_wait(read)
                for first in range_constexpr(0, self.k_blocks[j], STEPS):
                    steps = const_expr(min(STEPS, self.k_blocks[j] - first))
                    self.add_product(tiled_mma, acc, part, tCrA, tCrB, read.index, first, steps)
                pipeline.consumer_release(release)
                read.advance()
                release.advance()
        return read, release

    @cute.jit
    def add_product(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        part: cute.Tensor,  # (MMA, 1, 1)
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        stage: cutlass.Int32,
        first: cutlass.Constexpr,  # MMA step
        steps: cutlass.Constexpr,
        factors=None,  # what `promote` multiplies the product by
    ):
        """acc += the product of some MMA steps of one stage, which `part` holds in between."""
        for m in range_constexpr(cute.size(acc, mode=[1])):
            for n in range_constexpr(cute.size(acc, mode=[2])):
                a, b = tCrA[None, m, None, stage], tCrB[None, n, None, stage]  # (MMA, MMA_K)
                fragments = [(of_step(a, first + k), of_step(b, first + k)) for k in range(steps)]
                start_product(tiled_mma, part, fragments.__getitem__, steps, True)
                warpgroup.wait_group(0)
                read_after_wait(part)
                self.promote(acc[None, m, n], part[None, 0, 0], m, n, factors)

    @cute.jit
    def promote(
        self,
        sums: cute.Tensor,  # (MMA,) of slab m and part n
        part: cute.Tensor,  # (MMA,)
        m: cutlass.Constexpr,
        n: cutlass.Constexpr,
        factors,
    ):
        """sums += part"""
        sums.store(sums.load() + part.load())
