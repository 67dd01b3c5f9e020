"""A product with a 2:4 sparse A as a kernel sees it: torch's tensors re-viewed, the source, and a kernel of
either path."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..k_tiles import DenseKTiles, DenseSource
from ..matmul.config import GemmFacts
from ..matmul.dense import DenseGemm, batched, view
from ..matmul.epilogue import EpilogueArgs
from ..matmul.kernel_sm80 import GemmSm80
from ..matmul.kernel_sm90 import GemmSm90
from .format import SLAB, SPAN, WORDS
from .mainloop_sm80 import Sparse24MainloopSm80
from .mainloop_sm90 import Sparse24MainloopSm90


class Sparse24KTile(NamedTuple):
    """A KTile, and the addresses of A's metadata, of each 64 columns."""

    a: tuple  # (rest_m, rest_k, outer_a), of the stored half
    b: tuple  # (rest_k, outer_k)
    metadata: tuple


@dataclass(frozen=True)
class Sparse24KTiles(DenseKTiles):
    """All K-tiles of a row tile, in ascending order."""

    metadata: cute.Tensor  # (K / 64, M / 64, 128)
    tile: cutlass.Constexpr[tuple]  # (tile_m, tile_k)

    def at(self, i) -> Sparse24KTile:
        tile_m, tile_k = self.tile
        spans, start = tile_k // SPAN, self.metadata.iterator.toint()
        rows, slabs = self.metadata.shape[1], tile_m // SLAB
        # A cluster's last row tile may lie past M rounded up: A is zeros there, and any metadata do.
        slab = cutlass.min(self.m * slabs, rows - slabs)
        places = (Int64(i * spans + span) * rows + slab for span in range(spans))
        addresses = tuple(start + place * (WORDS * 4) for place in places)
        return Sparse24KTile((self.m, i, self.l), (i, Int32(0)), addresses)


@dataclass(frozen=True)
class Sparse24Source(DenseSource):
    """K-tile i of row tile m lies at (m, i), and so does its metadata."""

    metadata: cute.Tensor
    tile: cutlass.Constexpr[tuple]

    def for_tile(self, m, l, bounds) -> Sparse24KTiles:
        return Sparse24KTiles(self.count, m, Int32(0), self.metadata, self.tile)


def kernel_for(facts: GemmFacts):
    """The kernel of the facts' path, with the mainloop of a 2:4 sparse A."""
    if facts.path != "sm_90":
        return GemmSm80(facts, Sparse24MainloopSm80)
    return GemmSm90(facts, partial(Sparse24MainloopSm90, facts=facts))


class Sparse24Gemm(DenseGemm):
    """A (M, K), of which values (M, K / 2) are stored, times b (K, N) into d; what a kernel is compiled from."""

    def __init__(self, facts: GemmFacts):
        self.facts = facts
        self.kernel = kernel_for(facts)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K / 2)
        metadata: cute.Tensor,  # (K / 64, M / 64, 128) int32, contiguous
        b: cute.Tensor,
        d: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        group: Int32,
        max_ctas: Int32 | None,
        stream: cuda.CUstream,
    ):
        cfg = self.facts.config
        (M, _, _), stride = batched(a)
        mA = view(a, (M, a.shape[1], 1), stride)
        (K, N, _), (sK, sN, _) = batched(b)
        mB = view(b, (N, K, 1, 1), (sN, sK, 0, 0))
        if const_expr(residual is not None):
            residual = self.output(residual)
        if const_expr(bias is not None):
            bias = view(bias, (bias.shape[0], 1), (bias.stride[0], 0))
        source = Sparse24Source(cute.ceil_div(K, cfg.tile_k), Int32(1), metadata, (cfg.tile_m, cfg.tile_k))
        args = EpilogueArgs(bias, residual, None, alpha, beta)
        rows = cute.ceil_div(M, cfg.tile_m)
        self.kernel(mA, mB, self.output(d), source, args, rows, group, max_ctas, stream)
