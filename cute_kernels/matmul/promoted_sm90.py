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
    scaled = False  # whether a K-tile's sums are multiplied by the scale of its block

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
        period = const_expr(len(self.k_blocks))  # K-tiles of one block
        scales = cute.make_rmem_tensor(2, Float32) if const_expr(self.scaled) else None  # of this period and the next
        if const_expr(self.scaled):
            scales[1] = k_tiles.scale(0)
        for i in cutlass.range(k_tiles.count // period, unroll=1):
            if const_expr(self.scaled):
                scales[0] = scales[1]
                scales[1] = k_tiles.scale((i + 1) * period)
            for j in range_constexpr(period):
                pipeline.consumer_wait(read)
                for first in range_constexpr(0, self.k_blocks[j], STEPS):
                    steps = const_expr(min(STEPS, self.k_blocks[j] - first))
                    self.add_product(tiled_mma, acc, part, tCrA, tCrB, read.index, first, steps, scales)
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
        scales: cute.Tensor | None,  # the first of them is the product's
    ):
        """acc += the product of some MMA steps of one stage, which `part` holds in between."""
        for m in range_constexpr(cute.size(acc, mode=[1])):
            for n in range_constexpr(cute.size(acc, mode=[2])):
                a, b = tCrA[None, m, None, stage], tCrB[None, n, None, stage]  # (MMA, MMA_K)
                fragments = [(of_step(a, first + k), of_step(b, first + k)) for k in range(steps)]
                start_product(tiled_mma, part, fragments.__getitem__, steps, True)
                warpgroup.wait_group(0)
                read_after_wait(part)
                sums, product = acc[None, m, n], part[None, 0, 0].load()
                if const_expr(self.scaled):
                    product = product * scales[0]
                sums.store(sums.load() + product)


class ScaledMainloopSm90(PromotedMainloopSm90):
    """The same of blocks that have a scale each: a multiply-add in the place of an addition.

    A scale is loaded a K-tile before it is used, by all threads of a warpgroup from one address.
    """

    scaled = True
