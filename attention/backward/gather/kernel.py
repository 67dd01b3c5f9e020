"""The sm_90 kernel of selected_attention's backward with gathered KV tiles: a CTA has one query tile.

    warpgroup 0      producer; all warps gather Q, dO, K and V by cp.async (forward/gather/operands)
    warpgroups 1, 2  consumers; each owns 64 rows of the query tile

    ring         producer arrives                                consumers arrive
    Q, dO        all threads, each when its copies have landed   never; one stage, loaded once
    K, V         all threads, each when its copies have landed   1 thread for each consumer warp

    named barriers   1       all consumers: P and dS are in shared memory
                     4, 5    both consumers: warpgroup 0, 1 has read P and dS of the previous step

The steps are those of mainloop.py. A CTA ends with its tile, whose dQ it stores; dV and dK are added to memory.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.element import VECTOR_BYTES
from cute_kernels.tile.hopper import WARPGROUP
from cute_kernels.tile.ptx import opaque, read_special_register

from ...forward.gather.mask import members_of
from ...forward.gather.operands import Gather
from ...forward.gather.source import UnionSteps, with_unions
from ...forward.mask import LOG2E
from ...forward.operand_sm90 import permuted
from ...forward.scheduler import QueryScheduler, QueryTile
from ...forward.store_o import store_rows
from ...seqlen import DenseSeqlens
from ..config import FP32
from .config import GROUPS, KEYS, GatherBackwardFacts
from .mainloop import WARP, WARP_ROWS, GatherMainloop, Work
from .operands import Consumer

# Per thread of (producer, consumers), by head dimension
REGISTERS = {64: (56, 224), 128: (56, 224), 256: (40, 232)}


class GatherBackwardSm90(GatherMainloop):
    """Compiles to one kernel per `GatherBackwardFacts`."""

    def __init__(self, facts: GatherBackwardFacts):
        super().__init__(facts)
        self.threads = WARPGROUP * (1 + GROUPS)
        self.cluster = 1
        self.storage = self.smem_bytes = None  # known once traced

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), as O, dO and dQ
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, D)
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,  # (B, H, Sq)
        mdLSE: cute.Tensor | None,  # (B, H, Sq); GatherBackwardFacts.lse_gradient
        mdQ: cute.Tensor,
        mdK: cute.Tensor,  # (B, Hkv, Sk, D) FP32, zeros, as dV
        mdV: cute.Tensor,
        tables: tuple,  # selected.gather.tables
        scale_log2: Float32,
        scale: Float32,  # of dQ
        stream: cuda.CUstream,
    ):
        scheduler, source = with_unions(self.facts, mQ, mK, tables)
        self.storage = self.make_storage()
        self.smem_bytes = self.storage.size_in_bytes()
        self.kernel(
            mQ, mK, mV, mO, mdO, mLSE, mdLSE, mdQ, mdK, mdV, self.make_mmas(), source, scheduler,
            DenseSeqlens(mQ.shape[2], mK.shape[2]), scale_log2, scale,
        ).launch(
            grid=(scheduler.count, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mmas: tuple,
        source,
        scheduler,
        seqlens,
        scale_log2: Float32,
        scale: Float32,
    ):
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1  # -1: the producer
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipe_q, pipe_do, pipe_k, pipe_v = self.make_pipelines(storage)
        tile = scheduler.of_fields(scheduler.fields(read_special_register("ctaid.x")))
        seqlen = seqlens.of(tile.b)
        steps = source.for_tile(tile, seqlen)
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[self.facts.head_dim][0])
            self.produce((mQ, mdO, mK, mV), (pipe_q, pipe_do, pipe_k, pipe_v), storage, source, steps, tile, warp)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.facts.head_dim][1])
            c = self.consumer(mmas, group, storage, (pipe_k, pipe_v))
            c.acc_dQ.fill(0.0)
            if steps.count > 0:
                row, end, delta = self.first_row(tile), source.heads.rows(seqlen.rows), storage.delta.data_ptr().toint()
                self.reduce_delta((mO, mdO), source.heads, tile, end, delta, warp - 4)
                lse, deltas = self.row_terms((mLSE, mdLSE), source.heads, tile, end, delta, row)
                to = self.accumulators((mdV, mdK), tile, group)
                work = Work(steps, members_of(steps, row), tile.partial, lse, deltas, to, scale_log2)
                once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
                pipe_q.consumer_wait(once)
                pipe_do.consumer_wait(once)
                at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.facts.stages)
                for i in cutlass.range(steps.count, unroll=1):
                    self.step(c, work, i, at)
                    at.advance()
            self.store_dq(c, mdQ, source.heads, scheduler, seqlens, scale)

    @cute.jit
    def store_dq(self, c: Consumer, mdQ: cute.Tensor, heads, scheduler, seqlens, scale: Float32):
        """Store dQ. The tile is decoded again, so that no register holds it during the steps."""
        flat = cute.make_tensor(c.acc_dQ.iterator, cute.make_layout(cute.size(c.acc_dQ)))
        flat.store(flat.load() * scale)
        m, h, b = QueryScheduler.fields(scheduler, read_special_register("ctaid.x"))
        tile = QueryTile(m, h, b, h // scheduler.qhead_per_kvhead)
        rows = heads.of_tile(tile, seqlens.of(b))
        store_rows(c.acc_dQ, rows.view(mdQ), self.first_row(tile), rows.end)

    def first_row(self, tile) -> Int32:
        """Index of the first of this thread's two rows of the query tile."""
        thread = read_special_register("tid.x") - WARPGROUP
        return tile.m * self.cfg.tile_m + thread // WARP * WARP_ROWS + thread % WARP // 4

    def accumulators(self, gradients: tuple, tile, group: Int32) -> tuple:
        """Addresses of key 0 of dV and dK, at this thread's first column."""
        column = (group * self.facts.columns if self.facts.splits else 0) + cute.arch.lane_idx() % 4 * 4
        return tuple(m[tile.b, tile.h_kv, None, None].iterator.toint() + Int64(column * FP32) for m in gradients)

    @cute.jit
    def reduce_delta(self, tensors: tuple, heads, tile, end: Int32, to: Int32, warp: Int32):
        """Compute rowsum(O dO) of the 16 rows of a consumer warp, and write it to the shared memory address `to`."""
        lanes = const_expr(self.facts.head_dim * self.facts.element.width // VECTOR_BYTES)  # per row
        at_once, lane = const_expr(WARP // lanes), cute.arch.lane_idx()
        for i in range_constexpr(WARP_ROWS // at_once):
            local = warp * WARP_ROWS + i * at_once + lane // lanes
            h, query = heads.place(tile, cutlass.min(tile.m * self.cfg.tile_m + local, end - 1))
            o, do = (self.load_vector(m, (tile.b, h, query), lane % lanes) for m in tensors)
            total = Float32(0.0)
            for v in range_constexpr(cute.size(o)):
                total += o[v].to(Float32) * do[v].to(Float32)
            for j in range_constexpr(const_expr(lanes.bit_length() - 1)):
                total += cute.arch.shuffle_sync_bfly(total, 1 << j)
            place = self.delta_at(to, local)
            if lane % lanes == 0:
                place[0] = total
        cute.arch.sync_warp()

    def load_vector(self, m: cute.Tensor, row: tuple, index: Int32) -> cute.Tensor:
        """Load the index-th 16 bytes of a row of O or dO."""
        count = VECTOR_BYTES // self.facts.element.width
        at = m[(*row, None)].iterator.toint() + Int64(index * VECTOR_BYTES)
        values = cute.make_rmem_tensor(count, self.dtype)
        place = make_ptr(self.dtype, at, AddressSpace.gmem, assumed_align=VECTOR_BYTES)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(count)), values)
        return values

    def delta_at(self, at: Int32, row: Int32) -> cute.Tensor:
        """Delta of a row of the query tile in shared memory, (1,)."""
        place = make_ptr(Float32, at + row * FP32, AddressSpace.smem, assumed_align=FP32)
        return cute.make_tensor(place, cute.make_layout(1))

    @cute.jit
    def row_terms(self, tensors: tuple, heads, tile, end: Int32, at: Int32, row: Int32) -> tuple:
        """(LSE times log2(e), delta) of this thread's two rows. Both are 0 for rows past the end, and LSE is 0 for rows
        that see nothing, whose scores are -inf."""
        mLSE, mdLSE = tensors
        lse, delta = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        for r in range_constexpr(2):
            h, query = heads.place(tile, cutlass.min(row + 8 * r, end - 1))
            value, exists = mLSE[tile.b, h, query], row + 8 * r < end
            sees = exists & (value != -Float32.inf)
            lse[r] = select_(sees, value * LOG2E, Float32(0.0))
            of_row = self.delta_at(at, row + 8 * r - tile.m * self.cfg.tile_m)[0]
            if const_expr(mdLSE is not None):
                of_row -= mdLSE[tile.b, h, query]
            delta[r] = select_(exists, of_row, Float32(0.0))
        return lse, delta

    # ------------------------------------------------------------------ producer

    @cute.jit
    def produce(self, tensors: tuple, pipes: tuple, storage, source, steps: UnionSteps, tile, warp: Int32):
        """Load Q and dO, and gather the KV tiles; all producer warps."""
        if steps.count > 0:
            mQ, mdO, mK, mV = (permuted(t, (2, 3, 1, 0)) for t in tensors)  # (S, D, H, B)
            pipe_q, pipe_do, pipe_k, pipe_v = pipes
            gather = Gather(self.facts, warp)
            k = gather.rows(mK[None, None, tile.h_kv, tile.b])
            to_k, to_v = storage.sK.data_ptr().toint(), storage.sV.data_ptr().toint()
            to_do = storage.sQ.data_ptr().toint()
            to_q = to_do + const_expr(self.cfg.tile_m * self.facts.head_dim * self.facts.element.width)
            once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
            at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.facts.stages)
            first, head = tile.m * self.cfg.tile_m, tile.h_kv * source.heads.qhead_per_kvhead
            now = gather.load_blocks(steps, steps.at(0))
            self.gather_tile(gather, k, now, to_k, pipe_k, at)
            for m, to, pipe in ((mQ, to_q, pipe_q), (mdO, to_do, pipe_do)):
                of_heads = cute.domain_offset((0, 0, head), m[None, None, None, tile.b])
                # Opaque, so that no addresses of dO are computed with those of Q: registers do not hold both.
                gather.copy_queries(of_heads, opaque(first), source.heads, opaque(to))
                cute.arch.cp_async_mbarrier_arrive_noinc(pipe.producer_get_barrier(once))
            ahead = gather.load_blocks(steps, steps.at(1))
            v = gather.rows(mV[None, None, tile.h_kv, tile.b])
            self.gather_tile(gather, v, now, to_v, pipe_v, at)
            at.advance()
            for i in cutlass.range(1, steps.count, unroll=1):
                now = ahead
                ahead = gather.load_blocks(steps, steps.at(i + 1))
                self.gather_tile(gather, v, now, to_v, pipe_v, at)  # V's stage is free before K's
                self.gather_tile(gather, k, now, to_k, pipe_k, at)
                at.advance()

    @cute.jit
    def gather_tile(self, gather: Gather, rows, blocks: Int32, to: Int32, pipe, state):
        """Gather a tile of K or V, as soon as its stage is free."""
        pipe.sync_object_empty.wait(state.index, state.phase)
        tile = const_expr(KEYS * self.facts.head_dim * self.facts.element.width)
        gather.copy(rows, blocks, to + state.index * tile if const_expr(self.facts.stages > 1) else to)
        cute.arch.cp_async_mbarrier_arrive_noinc(pipe.producer_get_barrier(state))
