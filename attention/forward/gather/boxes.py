"""The sm_90 attention kernel for listed blocks of 64 and 128 keys: TMA loads each block of K and V as a box.

    warpgroup 0      producer; warp 0 loads K and V by TMA and fetches query tiles, warps 1 to 3 gather Q by cp.async
    warpgroups 1, 2  consumers; each owns 64 rows of the query tile

    pipeline   producer arrives                                        consumers arrive (per stage)
    Q          all threads of 3 warps, when their copies have landed   1 thread for each consumer warp
    K, V       1 thread + bytes of TMA                                 1 thread for each consumer warp
    queue      warp 0                                                  all consumer threads, and warps 1 to 3

Consumers need no proxy fence for K and V. They execute one for each query tile, after the wait for Q.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.ptx import read_special_register

from ..config import GatherFacts
from ..kernel_sm90 import FETCH_AHEAD
from ..mainloop_sm90 import MainloopSm90
from ..mask_and_softmax import QueryWork
from ..operand_sm90 import Operand, Values
from ..tile_queue import SLOTS, TileQueue
from .kernel import GatherForwardSm90
from .mainloop import GatherMainloop
from .operands import WARPS, Gather, GatheredRows, gathering
from .softmax import ListedSkipMax
from .source import UnionSteps

COPYING = WARPS - 1  # warps that copy Q


class Boxes:
    """Loads of tiles (rows, columns) in boxes, one for each block."""

    box: tuple  # (rows, columns)

    def boxes(self, smem):
        """A ring, or its layout, (rows, columns, PIPE) as (rows of a box, columns of a box, boxes, PIPE)."""
        return cute.group_modes(cute.flat_divide(smem, self.box), 2, 4)

    def make_load(self, tensor: cute.Tensor) -> tuple:
        """TMA load of its boxes: (atom, tensor)."""
        layout = cute.slice_(self.boxes(self.layout()), (None, None, 0, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, self.box)

    def partition(self, tma: cute.CopyAtom, smem: cute.Tensor, tensor: cute.Tensor, begin: tuple) -> tuple:
        """(TMA, boxes, PIPE) and (TMA, rest_0, rest_1, heads, batch)."""
        blocks = cute.local_tile(tensor, self.box, (None, None, None, None))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(self.boxes(smem), 0, 2), cute.group_modes(blocks, 0, 2)
        )

    @cute.jit
    def load(self, tiles: tuple, blocks: Int32, pipe, state):
        """Load blocks of (TMA atom, (TMA, blocks), (TMA, boxes, PIPE)), as soon as their stage is free. Lane j has the
        j-th block."""
        tma, gX, sX = tiles
        pipe.producer_acquire(state)
        for j in range_constexpr(cute.size(sX, mode=[1])):
            block = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(blocks, j))
            cute.copy(tma, gX[None, block], sX[None, j, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))


class BoxedKeys(Boxes, Operand):
    """K, loaded in boxes."""

    def __init__(self, dtype, facts: GatherFacts, arrivals: Arrivals):
        super().__init__(dtype, (facts.config.tile_n, facts.head_dim), facts.config.stages, arrivals, False)
        self.box = facts.block_size, facts.head_dim


class BoxedValues(Boxes, Values):
    """V, loaded in boxes."""

    def __init__(self, dtype, facts: GatherFacts, arrivals: Arrivals):
        super().__init__(dtype, facts, arrivals)
        self.box = facts.head_dim, facts.block_size


class BoxMainloop(GatherMainloop):
    """Steps over the KV tiles of one query tile, which TMA loads."""

    def __init__(self, facts: GatherFacts):
        super().__init__(facts)
        self.q = GatheredRows(
            self.dtype, (facts.config.tile_m, facts.head_dim), 1, gathering(facts, COPYING), False
        )  # fmt: skip
        self.k, self.v = (kind(self.dtype, facts, self.arrivals) for kind in (BoxedKeys, BoxedValues))

        self.policy = ListedSkipMax(facts) if facts.skips_max else self.policy

    def wait(self, pipe: pipeline.PipelineAsync, state):
        pipe.consumer_wait(state)

    def first_step(self, c, work: QueryWork, at_k):
        """MainloopSm90.first_step. WGMMA reads through the async proxy what cp.async wrote of Q, so that a proxy fence
        follows the wait for Q."""
        cute.arch.fence_view_async_shared()
        return MainloopSm90.first_step(self, c, work, at_k)


class BoxForwardSm90(GatherForwardSm90):
    """Compiles to one kernel per `GatherFacts` with `boxes`."""

    def __init__(self, facts: GatherFacts):
        super().__init__(facts)
        del self.arrivals["Q, K, V"]
        self.arrivals |= {"Q": gathering(facts, COPYING), "K, V": self.mainloop.arrivals}

    @staticmethod
    def make_mainloop(facts: GatherFacts) -> BoxMainloop:
        return BoxMainloop(facts)

    @cute.jit
    def produce(self, operands: tuple, queue: TileQueue | None, source, scheduler, seqlens, step: Int32):
        """Load this CTA's query tiles, and the KV tiles; all producer warps.

        operands: (None, smem, tensor, pipeline) of Q, (TMA atom, smem, tensor, pipeline) of K, and (TMA atom, tensor,
        Values.loads) of V.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            self.load_keys(operands, queue, source, scheduler, seqlens, step)
        else:
            self.copy_queries(operands[0], warp, queue, source, scheduler, seqlens, step)

    @cute.jit
    def load_keys(self, operands: tuple, queue: TileQueue | None, source, scheduler, seqlens, step: Int32):
        """Load the KV tiles, and fetch query tiles; warp 0."""
        cfg = self.cfg
        _, (tma_k, sK, mK, pipe_k), (tma_v, mV, (sV, pipe_v, _)) = operands
        tKsK, tKgK = self.mainloop.k.partition(tma_k, sK, mK, (0, 0))
        tVsV, tVgV = self.mainloop.v.partition(tma_v, sV, mV, (0, 0))
        at_k, at_v = (pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages) for _ in range(2))
        state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = scheduler.of_fields(fields)
            seqlen = seqlens.of(tile.b)
            steps = source.for_tile(tile, seqlen)
            number, fetch_at = index + step, cutlass.max(steps.count - FETCH_AHEAD, 1)
            if steps.count > 0:
                keys = tma_k, tKgK[None, None, 0, tile.h_kv, seqlen.b], tKsK
                values = tma_v, tVgV[None, 0, None, tile.h_kv, seqlen.b], tVsV
                # Blocks are read one step ahead.
                now, ahead = self.blocks(steps, 0), self.blocks(steps, 1)
                self.mainloop.k.load(keys, now, pipe_k, at_k)
                at_k.advance()
                for i in cutlass.range(1, steps.count, unroll=1):
                    if const_expr(cfg.dynamic):
                        if i == fetch_at:
                            number = queue.fetch(step)
                    before, now = now, ahead
                    ahead = self.blocks(steps, i + 1)
                    self.mainloop.k.load(keys, now, pipe_k, at_k)
                    at_k.advance()
                    self.mainloop.v.load(values, before, pipe_v, at_v)
                    at_v.advance()
                self.mainloop.v.load(values, now, pipe_v, at_v)
                at_v.advance()
            if const_expr(cfg.dynamic):
                if steps.count < 2:
                    number = queue.fetch(step)
                number = queue.fetched(number, scheduler.count, step)
            index, fields = number, scheduler.fields(number)
            if const_expr(cfg.dynamic):
                queue.publish(index, fields, state_queue)
                state_queue.advance()

    def blocks(self, steps: UnionSteps, i) -> Int32:
        """Load the blocks of the i-th visited step, or of the union's first after the last one: lane j has the
        j % per_tile-th."""
        count = self.facts.per_tile
        return Int32(steps.union[cutlass.max(steps.at(i), 0) * count + cute.arch.lane_idx() % count])

    @cute.jit
    def copy_queries(
        self, operand: tuple, warp: Int32, queue: TileQueue | None, source, scheduler, seqlens, step: Int32
    ):
        """Gather this CTA's query tiles; warps 1 to 3."""
        (_, sQ, mQ, pipe_q), gather = operand, Gather(self.facts, warp - 1, COPYING)
        state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = scheduler.of_fields(fields)
            if source.for_tile(tile, seqlens.of(tile.b)).count > 0:
                q = cute.domain_offset((0, 0, tile.h_kv * source.heads.qhead_per_kvhead), mQ[None, None, None, tile.b])
                pipe_q.sync_object_empty.wait(state_q.index, state_q.phase)
                gather.copy_queries(q, tile.m * self.cfg.tile_m, source.heads, sQ.iterator.toint())
                cute.arch.cp_async_mbarrier_arrive_noinc(pipe_q.producer_get_barrier(state_q))
                state_q.advance()
            if const_expr(self.cfg.dynamic):
                index, fields = queue.consume(len(fields), state_queue)
                state_queue.advance()
            else:
                index += step
                fields = scheduler.fields(index)
