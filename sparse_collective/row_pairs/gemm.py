"""The sparse collective over pairs of block rows: a work tile is two rows of blocks 64 high, and sums over the columns
that either has. See pairs.PairPlan, and mainloop_pairs_sm90 for what is done with them.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.k_tiles import ANY, KTile
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.dense import view
from cute_kernels.matmul.epilogue import EpilogueArgs
from cute_kernels.matmul.kernel_sm90 import GemmSm90

from ..bsr_gemm import BsrGemm
from .mainloop_sm90 import RowPairsMainloopSm90


@dataclass(frozen=True)
class PairedKTiles:
    """K-tiles of one pair of block rows."""

    parts: cute.Tensor  # (pairs, 3), of entries
    entries: cute.Tensor  # (3, nnz)
    count: Int32
    begin: Int32  # the pair's first entry
    m: Int32
    l: Int32
    steps: cutlass.Constexpr[int]  # K-tiles a block
    blocks: Int32 | None = None  # of an item, of a batch: block p of item l is matrix p + l * blocks of values
    items: Int32 | None = None
    kinds: cutlass.Constexpr[tuple] = ((0, 1), (0,), (1,))  # halves of the tile that multiply

    def out(self, n) -> tuple:
        return self.m, n, Int32(0)

    @property
    def ends(self) -> tuple:
        """Where the K-tiles of both rows, of the upper row alone, and all end. Consumers ask, so it is no part of
        `bounds`, which take registers while a tile is stored."""
        both, upper = (Int32(self.parts[self.m, part]) * self.steps for part in range(2))
        return both, upper, self.count

    def at(self, i) -> KTile:
        """Its `a` is a pair as well: where the upper half lies, and where the lower."""
        p = self.begin + i // self.steps
        k = i % self.steps
        upper, lower = ((0, k, self.number(Int32(self.entries[1 + half, p]))) for half in range(2))
        return KTile(a=(upper, lower), b=(k, Int32(self.entries[0, p])))

    def number(self, block: Int32) -> Int32:
        """Where a block's values lie; past those of all items, where TMA reads zeros, if it is absent."""
        if self.blocks is None:
            return block
        present = Int32(block < self.blocks)
        return block + (present * (self.l - self.items + 1) + self.items - 1) * self.blocks


@dataclass(frozen=True)
class PairedSource:
    """The source of pairs: row tile m is the block rows 2m and 2m + 1."""

    crow_indices: cute.Tensor  # (M / bm + 1,) int32 or int64
    ends: cute.Tensor  # (pairs, 3)
    entries: cute.Tensor  # (3, nnz)
    steps: cutlass.Constexpr[int]
    order: cute.Tensor | None = None  # (tiles, 2), of the work tiles; see tile_order
    blocks: Int32 | None = None  # of an item, of a batch
    items: Int32 | None = None
    columns = None

    @property
    def shared_rows(self) -> int:
        """Other pairs have other columns."""
        return 1

    @property
    def shared_columns(self) -> int:
        return ANY

    def bounds(self, m, n, l) -> tuple:
        """(begin, count) of the pair's entries."""
        return Int32(self.crow_indices[2 * m]), Int32(self.ends[m, 2])

    def for_tile(self, m, l, bounds) -> PairedKTiles:
        begin, count = bounds
        steps, batch = self.steps, (self.blocks, self.items)
        return PairedKTiles(self.ends, self.entries, count * steps, begin, m, l, steps, *batch)


class RowPairsGemm(BsrGemm):
    """The same product as BsrGemm's, for blocks 64 high; a tile of D is 128 of all its rows."""

    def __init__(self, facts: GemmFacts):
        self.facts = facts
        self.kernel = GemmSm90(facts, RowPairsMainloopSm90)

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        ends: cute.Tensor,  # (pairs, 3)
        entries: cute.Tensor,  # (3, nnz)
        order: cute.Tensor | None,  # (tiles, 2), of the work tiles; see tile_order
        values: cute.Tensor,  # (nnz, bm, bk), or (L, nnz, bm, bk)
        b: cute.Tensor,
        d: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        z: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        bk = self.facts.block.bk
        blocks, items, matrices = None, None, values.shape[0]
        if const_expr(self.facts.block.batch is not None):
            items, blocks = values.shape[0], values.shape[1]
            matrices = items * blocks
        mA = self.block_view(values, matrices)
        (K, N, L), (sK, sN, sL) = self.oriented(b)
        mB = view(b, (N, bk, K // bk, L), (sN, sK, sK * bk, sL))
        mD = self.whole_output(d)
        if const_expr(residual is not None):
            residual = self.whole_output(residual)
        if const_expr(z is not None):
            z = self.whole_output(z)
        if const_expr(bias is not None):
            stride = bias.stride[0]
            if const_expr(self.facts.epilogue.bias_items):
                bias = view(bias, (bias.shape[1], 1, bias.shape[0]), (1, 0, stride))
            else:
                bias = view(bias, (bias.shape[0], 1), (stride, 0))
        steps = self.facts.k_tiles_per_block
        source = PairedSource(crow_indices, ends, entries, steps, order, blocks, items)
        args = EpilogueArgs(bias, residual, z, alpha, beta)
        self.kernel(mA, mB, mD, source, args, ends.shape[0], group, max_ctas, stream)

    def whole_output(self, d: cute.Tensor) -> cute.Tensor:
        """(M, N, 1, L): the last tile of an odd number of block rows is clipped at M."""
        (M, N, L), (sM, sN, sL) = self.oriented(d)
        return view(d, (M, N, 1, L), (sM, sN, 0, sL))
