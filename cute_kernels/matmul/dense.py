"""A dense product as a kernel sees it: torch's tensors re-viewed, the trivial source, and a kernel of either path."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..k_tiles import DenseSource
from .config import GemmFacts
from .epilogue import EpilogueArgs
from .kernel_sm80 import GemmSm80
from .kernel_sm90 import GemmSm90


def kernel_for(facts: GemmFacts):
    """The kernel of the facts' path, made for the facts."""
    return GemmSm90(facts) if facts.path == "sm_90" else GemmSm80(facts)


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
        cfg = self.facts.config
        (M, K, La), (sM, sK, sL) = batched(a)
        mA = view(a, (M, K, La), (sM, sK, sL))
        (K, N, Lb), (sK, sN, sL) = batched(b)
        mB = view(b, (N, K, 1, Lb), (sN, sK, 0, sL))
        mD = self.output(d)
        if const_expr(residual is not None):
            residual = self.output(residual)
        if const_expr(z is not None):
            z = self.output(z)
        if const_expr(bias is not None):
            bias = view(bias, (bias.shape[0], 1), (bias.stride[0], 0))
        source = self.source(cute.ceil_div(K, cfg.tile_k), La)
        args = EpilogueArgs(bias, residual, z, alpha, beta)
        self.kernel(mA, mB, mD, source, args, cute.ceil_div(M, cfg.tile_m), group, max_ctas, stream)

    def source(self, k_tiles: Int32, a_batch: Int32):
        """Where the K-tiles of a row tile lie, of so many along K; see cute_kernels.k_tiles."""
        return DenseSource(k_tiles, a_batch)

    def output(self, d: cute.Tensor) -> cute.Tensor:
        (M, N, L), (sM, sN, sL) = batched(d)
        return view(d, (M, N, 1, L), (sM, sN, 0, sL))
