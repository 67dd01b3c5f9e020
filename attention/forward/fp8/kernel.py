"""The sm_90 attention kernel of FP8 operands: that of 16 bits with another mainloop, and with descale factors."""

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
    def follows(self) -> bool:
        """True if a kernel before this one converts or transposes V; it is waited for before the first load."""
        return self.facts.given_v == self.facts.dtype and not self.facts.converts

    @staticmethod
    def make_mainloop(facts: Float8Facts) -> MainloopSm90:
        return mainloop_of(facts)

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
        values = self.mainloop.v.view(mV if const_expr(self.facts.fast) else p.mV)
        self.start(p, values, counter, scalars, scales, max_ctas, stream)
