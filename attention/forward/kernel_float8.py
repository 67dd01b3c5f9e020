"""The sm_90 attention kernel of 8-bit floats: the kernel of 16 bits with another mainloop, scales, and V transposed."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .kernel_sm90 import FlashForwardSm90
from .mainloop_float8 import MainloopFloat8
from .problem import problem_of
from .transposed_values import first_column


class FlashForwardFloat8(FlashForwardSm90):
    """Compiles to one kernel per `Float8Facts`."""

    mainloop_of = MainloopFloat8

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Dv, columns), packed (1, Hkv, Dv, columns): transposed_values
        mO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq), packed (H, total_q)
        mSinks: cute.Tensor | None,  # (H,)
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # block_sparse.blocks_of; of a block mask
        score_tensors: tuple | None,  # what a score_mod reads
        q_scale: cute.Tensor | None,  # (B, H)
        k_scale: cute.Tensor | None,  # (B, Hkv)
        v_scale: cute.Tensor | None,  # (B, Hkv)
        counter: cute.Tensor | None,  # (1,) int32, 0; of a dynamic schedule
        scale_log2: Float32,
        softcap: Float32,
        left: Int32 | None,  # None of a block mask
        right: Int32 | None,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        # V is not among the tensors that have rows of keys.
        p = problem_of(self.facts, (mQ, mK, mK, mO, mLSE), (cu_q, cu_k), blocks, left, right)
        scalars, scales = (scale_log2, softcap, score_tensors, mSinks), (q_scale, k_scale, v_scale)
        self.start(p, self.mainloop.view_of_values(mV), counter, scalars, scales, max_ctas, stream)

    def first_value(self, tile, seqlen) -> Int32:
        """Where an item's columns begin in V."""
        return first_column(seqlen.k0, tile.b, self.cfg.tile_n) if self.facts.packed else seqlen.k0
