"""The attention kernels on packed sequences: tensors without a batch, lengths and query tiles found on the GPU."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .scheduler import PackedScheduler
from .seqlen import PackedSeqlens


class PackedForward:
    """FlashForwardSm90 or FlashForwardSm80, compiled for packed sequences."""

    def __init__(self, flash):
        self.flash = flash

    @property
    def smem_bytes(self) -> int:
        return self.flash.smem_bytes

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (total_q, H, D)
        mK: cute.Tensor,  # (total_k, Hkv, D)
        mV: cute.Tensor,  # (total_k, Hkv, Dv)
        mO: cute.Tensor,  # (total_q, H, Dv)
        mLSE: cute.Tensor | None,  # (H, total_q)
        counter: cute.Tensor | None,
        cu_q: cute.Tensor,  # (B + 1,)
        cu_k: cute.Tensor,  # (B + 1,)
        scale_log2: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        (rows, heads, _), (cols, heads_kv, _) = mQ.shape, mK.shape
        seqlens = PackedSeqlens(cu_q, cu_k, rows, cols)
        scheduler = PackedScheduler.at_most(seqlens, self.flash.cfg.tile_m, heads, heads // heads_kv)
        mQ, mK, mV, mO = (self.one_item(t, (1, 0, 2)) for t in (mQ, mK, mV, mO))
        if const_expr(mLSE is not None):
            mLSE = self.one_item(mLSE, (0, 1))
        self.flash.launch(
            mQ, mK, mV, mO, mLSE, counter, scheduler, seqlens, self.flash.window(left, right), scale_log2, softcap,
            max_ctas, stream,
        )  # fmt: skip

    def one_item(self, tensor: cute.Tensor, modes: tuple) -> cute.Tensor:
        """The tensor with a batch of one before its modes, in another order."""
        shape, stride = (tuple(v[i] for i in modes) for v in (tensor.shape, tensor.stride))
        return cute.make_tensor(tensor.iterator, cute.make_layout((1, *shape), stride=(0, *stride)))
