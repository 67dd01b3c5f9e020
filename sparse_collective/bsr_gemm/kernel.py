"""The sparse collective: a GEMM kernel of either path with the BSR source in place of the dense one.

Nothing of the loads, the pipelines or the tensor-core calls is here. What is here: torch's tensors re-viewed so that
a stored block and a block column are outer indices, and the source that walks a row's indices.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.dense import batched, extent_first, view
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
        *terms,  # see EpilogueArgs.of; scale_m is (1,) of W or (blocks,) in the order of values
    ):
        self.launch(crow_indices, col_indices, order, groups, numbers, values, None, b, d, terms)

    @cute.jit
    def launch(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        order: cute.Tensor | None,
        groups: cute.Tensor | None,
        numbers: cute.Tensor | None,
        values: cute.Tensor,
        metadata: cute.Tensor | None,  # of 2:4 sparse blocks
        b: cute.Tensor,
        d: cute.Tensor,
        terms: tuple,
    ):
        facts, cfg = self.facts, self.facts.config
        args, launch = EpilogueArgs.of(facts, terms)
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
        tiles_m, tiles_run = -(-bm // cfg.tile_m), max(1, facts.block.run // cfg.tile_n)
        source = self.source(
            metadata, scales=args.scale_m if facts.block.scaled else None, crow_indices=crow_indices,
            col_indices=col_indices, tiles_m=tiles_m, steps=facts.k_tiles_per_block, order=order, batch=batch,
            items=items, groups=groups, tiles_run=tiles_run, numbers=numbers,
        )  # fmt: skip
        args = self.viewed(args, d, rows)
        self.kernel(mA, mB, self.output(d, rows), source, args, rows * tiles_m, *launch)

    def viewed(self, args: EpilogueArgs, d: cute.Tensor, rows: Int32) -> EpilogueArgs:
        """The epilogue's tensors as the kernel has them. Block scales belong to the source."""
        spec, bm, items = self.facts.epilogue, self.facts.block.bm, d.shape[0] if len(d.shape) == 3 else 1

        def output(t):
            return self.output(t, rows)

        def per_row(bias):
            # (bias extent, outer_m): a row bias continues with every block row, a column bias is the same for all
            stride = bias.stride[0]
            if spec.bias_items:
                return view(bias, (bm, rows, bias.shape[0]), (1, bm, stride))
            if spec.bias == "row":
                return view(bias, (bm, rows), (stride, stride * bm))
            return view(bias, (bias.shape[0], rows), (stride, 0))

        def one(scale):
            return view(scale, (1, items), (0, 0))

        return args.viewed(
            residual=output,
            z=output,
            bias=per_row,
            scale_m=(lambda scales: None) if self.facts.block.scaled else one,
            scale_n=one if spec.scale_n == "tensor" else extent_first,
        )

    def source(self, metadata: None, **terms) -> BsrSource:
        return BsrSource(**terms)

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
