"""The sm_90 attention kernels of 8-bit floats: the kernel of 16 bits with other mainloops, scales, and V as another
kernel has made it, or converted inside."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from cute_kernels.tile.ptx import bulk_load, read_special_register

from .config import Float8Facts
from .kernel_sm90 import FlashForwardSm90
from .mainloop_float8 import MainloopFloat8, MainloopFloat8Fast
from .mainloop_tokens import MainloopTokens, MainloopTokensFast
from .problem import problem_of
from .tile_queue import SLOTS
from .transposed_values import first_column
from .values_inside import CONVERTERS, Conversion


class FlashForwardFloat8(FlashForwardSm90):
    """Compiles to one kernel per `Float8Facts` that are not fast."""

    def __init__(self, facts: Float8Facts):
        self.converters = CONVERTERS if facts.converts else 0
        super().__init__(facts)
        if facts.converts:
            of_qk = self.arrivals.pop("Q, K, V")
            self.arrivals |= {"Q, K": of_qk, **self.mainloop.inside.arrivals}

    @property
    def follows(self) -> bool:
        """The kernel that converts or transposes V is waited for before the first load."""
        return self.facts.given_v == self.facts.dtype and not self.facts.converts

    @staticmethod
    def mainloop_of(facts: Float8Facts) -> MainloopFloat8:
        return (MainloopTokens if facts.tokens else MainloopFloat8)(facts)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv), of Float8Facts.loaded_v; fast as transposed
        mO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq), packed (H, total_q)
        mSinks: cute.Tensor | None,  # (H,)
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # block_sparse.blocks_of; of a block mask
        score_tensors: tuple | None,  # what a score_mod reads
        q_scale: cute.Tensor | None,  # (B, H); of tokens (B, H, blocks)
        k_scale: cute.Tensor | None,  # (B, Hkv); of tokens (B, Hkv, blocks)
        v_scale: cute.Tensor | None,  # the same
        counter: cute.Tensor | None,  # (1,) int32, 0; of a dynamic schedule
        scale_log2: Float32,
        softcap: Float32,
        left: Int32 | None,  # None of a block mask
        right: Int32 | None,
        offsets: tuple | None,  # (q_offset, k_offset); of FlashFacts.offsets
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        # A transposed V is not among the tensors that have rows of keys.
        rows = mK if const_expr(self.facts.fast) else mV
        p = problem_of(self.facts, (mQ, mK, rows, mO, mLSE), (cu_q, cu_k), blocks, left, right, offsets)
        scalars, scales = (scale_log2, softcap, score_tensors, mSinks), (q_scale, k_scale, v_scale)
        values = self.mainloop.view_of_values(mV if const_expr(self.facts.fast) else p.mV)
        self.start(p, values, counter, scalars, scales, max_ctas, stream)

    @cute.jit
    def convert_values(self, storage, rings: tuple, queue, source, scheduler, seqlens, step: Int32):
        """Convert the tiles of V of this CTA's query tiles, in the order in which the producer loads them.

        rings: (MainloopSm90.ring_of_loads, V's pipeline).
        """
        (_, pipe_given, _), pipe_made = rings
        conversion = Conversion(
            self.mainloop.inside,
            cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 1,
            (storage.given.data_ptr().toint(), pipe_given),
            (storage.sV.data_ptr().toint(), pipe_made),
        )
        at_given, at_made = conversion.states()
        state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = scheduler.of_fields(fields)
            tiles = source.for_tile(tile, seqlens.of(tile.b))
            at_given, at_made = conversion.convert(tiles.count, at_given, at_made)
            if const_expr(self.cfg.dynamic):
                index, fields = queue.consume(len(fields), state_queue)
                state_queue.advance()
            else:
                index += step
                fields = scheduler.fields(index)


class FlashForwardFloat8Fast(FlashForwardFloat8):
    """Compiles to one kernel per `Float8Facts` that are fast."""

    @staticmethod
    def mainloop_of(facts: Float8Facts) -> MainloopFloat8Fast:
        return (MainloopTokensFast if facts.tokens else MainloopFloat8Fast)(facts)

    def values(self, tma: None, sV: cute.Tensor, mV: cute.Tensor, tile, seqlen) -> tuple:
        """What load_values takes of a query tile: the address of its item's first tile of V, and of the ring."""
        gV = mV[seqlen.b, tile.h_kv, None, None]  # (tiles, Dv * tile_n)
        first = first_column(seqlen.k0, tile.b, self.cfg.tile_n) // self.cfg.tile_n if self.facts.packed else 0
        return gV.iterator.toint() + Int64(first) * gV.stride[0], sV.iterator.toint()

    @cute.jit
    def load_values(self, values: tuple, n: Int32, pipe, state):
        """Load the n-th tile of V, as soon as its stage is free."""
        size = const_expr(self.facts.head_dim_v * self.cfg.tile_n)
        pipe.producer_acquire(state)
        with cute.arch.elect_one():
            barrier = pipe.producer_get_barrier(state)
            bulk_load(values[1] + state.index * size, values[0] + Int64(n) * size, size, barrier.toint())
