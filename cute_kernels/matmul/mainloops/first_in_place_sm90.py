"""Promoted accumulation whose first K-tile accumulates in place; the other K-tiles are double-buffered (promoted_sm90).

The first K-tile's WGMMAs write into the accumulators, which need not be cleared, and are multiplied by its factor
afterwards. So they may be started before the work tile begins (schedules/overlap_store).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from ...tile.ptx import in_both_banks, read_after_wait
from ..contexts import ConsumerCtx, Unordered
from .factors_sm90 import BlockFactors
from .promoted_sm90 import DoubleBufferedSm90


class FirstInPlaceSm90(DoubleBufferedSm90):
    """Mainloop of a tile whose first K-tile has been multiplied, by WGMMAs of 64 columns."""

    @cute.jit
    def begin(self, ctx: ConsumerCtx, stage: Int32, n: cutlass.Constexpr):
        """Start WGMMA n of the first K-tile, into accumulators that have been read."""
        a, b = self.issue.a(ctx, None, stage, 0), self.issue.b(ctx, stage, n)
        sums = cute.append_ones(ctx.acc[None, 0, n], up_to_rank=3)
        self.issue.start(sums, ctx, a, b, 0, self.k_blocks[0])

    @cute.jit
    def finish(self, k_tiles, ctx: ConsumerCtx, read, factors: cute.Tensor):
        """Multiply the first K-tile by its factor, which is in the first set, and add the others.

        read: the state of the first K-tile. Returns the state after the last one.
        """
        acc = ctx.acc
        parts = self.make_parts(acc)
        if k_tiles.count > 0:
            read.advance()
            last = k_tiles.count - 1
            if last > 0:
                self.factors.load(k_tiles, 1, factors, 1)
                ctx.ring.consumer_wait(read)
                self.start(ctx, parts, None, read.index, 0)
                self.factors.multiply(acc, factors)
                for i in cutlass.range((last - 1) // 2, unroll=1):
                    for turn in range_constexpr(2):
                        self.factors.load(k_tiles, 2 * i + 2 + turn, factors, turn)
                        read = self.add_k_tile(ctx, parts, factors, 1 - turn, read)
                if (last - 1) % 2 > 0:
                    self.factors.load(k_tiles, last, factors, 0)
                    read = self.add_k_tile(ctx, parts, factors, 1, read)
                    read = self.add_k_tile(ctx, parts, factors, 0, read, Unordered())
                else:
                    read = self.add_k_tile(ctx, parts, factors, 1, read, Unordered())
            else:
                self.factors.multiply(acc, factors)
        if k_tiles.count == 0:  # not the other branch of the same: that one spilled
            acc.fill(0.0)
            for n in range_constexpr(cute.size(acc, mode=[2])):
                read_after_wait(acc[None, 0, n])
        return read


class BothBanks(BlockFactors):
    """BlockFactors in two registers, one of each bank: accumulators that WGMMA writes begin at an even register, as
    partial sums do, so with one register half of the additions would have a bank conflict."""

    def of(self, factors: cute.Tensor, turn: int) -> tuple:
        return in_both_banks(factors[turn], cute.arch.grid_dim()[1])

    def add(self, sums: cute.Tensor, part: cute.Tensor, column: int, factors: tuple) -> None:
        """sums += part times the factor, from the bank of registers that has neither"""
        for v in range(cute.size(part)):
            sums[v] = sums[v] + part[v] * factors[1 - v % 2]

    def multiply(self, acc: cute.Tensor, factors: cute.Tensor) -> None:
        """Multiply all accumulators by the factor of the first K-tile."""
        factor = self.of(factors, 0)[0]
        for v in range(cute.size(acc)):
            acc[v] = acc[v] * factor
