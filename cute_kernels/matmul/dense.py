"""A dense product as a kernel sees it: torch's tensors re-viewed, the trivial source, and a kernel of either path."""

import cutlass.cute as cute
from cutlass import Int32

from .config import GemmFacts
from .epilogue.formula import EpilogueArgs
from .kernels import kernel_for
from .user_k_tiles import source_for


def view(tensor: cute.Tensor, shape: tuple, stride: tuple) -> cute.Tensor:
    """The tensor's memory under another layout."""
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def batched(tensor: cute.Tensor) -> tuple[tuple, tuple]:
    """((rows, cols, L), strides) of a torch matrix (rows, cols) or batch (L, rows, cols)."""
    shape, stride = tensor.shape, tensor.stride
    if len(shape) == 2:
        return (*shape, 1), (*stride, 0)
    return (shape[1], shape[2], shape[0]), (stride[1], stride[2], stride[0])


def column(bias: cute.Tensor) -> cute.Tensor:
    """(extent, 1) of a bias."""
    return view(bias, (bias.shape[0], 1), (bias.stride[0], 0))


def extent_first(scale: cute.Tensor) -> cute.Tensor:
    """(extent, L) of scales (1 or L, extent); of block scales (L, M or N / 128, K / 128) with L last."""
    (L, *shape), (sL, *stride) = scale.shape, scale.stride
    return view(scale, (*shape, L), (*stride, sL))


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
        *terms,  # see EpilogueArgs.of
    ):
        cfg = self.facts.config
        args, launch = EpilogueArgs.of(self.facts, terms)
        (M, K, La), (sM, sK, sL) = batched(a)
        mA = view(a, (M, K, La), (sM, sK, sL))
        (K, N, Lb), (sK, sN, sL) = batched(b)
        mB = view(b, (N, K, 1, Lb), (sN, sK, 0, sL))
        source = self.source(cute.ceil_div(K, cfg.tile_k), La)
        self.kernel(mA, mB, self.output(d), source, self.viewed(args), cute.ceil_div(M, cfg.tile_m), *launch)

    def viewed(self, args: EpilogueArgs) -> EpilogueArgs:
        """The epilogue's tensors as the kernel has them."""
        scales = {"scale_m": extent_first, "scale_n": extent_first}
        return args.viewed(residual=self.output, z=self.output, bias=column, **scales)

    def source(self, k_tiles: Int32, a_batch: Int32):
        """The source of a row tile's K-tiles, `k_tiles` along K; see cute_kernels.k_tiles."""
        return source_for(self.facts, k_tiles, a_batch)

    def output(self, d: cute.Tensor) -> cute.Tensor:
        (M, N, L), (sM, sN, sL) = batched(d)
        return view(d, (M, N, 1, L), (sM, sN, 0, sL))
