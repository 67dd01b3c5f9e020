"""The sm_90 mainloop of attention's backward: what consumers do with each query tile.

    ring       producer arrives          consumers arrive (per stage)
    K, V       1 thread + bytes of TMA   1 thread for each consumer warp, after the last query tile
    Q, rows    1 thread + bytes of TMA   1 thread for each consumer warp; `ring_q` stages. rows: LSE and delta
    dO         the same                  the same; `stages` stages

Scores are computed transposed, a warpgroup having 64 rows of K, so that P' and dS' are A operands in registers. A step
over query tile i, with dK and dV in registers (FlashAttention-3, Shah et al. 2024):

    wait Q[i] -> issue S' = K Q[i]' -> wait dO[i] -> issue dP' = V dO[i]' -> wait S'
    P' = 2^(S' - LSE) -> issue dV += P' dO[i] -> wait dP'
    dS' = P' (dP' - delta) -> to shared memory -> all consumers -> issue dQ = dS K, dK += dS' Q[i]
    wait dV, release dO[i] -> wait dQ -> to shared memory, from there added to memory -> wait dK, release Q[i]

dQ of a tile is computed by all warpgroups together: each has 64 of its rows, or where there are no more, its part of
the columns. dS has two buffers, so that one barrier a step is enough: nobody writes to a buffer before all have passed
the barrier of the step between, and so have done with the product that reads it.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.ampere import WARP
from cute_kernels.tile.barriers import BACKWARD_ALL, BACKWARD_FREE, BACKWARD_FULL, Arrivals
from cute_kernels.tile.hopper import ALIGN, WARPGROUP, smem_layout, start_product
from cute_kernels.tile.ptx import bulk_add, here, read_special_register

from ..forward.mainloop_sm90 import in_steps
from ..forward.mask import cap_scores
from ..forward.softmax import exp2, rows_and_columns
from ..forward.tile_queue import FIELDS, SLOTS
from ..forward.zero_oob_rows import zero_oob_rows
from .config import FP32, BackwardFacts
from .dq_sums import sums_of
from .fragments import ROWS
from .mask import mask_elements, mask_window
from .score_mod import add_totals, ds_of, inputs_at, no_totals, p_of, times_slope
from .turns import TURN, end_turn, wait_for_turn


@dataclass(frozen=True)
class Consumer:
    """What a consumer warpgroup needs for all query tiles."""

    group: Int32
    mmas: tuple  # S', dP', dV, dK, dQ
    tSrK: cute.Tensor  # (MMA, 1, MMA_K)
    tSrQ: tuple  # of each part of the rows that scores are computed of in turn, (MMA, 1, MMA_K, PIPE)
    tPrV: cute.Tensor  # (MMA, 1, MMA_K)
    tPrdO: tuple  # the same, (MMA, 1, MMA_K, PIPE)
    tVrP: cute.Tensor  # (MMA, 1, MMA_K): P' as an A operand; the accumulators' order is that of its k
    tVrdO: tuple  # the same, (MMA, 1, MMA_K, PIPE)
    tKrdS: cute.Tensor  # (MMA, 1, MMA_K): dS' as an A operand
    tKrQ: tuple  # the same, (MMA, 1, MMA_K, PIPE)
    tQrdS: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tQrK: tuple  # of each part of the columns that the warpgroup computes in turn, (MMA, 1, MMA_K)
    acc_S: cute.Tensor  # (MMA, 1, MMA_N), as acc_dP
    acc_dP: cute.Tensor
    acc_dK: cute.Tensor  # (MMA, 1, MMA_N)
    acc_dV: cute.Tensor
    acc_dQ: cute.Tensor
    pipe_q: pipeline.PipelineAsync
    pipe_do: pipeline.PipelineAsync
    copy_dS: cute.TiledCopy
    sdS: tuple  # the same, (R2S, R2S_M, R2S_N, PIPE): where this thread's part goes
    rows: Int32  # address of rows' ring in shared memory
    ring_q: Int32  # of Q
    ring_do: Int32  # of dO
    sums: Int32  # of dQ's values on their way to memory


@dataclass(frozen=True)
class Work:
    """One head's query tiles, and what masks need."""

    source: Any  # q_tiles.WindowRows or BlockRows
    tiles: Any  # what source.for_tile gave
    seqlen: Any  # forward.seqlen.SeqlenInfo
    b: Int32
    h: Int32
    col0: Int32  # the tile's first column of the score matrix
    scale_log2: Float32
    softcap: Float32  # with a score_mod, what scores are multiplied by before it
    score_tensors: tuple | None = None  # what a score_mod reads
    score_sums: tuple | None = None  # of those that get gradients, the sums that these are added to
    dq: Int64 | None = None  # as in DqWork, where consumers add to it
    turns: Int64 | None = None


@dataclass(frozen=True)
class DqWork:
    """One head's query tiles, and where a consumer warpgroup's parts of dQ go."""

    tiles: Any
    dq: Int64  # address of dQ's sums of the head's first query tile
    turns: Int64 | None  # address of this warpgroup's number of the head's first query tile (turns.py)


def first_row(threads: int | None = None) -> Int32:
    """The first of this thread's two rows of the tile of K; read anew, so that no register holds it.

    threads: how many have all rows of the tile; None: all consumers.
    """
    thread = read_special_register("tid.x") - WARPGROUP
    thread = thread if threads is None else thread % threads
    return thread // WARP * 16 + thread % WARP // 4


STORE_THREADS = WARPGROUP + WARP  # a consumer warpgroup and the warp that stores its part of dQ


def meeting(group: Int32, buffer: Int32 | int) -> Int32:
    """Number of their barrier of a buffer of sums, from the first one on."""
    return group + 2 * buffer


class MainloopSm90:
    """Steps over the query tiles of one tile of K and V; also the storage, products and rings that they need."""

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        self.dtype = cutlass_dtype(facts.dtype)
        self.arrivals = Arrivals(1, 4 * facts.config.groups)  # of all rings
        self.sums = sums_of(facts.path, facts.config, facts.head_dim)
        cfg = facts.config
        self.unit = ROWS if cfg.by_units else cfg.tile_m  # query rows that scores are computed of
        self.units = cfg.tile_m // self.unit
        self.check_config()

    def check_config(self):
        """ValueError if these steps cannot be done with the configuration."""
        facts = self.facts
        if facts.ds_buffers not in (1, facts.config.stages):
            raise ValueError(f"{facts.config}: dS has {facts.ds_buffers} buffers, which take turns as the rings do")
        if facts.config.sums not in (1, facts.config.stages):
            raise ValueError(f"{facts.config}: buffers of dQ's sums take turns as the rings do, or there is one")
        if facts.config.direct:
            raise ValueError(f"{facts.config}: sums are added from registers where warpgroups share columns")
        if facts.config.one_ds and not facts.config.by_units:
            raise ValueError(f"{facts.config}: one buffer of dS is for scores that are computed ahead by units")
        if facts.config.tile_n != ROWS * facts.config.groups or facts.config.tile_m % ROWS:
            raise ValueError(
                f"{facts.config}: warpgroups have {ROWS} rows of K each, and query tiles multiples of them"
            )

    # ------------------------------------------------------------------ storage, products, rings

    @property
    def groups_m(self) -> int:
        """Warpgroups that have rows of dQ of their own; the others share the columns."""
        return self.cfg.tile_m // ROWS

    # What the kernel around it asks: here a step is one query tile, loaded in one piece, and warps store dQ.

    @property
    def piece_rows(self) -> int:
        return self.cfg.tile_m

    def step_count(self, count: Int32) -> Int32:
        """Steps of `count` query tiles."""
        return count

    def numbers(self, tiles, i: Int32) -> list:
        """Of the query tiles of step i."""
        return [tiles.at(i)]

    def coordinates(self, numbers: list) -> list:
        """Of the pieces of these tiles, in pieces."""
        return numbers

    def first_row(self) -> Int32:
        """Of this thread in the tile of K."""
        return first_row()

    def first_query(self, c: Consumer, number: Int32) -> Int32:
        """The first query row that a warpgroup has scores of."""
        return number * self.cfg.tile_m

    def begin_head(self, c: Consumer, work: Work, at):
        """Before the steps over a head's query tiles."""

    def work(self, work: Work, dq: DqWork) -> Work:
        """What steps take of a head."""
        return work

    def dq_part(self, group: Int32) -> Int32:
        """Which part of a query tile's dQ a warpgroup has."""
        return group

    def first_column(self, c: Consumer, acc: cute.Tensor):
        """Of a warpgroup's accumulators of dK or dV."""
        return 0

    def layouts(self) -> dict:
        """As loaded and written: sQ (tile_m, D, PIPE), sdO (tile_m, Dv, PIPE), sK (tile_n, D), sV (tile_n, Dv), and
        sdS (tile_n, tile_m, 2)."""
        cfg, facts = self.cfg, self.facts
        return {
            "sQ": smem_layout(self.dtype, cfg.tile_m, facts.head_dim, cfg.ring_q, True),
            "sdO": smem_layout(self.dtype, cfg.tile_m, facts.head_dim_v, cfg.stages, True),
            "sK": self.k_layout(True),
            "sV": smem_layout(self.dtype, cfg.tile_n, facts.head_dim_v, 1, True),
            "sdS": smem_layout(self.dtype, cfg.tile_n, cfg.tile_m, self.facts.ds_buffers, True),
        }

    @property
    def parts_k(self) -> int:
        """Into how many parts dQ's product cuts K's columns: one a warpgroup, or two one after the other. Each has
        whole swizzles."""
        return 2 if self.facts.in_turn else self.cfg.groups // self.groups_m

    def transposed(self) -> dict:
        """The same memory with its modes in another order."""
        cfg, facts = self.cfg, self.facts
        return {
            "sQ": smem_layout(self.dtype, facts.head_dim, cfg.tile_m, cfg.ring_q, False),
            "sdO": smem_layout(self.dtype, facts.head_dim_v, cfg.tile_m, cfg.stages, False),
            "sK": self.k_layout(False),
            "sdS": smem_layout(self.dtype, cfg.tile_m, cfg.tile_n, self.facts.ds_buffers, False),
        }

    def k_layout(self, row_major: bool):
        """K's, with a swizzle that ends where a warpgroup's part of the columns does."""
        rows, cols, kinds = self.cfg.tile_n, self.facts.head_dim, warpgroup.SmemLayoutAtomKind
        width = cols // self.parts_k * self.dtype.width // 8
        name = next(f"SW{span}" for span in (128, 64, 32) if width % span == 0)
        atom = warpgroup.make_smem_layout_atom(getattr(kinds, f"{'K' if row_major else 'MN'}_{name}"), self.dtype)
        shape, order = ((rows, cols, 1), (0, 1, 2)) if row_major else ((cols, rows, 1), (1, 0, 2))
        return cute.tile_to_shape(atom, shape, order=order)

    def lines_of_kv(self, storage) -> tuple:
        """(address, layout (D or Dv, tile_n, 1) without its swizzle) of K and of V."""
        sV = smem_layout(self.dtype, self.facts.head_dim_v, self.cfg.tile_n, 1, False)
        layouts = self.k_layout(False).outer, sV.outer
        return tuple((s.data_ptr().toint(), x) for s, x in zip((storage.sK, storage.sV), layouts, strict=True))

    def storage(self) -> type:
        """The struct of a CTA's shared memory."""
        cfg = self.cfg
        names = "sQ", "sdO", "sK", "sV", "sdS"
        q, do, k, v, ds = (cute.cosize(self.layouts()[name]) for name in names)

        @cute.struct
        class SharedStorage:
            barriers_kv: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2 * cfg.ring_q]
            barriers_do: cute.struct.MemRange[cutlass.Int64, 2 * cfg.stages]
            barriers_queue: cute.struct.MemRange[cutlass.Int64, 2 * SLOTS]
            slots: cute.struct.MemRange[Int32, FIELDS * SLOTS]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * cfg.tile_m * cfg.ring_q], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.sums.size * cfg.sums], 128]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, k], ALIGN]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, v], ALIGN]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, q], ALIGN]
            sdO: cute.struct.Align[cute.struct.MemRange[self.dtype, do], ALIGN]
            sdS: cute.struct.Align[cute.struct.MemRange[self.dtype, ds], ALIGN]

        return SharedStorage

    def views(self, storage, layouts: dict) -> dict:
        """Tensors of these layouts in the storage, with their swizzles."""
        return {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        }

    def make_mmas(self) -> tuple:
        """(S' = K Q', dP' = V dO', dV = P' dO, dK = dS' Q, dQ = dS K) of all consumers."""
        cfg, facts = self.cfg, self.facts
        k, mn = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def product(a, b, groups: tuple, columns: int, source):
            make = sm90_utils.make_trivial_tiled_mma
            return make(self.dtype, self.dtype, a, b, Float32, (*groups, 1), (ROWS, columns), source)

        along = cfg.groups, 1
        of_k, of_v = (registers if there else memory for there in facts.in_registers)
        return (
            product(k, k, along, self.unit, of_k),
            product(k, k, along, self.unit, of_v),
            product(k, mn, along, facts.head_dim_v, registers),
            product(k, mn, along, facts.head_dim, registers),
            product(mn, mn, (self.groups_m, cfg.groups // self.groups_m), facts.head_dim // self.parts_k, memory),
        )

    def make_load(self, tensor: cute.Tensor, layout, tile: tuple) -> tuple:
        """The TMA load of an operand's tiles: (atom, tensor)."""
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, cute.slice_(layout, (None, None, 0)), tile
        )

    def make_ring(self, barriers, stages: int, tx_bytes: int) -> pipeline.PipelineAsync:
        """The pipeline of an operand; its barriers are not yet visible to all."""
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.arrivals.full),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.arrivals.empty),
            tx_count=tx_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def make_pipelines(self, storage, arrivals: Arrivals) -> tuple:
        """(K and V, Q and rows, dO, queue); returns after every barrier is visible. `arrivals` are the queue's."""
        cfg, width = self.cfg, self.dtype.width // 8
        dims = self.facts.head_dim, self.facts.head_dim_v
        kv = self.make_ring(storage.barriers_kv, 1, cfg.tile_n * sum(dims) * width)
        q = self.make_ring(storage.barriers_q, cfg.ring_q, cfg.step_rows * (dims[0] * width + 2 * FP32))
        do = self.make_ring(storage.barriers_do, self.facts.stages_do, cfg.step_rows * dims[1] * width)
        queue = pipeline.PipelineAsync.create(
            barrier_storage=storage.barriers_queue.data_ptr(),
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.full),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.empty),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        return kv, q, do, queue

    def consumer(self, mmas: tuple, group: Int32, storage, rings: tuple) -> Consumer:
        """A warpgroup's operands and registers."""
        cfg, facts = self.cfg, self.facts
        s, t = self.views(storage, self.layouts()), self.views(storage, self.transposed())
        first = cute.make_layout(cfg.groups, stride=WARPGROUP)(group)
        threads = [mma.get_slice(first) for mma in mmas]
        of_s, of_dp, of_dv, of_dk, of_dq = threads
        mma_s, mma_dp, mma_dv, mma_dk, mma_dq = mmas

        def registers(thread, shape: tuple):
            return cute.make_rmem_tensor(thread.partition_shape_C(shape), Float32)

        copy_dS = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), mma_s)
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        one = (None, None, None, 0)
        parts = self.parts_k if facts.in_turn else 1
        part = facts.head_dim // parts, cfg.tile_n, 1
        columns_of_k = [cute.local_tile(t["sK"], part, (i, 0, 0)) for i in range(parts)]
        scores = cfg.tile_n, self.unit

        def units(x: cute.Tensor, mode: int) -> list:
            """A ring's units of rows, which are this mode of its tensor."""
            extents = [cute.size(x, mode=[m]) for m in range(3)]
            extents[mode] = self.unit
            return [
                cute.local_tile(x, tuple(extents), tuple(u * (m == mode) for m in range(3))) for u in range(self.units)
            ]

        def operand_a(mma, thread, place: cute.Tensor, in_registers: bool):
            if in_registers:
                return cute.make_rmem_tensor(thread.partition_shape_A(place.shape[:2]), self.dtype)
            return mma.make_fragment_A(thread.partition_A(place))[one]

        in_registers = facts.in_registers
        tVrP, tKrdS = (cute.make_rmem_tensor(x.partition_shape_A(scores), self.dtype) for x in (of_dv, of_dk))
        return Consumer(
            group=group,
            mmas=mmas,
            tSrK=operand_a(mma_s, of_s, s["sK"], in_registers[0]),
            tSrQ=tuple(mma_s.make_fragment_B(of_s.partition_B(x)) for x in units(s["sQ"], 0)),
            tPrV=operand_a(mma_dp, of_dp, s["sV"], in_registers[1]),
            tPrdO=tuple(mma_dp.make_fragment_B(of_dp.partition_B(x)) for x in units(s["sdO"], 0)),
            tVrP=tVrP,
            tVrdO=tuple(mma_dv.make_fragment_B(of_dv.partition_B(x)) for x in units(t["sdO"], 1)),
            tKrdS=tVrP if cfg.by_units else tKrdS,  # one after the other
            tKrQ=tuple(mma_dk.make_fragment_B(of_dk.partition_B(x)) for x in units(t["sQ"], 1)),
            tQrdS=mma_dq.make_fragment_A(of_dq.partition_A(t["sdS"])),
            tQrK=tuple(mma_dq.make_fragment_B(of_dq.partition_B(x))[one] for x in columns_of_k),
            acc_S=registers(of_s, scores),
            acc_dP=registers(of_dp, scores),
            acc_dK=registers(of_dk, (cfg.tile_n, facts.head_dim)),
            acc_dV=registers(of_dv, (cfg.tile_n, facts.head_dim_v)),
            acc_dQ=registers(of_dq, (cfg.tile_m, facts.head_dim // parts)),
            pipe_q=rings[0],
            pipe_do=rings[1],
            copy_dS=copy_dS,
            sdS=tuple(copy_dS.get_slice(tidx).partition_D(x) for x in units(s["sdS"], 1)),
            rows=storage.rows.data_ptr().toint(),
            ring_q=storage.sQ.data_ptr().toint(),
            ring_do=storage.sdO.data_ptr().toint(),
            sums=storage.sums.data_ptr().toint(),
        )

    # ------------------------------------------------------------------ steps

    @cute.jit
    def steps(self, c: Consumer, work: Work, at):
        """All query tiles of a head; returns the state of the rings after them."""
        self.begin_head(c, work, at)
        for i in cutlass.range(self.step_count(work.tiles.count), unroll=1):
            self.step(c, work, i, at)
            at.advance()
        return at

    @cute.jit
    def step(self, c: Consumer, work: Work, i: Int32, at):
        """dK, dV and dQ of query tile i of a head; `at` is the state of both rings, and of dS's buffers."""
        number = work.tiles.at(i)
        c.pipe_q.consumer_wait(at)
        if const_expr(self.facts.packed):
            self.zero_rows_past_the_end(c, work, number, at, at)
        if const_expr(self.facts.in_turn):
            self.products_in_turn(c, work, i, number, at)
        else:
            self.products(c, work, i, number, at)

    @cute.jit
    def products(self, c: Consumer, work: Work, i: Int32, number: Int32, at):
        """A step whose products run beside one another and beside the softmax."""
        self.start_s(c, at.index)
        masks_first, late_dp = const_expr(self.facts.masks_first), const_expr(self.facts.late_dp)
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
        self.share_ds(c, buffer)
        self.start_dq(c, buffer, 0)
        self.start_dk(c, at.index)
        warpgroup.wait_group(2)
        c.pipe_do.consumer_release(at)
        warpgroup.wait_group(1)
        sums = self.buffer_of_sums(at)
        self.wait_for_sums(c, sums)
        self.write_dq(c, 0, sums)
        self.give_sums(c, sums)
        warpgroup.wait_group(0)
        c.pipe_q.consumer_release(at)

    @cute.jit
    def products_in_turn(self, c: Consumer, work: Work, i: Int32, number: Int32, at):
        """A step of which only dV and dK run together (BackwardFacts.in_turn)."""
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
        self.share_ds(c, buffer)
        warpgroup.wait_group(0)
        c.pipe_do.consumer_release(at)
        c.pipe_q.consumer_release(at)
        sums = self.buffer_of_sums(at)
        self.wait_for_sums(c, sums)
        for part in range_constexpr(self.parts_k):
            self.start_dq(c, buffer, part)
            warpgroup.wait_group(0)
            self.write_dq(c, part, sums)
        self.give_sums(c, sums)
        if const_expr(self.facts.ds_buffers == 1):
            self.wait_for_ds()  # all warps have read dS

    def buffer_of(self, at):
        """dS's buffer of a step."""
        return at.index if self.facts.ds_buffers > 1 else 0

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
        """Write an operand in registers before the product's wgmma.fence."""
        words = cute.recast_tensor(operand, Int32)
        for i in range(cute.size(words)):
            words[i] = here(words[i])

    def start_dq(self, c: Consumer, buffer: Int32, part: int):
        """`part` of the warpgroup's columns."""
        start_product(c.mmas[4], c.acc_dQ, *in_steps(c.tQrdS[None, None, None, buffer], c.tQrK[part]), True)

    @cute.jit
    def share_ds(self, c: Consumer, buffer: Int32):
        """dS to shared memory; returns when all consumers' is there."""
        self.write_ds(c, buffer)
        self.publish()
        self.wait_for_ds()

    def publish(self):
        """What this thread wrote to shared memory, to WGMMA and bulk copies that come after a barrier."""
        cute.arch.fence_view_async_shared()

    def wait_for_ds(self):
        """Of all consumers."""
        cute.arch.barrier(barrier_id=BACKWARD_ALL, number_of_threads=self.cfg.groups * WARPGROUP)

    def write_ds(self, c: Consumer, buffer: Int32, unit: int = 0):
        """dS to shared memory; `publish` it before the barrier."""
        rdS = cute.make_tensor(c.tKrdS.iterator, c.acc_dP.layout)
        copy_dS = c.copy_dS.get_slice(cute.arch.thread_idx()[0] - WARPGROUP)
        cute.copy(c.copy_dS, copy_dS.retile(rdS), c.sdS[unit][None, None, None, buffer])

    @cute.jit
    def mask_scores(self, c: Consumer, work: Work, i: Int32, number: Int32, unit: cutlass.Constexpr = 0):
        """The cap, and -inf where a row does not see a column."""
        row0 = self.first_query(c, number) + unit * self.unit
        scores = rows_and_columns(c.acc_S)
        if const_expr(self.facts.softcap):
            cap_scores(scores, work.softcap)
        if const_expr(self.facts.blocks is not None):
            if work.tiles.is_partial(i) or work.col0 + self.cfg.tile_n > work.seqlen.cols:
                tensors = work.source.mask_tensors
                col = work.col0 + self.first_row()
                mask_elements(scores, self.facts.blocks, tensors, col, row0, work.b, work.h, work.seqlen)
        elif work.tiles.is_partial(i):
            mask_window(scores, work.source, work.col0 + self.first_row(), row0, work.seqlen)

    @cute.jit
    def scores_to_p(self, c: Consumer, work: Work, stage: Int32, number: Int32, unit: cutlass.Constexpr = 0):
        """Scores to P, in place in fp32 and rounded as an operand; with a cap, in place times the cap's derivative."""
        for first in range_constexpr(0, cute.size(c.acc_S), 8):  # rows r and columns 2 j, 2 j + 1 of two j
            lse = [self.row_values(c, stage, 0, unit * self.unit // 4 + (first // 4 + j) * 2) for j in range(2)]
            part = cute.make_tensor(c.acc_S.iterator + first, cute.make_layout(8))
            capped = [part[v] for v in range(8)]
            if const_expr(self.facts.score is not None):
                kept = self.changed_scores_to_p(c, work, part, lse, first, number)
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
                    part[v] = select_(part[v] > 0.0, part[v] * slope, part[v])  # where masked, it is not a number

    @cute.jit
    def p_to_ds(self, c: Consumer, work: Work, stage: Int32, number: Int32, unit: cutlass.Constexpr = 0):
        """dS = P (dP - delta), in place of dP; and the gradients of what a score_mod captures."""
        totals, place = [], ()
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
                        ds[r, column + j] = ds_of(self.facts, work, *both, (*at, *place), totals)
                    else:
                        ds[r, column + j] = p[r, column + j] * (ds[r, column + j] - delta[j])
        if const_expr(self.facts.score is not None):
            add_totals(self.facts, work, totals)

    def place_of_scores(self, c: Consumer, work: Work, number: Int32) -> tuple:
        """(column, query row) of this thread's first score."""
        return work.col0 + self.first_row(), self.first_query(c, number) + read_special_register("laneid") % 4 * 2

    def changed_scores_to_p(
        self, c: Consumer, work: Work, part: cute.Tensor, lse: list, first: int, number: Int32
    ) -> list:
        """Eight scores from `first` on to P in place. Returns what is kept for dS (BackwardFacts.keeps_scores)."""
        facts, kept = self.facts, []
        for v in range(8):
            inputs = inputs_at(facts, work, part[v], first + v, 1, *self.place_of_scores(c, work, number))
            p = p_of(facts, work, part[v], lse[v // 4][v % 2], inputs)
            kept.append(part[v] if facts.keeps_scores else times_slope(facts, work, p, p, inputs))
            part[v] = p
        return kept

    def row_values(self, c: Consumer, stage: Int32, which: int, column: int) -> cute.Tensor:
        """(2,): LSE (which = 0) or delta (1) of two query rows, those of this thread's columns from `column` on."""
        row = cute.arch.lane_idx() % 4 * 2 + column // 2 * 8
        at = c.rows + ((stage * 2 + which) * self.cfg.tile_m + row) * FP32
        values, pair = cute.make_rmem_tensor(2, Float32), cute.make_layout(2)
        place = make_ptr(Float32, at, AddressSpace.smem, assumed_align=2 * FP32)
        cute.autovec_copy(cute.make_tensor(place, pair), values)
        return values

    def row_fragment(self, c: Consumer, stage: Int32, which: int, unit: int) -> cute.Tensor:
        """LSE (which = 0) or delta (1) of this thread's columns of a unit's scores."""
        values = cute.make_rmem_tensor(self.unit // 4, Float32)
        for column in range(0, self.unit // 4, 2):
            pair = self.row_values(c, stage, which, unit * self.unit // 4 + column)
            values[column], values[column + 1] = pair[0], pair[1]
        return values

    def buffer_of_sums(self, at) -> Int32 | int:
        """Of the step whose state is `at`."""
        return at.index if self.cfg.sums > 1 else 0

    def wait_for_sums(self, c: Consumer, buffer: Int32 | int):
        """Until this warpgroup's part of a buffer of sums has been read."""
        cute.arch.barrier(barrier_id=BACKWARD_FREE + meeting(c.group, buffer), number_of_threads=STORE_THREADS)

    def write_dq(self, c: Consumer, part: int, buffer: Int32 | int):
        """acc_dQ, `part` of the warpgroup's columns, to a buffer of sums."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        begin = c.sums + self.place_of_sums(c.group, buffer)
        layout, count = cute.make_layout(self.sums.vector), cute.size(c.acc_dQ)
        for r in range(0, count, self.sums.vector):
            at = begin + self.sums.offset(tidx, part * count + r) * FP32
            place = make_ptr(Float32, at, AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(c.acc_dQ.iterator + r, layout), cute.make_tensor(place, layout))

    def give_sums(self, c: Consumer, buffer: Int32 | int):
        """To the warp that stores them."""
        self.publish()
        cute.arch.barrier_arrive(barrier_id=BACKWARD_FULL + meeting(c.group, buffer), number_of_threads=STORE_THREADS)

    def place_of_sums(self, group: Int32, buffer: Int32 | int) -> Int32:
        """Bytes from the first buffer's begin on."""
        return group * self.part_bytes + buffer * (self.sums.size * FP32)

    @property
    def part_bytes(self) -> int:
        """Of a warpgroup's sums."""
        return self.sums.values * WARPGROUP * FP32

    # ------------------------------------------------------------------ dQ's store

    @cute.jit
    def store_sums(self, group: Int32, work: DqWork, sums: Int32, left: Int32, at):
        """Add a consumer warpgroup's parts of dQ of a head's query tiles, by a warp; returns (left, at).

        left: how many of all tiles come after those for which there are buffers. at: which buffer is next.
        """
        for i in cutlass.range(work.tiles.count, unroll=1):
            number, buffer = work.tiles.at(i), self.buffer_of_sums(at)
            cute.arch.barrier(barrier_id=BACKWARD_FULL + meeting(group, buffer), number_of_threads=STORE_THREADS)
            if cute.arch.lane_idx() == 0:
                turn = Int64(0)
                if const_expr(self.facts.deterministic):
                    turn = work.turns + Int64(number) * (self.cfg.groups * TURN)
                    wait_for_turn(turn, work.tiles.turn(number))
                tile = work.dq + Int64(number) * (self.sums.size * FP32)
                bulk_add(tile + group * self.part_bytes, sums + self.place_of_sums(group, buffer), self.part_bytes)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=not self.facts.deterministic)
                if const_expr(self.facts.deterministic):
                    end_turn(turn, True)
            cute.arch.sync_warp()
            if left > 0:
                self.free_sums(group, buffer)
            left -= 1
            at.advance()
        return left, at

    def free_sums(self, group: Int32, buffer: Int32 | int):
        """A buffer of sums may be written."""
        cute.arch.barrier_arrive(barrier_id=BACKWARD_FREE + meeting(group, buffer), number_of_threads=STORE_THREADS)

    # ------------------------------------------------------------------ rows past the end, rounding

    @cute.jit
    def zero_rows_past_the_end(self, c: Consumer, work: Work, number: Int32, at_q, at):
        """Zero the rows of Q and dO that belong to the next sequence. at_q and at: the states of their rings."""
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
        """To 16 bits, eight values at a time; see forward.mainloop_sm90."""
        for i in range_constexpr(0, cute.size(acc), 8):
            part = cute.make_tensor(acc.iterator + i, cute.make_layout(8))
            cute.make_tensor(values.iterator + i, cute.make_layout(8)).store(part.load().to(self.dtype))
