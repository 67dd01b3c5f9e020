"""The sm_90 mainloop of attention: the consumers' steps for each KV tile, in forward and in decode.

    ring       producer arrives          consumers arrive (per stage)
    K, V       1 thread + bytes of TMA   1 thread for each consumer warp; `stages` stages each

A consumer's step over KV tile i, with S the scores, P their exponentials, both in registers (FlashAttention-3, Shah et
al. 2024):

    wait K[i] -> issue S' = Q K[i]' -> wait V[i-1] -> issue O += P V[i-1] -> wait S'
    softmax of S', release K[i] -> wait O -> P = S', O *= factor where a row's maximum has grown by much
    -> release V[i-1]

So the softmax of one tile overlaps with P V of the tile before.

At head dimension 512 two warpgroups split the head dimension of the same 64 rows (FlashFacts.sharers): each computes S'
from half of Q's and K's columns, adds the other's through shared memory, does the same softmax, and has half of O's
columns.

Kernels differ in their operands (operand_sm90), their softmax policy (softmax_policy) and, for FP8, their
dequantization scales (fp8/scales).
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.typing import AddressSpace
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.barriers import FORWARD_ORDER, FORWARD_SCORES, Arrivals
from cute_kernels.tile.element import VECTOR_BYTES
from cute_kernels.tile.hopper import ALIGN, start_product
from cute_kernels.tile.ptx import compute_before_waits, read_special_register

from .config import FlashFacts
from .kv_tiles import FULL
from .mask_and_softmax import QueryWork
from .operand_sm90 import Operand, Values
from .softmax import OnlineSoftmax
from .softmax_policy import ExactMax
from .tile_queue import FIELDS, SLOTS

WARPGROUP = 128
ROWS = 64  # of a consumer warpgroup


@dataclass(frozen=True)
class Consumer:
    """State of a consumer warpgroup for all of its query tiles: operands, accumulators, the rings of K and V."""

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
    exchange: Int32 | None = (
        None  # address at which warpgroups with the same rows exchange scores, 16 bytes per thread at a time
    )


def in_steps(a: cute.Tensor, b: cute.Tensor) -> tuple:
    """(function from an MMA step to its fragments, number of steps) of (MMA, MMA_M or MMA_N, MMA_K)."""
    return lambda k: (a[None, None, k], b[None, None, k]), cute.size(b, mode=[2])


class MainloopSm90:
    """Steps over the KV tiles of one query tile, with their storage, MMAs and rings.

    values: the class of V's operand. scales: the dequantization scales of FP8 operands (fp8/scales), or None.
    """

    def __init__(self, facts: FlashFacts, policy: ExactMax, values: type[Values] = Values, scales=None):
        self.facts, self.cfg, self.policy, self.scales = facts, facts.config, policy, scales
        self.dtype, self.dtype_v = cutlass_dtype(facts.dtype), cutlass_dtype(facts.values_dtype)  # of P, too
        self.sharers = facts.sharers
        self.columns = facts.head_dim_v // self.sharers  # of O, per warpgroup
        self.arrivals = Arrivals(1, 4 * facts.config.groups)  # of Q, K and V
        cfg, dim = facts.config, facts.head_dim
        self.q = Operand(self.dtype, (cfg.tile_m, dim), 1, self.arrivals, facts.packed)
        self.k = Operand(self.dtype, (cfg.tile_n, dim), cfg.stages, self.arrivals, facts.packed)
        self.v = values(self.dtype_v, facts, self.arrivals)

    # ------------------------------------------------------------------ storage, MMAs, rings

    def layouts(self) -> tuple:
        """(sQ, sK, sV), the last two with stages."""
        return self.q.layout(), self.k.layout(), self.v.layout()

    def storage(self) -> type:
        """Struct of a CTA's shared memory."""
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
            staging: cute.struct.MemRange[Int32, self.v.staging_bytes // 4]
            barriers_staging: cute.struct.MemRange[cutlass.Int64, 2 * self.v.staging_stages]

        return SharedStorage

    def operands(self, storage) -> tuple:
        """(sQ, sK, sV) in the storage, with the layouts' swizzles."""
        return tuple(
            place.get_tensor(layout.outer, swizzle=layout.inner)
            for place, layout in zip((storage.sQ, storage.sK, storage.sV), self.layouts())
        )

    def make_mmas(self) -> tuple:
        """(S = Q K', O = P V) tiled MMAs of all consumers."""
        k = cute.nvgpu.OperandMajorMode.K
        major = cute.nvgpu.OperandMajorMode.MN if self.facts.values_element.transposes else k
        groups = (self.cfg.groups // self.sharers, 1, 1)
        qk = sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, Float32, groups, (ROWS, self.cfg.tile_n))
        # With two CTAs per SM, kernels begin with 128 registers per thread, too few for an instruction 256 columns
        # wide.
        wide = self.columns // (2 if self.cfg.ctas > 1 and self.facts.head_dim_v == 256 else 1)
        pv = sm90_utils.make_trivial_tiled_mma(
            self.dtype_v, self.dtype_v, k, major, Float32, groups, (ROWS, wide),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return qk, pv

    def make_kv_rings(self, storage) -> tuple:
        """Pipelines of K and V."""
        return self.k.make_ring(storage.barriers_k), self.v.make_ring(storage.barriers_v)

    def consumer(self, mmas: tuple, thread, operands: tuple, rings: tuple, scale_log2: Float32, order) -> Consumer:
        """Operands and registers of a warpgroup; `thread` is the index of its first thread among the consumers."""
        cfg = self.cfg
        (mma_qk, mma_pv), (sQ, sK, sV), (pipe_k, pipe_v) = mmas, operands, rings
        thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, 0]
        tSrK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((cfg.tile_m, cfg.tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((cfg.tile_m, self.columns)), Float32)
        tOrP = cute.make_rmem_tensor(thr_pv.partition_shape_A((cfg.tile_m, cfg.tile_n)), self.dtype_v)
        softmax = self.policy.make(scale_log2)
        return Consumer(
            mma_qk, mma_pv, sQ, sK, tSrQ, tSrK, tOrP, tOrV, acc_S, acc_O, softmax, pipe_k, pipe_v, order
        )  # fmt: skip

    def split(self, c: Consumer, part: Int32, scores) -> Consumer:
        """The consumer restricted to part `part` of the head dimension: of the columns of Q, K and V. `scores`:
        storage."""
        steps = cute.size(c.tSrQ, mode=[2]) // self.sharers

        def mine(t: cute.Tensor, mode: int, size: int) -> cute.Tensor:
            parts = cute.logical_divide(t, (None,) * mode + (size,) + (None,) * (len(t.shape) - mode - 1))
            return parts[tuple((None, part) if i == mode else None for i in range(len(t.shape)))]

        parts = {"tSrQ": mine(c.tSrQ, 2, steps), "tSrK": mine(c.tSrK, 2, steps), "tOrV": mine(c.tOrV, 1, 1)}
        return replace(c, **parts, exchange=scores.data_ptr().toint())

    @cute.jit
    def reduce_scores(self, c: Consumer):
        """Add the other warpgroup's partial scores; the sums are bitwise identical in both."""
        self.exchange_barrier()  # the other warpgroup has read the scores of the tile before
        for i in range_constexpr(cute.size(c.acc_S) // 4):
            cute.autovec_copy(
                cute.make_tensor(c.acc_S.iterator + 4 * i, cute.make_layout(4)), self.exchanged(c.exchange, i, 0)
            )
        self.exchange_barrier()
        for i in range_constexpr(cute.size(c.acc_S) // 4):
            part = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(self.exchanged(c.exchange, i, WARPGROUP), part)
            for j in range_constexpr(4):
                c.acc_S[4 * i + j] = c.acc_S[4 * i + j] + part[j]

    def exchanged(self, base: Int32, i: int, other: int) -> cute.Tensor:
        """The i-th four scores of this thread or, with `other`, of the thread `other` before or after it."""
        number = (read_special_register("tid.x") - WARPGROUP) ^ other  # read again rather than held in a register
        at = base + number * VECTOR_BYTES + i * (self.sharers * WARPGROUP * VECTOR_BYTES)
        return cute.make_tensor(
            make_ptr(Float32, at, AddressSpace.smem, assumed_align=VECTOR_BYTES), cute.make_layout(4)
        )

    def exchange_barrier(self):
        cute.arch.barrier(barrier_id=FORWARD_SCORES, number_of_threads=self.sharers * WARPGROUP)

    # ------------------------------------------------------------------ ordered barrier

    def order(self, group: Int32) -> Int32:
        """Named barriers of the ping-pong order (FlashFacts.ordered): a warpgroup's own and, times 16, the next
        one's."""
        numbers = FORWARD_ORDER + group + 16 * (FORWARD_ORDER + (group + 1) % self.cfg.groups)
        return cute.arch.make_warp_uniform(numbers)

    def order_wait(self, order: Int32 | None):
        if self.facts.ordered:
            cute.arch.barrier(barrier_id=order % 16, number_of_threads=2 * WARPGROUP)

    def order_arrive(self, order: Int32 | None):
        if self.facts.ordered:
            cute.arch.barrier_arrive(barrier_id=order // 16, number_of_threads=2 * WARPGROUP)

    # ------------------------------------------------------------------ steps

    def of_rows(self, work: QueryWork) -> QueryWork:
        """A query tile's work with what depends on this thread's rows; here nothing does."""
        return work

    def wait(self, pipe: pipeline.PipelineAsync, state):
        """Wait for a tile of K or V."""
        pipe.consumer_wait(state)

    @property
    def has_tile_scales(self) -> bool:
        """True if KV tiles have dequantization scales of their own."""
        return self.scales is not None and self.scales.per_tile

    @cute.jit
    def first_step(self, c: Consumer, work: QueryWork, at_k):
        """Compute P of the first tile; returns the state of K's ring."""
        if const_expr(self.has_tile_scales):
            c = self.scales.load(c, work, 0, work.tiles.first)
        self.wait(c.pipe_k, at_k)
        self.order_wait(c.order)
        start_product(c.mma_qk, c.acc_S, *in_steps(c.tSrQ, c.tSrK[None, None, None, at_k.index]), True)
        self.order_arrive(c.order)
        warpgroup.wait_group(0)
        if const_expr(self.has_tile_scales):
            c, work = self.scales.apply(c, work)
        c.pipe_k.consumer_release(at_k)
        at_k.advance()
        if const_expr(self.sharers > 1):
            self.reduce_scores(c)
        self.policy.first(c, work)
        return at_k

    @cute.jit
    def steps(self, c: Consumer, work: QueryWork, at_k, at_v):
        """Run all tiles after the first; returns the states of K's and V's rings."""
        for segment in range_constexpr(len(work.tiles.kinds)):
            begin = 1 if const_expr(segment == 0) else cutlass.max(work.tiles.ends[segment - 1], 1)
            for i in cutlass.range(begin, work.tiles.ends[segment], unroll=1):
                at_k, at_v = self.step(c, work, i, work.tiles.kinds[segment], at_k, at_v)
        return at_k, at_v

    @cute.jit
    def step(self, c: Consumer, work: QueryWork, i: Int32, kind: cutlass.Constexpr, at_k, at_v):
        """Compute P of tile i, and O of the tile before; returns the states of K's and V's rings."""
        if const_expr(self.has_tile_scales):
            c = self.scales.load(c, work, i, kind)
        self.wait(c.pipe_k, at_k)
        self.order_wait(c.order)
        start_product(c.mma_qk, c.acc_S, *in_steps(c.tSrQ, c.tSrK[None, None, None, at_k.index]), True)
        self.wait(c.pipe_v, at_v)
        start_product(c.mma_pv, c.acc_O, *in_steps(c.tOrP, c.tOrV[None, None, None, at_v.index]), False)
        self.order_arrive(c.order)
        warpgroup.wait_group(1)
        if const_expr(self.has_tile_scales):
            c, work = self.scales.apply(c, work)
        if const_expr(self.policy.skips(kind)):
            grown = self.policy.step_without_max(c, work, i, at_k.index)
            c.pipe_k.consumer_release(at_k)
        else:
            c.pipe_k.consumer_release(at_k)
            if const_expr(self.sharers > 1):
                self.reduce_scores(c)
            grown = self.policy.step(c, work, i, kind)
        at_k.advance()
        # Two warpgroups gain nothing from this, and masked tiles leave no registers for it.
        if const_expr(self.cfg.groups == 3 and kind == FULL):
            compute_before_waits(*(c.softmax.row_sum[r] for r in range(2)), c.sQ.iterator.toint())
        warpgroup.wait_group(0)
        self.policy.finish(c, grown, at_v)
        at_v.advance()
        return at_k, at_v

    def last_step(self, c: Consumer, at_v):
        """Issue O of the last tile; `finish` waits for it."""
        self.wait(c.pipe_v, at_v)
        start_product(c.mma_pv, c.acc_O, *in_steps(c.tOrP, c.tOrV[None, None, None, at_v.index]), False)

    def finish(self, c: Consumer, at_v):
        """Wait for the last WGMMA; returns the state of V's ring."""
        warpgroup.wait_group(0)
        c.pipe_v.consumer_release(at_v)
        at_v.advance()
        return at_v
