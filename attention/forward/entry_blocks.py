"""The attention kernels on block masks: which tiles are visited, and in which order, the mask's lists say."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .block_source import with_blocks
from .scheduler import QueryScheduler
from .seqlen import DenseSeqlens


class BlocksForward:
    """FlashForwardSm90 or FlashForwardSm80, compiled for block masks."""

    def __init__(self, flash):
        self.flash = flash

    @property
    def smem_bytes(self) -> int:
        return self.flash.smem_bytes

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        counter: cute.Tensor | None,
        blocks: tuple,  # block_sparse.blocks_of
        scale_log2: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        flash = self.flash
        scheduler, source = with_blocks(flash.facts, QueryScheduler.of(flash.facts, mQ.shape, mK.shape), blocks)
        seqlens = DenseSeqlens(mQ.shape[2], mK.shape[2])
        flash.launch(
            mQ, mK, mV, mO, mLSE, counter, scheduler, seqlens, source, scale_log2, softcap, max_ctas, stream
        )  # fmt: skip
