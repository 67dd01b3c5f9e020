"""The sparse collective over the sm_80 path's sweep kernel; twin of sweep_collective.py, with its source."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.config import GemmFacts
from cute_kernels.dense import view
from cute_kernels.epilogue import EpilogueArgs

from .collective import SparseCollective
from .sweep_collective import SweepSource
from .sweep_sm80 import SweepSm80


class SweepCollectiveSm80(SparseCollective):
    """The same product as SparseCollective's by the sweep kernel, which takes D as one matrix."""

    def __init__(self, facts: GemmFacts):
        self.facts = facts
        self.kernel = SweepSm80(facts)

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        counts: cute.Tensor,  # (groups,), this and the next three of a sweep.SweepPlan
        slices: cute.Tensor,  # (groups, slices of a row)
        words: cute.Tensor,  # (groups, chunks of a row, 4)
        order: cute.Tensor,  # (max(nnz, 1),)
        values: cute.Tensor,  # (nnz, bm, bk)
        b: cute.Tensor,
        d: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        bm, bk = self.facts.block.bm, self.facts.block.bk
        mA = view(values, (bm, bk, values.shape[0]), (bk, 1, bm * bk))
        (K, N, L), (sK, sN, sL) = self.oriented(b)
        mB = view(b, (N, K, L), (sN, sK, sL))
        mD = self.whole(d)
        if const_expr(residual is not None):
            residual = self.whole(residual)
        if const_expr(bias is not None):
            bias = view(bias, (bias.shape[0], 1), (bias.stride[0], 0))
        words = view(words, words.shape, (words.stride[0], 4, 1))  # known strides find a word in fewer instructions
        g = self.kernel.geometry
        source = SweepSource(crow_indices, counts, slices, words, order, 1, g.rows, g.slices)
        self.kernel(mA, mB, mD, source, EpilogueArgs(bias, residual, alpha, beta), group, max_ctas, stream)

    def whole(self, d: cute.Tensor) -> cute.Tensor:
        """(M, N, 1, L)"""
        (M, N, L), (sM, sN, sL) = self.oriented(d)
        return view(d, (M, N, 1, L), (sM, sN, 0, sL))
