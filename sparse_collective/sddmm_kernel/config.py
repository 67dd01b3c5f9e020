"""Tile and schedule of the SDDMM kernels."""

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.matmul.config import GemmConfig


@dataclass(frozen=True)
class SampledConfig(GemmConfig):
    """GemmConfig for a tile of `boxes` parts of stored blocks of one block row, side by side."""

    family: ClassVar[str] = "sampled"
    boxes: int = 1

    @property
    def boxes_b(self) -> int:  # type: ignore[override]  # a constant of GemmConfig
        return self.boxes

    @property
    def box_n(self) -> int:
        """Columns per box."""
        return self.tile_n // self.boxes

    @property
    def short(self) -> str:
        return super().short + f" {self.boxes} boxes"

    def __str__(self) -> str:
        return super().__str__() + f", {self.boxes} boxes of stored blocks"


def parts_of(block: int, side: int) -> int:
    """Number of tiles, or boxes, with this many columns per block."""
    return -(-block // side)
