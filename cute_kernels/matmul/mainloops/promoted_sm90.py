"""The sm_90 FP8 mainloops with promoted (two-level) accumulation: partial sums of 128 elements of K are added in FP32.

FP8 WGMMA keeps some 14 bits of its accumulators' mantissas. A warpgroup therefore has two levels of accumulators: WGMMA
writes the partial sum of a short part of K to a fragment, and CUDA cores add it to the FP32 accumulators, times factors
(factors_sm90).

**Double-buffered.** If registers suffice, two partial fragments alternate, so that tensor cores multiply while CUDA
cores add:

    consumer groups    wait full[0] -> start WGMMA 0
                       -> for each WGMMA p: start WGMMA p + 1, of the same K-tile or, after wait full[s + 1], of the
                              next -> wait until one is in flight -> after a K-tile's last: release empty[s] -> add p

A WGMMA has 64 rows and at most 128 columns. Two fragments of 128 columns fit next to a tile's accumulators if its
warpgroup has one WGMMA. A warpgroup with 64x256 accumulators uses WGMMAs of 64x64 with A in registers (IssueRS).

**Single-buffered**, otherwise:

    consumer groups    wait full[s] -> for each slab of 64 rows and part of at most 128 columns:
                           issue the WGMMAs of 128 elements of K, commit -> wait until they are done -> add
                       -> release empty[s] -> s += 1

A warpgroup's own WGMMAs do not overlap with its additions, but the other warpgroup's do. Both share a tile, and neither
waits for the other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ...tile.ptx import read_after_wait
from ..contexts import ConsumerCtx, Tile
from .factors_sm90 import NoFactors
from .in_place_sm90 import InPlaceSm90
from .issue_rs_sm90 import COLUMNS
from .issue_sm90 import PARTIAL_COLUMNS, IssueSS


class PromotedSm90(InPlaceSm90):
    """Promoted accumulation, single-buffered. A K-tile is read from the first set of factors."""

    columns = PARTIAL_COLUMNS
    parts = 1  # fragments of partial sums

    def __init__(self, issue: IssueSS, factors: NoFactors):
        super().__init__(issue)
        self.factors, self.reads_one = factors, factors.reads_one

    def make_parts(self, acc: cute.Tensor) -> list:
        """Fragments (MMA, 1, 1) for partial sums."""
        return [cute.make_rmem_tensor((acc.shape[0], 1, 1), Float32) for _ in range(self.parts)]

    @cute.jit
    def mma(self, tile: Tile, ctx: ConsumerCtx, read, release, order):
        k_tiles, period = tile.k_tiles, const_expr(len(self.k_blocks))  # K-tiles of one block
        ctx.acc.fill(0.0)
        part = self.make_parts(ctx.acc)[0]
        factors = self.factors.first(tile, ctx)
        order.wait()
        for i in cutlass.range(k_tiles.count // period, unroll=1):
            self.factors.load(k_tiles, (i + 1) * period, factors, 1)
            for j in range_constexpr(period):
                ctx.ring.consumer_wait(read)
                self.add_k_tile(ctx, part, factors, read.index, self.k_blocks[j])
                ctx.ring.consumer_release(release)
                read.advance()
                release.advance()
            self.factors.keep(factors)
        order.arrive()
        return read, release

    @cute.jit
    def add_k_tile(
        self, ctx: ConsumerCtx, part: cute.Tensor, factors, stage: cutlass.Int32, k_steps: cutlass.Constexpr
    ):
        """Multiply a K-tile and add its partial sums one by one."""
        acc, most = ctx.acc, const_expr(self.issue.partial_steps)
        prepared = self.issue.prepare(ctx, stage)
        for first in range_constexpr(0, k_steps, most):
            steps = const_expr(min(most, k_steps - first))
            for m in range_constexpr(cute.size(acc, mode=[1])):
                for n in range_constexpr(cute.size(acc, mode=[2])):
                    a, b = self.issue.a(ctx, prepared, stage, m), self.issue.b(ctx, stage, n)
                    self.issue.start(part, ctx, a, b, first, steps)
                    warpgroup.wait_group(0)
                    read_after_wait(part)
                    self.add(acc, part, m, n, self.factors.of(factors, 0))
                    read_after_wait(acc[None, m, n])  # added before the next WGMMA overwrites the fragment

    def add(self, acc: cute.Tensor, part: cute.Tensor, m: int, n: int, factors) -> None:
        """Add the partial sums of slab m and columns n."""
        self.factors.add(acc[None, m, n], part[None, 0, 0], n * self.columns, factors)


class DoubleBufferedSm90(PromotedSm90):
    """Promoted accumulation, double-buffered: a warpgroup has 64 rows, and its K-tiles one partial sum per WGMMA. A
    K-tile is read from the set of factors of its parity."""

    parts = 2

    def __init__(self, issue: IssueSS, factors: NoFactors, grouped: bool = False):
        """grouped: True for a grouped GEMM, whose producer needs registers for group indices."""
        super().__init__(issue, factors)
        if issue.a_in_registers:
            self.columns = COLUMNS
        if grouped or not issue.a_in_registers:
            self.registers = (40, 232)  # consumers have at most 64 + 128 accumulators

    @cute.jit
    def mma(self, tile: Tile, ctx: ConsumerCtx, read, release, order):
        k_tiles = tile.k_tiles
        ctx.acc.fill(0.0)
        parts = self.make_parts(ctx.acc)
        factors = self.factors.first(tile, ctx)
        order.wait()
        if k_tiles.count > 0:
            ctx.ring.consumer_wait(read)
            self.start(ctx, parts, None, read.index, 0)
            last = k_tiles.count - 1
            for i in cutlass.range(last // 2, unroll=1):
                for turn in range_constexpr(2):
                    self.factors.load(k_tiles, 2 * i + turn + 1, factors, 1 - turn)
                    read = self.add_k_tile(ctx, parts, factors, turn, read)
            if last % 2 > 0:
                self.factors.load(k_tiles, last, factors, 1)
                read = self.add_k_tile(ctx, parts, factors, 0, read)
                read = self.add_k_tile(ctx, parts, factors, 1, read, order)
            else:
                read = self.add_k_tile(ctx, parts, factors, 0, read, order)
            release = read.clone()
        else:
            order.arrive()
        return read, release

    @cute.jit
    def add_k_tile(self, ctx: ConsumerCtx, parts: list, factors, turn: cutlass.Constexpr, read, last=None):
        """Add the partial sums of a K-tile, whose first WGMMA runs, and start the first one of the next K-tile.

        last: of the last K-tile, the order of consumer groups; None for other K-tiles.
        """
        count = const_expr(cute.size(ctx.acc, mode=[2]))
        more = const_expr(last is None)
        this = read.clone()
        prepared = self.issue.prepare(ctx, this.index)
        found = self.factors.of(factors, turn)
        read.advance()
        for n in range_constexpr(count):
            at = const_expr(turn * count + n)
            if const_expr(n + 1 < count):
                self.start(ctx, parts, prepared, this.index, at + 1)
            elif const_expr(more):
                ctx.ring.consumer_wait(read)
                self.start(ctx, parts, None, read.index, at + 1)
            if const_expr(not more and n == max(count - 2, 0)):
                last.arrive()  # the last WGMMA has been issued
            warpgroup.wait_group(1 if n + 1 < count or more else 0)
            part = parts[at % 2]
            read_after_wait(part)
            if const_expr(n + 1 == count):
                ctx.ring.consumer_release(this)
            self.add(ctx.acc, part, 0, n, found)
        return read

    def start(self, ctx: ConsumerCtx, parts: list, prepared, stage: cutlass.Int32, at: int) -> None:
        """Start WGMMA `at` of two K-tiles."""
        n = at % cute.size(ctx.acc, mode=[2])
        b, a = self.issue.b(ctx, stage, n), self.issue.a(ctx, prepared, stage, 0)
        self.issue.start(parts[at % 2], ctx, a, b, 0, self.k_blocks[0])
