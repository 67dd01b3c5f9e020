"""Tile and schedule of the kernels for sampled products."""

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.matmul.config import GemmConfig


@dataclass(frozen=True)
class SampledConfig(GemmConfig):
    """GemmConfig for a tile that is `boxes` parts of stored blocks of one block row, side by side."""

    family: ClassVar[str] = "sampled"
    boxes: int = 1

    @property
    def boxes_b(self) -> int:
        return self.boxes

    @property
    def box_n(self) -> int:
        """Columns of a box."""
        return self.tile_n // self.boxes

    @property
    def short(self) -> str:
        return super().short + f" {self.boxes} boxes"

    def __str__(self) -> str:
        return super().__str__() + f", {self.boxes} boxes of stored blocks"


def parts_of(block: int, side: int) -> int:
    """How many tiles, or boxes, of so many columns a block is cut into."""
    return -(-block // side)
