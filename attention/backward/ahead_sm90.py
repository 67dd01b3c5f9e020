"""The sm_90 mainloop that computes scores ahead: the tensor cores have a product at any time.

A step takes a query tile in units of 64 rows. Scores of the next unit, dQ and dK run beside a unit's exponentials:

    S' in flight, of the first unit also dQ of the tile before, and dK of the unit before
    wait S' -> P' = 2^(S' - LSE)
    first unit: wait dQ -> to shared memory, to the warp that stores it; wait dO[i]
    issue dP' = V dO[i]' -> wait dK; first unit: release Q[i - 1]
    issue dV += P' dO[i] -> wait dP' -> dS' = P' (dP' - delta)
    wait Q of the next unit -> issue its S' -> wait dV; last unit: release dO[i] -> dS' to shared memory
    last unit: all consumers -> issue dQ = dS K
    issue dK += dS' Q[i]

With several units the last one's dK is issued later (`late_dk`): when P' of the next tile's first unit is there, so
that dQ runs beside those exponentials, and dK beside dQ's way to shared memory. A product with A in registers holds its
warp up until the products before it are done.

dQ's accumulators are those that dP' takes after them. A unit's fp32 scores, 64 by 64 for a warpgroup, and dP' need 64
registers a thread, P' and dS' in 16 bits as many as one of them: with D of 64 there is room for K's and V's fragments,
and the products that read them from registers need half of the bandwidth of shared memory.

After the last tile S' is computed once more, of what is in Q's ring, and nobody uses it: a branch around the product
would have the compiler serialise them all.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.barriers import BACKWARD_DS
from cute_kernels.tile.hopper import WARPGROUP
from cute_kernels.tile.ptx import compute_all_before_waits

from ..forward.softmax import exp2
from .config import BackwardFacts
from .mainloop_sm90 import MainloopSm90, Work
from .operands_sm90 import Consumer


class AheadSm90(MainloopSm90):
    """`begin`, a `step` for each query tile, `finish`."""

    by_units = True

    @property
    def v_apart(self) -> bool:
        """Rows that are zeroed need K and V at once."""
        return not self.facts.packed

    @property
    def in_registers(self) -> tuple[bool, bool]:
        """With two units of rows there is room for K alone; with a cap for none."""
        facts = self.facts
        return not facts.softcap and facts.head_dim <= 64, (
            not facts.softcap and facts.head_dim_v <= 64 and self.cfg.tile_m == 64
        )

    def __init__(self, facts: BackwardFacts):
        super().__init__(facts)
        if facts.score is not None or facts.config.groups != 2 or facts.config.stages != 2:
            terms = "two warpgroups and two stages, without a score_mod"
            raise ValueError(f"{facts.config}: scores are computed ahead by {terms}")

    @cute.jit
    def begin(self, c: Consumer, storage, work: Work, at_q, at, at_kv):
        """The first tile of all, but for what is left to the next step; of no tile, what nobody uses.

        K has been loaded; V, too, but where it is waited for here (v_apart).
        """
        views = self.views(storage, self.layouts())
        if const_expr(self.v_apart and self.in_registers[1]):
            c.pipe_v.consumer_wait(at_kv)
        for there, mma, place, fragment in (
            (self.in_registers[0], c.mmas[0], views["sK"], c.tSrK),
            (self.in_registers[1], c.mmas[1], views["sV"], c.tPrV),
        ):
            if const_expr(there):
                self.load_operand(mma, place, fragment)
        self.free_ds(c)
        if work.tiles.count > 0:
            c.pipe_q.consumer_wait(at_q)
            c.pipe_do.consumer_wait(at)
            if const_expr(self.facts.packed):
                self.zero_rows_past_the_end(c, work, work.tiles.at(0), at_q, at)
        self.start_s(c, at_q.index)
        if const_expr(self.v_apart and not self.in_registers[1]):
            c.pipe_v.consumer_wait(at_kv)
        for unit in range_constexpr(self.units):
            if const_expr(unit > 0):
                self.start_s(c, at_q.index, unit)
                self.share_unit(c, at_q, at, unit - 1, unit > 1)
            lse = self.lse_of(c, at_q.index, unit)
            warpgroup.wait_group(min(unit, 1))
            self.weigh(c, work, Int32(0), at_q.index, unit, lse)
            self.differentiate(c, work, at_q, at, unit, unit > 0)

    def load_operand(self, mma: cute.TiledMma, place: cute.Tensor, fragment: cute.Tensor):
        """K or V to registers, as an operand A."""
        copy = cute.make_tiled_copy_A(cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), self.dtype), mma)
        thread = copy.get_slice(cute.arch.thread_idx()[0] - WARPGROUP)
        cute.copy(copy, thread.partition_S(place)[None, None, None, 0], thread.retile(fragment))

    @cute.jit
    def step(self, c: Consumer, work: Work, i: Int32, at_q, at, begun: Int32) -> tuple:
        """What is left of the tile before, and query tile i of a head.

        at_q and at are the states of Q's and dO's rings of the tile before; returns those of this one. begun: the count
        of `at` when the tile of K was begun.
        """
        next_q, following = at_q.clone(), at.clone()
        next_q.advance()
        following.advance()
        c.pipe_q.consumer_wait(next_q)
        if const_expr(self.facts.packed):
            self.zero_rows_past_the_end(c, work, work.tiles.at(i), next_q, following)
        self.start_s(c, next_q.index)
        lse = self.share_last_unit(c, at_q, at, 1, next_q.index)
        if const_expr(not self.late_dk):
            self.start_last_dk(c, at_q, at, begun)
        warpgroup.wait_group(1 if self.late_dk else 2)
        self.weigh(c, work, i, next_q.index, 0, lse)
        if const_expr(self.late_dk):
            compute_all_before_waits(c.acc_S, c.rows)
            self.start_last_dk(c, at_q, at, begun)
            c.pipe_do.consumer_wait(following)
        warpgroup.wait_group(1)
        self.free_ds(c)
        self.move_dq(c, at)
        if const_expr(not self.late_dk):
            self.give_sums(c, self.dq_store.buffer_of(at))
            c.pipe_do.consumer_wait(following)
        self.start_dp(c, following.index, 0)
        if const_expr(self.late_dk):
            self.give_sums(c, self.dq_store.buffer_of(at))
        warpgroup.wait_group(1)
        c.pipe_q.consumer_release(at_q)
        self.finish_unit(c, work, next_q, following, 0, True)
        for unit in range_constexpr(1, self.units):
            self.start_s(c, next_q.index, unit)
            self.share_unit(c, next_q, following, unit - 1, True)
            lse = self.lse_of(c, next_q.index, unit)
            warpgroup.wait_group(1)
            self.weigh(c, work, i, next_q.index, unit, lse)
            self.differentiate(c, work, next_q, following, unit, True)
        return next_q, following

    @cute.jit
    def finish(self, c: Consumer, at_q, at, at_kv, begun: Int32, steps: Int32):
        """What is left of the last of `steps` tiles, in which V has no part; returns when all products are done."""
        if const_expr(self.v_apart):
            c.pipe_v.consumer_release(at_kv)
        self.share_last_unit(c, at_q, at, 0, None, steps > 0)
        self.start_last_dk(c, at_q, at, begun)
        warpgroup.wait_group(0)
        if steps > 0:
            self.move_dq(c, at)
            self.give_sums(c, self.dq_store.buffer_of(at))
            c.pipe_q.consumer_release(at_q)
        for acc in (c.acc_dK, c.acc_dV):  # by selection: after a branch the compiler would want them twice
            for v in range_constexpr(cute.size(acc)):
                acc[v] = select_(steps > 0, acc[v], Float32(0.0))

    # ------------------------------------------------------------------ a unit

    @property
    def late_dk(self) -> bool:
        """Whether dK of a tile's last unit is started when P of the next one is there: where a tile has several
        units, and no cap, beside which there are no registers for dS."""
        return self.units > 1 and not self.facts.softcap

    def lse_of(self, c: Consumer, stage: Int32, unit: int):
        """LSE of this thread's columns of a unit's scores, read before they are there; None: later, see late_dk."""
        return self.row_fragment(c, stage, 0, unit) if self.late_dk else None

    def weigh(self, c: Consumer, work: Work, i: Int32, stage: Int32, unit: int, lse):
        """Scores to P, in place."""
        self.mask_scores(c, work, i, work.tiles.at(i), unit)
        if self.facts.softcap:
            self.scores_to_p(c, work, stage, Int32(0), unit)
        else:
            self.exponentials(c, work, stage, unit, lse)

    def differentiate(self, c: Consumer, work: Work, at_q, at, unit: int, add: bool):
        """P to dS as an operand; dV is being computed."""
        self.start_dp(c, at.index, unit)
        warpgroup.wait_group(1)  # for dK of the unit before
        self.finish_unit(c, work, at_q, at, unit, add)

    def finish_unit(self, c: Consumer, work: Work, at_q, at, unit: int, add: bool):
        """The same, dP being computed."""
        if not self.facts.softcap:
            self.convert(c.acc_S, c.tVrP)
        self.start_dv(c, at.index, unit, add)
        delta = self.row_fragment(c, at_q.index, 1, unit) if self.late_dk else None
        warpgroup.wait_group(1)
        if delta is None:
            self.p_to_ds(c, work, at_q.index, Int32(0), unit)
        else:
            for v in range(cute.size(c.acc_dP)):
                c.acc_dP[v] = c.acc_S[v] * (c.acc_dP[v] - delta[v // 4 * 2 + v % 2])
        if self.facts.head_dim_v > 64 or self.facts.head_dim > 64:
            warpgroup.wait_group(0)  # for dV

    def share_unit(self, c: Consumer, at_q, at, unit: int, add: bool):
        """dS to shared memory, and start dK. Of a unit that is not its tile's last; scores have been started since."""
        warpgroup.wait_group(1)  # for dV: dS takes P's registers
        self.convert(c.acc_dP, c.tKrdS)
        self.wait_for_free_ds(c, unit)
        self.write_ds(c, self.buffer_of(at), unit)
        self.start_dk(c, at_q.index, unit, add)

    @cute.jit
    def share_last_unit(self, c: Consumer, at_q, at, in_flight: cutlass.Constexpr[int], next_q, there=True):
        """dS to shared memory, and start dQ; so many products were started since dV's.

        there: whether there is a tile; without one nobody uses what is computed. Returns LSE of the next tile's first
        unit, whose stage of Q is next_q; None: of none.
        """
        warpgroup.wait_group(in_flight)
        if there:
            c.pipe_do.consumer_release(at)
        self.convert(c.acc_dP, c.tKrdS)
        last = self.units - 1
        self.wait_for_free_ds(c, last)
        self.write_ds(c, self.buffer_of(at), last)
        self.publish()
        lse = None if const_expr(next_q is None) else self.lse_of(c, next_q, 0)
        self.wait_for_ds()
        self.start_dq(self.dq_in_dp(c), self.buffer_of(at), 0)
        return lse

    def start_last_dk(self, c: Consumer, at_q, at, begun: Int32):
        """Start dK of the last unit, of the tile of these states."""
        self.start_dk(c, at_q.index, self.units - 1, True if self.units > 1 else at.count > begun)

    def free_ds(self, c: Consumer):
        """This warpgroup has no product that reads dS."""
        if self.cfg.one_ds:
            cute.arch.barrier_arrive(barrier_id=BACKWARD_DS + c.group, number_of_threads=2 * WARPGROUP)

    def wait_for_free_ds(self, c: Consumer, unit: int):
        """Before a tile's first dS is written: until the other warpgroup has read that of the tile before."""
        if self.cfg.one_ds and unit == 0:
            cute.arch.barrier(barrier_id=BACKWARD_DS + 1 - c.group, number_of_threads=2 * WARPGROUP)

    def dq_in_dp(self, c: Consumer) -> Consumer:
        """The same with dP's registers as dQ's."""
        if cute.size(c.acc_dQ) != cute.size(c.acc_dP):
            return c
        return replace(c, acc_dQ=cute.make_tensor(c.acc_dP.iterator, c.acc_dQ.layout))

    def move_dq(self, c: Consumer, at):
        """dQ of the tile of this state to shared memory; dP's registers are free then."""
        buffer = self.dq_store.buffer_of(at)
        self.wait_for_sums(c, buffer)
        self.write_dq(self.dq_in_dp(c), 0, buffer)

    @cute.jit
    def exponentials(self, c: Consumer, work: Work, stage: Int32, unit: cutlass.Constexpr, lse):
        """Scores to P in place, in fp32. lse: None where it has not been read yet."""
        for first in range_constexpr(0, cute.size(c.acc_S), 4):
            if const_expr(lse is None):
                pair = self.row_values(c, stage, 0, (unit * self.unit + first * 2) // 4)
            else:
                pair = lse[first // 2], lse[first // 2 + 1]
            for v in range_constexpr(4):
                c.acc_S[first + v] = exp2(c.acc_S[first + v] * work.scale_log2 - pair[v % 2])
