"""The sm_90 mainloop over pairs of block rows: a tile's upper 64 rows are one row of blocks, its lower ones the next.

A K-tile of B serves both rows where both have a block in its column, which is what neighbouring rows of a banded or a
local pattern have nearly everywhere. A's K-tile is then two stored blocks, which lie apart in memory:

    producer warp      as in mainloop_sm90, with two loads of A, one for each half of the stage; of two CTAs that share
                       A, each loads one half for both. Where a row has no block the load lies beyond the last stored
                       one: TMA fills the half with zeros, and counts its bytes as any other's
    consumer groups    first the K-tiles that both rows have, then those of the upper row alone, then the lower's

The zeros are never multiplied: a row must not see what B holds where the row has no block, which may be NaN. So the
K-tiles come in that order, and three loops, each with its own WGMMAs, need no index and no branch inside.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.matmul.mainloop_sm90 import MainloopSm90

HALVES = 2  # of a tile: block rows


def one_slab(tensor: cute.Tensor) -> cute.Tensor:
    """(MMA, ...), of one slab of rows, with its mode of slabs, (MMA, 1, ...)."""
    shape, stride = tensor.layout.shape, tensor.layout.stride
    layout = cute.make_layout((shape[0], 1, *shape[1:]), stride=(stride[0], 0, *stride[1:]))
    return cute.make_tensor(tensor.iterator, layout)


class RowPairsMainloopSm90(MainloopSm90):
    """Takes K-tiles whose `a` is (upper, lower), in segments whose kind is which halves of the tile multiply."""

    boxes_a = HALVES

    @cute.jit
    def load_a(
        self,
        tile,
        tma_a: cute.CopyAtom,
        tAgA: cute.Tensor,  # (TMA, rest_m, rest_k, outer_a)
        tAsA: cute.Tensor,  # (TMA, HALVES x PIPE)
        mask_a: cutlass.Int16,
        barrier: cute.Pointer,
        stage: Int32,
    ):
        if const_expr(self.multicast_a):
            (m, k, upper), (_, _, lower) = tile.a
            half = cute.arch.block_idx_in_cluster() % HALVES
            number = upper + half * (lower - upper)
            cute.copy(
                tma_a,
                tAgA[None, m, k, number],
                tAsA[None, stage * HALVES + half],
                tma_bar_ptr=barrier,
                mcast_mask=mask_a,
            )
        else:
            for half in range_constexpr(HALVES):
                cute.copy(
                    tma_a,
                    tAgA[(None, *tile.a[half])],
                    tAsA[None, stage * HALVES + half],
                    tma_bar_ptr=barrier,
                )

    @cute.jit
    def mma(
        self,
        k_tiles,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, HALVES, 1)
        tCrA: cute.Tensor,  # (MMA, HALVES, MMA_K, PIPE)
        tCrB: cute.Tensor,  # (MMA, 1, MMA_K, PIPE)
        pipeline,
        read,
        release,
        consumer_group: Int32,
    ):
        """Accumulate every K-tile into acc; returns the read and release states after them."""
        ends = k_tiles.ends
        acc.fill(0.0)  # a row's first K-tile may lie in any of the loops; the other consumer group multiplies now
        self.order_wait(consumer_group)
        begin = Int32(0)
        for part in range_constexpr(len(k_tiles.kinds)):
            end = ends[part]
            for i in cutlass.range(begin, end, unroll=1):
                pipeline.consumer_wait(read)
                self.issue_rows(tiled_mma, acc, tCrA, tCrB, read.index, k_tiles.kinds[part])
                warpgroup.wait_group(1)
                if i > 0:
                    pipeline.consumer_release(release)
                    release.advance()
                read.advance()
            begin = end
        self.order_arrive(consumer_group)
        warpgroup.wait_group(0)
        if k_tiles.count > 0:
            pipeline.consumer_release(release)
            release.advance()
        return read, release

    @cute.jit
    def issue_rows(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        stage: Int32,
        rows: cutlass.Constexpr,
    ):
        """Issue and commit the WGMMAs of one stage for these halves of the tile, as one group."""
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for k in range_constexpr(self.k_blocks[0]):
            for row in range_constexpr(len(rows)):
                half = const_expr(rows[row])
                tCrD = one_slab(acc[None, half, None])
                cute.gemm(atom, tCrD, one_slab(tCrA[None, half, k, stage]), tCrB[None, None, k, stage], tCrD)
        warpgroup.commit_group()
