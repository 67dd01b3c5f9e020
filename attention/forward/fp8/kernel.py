"""The sm_90 FP8 attention kernel: the 16-bit kernel with another mainloop and with dequantization scales."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..config import Float8Facts
from ..kernel_sm90 import FlashForwardSm90
from ..mainloop_sm90 import MainloopSm90
from ..problem import problem_of
from .mainloop import mainloop_of


class FlashForwardFp8(FlashForwardSm90):
    """Compiles to one kernel per `Float8Facts`."""

    @property
    def is_secondary(self) -> bool:
        """True if a primary kernel converts or transposes V; this kernel waits for it before the first load."""
        return self.facts.given_v == self.facts.dtype and not self.facts.converts

    @staticmethod
    def make_mainloop(facts: Float8Facts) -> MainloopSm90:
        return mainloop_of(facts)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv), of Float8Facts.loaded_v; transposed if fast
        mO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq), packed (H, total_q)
        mSinks: cute.Tensor | None,  # (H,)
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # block_sparse.blocks_of; None without a block mask
        score_tensors: tuple | None,  # inputs of the score_mod
        q_scale: cute.Tensor | None,  # (B, H); per block of tokens (B, H, blocks)
        k_scale: cute.Tensor | None,  # (B, Hkv); per block of tokens (B, Hkv, blocks)
        v_scale: cute.Tensor | None,  # the same
        counter: cute.Tensor | None,  # (1,) int32, 0; None without a dynamic schedule
        scale_log2: Float32,
        softcap: Float32,
        left: Int32 | None,  # None with a block mask
        right: Int32 | None,
        offsets: tuple | None,  # (q_offset, k_offset) with FlashFacts.offsets
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        # A transposed V does not have one row per key.
        rows = mK if const_expr(self.facts.fast) else mV
        p = problem_of(self.facts, (mQ, mK, rows, mO, mLSE), (cu_q, cu_k), blocks, left, right, offsets)
        scalars, scales = (scale_log2, softcap, score_tensors, mSinks), (q_scale, k_scale, v_scale)
        values = self.mainloop.v.view(mV if const_expr(self.facts.fast) else p.mV)
        self.start(p, values, counter, scalars, scales, max_ctas, stream)
