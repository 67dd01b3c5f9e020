"""The sparse collective: a GEMM kernel of either path with the BSR source in place of the dense one.

Nothing of the loads, the pipelines or the tensor-core calls is here. What is here: torch's tensors re-viewed so that
a stored block and a block column are outer indices, and the source that walks a row's indices.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.dense import batched, view
from cute_kernels.matmul.epilogue.formula import EpilogueArgs
from cute_kernels.matmul.kernels import kernel_for

from .k_tiles import BsrSource


class BsrGemm:
    """(M, K) or (L, M, K) BSR times b (K, N) or (L, K, N) into d; with `facts.transposed`, b is (N, K) and d (N, M).

    A grouped product takes the item of W for each run of b's columns from `groups`, and has d of one matrix.
    """

    def __init__(self, facts: GemmFacts, kernel=None):
        self.facts = facts
        self.kernel = kernel_for(facts) if kernel is None else kernel

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,), or (L, M / bm + 1) of a pattern an item
        col_indices: cute.Tensor,  # (nnz,)
        order: cute.Tensor | None,  # (tiles, 2), of the work tiles; see tile_order
        groups: cute.Tensor | None,  # (N / run,) int32, of a grouped product
        numbers: cute.Tensor | None,  # (nnz,) int32, of a transposed view: which stored block each block is
        values: cute.Tensor,  # (nnz, bm, bk), or (L, nnz, bm, bk) of one pattern; of a transposed view (.., bk, bm)
        b: cute.Tensor,
        d: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        z: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32 | None,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        args = EpilogueArgs(bias, residual, z, alpha, beta)
        self.launch(
            crow_indices, col_indices, order, groups, numbers, values, None, b, d, args, group, max_ctas, stream
        )  # fmt: skip

    @cute.jit
    def launch(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        order: cute.Tensor | None,
        groups: cute.Tensor | None,
        numbers: cute.Tensor | None,
        values: cute.Tensor,
        of_blocks: cute.Tensor | None,  # what each stored block has besides its values; see source
        b: cute.Tensor,
        d: cute.Tensor,
        args: EpilogueArgs,  # of torch's tensors; scales as the kernel has them
        group: Int32 | None,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        facts, cfg = self.facts, self.facts.config
        bias, residual, z = args.bias, args.residual, args.z
        bm, bk = facts.block.bm, facts.block.bk
        batch, items, blocks = facts.block.batch, None, values.shape[0]
        if const_expr(batch == "values"):
            items, blocks = values.shape[0], values.shape[0] * values.shape[1]
        if const_expr(batch == "patterns"):
            items, length = crow_indices.shape
            crow_indices = view(crow_indices, (length, items), (1, length))
        rows = crow_indices.shape[0] - 1
        mA = self.block_view(values, blocks)
        (K, N, L), (sK, sN, sL) = self.oriented(b)
        mB = view(b, (N, bk, K // bk, L), (sN, sK, sK * bk, sL))
        mD = self.output(d, rows)
        if const_expr(residual is not None):
            residual = self.output(residual, rows)
        if const_expr(z is not None):
            z = self.output(z, rows)
        if const_expr(bias is not None):
            # (bias extent, outer_m): a row bias continues with every block row, a column bias is the same for all
            stride = bias.stride[0]
            if const_expr(facts.epilogue.bias_items):
                bias = view(bias, (bm, rows, bias.shape[0]), (1, bm, stride))
            elif const_expr(facts.epilogue.bias == "row"):
                bias = view(bias, (bm, rows), (stride, stride * bm))
            else:
                bias = view(bias, (bias.shape[0], rows), (stride, 0))
        tiles_m, tiles_run = -(-bm // cfg.tile_m), max(1, facts.block.run // cfg.tile_n)
        source = self.source(
            of_blocks, crow_indices=crow_indices, col_indices=col_indices, tiles_m=tiles_m,
            steps=facts.k_tiles_per_block, order=order, batch=batch, items=items, groups=groups, tiles_run=tiles_run,
            numbers=numbers,
        )  # fmt: skip
        more = args.scale_m, args.scale_n, args.scale_out, args.amax
        args = EpilogueArgs(bias, residual, z, args.alpha, args.beta, *more)
        self.kernel(mA, mB, mD, source, args, rows * tiles_m, group, max_ctas, stream)

    def source(self, of_blocks: cute.Tensor | None, **terms) -> BsrSource:
        """of_blocks: (blocks,) fp32, the scale of each."""
        return BsrSource(**terms, scales=of_blocks)

    def block_view(self, values: cute.Tensor, blocks: Int32) -> cute.Tensor:
        """(bm, bk, blocks)"""
        bm, bk = self.facts.block.bm, self.facts.block.bk
        return view(values, (bm, bk, blocks), (1, bm, bm * bk) if self.facts.block.permuted else (bk, 1, bm * bk))

    def oriented(self, tensor: cute.Tensor) -> tuple[tuple, tuple]:
        """((rows, cols, L), strides) with rows along W's own modes, whichever way round the tensor came."""
        shape, stride = batched(tensor)
        if self.facts.transposed:
            shape, stride = (shape[1], shape[0], shape[2]), (stride[1], stride[0], stride[2])
        return shape, stride

    def output(self, d: cute.Tensor, rows: Int32) -> cute.Tensor:
        """(bm, N, M / bm, L); of a gated product half as many rows."""
        bm = self.facts.block.bm // (1 + self.facts.epilogue.gated)
        (_, N, L), (sM, sN, sL) = self.oriented(d)
        return view(d, (bm, N, rows, L), (sM, sN, sM * bm, sL))


class ScaledBsrGemm(BsrGemm):
    """BsrGemm in FP8 with scales: one for W or one per stored block, and one per column of b."""

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        order: cute.Tensor | None,
        groups: cute.Tensor | None,
        numbers: cute.Tensor | None,
        values: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scales: cute.Tensor | None,  # (1,) fp32, or (blocks,), in the order of values
        scale_b: cute.Tensor | None,  # (1 or L, 1 or N) fp32
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        z: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32 | None,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        of_blocks, scale_m, scale_n = self.scales_of(scales, scale_b, d)
        args = EpilogueArgs(bias, residual, z, alpha, beta, scale_m, scale_n)
        self.launch(
            crow_indices, col_indices, order, groups, numbers, values, of_blocks, b, d, args, group, max_ctas, stream
        )  # fmt: skip

    def scales_of(self, scales: cute.Tensor | None, scale_b: cute.Tensor | None, d: cute.Tensor) -> tuple:
        """(of stored blocks, of W (1, L), of b's columns (1 or N, L)), None of what there is none of."""
        items = d.shape[0] if len(d.shape) == 3 else 1
        of_blocks = scales if self.facts.block.scaled else None
        scale_m = None if scales is None or self.facts.block.scaled else view(scales, (1, items), (0, 0))
        if self.facts.epilogue.scale_n == "tensor":
            scale_b = view(scale_b, (1, items), (0, 0))
        elif scale_b is not None:
            scale_b = view(scale_b, (scale_b.shape[1], scale_b.shape[0]), (scale_b.stride[1], scale_b.stride[0]))
        return of_blocks, scale_m, scale_b


class NarrowBsrGemm(ScaledBsrGemm):
    """ScaledBsrGemm with operands of any dtype and an FP8 output; see NarrowGemm."""

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        order: cute.Tensor | None,
        groups: cute.Tensor | None,
        numbers: cute.Tensor | None,
        values: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scales: cute.Tensor | None,
        scale_b: cute.Tensor | None,
        scale_out: cute.Tensor | None,  # (1,) fp32
        amax: cute.Tensor | None,  # (1,) fp32, which is raised
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        z: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32 | None,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        of_blocks, scale_m, scale_n = self.scales_of(scales, scale_b, d)
        args = EpilogueArgs(bias, residual, z, alpha, beta, scale_m, scale_n, scale_out, amax)
        self.launch(
            crow_indices, col_indices, order, groups, numbers, values, of_blocks, b, d, args, group, max_ctas, stream
        )  # fmt: skip
