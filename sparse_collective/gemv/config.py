"""Tile and schedule of the kernel for at most 16 columns."""

import math
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.tile.element import BITS_16

LANES_K = 4  # lanes per row of W in a warp
PAD = 4  # floats of padding per column of a warp's partial sums in shared memory: no bank conflicts
# Registers that `registers` does not count, for a B loaded in vectors and by element: with these, no kernel spills on
# any architecture with any epilogue.
OTHER_REGISTERS = {"vectors": 28, "elements": 48}


@dataclass(frozen=True)
class SkinnyConfig:
    """Each of `warps` warps accumulates the whole tile over its pieces of K, `stages` times 4 K-tiles each.

    A K-tile is the part of a row that a lane loads at a time: 16 bytes, or less for narrow blocks with a scale each.
    """

    family: ClassVar[str] = "skinny"
    warp_specialised: ClassVar[bool] = False
    panels: ClassVar[bool] = False
    converts: ClassVar[bool] = True
    cluster_m: ClassVar[int] = 1
    cluster_n: ClassVar[int] = 1
    cluster: ClassVar[int] = 1
    split: ClassVar[int] = 1
    stored: ClassVar[int] = 1
    tile_m: int
    tile_n: int
    stages: int
    warps: int
    tile_k: int = BITS_16.vector

    @property
    def short(self) -> str:
        k_tile = "" if self.tile_k == BITS_16.vector else f"x{self.tile_k}"
        return f"{self.tile_m}x{self.tile_n}{k_tile}/{self.stages} {self.warps} warps skinny"

    def __str__(self) -> str:
        k_tile = "" if self.tile_k == BITS_16.vector else f"x{self.tile_k}"
        return f"{self.tile_m}x{self.tile_n}{k_tile} stages {self.stages} warps {self.warps} skinny"


def loads_vectors(facts: GemmFacts) -> bool:
    """True if B is loaded in vectors like W, False if element by element."""
    return facts.majors[1] == "k" and facts.aligns[1] == facts.element.vector


def span(facts: GemmFacts) -> int:
    """Number of consecutive K-tiles of a lane that always lie in one block."""
    steps, rest = divmod(facts.block.bk, LANES_K * facts.config.tile_k)
    return 1 if rest else math.gcd(steps, facts.config.stages)


def lane_words(facts: GemmFacts) -> int:
    """Registers of a K-tile, the part of a row that a lane loads at a time."""
    return facts.config.tile_k * facts.element.width // 4


def converts_by_bits(facts: GemmFacts) -> bool:
    """True if FP8 is converted by integer instructions that only move bits, and accumulators are rescaled at the
    end."""
    return facts.dtype == "float8_e4m3fn" and facts.spec.capability < (8, 9)


def registers(facts: GemmFacts) -> int:
    """Registers per thread: loaded parts of W and B, accumulators, and the rest."""
    cfg = facts.config
    mmas_m, mmas_n = cfg.tile_m // 16, cfg.tile_n // 8
    loaded = (2 * mmas_m + mmas_n) * lane_words(facts) * cfg.stages
    rest = OTHER_REGISTERS["vectors" if loads_vectors(facts) else "elements"]
    if facts.element.width == 1:
        rest += float8_registers(facts)
    return -(-(loaded + 4 * mmas_m * mmas_n + rest) // 8) * 8


def float8_registers(facts: GemmFacts) -> int:
    """Additional registers for FP8, found by compiling: partial sums of a block, an index and a scale per possible
    block of a piece, conversion, and addresses of many narrow K-tiles."""
    cfg = facts.config
    mmas, places = cfg.tile_m // 16 * (cfg.tile_n // 8), cfg.stages // span(facts)
    needed = 4 * mmas + 2 * places if facts.block.scaled else 8
    needed += 32 if converts_by_bits(facts) or cfg.tile_m == 32 else 0
    return needed + (16 if cfg.tile_k < facts.element.vector else 0)
