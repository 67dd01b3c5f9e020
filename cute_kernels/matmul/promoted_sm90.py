"""The sm_90 mainloop of 8-bit floats with accurate sums: those of every 128 of K are promoted to fp32.

WGMMA of 8-bit floats keeps some 14 bits of its sums' mantissas. So a warpgroup has two kinds of accumulators: WGMMA
writes the sum of a short part of K to a fragment, and the CUDA cores add that to the others.

    consumer groups    wait full[s] -> for each slab of 64 rows and part of at most 128 columns:
                           issue the WGMMAs of 128 of K, commit -> wait until they are done -> add
                       -> release empty[s] -> s += 1

A thread holds at most 128 + 64 accumulators. A warpgroup's own products do not overlap with its additions, but the
other one's do: of 64x128x128 a product is 256 clocks of the tensor cores, its addition 64 of each scheduler. So both
warpgroups share a tile, and none waits for the other.

**A in registers.** Products of 64x128 read 96 bytes of shared memory a clock, of A and B, and TMA writes 32: all there
is. Where a warpgroup has 64 rows, it reads A's part of a K-tile once, by ldmatrix, and products of 64x64 read B alone,
64 bytes a clock. Two fragments then have the registers that one had, and take turns:

    consumer groups    wait full[s] -> ldmatrix A -> issue part 0
                       -> for each part n: issue part n + 1 -> wait until one is in flight -> add part n
                       -> release empty[s] -> s += 1
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.cute.typing import AddressSpace

from ..tile.ampere import CHUNK
from ..tile.hopper import WARPGROUP, start_product
from ..tile.ptx import read_after_wait
from .mainloop_sm90 import MainloopSm90

STEPS = 4  # MMA steps of 32 of K whose sum is promoted
WARP_ROWS = 16  # of a slab
LINE = 128  # bytes of a K-tile


def of_step(fragment: cute.Tensor, k: int) -> cute.Tensor:
    """(MMA, 1) of MMA step k of (MMA, MMA_K)."""
    return cute.append_ones(fragment[None, k], up_to_rank=2)


class PromotedMainloopSm90(MainloopSm90):
    """Steps of one work tile; loads are those of the plain mainloop.

    rows_in_registers: where a warpgroup has 64 rows, K-tiles are of 128 bytes and A is in registers, the rows of a
        tile; else 0.
    """

    scaled = False  # whether a K-tile's sums are multiplied by the scale of its block

    def __init__(self, *terms, rows_in_registers: int = 0):
        super().__init__(*terms)
        self.a_in_registers, self.stage_bytes = rows_in_registers > 0, rows_in_registers * LINE
        self.columns = 64 if self.a_in_registers else 128

    def operand_a(self, tiled_mma: cute.TiledMma, thr_mma, sA: cute.Tensor, thread: Int32):
        """What `mma` takes as A: with A in registers, where this thread's ldmatrix of stage 0 reads, else fragments."""
        if not self.a_in_registers:
            return super().operand_a(tiled_mma, thr_mma, sA, thread)
        # A lane names a row of 16 bytes: of four 8x8 matrices rows 0 to 7 and 8 to 15, then the same 16 of K later.
        # A line of 128 bytes is swizzled: its chunks of 16 bytes lie at their number xor the row's.
        lane = thread % 32
        row = thread // WARPGROUP * 64 + thread % WARPGROUP // 32 * WARP_ROWS + lane % WARP_ROWS
        chunk = (lane // WARP_ROWS) ^ (row % 8)
        return sA.iterator.toint() + row * LINE + chunk * CHUNK

    def make_parts(self, acc: cute.Tensor) -> list:
        """Fragments (MMA, 1, 1) for products."""
        return [cute.make_rmem_tensor((acc.shape[0], 1, 1), Float32) for _ in range(1 + self.a_in_registers)]

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
        parts = self.make_parts(acc)
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
                    self.add_product(tiled_mma, acc, parts, tCrA, tCrB, read.index, first, steps, scales)
                pipeline.consumer_release(release)
                read.advance()
                release.advance()
        return read, release

    @cute.jit
    def add_product(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        parts: list,  # one or two of (MMA, 1, 1), which hold products
        tCrA,
        tCrB: cute.Tensor,
        stage: cutlass.Int32,
        first: cutlass.Constexpr,  # MMA step
        steps: cutlass.Constexpr,
        factors=None,  # what `promote` multiplies the product by
    ):
        """acc += the product of some MMA steps of one stage."""
        if const_expr(self.a_in_registers):
            self.add_product_of_registers(tiled_mma, acc, parts, tCrA, tCrB, stage, factors)
        else:
            part = parts[0]
            for m in range_constexpr(cute.size(acc, mode=[1])):
                for n in range_constexpr(cute.size(acc, mode=[2])):
                    a, b = tCrA[None, m, None, stage], tCrB[None, n, None, stage]  # (MMA, MMA_K)
                    fragments = [(of_step(a, first + k), of_step(b, first + k)) for k in range(steps)]
                    start_product(tiled_mma, part, fragments.__getitem__, steps, True)
                    warpgroup.wait_group(0)
                    read_after_wait(part)
                    self.promote(acc[None, m, n], part[None, 0, 0], m, n, factors)

    @cute.jit
    def add_product_of_registers(
        self, tiled_mma: cute.TiledMma, acc: cute.Tensor, parts: list, at: Int32, tCrB: cute.Tensor, stage, factors
    ):
        """acc += the product of a stage, with A in registers; `at` is operand_a's."""
        rA = cute.make_rmem_tensor(((4, 2, 2), STEPS), tiled_mma.op.a_dtype)  # (MMA, MMA_K)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), rA.element_type)
        for k in range_constexpr(STEPS):
            place = make_ptr(
                rA.element_type, (at + stage * self.stage_bytes) ^ (2 * k * CHUNK), AddressSpace.smem,
                assumed_align=CHUNK,
            )  # fmt: skip
            cute.copy(atom, cute.make_tensor(place, CHUNK), cute.make_tensor(rA.iterator + CHUNK * k, CHUNK))
        count = const_expr(cute.size(acc, mode=[2]))
        for n in range_constexpr(count + 1):
            if const_expr(n < count):
                b = tCrB[None, n, None, stage]  # (MMA, MMA_K)
                fragments = [(of_step(rA, k), of_step(b, k)) for k in range(STEPS)]
                start_product(tiled_mma, parts[n % 2], fragments.__getitem__, STEPS, True)
            if const_expr(n > 0):
                warpgroup.wait_group(1 if n < count else 0)
                read_after_wait(parts[(n - 1) % 2])
                self.promote(acc[None, 0, n - 1], parts[(n - 1) % 2][None, 0, 0], 0, n - 1, factors)

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


class ScaledMainloopSm90(PromotedMainloopSm90):
    """The same of blocks that have a scale each: a multiply-add in the place of an addition.

    A scale is loaded a K-tile before it is used, by all threads of a warpgroup from one address.
    """

    scaled = True

    @cute.jit
    def promote(self, sums: cute.Tensor, part: cute.Tensor, m: cutlass.Constexpr, n: cutlass.Constexpr, factors):
        """sums += part times the first factor"""
        sums.store(sums.load() + part.load() * factors[0])
