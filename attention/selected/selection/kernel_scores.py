"""Kernel that computes an indexer's scores of KV blocks on sm_90: persistent, warp-specialized, TMA in, WGMMA.

    warpgroup 0      producer; one of its warps issues all TMA loads
    warpgroups 1, 2  consumers; each owns 64 rows of the query tile

    pipeline   producer arrives          consumers arrive (per stage)
    Q          1 thread + bytes of TMA   1 thread for each consumer warp; one stage, with the tiles of all heads
    K          1 thread + bytes of TMA   1 thread for each consumer warp; ScoreFacts.stages stages

A unit of work is a query tile and a KV tile that it sees (units.py). A CTA computes a run of consecutive units, those
of a query tile one after another, so that all CTAs have the same number of units but for one. With a ReLU, the product
of a head is added to the scores while that of the next head is computed, and one warpgroup's additions and stores
overlap with the other's products.

Scores, or their maxima over blocks, are stored from registers: a quad of lanes writes 32 consecutive bytes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.hopper import ALIGN, WARPGROUP, start_product
from cute_kernels.tile.ptx import read_special_register

from ...forward.mainloop_sm90 import in_steps
from ...forward.operand_sm90 import Operand, make_ring, permuted
from .score_config import GROUPS, TILE, ScoreFacts
from .units import Units

ROWS = 64  # of a consumer warpgroup
REGISTERS = (40, 232)  # per thread of (producer, consumers)


class BlockScores:
    """Compiles to one kernel per `ScoreFacts`."""

    cluster = 1

    def __init__(self, facts: ScoreFacts):
        self.facts, self.dtype = facts, cutlass_dtype(facts.dtype)
        self.threads = WARPGROUP * (1 + GROUPS)
        arrivals = Arrivals(1, 4 * GROUPS)
        self.arrivals = {"Q": arrivals, "K": arrivals}
        tile = TILE, facts.head_dim
        self.q = Operand(self.dtype, tile, facts.heads, arrivals, False)  # a stage per head
        self.k = Operand(self.dtype, tile, facts.stages, arrivals, False)
        self.storage = self.smem_bytes = None  # known once traced

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, G * heads, rows, D)
        mK: cute.Tensor,  # (B, 1 or G, keys, D)
        mS: cute.Tensor,  # (B * G, rows, blocks) float32
        first: Int32,  # position of row 0
        per: Int32,  # keys of a row of K if rows see keys up to their positions; 0: rows see all keys
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        layouts = self.q.layout(), self.k.layout()
        sizes = [cute.cosize(layout) for layout in layouts]

        @cute.struct
        class SharedStorage:
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * self.facts.stages]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], ALIGN]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], ALIGN]

        self.storage, self.smem_bytes = SharedStorage, SharedStorage.size_in_bytes()
        tQ, tK = (permuted(t, (2, 3, 1, 0)) for t in (mQ, mK))  # (S, D, H, B)
        tma_q, tQ = self.q.make_load(tQ)
        tma_k, tK = self.k.make_load(tK)
        k = cute.nvgpu.OperandMajorMode.K
        mma = sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, Float32, (GROUPS, 1, 1), (ROWS, TILE))
        keys = mK.shape[2]
        units = Units(per, (first + TILE - 1) // TILE, cute.ceil_div(mS.shape[1], TILE), cute.ceil_div(keys, TILE))
        count = mS.shape[0] * units.before(units.tiles_m)
        self.kernel(tma_q, tQ, tma_k, tK, mma, mS, first, keys, count, units).launch(
            grid=(cutlass.min(count, max_ctas), 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (rows, D, G * heads, B)
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,  # (keys, D, 1 or G, B)
        mma: cute.TiledMma,
        mS: cute.Tensor,  # (B * G, rows, blocks)
        first: Int32,
        keys: Int32,
        count: Int32,  # of units
        units: Units,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ, sK = (
            place.get_tensor(layout.outer, swizzle=layout.inner)
            for place, layout in ((storage.sQ, self.q.layout()), (storage.sK, self.k.layout()))
        )
        arrivals, bytes_q = self.arrivals["Q"], self.facts.heads * self.facts.tile_bytes
        pipe_q = make_ring(storage.barriers_q, 1, bytes_q, arrivals)
        pipe_k = self.k.make_ring(storage.barriers_k)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == 0:
                self.produce((tma_q, sQ, mQ, pipe_q), (tma_k, sK, mK, pipe_k), count, units)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.consume(mma, (sQ, sK, pipe_q, pipe_k), mS, first, keys, count, units)

    @cute.jit
    def produce(self, q: tuple, k: tuple, count: Int32, units: Units):
        """Load this CTA's query tiles and KV tiles."""
        (tma_q, sQ, mQ, pipe_q), (tma_k, sK, mK, pipe_k) = q, k
        tQsQ, tQgQ = self.q.partition(tma_q, sQ, mQ, (0, 0))
        tKsK, tKgK = self.k.partition(tma_k, sK, mK, (0, 0))
        state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.facts.stages)
        begin, end = self.run(count)
        at, lists = units.find(begin), mQ.shape[2] // self.facts.heads
        for unit in cutlass.range(begin, end, unroll=1):
            g, b, m, n = at.item % lists, at.item // lists, at.m, at.n
            at = units.next(at)
            if (unit == begin) | (n == 0):
                pipe_q.producer_acquire(state_q)
                for head in cutlass.range(self.facts.heads, unroll=1):
                    cute.copy(
                        tma_q, tQgQ[None, m, 0, g * self.facts.heads + head, b], tQsQ[None, head],
                        tma_bar_ptr=pipe_q.producer_get_barrier(state_q),
                    )  # fmt: skip
                state_q.advance()
            pipe_k.producer_acquire(at_k)
            cute.copy(
                tma_k, tKgK[None, n, 0, cutlass.min(g, mK.shape[2] - 1), b], tKsK[None, at_k.index],
                tma_bar_ptr=pipe_k.producer_get_barrier(at_k),
            )  # fmt: skip
            at_k.advance()

    def run(self, count: Int32) -> tuple:
        """This CTA's units, (begin, end) of `count`."""
        cta, ctas = read_special_register("ctaid.x"), read_special_register("nctaid.x")
        return Int32(Int64(cta) * count // ctas), Int32(Int64(cta + 1) * count // ctas)

    @cute.jit
    def consume(
        self,
        mma: cute.TiledMma,
        operands: tuple,
        mS: cute.Tensor,
        first: Int32,
        keys: Int32,
        count: Int32,
        units: Units,
    ):
        """Compute and store the scores of this CTA's units."""
        facts = self.facts
        sQ, sK, pipe_q, pipe_k = operands
        group = cute.arch.make_warp_uniform(read_special_register("tid.x") // WARPGROUP) - 1
        thr_mma = mma.get_slice(group * WARPGROUP)
        tSrQ = mma.make_fragment_A(thr_mma.partition_A(sQ))  # (MMA, 1, MMA_K, heads)
        tSrK = mma.make_fragment_B(thr_mma.partition_B(sK))  # (MMA, 1, MMA_K, PIPE)
        shape = thr_mma.partition_shape_C((TILE, TILE))
        score = cute.make_rmem_tensor(shape, Float32)  # (MMA, 1, 1), MMA: (2 columns, 2 rows 8 apart, TILE / 8)
        parts = [cute.make_rmem_tensor(shape, Float32) for _ in range(min(2, facts.heads))] if facts.relu else []
        state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, facts.stages)
        begin, end = self.run(count)
        at = units.find(begin)
        for unit in cutlass.range(begin, end, unroll=1):
            item, m, n = at.item, at.m, at.n
            if (unit == begin) | (n == 0):
                pipe_q.consumer_wait(state_q)
            pipe_k.consumer_wait(at_k)
            for head in range_constexpr(facts.heads):
                fragments = in_steps(tSrQ[None, None, None, head], tSrK[None, None, None, at_k.index])
                if const_expr(facts.relu):
                    start_product(mma, parts[head % 2], *fragments, True)
                    if const_expr(head > 0):
                        warpgroup.wait_group(1)
                        self.add(score, parts[(head - 1) % 2], head == 1)
                else:
                    start_product(mma, score, *fragments, head == 0)
            warpgroup.wait_group(0)
            pipe_k.consumer_release(at_k)
            at_k.advance()
            at = units.next(at)  # here, where fewer accumulators are in use than above
            if (unit == end - 1) | (at.n == 0):
                pipe_q.consumer_release(state_q)
                state_q.advance()
            if const_expr(facts.relu):
                self.add(score, parts[(facts.heads - 1) % 2], facts.heads == 1)
            thread = read_special_register("tid.x") - WARPGROUP  # read again rather than held in a register
            row = m * TILE + thread // 32 * 16 + thread % 32 // 4
            self.store(score, mS[item, None, None], row, n, first, keys)

    def add(self, score: cute.Tensor, part: cute.Tensor, clear: bool) -> None:
        """Add the ReLU of a head's products to the scores."""
        for i in range(cute.size(score)):
            value = self.larger(part[i], 0.0)
            score[i] = value if clear else score[i] + value

    @cute.jit
    def store(self, score: cute.Tensor, mS: cute.Tensor, row: Int32, n: Int32, first: Int32, keys: Int32):
        """Store a tile's scores, or the maxima of their blocks; `row`: the first of this thread's two."""
        facts = self.facts
        lane = cute.arch.lane_idx()
        values = cute.make_tensor(score.iterator, cute.make_layout((2, 2, TILE // 8)))  # (columns, rows, eights)
        column = n * TILE + lane % 4 * 2
        for r in range_constexpr(2):
            own = row + 8 * r
            line = mS.iterator.toint() + 4 * (own * Int64(mS.stride[0]))
            if const_expr(facts.pool > 1):
                self.mask(values, r, column, first + own + 1 if facts.causal else keys, keys)
            if const_expr(facts.pool == 1):
                for i in range_constexpr(TILE // 8):
                    if (own < mS.shape[0]) & (column + 8 * i < mS.shape[1]):
                        place = make_ptr(Float32, line + 4 * (column + 8 * i), AddressSpace.gmem, assumed_align=8)
                        cute.autovec_copy(values[None, r, i], cute.make_tensor(place, 2))
            elif const_expr(facts.pool == 4):
                for i in range_constexpr(TILE // 8):
                    value = self.across(self.larger(values[0, r, i], values[1, r, i]), 2)
                    self.write(mS, own, n * (TILE // 4) + 2 * i + lane % 4 // 2, value, lane % 2 == 0)
            else:
                eights = const_expr(facts.pool // 8)
                for j in range_constexpr(TILE // facts.pool):
                    value = values[0, r, j * eights]
                    for i in range_constexpr(eights):
                        for c in range_constexpr(2):
                            value = self.larger(value, values[c, r, j * eights + i])
                    self.write(mS, own, n * (TILE // facts.pool) + j, self.across(value, 4), lane % 4 == 0)

    @cute.jit
    def mask(self, values: cute.Tensor, r: cutlass.Constexpr, column: Int32, seen: Int32, keys: Int32):
        """-inf for the keys from `seen` on, and from `keys` on."""
        limit = cutlass.min(seen, keys) - column
        if limit < TILE:
            for i in range_constexpr(TILE // 8):
                for c in range_constexpr(2):
                    if 8 * i + c >= limit:
                        values[c, r, i] = Float32(-float("inf"))

    def larger(self, a, b) -> Float32:
        """The maximum; NaN if one of them is, as in torch."""
        return cute.arch.fmax(a, b, nan=True)

    def across(self, value: Float32, lanes: int) -> Float32:
        """The maximum over 2 or 4 neighboring lanes."""
        for distance in range(1, lanes // 2 + 1):
            value = self.larger(value, cute.arch.shuffle_sync_bfly(value, distance))
        return value

    @cute.jit
    def write(self, mS: cute.Tensor, row: Int32, block: Int32, value: Float32, writes):
        if writes & (row < mS.shape[0]) & (block < mS.shape[1]):
            mS[row, block] = value
