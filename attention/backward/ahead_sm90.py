"""The sm_90 mainloop of backward that is a step ahead: for head dimensions whose dK and dV leave registers for it.

At head dimension 64 the exponentials of a tile keep the special function units busy for 512 clocks, and its products
the tensor cores for 1280. So three of the products run beside the exponentials of the next tile:

    tensor cores    S'[i+1]                              | dQ[i], dK[i], dP'[i+1] | dV[i+1]
    the others      dS'[i], which goes to shared memory  | P'[i+1]                | dQ[i] to its sums

An iteration begins and ends where P' and dP' of a tile are known, or on their way, and a wait for all products costs
least: of products that were begun in an iteration before, ptxas understands no other wait, and would serialise them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .mainloop_sm90 import Consumer, MainloopSm90, Work


class AheadSm90(MainloopSm90):
    """MainloopSm90 with its products in another order."""

    @cute.jit
    def steps(self, c: Consumer, work: Work, at):
        """All query tiles of a head; returns the state of the rings after them."""
        if work.tiles.count > 0:
            number = work.tiles.at(Int32(0))
            self.wait_for_q(c, work, number, at)
            self.start_s(c, at.index)
            self.finish_p(c, work, Int32(0), number, at, 0)
            for i in cutlass.range(1, work.tiles.count, unroll=1):
                following = work.tiles.at(i)
                ahead = at.clone()
                ahead.advance()
                self.finish_ds(c, work, number, at)
                self.wait_for_q(c, work, following, ahead)
                self.start_s(c, ahead.index)
                self.start_dq_and_dk(c, at)
                self.finish_p(c, work, i, following, ahead, 2)
                warpgroup.wait_group(2)  # dP' and dV of the following tile go on
                c.pipe_q.consumer_release(at)
                self.finish_dq(c, work, number)
                number = following
                at.advance()
            self.finish_ds(c, work, number, at)
            self.start_dq_and_dk(c, at)
            warpgroup.wait_group(0)
            c.pipe_q.consumer_release(at)
            self.finish_dq(c, work, number)
            at.advance()
        return at

    @cute.jit
    def finish_p(self, c: Consumer, work: Work, i: Int32, number: Int32, at, later: cutlass.Constexpr[int]):
        """P' of the i-th tile, whose scores are on their way; begins dP' before it, and dV after it.

        later: how many products were begun after the scores', and go on.
        """
        c.pipe_do.consumer_wait(at)
        self.start_dp(c, at.index)
        warpgroup.wait_group(later + 1)
        self.mask_scores(c, work, i, number)
        self.scores_to_p(c, work, at.index, number)
        self.start_dv(c, at.index)

    @cute.jit
    def finish_ds(self, c: Consumer, work: Work, number: Int32, at):
        """dS' of a tile, as an operand in registers; gives dO's stage back."""
        warpgroup.wait_group(0)
        c.pipe_do.consumer_release(at)
        self.p_to_ds(c, work, at.index, number)
        self.convert(c.acc_dP, c.tKrdS)

    @cute.jit
    def start_dq_and_dk(self, c: Consumer, at):
        """dS' to shared memory, and the products that read it."""
        buffer = self.buffer_of(at)
        self.share_ds(c, buffer)
        self.start_dq(c, buffer, 0)
        self.start_dk(c, at.index)

    @cute.jit
    def wait_for_q(self, c: Consumer, work: Work, number: Int32, at):
        """Until query tile `number` is there; of packed sequences its dO, too."""
        c.pipe_q.consumer_wait(at)
        if const_expr(self.facts.packed):
            self.zero_rows_past_the_end(c, work, number, at)

    @cute.jit
    def finish_dq(self, c: Consumer, work: Work, number: Int32):
        """Add dQ of a tile to its sums."""
        self.wait_for_sums(c)
        self.write_dq(c, 0)
        self.add_dq(c, work, number)
