"""The sm_90 kernel of attention's backward: one CTA a tile of K and V, TMA in, WGMMA, dK and dV from registers.

    warpgroup 0      producer; one of its warps issues all TMA loads; one for each consumer adds dQ's sums to memory
    warpgroups 1..   consumers; each owns 64 rows of K and V (mainloop_sm90)

    pipeline   producer arrives          consumers arrive (per stage)
    K and V    1 thread + bytes of TMA   nobody; one stage
    Q, dO      see mainloop_sm90

    named barriers   1        all consumers: dS is in shared memory, or rows past the end are zeros
                     2 to 5   each consumer and its storing warp: its part of dQ is in a buffer of sums
                     6 to 9   the same: the buffer has been read

A CTA visits the query tiles of all heads that share its head of K and V, so that dK and dV are written once, and in the
same order in every run. dQ is added up in memory, by whichever CTA comes first, or in turns (turns.py).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.tile.hopper import WARPGROUP

from ..forward.mainloop_sm90 import permuted
from .ahead_sm90 import AheadSm90
from .config import FP32, BackwardFacts
from .mainloop_sm90 import Consumer, DqWork, MainloopSm90, Work, first_row
from .problem import problem_of
from .store import store_fragment
from .turns import TURN

REGISTERS = {1: (24, 232), 2: (24, 240)}  # a thread of (producer, consumers), by number of consumers


class FlashBackwardSm90:
    """Compiles to one kernel per `BackwardFacts`."""

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        self.mainloop = AheadSm90(facts) if facts.config.ahead else MainloopSm90(facts)
        self.threads = WARPGROUP * (1 + facts.config.groups)
        self.cluster = 1
        self.arrivals = {"Q, dO, K and V": self.mainloop.arrivals}
        self.storage = self.smem_bytes = None  # known once traced

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv)
        mdO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mdK: cute.Tensor,  # as K
        mdV: cute.Tensor,  # as V
        rows: cute.Tensor,  # row_tiles: (B * H * tiles, 2, tile_m) fp32
        dq: cute.Tensor,  # row_tiles: (B * H * tiles, tile_m * D) fp32; sums are added to it
        turns: cute.Tensor | None,  # (B * H * tiles, consumer warpgroups) int32 of zeros; where sums have one order
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # see problem.problem_of; of a block mask
        scale_log2: Float32,
        softcap: Float32,
        scale: Float32,  # of dK
        left: Int32 | None,  # None of a block mask
        right: Int32 | None,
        stream: cuda.CUstream,
    ):
        cfg, facts, loop = self.cfg, self.facts, self.mainloop
        p = problem_of(facts, (mQ, mK, mV, mdO, mdK, mdV), rows, (cu_q, cu_k), blocks, left, right)
        # (S, D, H, B)
        tQ, tK, tV, tdO = (permuted(t, (2, 3, 1, 0)) for t in (p.mQ, p.mK, p.mV, p.mdO))
        layouts = loop.layouts()
        self.storage = loop.storage()
        self.smem_bytes = self.storage.size_in_bytes()
        tma_q, tQ = loop.make_load(tQ, layouts["sQ"], (cfg.tile_m, facts.head_dim))
        tma_k, tK = loop.make_load(tK, layouts["sK"], (cfg.tile_n, facts.head_dim))
        tma_v, tV = loop.make_load(tV, layouts["sV"], (cfg.tile_n, facts.head_dim_v))
        tma_do, tdO = loop.make_load(tdO, layouts["sdO"], (cfg.tile_m, facts.head_dim_v))
        self.kernel(
            tma_q, tQ, tma_k, tK, tma_v, tV, tma_do, tdO, p.mdK, p.mdV, rows, dq, turns, loop.make_mmas(), p.source,
            p.scheduler, p.seqlens, scale_log2, softcap, scale,
        ).launch(
            grid=(p.scheduler.count, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=None if cfg.ctas == 1 else 100,  # unnamed, the DSL would ask a GPU for it
            stream=stream,
        )  # fmt: skip

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (Sq, D, H, B)
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,  # (Sk, D, Hkv, B)
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,  # (Sk, Dv, Hkv, B)
        tma_do: cute.CopyAtom,
        mdO: cute.Tensor,  # (Sq, Dv, H, B)
        mdK: cute.Tensor,  # (B, Hkv, Sk, D)
        mdV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        rows: cute.Tensor,
        dq: cute.Tensor,
        turns: cute.Tensor | None,
        mmas: tuple,
        source,
        scheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        scale: Float32,
    ):
        cfg = self.cfg
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1  # -1: the producer
        if warp == 0:
            for tma in (tma_q, tma_k, tma_v, tma_do):
                cpasync.prefetch_descriptor(tma)

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipe_kv, pipe_q, pipe_do = self.mainloop.make_pipelines(storage)
        tile = scheduler.decode(cute.arch.block_idx()[0])
        seqlen = seqlens.of(tile.b)
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[cfg.groups][0])
            if warp == 0:
                views = self.mainloop.views(storage, self.mainloop.layouts())
                operands = {
                    "q": (tma_q, views["sQ"], mQ, (cfg.tile_m, self.facts.head_dim), seqlen.q0),
                    "do": (tma_do, views["sdO"], mdO, (cfg.tile_m, self.facts.head_dim_v), seqlen.q0),
                    "k": (tma_k, views["sK"], mK, (cfg.tile_n, self.facts.head_dim), seqlen.k0),
                    "v": (tma_v, views["sV"], mV, (cfg.tile_n, self.facts.head_dim_v), seqlen.k0),
                }
                parts = {name: self.partition(*operand) for name, operand in operands.items()}
                ring = storage.rows.data_ptr()
                self.produce(parts, rows, ring, (pipe_kv, pipe_q, pipe_do), source, scheduler, seqlens, tile)
            elif warp <= cfg.groups:
                sums = storage.sums.data_ptr().toint()
                self.store_dq(warp - 1, sums, (dq, turns), source, scheduler, seqlens, tile)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[cfg.groups][1])
            c = self.mainloop.consumer(mmas, group, storage, (pipe_q, pipe_do))
            if const_expr(not cfg.ahead):
                c.acc_dK.fill(0.0)
                c.acc_dV.fill(0.0)
            at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.ring_q)
            pipe_kv.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
            if const_expr(self.facts.packed):
                self.zero_rows_past_the_end(storage, seqlen.cols - tile.n * cfg.tile_n)
            col0 = tile.n * cfg.tile_n
            heads = scheduler.qhead_per_kvhead
            begin = Int32(0)  # the first head that sees the tile
            if const_expr(cfg.ahead):
                if const_expr(self.facts.blocks is not None):
                    begin = self.first_head(source, scheduler, seqlen, tile)
                h0 = tile.h_kv * heads + begin
                tiles0 = source.for_tile(tile.n, h0, tile.b, seqlen)
                work0 = Work(source, tiles0, seqlen, tile.b, h0, col0, scale_log2, softcap)
                self.mainloop.begin(c, storage, work0, at_q, at)
            for g in cutlass.range(begin, heads, unroll=1):
                h = tile.h_kv * heads + g
                tiles = source.for_tile(tile.n, h, tile.b, seqlen)
                work = Work(source, tiles, seqlen, tile.b, h, col0, scale_log2, softcap)
                first = Int32(g == begin) if const_expr(cfg.ahead) else 0
                for i in cutlass.range(first, tiles.count, unroll=1):
                    if const_expr(cfg.ahead):
                        at_q, at = self.mainloop.step(c, work, i, at_q, at)
                    else:
                        self.mainloop.step(c, work, i, at)
                        at.advance()
            if const_expr(cfg.ahead):
                self.mainloop.finish(c, at_q, at, self.steps(source, scheduler, seqlen, tile))
            self.store(c, (mdK, mdV), tile, seqlen, scale)

    @cute.jit
    def store(self, c: Consumer, gradients: tuple, tile, seqlen, scale: Float32):
        """dK and dV of this thread."""
        mdK, mdV = gradients
        col = tile.n * self.cfg.tile_n + first_row()
        flat = cute.make_tensor(c.acc_dK.iterator, cute.make_layout(cute.size(c.acc_dK)))
        flat.store(flat.load() * scale)
        for acc, m in ((c.acc_dK, mdK), (c.acc_dV, mdV)):
            begin = cute.domain_offset((seqlen.k0, 0), m[seqlen.b, tile.h_kv, None, None])
            store_fragment(acc, begin, col, seqlen.cols)

    @cute.jit
    def zero_rows_past_the_end(self, storage, valid: Int32):
        """Zero the rows of K and V that belong to the next sequence."""
        if valid < self.cfg.tile_n:
            for place, layout in self.mainloop.lines_of_kv(storage):
                self.mainloop.zero_rows(place, layout, Int32(0), valid)

    # ------------------------------------------------------------------ producer's warpgroup

    @cute.jit
    def steps(self, source, scheduler, seqlen, tile) -> Int32:
        """How many query tiles see the CTA's tile of K and V, of all heads."""
        count, heads = Int32(0), scheduler.qhead_per_kvhead
        for g in cutlass.range(heads, unroll=1):
            count += source.for_tile(tile.n, tile.h_kv * heads + g, tile.b, seqlen).count
        return count

    @cute.jit
    def first_head(self, source, scheduler, seqlen, tile) -> Int32:
        """The first of the heads that share a head of K and V with query tiles that see the CTA's; 0: perhaps none."""
        first, heads = Int32(0), scheduler.qhead_per_kvhead
        for g in cutlass.range(heads, unroll=1):
            from_last = heads - 1 - g
            if source.for_tile(tile.n, tile.h_kv * heads + from_last, tile.b, seqlen).count > 0:
                first = from_last
        return first

    @cute.jit
    def store_dq(self, group: Int32, sums: Int32, memory: tuple, source, scheduler, seqlens, tile):
        """Add a consumer warpgroup's parts of dQ to memory: a warp's work."""
        cfg, (dq, turns) = self.cfg, memory
        seqlen = seqlens.of(tile.b)
        heads = scheduler.qhead_per_kvhead
        left = self.steps(source, scheduler, seqlen, tile)
        for buffer in range_constexpr(cfg.sums):
            if left > 0:
                self.mainloop.free_sums(group, buffer)
            left -= 1
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.sums)
        for g in cutlass.range(heads, unroll=1):
            h = tile.h_kv * heads + g
            tiles = source.for_tile(tile.n, h, tile.b, seqlen)
            first = Int64(seqlen.b * scheduler.heads + h) * scheduler.tiles_q
            first += seqlens.first_tile(seqlen, tile.b, cfg.tile_m)
            begin = dq.iterator.toint() + first * (cfg.tile_m * self.facts.head_dim * FP32)
            turn = None
            if const_expr(self.facts.deterministic):
                turn = turns.iterator.toint() + (first * cfg.groups + group) * TURN
            left, at = self.mainloop.store_sums(group, DqWork(tiles, begin, turn), sums, left, at)

    @cute.jit
    def produce(self, parts: dict, rows, ring, pipes: tuple, source, scheduler, seqlens, tile):
        """Load the CTA's tiles of K and V, and all query tiles that see them."""
        cfg = self.cfg
        pipe_kv, pipe_q, pipe_do = pipes
        seqlen = seqlens.of(tile.b)
        once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        pipe_kv.producer_acquire(once)
        self.load(parts["k"], (tile.n, 0, tile.h_kv, seqlen.b), pipe_kv, once)
        self.load(parts["v"], (tile.n, 0, tile.h_kv, seqlen.b), pipe_kv, once)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
        at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.ring_q)
        for g in cutlass.range(scheduler.qhead_per_kvhead, unroll=1):
            h = tile.h_kv * scheduler.qhead_per_kvhead + g
            tiles = source.for_tile(tile.n, h, tile.b, seqlen)
            first = (seqlen.b * scheduler.heads + h) * scheduler.tiles_q
            first += seqlens.first_tile(seqlen, tile.b, cfg.tile_m)
            for i in cutlass.range(tiles.count, unroll=1):
                m = tiles.at(i)
                pipe_q.producer_acquire(at_q)
                self.load(parts["q"], (m, 0, h, seqlen.b), pipe_q, at_q)
                self.load_rows(rows, first + m, ring, at_q.index, pipe_q.producer_get_barrier(at_q))
                at_q.advance()
                pipe_do.producer_acquire(at)
                self.load(parts["do"], (m, 0, h, seqlen.b), pipe_do, at)
                at.advance()

    def load(self, part: tuple, tile: tuple, pipe, at):
        """Load a tile of an operand, whose stage is free."""
        tma, sX, gX = part
        cute.copy(tma, gX[(None, *tile)], sX[None, at.index], tma_bar_ptr=pipe.producer_get_barrier(at))

    @cute.jit
    def load_rows(self, rows: cute.Tensor, number: Int32, ring: cute.Pointer, stage: Int32, bar: cute.Pointer):
        """LSE and delta of a query tile, by one bulk copy."""
        size = const_expr(2 * self.cfg.tile_m)
        layout = cute.make_layout(size)
        source = cute.make_tensor(rows.iterator + Int64(number) * size, layout)
        place = cute.make_tensor(ring + stage * size, layout)
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        with cute.arch.elect_one():
            cute.copy(atom, source, place, mbar_ptr=bar)

    def partition(self, tma: cute.CopyAtom, smem: cute.Tensor, tensor: cute.Tensor, tile: tuple, begin) -> tuple:
        """(TMA atom, (TMA, PIPE), (TMA, rest_0, rest_1, heads, batch)) of an operand, its tiles from row `begin` on."""
        if self.facts.packed:
            tensor = cute.domain_offset((begin, 0, 0, 0), tensor)
        tiles = cute.local_tile(tensor, tile, (None, None, None, None))
        sX, gX = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return tma, sX, gX
