"""The sm_90 mainloop of attention's backward: the steps of the consumers for each query tile.

    ring       producer arrives          consumers arrive (per stage)
    K, V       1 thread + bytes of TMA   1 thread per consumer warp, after the last query tile
    Q, rows    1 thread + bytes of TMA   1 thread per consumer warp; `ring_q` stages. rows: LSE and delta
    dO         1 thread + bytes of TMA   1 thread per consumer warp; `stages` stages

Scores are computed transposed, with 64 rows of K per warpgroup, so that P' and dS' are A operands in registers. A step
over query tile i, with dK and dV in registers (FlashAttention-3, Shah et al. 2024):

    wait Q[i] -> issue S' = K Q[i]' -> wait dO[i] -> issue dP' = V dO[i]' -> wait S'
    P' = 2^(S' - LSE) -> issue dV += P' dO[i] -> wait dP'
    dS' = P' (dP' - delta) -> to shared memory -> all consumers -> issue dQ = dS K, dK += dS' Q[i]
    wait dV, release dO[i] -> wait dQ -> to shared memory, from there added to dq_accum -> wait dK, release Q[i]

All warpgroups compute dQ of a tile together: each has 64 rows, or a part of the columns if there are fewer rows. dS is
double-buffered, so that one barrier per step is enough: a warpgroup writes a buffer only after all warpgroups have
passed the barrier of the step in between, and so have finished the WGMMA that reads it.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ampere import WARP
from cute_kernels.tile.barriers import BACKWARD_ALL, BACKWARD_FREE, BACKWARD_FULL
from cute_kernels.tile.hopper import WARPGROUP, start_product
from cute_kernels.tile.ptx import here, read_special_register
from cute_kernels.traced.indices import Shared

from ..forward.mainloop_sm90 import in_steps
from ..forward.mask import cap_scores
from ..forward.softmax import exp2, rows_and_columns
from ..forward.zero_oob_rows import zero_oob_rows
from ..masks.score_mod import KV_INPUT, Q_INPUT, SCORE_INPUT
from .config import FP32, BackwardFacts
from .dq_store import STORE_THREADS, DqStore, DqWork, barrier_offset
from .fragments import ROWS
from .mask import mask_elements, mask_window
from .members import load_words, mask_members
from .operands_sm90 import Consumer, OperandsSm90
from .score_mod import add_totals, ds_of, first_indices, inputs_at, no_totals, p_of, times_slope


@dataclass(frozen=True)
class Work:
    """One head's query tiles, and the arguments of masks and score_mod."""

    source: Any  # q_tiles.WindowRows or BlockRows
    tiles: Any  # source.for_tile of this tile
    seqlen: Any  # seqlen.SeqlenInfo
    b: Int32
    h: Int32
    col0: Int32  # the tile's first column of the score matrix
    scale_log2: Float32
    softcap: Float32  # with a score_mod, the factor applied to scores before it
    score_tensors: tuple | None = None  # tensors that score_mod reads
    score_sums: tuple | None = None  # FP32 gradient accumulators of those that need a gradient
    dq: Int64 | None = None  # address of dq_accum of the head's first query tile, if consumers add to it
    turns: Int64 | None = None  # address of that tile's semaphore, if deterministic


def first_row(threads: int | None = None) -> Int32:
    """The first of this thread's two rows of the KV tile, recomputed at each use so that no register holds it.

    threads: number of threads that own all rows of the tile; None: all consumers.
    """
    thread = consumer_thread(threads)
    return thread // WARP * 16 + thread % WARP // 4


def warp_row(threads: int | None = None) -> Int32:
    """The first row of this thread's warp; see first_row."""
    return consumer_thread(threads) // WARP * 16


def consumer_thread(threads: int | None) -> Int32:
    thread = read_special_register("tid.x") - WARPGROUP
    return thread if threads is None else thread % threads


class MainloopSm90(OperandsSm90):
    """Steps over the query tiles of one KV tile."""

    def __init__(self, facts: BackwardFacts):
        super().__init__(facts)
        self.dq_store = DqStore(facts)
        self.check_config()

    def check_config(self):
        """Raise ValueError if the mainloop does not support the configuration."""
        cfg = self.cfg
        if cfg.ds_buffers not in (1, cfg.stages):
            raise ValueError(f"{cfg}: dS must have 1 or {cfg.stages} (stages) buffers, got {cfg.ds_buffers}")
        if cfg.sums not in (1, cfg.stages):
            raise ValueError(f"{cfg}: sums (dQ buffers) must be 1 or {cfg.stages} (stages), got {cfg.sums}")
        if cfg.tile_n != ROWS * cfg.groups or cfg.tile_m % ROWS:
            raise ValueError(
                f"{cfg}: tile_n must be {ROWS} per warpgroup and tile_m a multiple of {ROWS}, "
                f"got {cfg.tile_n} for {cfg.groups} warpgroups and {cfg.tile_m}"
            )

    # dP is issued together with S if registers allow, after the mask if that needs them (masks_first), or after P with
    # a softcap or a score_mod, which need still more (late_dp).

    @property
    def masks_first(self) -> bool:
        facts = self.facts
        masked = facts.window.left or facts.window.right or facts.blocks is not None
        return masked and max(facts.head_dim, facts.head_dim_v) == 128

    @property
    def late_dp(self) -> bool:
        facts = self.facts
        return (facts.softcap or facts.score is not None) and max(facts.head_dim, facts.head_dim_v) == 128

    # ------------------------------------------------------------------ interface to the kernel

    # In this class a step is one query tile, loaded in one piece, and producer warps store dQ.

    @property
    def piece_rows(self) -> int:
        return self.cfg.tile_m

    def step_count(self, count: Int32) -> Int32:
        """Number of steps for `count` query tiles."""
        return count

    def numbers(self, tiles, i: Int32) -> list:
        """Indices of the query tiles of step i."""
        return [tiles.at(i)]

    def coordinates(self, numbers: list) -> list:
        """Indices of the pieces of these query tiles, in units of pieces."""
        return numbers

    def first_row(self) -> Int32:
        """This thread's first row in the KV tile."""
        return first_row()

    def warp_row(self) -> Int32:
        """The first row of this thread's warp in the KV tile."""
        return warp_row()

    def first_query(self, c: Consumer, number: Int32) -> Int32:
        """The first query row of a warpgroup's scores."""
        return number * self.cfg.tile_m

    def begin_head(self, c: Consumer, work: Work, at):
        """Hook before the steps over a head's query tiles."""

    def work(self, work: Work, dq: DqWork) -> Work:
        """The Work that `step` expects for a head."""
        return work

    def dq_part(self, group: Int32) -> Int32:
        """Index of a warpgroup's part of a query tile's dQ."""
        return group

    def first_column(self, c: Consumer, acc: cute.Tensor):
        """First column of a warpgroup's dK or dV accumulators."""
        return 0

    # ------------------------------------------------------------------ steps

    @cute.jit
    def steps(self, c: Consumer, work: Work, at):
        """Process all query tiles of a head; returns the state of the rings after them."""
        self.begin_head(c, work, at)
        for i in cutlass.range(self.step_count(work.tiles.count), unroll=1):
            self.step(c, work, i, at)
            at.advance()
        return at

    @cute.jit
    def step(self, c: Consumer, work: Work, i: Int32, at):
        """Compute dK, dV and dQ of query tile i of a head; `at` is the state of both rings and of dS's buffers."""
        number = work.tiles.at(i) if const_expr(self.facts.packed or self.facts.score is not None) else None
        c.pipe_q.consumer_wait(at)
        if const_expr(self.facts.packed):
            self.zero_rows_past_the_end(c, work, number, at, at)
        if const_expr(self.cfg.in_turn):
            self.serial_step(c, work, i, number, at)
        else:
            self.overlapped_step(c, work, i, number, at)

    @cute.jit
    def overlapped_step(self, c: Consumer, work: Work, i: Int32, number: Int32 | None, at):
        """A step whose WGMMAs overlap with each other and with the softmax."""
        self.start_s(c, at.index)
        masks_first, late_dp = const_expr(self.masks_first), const_expr(self.late_dp)
        if const_expr(masks_first or late_dp):
            warpgroup.wait_group(0)
            self.mask_scores(c, work, i, number)
        if const_expr(late_dp):
            self.scores_to_p(c, work, at.index, number)
        c.pipe_do.consumer_wait(at)
        self.start_dp(c, at.index)
        if const_expr(not (masks_first or late_dp)):
            warpgroup.wait_group(1)
            self.mask_scores(c, work, i, number)
        if const_expr(not late_dp):
            self.scores_to_p(c, work, at.index, number)
        self.start_dv(c, at.index)
        warpgroup.wait_group(1)
        self.p_to_ds(c, work, at.index, number)
        if const_expr(late_dp):
            warpgroup.wait_group(0)  # for dV: frees P's registers
        self.convert(c.acc_dP, c.tKrdS)
        buffer = self.buffer_of(at)
        self.store_ds(c, buffer)
        self.start_dq(c, buffer, 0)
        self.start_dk(c, at.index)
        warpgroup.wait_group(2)
        c.pipe_do.consumer_release(at)
        warpgroup.wait_group(1)
        sums = self.dq_store.buffer_of(at)
        self.wait_for_dq_buffer(c, sums)
        self.write_dq(c, 0, sums)
        self.store_dq_accum(c, sums)
        warpgroup.wait_group(0)
        c.pipe_q.consumer_release(at)

    @cute.jit
    def serial_step(self, c: Consumer, work: Work, i: Int32, number: Int32 | None, at):
        """A step of which only the WGMMAs of dV and dK overlap (StepConfig.in_turn)."""
        self.start_s(c, at.index)
        warpgroup.wait_group(0)
        self.mask_scores(c, work, i, number)
        self.scores_to_p(c, work, at.index, number)
        c.pipe_do.consumer_wait(at)
        self.start_dp(c, at.index)
        warpgroup.wait_group(0)
        self.p_to_ds(c, work, at.index, number)
        self.start_dv(c, at.index)
        self.convert(c.acc_dP, c.tKrdS)
        self.start_dk(c, at.index)
        buffer = self.buffer_of(at)
        self.store_ds(c, buffer)
        warpgroup.wait_group(0)
        c.pipe_do.consumer_release(at)
        c.pipe_q.consumer_release(at)
        sums = self.dq_store.buffer_of(at)
        self.wait_for_dq_buffer(c, sums)
        for part in range_constexpr(self.parts_k):
            self.start_dq(c, buffer, part)
            warpgroup.wait_group(0)
            self.write_dq(c, part, sums)
        self.store_dq_accum(c, sums)
        if const_expr(self.cfg.ds_buffers == 1):
            self.wait_for_ds()  # all warps have read dS

    def buffer_of(self, at):
        """Index of a step's dS buffer."""
        return at.index if self.cfg.ds_buffers > 1 else 0

    def start_s(self, c: Consumer, stage: Int32, unit: int = 0):
        start_product(c.mmas[0], c.acc_S, *in_steps(c.tSrK, c.tSrQ[unit][None, None, None, stage]), True)

    def start_dp(self, c: Consumer, stage: Int32, unit: int = 0):
        start_product(c.mmas[1], c.acc_dP, *in_steps(c.tPrV, c.tPrdO[unit][None, None, None, stage]), True)

    def start_dv(self, c: Consumer, stage: Int32, unit: int = 0, add=True):
        self.pin(c.tVrP)
        start_product(c.mmas[2], c.acc_dV, *in_steps(c.tVrP, c.tVrdO[unit][None, None, None, stage]), add=add)

    def start_dk(self, c: Consumer, stage: Int32, unit: int = 0, add=True):
        self.pin(c.tKrdS)
        start_product(c.mmas[3], c.acc_dK, *in_steps(c.tKrdS, c.tKrQ[unit][None, None, None, stage]), add=add)

    def pin(self, operand: cute.Tensor):
        """Pin an operand's registers, so that they are written before the WGMMA's wgmma.fence."""
        words = cute.recast_tensor(operand, Int32)
        for i in range(cute.size(words)):
            words[i] = here(words[i])

    def start_dq(self, c: Consumer, buffer: Int32, part: int):
        """Issue dQ for `part` of the warpgroup's columns."""
        start_product(c.mmas[4], c.acc_dQ, *in_steps(c.tQrdS[None, None, None, buffer], c.tQrK[part]), True)

    @cute.jit
    def store_ds(self, c: Consumer, buffer: Int32):
        """Store dS to shared memory and wait for all consumers to do so."""
        self.write_ds(c, buffer)
        self.publish()
        self.wait_for_ds()

    def publish(self):
        """Make this thread's writes to shared memory visible to WGMMA and bulk copies after the next barrier."""
        cute.arch.fence_view_async_shared()

    def wait_for_ds(self):
        """Wait until dS of all consumers is in shared memory."""
        cute.arch.barrier(barrier_id=BACKWARD_ALL, number_of_threads=self.cfg.groups * WARPGROUP)

    def write_ds(self, c: Consumer, buffer: Int32, unit: int = 0):
        """Write dS to shared memory; call `publish` before the barrier."""
        rdS = cute.make_tensor(c.tKrdS.iterator, c.acc_dP.layout)
        copy_dS = c.copy_dS.get_slice(cute.arch.thread_idx()[0] - WARPGROUP)
        cute.copy(c.copy_dS, copy_dS.retile(rdS), c.sdS[unit][None, None, None, buffer])

    @cute.jit
    def mask_scores(
        self, c: Consumer, work: Work, i: Int32, number: Int32 | None, unit: cutlass.Constexpr = 0, words=None
    ):
        """Apply the softcap, and set masked scores to -inf.

        number: index of query tile i; None: read where scores are masked, since full blocks do not need it.
        words: load_words' of this unit; None: load them here.
        """
        scores = rows_and_columns(c.acc_S)
        if const_expr(self.facts.softcap):
            cap_scores(scores, work.softcap)
        if const_expr(self.facts.members is not None):
            row0 = self.row_of(c, work, i, number, unit)
            if const_expr(words is None):
                words = self.words_of(c, work, row0, const_expr(4 * cute.size(scores, mode=[1])))
            keys, col = self.keys_of(c, work), work.col0 + self.first_row()
            mask_members(scores, self.facts.members, words, keys, col, row0, work.seqlen)
        elif const_expr(self.facts.blocks is not None):
            if work.tiles.is_partial(i) or work.col0 + self.cfg.tile_n > work.seqlen.cols:
                col, row0 = work.col0 + self.first_row(), self.row_of(c, work, i, number, unit)
                tensors = work.source.mask_tensors
                mask_elements(scores, self.facts.blocks, tensors, col, row0, work.b, work.h, work.seqlen)
        elif work.tiles.is_partial(i):
            row0 = self.row_of(c, work, i, number, unit)
            mask_window(scores, work.source, work.col0 + self.first_row(), row0, work.seqlen)

    def row_of(self, c: Consumer, work: Work, i: Int32, number: Int32 | None, unit: int) -> Int32:
        """The first query row of a unit of query tile i. number: mask_scores'."""
        return self.first_query(c, work.tiles.at(i) if number is None else number) + unit * self.unit

    def words_of(self, c: Consumer, work: Work, row0: Int32, rows: int) -> list:
        """Load this lane's words of membership for `rows` rows of scores from row0 on."""
        first, tensors = self.keys_of(c, work)[0], work.source.mask_tensors
        return load_words(self.facts.members, rows, tensors, row0, first, work.b, work.h)

    def keys_of(self, c: Consumer, work: Work) -> tuple:
        """(first, end) of keys in one KV block, to which those of this warpgroup belong."""
        size = min(self.facts.members.block_size, self.cfg.tile_n)
        first = work.col0 if size == self.cfg.tile_n else work.col0 + c.group * ROWS
        return first, first + size

    @cute.jit
    def scores_to_p(self, c: Consumer, work: Work, stage: Int32, number: Int32 | None, unit: cutlass.Constexpr = 0):
        """Compute P from the scores: rounded as an operand, and in place in FP32. With a softcap P in place is
        multiplied by the softcap's derivative."""
        shared = Shared(SCORE_INPUT)
        for first in range_constexpr(0, cute.size(c.acc_S), 8):  # rows r and columns 2 j, 2 j + 1 of two j
            lse = [self.row_values(c, stage, 0, unit * self.unit // 4 + (first // 4 + j) * 2) for j in range(2)]
            part = cute.make_tensor(c.acc_S.iterator + first, cute.make_layout(8))
            capped = [part[v] for v in range(8)]
            if const_expr(self.facts.score is not None):
                kept = self.changed_scores_to_p(c, work, part, lse, first, number, shared)
            else:
                for v in range_constexpr(8):
                    part[v] = exp2(part[v] * work.scale_log2 - lse[v // 4][v % 2])
            cute.make_tensor(c.tVrP.iterator + first, cute.make_layout(8)).store(part.load().to(self.dtype))
            if const_expr(self.facts.score is not None):
                for v in range_constexpr(8):
                    part[v] = kept[v]
            if const_expr(self.facts.softcap):
                for v in range_constexpr(8):
                    slope = 1.0 - capped[v] * capped[v]
                    part[v] = select_(part[v] > 0.0, part[v] * slope, part[v])  # the slope of a masked score is NaN

    @cute.jit
    def p_to_ds(self, c: Consumer, work: Work, stage: Int32, number: Int32 | None, unit: cutlass.Constexpr = 0):
        """Compute dS = P (dP - delta) in place of dP, and the gradients of tensors that score_mod captures."""
        totals, place, shared = [], (), Shared(SCORE_INPUT)
        if const_expr(self.facts.score is not None):
            totals, place = no_totals(self.facts), self.place_of_scores(c, work, number)
        p, ds = rows_and_columns(c.acc_S), rows_and_columns(c.acc_dP)
        for column in range_constexpr(0, cute.size(ds, mode=[1]), 2):
            delta = self.row_values(c, stage, 1, unit * self.unit // 4 + column)
            lse = delta
            if const_expr(self.facts.score is not None and self.facts.keeps_scores):
                lse = self.row_values(c, stage, 0, column)
            for j in range_constexpr(2):
                for r in range_constexpr(cute.size(ds, mode=[0])):
                    if const_expr(self.facts.score is not None):
                        at = const_expr((column // 2 * 4 + 2 * r + j, 1))
                        both = p[r, column + j], ds[r, column + j] - delta[j], lse[j]
                        ds[r, column + j] = ds_of(self.facts, work, *both, (*at, *place), totals, shared)
                    else:
                        ds[r, column + j] = p[r, column + j] * (ds[r, column + j] - delta[j])
        if const_expr(self.facts.score is not None):
            add_totals(self.facts, work, totals)

    def place_of_scores(self, c: Consumer, work: Work, number: Int32) -> tuple:
        """Column and query row of this thread's first score."""
        return first_indices(work.col0 + self.warp_row(), self.first_query(c, number), 1, cute.size(c.acc_S) * 2)

    def changed_scores_to_p(
        self, c: Consumer, work: Work, part: cute.Tensor, lse: list, first: int, number: Int32, shared: Shared
    ) -> list:
        """Compute P from eight scores, from `first` on, in place. Returns the values that dS needs, either scores or P
        times the slope (BackwardFacts.keeps_scores)."""
        facts, kept = self.facts, []
        place = self.place_of_scores(c, work, number)
        own = any({Q_INPUT, KV_INPUT} <= {*load.indices} for _, load in facts.score.program.loads)
        for v in range(8):
            if facts.score_sums or own:  # recomputed: gradients, or the addresses of each score, need the registers
                place = self.place_of_scores(c, work, number)
            inputs = inputs_at(facts, work, part[v], first + v, 1, *place)
            p = p_of(facts, work, part[v], lse[v // 4][v % 2], inputs, shared)
            kept.append(part[v] if facts.keeps_scores else times_slope(facts, work, p, p, inputs, shared))
            part[v] = p
        return kept

    def row_values(self, c: Consumer, stage: Int32, which: int, column: int) -> cute.Tensor:
        """Load LSE (which = 0) or delta (1) of two query rows, (2,): this thread's columns from `column` on."""
        row = cute.arch.lane_idx() % 4 * 2 + column // 2 * 8
        at = c.rows + ((stage * 2 + which) * self.cfg.tile_m + row) * FP32
        values, pair = cute.make_rmem_tensor(2, Float32), cute.make_layout(2)
        place = make_ptr(Float32, at, AddressSpace.smem, assumed_align=2 * FP32)
        cute.autovec_copy(cute.make_tensor(place, pair), values)
        return values

    def row_fragment(self, c: Consumer, stage: Int32, which: int, unit: int) -> cute.Tensor:
        """Load LSE (which = 0) or delta (1) of this thread's columns of a unit's scores."""
        values = cute.make_rmem_tensor(self.unit // 4, Float32)
        for column in range(0, self.unit // 4, 2):
            pair = self.row_values(c, stage, which, unit * self.unit // 4 + column)
            values[column], values[column + 1] = pair[0], pair[1]
        return values

    def wait_for_dq_buffer(self, c: Consumer, buffer: Int32 | int):
        """Wait until this warpgroup's part of a dQ buffer has been read."""
        barrier = BACKWARD_FREE + barrier_offset(c.group, buffer)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=STORE_THREADS)

    def write_dq(self, c: Consumer, part: int, buffer: Int32 | int):
        """Write acc_dQ, `part` of the warpgroup's columns, to a dQ buffer in shared memory."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        begin = c.sums + self.dq_store.place_of(c.group, buffer)
        layout, count = cute.make_layout(self.sums.vector), cute.size(c.acc_dQ)
        for r in range(0, count, self.sums.vector):
            at = begin + self.sums.offset(tidx, part * count + r) * FP32
            place = make_ptr(Float32, at, AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(c.acc_dQ.iterator + r, layout), cute.make_tensor(place, layout))

    def store_dq_accum(self, c: Consumer, buffer: Int32 | int):
        """Hand a dQ buffer to the warp that adds it to dq_accum."""
        self.publish()
        barrier = BACKWARD_FULL + barrier_offset(c.group, buffer)
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=STORE_THREADS)

    # ------------------------------------------------------------------ rows past the end, rounding

    @cute.jit
    def zero_rows_past_the_end(self, c: Consumer, work: Work, number: Int32, at_q, at):
        """Zero the rows of Q and dO that belong to the next sequence. at_q, at: the states of their rings."""
        valid = work.seqlen.rows - number * self.cfg.tile_m
        if valid < self.cfg.tile_m:
            c.pipe_do.consumer_wait(at)
            for ring, name, index in ((c.ring_q, "sQ", at_q.index), (c.ring_do, "sdO", at.index)):
                self.zero_rows(ring, self.transposed()[name].outer, index, valid)

    def zero_rows(self, ring: Int32, layout, index: Int32, valid: Int32):
        """Zero the rows from `valid` on of an operand's tile, by all consumers."""
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        zero_oob_rows(ring, layout, index, valid, tidx, self.cfg.groups * WARPGROUP, BACKWARD_ALL)

    @cute.jit
    def convert(self, acc: cute.Tensor, values: cute.Tensor):
        """Convert to 16 bits, eight values at a time; see forward.mainloop_sm90."""
        for i in range_constexpr(0, cute.size(acc), 8):
            part = cute.make_tensor(acc.iterator + i, cute.make_layout(8))
            cute.make_tensor(values.iterator + i, cute.make_layout(8)).store(part.load().to(self.dtype))
