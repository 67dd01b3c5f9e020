"""Tile and schedule of the kernel for at most 16 columns."""

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.matmul.config import GemmFacts
from cute_kernels.tile.element import BITS_16

VECTOR = BITS_16.vector  # K elements that a lane loads at a time: 16 bytes
PAD = 4  # floats between the columns of a warp's sums, so that its lanes write to 32 banks
# What a thread needs besides what `registers` counts, where B is loaded in vectors, and by element: with these none
# spills, compiled for all architectures with every epilogue.
OTHER_REGISTERS = {"vectors": 28, "elements": 48}


@dataclass(frozen=True)
class SkinnyConfig:
    """`warps` warps each sum all of a tile, over pieces of K that are `stages` times 4 K-tiles of 8."""

    family: ClassVar[str] = "skinny"
    warp_specialised: ClassVar[bool] = False
    panels: ClassVar[bool] = False
    tile_k: ClassVar[int] = VECTOR
    cluster_m: ClassVar[int] = 1
    cluster_n: ClassVar[int] = 1
    cluster: ClassVar[int] = 1
    split: ClassVar[int] = 1
    tile_m: int
    tile_n: int
    stages: int
    warps: int

    @property
    def short(self) -> str:
        return f"{self.tile_m}x{self.tile_n}/{self.stages} {self.warps} warps skinny"

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n} stages {self.stages} warps {self.warps} skinny"


def loads_vectors(facts: GemmFacts) -> bool:
    """Whether B is loaded as W is, and not element by element."""
    return facts.majors[1] == "k" and facts.aligns[1] == VECTOR


def registers(facts: GemmFacts) -> int:
    """Registers of a thread: what it has loaded of W and B, its sums, all the rest."""
    cfg = facts.config
    mmas_m, mmas_n = cfg.tile_m // 16, cfg.tile_n // 8
    loaded = (8 * mmas_m + 4 * mmas_n) * cfg.stages
    rest = OTHER_REGISTERS["vectors" if loads_vectors(facts) else "elements"]
    return -(-(loaded + 4 * mmas_m * mmas_n + rest) // 8) * 8
