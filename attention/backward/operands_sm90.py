"""Operands of the sm_90 kernel of attention's backward: shared memory layouts, tiled MMAs, rings and registers.

    shared memory   barriers | rows (LSE and delta) | dQ buffers | K | V | Q 0 | Q 1 | .. | dO 0 | .. | dS 0 | dS 1

Scores are computed transposed, so that K and V are A operands of S' and dP', and P' and dS' are A operands of dV and
dK.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.hopper import ALIGN, WARPGROUP, smem_layout

from ..forward.tile_queue import FIELDS, SLOTS
from .config import FP32, BackwardFacts
from .dq_accum import sums_of
from .fragments import ROWS
from .members import registers_of


@dataclass(frozen=True)
class Consumer:
    """Operands and accumulators of a consumer warpgroup for all query tiles. A unit is the query rows whose scores are
    computed at a time."""

    group: Int32
    mmas: tuple  # S', dP', dV, dK, dQ
    tSrK: cute.Tensor  # (MMA, 1, MMA_K)
    tSrQ: tuple  # per unit, (MMA, 1, MMA_K, PIPE)
    tPrV: cute.Tensor  # (MMA, 1, MMA_K)
    tPrdO: tuple  # per unit, (MMA, 1, MMA_K, PIPE)
    tVrP: cute.Tensor  # (MMA, 1, MMA_K): P' as an A operand; the accumulators' order is that of its k
    tVrdO: tuple  # per unit, (MMA, 1, MMA_K, PIPE)
    tKrdS: cute.Tensor  # (MMA, 1, MMA_K): dS' as an A operand
    tKrQ: tuple  # per unit, (MMA, 1, MMA_K, PIPE)
    tQrdS: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tQrK: tuple  # per part of the warpgroup's dQ columns, computed one after the other, (MMA, 1, MMA_K)
    acc_S: cute.Tensor  # (MMA, 1, MMA_N), as acc_dP
    acc_dP: cute.Tensor
    acc_dK: cute.Tensor  # (MMA, 1, MMA_N)
    acc_dV: cute.Tensor
    acc_dQ: cute.Tensor
    pipe_v: pipeline.PipelineAsync
    pipe_q: pipeline.PipelineAsync
    pipe_do: pipeline.PipelineAsync
    copy_dS: cute.TiledCopy
    sdS: tuple  # per unit, (R2S, R2S_M, R2S_N, PIPE): the destination of this thread's part
    rows: Int32  # address of the rows' ring in shared memory
    ring_q: Int32  # address of Q's ring
    ring_do: Int32  # address of dO's ring
    sums: Int32  # address of the dQ buffers
    members: cute.Tensor | None  # members.registers_of, with a mask of selected blocks


class OperandsSm90:
    """Layouts, tiled MMAs, pipelines and fragments of one kernel; base class of its mainloop."""

    by_units = False  # True if scores are prefetched in units of 64 query rows
    v_apart = False  # True if V is waited for after K, and released before it
    in_registers = False, False  # True if K, V are operands in registers

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        self.dtype = cutlass_dtype(facts.dtype)
        self.arrivals = Arrivals(1, 4 * facts.config.groups)  # of all rings
        self.sums = sums_of(facts.path, facts.config, facts.head_dim)
        cfg = facts.config
        self.unit = ROWS if self.by_units else cfg.tile_m  # query rows whose scores are computed at a time
        self.units = cfg.tile_m // self.unit

    @property
    def groups_m(self) -> int:
        """Number of warpgroups along the rows of dQ; the remaining ones split the columns."""
        return self.cfg.tile_m // ROWS

    def layouts(self) -> dict:
        """Shared memory layouts as loaded and written: sQ (tile_m, D, PIPE), sdO (tile_m, Dv, PIPE), sK (tile_n, D),
        sV (tile_n, Dv), and sdS (tile_n, tile_m, 2)."""
        cfg, facts = self.cfg, self.facts
        return {
            "sQ": smem_layout(self.dtype, cfg.tile_m, facts.head_dim, cfg.ring_q, True),
            "sdO": smem_layout(self.dtype, cfg.tile_m, facts.head_dim_v, cfg.stages, True),
            "sK": self.k_layout(True),
            "sV": smem_layout(self.dtype, cfg.tile_n, facts.head_dim_v, 1, True),
            "sdS": smem_layout(self.dtype, cfg.tile_n, cfg.tile_m, cfg.ds_buffers, True),
        }

    @property
    def parts_k(self) -> int:
        """Number of parts of K's columns in the WGMMA of dQ: one per warpgroup, or two computed one after the other.
        Each consists of whole swizzle atoms."""
        return 2 if self.cfg.in_turn else self.cfg.groups // self.groups_m

    def transposed(self) -> dict:
        """Layouts of the same memory with rows and columns exchanged."""
        cfg, facts = self.cfg, self.facts
        return {
            "sQ": smem_layout(self.dtype, facts.head_dim, cfg.tile_m, cfg.ring_q, False),
            "sdO": smem_layout(self.dtype, facts.head_dim_v, cfg.tile_m, cfg.stages, False),
            "sK": self.k_layout(False),
            "sdS": smem_layout(self.dtype, cfg.tile_m, cfg.tile_n, cfg.ds_buffers, False),
        }

    def k_layout(self, row_major: bool):
        """K's layout, with a swizzle atom that divides a warpgroup's part of the columns."""
        rows, cols, kinds = self.cfg.tile_n, self.facts.head_dim, warpgroup.SmemLayoutAtomKind
        width = cols // self.parts_k * self.dtype.width // 8
        name = next(f"SW{span}" for span in (128, 64, 32) if width % span == 0)
        atom = warpgroup.make_smem_layout_atom(getattr(kinds, f"{'K' if row_major else 'MN'}_{name}"), self.dtype)
        shape, order = ((rows, cols, 1), (0, 1, 2)) if row_major else ((cols, rows, 1), (1, 0, 2))
        return cute.tile_to_shape(atom, shape, order=order)

    def lines_of_kv(self, storage) -> tuple:
        """(address, layout (D or Dv, tile_n, 1) without the swizzle) of K and of V."""
        sV = smem_layout(self.dtype, self.facts.head_dim_v, self.cfg.tile_n, 1, False)
        layouts = self.k_layout(False).outer, sV.outer
        return tuple((s.data_ptr().toint(), x) for s, x in zip((storage.sK, storage.sV), layouts, strict=True))

    def storage(self) -> type:
        """Struct of a CTA's shared memory."""
        cfg = self.cfg
        names = "sQ", "sdO", "sK", "sV", "sdS"
        q, do, k, v, ds = (cute.cosize(self.layouts()[name]) for name in names)

        @cute.struct
        class SharedStorage:
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2]
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
        """Tiled MMAs (S' = K Q', dP' = V dO', dV = P' dO, dK = dS' Q, dQ = dS K) of all consumers."""
        cfg, facts = self.cfg, self.facts
        k, mn = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def product(a, b, groups: tuple, columns: int, source):
            make = sm90_utils.make_trivial_tiled_mma
            return make(self.dtype, self.dtype, a, b, Float32, (*groups, 1), (ROWS, columns), source)

        along = cfg.groups, 1
        of_k, of_v = (registers if there else memory for there in self.in_registers)
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
        """The pipeline of an operand. Its barriers are not visible to all threads yet."""
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
        """Create the pipelines (K, V, Q and rows, dO, queue), and wait until all barriers are visible. arrivals: the
        queue's."""
        cfg, width = self.cfg, self.dtype.width // 8
        dims = self.facts.head_dim, self.facts.head_dim_v
        k = self.make_ring(storage.barriers_k, 1, cfg.tile_n * dims[0] * width)
        v = self.make_ring(storage.barriers_v, 1, cfg.tile_n * dims[1] * width)
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
        return k, v, q, do, queue

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
        parts = self.parts_k if cfg.in_turn else 1
        part = facts.head_dim // parts, cfg.tile_n, 1
        columns_of_k = [cute.local_tile(t["sK"], part, (i, 0, 0)) for i in range(parts)]
        scores = cfg.tile_n, self.unit

        def units(x: cute.Tensor, mode: int) -> list:
            """The units of a ring; rows are mode `mode` of its tensor."""
            extents = [cute.size(x, mode=[m]) for m in range(3)]
            extents[mode] = self.unit
            return [
                cute.local_tile(x, tuple(extents), tuple(u * (m == mode) for m in range(3))) for u in range(self.units)
            ]

        def operand_a(mma, thread, place: cute.Tensor, in_registers: bool):
            if in_registers:
                return cute.make_rmem_tensor(thread.partition_shape_A(place.shape[:2]), self.dtype)
            return mma.make_fragment_A(thread.partition_A(place))[one]

        in_registers = self.in_registers
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
            tKrdS=tVrP if self.by_units else tKrdS,  # not live at the same time
            tKrQ=tuple(mma_dk.make_fragment_B(of_dk.partition_B(x)) for x in units(t["sQ"], 1)),
            tQrdS=mma_dq.make_fragment_A(of_dq.partition_A(t["sdS"])),
            tQrK=tuple(mma_dq.make_fragment_B(of_dq.partition_B(x))[one] for x in columns_of_k),
            acc_S=registers(of_s, scores),
            acc_dP=registers(of_dp, scores),
            acc_dK=registers(of_dk, (cfg.tile_n, facts.head_dim)),
            acc_dV=registers(of_dv, (cfg.tile_n, facts.head_dim_v)),
            acc_dQ=registers(of_dq, (cfg.tile_m, facts.head_dim // parts)),
            pipe_v=rings[0],
            pipe_q=rings[1],
            pipe_do=rings[2],
            copy_dS=copy_dS,
            sdS=tuple(copy_dS.get_slice(tidx).partition_D(x) for x in units(s["sdS"], 1)),
            rows=storage.rows.data_ptr().toint(),
            ring_q=storage.sQ.data_ptr().toint(),
            ring_do=storage.sdO.data_ptr().toint(),
            sums=storage.sums.data_ptr().toint(),
            members=registers_of(facts, self.units),
        )
