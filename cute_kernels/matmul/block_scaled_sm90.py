"""The sm_90 mainloop of 8-bit floats with scales of blocks: every 128 of K have their own, for A a row each.

It promotes sums as promoted_sm90 does, and multiplies each by its scales as it is added, which takes no instruction
more: FFMA takes the place of FADD. A thread's accumulators of a product of 64 rows by at most 128 columns lie in two
rows and in one block of B's columns, so they have two factors.

    consumer groups    load the scales of K-tile 0 -> for each K-tile i:
                           load the scales of K-tile i + 1 -> wait full[s] -> products and sums of K-tile i

So the latency of scales, which come from global memory through L1, is hidden behind a K-tile's products. The loads come
before the wait, and their addresses are running sums, since nothing multiplies for this warpgroup until they are out.
Two sets of registers take turns: the compiler was seen to copy one to the other, and so to wait for the loads, before
the products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from .promoted_sm90 import STEPS, PromotedMainloopSm90

BLOCK_SHIFT = 7  # 128 of K, and of B's columns, have one scale


def block_scales(spec, args, thr_mma, tile: tuple, out: tuple, batch: tuple) -> tuple:
    """What BlockScaledMainloopSm90.mma needs of a work tile: scales of A and B, and which of them are this thread's.

    spec: EpilogueSpec; args: EpilogueArgs; thr_mma: the thread's slice of the warpgroups' tiled MMA;
    tile: (tile_m, tile_n); out: (rest_m, rest_n, ...) of D; batch: items of A and B. An operand whose scales are not of
    blocks has none here.
    """
    # (MMA, MMA_M, MMA_N): (row, column) of each accumulator inside of the tile
    cC = thr_mma.partition_C(cute.make_identity_tensor(tile))
    slabs, parts = cute.size(cC, mode=[1]), cute.size(cC, mode=[2])
    scale_a = args.scale_m if spec.scale_m == "1x128" else None
    scale_b = args.scale_n if spec.scale_n == "128x128" else None
    rows, blocks = [], []
    if scale_a is not None:  # values 0 and 2 lie in the thread's two rows; clamped, since others are not stored
        firsts = [cC[2 * r, m, 0][0] for m in range(slabs) for r in range(2)]
        rows = [cutlass.min(out[0] * tile[0] + row, scale_a.shape[0] - 1) for row in firsts]
    if scale_b is not None:
        firsts = [out[1] * tile[1] + cC[0, 0, n][1] for n in range(parts)]
        blocks = [cutlass.min(column >> BLOCK_SHIFT, scale_b.shape[0] - 1) for column in firsts]
    return (scale_a, scale_b), (rows, blocks), batch


class BlockScaledMainloopSm90(PromotedMainloopSm90):
    """Steps of one work tile, whose K-tiles follow each other along K; loads are those of the plain mainloop."""

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
        blocks = const_expr(self.k_blocks[0] // STEPS)  # of K, in a K-tile
        # Of the thread, by turns: scales of A, (blocks, rows), and of B, (blocks, blocks of columns)
        turns = [[self.fragment(Float32, places, blocks) for places in scales[1]] for _ in range(2)]
        at = [self.fragment(Int64, places) for places in scales[1]]  # addresses
        k = k_tiles.at(Int32(0)).b[0] * blocks
        left = k_tiles.count
        self.start(scales, k, at)
        self.load_scales(scales, k, at, turns[0])
        acc.fill(0.0)
        part = cute.make_rmem_tensor((acc.shape[0], 1, 1), Float32)  # (MMA, 1, 1)
        operands = (tiled_mma, acc, part, tCrA, tCrB)
        for _ in cutlass.range(k_tiles.count // 2, unroll=1):
            for turn in range_constexpr(2):
                left = left - 1
                step = blocks if left > 0 else 0  # past the last K-tile those of the last, for nobody to use
                k = k + step
                self.advance(scales, step, at)
                self.load_scales(scales, k, at, turns[1 - turn])
                read, release = self.add_k_tile(operands, turns[turn], pipeline, read, release)
        if k_tiles.count % 2 > 0:
            read, release = self.add_k_tile(operands, turns[0], pipeline, read, release)
        return read, release

    @cute.jit
    def add_k_tile(self, operands: tuple, factors: list, pipeline, read, release):
        """Wait for a K-tile, add its products, and release it."""
        tiled_mma, acc, part, tCrA, tCrB = operands
        pipeline.consumer_wait(read)
        for block in range_constexpr(self.k_blocks[0] // STEPS):
            of_block = [None if f is None else f[block, None] for f in factors]
            self.add_product(tiled_mma, acc, part, tCrA, tCrB, read.index, block * STEPS, STEPS, of_block)
        pipeline.consumer_release(release)
        read.advance()
        release.advance()
        return read, release

    def fragment(self, dtype, places: list, *blocks: int):
        """Of something for each place; None where there are none."""
        return cute.make_rmem_tensor((*blocks, len(places)), dtype) if places else None

    @cute.jit
    def start(self, scales: tuple, k: Int32, at: list):
        """Addresses of the scales of block k of K; where there is no such block, of the last one."""
        for scale, places, item, fragment in zip(*scales, at, strict=True):
            if const_expr(scale is not None):
                first = cutlass.min(k, scale.shape[1] - 1)
                last = Int64(cutlass.min(item, scale.shape[2] - 1)) * scale.stride[2]
                for v in range_constexpr(len(places)):
                    offset = Int64(places[v]) * scale.stride[0] + Int64(first) * scale.stride[1] + last
                    fragment[v] = scale.iterator.toint() + offset * 4

    @cute.jit
    def advance(self, scales: tuple, step: Int32, at: list):
        """So many blocks of K further."""
        for scale, places, fragment in zip(*scales[:2], at, strict=True):
            if const_expr(scale is not None):
                for v in range_constexpr(len(places)):
                    fragment[v] = fragment[v] + Int64(step) * (scale.stride[1] * 4)

    @cute.jit
    def load_scales(self, scales: tuple, k: Int32, at: list, into: list):
        """Of a K-tile whose first block of K is k. A second one may lie past K, where there are zeros: the first's."""
        for scale, places, addresses, fragment in zip(*scales[:2], at, into, strict=True):
            if const_expr(scale is not None):
                for block in range_constexpr(fragment.shape[0]):
                    for v in range_constexpr(len(places)):
                        address = addresses[v]
                        if const_expr(block > 0):
                            further = cutlass.max(cutlass.min(scale.shape[1] - 1 - k, block), 0)
                            address = address + Int64(further) * (scale.stride[1] * 4)
                        pointer = make_ptr(Float32, address, AddressSpace.gmem, assumed_align=4)
                        fragment[block, v] = cute.make_tensor(pointer, 1)[0]

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
            for j in range_constexpr(cute.size(part) // 4):  # of 8 columns, of which a thread has two
                for c in range_constexpr(2):
                    v = const_expr(4 * j + 2 * r + c)
                    sums[v] = sums[v] + part[v] * factor
