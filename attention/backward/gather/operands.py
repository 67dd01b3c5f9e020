"""Operands of the backward kernel with gathered KV tiles: shared memory layouts, tiled MMAs, rings and registers.

shared memory   barriers | delta | dO | Q | K 0 | .. | V 0 | .. | P | dS
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.hopper import ALIGN, WARPGROUP, smem_layout

from ...forward.gather.operands import WARPS, GatheredRows
from .config import GROUPS, KEYS, GatherBackwardFacts


@dataclass(frozen=True)
class Consumer:
    """Operands and accumulators of a consumer warpgroup."""

    group: Int32
    mmas: tuple  # S, dP, dQ, dV and dK
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K)
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tPrdO: cute.Tensor  # (MMA, 1, MMA_K)
    tPrV: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tQrdS: cute.Tensor  # (MMA, 1, MMA_K): dS in registers; the accumulators' order is that of its k
    tQrK: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tKrP: cute.Tensor  # (MMA, 1, MMA_K, 2): P' and dS' in shared memory
    tKrQ: tuple  # per part of the columns of dV and dK, (MMA, 1, MMA_K, 2): dO and Q
    acc_S: cute.Tensor  # (MMA, 1, MMA_N)
    acc_dP: cute.Tensor
    acc_dQ: cute.Tensor
    acc_dK: tuple  # two accumulators of a part of dV or dK
    rP: cute.Tensor  # as acc_S, in 16 bits
    copy_P: cute.TiledCopy
    sP: cute.Tensor  # (R2S, R2S_M, R2S_N, 2): the destinations of this thread's P and dS
    pipe_k: pipeline.PipelineAsync
    pipe_v: pipeline.PipelineAsync


class GatherOperands:
    """Layouts, tiled MMAs, pipelines and fragments of one kernel; base class of its mainloop."""

    def __init__(self, facts: GatherBackwardFacts):
        self.facts, self.cfg, self.dtype = facts, facts.config, cutlass_dtype(facts.dtype)
        arrivals = Arrivals(WARPS, 4 * GROUPS, filling=32)  # as forward.gather.operands.gathering
        self.arrivals = {"Q, dO, K, V": arrivals}
        self.q = GatheredRows(self.dtype, (self.cfg.tile_m, facts.head_dim), 1, arrivals, False)
        self.k = GatheredRows(self.dtype, (KEYS, facts.head_dim), facts.stages, arrivals, False)

    def layouts(self) -> dict:
        """Shared memory layouts as loaded and written: sQ (tile_m, D, 2), dO and then Q; sK and sV (KEYS, D, PIPE); sP
        (tile_m, KEYS, 2), P and then dS."""
        rows, dim, stages = self.cfg.tile_m, self.facts.head_dim, self.facts.stages
        return {
            "sQ": smem_layout(self.dtype, rows, dim, 2, True),
            "sK": smem_layout(self.dtype, KEYS, dim, stages, True),
            "sV": smem_layout(self.dtype, KEYS, dim, stages, True),
            "sP": smem_layout(self.dtype, rows, KEYS, 2, True),
        }

    def transposed(self) -> dict:
        """Layouts of the same memory with rows and columns exchanged."""
        rows, dim, stages = self.cfg.tile_m, self.facts.head_dim, self.facts.stages
        return {
            "sQ": smem_layout(self.dtype, dim, rows, 2, False),
            "sK": smem_layout(self.dtype, dim, KEYS, stages, False),
            "sP": smem_layout(self.dtype, KEYS, rows, 2, False),
        }

    def make_storage(self) -> type:
        """Struct of a CTA's shared memory."""
        q, k, p = (cute.cosize(self.layouts()[name]) for name in ("sQ", "sK", "sP"))

        @cute.struct
        class SharedStorage:
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_do: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * self.facts.stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2 * self.facts.stages]
            delta: cute.struct.MemRange[Float32, self.cfg.tile_m]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, q], ALIGN]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, k], ALIGN]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, k], ALIGN]
            sP: cute.struct.Align[cute.struct.MemRange[self.dtype, p], ALIGN]

        return SharedStorage

    def views(self, storage, layouts: dict) -> dict:
        """Tensors of these layouts in the storage, with their swizzles."""
        return {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        }

    def make_mmas(self) -> tuple:
        """Tiled MMAs (S = Q K', dP = dO V', dQ = dS K, dV = P' dO and dK = dS' Q) of all consumers."""
        k, mn = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def product(a, b, groups: tuple, columns: int, source):
            make = sm90_utils.make_trivial_tiled_mma
            return make(self.dtype, self.dtype, a, b, Float32, (*groups, 1), (KEYS, columns), source)

        return (
            product(k, k, (GROUPS, 1), KEYS, memory),
            product(k, k, (GROUPS, 1), KEYS, memory),
            product(k, mn, (GROUPS, 1), self.facts.head_dim, registers),
            product(mn, mn, (1, GROUPS if self.facts.splits else 1), self.facts.columns, memory),
        )

    def make_pipelines(self, storage) -> tuple:
        """(Q, dO, K, V); returns after every barrier is visible."""
        pipes = tuple(self.q.make_ring(x) for x in (storage.barriers_q, storage.barriers_do))
        pipes += tuple(self.k.make_ring(x) for x in (storage.barriers_k, storage.barriers_v))
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        return pipes

    def consumer(self, mmas: tuple, group: Int32, storage, rings: tuple) -> Consumer:
        """A warpgroup's operands and registers."""
        facts, rows = self.facts, self.cfg.tile_m
        s, t = self.views(storage, self.layouts()), self.views(storage, self.transposed())
        mine = cute.make_layout(GROUPS, stride=WARPGROUP)(group)
        mma_s, mma_dp, mma_dq, mma_dk = mmas
        of_s, of_dp, of_dq = (mma.get_slice(mine) for mma in (mma_s, mma_dp, mma_dq))
        of_dk = mma_dk.get_slice(mine if facts.splits else 0)

        def registers(thread, shape: tuple):
            return cute.make_rmem_tensor(thread.partition_shape_C(shape), Float32)

        acc_S = registers(of_s, (rows, KEYS))
        copy_P = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), mma_s)
        first, last = (None, None, None, 0), (None, None, None, 1)
        width = facts.columns * (GROUPS if facts.splits else 1)
        columns_of_q = [cute.local_tile(t["sQ"], (width, rows, 2), (i, 0, 0)) for i in range(facts.parts)]
        return Consumer(
            group=group,
            mmas=mmas,
            tSrQ=mma_s.make_fragment_A(of_s.partition_A(s["sQ"]))[last],
            tSrK=mma_s.make_fragment_B(of_s.partition_B(s["sK"])),
            tPrdO=mma_dp.make_fragment_A(of_dp.partition_A(s["sQ"]))[first],
            tPrV=mma_dp.make_fragment_B(of_dp.partition_B(s["sV"])),
            tQrdS=cute.make_rmem_tensor(of_dq.partition_shape_A((rows, KEYS)), self.dtype),
            tQrK=mma_dq.make_fragment_B(of_dq.partition_B(t["sK"])),
            tKrP=mma_dk.make_fragment_A(of_dk.partition_A(t["sP"])),
            tKrQ=tuple(mma_dk.make_fragment_B(of_dk.partition_B(x)) for x in columns_of_q),
            acc_S=acc_S,
            acc_dP=registers(of_dp, (rows, KEYS)),
            acc_dQ=registers(of_dq, (rows, facts.head_dim)),
            acc_dK=tuple(registers(of_dk, (KEYS, width)) for _ in range(2)),
            rP=cute.make_rmem_tensor(acc_S.layout, self.dtype),
            copy_P=copy_P,
            sP=copy_P.get_slice(cute.arch.thread_idx()[0] - WARPGROUP).partition_D(s["sP"]),
            pipe_k=rings[0],
            pipe_v=rings[1],
        )
