"""The sm_90 attention kernel: persistent, warp-specialised, TMA in, WGMMA, O straight from registers.

    warpgroup 0      producer; one of its warps issues all TMA loads, the others idle
    warpgroups 1..   consumers; each owns 64 rows of the query tile

    pipeline   producer arrives          consumers arrive (per stage)
    Q          1 thread + bytes of TMA   1 thread for each consumer warp; one stage
    K, V       1 thread + bytes of TMA   1 thread for each consumer warp; `stages` stages each
    queue      the producer warp         all consumer threads; tile_queue.SLOTS stages (FlashConfig.dynamic)

A consumer's step over K/V tile i, with S the scores, P their exponentials, both in registers (FlashAttention-3, Shah
et al. 2024):

    wait K[i] -> issue S' = Q K[i]' -> wait V[i-1] -> issue O += P V[i-1] -> wait S'
    softmax of S', release K[i] -> wait O -> P = S', O *= factor where a row's largest score has grown by much
    -> release V[i-1]

So the softmax of one tile runs while the tensor cores do the product of the tile before. Between warpgroups, turns by
named barriers (FlashFacts.ordered): while one of them does its softmax, another has the tensor cores.

A full tile's softmax is first tried without asking for the largest scores (FlashFacts.skips_max). If that fails, a warp
computes its scores again, for which K[i] is kept until then.

    group 0    | QK, PV | softmax        | QK, PV | softmax ...
    group 1             | QK, PV | softmax        | QK, PV | ...

O needs no shared memory, so the next query tile's Q is loaded as soon as this one's last scores are done.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.gemm_sm90 import ALIGN, smem_layout
from cute_kernels.tile.ptx import finish_first, read_here

from .config import FlashFacts
from .kv_tiles import FULL, WindowSource
from .mask import cap_scores
from .mask_and_softmax import MaskAndSoftmax
from .recompute_scores import recompute_scores
from .scheduler import QueryScheduler
from .seqlen import DenseSeqlens
from .softmax import OnlineSoftmax, rows_and_columns
from .store_o import store_rows
from .tile_queue import FIELDS, SLOTS, TileQueue
from .zero_oob_rows import zero_oob_rows

WARPGROUP = 128
ROWS = 64  # of a consumer warpgroup
ORDER_BARRIER = 1  # named barriers 1, 2, ..: each consumer's turn
FETCH_AHEAD = 6  # tiles of K and V that are left of a query tile when the next one is drawn
OOB_BARRIER = 8  # named barriers 8, 9, ..: of the warps of each consumer

# Registers a thread of (producer, consumers), by number of consumers: what setmaxnreg makes of 65,536.
# With one of them an SM may have two CTAs.
REGISTERS = {1: (24, 232), 2: (24, 240), 3: (32, 160)}


class FlashForwardSm90(MaskAndSoftmax):
    """Compiles to one kernel per `FlashFacts`."""

    def __init__(self, facts: FlashFacts):
        cfg = facts.config
        self.facts, self.cfg = facts, cfg
        self.dtype = cutlass_dtype(facts.dtype)
        self.threads = WARPGROUP * (1 + cfg.groups)
        self.smem_bytes = None  # known once traced

    # ------------------------------------------------------------------ storage

    def layouts(self) -> tuple:
        """(sQ, sK, sV), the last two with stages."""
        cfg, facts = self.cfg, self.facts
        sQ = smem_layout(self.dtype, cfg.tile_m, facts.head_dim, 1, True)
        sK = smem_layout(self.dtype, cfg.tile_n, facts.head_dim, cfg.stages, True)
        sV = smem_layout(self.dtype, facts.head_dim_v, cfg.tile_n, cfg.stages, False)  # (Dv, tile_n), as B of P V
        return sQ, sK, sV

    def make_storage(self, sQ, sK, sV):
        sizes = [cute.cosize(layout) for layout in (sQ, sK, sV)]

        @cute.struct
        class SharedStorage:
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * self.cfg.stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2 * self.cfg.stages]
            barriers_queue: cute.struct.MemRange[cutlass.Int64, 2 * SLOTS]
            slots: cute.struct.MemRange[Int32, FIELDS * SLOTS]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], ALIGN]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], ALIGN]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[2]], ALIGN]

        self.storage = SharedStorage
        self.smem_bytes = SharedStorage.size_in_bytes()

    # ------------------------------------------------------------------ atoms

    def make_mmas(self) -> tuple:
        """(S = Q K', O = P V) of all consumers."""
        k, mn = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        groups = (self.cfg.groups, 1, 1)
        qk = sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, Float32, groups, (ROWS, self.cfg.tile_n))
        # Two CTAs an SM begin with 128 registers a thread, too few for an instruction that is 256 columns wide.
        wide = self.facts.head_dim_v // (2 if self.cfg.ctas > 1 and self.facts.head_dim_v == 256 else 1)
        pv = sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, k, mn, Float32, groups, (ROWS, wide),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return qk, pv

    def make_load(self, tensor: cute.Tensor, layout, tile: tuple):
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, cute.slice_(layout, (None, None, 0)), tile
        )

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        counter: cute.Tensor | None,  # (1,) int32, 0: of a dynamic schedule
        scale_log2: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        scheduler = QueryScheduler.of(self.facts, mQ.shape, mK.shape)
        seqlens = DenseSeqlens(mQ.shape[2], mK.shape[2])
        self.launch(
            mQ, mK, mV, mO, mLSE, counter, scheduler, seqlens, self.window(left, right), scale_log2, softcap, max_ctas,
            stream,
        )  # fmt: skip

    def window(self, left: Int32, right: Int32) -> WindowSource:
        return WindowSource(self.facts.window, self.cfg.tile_m, self.cfg.tile_n, left, right)

    @cute.jit
    def launch(
        self, mQ, mK, mV, mO, mLSE, counter, scheduler, seqlens, source, scale_log2, softcap, max_ctas, stream
    ):  # fmt: skip
        """The kernel: `scheduler` names query tiles, `lengths` how long items are, `source` tiles of K and V."""
        cfg, facts = self.cfg, self.facts
        # (S, D, H, B), and V as (D, S, H, B)
        mQ, mK, mO = (self.permuted(t, (2, 3, 1, 0)) for t in (mQ, mK, mO))
        mV = self.permuted(mV, (3, 2, 1, 0))
        sQ, sK, sV = self.layouts()
        self.make_storage(sQ, sK, sV)
        tma_q, tQ = self.make_load(mQ, sQ, (cfg.tile_m, facts.head_dim))
        tma_k, tK = self.make_load(mK, sK, (cfg.tile_n, facts.head_dim))
        tma_v, tV = self.make_load(mV, sV, (facts.head_dim_v, cfg.tile_n))
        qk, pv = self.make_mmas()
        self.kernel(
            tma_q, tQ, tma_k, tK, tma_v, tV, mO, mLSE, counter, qk, pv, source, scheduler, seqlens, scale_log2, softcap,
        ).launch(
            grid=(cutlass.min(scheduler.count, max_ctas), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=None if cfg.ctas == 1 else 100,  # unnamed, the DSL would ask a GPU for it
            stream=stream,
        )  # fmt: skip

    def permuted(self, tensor: cute.Tensor, modes: tuple) -> cute.Tensor:
        shape, stride = (tuple(v[i] for i in modes) for v in (tensor.shape, tensor.stride))
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (Sq, D, H, B)
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,  # (Sk, D, Hkv, B)
        tma_v: cute.CopyAtom,
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
    ):
        cfg, facts = self.cfg, self.facts
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1  # -1: the producer
        step = cute.arch.grid_dim()[0]
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)

        layouts = self.layouts()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        sQ, sK, sV = (
            place.get_tensor(layout.outer, swizzle=layout.inner)
            for place, layout in zip((storage.sQ, storage.sK, storage.sV), layouts)
        )
        pipe_q, pipe_k, pipe_v, pipe_queue = self.make_pipelines(storage)
        if const_expr(facts.packed):
            scheduler = scheduler.counted(step)
        queue = None
        if const_expr(cfg.dynamic):
            queue = TileQueue(pipe_queue, storage.slots.get_tensor(cute.make_layout((FIELDS, SLOTS))), counter)

        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[cfg.groups][0])
            if warp == 0:
                state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
                at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
                at_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
                state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
                index = read_here("ctaid.x")
                fields = scheduler.fields(index)
                while index < scheduler.count:
                    tile = scheduler.of_fields(fields)
                    seqlen = seqlens.of(tile.b)
                    tiles = source.for_tile(tile, seqlen)
                    tQsQ, tQgQ = self.partition(tma_q, sQ, mQ, (cfg.tile_m, facts.head_dim), (seqlen.q0, 0))
                    tKsK, tKgK = self.partition(tma_k, sK, mK, (cfg.tile_n, facts.head_dim), (seqlen.k0, 0))
                    tVsV, tVgV = self.partition(tma_v, sV, mV, (facts.head_dim_v, cfg.tile_n), (0, seqlen.k0))
                    # The next tile's number is asked for so early that it is there in time, and no earlier: of tiles
                    # taken long before they are begun, the last ones are left to those who are busy.
                    number, ask = index + step, cutlass.max(tiles.count - FETCH_AHEAD, 1)
                    if tiles.count > 0:
                        # In the order in which they are waited for; Q's place is free later than K's.
                        gK, gV = tKgK[None, None, 0, tile.h_kv, seqlen.b], tVgV[None, 0, None, tile.h_kv, seqlen.b]
                        # A tile's number may be a load, so it is asked for one step ahead, once past the end.
                        n, ahead = tiles.at(0), tiles.at(1)
                        gQ = tQgQ[None, tile.m, 0, tile.h, seqlen.b]
                        # To L2, long before there is a place for it. At 256 it is no faster, and at 96 and 192 the
                        # producer has no registers.
                        if const_expr(facts.head_dim in (64, 128)):
                            cute.prefetch(tma_q, gQ)
                        self.load(tma_k, gK[None, n], tKsK, pipe_k, at_k)
                        at_k.advance()
                        self.load(tma_q, gQ, tQsQ, pipe_q, state_q)
                        state_q.advance()
                        for i in cutlass.range(1, tiles.count, unroll=1):
                            if const_expr(cfg.dynamic):
                                if i == ask:
                                    number = queue.fetch(step)
                            before, n = n, ahead
                            ahead = tiles.at(i + 1)
                            self.load(tma_k, gK[None, n], tKsK, pipe_k, at_k)
                            at_k.advance()
                            self.load(tma_v, gV[None, before], tVsV, pipe_v, at_v)
                            at_v.advance()
                        self.load(tma_v, gV[None, n], tVsV, pipe_v, at_v)
                        at_v.advance()
                    if const_expr(cfg.dynamic):
                        if tiles.count < 2:
                            number = queue.fetch(step)
                        number = queue.fetched(number, scheduler.count, step)
                    index, fields = number, scheduler.fields(number)
                    if const_expr(cfg.dynamic):
                        queue.publish(index, fields, state_queue)
                        state_queue.advance()
        else:
            cute.arch.setmaxregister_increase(REGISTERS[cfg.groups][1])
            groups = cute.make_layout(cfg.groups, stride=WARPGROUP)
            thr_qk, thr_pv = mma_qk.get_slice(groups(group)), mma_pv.get_slice(groups(group))
            tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, 0]  # (MMA, 1, MMA_K)
            tSrK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))  # (MMA, 1, MMA_K, PIPE)
            tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))  # (MMA, 1, MMA_K, PIPE)
            acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((cfg.tile_m, cfg.tile_n)), Float32)
            acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((cfg.tile_m, facts.head_dim_v)), Float32)
            # P as the A operand: the accumulators' order is that of its k.
            tOrP = cute.make_rmem_tensor(thr_pv.partition_shape_A((cfg.tile_m, cfg.tile_n)), self.dtype)
            scores, out = rows_and_columns(acc_S), rows_and_columns(acc_O)
            softmax = OnlineSoftmax.of_rows(2, scale_log2, slack=facts.slack)
            lse = cute.make_rmem_tensor(2, Float32)
            state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
            at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            at_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
            order = self.order(group)
            if const_expr(self.facts.ordered):
                if group == cfg.groups - 1:
                    self.ordered_arrive(order)  # group 0 goes first
            index = read_here("ctaid.x")
            fields = scheduler.fields(index) if const_expr(cfg.dynamic) else ()
            while index < scheduler.count:
                tile = scheduler.of_fields(fields) if const_expr(cfg.dynamic) else scheduler.decode(index)
                seqlen = seqlens.of(tile.b)
                tiles = source.for_tile(tile, seqlen)
                row = self.first_row(tile)
                softmax.clear()
                acc_O.fill(0.0)
                if tiles.count > 0:
                    # The first tile's scores.
                    pipe_q.consumer_wait(state_q)
                    pipe_k.consumer_wait(at_k)
                    self.ordered_wait(order)
                    self.issue(mma_qk, acc_S, tSrQ, tSrK[None, None, None, at_k.index], True)
                    self.ordered_arrive(order)
                    warpgroup.wait_group(0)
                    pipe_k.consumer_release(at_k)
                    at_k.advance()
                    self.mask_and_softmax(scores, softmax, source, tiles, 0, row, tile, seqlen, softcap, tiles.first)
                    self.convert(acc_S, tOrP)
                    if const_expr(facts.packed):
                        valid = seqlen.cols - tiles.at(0) * cfg.tile_n
                        if valid < cfg.tile_n:
                            pipe_v.consumer_wait(at_v)
                            ring = storage.sV.data_ptr().toint()
                            zero_oob_rows(
                                ring, layouts[2].outer, at_v.index, valid,
                                tidx % WARPGROUP, WARPGROUP, OOB_BARRIER + group,
                            )  # fmt: skip
                    for segment in range_constexpr(len(tiles.kinds)):
                        begin = 1 if const_expr(segment == 0) else cutlass.max(tiles.ends[segment - 1], 1)
                        for i in cutlass.range(begin, tiles.ends[segment], unroll=1):
                            pipe_k.consumer_wait(at_k)
                            self.ordered_wait(order)
                            self.issue(mma_qk, acc_S, tSrQ, tSrK[None, None, None, at_k.index], True)
                            pipe_v.consumer_wait(at_v)
                            self.issue(mma_pv, acc_O, tOrP, tOrV[None, None, None, at_v.index], False)
                            self.ordered_arrive(order)
                            warpgroup.wait_group(1)
                            if const_expr(facts.skips_max and tiles.kinds[segment] == FULL):
                                sK_i = sK[None, None, at_k.index]
                                grown = self.softmax_of_full_tile(acc_S, softmax, sQ[None, None, 0], sK_i, softcap)
                                pipe_k.consumer_release(at_k)
                            else:
                                pipe_k.consumer_release(at_k)
                                kind = const_expr(tiles.kinds[segment])
                                grown = self.mask_and_softmax(
                                    scores, softmax, source, tiles, i, row, tile, seqlen, softcap, kind, True
                                )
                            at_k.advance()
                            # With two warpgroups nothing is gained by it, and tiles that are masked have no registers.
                            if const_expr(cfg.groups == 3 and tiles.kinds[segment] == FULL):
                                finish_first(*(softmax.total[r] for r in range(2)), sQ.iterator.toint())
                            warpgroup.wait_group(0)
                            self.convert(acc_S, tOrP)
                            if grown:
                                softmax.rescale_lazily(out)
                            pipe_v.consumer_release(at_v)  # after what others wait for
                            at_v.advance()
                    pipe_q.consumer_release(state_q)
                    state_q.advance()
                    pipe_v.consumer_wait(at_v)
                    self.issue(mma_pv, acc_O, tOrP, tOrV[None, None, None, at_v.index], False)
                    # While the last product runs. Its wait must stand in its branch, or ptxas waits after each of its
                    # instructions: so this stands in both.
                    if const_expr(cfg.dynamic):
                        index, fields = queue.consume(len(fields), state_queue)
                    warpgroup.wait_group(0)
                    pipe_v.consumer_release(at_v)
                    at_v.advance()
                elif const_expr(cfg.dynamic):
                    index, fields = queue.consume(len(fields), state_queue)
                softmax.finish(out, lse)
                store_rows(
                    acc_O, cute.domain_offset((seqlen.q0, 0), mO[None, None, tile.h, seqlen.b]), row, seqlen.rows
                )
                if const_expr(mLSE is not None):
                    if tidx % 4 == 0:
                        for r in range_constexpr(2):
                            if row + 8 * r < seqlen.rows:
                                mLSE[seqlen.b, tile.h, seqlen.q0 + row + 8 * r] = lse[r]
                if const_expr(cfg.dynamic):
                    state_queue.advance()
                else:
                    index += step

    def first_row(self, tile) -> Int32:
        """Of this thread's two rows of the query tile the first."""
        thread = read_here("tid.x") - WARPGROUP
        return tile.m * self.cfg.tile_m + thread // 32 * 16 + thread % 32 // 4

    @cute.jit
    def softmax_of_full_tile(self, acc_S: cute.Tensor, softmax: OnlineSoftmax, sQ, sK, softcap: Float32):
        """Scores of a full tile to P, blindly or not. Returns whether O is to be rescaled.

        sQ: (tile_m, D); sK: (tile_n, D), not yet released. Some warps of a warpgroup may have to weigh again and others
        not, so that nothing in between may be the warpgroup's: no wait for its products, and P V is still on its way.
        """
        scores, grown = rows_and_columns(acc_S), cutlass.Boolean(False)
        if const_expr(self.facts.softcap):
            cap_scores(scores, softcap)
        if not softmax.step_without_max(scores, self.cfg.groups < 3):
            recompute_scores(acc_S, sQ, sK, WARPGROUP // 32)
            if const_expr(self.facts.softcap):
                cap_scores(scores, softcap)
            grown = softmax.step_lazily(scores)
        return grown

    @cute.jit
    def load(self, tma: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor, pipe, state):
        """Load a tile, (TMA,) of (TMA, PIPE), as soon as its place is free."""
        pipe.producer_acquire(state)
        cute.copy(tma, gX, sX[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))

    @cute.jit
    def convert(self, acc_S: cute.Tensor, tOrP: cute.Tensor):
        """P to 16 bits. Eight values at a time: as one vector it kept so many registers that WGMMAs were serialised."""
        for i in range_constexpr(0, cute.size(acc_S), 8):
            part = cute.make_tensor(acc_S.iterator + i, cute.make_layout(8))
            cute.make_tensor(tOrP.iterator + i, cute.make_layout(8)).store(part.load().to(self.dtype))

    @cute.jit
    def issue(self, tiled_mma: cute.TiledMma, acc, tCrA, tCrB, zero_init: cutlass.Constexpr):
        """Issue and commit one product, as one group."""
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
        for k in range_constexpr(cute.size(tCrB, mode=[2])):
            cute.gemm(atom, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def order(self, group: Int32) -> Int32:
        """The barrier at which a group waits for its turn and, times 16, that of the next group."""
        numbers = ORDER_BARRIER + group + 16 * (ORDER_BARRIER + (group + 1) % self.cfg.groups)
        return cute.arch.make_warp_uniform(numbers)

    def ordered_wait(self, order: Int32):
        if self.facts.ordered:
            cute.arch.barrier(barrier_id=order % 16, number_of_threads=2 * WARPGROUP)

    def ordered_arrive(self, order: Int32):
        if self.facts.ordered:
            cute.arch.barrier_arrive(barrier_id=order // 16, number_of_threads=2 * WARPGROUP)

    def partition(self, tma: cute.CopyAtom, smem: cute.Tensor, tensor: cute.Tensor, tile: tuple, begin: tuple) -> tuple:
        """(TMA, PIPE) and (TMA, rest_0, rest_1, heads, batch) of an operand whose tiles begin at `begin`."""
        if self.facts.packed:
            tensor = cute.domain_offset((*begin, 0, 0), tensor)
        tiles = cute.local_tile(tensor, tile, (None, None, None, None))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def make_pipelines(self, storage) -> tuple:
        """(Q, K, V, queue); returns after every barrier is visible."""
        cfg, facts = self.cfg, self.facts
        consumers = pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * cfg.groups)
        sizes = (cfg.tile_m * facts.head_dim, cfg.tile_n * facts.head_dim, cfg.tile_n * facts.head_dim_v)
        pipes = []
        for place, stages, size in zip(
            (storage.barriers_q, storage.barriers_k, storage.barriers_v), (1, cfg.stages, cfg.stages), sizes
        ):
            pipes.append(
                pipeline.PipelineTmaAsync.create(
                    barrier_storage=place.data_ptr(),
                    num_stages=stages,
                    producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                    consumer_group=consumers,
                    tx_count=size * self.dtype.width // 8,
                    cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                    defer_sync=True,
                )
            )
        pipes.append(None)
        if const_expr(cfg.dynamic):
            pipes[-1] = pipeline.PipelineAsync.create(
                barrier_storage=storage.barriers_queue.data_ptr(),
                num_stages=SLOTS,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPGROUP * cfg.groups),
                defer_sync=True,
            )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        return tuple(pipes)
