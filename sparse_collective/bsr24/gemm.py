"""GEMM with 2:4 sparse blocks: the source of stored blocks and their metadata, and the kernel of either path with the
mainloop of cute_kernels.sparse24."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.dense import view
from cute_kernels.sparse24.format import KEPT, SLAB, SPAN, WORDS
from cute_kernels.sparse24.product import Sparse24KTile, kernel_for

from ..bsr_gemm.k_tiles import BsrKTiles, BsrSource
from ..bsr_gemm.kernel import BsrGemm


@dataclass(frozen=True)
class Bsr24KTiles(BsrKTiles):
    """BsrKTiles with the addresses of each K-tile's metadata."""

    metadata: cute.Tensor | None = None  # (blocks, bk / 64, bm / 64, 128), of one batch or matrix
    block: cutlass.Constexpr[tuple] = ()  # (bm, bk)
    tile: cutlass.Constexpr[tuple] = ()  # (tile_m, tile_k)

    def at(self, i) -> Sparse24KTile:
        tile = BsrKTiles.at(self, i)
        (bm, bk), (tile_m, tile_k) = self.block, self.tile
        _, k, number = tile.a
        spans, slabs = tile_k // SPAN, tile_m // SLAB
        first = (Int64(number) * (bk // SPAN) + k * spans) * (bm // SLAB) + self.rest_m * slabs
        start = self.metadata.iterator.toint()
        addresses = (start + (first + span * (bm // SLAB)) * (WORDS * 4) for span in range(spans))
        return Sparse24KTile(tile.a, tile.b, tuple(addresses))


@dataclass(frozen=True)
class Bsr24Source(BsrSource):
    """BsrSource with 2:4 sparse blocks."""

    metadata: cute.Tensor | None = None
    block: cutlass.Constexpr[tuple] = ()
    tile: cutlass.Constexpr[tuple] = ()

    def for_tile(self, m, l, bounds) -> Bsr24KTiles:
        k_tiles = BsrSource.for_tile(self, m, l, bounds)
        return Bsr24KTiles(**vars(k_tiles), metadata=self.metadata, block=self.block, tile=self.tile)


class Bsr24Gemm(BsrGemm):
    """BsrGemm with half of each block stored: values (nnz, bm, bk / 2), or (L, nnz, bm, bk / 2) for one pattern."""

    def __init__(self, facts: GemmFacts):
        self.facts = facts
        self.kernel = kernel_for(facts)

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        order: cute.Tensor | None,
        groups: cute.Tensor | None,
        metadata: cute.Tensor,  # (blocks, bk / 64, bm / 64, 128) int32, contiguous; of a batch with one pattern
        values: cute.Tensor,  # (L, nnz, ...)
        b: cute.Tensor,
        d: cute.Tensor,
        *terms,  # see BsrGemm
    ):
        self.launch(crow_indices, col_indices, order, groups, None, values, metadata, b, d, terms)

    def block_view(self, values: cute.Tensor, blocks: Int32) -> cute.Tensor:
        """(bm, bk / 2, blocks)"""
        bm, stored = self.facts.block.bm, self.facts.block.bk // KEPT
        return view(values, (bm, stored, blocks), (stored, 1, bm * stored))

    def source(self, metadata: cute.Tensor, **terms) -> Bsr24Source:
        cfg, block = self.facts.config, self.facts.block
        return Bsr24Source(**terms, metadata=metadata, block=(block.bm, block.bk), tile=(cfg.tile_m, cfg.tile_k))
