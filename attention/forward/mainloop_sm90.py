"""The sm_90 mainloop of attention: what consumers do with each tile of K and V, in forward and in decoding.

    ring       producer arrives          consumers arrive (per stage)
    K, V       1 thread + bytes of TMA   1 thread for each consumer warp; `stages` stages each

A consumer's step over K/V tile i, with S the scores, P their exponentials, both in registers (FlashAttention-3, Shah
et al. 2024):

    wait K[i] -> issue S' = Q K[i]' -> wait V[i-1] -> issue O += P V[i-1] -> wait S'
    softmax of S', release K[i] -> wait O -> P = S', O *= factor where a row's maximum has grown by much
    -> release V[i-1]

So the softmax of one tile runs while the tensor cores do the product of the tile before.

At head dimension 512 two warpgroups share their 64 rows (FlashFacts.sharers): each computes S' of half of Q's and K's
columns, adds the other's through shared memory, does the same softmax, and has half of O's columns.

The kernels differ in how
Q, K and V are loaded, how rows are packed, and what is stored.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.typing import AddressSpace
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.barriers import FORWARD_ORDER, FORWARD_SCORES, Arrivals
from cute_kernels.tile.element import VECTOR_BYTES
from cute_kernels.tile.hopper import ALIGN, smem_layout, start_product
from cute_kernels.tile.ptx import compute_before_waits, read_special_register

from .config import FlashFacts
from .kv_tiles import FULL
from .mask import cap_scores
from .mask_and_softmax import QueryWork, mask_and_softmax
from .recompute_scores import recompute_scores
from .softmax import OnlineSoftmax, rows_and_columns
from .tile_queue import FIELDS, SLOTS

WARPGROUP = 128
ROWS = 64  # of a consumer warpgroup


@dataclass(frozen=True)
class Consumer:
    """What a consumer warpgroup needs for all of its query tiles: operands, accumulators, the rings of K and V."""

    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    sQ: cute.Tensor  # (tile_m, D, 1)
    sK: cute.Tensor  # (tile_n, D, PIPE)
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K)
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tOrP: cute.Tensor  # (MMA, 1, MMA_K): P as the A operand; the accumulators' order is that of its k
    tOrV: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    acc_S: cute.Tensor  # (MMA, 1, MMA_N)
    acc_O: cute.Tensor  # (MMA, 1, MMA_N)
    softmax: OnlineSoftmax
    pipe_k: pipeline.PipelineAsync
    pipe_v: pipeline.PipelineAsync
    order: Int32 | None  # MainloopSm90.order
    exchange: Int32 | None = None  # where those that share rows exchange scores, 16 bytes of each thread, and so on


def in_steps(a: cute.Tensor, b: cute.Tensor) -> tuple:
    """(the fragments of each MMA step, how many steps), of (MMA, MMA_M or MMA_N, MMA_K)."""
    return lambda k: (a[None, None, k], b[None, None, k]), cute.size(b, mode=[2])


class MainloopSm90:
    """Steps over the tiles of K and V of one query tile; also the storage, products and rings that they need.

    lazy: whether steps after the first rescale O only where a row's maximum has grown by much, and full tiles first
    try to do without their row maxima (FlashFacts.skips_max).
    """

    def __init__(self, facts: FlashFacts, lazy: bool):
        self.facts, self.cfg, self.lazy = facts, facts.config, lazy
        self.dtype, self.dtype_v = cutlass_dtype(facts.dtype), cutlass_dtype(facts.values_dtype)  # of P, too
        self.sharers = facts.sharers
        self.columns = facts.head_dim_v // self.sharers  # of O, that a warpgroup has
        self.arrivals = Arrivals(1, 4 * facts.config.groups)  # of Q, K and V
        # Bytes and stages of a ring that V is loaded into, where it is not the one that products read (values_inside).
        self.given_bytes, self.given_stages = 0, 0

    # ------------------------------------------------------------------ storage, products, rings

    def layouts(self) -> tuple:
        """(sQ, sK, sV), the last two with stages."""
        cfg, facts = self.cfg, self.facts
        sQ = smem_layout(self.dtype, cfg.tile_m, facts.head_dim, 1, True)
        sK = smem_layout(self.dtype, cfg.tile_n, facts.head_dim, cfg.stages, True)
        # (Dv, tile_n), as B of P V; of 8 bits contiguous along tile_n, since tensor cores turn 16 bits alone
        sV = smem_layout(self.dtype_v, facts.head_dim_v, cfg.tile_n, cfg.stages, not facts.values_element.transposes)
        return sQ, sK, sV

    def storage(self) -> type:
        """The struct of a CTA's shared memory."""
        sizes = [cute.cosize(layout) for layout in self.layouts()]
        exchanged = self.facts.exchange_bytes // 4

        @cute.struct
        class SharedStorage:
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * self.cfg.stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2 * self.cfg.stages]
            barriers_queue: cute.struct.MemRange[cutlass.Int64, 2 * SLOTS]
            slots: cute.struct.MemRange[Int32, FIELDS * SLOTS]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], ALIGN]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], ALIGN]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype_v, sizes[2]], ALIGN]
            scores: cute.struct.MemRange[Float32, exchanged]
            given: cute.struct.MemRange[Int32, self.given_bytes // 4]
            barriers_given: cute.struct.MemRange[cutlass.Int64, 2 * self.given_stages]

        return SharedStorage

    def operands(self, storage) -> tuple:
        """(sQ, sK, sV) in the storage, with the layouts' swizzles."""
        return tuple(
            place.get_tensor(layout.outer, swizzle=layout.inner)
            for place, layout in zip((storage.sQ, storage.sK, storage.sV), self.layouts())
        )

    def make_mmas(self) -> tuple:
        """(S = Q K', O = P V) of all consumers."""
        k = cute.nvgpu.OperandMajorMode.K
        major = cute.nvgpu.OperandMajorMode.MN if self.facts.values_element.transposes else k
        groups = (self.cfg.groups // self.sharers, 1, 1)
        qk = sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, Float32, groups, (ROWS, self.cfg.tile_n))
        # Two CTAs an SM begin with 128 registers a thread, too few for an instruction that is 256 columns wide.
        wide = self.columns // (2 if self.cfg.ctas > 1 and self.facts.head_dim_v == 256 else 1)
        pv = sm90_utils.make_trivial_tiled_mma(
            self.dtype_v, self.dtype_v, k, major, Float32, groups, (ROWS, wide),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return qk, pv

    def make_load(self, tensor: cute.Tensor, layout, tile: tuple) -> tuple:
        """The TMA load of an operand's tiles: (atom, tensor)."""
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, cute.slice_(layout, (None, None, 0)), tile
        )

    def make_values_load(self, tensor: cute.Tensor, layout, tile: tuple) -> tuple:
        """The same of V."""
        return self.make_load(tensor, layout, tile)

    def make_ring(
        self, barriers, stages: int, elements: int, dtype: type, arrivals: Arrivals | None = None
    ) -> pipeline.PipelineAsync:
        """The pipeline of an operand whose stages have `elements` elements; its barriers are not yet visible to all."""
        arrivals = arrivals or self.arrivals
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.full),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.empty),
            tx_count=elements * dtype.width // 8,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def make_kv_rings(self, storage) -> tuple:
        """The pipelines of K and V."""
        cfg, facts = self.cfg, self.facts
        return (
            self.make_ring(storage.barriers_k, cfg.stages, cfg.tile_n * facts.head_dim, self.dtype),
            self.make_ring(storage.barriers_v, cfg.stages, cfg.tile_n * facts.head_dim_v, self.dtype_v),
        )

    def ring_of_loads(self, storage, sV: cute.Tensor, pipe_v) -> tuple:
        """What V is loaded into: (ring, pipeline, stages)."""
        return sV, pipe_v, self.cfg.stages

    def consumer(self, mmas: tuple, thread, operands: tuple, rings: tuple, scale_log2: Float32, order) -> Consumer:
        """A warpgroup's operands and registers; `thread` is its first one's number among the consumers."""
        cfg = self.cfg
        (mma_qk, mma_pv), (sQ, sK, sV), (pipe_k, pipe_v) = mmas, operands, rings
        thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, 0]
        tSrK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((cfg.tile_m, cfg.tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((cfg.tile_m, self.columns)), Float32)
        tOrP = cute.make_rmem_tensor(thr_pv.partition_shape_A((cfg.tile_m, cfg.tile_n)), self.dtype_v)
        softmax = self.make_softmax(scale_log2)
        return Consumer(
            mma_qk, mma_pv, sQ, sK, tSrQ, tSrK, tOrP, tOrV, acc_S, acc_O, softmax, pipe_k, pipe_v, order
        )  # fmt: skip

    def make_softmax(self, scale_log2: Float32) -> OnlineSoftmax:
        threshold = self.facts.rescale_threshold if self.lazy else 0.0
        return OnlineSoftmax.of_rows(2, scale_log2, rescale_threshold=threshold)

    def of_tile(self, c: Consumer, softcap: Float32, scales: tuple | None, tile) -> tuple:
        """(consumer, softcap) of one query tile, whose heads may have scales."""
        return c, softcap

    def of_keys(self, c: Consumer, work: QueryWork, i: Int32, kind: cutlass.Constexpr) -> Consumer:
        """The consumer of one tile of K and V, the i-th, which may have scales; before that is waited for."""
        return c

    def of_scores(self, c: Consumer, work: QueryWork) -> tuple:
        """(consumer, work) of the same tile, when its scores are there."""
        return c, work

    def value_scale(self, scales: tuple | None) -> cute.Tensor | None:
        """A register (1,) for what O is multiplied by at the end; None for nothing."""
        return None

    def read_value_scale(self, scales: tuple | None, tile, to: cute.Tensor | None):
        """Fill it for a query tile."""

    def sharing(self, c: Consumer, part: Int32, scores) -> Consumer:
        """The consumer with its part of those that share its rows: of the columns of Q, K and V. `scores`: storage."""
        steps = cute.size(c.tSrQ, mode=[2]) // self.sharers

        def mine(t: cute.Tensor, mode: int, size: int) -> cute.Tensor:
            parts = cute.logical_divide(t, (None,) * mode + (size,) + (None,) * (len(t.shape) - mode - 1))
            return parts[tuple((None, part) if i == mode else None for i in range(len(t.shape)))]

        parts = {"tSrQ": mine(c.tSrQ, 2, steps), "tSrK": mine(c.tSrK, 2, steps), "tOrV": mine(c.tOrV, 1, 1)}
        return replace(c, **parts, exchange=scores.data_ptr().toint())

    @cute.jit
    def add_scores(self, c: Consumer):
        """Add the other warpgroup's part of the scores; the sums are the same bits in both."""
        self.meet()  # the other has read those of the tile before
        for i in range_constexpr(cute.size(c.acc_S) // 4):
            cute.autovec_copy(
                cute.make_tensor(c.acc_S.iterator + 4 * i, cute.make_layout(4)), self.exchanged(c.exchange, i, 0)
            )
        self.meet()
        for i in range_constexpr(cute.size(c.acc_S) // 4):
            part = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(self.exchanged(c.exchange, i, WARPGROUP), part)
            for j in range_constexpr(4):
                c.acc_S[4 * i + j] = c.acc_S[4 * i + j] + part[j]

    def exchanged(self, base: Int32, i: int, other: int) -> cute.Tensor:
        """The i-th four scores of this thread or, with `other`, of the one so many threads before or after it."""
        number = (read_special_register("tid.x") - WARPGROUP) ^ other  # read anew: no register is held for it
        at = base + number * VECTOR_BYTES + i * (self.sharers * WARPGROUP * VECTOR_BYTES)
        return cute.make_tensor(
            make_ptr(Float32, at, AddressSpace.smem, assumed_align=VECTOR_BYTES), cute.make_layout(4)
        )

    def meet(self):
        cute.arch.barrier(barrier_id=FORWARD_SCORES, number_of_threads=self.sharers * WARPGROUP)

    # ------------------------------------------------------------------ ordered barrier

    def order(self, group: Int32) -> Int32:
        """Warpgroups issue products in turn (FlashFacts.ordered): a group's own barrier and, times 16, the next's."""
        numbers = FORWARD_ORDER + group + 16 * (FORWARD_ORDER + (group + 1) % self.cfg.groups)
        return cute.arch.make_warp_uniform(numbers)

    def order_wait(self, order: Int32 | None):
        if self.facts.ordered:
            cute.arch.barrier(barrier_id=order % 16, number_of_threads=2 * WARPGROUP)

    def order_arrive(self, order: Int32 | None):
        if self.facts.ordered:
            cute.arch.barrier_arrive(barrier_id=order // 16, number_of_threads=2 * WARPGROUP)

    # ------------------------------------------------------------------ steps

    @cute.jit
    def first_step(self, c: Consumer, work: QueryWork, at_k):
        """P of the first tile; returns the state of K's ring."""
        c = self.of_keys(c, work, 0, work.tiles.first)
        c.pipe_k.consumer_wait(at_k)
        self.order_wait(c.order)
        start_product(c.mma_qk, c.acc_S, *in_steps(c.tSrQ, c.tSrK[None, None, None, at_k.index]), True)
        self.order_arrive(c.order)
        warpgroup.wait_group(0)
        c, work = self.of_scores(c, work)
        c.pipe_k.consumer_release(at_k)
        at_k.advance()
        if const_expr(self.sharers > 1):
            self.add_scores(c)
        mask_and_softmax(self.facts, rows_and_columns(c.acc_S), c.softmax, work, 0, work.tiles.first)
        self.convert(c.acc_S, c.tOrP)
        return at_k

    @cute.jit
    def steps(self, c: Consumer, work: QueryWork, at_k, at_v):
        """All tiles after the first; returns the states of K's and V's rings."""
        for segment in range_constexpr(len(work.tiles.kinds)):
            begin = 1 if const_expr(segment == 0) else cutlass.max(work.tiles.ends[segment - 1], 1)
            for i in cutlass.range(begin, work.tiles.ends[segment], unroll=1):
                at_k, at_v = self.step(c, work, i, work.tiles.kinds[segment], at_k, at_v)
        return at_k, at_v

    @cute.jit
    def step(self, c: Consumer, work: QueryWork, i: Int32, kind: cutlass.Constexpr, at_k, at_v):
        """P of tile i, and O of the tile before; returns the states of K's and V's rings."""
        c, out = self.of_keys(c, work, i, kind), rows_and_columns(c.acc_O)
        c.pipe_k.consumer_wait(at_k)
        self.order_wait(c.order)
        start_product(c.mma_qk, c.acc_S, *in_steps(c.tSrQ, c.tSrK[None, None, None, at_k.index]), True)
        c.pipe_v.consumer_wait(at_v)
        start_product(c.mma_pv, c.acc_O, *in_steps(c.tOrP, c.tOrV[None, None, None, at_v.index]), False)
        self.order_arrive(c.order)
        warpgroup.wait_group(1)
        c, work = self.of_scores(c, work)
        softmax = c.softmax
        if const_expr(self.lazy and self.facts.skips_max and kind == FULL):
            grown = self.softmax_of_full_tile(c, work.softcap, at_k.index)
            c.pipe_k.consumer_release(at_k)
        else:
            c.pipe_k.consumer_release(at_k)
            if const_expr(self.sharers > 1):
                self.add_scores(c)
            grown = mask_and_softmax(self.facts, rows_and_columns(c.acc_S), softmax, work, i, kind, self.lazy)
        at_k.advance()
        # Two warpgroups gain nothing by it, and masked tiles leave no registers for it.
        if const_expr(self.cfg.groups == 3 and kind == FULL):
            compute_before_waits(*(softmax.row_sum[r] for r in range(2)), c.sQ.iterator.toint())
        warpgroup.wait_group(0)
        if const_expr(self.lazy):
            self.convert(c.acc_S, c.tOrP)
            if grown:
                softmax.rescale_lazily(out)
            c.pipe_v.consumer_release(at_v)  # after what others wait for
        else:
            c.pipe_v.consumer_release(at_v)
            self.convert(c.acc_S, c.tOrP)
            softmax.rescale(out)
        at_v.advance()
        return at_k, at_v

    def last_step(self, c: Consumer, at_v):
        """Issue O of the last tile; `finish` waits for it."""
        c.pipe_v.consumer_wait(at_v)
        start_product(c.mma_pv, c.acc_O, *in_steps(c.tOrP, c.tOrV[None, None, None, at_v.index]), False)

    def finish(self, c: Consumer, at_v):
        """Wait for the last product; returns the state of V's ring."""
        warpgroup.wait_group(0)
        c.pipe_v.consumer_release(at_v)
        at_v.advance()
        return at_v

    @cute.jit
    def softmax_of_full_tile(self, c: Consumer, softcap: Float32, stage: Int32):
        """Scores of a full tile to P, without their row maxima if possible. Returns whether O is to be rescaled.

        K's stage is not yet released. Some warps of a warpgroup may have to recompute their scores and others not, so
        nothing in between may concern the whole warpgroup: no wait for its products, and P V is still being computed.
        """
        softmax, scores, grown = c.softmax, rows_and_columns(c.acc_S), cutlass.Boolean(False)
        if const_expr(self.facts.softcap):
            cap_scores(scores, softcap)
        small, *sums = softmax.step_without_max(scores, self.cfg.groups < 3)
        if not small:
            self.recompute(c, stage)
            if const_expr(self.facts.softcap):
                cap_scores(scores, softcap)
            grown = softmax.step_lazily(scores, softmax.too_large(sums))
        return grown

    def recompute(self, c: Consumer, stage: Int32):
        """This warp's scores, once more."""
        recompute_scores(c.acc_S, c.sQ[None, None, 0], c.sK[None, None, stage], WARPGROUP // 32)

    def view_of_values(self, mV: cute.Tensor) -> cute.Tensor:
        """V (B, Hkv, Sk, Dv) as (Dv, Sk, Hkv, B)."""
        return permuted(mV, (3, 2, 1, 0))

    @cute.jit
    def convert(self, acc_S: cute.Tensor, tOrP: cute.Tensor):
        """P to 16 bits. Eight values at a time: as one vector it kept so many registers that WGMMAs were serialised."""
        for i in range_constexpr(0, cute.size(acc_S), 8):
            part = cute.make_tensor(acc_S.iterator + i, cute.make_layout(8))
            cute.make_tensor(tOrP.iterator + i, cute.make_layout(8)).store(part.load().to(self.dtype_v))


def permuted(tensor: cute.Tensor, modes: tuple) -> cute.Tensor:
    """The tensor with its modes in another order."""
    shape, stride = (tuple(v[i] for i in modes) for v in (tensor.shape, tensor.stride))
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
