"""The sm_90 decode kernel: short Q and long K and V, bound by the bytes of K and V, which are read once.

    warps 0 to 3   consumers, one warpgroup: all 64 rows of the tile, into which query heads are packed (forward/heads)
    warp 4         producer, issues all TMA loads of K and V

    named barrier 1   the consumers, around loads of Q and zeroing of V

The pipelines and the consumers' steps are those of mainloop_sm90. Consumers also load Q, a few rows of many heads,
while the rings fill. The rings are deep: the bytes in flight, not the WGMMAs, determine the speed. Up to head dimension
128 two CTAs share an SM: while one begins or ends, the other loads.

There are fewer KV heads than SMs, so the tiles of each are split among CTAs (split-KV). Each split has its own softmax
and stores its O and LSE in FP32; a second kernel (combine.py) computes the result from them.

Both use programmatic dependent launch, this one also without splits: CTAs may start and initialize their barriers
before the preceding kernel in the stream has ended, if it allows that. They wait for its end before they access global
memory, so when a kernel has ended, so have all preceding ones. This kernel lets the next one start when its last loads
are issued, the combine kernel at once: its CTAs leave room for others.

With pages, a tile of K or V is loaded in boxes of at most a page's rows. The page indices of a tile are read while the
tile before is loaded; lane j reads that of box j.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.barriers import DECODE_CONSUMERS

from ..forward.config import DecodeFacts
from ..forward.mainloop_sm90 import ROWS, WARPGROUP, MainloopSm90
from ..forward.mask_and_softmax import QueryWork
from ..forward.operand_sm90 import make_load, permuted
from ..forward.softmax import rows_and_columns
from ..forward.softmax_policy import ExactMax
from ..forward.store_o import VECTOR
from .combine import combine_splits
from .pages import box_of_tile, pages_of_tile
from .problem import DecodeScheduler, SplitSource, problem_of
from .store import store_of_split

EVICT_FIRST = 0x12F0000000000000  # L2 policy for data read once, as createpolicy encodes it
LOADS = 4  # vectors of Q that a thread has in flight


class DecodeSm90:
    """Compiles to one kernel per `DecodeFacts`, plus the combine kernel with split-KV."""

    def __init__(self, facts: DecodeFacts):
        self.facts, self.cfg, self.store = facts, facts.config, store_of_split(facts)
        self.mainloop = MainloopSm90(facts, ExactMax(facts))
        self.dtype = self.mainloop.dtype
        self.threads = WARPGROUP + 32
        self.cluster = 1
        self.arrivals = {"K, V": self.mainloop.arrivals}
        self.box, self.boxes = facts.box, facts.config.tile_n // facts.box
        self.storage = self.smem_bytes = None  # known once traced

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D) or (pages, Hkv, page_size, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv) or (pages, Hkv, page_size, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        mSinks: cute.Tensor | None,  # (H,)
        mSeqlens: cute.Tensor | None,  # (B,) or (B, 2)
        mTable: cute.Tensor | None,  # (B, pages per sequence)
        score_tensors: tuple | None,  # inputs of the score_mod
        mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv) fp32
        mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq) fp32
        scale_log2: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        splits: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        cfg, facts, loop = self.cfg, self.facts, self.mainloop
        tK = permuted(mK, (2, 3, 1, 0))  # (S, D, Hkv, B or pages)
        tV = permuted(mV, (3, 2, 1, 0))  # (Dv, S, Hkv, B or pages)
        _, sK, sV = loop.layouts()
        self.storage = loop.storage()
        self.smem_bytes = self.storage.size_in_bytes()
        tma_k, tK = make_load(tK, self.boxed(sK, (self.box, facts.head_dim)), (self.box, facts.head_dim))
        tma_v, tV = make_load(tV, self.boxed(sV, (facts.head_dim_v, self.box)), (facts.head_dim_v, self.box))
        source, scheduler, seqlens = problem_of(facts, ROWS, mQ, mK, mSeqlens, mTable, (left, right), splits)
        qk, pv = loop.make_mmas()
        self.kernel(
            tma_k, tK, tma_v, tV, mQ, mO, mLSE, mTable, mPartO, mPartLSE, qk, pv, source, scheduler, seqlens,
            scale_log2, softcap, None if const_expr(facts.split) else mSinks, score_tensors,
        ).launch(
            grid=(cutlass.min(scheduler.count, max_ctas), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=100,  # not exported; otherwise the DSL would query a GPU
            use_pdl=True,
            stream=stream,
        )  # fmt: skip
        combine_splits(facts, True, (mPartO, mPartLSE), (mO, mLSE), splits, mSinks, stream)

    def boxed(self, layout, box: tuple):
        """A ring's layout (rows, cols, PIPE) divided into TMA boxes: (box rows, box cols, boxes)."""
        boxes = cute.flat_divide(layout, box)  # (box rows, box cols, boxes, 1, PIPE) or (.., 1, boxes, PIPE)
        return cute.group_modes(boxes, 2, 5)

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,  # (S, D, Hkv, B or pages)
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,  # (Dv, S, Hkv, B or pages)
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        mTable: cute.Tensor | None,  # (B, pages per sequence)
        mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv)
        mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq)
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        source: SplitSource,
        scheduler: DecodeScheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        mSinks: cute.Tensor | None,  # (H,); None with split-KV
        score_tensors: tuple | None,
    ):
        cfg, facts = self.cfg, self.facts
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if warp == 0:
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ, sK, sV = self.mainloop.operands(storage)
        pipe_k, pipe_v = self.mainloop.make_kv_rings(storage)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        cute.arch.griddepcontrol_wait()  # no global memory access before it

        if warp == 4:
            tKsK, tKgK = self.partition(tma_k, sK, mK, (self.box, facts.head_dim))
            tVsV, tVgV = self.partition(tma_v, sV, mV, (facts.head_dim_v, self.box))
            at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
            at_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages)
            for index in cutlass.range(first, scheduler.count, step, unroll=1):
                tile = scheduler.decode(index)
                seqlen = seqlens.of(tile.b)
                tiles = source.for_tile(tile, seqlen)
                if tiles.count > 0:
                    gK, gV = tKgK[None, None, 0, tile.h_kv, None], tVgV[None, 0, None, tile.h_kv, None]
                    pages, before = pages_of_tile(facts, mTable, tile.b, tiles.at(0)), Int32(0)
                    for i in cutlass.range(tiles.count, unroll=1):
                        after = pages_of_tile(facts, mTable, tile.b, tiles.at(cutlass.min(i + 1, tiles.count - 1)))
                        self.load_boxes(tma_k, gK, tKsK, pipe_k, at_k, tile, tiles.at(i), pages)
                        at_k.advance()
                        if i > 0:
                            self.load_boxes(tma_v, gV, tVsV, pipe_v, at_v, tile, tiles.at(i - 1), before)
                            at_v.advance()
                        before, pages = pages, after
                    self.load_boxes(tma_v, gV, tVsV, pipe_v, at_v, tile, tiles.at(tiles.count - 1), before)
                    at_v.advance()
            cute.arch.griddepcontrol_launch_dependents()
        else:
            c = self.mainloop.consumer((mma_qk, mma_pv), 0, (sQ, sK, sV), (pipe_k, pipe_v), scale_log2, None)
            softmax, acc_O, out = c.softmax, c.acc_O, rows_and_columns(c.acc_O)
            lse = cute.make_rmem_tensor(2, Float32)
            at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            at_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
            for index in cutlass.range(first, scheduler.count, step, unroll=1):
                tile = scheduler.decode(index)
                seqlen = seqlens.of(tile.b)
                tiles = source.for_tile(tile, seqlen)
                row = tile.m * ROWS + tidx // 32 * 16 + tidx % 32 // 4  # packed, like all rows here
                rows = source.heads.of_tile(tile, seqlen)
                sinks = source.heads.sink_registers(mSinks, 2)
                source.heads.read_sinks(mSinks, tile, row, sinks)  # loaded long before they are used
                if tiles.count > 0:
                    self.load_q(rows.view(mQ), sQ, tile.m * ROWS, rows.end, tidx)
                softmax.clear()
                acc_O.fill(0.0)
                if tiles.count > 0:
                    work = QueryWork(source, tiles, tile, seqlen, row, softcap, score_tensors)
                    at_k = self.mainloop.first_step(c, work, at_k)
                    if const_expr(facts.seqlens):
                        # V's rows past the end may hold NaN, and 0 times NaN is NaN.
                        valid = seqlen.cols - tiles.at(0) * cfg.tile_n
                        if valid < cfg.tile_n:
                            pipe_v.consumer_wait(at_v)
                            self.clear_rows(sV[None, None, at_v.index], valid, tidx)
                    at_k, at_v = self.mainloop.steps(c, work, at_k, at_v)
                    self.mainloop.last_step(c, at_v)
                    at_v = self.mainloop.finish(c, at_v)
                softmax.finish(out, lse, sinks)
                outputs = (mPartO, mPartLSE) if const_expr(facts.split) else (mO, mLSE)
                self.store(acc_O, lse, *outputs, rows, row, 0, cute.arch.lane_idx(), True)

    @cute.jit
    def load_q(self, mQ: cute.Tensor, sQ: cute.Tensor, first: Int32, rows: Int32, tidx: Int32):
        """Load a tile of packed rows (rows, D) to (ROWS, D, 1); rows past the end become zeros."""
        vectors = const_expr(self.facts.head_dim // VECTOR)  # of a row
        each = const_expr(ROWS * vectors // WARPGROUP)
        for begin in range_constexpr(0, each, LOADS):
            vectors_of_q = cute.make_rmem_tensor((VECTOR, LOADS), self.dtype)
            vectors_of_q.fill(0.0)
            for i in range_constexpr(min(LOADS, each - begin)):
                number = tidx + (begin + i) * WARPGROUP
                row, column = first + number // vectors, number % vectors * VECTOR
                if row < rows:
                    at = (mQ[row, None].iterator + column).toint()
                    place = cute.make_ptr(self.dtype, at, AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(VECTOR)), vectors_of_q[None, i])
            if const_expr(begin == 0):
                self.sync()  # all warps have finished their WGMMAs with the tile before
            for i in range_constexpr(min(LOADS, each - begin)):
                number = tidx + (begin + i) * WARPGROUP
                place = cute.local_tile(sQ[None, None, 0], (1, VECTOR), (number // vectors, number % vectors))
                cute.autovec_copy(vectors_of_q[None, i], place[0, None])
        cute.arch.fence_view_async_shared()
        self.sync()

    @cute.jit
    def clear_rows(self, sV: cute.Tensor, valid: Int32, tidx: Int32):
        """Zero the rows from `valid` on of a tile (Dv, tile_n) of V."""
        vectors = const_expr(self.facts.head_dim_v // VECTOR)
        zeros = cute.make_rmem_tensor(VECTOR, self.dtype)
        zeros.fill(0.0)
        for number in cutlass.range(valid * vectors + tidx, self.cfg.tile_n * vectors, WARPGROUP, unroll=1):
            place = cute.local_tile(sV, (VECTOR, 1), (number % vectors, number // vectors))
            cute.autovec_copy(zeros, place[None, 0])
        cute.arch.fence_view_async_shared()
        self.sync()

    def sync(self):
        cute.arch.barrier(barrier_id=DECODE_CONSUMERS, number_of_threads=WARPGROUP)

    @cute.jit
    def load_boxes(
        self, tma: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor, pipe, state, tile, n: Int32, pages: Int32
    ):
        """Load tile n, (TMA, boxes of B or of a page, B or pages) to (TMA, boxes, PIPE), as soon as its stage is free.

        An invalid page is outside the tensor, so TMA writes zeros.
        """
        pipe.producer_acquire(state)
        for j in range_constexpr(self.boxes):
            number, b = box_of_tile(self.facts, pages, tile.b, n, j)
            cute.copy(
                tma, gX[None, number, b], sX[None, j, state.index],
                tma_bar_ptr=pipe.producer_get_barrier(state), cache_policy=Int64(EVICT_FIRST),
            )  # fmt: skip

    def partition(self, tma: cute.CopyAtom, smem: cute.Tensor, tensor: cute.Tensor, box: tuple) -> tuple:
        """(TMA, boxes, PIPE) and (TMA, rest_0, rest_1, heads, batch or pages) of an operand."""
        boxes = cute.flat_divide(smem, box)  # (box, box, rest_0, rest_1, PIPE)
        boxes = cute.group_modes(cute.group_modes(boxes, 0, 2), 1, 3)
        tiles = cute.local_tile(tensor, box, (None, None, None, None))
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), boxes, cute.group_modes(tiles, 0, 2))
