"""The sm_90 attention kernel: persistent, warp-specialized, TMA in, WGMMA, O straight from registers.

    warpgroup 0      producer; one of its warps issues all TMA loads, the others idle, or convert V (fp8/values.py)
    warpgroups 1..   consumers; each owns 64 rows of the query tile, or two split the head dimension (mainloop_sm90)

    pipeline   producer arrives          consumers arrive (per stage)
    Q          1 thread + bytes of TMA   1 thread for each consumer warp; one stage
    K, V       see mainloop_sm90
    queue      the producer warp         all consumer threads, and the converting warps; tile_queue.SLOTS stages
                                         (FlashConfig.dynamic)

    named barriers   1, 2, ..   order of the consumers' WGMMAs (tile/barriers.py)
                     4          both consumers, around the exchange of scores if they have the same rows
                     8, 9, ..   the warps of each consumer, before V's rows past the end are zeroed

Consumers issue their WGMMAs in order (FlashFacts.ordered, ping-pong): while one of them does its softmax, another uses
the tensor cores.

    group 0    | QK, PV | softmax        | QK, PV | softmax ...
    group 1             | QK, PV | softmax        | QK, PV | ...

O needs no shared memory, so the next query tile's Q is loaded as soon as the last scores of the current one are done.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.tile.barriers import FORWARD_OOB, Arrivals
from cute_kernels.tile.ptx import read_special_register

from .config import FlashFacts
from .mainloop_sm90 import WARPGROUP, MainloopSm90
from .mask_and_softmax import QueryWork
from .operand_sm90 import load_tile, permuted
from .problem import problem_of
from .softmax import rows_and_columns
from .softmax_policy import policy_of
from .store_o import store_policy
from .tile_queue import FIELDS, SLOTS, TileQueue
from .zero_oob_rows import zero_oob_rows

FETCH_AHEAD = 6  # KV tiles left of a query tile when the next query tile is fetched

# Registers per thread of (producer, consumers), by number of consumer warpgroups, that setmaxnreg makes of 65,536. With
# one consumer warpgroup, two CTAs may fit per SM. Consumers that split the head dimension need a larger producer
# register budget, since each tile is eight TMA boxes.
REGISTERS = {1: (24, 232), 2: (24, 240), 3: (32, 160)}
REGISTERS_SHARING = (40, 232)


class FlashForwardSm90:
    """Compiles to one kernel per `FlashFacts`."""

    is_secondary = False  # True for a secondary kernel of programmatic dependent launch: the primary writes V

    def __init__(self, facts: FlashFacts):
        self.facts, self.cfg, self.store = facts, facts.config, store_policy(facts)
        self.mainloop = loop = self.make_mainloop(facts)
        self.threads = WARPGROUP * (1 + facts.config.groups)
        self.registers = REGISTERS[facts.config.groups] if facts.sharers == 1 else REGISTERS_SHARING
        self.registers = loop.v.registers or self.registers
        self.cluster = 1
        self.arrivals = {"Q, K": loop.arrivals, **loop.v.rings}
        if facts.config.dynamic:
            self.arrivals["queue"] = Arrivals(1, 4 * facts.config.groups, threads=32, others=loop.v.converters)
        self.storage = self.smem_bytes = None  # known once traced

    @staticmethod
    def make_mainloop(facts: FlashFacts) -> MainloopSm90:
        return MainloopSm90(facts, policy_of(facts))

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq), packed (H, total_q)
        mSinks: cute.Tensor | None,  # (H,)
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # block_sparse.blocks_of; None without a block mask
        score_tensors: tuple | None,  # inputs of the score_mod
        counter: cute.Tensor | None,  # (1,) int32, 0; None without a dynamic schedule
        scale_log2: Float32,
        softcap: Float32,
        left: Int32 | None,  # None with a block mask
        right: Int32 | None,
        offsets: tuple | None,  # (q_offset, k_offset) with FlashFacts.offsets
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        p = problem_of(self.facts, (mQ, mK, mV, mO, mLSE), (cu_q, cu_k), blocks, left, right, offsets)
        scalars = scale_log2, softcap, score_tensors, mSinks
        self.start(p, self.mainloop.v.view(p.mV), counter, scalars, None, max_ctas, stream)

    def start(self, p, tV: cute.Tensor, counter, scalars: tuple, scales, max_ctas: Int32, stream: cuda.CUstream):
        """Launch the kernel of a problem. tV: V as (Dv, Sk, Hkv, B); `scalars`, `scales`: the kernel's last
        arguments."""
        cfg, loop = self.cfg, self.mainloop
        tQ, tK, gO = (permuted(t, (2, 3, 1, 0)) for t in (p.mQ, p.mK, p.mO))  # (S, D, H, B)
        self.storage = loop.storage()
        self.smem_bytes = self.storage.size_in_bytes()
        tma_q, tQ = loop.q.make_load(tQ)
        tma_k, tK = loop.k.make_load(tK)
        tma_v, tV = loop.v.make_load(tV)
        qk, pv = loop.make_mmas()
        self.kernel(
            tma_q, tQ, tma_k, tK, tma_v, tV, gO, p.mLSE, counter, qk, pv, p.source, p.scheduler, p.seqlens,
            *scalars, scales,
        ).launch(
            grid=(cutlass.min(p.scheduler.count, max_ctas), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=None if cfg.ctas == 1 else 100,  # otherwise the DSL would query a GPU
            use_pdl=self.is_secondary,
            stream=stream,
        )  # fmt: skip

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (Sq, D, H, B)
        tma_k: cute.CopyAtom | None,  # None if K and V are gathered (gather/)
        mK: cute.Tensor,  # (Sk, D, Hkv, B)
        tma_v: cute.CopyAtom | None,  # None if V is loaded without a TMA descriptor (fp8/values.py, gather/)
        mV: cute.Tensor,  # (Dv, Sk, Hkv, B)
        mO: cute.Tensor,  # (Sq, Dv, H, B)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        counter: cute.Tensor | None,  # (1,)
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        source,
        scheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        score_tensors: tuple | None,
        mSinks: cute.Tensor | None,  # (H,)
        scales: tuple | None,  # of FP8 Q, K and V, (B, H) and (B, Hkv), or None for 1
    ):
        cfg, facts = self.cfg, self.facts
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1  # -1: the producer
        step = cute.arch.grid_dim()[0]
        if warp == 0:
            for tma in (tma_q, tma_k, tma_v):
                if const_expr(tma is not None):
                    cpasync.prefetch_descriptor(tma)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ, sK, sV = self.mainloop.operands(storage)
        pipe_q, pipe_k, pipe_v, loads_v, pipe_queue = self.make_pipelines(storage, sV)
        if const_expr(facts.packed):
            scheduler = scheduler.counted(step)
        queue = None
        if const_expr(cfg.dynamic):
            queue = TileQueue(pipe_queue, storage.slots.get_tensor(cute.make_layout((FIELDS, SLOTS))), counter)

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.registers[0])
            operands = (tma_q, sQ, mQ, pipe_q), (tma_k, sK, mK, pipe_k), (tma_v, mV, loads_v)
            if const_expr(facts.gathers):
                self.produce(operands, queue, source, scheduler, seqlens, step)
            elif warp == 0:
                if const_expr(self.is_secondary):
                    cute.arch.griddepcontrol_wait()
                self.produce(operands, queue, source, scheduler, seqlens, step)
            if const_expr(self.mainloop.v.converters > 0):
                if warp > 0:
                    self.mainloop.v.convert(storage, (loads_v, pipe_v), queue, source, scheduler, seqlens, step)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            groups = cute.make_layout(cfg.groups, stride=WARPGROUP if facts.sharers == 1 else 0)
            c = self.mainloop.consumer(
                (mma_qk, mma_pv), groups(group), (sQ, sK, sV), (pipe_k, pipe_v), scale_log2, self.mainloop.order(group)
            )
            column = const_expr(0)  # this warpgroup's first column of O
            if const_expr(facts.sharers > 1):
                c = self.mainloop.split(c, group, storage.scores)
                column = group * self.mainloop.columns
            acc_O, out = c.acc_O, rows_and_columns(c.acc_O)
            lse, sinks = cute.make_rmem_tensor(2, Float32), source.heads.sink_registers(mSinks, 2)
            v_scale = None
            if const_expr(self.mainloop.scales is not None):
                v_scale = self.mainloop.scales.value_register()
            state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
            at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            at_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
            if const_expr(facts.ordered):
                if group == cfg.groups - 1:
                    self.mainloop.order_arrive(c.order)  # group 0 goes first
            index = read_special_register("ctaid.x")
            fields = scheduler.fields(index) if const_expr(cfg.dynamic) else ()
            while index < scheduler.count:
                tile = scheduler.of_fields(fields) if const_expr(cfg.dynamic) else scheduler.decode(index)
                seqlen = seqlens.of(tile.b)
                tiles = source.for_tile(tile, seqlen)
                row = self.first_row(tile)
                mine, cap = c, softcap
                if const_expr(self.mainloop.scales is not None):
                    mine, cap = self.mainloop.scales.of_query_tile(c, softcap, scales, tile)
                mine.softmax.clear()
                acc_O.fill(0.0)
                if tiles.count > 0:
                    work = self.mainloop.of_rows(QueryWork(source, tiles, tile, seqlen, row, cap, score_tensors))
                    pipe_q.consumer_wait(state_q)
                    at_k = self.mainloop.first_step(mine, work, at_k)
                    if const_expr(facts.packed and facts.values_element.transposes):
                        valid = seqlen.cols - tiles.at(0) * cfg.tile_n
                        if valid < cfg.tile_n:
                            pipe_v.consumer_wait(at_v)
                            zero_oob_rows(
                                storage.sV.data_ptr().toint(), self.mainloop.layouts()[2].outer, at_v.index, valid,
                                tidx % WARPGROUP, WARPGROUP, FORWARD_OOB + group,
                            )  # fmt: skip
                    at_k, at_v = self.mainloop.steps(mine, work, at_k, at_v)
                    pipe_q.consumer_release(state_q)
                    state_q.advance()
                    self.mainloop.last_step(mine, at_v)
                    self.read_last(source, mSinks, sinks, scales, v_scale, tile, row)
                    # The last WGMMA is in flight. Its wait must be in this branch, or ptxas inserts many waits: so both
                    # branches consume.
                    if const_expr(cfg.dynamic):
                        index, fields = queue.consume(len(fields), state_queue)
                    at_v = self.mainloop.finish(mine, at_v)
                else:
                    self.read_last(source, mSinks, sinks, scales, v_scale, tile, row)
                    if const_expr(cfg.dynamic):
                        index, fields = queue.consume(len(fields), state_queue)
                mine.softmax.finish(out, lse, sinks, v_scale)
                rows, owner = source.heads.of_tile(tile, seqlen), facts.sharers == 1 or group == 0
                self.store(acc_O, lse, permuted(mO, (3, 2, 0, 1)), mLSE, rows, row, column, tidx, owner)
                if const_expr(cfg.dynamic):
                    state_queue.advance()
                else:
                    index += step

    def read_last(self, source, mSinks: cute.Tensor | None, sinks, scales: tuple | None, v_scale, tile, row: Int32):
        """Read a query tile's sinks and V's dequantization scale at its end, so that no register holds them before."""
        source.heads.read_sinks(mSinks, tile, row, sinks)
        if v_scale is not None:
            self.mainloop.scales.read_value(scales, tile, v_scale)

    def first_row(self, tile) -> Int32:
        """Index of the first of this thread's two rows of the query tile."""
        thread = read_special_register("tid.x") - WARPGROUP
        if const_expr(self.facts.sharers > 1):
            thread = thread % WARPGROUP
        return tile.m * self.cfg.tile_m + thread // 32 * 16 + thread % 32 // 4

    # ------------------------------------------------------------------ producer

    @cute.jit
    def produce(self, operands: tuple, queue: TileQueue | None, source, scheduler, seqlens, step: Int32):
        """Load this CTA's query tiles, and the KV tiles.

        operands: (TMA atom, smem, tensor, pipeline) of Q and K, and (TMA atom, tensor, Values.loads) of V.
        """
        cfg, facts = self.cfg, self.facts
        (tma_q, sQ, mQ, pipe_q), (tma_k, sK, mK, pipe_k), (tma_v, mV, (sV, pipe_v, stages_v)) = operands
        state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
        at_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages_v)
        state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = scheduler.of_fields(fields)
            seqlen = seqlens.of(tile.b)
            tiles = source.for_tile(tile, seqlen)
            tQsQ, tQgQ = self.mainloop.q.partition(tma_q, sQ, mQ, (seqlen.q0, 0))
            tKsK, tKgK = self.mainloop.k.partition(tma_k, sK, mK, (seqlen.k0, 0))
            values = self.mainloop.v.tiles(tma_v, sV, mV, tile, seqlen)
            # The next tile's index is fetched early enough to arrive in time, and no earlier: a CTA that claims a tile
            # long before it starts it may still have much other work.
            number, fetch_at = index + step, cutlass.max(tiles.count - FETCH_AHEAD, 1)
            if tiles.count > 0:
                # Loads are issued in the order in which consumers wait for them; Q's stage is free later than K's.
                keys = tma_k, tKgK[None, None, 0, tile.h_kv, seqlen.b], tKsK
                # at() may load a tile's index from memory, so it is called one step ahead, once past the end.
                n, ahead = tiles.at(0), tiles.at(1)
                gQ = tQgQ[None, tile.m, 0, tile.h, seqlen.b]
                # Prefetched to L2, long before Q's stage is free. At head dimension 256 this is not faster, and at 96
                # and 192 the producer has no registers for it.
                if const_expr(facts.head_dim in (64, 128)):
                    cute.prefetch(tma_q, gQ)
                self.mainloop.k.load(keys, n, pipe_k, at_k)
                at_k.advance()
                load_tile(tma_q, gQ, tQsQ, pipe_q, state_q)
                state_q.advance()
                for i in cutlass.range(1, tiles.count, unroll=1):
                    if const_expr(cfg.dynamic):
                        if i == fetch_at:
                            number = queue.fetch(step)
                    before, n = n, ahead
                    ahead = tiles.at(i + 1)
                    self.mainloop.k.load(keys, n, pipe_k, at_k)
                    at_k.advance()
                    self.mainloop.v.load(values, before, pipe_v, at_v)
                    at_v.advance()
                self.mainloop.v.load(values, n, pipe_v, at_v)
                at_v.advance()
            if const_expr(cfg.dynamic):
                if tiles.count < 2:
                    number = queue.fetch(step)
                number = queue.fetched(number, scheduler.count, step)
            index, fields = number, scheduler.fields(number)
            if const_expr(cfg.dynamic):
                queue.publish(index, fields, state_queue)
                state_queue.advance()

    def make_pipelines(self, storage, sV: cute.Tensor) -> tuple:
        """(Q, K, V, ring that V is loaded into, queue); returns after every barrier is visible."""
        cfg, loop, queue = self.cfg, self.mainloop, None
        pipe_q = loop.q.make_ring(storage.barriers_q)
        pipe_k, pipe_v = loop.make_kv_rings(storage)
        loads_v = loop.v.loads(storage, sV, pipe_v)
        if cfg.dynamic:
            arrivals = self.arrivals["queue"]
            queue = pipeline.PipelineAsync.create(
                barrier_storage=storage.barriers_queue.data_ptr(),
                num_stages=SLOTS,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.full),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.empty),
                defer_sync=True,
            )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        return pipe_q, pipe_k, pipe_v, loads_v, queue
