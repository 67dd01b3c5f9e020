"""The sm_90 kernel of attention's backward: persistent, warp-specialized, TMA loads, WGMMA, dK and dV from registers.

    warpgroup 0      producer; one warp issues all TMA loads; one warp per consumer adds dQ to dq_accum
    warpgroups 1..   consumers; each owns 64 rows of K and V (mainloop_sm90)

    pipeline   producer arrives          consumers arrive (per stage)
    K, V       1 thread + bytes of TMA   1 thread per consumer warp; one stage each
    Q, dO      see mainloop_sm90
    queue      the producer warp         all threads of consumers and storing warps; tile_queue.SLOTS stages

    named barriers   1        all consumers: dS is in shared memory, or rows past the end are zeroed
                     2 to 5   a consumer and its storing warp: its part of dQ is in a buffer
                     6 to 9   a consumer and its storing warp: the buffer has been read

For each KV tile a CTA iterates over the query tiles of all heads that share the head of K and V, so that dK and dV are
written once, with bitwise identical results in every run. dQ is accumulated in memory, nondeterministically or ordered
by semaphores (semaphores.py). CTAs fetch tile indices from a queue (forward/tile_queue.py). K and V of the next tile
are loaded while dK and dV of this tile are stored from registers.

With `ranges` (ranges.py) a CTA iterates over the query tiles of one range of rows, and adds its part of dK and dV to
FP32 accumulators; with `split_heads` (items.py) over those of some heads, and stores its part in FP32. Both before it
reads the queue: with these in registers, too, the kernel would spill.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.hopper import WARPGROUP
from cute_kernels.tile.ptx import read_special_register

from ..forward.operand_sm90 import permuted
from ..forward.tile_queue import FIELDS, SLOTS, TileQueue
from .config import AheadConfig, BackwardFacts, SharedColumnsConfig, StepConfig
from .dq_store import DqWork
from .mainloop_sm90 import MainloopSm90, Work
from .operands_sm90 import Consumer
from .prefetched_sm90 import AheadSm90
from .problem import KvTile, problem_of
from .semaphores import TURN
from .split_head_dim_sm90 import SharedColumnsSm90
from .store import add_fragment, store_fragment

MAINLOOPS = {StepConfig: MainloopSm90, AheadConfig: AheadSm90, SharedColumnsConfig: SharedColumnsSm90}
REGISTERS = {1: (24, 232), 2: (24, 240)}  # per thread of (producer, consumers), by number of consumer warpgroups
FETCH_AHEAD = 2  # remaining query tiles of a KV tile when the next KV tile is fetched


class FlashBackwardSm90:
    """Compiles to one kernel per `BackwardFacts`."""

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        cfg = facts.config
        self.mainloop = MAINLOOPS[type(cfg)](facts)
        self.dq_store = self.mainloop.dq_store
        self.threads = WARPGROUP * (1 + facts.config.groups)
        self.cluster = 1
        queue = Arrivals(1, 4 * cfg.groups, threads=32, others=cfg.storing_warps)
        self.arrivals = {"Q, dO, K and V": self.mainloop.arrivals, "queue": queue}
        self.storage = self.smem_bytes = None  # known once traced

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv)
        mdO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mdK: cute.Tensor,  # as K; with ranges FP32 accumulators, see sums.py; with split_heads FP32 parts, see items.py
        mdV: cute.Tensor,  # as V, likewise
        rows: cute.Tensor,  # row_tiles: (B * H * tiles, 2, tile_m) FP32
        dq: cute.Tensor,  # row_tiles: dq_accum, (B * H * tiles, tile_m * D) FP32
        turns: cute.Tensor | None,  # (B * H * tiles, parts) int32 zeros; deterministic (semaphores.py)
        counter: cute.Tensor,  # (1,) int32, 0
        item_heads: Int32 | None,  # query heads of a work item; BackwardFacts.split_heads
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # see problem.problem_of; block mask
        score_tensors: tuple | None,  # tensors that score_mod reads
        score_sums: tuple | None,  # FP32 gradient accumulators of those that need a gradient
        scale_log2: Float32,
        softcap: Float32,
        scale: Float32,  # of dK
        left: Int32 | None,  # None with a block mask
        right: Int32 | None,
        offsets: tuple | None,  # (q_offset, k_offset); BackwardFacts.offsets
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        cfg, facts, loop = self.cfg, self.facts, self.mainloop
        p = problem_of(facts, (mQ, mK, mV, mdO, mdK, mdV), rows, (cu_q, cu_k), blocks, left, right, offsets, item_heads)
        # (S, D, H, B)
        tQ, tK, tV, tdO = (permuted(t, (2, 3, 1, 0)) for t in (p.mQ, p.mK, p.mV, p.mdO))
        layouts = loop.layouts()
        self.storage = loop.storage()
        self.smem_bytes = self.storage.size_in_bytes()
        tma_q, tQ = loop.make_load(tQ, layouts["sQ"], (loop.piece_rows, facts.head_dim))
        tma_k, tK = loop.make_load(tK, layouts["sK"], (cfg.tile_n, facts.head_dim))
        tma_v, tV = loop.make_load(tV, layouts["sV"], (cfg.tile_n, facts.head_dim_v))
        tma_do, tdO = loop.make_load(tdO, layouts["sdO"], (loop.piece_rows, facts.head_dim_v))
        size = const_expr(2 * cfg.tile_m)
        tRows = cute.make_tensor(rows.iterator, cute.make_layout((size, rows.shape[0]), stride=(1, size)))
        tma_rows, tRows = loop.make_load(tRows, self.rows_layout(), (size, 1))
        self.kernel(
            tma_q, tQ, tma_k, tK, tma_v, tV, tma_do, tdO, tma_rows, tRows, p.mdK, p.mdV, dq, turns, counter,
            loop.make_mmas(), p.source, p.scheduler, p.seqlens, scale_log2, softcap, scale,
            (score_tensors, score_sums),
        ).launch(
            grid=(cutlass.min(p.scheduler.most, max_ctas), 1, 1), block=(self.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=None if cfg.ctas == 1 else 100,  # without it the DSL would query a GPU
            stream=stream, use_pdl=True,
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
        tma_rows: cute.CopyAtom,
        mRows: cute.Tensor,  # (2 * tile_m, B * H * tiles)
        mdK: cute.Tensor,  # (B, Hkv, Sk, D); with split_heads (B, items, Sk, D)
        mdV: cute.Tensor,  # (B, Hkv, Sk, Dv), likewise
        dq: cute.Tensor,
        turns: cute.Tensor | None,
        counter: cute.Tensor,
        mmas: tuple,
        source,
        scheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        scale: Float32,
        score: tuple,
    ):
        cfg = self.cfg
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1  # -1: the producer
        if warp == 0:
            for tma in (tma_q, tma_k, tma_v, tma_do, tma_rows):
                cpasync.prefetch_descriptor(tma)

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipe_k, pipe_v, pipe_q, pipe_do, pipe_queue = self.mainloop.make_pipelines(storage, self.arrivals["queue"])
        queue = TileQueue(pipe_queue, storage.slots.get_tensor(cute.make_layout((FIELDS, SLOTS))), counter)
        cute.arch.griddepcontrol_wait()  # for the outputs of the prepare kernel
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[cfg.groups][0])
            if warp == 0:
                views = self.mainloop.views(storage, self.mainloop.layouts())
                operands = (tma_q, views["sQ"], mQ), (tma_do, views["sdO"], mdO)
                operands += (tma_k, views["sK"], mK), (tma_v, views["sV"], mV)
                pipes = pipe_k, pipe_v, pipe_q, pipe_do
                sRows = storage.rows.get_tensor(self.rows_layout())
                rows = self.partition_tiles(tma_rows, sRows, mRows, (2 * cfg.tile_m, 1))
                self.produce(operands, rows, pipes, queue, source, scheduler, seqlens)
            elif warp <= cfg.storing_warps:
                if const_expr(cfg.storing_warps > 0):
                    sums = storage.sums.data_ptr().toint()
                    self.store_dq(warp - 1, sums, (dq, turns), queue, source, scheduler, seqlens)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[cfg.groups][1])
            c = self.mainloop.consumer(mmas, group, storage, (pipe_v, pipe_q, pipe_do))
            at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.ring_q)
            at_kv = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
            at_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
            index = read_special_register("ctaid.x")
            fields = scheduler.fields(index)
            while index < scheduler.count:
                tile = KvTile(*fields)
                seqlen = seqlens.of(tile.b)
                if const_expr(not self.mainloop.by_units):
                    c.acc_dK.fill(0.0)
                    c.acc_dV.fill(0.0)
                pipe_k.consumer_wait(at_kv)
                if const_expr(not self.mainloop.v_apart):
                    pipe_v.consumer_wait(at_kv)
                if const_expr(self.facts.packed):
                    self.zero_rows_past_the_end(storage, cutlass.max(seqlen.cols - tile.n * cfg.tile_n, 0))
                terms, begun = (scale_log2, softcap, *score), at.count
                if const_expr(self.mainloop.by_units):
                    rings = at_q, at, at_kv
                    at_q, at = self.steps_by_units(c, storage, terms, source, scheduler, seqlen, tile, rings)
                else:
                    for g in cutlass.range(scheduler.item_heads, unroll=1):
                        work = self.work_of(g, terms, source, scheduler, seqlen, tile)
                        part = self.mainloop.dq_part(group)
                        to = self.dq_work_of(work.tiles, work.h, part, (dq, turns), scheduler, seqlens, seqlen, tile)
                        at = self.mainloop.steps(c, self.mainloop.work(work, to), at)
                pipe_k.consumer_release(at_kv)
                if const_expr(not self.mainloop.v_apart):
                    pipe_v.consumer_release(at_kv)
                at_kv.advance()
                if const_expr(not cfg.storing_warps):
                    self.mainloop.drain(c)  # other CTAs wait for the semaphores, this CTA for its dQ buffers' reads
                if const_expr(self.facts.ranges):
                    self.add(c, (mdK, mdV), tile, seqlen)
                if const_expr(self.facts.split_heads):
                    self.store_part(c, (mdK, mdV), tile, seqlen, scale, at.count != begun)
                index, fields = queue.consume(len(fields), at_queue)
                at_queue.advance()
                if const_expr(not self.facts.shared_kv):
                    self.store(c, (mdK, mdV), tile, seqlen, scale)

    @cute.jit
    def steps_by_units(
        self, c: Consumer, storage, terms: tuple, source, scheduler, seqlen, tile, rings: tuple
    ):  # fmt: skip
        """Process all query tiles that attend to a KV tile; returns the states of Q's and dO's rings after them.

        rings: the states of Q's, dO's and K's and V's rings before.
        """
        at_q, at, at_kv = rings
        begin = Int32(0)  # the first head that attends to the tile
        if const_expr(self.facts.blocks is not None):
            begin = self.first_head(source, scheduler, seqlen, tile)
        begun = at.count
        self.mainloop.begin(c, storage, self.work_of(begin, terms, source, scheduler, seqlen, tile), *rings)
        for g in cutlass.range(begin, scheduler.item_heads, unroll=1):
            work = self.work_of(g, terms, source, scheduler, seqlen, tile)
            self.mainloop.prefetch_row(c, work, Int32(g == begin))
            for i in cutlass.range(Int32(g == begin), work.tiles.count, unroll=1):
                at_q, at = self.mainloop.step(c, work, i, at_q, at, begun)
        steps = self.steps(source, scheduler, seqlen, tile)
        self.mainloop.finish(c, at_q, at, at_kv, begun, steps)
        if steps > 0:
            at_q.advance()
            at.advance()
        return at_q, at

    def work_of(self, g, terms: tuple, source, scheduler, seqlen, tile) -> Work:
        """The Work of the g-th query head of the work item. terms: Work's fields from scale_log2 on."""
        h = tile.head_group * scheduler.item_heads + g
        tiles = source.for_tile(tile, h, seqlen)
        return Work(source, tiles, seqlen, tile.b, h, tile.n * self.cfg.tile_n, *terms)

    def dq_work_of(self, tiles, h, part, memory: tuple, scheduler, seqlens, seqlen, tile) -> DqWork:
        """The destination of a consumer warpgroup's dQ of a head. part: index among the semaphores of a tile; memory:
        (dq_accum, semaphores)."""
        cfg, (dq, turns) = self.cfg, memory
        first = (seqlen.b * scheduler.heads + h) * scheduler.tiles_q
        first += seqlens.first_tile(seqlen, tile.b, cfg.tile_m)
        turn = turns.iterator.toint() + part * TURN if self.facts.deterministic else None
        return DqWork(tiles, first, dq.iterator.toint(), turn)

    @cute.jit
    def store(self, c: Consumer, gradients: tuple, tile, seqlen, scale: Float32):
        """Store dK and dV of this thread."""
        mdK, mdV = gradients
        col = tile.n * self.cfg.tile_n + self.mainloop.first_row()
        flat = cute.make_tensor(c.acc_dK.iterator, cute.make_layout(cute.size(c.acc_dK)))
        flat.store(flat.load() * scale)
        for acc, m in ((c.acc_dK, mdK), (c.acc_dV, mdV)):
            column = self.mainloop.first_column(c, acc)
            begin = cute.domain_offset((seqlen.k0, column), m[seqlen.b, tile.head_group, None, None])
            store_fragment(acc, begin, col, seqlen.cols)

    @cute.jit
    def store_part(self, c: Consumer, parts: tuple, tile, seqlen, scale: Float32, has_steps):
        """Store this work item's part of dK and dV; zeros if it has no query tile."""
        for acc in (c.acc_dK, c.acc_dV):
            for v in range_constexpr(cute.size(acc)):
                acc[v] = select_(has_steps, acc[v], Float32(0.0))
        self.store(c, parts, tile, seqlen, scale)

    @cute.jit
    def add(self, c: Consumer, sums: tuple, tile, seqlen):
        """Add dK, not scaled, and dV of this thread to FP32 accumulators."""
        mdK, mdV = sums
        col = tile.n * self.cfg.tile_n + self.mainloop.first_row()
        for acc, m in ((c.acc_dK, mdK), (c.acc_dV, mdV)):
            begin = cute.domain_offset((0, self.mainloop.first_column(c, acc)), m[tile.b, tile.head_group, None, None])
            add_fragment(acc, begin, col, seqlen.cols)

    @cute.jit
    def zero_rows_past_the_end(self, storage, valid: Int32):
        """Zero the rows of K and V that belong to the next sequence, possibly the whole tile."""
        if valid < self.cfg.tile_n:
            for place, layout in self.mainloop.lines_of_kv(storage):
                self.mainloop.zero_rows(place, layout, Int32(0), valid)

    # ------------------------------------------------------------------ producer's warpgroup

    @cute.jit
    def steps(self, source, scheduler, seqlen, tile) -> Int32:
        """Number of query tiles, over the item's heads, that attend to the CTA's KV tile."""
        count, heads = Int32(0), scheduler.item_heads
        for g in cutlass.range(heads, unroll=1):
            count += source.for_tile(tile, tile.head_group * heads + g, seqlen).count
        return count

    @cute.jit
    def first_head(self, source, scheduler, seqlen, tile) -> Int32:
        """The item's first query head with query tiles that attend to the CTA's KV tile; 0 if there is none."""
        first, heads = Int32(0), scheduler.item_heads
        for g in cutlass.range(heads, unroll=1):
            from_last = heads - 1 - g
            if source.for_tile(tile, tile.head_group * heads + from_last, seqlen).count > 0:
                first = from_last
        return first

    @cute.jit
    def store_dq(
        self, group: Int32, sums: Int32, memory: tuple, queue: TileQueue, source, scheduler, seqlens
    ):  # fmt: skip
        """Add a consumer warpgroup's parts of dQ to dq_accum, by one warp."""
        cfg, facts = self.cfg, self.facts
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.sums)
        at_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = KvTile(*fields)
            seqlen = seqlens.of(tile.b)
            left = self.steps(source, scheduler, seqlen, tile)
            for j in range_constexpr(cfg.sums):
                if left > 0:
                    self.dq_store.free(group, (at.index + j) % cfg.sums)
                left -= 1
            for g in cutlass.range(scheduler.item_heads, unroll=1):
                h = tile.head_group * scheduler.item_heads + g
                tiles = source.for_tile(tile, h, seqlen)
                to = self.dq_work_of(tiles, h, group, memory, scheduler, seqlens, seqlen, tile)
                if const_expr(facts.deterministic and cfg.sums == 2):
                    left, at = self.dq_store.store_in_turn(group, to, sums, left, at)
                else:
                    left, at = self.dq_store.store(group, to, sums, left, at)
            index, fields = queue.consume(len(fields), at_queue)
            at_queue.advance()

    @cute.jit
    def produce(self, operands: tuple, rows: tuple, pipes: tuple, queue: TileQueue, source, scheduler, seqlens):
        """Load this CTA's KV tiles, and all query tiles that attend to them.

        operands: (TMA atom, smem, tensor) of Q, dO, K and V. rows: `partition_tiles` of LSE and delta.
        """
        cfg, facts = self.cfg, self.facts
        q, do, k, v = operands
        pipe_k, pipe_v, _, _ = pipes
        at_kv = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.ring_q)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, facts.stages_do)
        at_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        step = cute.arch.grid_dim()[0]
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = KvTile(*fields)
            seqlen = seqlens.of(tile.b)
            q_part = self.partition(*q, (self.mainloop.piece_rows, facts.head_dim), seqlen.q0)
            do_part = self.partition(*do, (self.mainloop.piece_rows, facts.head_dim_v), seqlen.q0)
            k_part = self.partition(*k, (cfg.tile_n, facts.head_dim), seqlen.k0)
            v_part = self.partition(*v, (cfg.tile_n, facts.head_dim_v), seqlen.k0)
            place = tile.n, 0, scheduler.h_kv(tile), seqlen.b
            for pipe, part in ((pipe_v, v_part), (pipe_k, k_part)):  # V is released first
                pipe.producer_acquire(at_kv)
                self.load(part, place, pipe, at_kv, at_kv.index)
            at_kv.advance()
            last = (tile.head_group + 1) * scheduler.item_heads - 1
            count = self.mainloop.step_count(source.for_tile(tile, last, seqlen).count)
            number, fetch_at = index + step, cutlass.max(count - FETCH_AHEAD, 0)
            for g in cutlass.range(scheduler.item_heads, unroll=1):
                h = tile.head_group * scheduler.item_heads + g
                tiles = source.for_tile(tile, h, seqlen)
                first = (seqlen.b * scheduler.heads + h) * scheduler.tiles_q
                first += seqlens.first_tile(seqlen, tile.b, cfg.tile_m)
                for i in cutlass.range(self.mainloop.step_count(tiles.count), unroll=1):
                    # Early enough to hide its latency, and no earlier; see forward/kernel_sm90.py.
                    if (h == last) & (i == fetch_at):
                        number = queue.fetch(step)
                    numbers = self.mainloop.numbers(tiles, i)
                    self.load_step((q_part, do_part, rows), pipes, numbers, first, (h, seqlen.b), at_q, at)
                    at_q.advance()
                    at.advance()
            if count == 0:
                number = queue.fetch(step)
            number = queue.fetched(number, scheduler.count, step)
            index, fields = number, scheduler.fields(number)
            queue.publish(index, fields, at_queue)
            at_queue.advance()
        cute.arch.griddepcontrol_launch_dependents()

    def load_step(self, parts: tuple, pipes: tuple, numbers: list, first, head: tuple, at_q, at):
        """Load the query tiles `numbers` of a head and batch.

        parts: partitions of Q, dO and rows. The head's tiles in rows have indices from `first` on.
        """
        (q, do, rows), (_, _, pipe_q, pipe_do) = parts, pipes
        pieces = list(enumerate(self.mainloop.coordinates(numbers)))
        pipe_q.producer_acquire(at_q)
        for j, m in pieces:
            self.load(q, (m, 0, *head), pipe_q, at_q, at_q.index * len(pieces) + j)
        for j, m in enumerate(numbers):
            self.load(rows, (0, first + m), pipe_q, at_q, at_q.index * len(numbers) + j)
        pipe_do.producer_acquire(at)
        for j, m in pieces:
            self.load(do, (m, 0, *head), pipe_do, at, at.index * len(pieces) + j)

    def load(self, part: tuple, tile: tuple, pipe, at, index):
        """Load a tile of an operand to a free stage of its ring."""
        tma, sX, gX = part
        cute.copy(tma, gX[(None, *tile)], sX[None, index], tma_bar_ptr=pipe.producer_get_barrier(at))

    def rows_layout(self) -> cute.Layout:
        """Layout of the ring of LSE and delta, (2 * tile_m, 1, PIPE): LSE of a query tile, followed by its delta.

        They are loaded with TMA tensor copies. compute-sanitizer tracks only the threads that arrive at an mbarrier,
        and reports a copy without a tensor map (cp.async.bulk) as a write to data that other lanes still read.
        """
        size, stages = 2 * self.cfg.tile_m, self.cfg.ring_q * self.cfg.query_tiles
        return cute.make_layout((size, 1, stages), stride=(1, size, size))

    def partition(self, tma: cute.CopyAtom, smem: cute.Tensor, tensor: cute.Tensor, tile: tuple, begin) -> tuple:
        """(TMA atom, (TMA, PIPE), (TMA, rest_0, rest_1, heads, batch)) of an operand, for tiles from row `begin`."""
        if self.facts.packed:
            tensor = cute.domain_offset((begin, 0, 0, 0), tensor)
        return self.partition_tiles(tma, smem, tensor, tile)

    def partition_tiles(self, tma: cute.CopyAtom, smem: cute.Tensor, tensor: cute.Tensor, tile: tuple) -> tuple:
        """(TMA atom, (TMA, PIPE), (TMA, rest_0, rest_1, ...)) of all tiles of a tensor of any rank."""
        tiles = cute.local_tile(tensor, tile, (None,) * cute.rank(tensor))
        sX, gX = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return tma, sX, gX
