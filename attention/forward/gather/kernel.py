"""The sm_90 attention kernel with gathered KV tiles: the dense kernel with another producer. Blocks of 64 keys and more
have the one of boxes.py.

    warpgroup 0      producer; all warps gather Q, K and V by cp.async, and the first fetches query tiles
    warpgroups 1, 2  consumers; each owns 64 rows of the query tile

    pipeline   producer arrives                                consumers arrive (per stage)
    Q, K, V    all threads, each when its copies have landed   1 thread for each consumer warp
    queue      the first producer warp                         all consumer threads, and the other producer warps

Copies arrive at a full barrier by themselves (cp.async.mbarrier.arrive.noinc), so that no producer thread waits for
them. Consumers execute a proxy fence after each wait for K or V, since WGMMA reads through the async proxy what
cp.async wrote; the wait for Q is followed by one for K.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.ptx import read_special_register

from ..config import GatherFacts
from ..kernel_sm90 import FETCH_AHEAD, REGISTERS_SHARING, FlashForwardSm90
from ..tile_queue import SLOTS, TileQueue
from .mainloop import GatherMainloop
from .operands import WARPS, Gather, gathering


class GatherForwardSm90(FlashForwardSm90):
    """Compiles to one kernel per `GatherFacts`."""

    def __init__(self, facts: GatherFacts):
        super().__init__(facts)
        self.registers = REGISTERS_SHARING
        self.arrivals = {"Q, K, V": gathering(facts)}
        if facts.config.dynamic:
            self.arrivals["queue"] = Arrivals(1, 4 * facts.config.groups, threads=32, others=WARPS - 1)

    @staticmethod
    def make_mainloop(facts: GatherFacts) -> GatherMainloop:
        return GatherMainloop(facts)

    @cute.jit
    def produce(self, operands: tuple, queue: TileQueue | None, source, scheduler, seqlens, step: Int32):
        """Load this CTA's query tiles, and gather the KV tiles; all producer warps.

        operands: (None, smem, tensor, pipeline) of Q and K, and (None, tensor, Values.loads) of V.
        """
        cfg, facts = self.cfg, self.facts
        (_, sQ, mQ, pipe_q), (_, sK, mK, pipe_k), (_, mV, (sV, pipe_v, _)) = operands
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        gather = Gather(facts, warp)
        tile_bytes = const_expr(cfg.tile_n * facts.head_dim * 2)
        at_k, at_v = (pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cfg.stages) for _ in range(2))
        state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        kind = pipeline.PipelineUserType
        state_queue = pipeline.make_pipeline_state(kind.Producer, SLOTS)
        state_read = pipeline.make_pipeline_state(kind.Consumer, SLOTS)
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = scheduler.of_fields(fields)
            seqlen = seqlens.of(tile.b)
            steps = source.for_tile(tile, seqlen)
            number, fetch_at = index + step, cutlass.max(steps.count - FETCH_AHEAD, 1)
            if steps.count > 0:
                k = gather.rows(mK[None, None, tile.h_kv, seqlen.b])
                v = gather.rows(cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, 2, 3]))[
                    None, None, tile.h_kv, seqlen.b
                ])  # fmt: skip
                now, ahead = gather.load_blocks(steps, steps.at(0)), gather.load_blocks(steps, steps.at(1))
                self.gather_tile(gather, k, now, sK.iterator.toint() + at_k.index * tile_bytes, pipe_k, at_k)
                at_k.advance()
                head = tile.h_kv * source.heads.qhead_per_kvhead
                q = cute.domain_offset((0, 0, head), mQ[None, None, None, tile.b])
                pipe_q.sync_object_empty.wait(state_q.index, state_q.phase)
                gather.copy_queries(q, tile.m * cfg.tile_m, source.heads, sQ.iterator.toint())
                cute.arch.cp_async_mbarrier_arrive_noinc(pipe_q.producer_get_barrier(state_q))
                state_q.advance()
                for i in cutlass.range(1, steps.count, unroll=1):
                    if const_expr(cfg.dynamic):
                        if (warp == 0) & (i == fetch_at):
                            number = queue.fetch(step)
                    before, now = now, ahead
                    ahead = gather.load_blocks(steps, steps.at(i + 1))
                    self.gather_tile(gather, k, now, sK.iterator.toint() + at_k.index * tile_bytes, pipe_k, at_k)
                    at_k.advance()
                    self.gather_tile(gather, v, before, sV.iterator.toint() + at_v.index * tile_bytes, pipe_v, at_v)
                    at_v.advance()
                self.gather_tile(gather, v, now, sV.iterator.toint() + at_v.index * tile_bytes, pipe_v, at_v)
                at_v.advance()
            if const_expr(cfg.dynamic):
                if warp == 0:
                    if steps.count < 2:
                        number = queue.fetch(step)
                    number = queue.fetched(number, scheduler.count, step)
                    fields = scheduler.fields(number)
                    queue.publish(number, fields, state_queue)
                else:
                    number, fields = queue.consume(len(fields), state_read)
                state_queue.advance()
                state_read.advance()
            else:
                fields = scheduler.fields(number)
            index = number

    @cute.jit
    def gather_tile(self, gather: Gather, rows, blocks: Int32, to: Int32, pipe, state):
        """Gather a tile of K or V, as soon as its stage is free."""
        pipe.sync_object_empty.wait(state.index, state.phase)
        gather.copy(rows, blocks, to)
        cute.arch.cp_async_mbarrier_arrive_noinc(pipe.producer_get_barrier(state))
