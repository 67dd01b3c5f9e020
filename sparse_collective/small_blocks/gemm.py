"""BsrGemm around the small-block kernel: groups of rows and their chunks in place of work tiles and K-tiles."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.dense import column, view
from cute_kernels.matmul.epilogue.formula import EpilogueArgs

from ..bsr_gemm.kernel import BsrGemm
from .kernel_sm90 import SmallBlocksSm90
from .tile import CONSUMERS


@dataclass(frozen=True)
class GroupChunks:
    """The chunks that one CTA's group of rows multiplies, and the slices of B they consist of; see tables.py."""

    slices: cute.Tensor  # (slices of a row,)
    words: cute.Tensor  # (chunks of a row, 4 or 8)
    needed: Int32  # slices
    rank: Int32  # of the CTA in its cluster
    per_chunk: cutlass.Constexpr[int]  # slices

    @property
    def count(self) -> Int32:
        return (self.needed + (self.per_chunk - 1)) // self.per_chunk

    def slice(self, i) -> Int32:
        """Past the last slice, that one again: it fills a chunk, and no bit asks for it."""
        return self.slices[cutlass.min(i, self.needed - 1)]

    def word(self, i, consumer) -> Int32:
        return self.words[cutlass.min(i, self.count - 1), self.rank * CONSUMERS + consumer]


@dataclass(frozen=True)
class ChunkSource:
    """The small-block kernel's source: what a group of rows needs, and its blocks in the order they are met."""

    crow_indices: cute.Tensor  # (M / bm + 1,) int32 or int64
    counts: cute.Tensor  # (groups,)
    slices: cute.Tensor  # (groups, slices of a row)
    words: cute.Tensor  # (groups, chunks of a row, 4 or 8)
    order: cute.Tensor  # (max(nnz, 1),) of the stored blocks
    cluster: cutlass.Constexpr[int]
    rows: cutlass.Constexpr[int]  # block rows of a consumer
    per_chunk: cutlass.Constexpr[int]  # slices
    blocks: Int32 | None = None  # of an item, of a batch: block p of item l is matrix p + l * blocks of values

    def for_tile(self, m, rank) -> GroupChunks:
        return GroupChunks(self.slices[m, None], self.words[m, None, None], self.counts[m], rank, self.per_chunk)

    def first_block(self, m, rank, consumer) -> Int32:
        """Index in `order` of a consumer's first block."""
        row = ((m * self.cluster + rank) * CONSUMERS + consumer) * self.rows
        return Int32(self.crow_indices[cutlass.min(row, self.crow_indices.shape[0] - 1)])

    def block(self, i) -> Int32:
        return self.order[cutlass.min(i, self.order.shape[0] - 1)]


class SmallBlocksGemm(BsrGemm):
    """The same product as BsrGemm's by the small-block kernel, whose rows are D's columns."""

    def __init__(self, facts: GemmFacts):
        self.facts = facts
        self.kernel = SmallBlocksSm90(facts)

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        counts: cute.Tensor,
        slices: cute.Tensor,
        words: cute.Tensor,
        order: cute.Tensor,
        values: cute.Tensor,  # (nnz, bm, bk), or (L, nnz, bm, bk); of a transposed view (.., bk, bm)
        b: cute.Tensor,
        d: cute.Tensor,
        *terms,  # see EpilogueArgs.of
    ):
        facts = self.facts
        blocks, matrices = None, values.shape[0]
        if const_expr(facts.block.batch is not None):
            blocks, matrices = values.shape[1], values.shape[0] * values.shape[1]
        mA = self.block_view(values, matrices)
        (K, N, L), (sK, sN, sL) = self.oriented(b)
        mB = view(b, (N, K, L), (sN, sK, sL))
        g = self.kernel.geometry
        source = ChunkSource(
            crow_indices, counts, slices, words, order, facts.config.cluster_m, g.rows, g.slices, blocks
        )
        args, launch = EpilogueArgs.of(facts, terms)
        args = args.viewed(residual=self.swapped_output, z=self.swapped_output, bias=self.columns)
        self.kernel(mA, mB, self.swapped_output(d), source, args, *launch)

    def columns(self, bias: cute.Tensor) -> cute.Tensor:
        """(M, 1), or (M, 1, L) of one for each batch item."""
        if self.facts.epilogue.bias_items:
            return view(bias, (bias.shape[1], 1, bias.shape[0]), (1, 0, bias.stride[0]))
        return column(bias)

    def block_view(self, values: cute.Tensor, blocks: Int32) -> cute.Tensor:
        """(bm / fold, bk fold, blocks), contiguous along the second mode; of a transposed view along the first."""
        bm, bk, fold = self.facts.block.bm, self.facts.block.bk, self.kernel.fold
        stride = (1, bm, bm * bk) if self.facts.block.permuted else (bk * fold, 1, bm * bk)
        return view(values, (bm // fold, bk * fold, blocks), stride)

    def swapped_output(self, d: cute.Tensor) -> cute.Tensor:
        """(N, M, 1, L)"""
        (M, N, L), (sM, sN, sL) = self.oriented(d)
        return view(d, (N, M, 1, L), (sN, sM, 0, sL))
