"""GEMM with a 2:4 sparse A: views of torch's tensors, the source of K-tiles, and the kernel of either path."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..k_tiles import DenseKTiles, DenseSource
from ..matmul.config import GemmFacts
from ..matmul.dense import DenseGemm, batched, view
from ..matmul.epilogue.formula import EpilogueArgs
from ..matmul.kernel_sm80 import GemmSm80
from ..matmul.kernels import kernel_sm90
from .format import COLUMNS, SLAB, SPAN, WORDS
from .issue_sm90 import IssueSparse24
from .mainloop_sm80 import Sparse24MainloopSm80


class Sparse24KTile(NamedTuple):
    """A KTile with the addresses of A's metadata, one per 64 columns."""

    a: tuple  # (rest_m, rest_k, outer_a), of the stored half
    b: tuple  # (rest_k, outer_k)
    metadata: tuple


@dataclass(frozen=True)
class Sparse24KTiles(DenseKTiles):
    """All K-tiles of a row tile, in ascending order."""

    metadata: cute.Tensor  # (K / 64, M / 64, 128)
    tile: cutlass.Constexpr[tuple]  # (tile_m, tile_k)
    past_k: cutlass.Constexpr[bool]  # True if the last K-tile may lie past K rounded up

    def at(self, i) -> Sparse24KTile:
        tile_m, tile_k = self.tile
        spans, start = tile_k // SPAN, self.metadata.iterator.toint()
        rows, slabs = self.metadata.shape[1], tile_m // SLAB
        # A cluster's last row tile may lie past M rounded up: A is zeros there, and its metadata do not matter.
        slab = cutlass.min(self.m * slabs, rows - slabs)
        along = [i * spans + span for span in range(spans)]
        if const_expr(self.past_k):
            along = [cutlass.min(span, self.metadata.shape[0] - 1) for span in along]
        places = (Int64(span) * rows + slab for span in along)
        addresses = tuple(start + place * (WORDS * 4) for place in places)
        return Sparse24KTile((self.m, i, self.l), (i, Int32(0)), addresses)


@dataclass(frozen=True)
class Sparse24Source(DenseSource):
    """K-tile i of row tile m lies at (m, i), and so does its metadata."""

    metadata: cute.Tensor
    tile: cutlass.Constexpr[tuple]
    past_k: cutlass.Constexpr[bool]

    def for_tile(self, m, l, bounds) -> Sparse24KTiles:
        return Sparse24KTiles(self.count, m, Int32(0), self.metadata, self.tile, self.past_k)


def kernel_for(facts: GemmFacts):
    """The kernel of the facts' path for a 2:4 sparse A."""
    if facts.path != "sm_90":
        return GemmSm80(facts, Sparse24MainloopSm80)
    return kernel_sm90(facts, IssueSparse24(facts))


class Sparse24Gemm(DenseGemm):
    """The function that is compiled: d = A b, with A (M, K) stored as values (M, K / 2) and metadata, and b (K, N)."""

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
        *terms,  # see EpilogueArgs.of
    ):
        cfg = self.facts.config
        args, launch = EpilogueArgs.of(self.facts, terms)
        (M, _, _), stride = batched(a)
        mA = view(a, (M, a.shape[1], 1), stride)
        (K, N, _), (sK, sN, _) = batched(b)
        mB = view(b, (N, K, 1, 1), (sN, sK, 0, 0))
        tile = cfg.tile_m, cfg.tile_k
        source = Sparse24Source(cute.ceil_div(K, cfg.tile_k), Int32(1), metadata, tile, cfg.tile_k > COLUMNS)
        self.kernel(mA, mB, self.output(d), source, self.viewed(args), cute.ceil_div(M, cfg.tile_m), *launch)
