"""The sm_90 mainloop of 8-bit floats with scales of blocks: every 128 of K have their own, for A a row each.

It promotes sums as promoted_sm90 does, and multiplies each by its scales as it is added, which takes no instruction
more: FFMA takes the place of FADD. A thread's accumulators of a product of 64 rows by at most 128 columns lie in two
rows and in one block of B's columns, so they have two factors.

    consumer groups    scales of K-tile 0 -> for each K-tile i:
                           load the scales of K-tile i + 1 -> wait full[s] -> products and sums of K-tile i

So the latency of scales, which come from global memory through L1, is hidden behind a K-tile's products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from .promoted_sm90 import STEPS, PromotedMainloopSm90

BLOCK = 128  # of K, and of B's columns, that have one scale


def block_scales(args, thr_mma, tile: tuple, out: tuple, batch: tuple) -> tuple:
    """What BlockScaledMainloopSm90.mma needs of a work tile: scales of A and B, and which of them are this thread's.

    args: EpilogueArgs; tile: (tile_m, tile_n); out: (rest_m, rest_n, ...) of D; batch: items of A and B.
    """
    # (MMA, MMA_M, MMA_N): (row, column) of each accumulator inside of the tile
    cC = thr_mma.partition_C(cute.make_identity_tensor(tile))
    slabs, parts = cute.size(cC, mode=[1]), cute.size(cC, mode=[2])
    scale_a, scale_b, rows, blocks = args.scale_m, args.scale_n, [], []
    if scale_a is not None:  # values 0 and 2 lie in the thread's two rows; clamped, since others are not stored
        firsts = [cC[2 * r, m, 0][0] for m in range(slabs) for r in range(2)]
        rows = [cutlass.min(out[0] * tile[0] + row, scale_a.shape[0] - 1) for row in firsts]
    if scale_b is not None:
        firsts = [out[1] * tile[1] + cC[0, 0, n][1] for n in range(parts)]
        blocks = [cutlass.min(column >> 7, scale_b.shape[0] - 1) for column in firsts]
    return (scale_a, scale_b), (rows, blocks), batch


class BlockScaledMainloopSm90(PromotedMainloopSm90):
    """Steps of one work tile; loads are those of the plain mainloop."""

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
        scales: tuple,  # block_scales
    ):
        """Accumulate every K-tile into acc; returns the read and release states after them."""
        steps = const_expr(self.k_blocks[0])  # of a K-tile: one block of K, or two
        blocks = const_expr(steps // STEPS)
        # Of K-tile i: (blocks, rows of A) and (blocks, blocks of B's columns); those of K-tile i + 1 are on their way.
        now = [[self.empty(at) for at in scales[1]] for _ in range(blocks)]
        self.load_scales(k_tiles, Int32(0), scales, now)
        acc.fill(0.0)
        part = cute.make_rmem_tensor((acc.shape[0], 1, 1), Float32)  # (MMA, 1, 1)
        for i in cutlass.range(k_tiles.count, unroll=1):
            then = [[self.empty(at) for at in scales[1]] for _ in range(blocks)]
            self.load_scales(k_tiles, i + 1, scales, then)
            pipeline.consumer_wait(read)
            for block in range_constexpr(blocks):
                self.add_product(tiled_mma, acc, part, tCrA, tCrB, read.index, block * STEPS, STEPS, now[block])
            pipeline.consumer_release(release)
            read.advance()
            release.advance()
            for block in range_constexpr(blocks):
                for mine, next_one in zip(now[block], then[block], strict=True):
                    if const_expr(mine is not None):
                        mine.store(next_one.load())
        return read, release

    def empty(self, places: list):
        """A fragment for the scales at these places; None for none."""
        return cute.make_rmem_tensor(len(places), Float32) if places else None

    @cute.jit
    def load_scales(self, k_tiles, i: Int32, scales: tuple, into: list):
        """Of K-tile i; past the last one, those of the last, for nobody to use."""
        rest_k = k_tiles.at(cutlass.max(cutlass.min(i, k_tiles.count - 1), 0)).b[0]
        for block in range_constexpr(len(into)):
            for scale, places, item, fragment in zip(scales[0], scales[1], scales[2], into[block], strict=True):
                if const_expr(scale is not None):
                    k = cutlass.min(rest_k * len(into) + block, scale.shape[1] - 1)
                    for v in range_constexpr(len(places)):
                        fragment[v] = scale[places[v], k, cutlass.min(item, scale.shape[2] - 1)]

    @cute.jit
    def promote(
        self,
        sums: cute.Tensor,  # (MMA,) of slab m and part n
        part: cute.Tensor,  # (MMA,)
        m: cutlass.Constexpr,
        n: cutlass.Constexpr,
        factors: list,  # the thread's scales of A and B
    ):
        """sums += part times its scales"""
        of_a, of_b = factors
        for r in range_constexpr(2):
            if const_expr(of_a is None):
                factor = of_b[n]
            elif const_expr(of_b is None):
                factor = of_a[2 * m + r]
            else:
                factor = of_a[2 * m + r] * of_b[n]
            for v in range_constexpr(cute.size(part)):
                if const_expr(v // 2 % 2 == r):
                    sums[v] = sums[v] + part[v] * factor
