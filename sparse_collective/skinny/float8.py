"""Few columns of 8-bit floats: they are loaded as they are, and multiplied as fp16 numbers.

fp16 holds every e4m3 and e5m2 number, a product of two has at most 8 bits of mantissa, and mma.sync of fp16 sums in
fp32: so there is nothing to promote. It is there on all architectures, where Hopper's mma.sync has no 8-bit floats.

    lane (g, t)     W rows g and g + 8, k 16 t .. 16 t + 15, and B column g: four words each
    MMA w           word w of all t: two of its four k are the first half of an MMA's 16, two the second

Which two is for the conversion to choose, as long as W and B are converted alike.

A scale for each stored block multiplies the sum of those MMAs of a piece that are of one block: four FFMAs for each
fragment of accumulators. For that the four lanes of a row must be in one block, so of blocks that are no multiple of 64
wide a lane loads 8 or 4 bytes at a time in the place of 16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.tile.ampere import mma_op
from cute_kernels.tile.ptx import BY_BITS_SCALE, float8_to_fp16

from .config import converts_by_bits
from .kernel import SkinnyKernel


class Float8SkinnyKernel(SkinnyKernel):
    """SkinnyKernel of operands of 8-bit floats."""

    def __init__(self, facts: GemmFacts):
        super().__init__(facts)
        self.by_bits, self.scaled = converts_by_bits(facts), facts.block.scaled
        self.together = self.span if self.scaled else self.cfg.stages  # K-tiles of a lane whose sum has one factor

    def loaded(self) -> tuple:
        rows, stages = 2 * self.mmas_m, self.cfg.stages
        return tuple(cute.make_rmem_tensor((self.words, n, stages), Int32) for n in (rows, self.mmas_n))

    def place_a(self, row: int, w: int) -> tuple:
        return w, row

    def place_b(self, j: int, w: int) -> tuple:
        return w, j

    @cute.jit
    def multiply_piece(self, k_tiles, piece: Int32, rA: cute.Tensor, rB: cute.Tensor, acc: cute.Tensor):
        """Add the products of what is loaded, times the scales of their blocks, to acc (MMA, MMA_M, MMA_N)."""
        for first in range_constexpr(0, self.cfg.stages, self.together):
            if const_expr(self.scaled):
                scale = self.scale(k_tiles, self.number(piece, Int32(0), first))
                part = cute.make_rmem_tensor(acc.shape, Float32)
                part.fill(0.0)
                self.multiply_stages(first, rA, rB, part)
                for v in range_constexpr(cute.size(acc)):
                    acc[v] = acc[v] + scale * part[v]
            else:
                self.multiply_stages(first, rA, rB, acc)

    @cute.jit
    def multiply_stages(self, first: cutlass.Constexpr, rA: cute.Tensor, rB: cute.Tensor, acc: cute.Tensor):
        """Add the products of the K-tiles that belong together, from `first` on."""
        atom = cute.make_mma_atom(mma_op(Float16))
        for s in range_constexpr(first, first + self.together):
            for w in range_constexpr(self.words):
                mA = cute.make_rmem_tensor((4, self.mmas_m), Int32)  # (row parity and k half, MMA_M)
                mB = cute.make_rmem_tensor((2, self.mmas_n), Int32)  # (k half, MMA_N)
                for row in range_constexpr(2 * self.mmas_m):
                    mA[row % 2, row // 2], mA[2 + row % 2, row // 2] = self.widened(rA[w, row, s])
                for j in range_constexpr(self.mmas_n):
                    mB[0, j], mB[1, j] = self.widened(rB[w, j, s])
                cute.gemm(atom, acc, cute.recast_tensor(mA, Float16), cute.recast_tensor(mB, Float16), acc)

    def widened(self, word: Int32) -> tuple:
        """Four elements as two registers of two."""
        return float8_to_fp16(word, self.facts.dtype, self.by_bits)

    def scale(self, k_tiles, i: Int32) -> Float32:
        """That of K-tile i's block; past the row's end 0, as the values are."""
        scale = k_tiles.scale(i)
        return scale if self.whole else Float32(select_(i < k_tiles.count, scale, Float32(0.0)))

    @cute.jit
    def keep(self, acc: cute.Tensor, sSum: cute.Tensor):
        """Write a warp's sums to shared memory."""
        if const_expr(self.by_bits):
            for v in range_constexpr(cute.size(acc)):
                acc[v] = acc[v] * BY_BITS_SCALE**-2
        SkinnyKernel.keep(self, acc, sSum)
