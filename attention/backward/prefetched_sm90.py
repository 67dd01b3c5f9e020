"""The sm_90 mainloop that prefetches scores, so that the tensor cores always have a WGMMA in flight.

A step processes a query tile in units of 64 rows. WGMMAs of the next unit's scores, dQ and dK overlap with a unit's
exponentials:

    in flight: S', for the first unit also dQ of the previous tile, and dK of the previous unit
    wait S' -> P' = 2^(S' - LSE)
    first unit: wait dQ -> to shared memory, to the warp that stores it; wait dO[i]
    issue dP' = V dO[i]' -> wait dK; first unit: release Q[i - 1]
    issue dV += P' dO[i] -> wait dP' -> dS' = P' (dP' - delta)
    wait Q of the next unit -> issue its S' -> wait dV; last unit: release dO[i] -> dS' to shared memory
    last unit: all consumers -> issue dQ = dS K
    issue dK += dS' Q[i]

With several units the last unit's dK is issued later (`late_dk`), once P' of the next tile's first unit is available:
dQ overlaps with those exponentials, and dK with the store of dQ to shared memory. A WGMMA with A in registers blocks
its warp until the WGMMAs before it have finished.

dQ and dP' share their accumulators. A unit's FP32 scores, 64 by 64 per warpgroup, and dP' need 64 registers per thread;
P' and dS' in 16 bits need as many as one of them. With D of 64 there is room for the fragments of K and V, and WGMMAs
that read them from registers need half the shared memory bandwidth.

After the last tile S' is computed once more from whatever Q's ring holds, and the result is never read: a branch around
the WGMMA would make the compiler serialize all of them.
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
from cute_kernels.tile.ptx import compute_all_before_waits, integer_after

from ..forward.softmax import exp2
from .config import BackwardFacts
from .mainloop_sm90 import MainloopSm90, Work
from .operands_sm90 import Consumer


class AheadSm90(MainloopSm90):
    """`begin`, a `step` for each query tile, `finish`."""

    by_units = True

    @property
    def v_apart(self) -> bool:
        """True if V is waited for separately. Packed sequences zero rows of K and V together, so they wait for both."""
        return not self.facts.packed

    @property
    def in_registers(self) -> tuple[bool, bool]:
        """True if (K, V) fit in registers: K alone with two units of rows, neither with a softcap."""
        facts = self.facts
        return not facts.softcap and facts.head_dim <= 64, (
            not facts.softcap and facts.head_dim_v <= 64 and self.cfg.tile_m == 64
        )

    def __init__(self, facts: BackwardFacts):
        super().__init__(facts)
        if facts.score is not None or facts.config.groups != 2 or facts.config.stages != 2:
            needs = "2 consumer warpgroups, 2 stages and no score_mod"
            raise ValueError(f"{facts.config}: the mainloop that prefetches scores requires {needs}")

    @cute.jit
    def begin(self, c: Consumer, storage, work: Work, at_q, at, at_kv):
        """Process the CTA's first query tile, except for the part that the next step does. Without a query tile the
        results are never read.

        K has been loaded, and so has V unless v_apart, in which case this waits for it.
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
        self.prefetch_row(c, work, Int32(0))
        self.prefetch_words(c, work, Int32(0))
        for unit in range_constexpr(self.units):
            if const_expr(unit > 0):
                self.start_s(c, at_q.index, unit)
                self.store_unit_ds(c, at_q, at, unit - 1, unit > 1)
            lse = self.lse_of(c, at_q.index, unit)
            warpgroup.wait_group(min(unit, 1))
            self.compute_p(c, work, self.tile_of(c, work, Int32(0)), Int32(0), at_q.index, unit, lse)
            self.compute_ds(c, work, at_q, at, unit, unit > 0)

    def load_operand(self, mma: cute.TiledMma, place: cute.Tensor, fragment: cute.Tensor):
        """Load K or V to registers as an A operand."""
        copy = cute.make_tiled_copy_A(cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), self.dtype), mma)
        thread = copy.get_slice(cute.arch.thread_idx()[0] - WARPGROUP)
        cute.copy(copy, thread.partition_S(place)[None, None, None, 0], thread.retile(fragment))

    @cute.jit
    def step(self, c: Consumer, work: Work, i: Int32, at_q, at, begun: Int32) -> tuple:
        """Finish the previous tile, and process query tile i of a head.

        at_q, at: states of Q's and dO's rings for the previous tile; returns those for this one. begun: `at.count` at
        the start of the KV tile.
        """
        next_q, following = at_q.clone(), at.clone()
        next_q.advance()
        following.advance()
        c.pipe_q.consumer_wait(next_q)
        if const_expr(self.facts.packed):
            self.zero_rows_past_the_end(c, work, work.tiles.at(i), next_q, following)
        self.start_s(c, next_q.index)
        lse = self.store_last_ds(c, at_q, at, 1, next_q.index, (work, i))
        if const_expr(not self.late_dk):
            self.start_last_dk(c, at_q, at, begun)
        warpgroup.wait_group(1 if self.late_dk else 2)
        number = self.tile_of(c, work, i)
        self.compute_p(c, work, number, i, next_q.index, 0, lse)
        if const_expr(self.late_dk):
            compute_all_before_waits(c.acc_S, c.rows)
            self.start_last_dk(c, at_q, at, begun)
            c.pipe_do.consumer_wait(following)
        warpgroup.wait_group(1)
        self.free_ds(c)
        self.move_dq(c, at)
        if const_expr(not self.late_dk):
            self.store_dq_accum(c, self.dq_store.buffer_of(at))
            c.pipe_do.consumer_wait(following)
        self.start_dp(c, following.index, 0)
        if const_expr(self.late_dk):
            self.store_dq_accum(c, self.dq_store.buffer_of(at))
        self.prefetch_row(c, work, i + 1)
        warpgroup.wait_group(1)
        c.pipe_q.consumer_release(at_q)
        self.finish_unit(c, work, next_q, following, 0, True)
        for unit in range_constexpr(1, self.units):
            self.start_s(c, next_q.index, unit)
            self.store_unit_ds(c, next_q, following, unit - 1, True)
            lse = self.lse_of(c, next_q.index, unit)
            warpgroup.wait_group(1)
            self.compute_p(c, work, number, i, next_q.index, unit, lse)
            self.compute_ds(c, work, next_q, following, unit, True)
        return next_q, following

    @cute.jit
    def finish(self, c: Consumer, at_q, at, at_kv, begun: Int32, steps: Int32):
        """Finish the last of `steps` tiles, which does not read V, and wait for all WGMMAs."""
        if const_expr(self.v_apart):
            c.pipe_v.consumer_release(at_kv)
        self.store_last_ds(c, at_q, at, 0, None, None, steps > 0)
        self.start_last_dk(c, at_q, at, begun)
        warpgroup.wait_group(0)
        if steps > 0:
            self.move_dq(c, at)
            self.store_dq_accum(c, self.dq_store.buffer_of(at))
            c.pipe_q.consumer_release(at_q)
        if const_expr(not self.facts.shared_kv):  # items of ranges have a step; store_part selects
            for acc in (c.acc_dK, c.acc_dV):  # by selection: with a branch the compiler would keep two copies
                for v in range_constexpr(cute.size(acc)):
                    acc[v] = select_(steps > 0, acc[v], Float32(0.0))

    # ------------------------------------------------------------------ a unit

    @property
    def late_dk(self) -> bool:
        """True if dK of a tile's last unit is issued once P of the next unit is available: with several units per tile
        and no softcap, which leaves no registers for dS."""
        return self.units > 1 and not self.facts.softcap

    def lse_of(self, c: Consumer, stage: Int32, unit: int):
        """LSE of this thread's columns of a unit's scores, prefetched with late_dk; None: read later."""
        return self.row_fragment(c, stage, 0, unit) if self.late_dk else None

    def compute_p(self, c: Consumer, work: Work, number, i: Int32, stage: Int32, unit: int, lse):
        """Compute P from the scores, in place. number: tile_of's."""
        words = None if number is None else self.prefetched_words(c, unit)
        self.mask_scores(c, work, i, number, unit, words)
        if self.facts.softcap:
            self.scores_to_p(c, work, stage, Int32(0), unit)
        else:
            self.exponentials(c, work, stage, unit, lse)

    def compute_ds(self, c: Consumer, work: Work, at_q, at, unit: int, add: bool):
        """Issue dP and compute dS from P as an operand, while dV is in flight."""
        self.start_dp(c, at.index, unit)
        warpgroup.wait_group(1)  # for dK of the previous unit
        self.finish_unit(c, work, at_q, at, unit, add)

    def finish_unit(self, c: Consumer, work: Work, at_q, at, unit: int, add: bool):
        """Compute dS from P as an operand, with dP in flight."""
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

    def store_unit_ds(self, c: Consumer, at_q, at, unit: int, add: bool):
        """Store dS of a unit to shared memory and issue dK. The unit is not its tile's last, and the next unit's scores
        have been issued."""
        warpgroup.wait_group(1)  # for dV: dS reuses P's registers
        self.convert(c.acc_dP, c.tKrdS)
        self.wait_for_free_ds(c, unit)
        self.write_ds(c, self.buffer_of(at), unit)
        self.start_dk(c, at_q.index, unit, add)

    @cute.jit
    def store_last_ds(self, c: Consumer, at_q, at, in_flight: cutlass.Constexpr[int], next_q, place=None, there=True):
        """Store dS of a tile's last unit to shared memory and issue dQ. Returns LSE of the next tile's first unit, and
        loads the words of its membership.

        in_flight: WGMMAs issued after dV's. next_q, place: the next tile's stage of Q, and its (Work, i); None: no next
        tile, returns None.
        there: True if there is a tile; otherwise the results are never read.
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
        if const_expr(place is not None):
            self.prefetch_words(c, *place)  # after the fence of publish, which waits for loads in flight
        self.wait_for_ds()
        self.start_dq(self.dq_in_dp(c), self.buffer_of(at), 0)
        return lse

    # With a mask of selected blocks, c.members has the row of blocks of the next query tile, and then this lane's words
    # for each of its units.

    def prefetch_row(self, c: Consumer, work: Work, i: Int32):
        """Load the row of blocks of a head's query tile i."""
        if self.facts.members is not None:
            c.members[0] = work.tiles.partial_row(i)

    def tile_of(self, c: Consumer, work: Work, i: Int32) -> Int32 | None:
        """prefetched_tile; None with other masks, see mask_scores."""
        return None if self.facts.members is None else self.prefetched_tile(c, work, i)

    def prefetched_tile(self, c: Consumer, work: Work, i: Int32) -> Int32:
        """Index of query tile i, whose row of blocks has been loaded."""
        return c.members[0] * work.tiles.steps + i % work.tiles.steps

    def prefetch_words(self, c: Consumer, work: Work, i: Int32):
        """Load the words of query tile i, whose row of blocks has been loaded."""
        if self.facts.members is not None:
            row0 = self.first_query(c, self.prefetched_tile(c, work, i))
            for unit in range(self.units):
                words = self.words_of(c, work, row0 + unit * self.unit, self.unit)
                for j, word in enumerate(words):
                    c.members[1 + unit * len(words) + j] = word

    def prefetched_words(self, c: Consumer, unit: int) -> list:
        """The words of a unit, not used before its scores have been computed: a ballot of them would wait for them."""
        count = (cute.size(c.members) - 1) // self.units
        return [integer_after(c.members[1 + unit * count + j], c.acc_S[0]) for j in range(count)]

    def start_last_dk(self, c: Consumer, at_q, at, begun: Int32):
        """Issue dK of the last unit of the tile that the ring states at_q and at refer to."""
        self.start_dk(c, at_q.index, self.units - 1, True if self.units > 1 else at.count > begun)

    def free_ds(self, c: Consumer):
        """Signal that no WGMMA of this warpgroup reads dS any more."""
        if self.cfg.one_ds:
            cute.arch.barrier_arrive(barrier_id=BACKWARD_DS + c.group, number_of_threads=2 * WARPGROUP)

    def wait_for_free_ds(self, c: Consumer, unit: int):
        """Before a tile's first dS is written, wait until the other warpgroup has read the previous tile's."""
        if self.cfg.one_ds and unit == 0:
            cute.arch.barrier(barrier_id=BACKWARD_DS + 1 - c.group, number_of_threads=2 * WARPGROUP)

    def dq_in_dp(self, c: Consumer) -> Consumer:
        """The same consumer with dQ's accumulators in dP's registers."""
        if cute.size(c.acc_dQ) != cute.size(c.acc_dP):
            return c
        return replace(c, acc_dQ=cute.make_tensor(c.acc_dP.iterator, c.acc_dQ.layout))

    def move_dq(self, c: Consumer, at):
        """Store dQ of the tile with ring state `at` to shared memory, which frees dP's registers."""
        buffer = self.dq_store.buffer_of(at)
        self.wait_for_dq_buffer(c, buffer)
        self.write_dq(self.dq_in_dp(c), 0, buffer)

    @cute.jit
    def exponentials(self, c: Consumer, work: Work, stage: Int32, unit: cutlass.Constexpr, lse):
        """Compute P from the scores in place, in FP32. lse: lse_of; None: read here."""
        for first in range_constexpr(0, cute.size(c.acc_S), 4):
            if const_expr(lse is None):
                pair = self.row_values(c, stage, 0, (unit * self.unit + first * 2) // 4)
            else:
                pair = lse[first // 2], lse[first // 2 + 1]
            for v in range_constexpr(4):
                c.acc_S[first + v] = exp2(c.acc_S[first + v] * work.scale_log2 - pair[v % 2])
