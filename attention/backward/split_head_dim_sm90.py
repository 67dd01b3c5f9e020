"""The sm_90 mainloop with the head dimension of dK and dV split across warpgroups, for 64 rows of K per CTA or head
dimensions above 128.

Each of two warpgroups has all rows of K, and half of the columns of dK and dV. It computes S' and dP' of its own part
of a step's query rows, and passes P' and dS' to the other warpgroup through shared memory. Its own part stays in
registers as an A operand, so that half of the WGMMAs of dV and dK start before the other's part is available:

    wait Q[i] -> issue S' = K Q[own]' -> wait dO[i] -> issue dP' = V dO[own]' -> wait S'
    P' = 2^(S' - LSE) -> wait for the other's reads -> P' to shared memory -> issue dV += P'[own] dO[own] -> wait dP'
    dS' = P' (dP' - delta) -> to shared memory -> issue dK += dS'[own] Q[own] -> all consumers
    issue dQ = dS K, dV += P'[other] dO[other], dK += dS'[other] Q[other]
    wait dQ -> to shared memory, from there added to dq_accum -> wait dV, release dO[i] -> wait dK, release Q[i]

SharedColumnsConfig.query_tiles determines a warpgroup's own part, and the part of dQ that it computes:

    query tiles per step    own             dQ
    1                       32 query rows   all 64 rows, half of the columns; from both warpgroups' dS
    2                       a query tile    its own tile, all columns; from its own dS

With two tiles per step the last step may have only one. The second warpgroup then repeats the first one's, with P = 0.

Rings hold pieces of a warpgroup's own query rows, two per stage: piece `2 stage + g` belongs to warpgroup g. dQ is
stored in `dq_parts` parts of its columns one after the other, through one buffer in shared memory.

    named barriers   1       all consumers: P and dS are in shared memory, or rows past the end are zeroed
                     2, 3    one consumer: a part of dQ is in shared memory, or the buffer may be written again
                     4, 5    both consumers: warpgroup 0, 1 has read the other's P and dS of the previous step
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.cute.typing import AddressSpace
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.tile.barriers import BACKWARD_ALL, BACKWARD_DQ, BACKWARD_READ
from cute_kernels.tile.element import SWIZZLES
from cute_kernels.tile.hopper import ALIGN, WARPGROUP, smem_layout, start_product
from cute_kernels.tile.ptx import add_vector_to_memory, bulk_add, zero_here

from ..forward.mainloop_sm90 import in_steps
from ..forward.tile_queue import FIELDS, SLOTS
from .config import FP32
from .dq_store import DqWork
from .fragments import ROWS
from .mainloop_sm90 import MainloopSm90, Work, first_row, warp_row
from .operands_sm90 import Consumer
from .semaphores import TURN, end_turn, wait_for_turn

GROUPS = 2


@dataclass(frozen=True)
class ColumnsConsumer(Consumer):
    """State of a consumer warpgroup. The inherited tVrP and tKrdS are its own P' and dS'. PIPE counts pieces."""

    tVsP: cute.Tensor  # (MMA, 1, MMA_K, group): P' as an A operand in shared memory
    tKsdS: cute.Tensor  # (MMA, 1, MMA_K, group)
    sP: cute.Tensor  # (R2S, R2S_M, R2S_N, group): destination of this thread's part, as sdS[0]
    turn: cute.Tensor | None  # (1,) Int64: address of the semaphore to increment once dQ is in memory, 0 for none


def divided(dtype, rows: int, cols: int, parts: int, stages: int, row_major: bool):
    """Layout of a ring (rows, cols, PIPE) with a swizzle atom that divides each of `parts` parts of the columns.

    row_major: as loaded; otherwise the same memory as (cols, rows, PIPE).
    """
    kinds = warpgroup.SmemLayoutAtomKind
    width = cols // parts * dtype.width // 8
    name = next(f"SW{span}" for span in SWIZZLES if width % span == 0)
    atom = warpgroup.make_smem_layout_atom(getattr(kinds, f"{'K' if row_major else 'MN'}_{name}"), dtype)
    shape, order = ((rows, cols, stages), (0, 1, 2)) if row_major else ((cols, rows, stages), (1, 0, 2))
    return cute.tile_to_shape(atom, shape, order=order)


class SharedColumnsSm90(MainloopSm90):
    """Steps over the query tiles of one KV tile, with the columns of dK and dV split across two warpgroups."""

    def check_config(self):
        cfg = self.cfg
        if (cfg.tile_m, cfg.tile_n, cfg.groups) != (ROWS, ROWS, GROUPS) or cfg.query_tiles not in (1, GROUPS):
            raise ValueError(
                f"{cfg}: split columns require {ROWS}x{ROWS} tiles, {GROUPS} warpgroups and 1 or {GROUPS} query tiles"
            )
        if self.facts.head_dim // cfg.dq_groups % (8 * cfg.dq_parts):
            raise ValueError(f"{cfg}: dq_parts {cfg.dq_parts} must divide dQ's columns into multiples of 8")
        if cfg.stages < 2:
            raise ValueError(f"{cfg}: stages must be at least 2, since Q of the next step is prefetched")
        if cfg.direct and self.facts.deterministic:
            raise ValueError(f"{cfg}: direct is nondeterministic; use direct=False for a deterministic kernel")

    # ------------------------------------------------------------------ interface to the kernel

    @property
    def pair(self) -> bool:
        """True if each warpgroup processes its own query tile."""
        return self.cfg.query_tiles == GROUPS

    @property
    def piece_rows(self) -> int:
        return self.cfg.step_rows // GROUPS

    def step_count(self, count: Int32) -> Int32:
        return (count + 1) // 2 if self.pair else count

    def numbers(self, tiles, i: Int32) -> list:
        if not self.pair:
            return [tiles.at(i)]
        return [tiles.at(cutlass.min(2 * i + j, tiles.count - 1)) for j in range(GROUPS)]

    def coordinates(self, numbers: list) -> list:
        return numbers if self.pair else [numbers[0] * GROUPS + j for j in range(GROUPS)]

    def first_row(self) -> Int32:
        return first_row(WARPGROUP)

    def warp_row(self) -> Int32:
        return warp_row(WARPGROUP)

    def first_query(self, c: Consumer, number: Int32) -> Int32:
        row = number * self.cfg.tile_m
        return row if self.pair else row + c.group * self.piece_rows

    def first_column(self, c: Consumer, acc: cute.Tensor) -> Int32:
        return c.group * (cute.size(acc) * WARPGROUP // ROWS)

    def state_of_do(self, at):
        """State of dO's ring, given that of Q's."""
        if self.facts.stages_do == self.cfg.stages:
            return at
        return pipeline.PipelineState(1, at.count, Int32(0), at.count % 2)

    def work(self, work: Work, dq: DqWork) -> Work:
        turns = dq.turn_of(0, self.cfg.dq_groups) if self.facts.deterministic else None
        return replace(work, dq=dq.dq_of(0, self.sums.size * FP32), turns=turns)

    def dq_part(self, group: Int32):
        return 0 if self.pair else group

    # ------------------------------------------------------------------ storage, MMAs

    def layouts(self) -> dict:
        """Shared memory layouts as loaded and written: sQ (piece_rows, D, PIPE), sdO (piece_rows, Dv, PIPE), sK
        (tile_n, D), sV (tile_n, Dv), sP and sdS (tile_n, piece_rows, group)."""
        cfg, facts = self.cfg, self.facts
        of_q, of_do = GROUPS * cfg.stages, GROUPS * facts.stages_do
        scores = smem_layout(self.dtype, cfg.tile_n, self.piece_rows, GROUPS, True)
        return {
            "sQ": divided(self.dtype, self.piece_rows, facts.head_dim, GROUPS, of_q, True),
            "sdO": divided(self.dtype, self.piece_rows, facts.head_dim_v, GROUPS, of_do, True),
            "sK": self.k_layout(True),
            "sV": smem_layout(self.dtype, cfg.tile_n, facts.head_dim_v, 1, True),
            "sP": scores,
            "sdS": scores,
        }

    def transposed(self) -> dict:
        cfg, facts = self.cfg, self.facts
        of_q, of_do = GROUPS * cfg.stages, GROUPS * facts.stages_do
        # sdS for dQ. If both warpgroups' dS is read together, one follows the other.
        count, rows = (GROUPS, self.piece_rows) if self.pair else (1, cfg.tile_m)
        return {
            "sQ": divided(self.dtype, self.piece_rows, facts.head_dim, GROUPS, of_q, False),
            "sdO": divided(self.dtype, self.piece_rows, facts.head_dim_v, GROUPS, of_do, False),
            "sK": self.k_layout(False),
            "sdS": divided(self.dtype, cfg.tile_n, rows, rows // self.piece_rows, count, False),
        }

    def k_layout(self, row_major: bool):
        return divided(self.dtype, self.cfg.tile_n, self.facts.head_dim, self.cfg.dq_groups, 1, row_major)

    @property
    def part_values(self) -> int:
        """Values per thread in a part of dQ."""
        return self.sums.values // self.cfg.dq_parts

    @property
    def part_bytes(self) -> int:
        """Bytes per warpgroup in a part of dQ."""
        return self.part_values * WARPGROUP * FP32

    def storage(self) -> type:
        cfg = self.cfg
        q, do, k, v, scores = (cute.cosize(self.layouts()[name]) for name in ("sQ", "sdO", "sK", "sV", "sP"))
        dq = 0 if cfg.direct else GROUPS * self.part_bytes // FP32

        @cute.struct
        class SharedStorage:
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            barriers_do: cute.struct.MemRange[cutlass.Int64, 2 * self.facts.stages_do]
            barriers_queue: cute.struct.MemRange[cutlass.Int64, 2 * SLOTS]
            slots: cute.struct.MemRange[Int32, FIELDS * SLOTS]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * cfg.step_rows * cfg.stages], 128]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, k], ALIGN]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, v], ALIGN]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, q], ALIGN]
            sdO: cute.struct.Align[cute.struct.MemRange[self.dtype, do], ALIGN]
            sP: cute.struct.Align[cute.struct.MemRange[self.dtype, scores], ALIGN]
            sdS: cute.struct.Align[cute.struct.MemRange[self.dtype, scores], ALIGN]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, dq], ALIGN]

        return SharedStorage

    def make_mmas(self) -> tuple:
        """Tiled MMAs (S', dP', dV and dK of own rows, dQ, dV and dK of the other's rows)."""
        facts = self.facts
        k, mn = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def product(a, b, groups: int, columns: int, source):
            """Tiled MMA of `groups` warpgroups along N, each with `columns` columns."""
            make = sm90_utils.make_trivial_tiled_mma
            return make(self.dtype, self.dtype, a, b, Float32, (1, groups, 1), (ROWS, columns), source)

        return (
            product(k, k, 1, self.piece_rows, memory),
            product(k, k, 1, self.piece_rows, memory),
            product(k, mn, GROUPS, facts.head_dim_v // GROUPS, registers),
            product(k, mn, GROUPS, facts.head_dim // GROUPS, registers),
            product(mn, mn, self.cfg.dq_groups, facts.head_dim // self.cfg.dq_groups, memory),
            product(k, mn, GROUPS, facts.head_dim_v // GROUPS, memory),
            product(k, mn, GROUPS, facts.head_dim // GROUPS, memory),
        )

    def consumer(self, mmas: tuple, group: Int32, storage, rings: tuple) -> ColumnsConsumer:
        cfg, facts = self.cfg, self.facts
        s, t = self.views(storage, self.layouts()), self.views(storage, self.transposed())
        mine = cute.make_layout(GROUPS, stride=WARPGROUP)(group)
        firsts = (0, 0, mine, mine, 0 if self.pair else mine, mine, mine)
        of_s, of_dp, of_dv, of_dk, of_dq, of_dv2, of_dk2 = (m.get_slice(i) for m, i in zip(mmas, firsts, strict=True))
        mma_s, mma_dp, mma_dv, mma_dk, mma_dq, mma_dv2, mma_dk2 = mmas

        def registers(thread, shape: tuple):
            return cute.make_rmem_tensor(thread.partition_shape_C(shape), Float32)

        copy_dS = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), mma_s)
        thread = copy_dS.get_slice(cute.arch.thread_idx()[0] % WARPGROUP)
        one = (None, None, None, 0)
        turn = None
        if facts.deterministic:
            turn = cute.make_rmem_tensor(1, Int64)
            turn.fill(0)
        scores = cfg.tile_n, self.piece_rows
        rows = 2 * cfg.tile_m if self.pair else self.piece_rows  # from one warpgroup's LSE to the other's
        return ColumnsConsumer(
            group=group,
            mmas=mmas,
            tSrK=mma_s.make_fragment_A(of_s.partition_A(s["sK"]))[one],
            tSrQ=(mma_s.make_fragment_B(of_s.partition_B(s["sQ"])),),
            tPrV=mma_dp.make_fragment_A(of_dp.partition_A(s["sV"]))[one],
            tPrdO=(mma_dp.make_fragment_B(of_dp.partition_B(s["sdO"])),),
            tVrP=cute.make_rmem_tensor(of_dv.partition_shape_A(scores), self.dtype),
            tVrdO=(mma_dv.make_fragment_B(of_dv.partition_B(t["sdO"])),),
            tKrdS=cute.make_rmem_tensor(of_dk.partition_shape_A(scores), self.dtype),
            tKrQ=(mma_dk.make_fragment_B(of_dk.partition_B(t["sQ"])),),
            tQrdS=mma_dq.make_fragment_A(of_dq.partition_A(t["sdS"])),
            tQrK=(mma_dq.make_fragment_B(of_dq.partition_B(t["sK"]))[one],),
            tVsP=mma_dv2.make_fragment_A(of_dv2.partition_A(s["sP"])),
            tKsdS=mma_dk2.make_fragment_A(of_dk2.partition_A(s["sdS"])),
            acc_S=registers(of_s, scores),
            acc_dP=registers(of_dp, scores),
            acc_dK=registers(of_dk, (cfg.tile_n, facts.head_dim)),
            acc_dV=registers(of_dv, (cfg.tile_n, facts.head_dim_v)),
            acc_dQ=registers(of_dq, (cfg.tile_m, facts.head_dim)),
            pipe_v=rings[0],
            pipe_q=rings[1],
            pipe_do=rings[2],
            copy_dS=copy_dS,
            sP=thread.partition_D(s["sP"]),
            sdS=(thread.partition_D(s["sdS"]),),
            rows=storage.rows.data_ptr().toint() + group * (rows * FP32),
            ring_q=storage.sQ.data_ptr().toint(),
            ring_do=storage.sdO.data_ptr().toint(),
            sums=storage.sums.data_ptr().toint() + group * self.part_bytes,
            members=None,
            turn=turn,
        )

    # ------------------------------------------------------------------ steps

    @cute.jit
    def begin_head(self, c: ColumnsConsumer, work: Work, at):
        if work.tiles.count > 0:
            self.wait_for_q(c, work, Int32(0), at)
            self.start_s(c, at.index * GROUPS + c.group)
            warpgroup.wait_group(0)

    @cute.jit
    def wait_for_q(self, c: ColumnsConsumer, work: Work, i: Int32, at):
        """Wait for Q of step i."""
        c.pipe_q.consumer_wait(at)
        if const_expr(self.facts.packed):
            self.zero_rows_past_the_end(c, work, i, at.index, "sQ")

    @cute.jit
    def step(self, c: ColumnsConsumer, work: Work, i: Int32, at):
        """Compute dK, dV and dQ of step i of a head; `at` is the state of Q's ring."""
        tile = i * GROUPS + c.group if const_expr(self.pair) else i
        number = work.tiles.at(cutlass.min(tile, work.tiles.count - 1))
        other = 1 - c.group
        of_do = self.state_of_do(at)
        rows, q, do = at.index * self.cfg.query_tiles, at.index * GROUPS, of_do.index * GROUPS  # indices in rings
        cute.arch.barrier_arrive(barrier_id=BACKWARD_READ + c.group, number_of_threads=GROUPS * WARPGROUP)
        c.pipe_do.consumer_wait(of_do)
        if const_expr(self.facts.packed):
            self.zero_rows_past_the_end(c, work, i, of_do.index, "sdO")
        self.start_dp(c, do + c.group)
        self.mask_scores(c, work, tile, number)
        if const_expr(self.pair):
            if tile >= work.tiles.count:
                c.acc_S.fill(-Float32.inf)
        self.scores_to_p(c, work, rows, number)
        cute.arch.barrier(barrier_id=BACKWARD_READ + other, number_of_threads=GROUPS * WARPGROUP)
        self.store_operand(c, c.tVrP, c.sP)
        self.start_dv(c, do + c.group)
        warpgroup.wait_group(1)
        self.p_to_ds(c, work, rows, number)
        self.convert(c.acc_dP, c.tKrdS)
        self.store_operand(c, c.tKrdS, c.sdS[0])
        self.start_dk(c, q + c.group)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BACKWARD_ALL, number_of_threads=GROUPS * WARPGROUP)
        self.finish_step(c, work, i, at, of_do, tile, number)

    @cute.jit
    def finish_step(self, c: ColumnsConsumer, work: Work, i: Int32, at, of_do, tile: Int32, number: Int32):
        """Finish a step, once P' and dS' of both warpgroups are in shared memory."""
        other = 1 - c.group
        all_of, q, do = (None, None, None), at.index * GROUPS + other, of_do.index * GROUPS + other
        of_dv = c.mmas[5], c.acc_dV, c.tVsP[*all_of, other], c.tVrdO[0][*all_of, do]
        of_dk = c.mmas[6], c.acc_dK, c.tKsdS[*all_of, other], c.tKrQ[0][*all_of, q]
        one_do = const_expr(int(self.facts.stages_do < self.cfg.stages))
        if const_expr(one_do):  # dV first, so that the next dO is loaded early
            self.issue_mma(*of_dv)
        self.start_dq(c, c.group if const_expr(self.pair) else 0, 0)
        if const_expr(not one_do):
            self.issue_mma(*of_dv)
        self.issue_mma(*of_dk)
        early = const_expr(int(self.cfg.dq_parts == 1))
        if const_expr(early):
            self.start_next_s(c, work, i, at)
        if const_expr(one_do):
            warpgroup.wait_group(2 + early)
            c.pipe_do.consumer_release(of_do)
        warpgroup.wait_group(2 - one_do + early)
        self.add_part(c, work, tile, number, 0)
        if const_expr(not early):  # some registers of dQ are free now
            self.start_next_s(c, work, i, at)
        if const_expr(not one_do):
            warpgroup.wait_group(2)
            c.pipe_do.consumer_release(of_do)
        for part in range_constexpr(1, self.cfg.dq_parts):
            self.add_part(c, work, tile, number, part)
        # Also for S': with WGMMAs in flight at the end of a loop iteration, the compiler serializes all of them.
        warpgroup.wait_group(0)
        c.pipe_q.consumer_release(at)

    @cute.jit
    def start_next_s(self, c: ColumnsConsumer, work: Work, i: Int32, at):
        """Issue S' of step i + 1; after the last step S' of step i again, which is never read."""
        following = at.clone()
        following.advance()
        stage = at.index
        if i + 1 < self.step_count(work.tiles.count):
            self.wait_for_q(c, work, i + 1, following)
            stage = following.index
        for v in range_constexpr(cute.size(c.acc_S)):
            c.acc_S[v] = zero_here()  # otherwise the compiler recomputes P here as the WGMMA's initial accumulators
        self.start_s(c, stage * GROUPS + c.group)

    def issue_mma(self, mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
        """Issue acc += A B."""
        start_product(mma, acc, *in_steps(a, b), False)

    def store_operand(self, c: ColumnsConsumer, values: cute.Tensor, place: cute.Tensor):
        """Store P' or dS' to shared memory."""
        thread = c.copy_dS.get_slice(cute.arch.thread_idx()[0] % WARPGROUP)
        values = thread.retile(cute.make_tensor(values.iterator, c.acc_dP.layout))
        cute.copy(c.copy_dS, values, place[None, None, None, c.group])

    @cute.jit
    def wait_for_dq_buffer(self, c: ColumnsConsumer):
        """Wait until this warpgroup's dQ buffer has been read; if deterministic, until it has been added to memory."""
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            self.finish_copy(c)
        self.sync(c.group)

    @cute.jit
    def finish_copy(self, c: ColumnsConsumer):
        """Wait for the bulk copy and increment its semaphore; called by the thread that issued the copy."""
        cute.arch.cp_async_bulk_wait_group(0, read=not self.facts.deterministic)
        if const_expr(self.facts.deterministic):
            if c.turn[0] != 0:
                end_turn(c.turn[0], True)
                c.turn[0] = Int64(0)

    @cute.jit
    def drain(self, c: ColumnsConsumer):
        """Wait until the CTA's shared memory has been read, before it exits."""
        if const_expr(not self.cfg.direct):
            if cute.arch.thread_idx()[0] % WARPGROUP == 0:
                self.finish_copy(c)

    def sync(self, group: Int32):
        """Synchronize the 128 threads of one warpgroup."""
        cute.arch.barrier(barrier_id=BACKWARD_DQ + group, number_of_threads=WARPGROUP)

    @cute.jit
    def add_part(self, c: ColumnsConsumer, work: Work, tile: Int32, number: Int32, part: cutlass.Constexpr[int]):
        """Add a part of this warpgroup's dQ to dq_accum, unless the tile is past the last one."""
        if const_expr(self.cfg.direct):
            if tile < work.tiles.count:
                self.add_part_directly(c, work, number, part)
        else:
            self.add_part_by_copy(c, work, tile, number, part)

    def add_part_directly(self, c: ColumnsConsumer, work: Work, number: Int32, part: int):
        """Add a part of dQ to dq_accum from registers."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        at = work.dq + Int64(number) * (self.sums.size * FP32)
        at += self.place_of_part(c, part) + self.sums.offset(tidx, 0) * FP32
        for r in range(0, self.part_values, self.sums.vector):
            values = c.acc_dQ.iterator + part * self.part_values + r
            add_vector_to_memory(
                at, cute.make_tensor(values, cute.make_layout(self.sums.vector)), self.sums.offset(0, r) * FP32
            )

    def place_of_part(self, c: ColumnsConsumer, part: int) -> Int32:
        """Byte offset of a part of this warpgroup's dQ from the start of a query tile's dq_accum."""
        return (self.dq_part(c.group) * self.cfg.dq_parts + part) * self.part_bytes

    @cute.jit
    def add_part_by_copy(
        self, c: ColumnsConsumer, work: Work, tile: Int32, number: Int32, part: cutlass.Constexpr[int]
    ):
        """Add a part of dQ to dq_accum by one bulk copy from shared memory."""
        self.wait_for_dq_buffer(c)
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        layout = cute.make_layout(self.sums.vector)
        for r in range_constexpr(0, self.part_values, self.sums.vector):
            at = c.sums + self.sums.offset(tidx, r) * FP32
            place = make_ptr(Float32, at, AddressSpace.smem, assumed_align=16)
            values = cute.make_tensor(c.acc_dQ.iterator + part * self.part_values + r, layout)
            cute.autovec_copy(values, cute.make_tensor(place, layout))
        cute.arch.fence_view_async_shared()
        self.sync(c.group)
        if tidx == 0 and tile < work.tiles.count:
            if const_expr(self.facts.deterministic):
                turn = work.turns + Int64(number) * (self.cfg.dq_groups * TURN)
                if const_expr(part == 0):
                    wait_for_turn(turn, work.tiles.turn(number))
                if const_expr(part == self.cfg.dq_parts - 1):
                    c.turn[0] = turn
            begin = Int64(number) * (self.sums.size * FP32) + self.place_of_part(c, part)
            bulk_add(work.dq + begin, c.sums, self.part_bytes)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def zero_rows_past_the_end(self, c: Consumer, work: Work, i: Int32, stage: Int32, name: cutlass.Constexpr[str]):
        """Zero the rows of Q ("sQ") or dO of step i that belong to the next sequence."""
        ring = c.ring_q if const_expr(name == "sQ") else c.ring_do
        numbers = self.numbers(work.tiles, i)
        for j, m in enumerate(self.coordinates(numbers)):
            valid = work.seqlen.rows - m * self.piece_rows
            if valid < self.piece_rows:
                self.zero_rows(ring, self.transposed()[name].outer, stage * GROUPS + j, valid)

    def zero_rows(self, ring: Int32, layout, index: Int32, valid: Int32):
        super().zero_rows(ring, layout, index, cutlass.max(valid, 0))  # a whole tile may be past the end
