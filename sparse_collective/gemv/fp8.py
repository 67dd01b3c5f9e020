"""FP8 GEMV and small-batch GEMM: operands are loaded as FP8 and multiplied as FP16.

FP16 represents every E4M3 and E5M2 number, the product of two has at most 8 bits of mantissa, and FP16 mma.sync
accumulates in FP32, so no promotion is needed. FP16 mma.sync exists on all architectures; Hopper's has no FP8 form.

    lane (g, t)     W rows g and g + 8, k 16 t .. 16 t + 15, and B column g: four words each
    MMA w           word w of all t: two of its four k are the first half of an MMA's 16, two the second

The conversion may choose which two, since W and B are converted alike.

A scale per stored block multiplies the partial sum of a piece's MMAs in that block: four FFMAs per accumulator
fragment. The four lanes of a row must then be in one block, so for blocks whose width is not a multiple of 64 a lane
loads 8 or 4 bytes at a time instead of 16.
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
    """SkinnyKernel with FP8 operands."""

    def __init__(self, facts: GemmFacts):
        super().__init__(facts)
        self.by_bits, self.scaled = converts_by_bits(facts), facts.block.scaled
        self.together = self.span if self.scaled else self.cfg.stages  # K-tiles of a lane with one scale

    def loaded(self) -> tuple:
        rows, stages = 2 * self.mmas_m, self.cfg.stages
        return tuple(cute.make_rmem_tensor((self.words, n, stages), Int32) for n in (rows, self.mmas_n))

    def place_a(self, row: int, w: int) -> tuple:
        return w, row

    def place_b(self, j: int, w: int) -> tuple:
        return w, j

    @cute.jit
    def multiply_piece(self, k_tiles, piece: Int32, rA: cute.Tensor, rB: cute.Tensor, acc: cute.Tensor):
        """Multiply the loaded piece and accumulate it, times its blocks' scales, in acc (MMA, MMA_M, MMA_N)."""
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
        """Multiply and accumulate the K-tiles with one scale, from `first` on."""
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
        """The scale of K-tile i's block; 0 past the row's end, like the values."""
        scale = k_tiles.scale(i)
        return scale if self.whole else Float32(select_(i < k_tiles.count, scale, Float32(0.0)))

    @cute.jit
    def keep(self, acc: cute.Tensor, sSum: cute.Tensor):
        """Write a warp's partial sums to shared memory."""
        if const_expr(self.by_bits):
            for v in range_constexpr(cute.size(acc)):
                acc[v] = acc[v] * BY_BITS_SCALE**-2
        SkinnyKernel.keep(self, acc, sSum)
