"""A dense product as a kernel sees it: torch's tensors re-viewed, the trivial source, and a kernel of either path."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..k_tiles import DenseSource
from .config import GemmFacts
from .epilogue.formula import EpilogueArgs
from .kernels import kernel_for


def view(tensor: cute.Tensor, shape: tuple, stride: tuple) -> cute.Tensor:
    """The tensor's memory under another layout."""
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def batched(tensor: cute.Tensor) -> tuple[tuple, tuple]:
    """((rows, cols, L), strides) of a torch matrix (rows, cols) or batch (L, rows, cols)."""
    shape, stride = tensor.shape, tensor.stride
    if len(shape) == 2:
        return (*shape, 1), (*stride, 0)
    return (shape[1], shape[2], shape[0]), (stride[1], stride[2], stride[0])


class DenseGemm:
    """a (M, K) or (L, M, K) times b (K, N) or (L, K, N) into d; the function a dense kernel is compiled from."""

    def __init__(self, facts: GemmFacts):
        self.facts = facts
        self.kernel = kernel_for(facts)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        z: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        self.launch(a, b, d, EpilogueArgs(bias, residual, z, alpha, beta), group, max_ctas, stream)

    @cute.jit
    def launch(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        args: EpilogueArgs,  # of torch's tensors
        group: Int32,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        cfg = self.facts.config
        (M, K, La), (sM, sK, sL) = batched(a)
        mA = view(a, (M, K, La), (sM, sK, sL))
        (K, N, Lb), (sK, sN, sL) = batched(b)
        mB = view(b, (N, K, 1, Lb), (sN, sK, 0, sL))
        mD = self.output(d)
        bias, residual, z = args.bias, args.residual, args.z
        if const_expr(residual is not None):
            residual = self.output(residual)
        if const_expr(z is not None):
            z = self.output(z)
        if const_expr(bias is not None):
            bias = view(bias, (bias.shape[0], 1), (bias.stride[0], 0))
        source = self.source(cute.ceil_div(K, cfg.tile_k), La)
        scales = self.scale_of(args.scale_m), self.scale_of(args.scale_n)
        args = EpilogueArgs(bias, residual, z, args.alpha, args.beta, *scales, args.scale_out, args.amax)
        self.kernel(mA, mB, mD, source, args, cute.ceil_div(M, cfg.tile_m), group, max_ctas, stream)

    def source(self, k_tiles: Int32, a_batch: Int32):
        """The source of a row tile's K-tiles, `k_tiles` along K; see cute_kernels.k_tiles."""
        return DenseSource(k_tiles, a_batch)

    def output(self, d: cute.Tensor) -> cute.Tensor:
        (M, N, L), (sM, sN, sL) = batched(d)
        return view(d, (M, N, 1, L), (sM, sN, 0, sL))

    def scale_of(self, scale: cute.Tensor | None) -> cute.Tensor | None:
        """(extent, L) of a scale (L, extent); of one for each block, (M or N / 128, K / 128, L) of its torch batch."""
        if scale is None:
            return None
        if len(scale.shape) == 3:
            return view(scale, (*scale.shape[1:], scale.shape[0]), (*scale.stride[1:], scale.stride[0]))
        return view(scale, (scale.shape[1], scale.shape[0]), (scale.stride[1], scale.stride[0]))


class ScaledGemm(DenseGemm):
    """DenseGemm of operands with scales, which multiply the sums before anything else."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scale_a: cute.Tensor | None,  # (1 or L, 1 or M) fp32; of blocks (L, M, K / 128)
        scale_b: cute.Tensor | None,  # (1 or L, 1 or N) fp32; of blocks (L, N / 128, K / 128)
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        z: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        args = EpilogueArgs(bias, residual, z, alpha, beta, scale_a, scale_b)
        self.launch(a, b, d, args, group, max_ctas, stream)


class NarrowGemm(DenseGemm):
    """ScaledGemm with an FP8 d, an optional output scale, and an optional amax: the largest magnitude before
    scaling."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scale_a: cute.Tensor | None,
        scale_b: cute.Tensor | None,
        scale_out: cute.Tensor | None,  # (1,) fp32
        amax: cute.Tensor | None,  # (1,) fp32, which is raised
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        z: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        args = EpilogueArgs(bias, residual, z, alpha, beta, scale_a, scale_b, scale_out, amax)
        self.launch(a, b, d, args, group, max_ctas, stream)
