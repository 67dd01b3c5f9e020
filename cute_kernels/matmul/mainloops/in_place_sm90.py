"""The sm_90 mainloop that accumulates in place: WGMMAs write into the accumulators of the work tile.

    producer warp      acquire empty[s] -> expect bytes on full[s] -> TMA A, TMA B -> s += 1
    consumer groups    wait full[s] -> issue the stage's WGMMAs, commit -> wait until one group is in flight
                       -> release empty[s - 1] -> s += 1

Exactly one K-tile's WGMMAs are in flight while the next one's are issued, so the tensor cores never drain between
stages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ..contexts import ConsumerCtx, Tile
from .issue_sm90 import IssueSS


class InPlaceSm90:
    """Accumulation in the tensor cores' accumulators."""

    columns = 256  # of one WGMMA, at most
    reads_one = False  # True if it reads ConsumerCtx's 1.0

    def __init__(self, issue: IssueSS):
        self.issue, self.k_blocks, self.registers = issue, issue.k_blocks, issue.registers

    @cute.jit
    def mma(self, tile: Tile, ctx: ConsumerCtx, read, release, order):
        """Accumulate every K-tile of a work tile into ctx.acc; returns the read and release states after them."""
        k_tiles, period = tile.k_tiles, const_expr(len(self.k_blocks))
        order.wait()
        if k_tiles.count == 0:
            ctx.acc.fill(0.0)
            order.arrive()
        else:
            # The first period starts the accumulation, so that no register is cleared beforehand.
            for j in range_constexpr(period):
                ctx.ring.consumer_wait(read)
                self.issue.multiply(ctx, read.index, self.k_blocks[j], j == 0)
                if const_expr(j > 0):
                    warpgroup.wait_group(1)
                    ctx.ring.consumer_release(release)
                    release.advance()
                read.advance()
            for _ in cutlass.range(1, k_tiles.count // period, unroll=1):
                for j in range_constexpr(period):
                    ctx.ring.consumer_wait(read)
                    self.issue.multiply(ctx, read.index, self.k_blocks[j], False)
                    warpgroup.wait_group(1)
                    ctx.ring.consumer_release(release)
                    release.advance()
                    read.advance()
            order.arrive()
            warpgroup.wait_group(0)
            ctx.ring.consumer_release(release)
            release.advance()
        return read, release
