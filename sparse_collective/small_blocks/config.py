"""Tile and schedule of the kernel for blocks 16 to 64 high."""

from dataclasses import dataclass
from typing import ClassVar

from .tile import CHUNK, CONSUMERS, ROWS


@dataclass(frozen=True)
class SmallBlocksConfig:
    """A group of ROWS rows a consumer by `tile_n` columns. B alone has `stages`; A's rings hold `chunks` full chunks:
    the more, the earlier blocks are loaded. A cluster of `cluster_m` CTAs shares B.
    """

    family: ClassVar[str] = "small blocks"
    warp_specialised: ClassVar[bool] = True
    panels: ClassVar[bool] = True
    waits: ClassVar[bool] = False
    converts: ClassVar[bool] = False
    tile_m: ClassVar[int] = ROWS * CONSUMERS
    tile_k: ClassVar[int] = CHUNK
    warps_m: ClassVar[int] = CONSUMERS
    warps_n: ClassVar[int] = 1
    cluster_n: ClassVar[int] = 1
    consumer_groups: ClassVar[int] = 1
    ring: ClassVar[int] = 1
    rings: ClassVar[int] = 1
    split: ClassVar[int] = 1
    boxes_b: ClassVar[int] = 1
    split_k_bytes: ClassVar[int] = 0
    tile_n: int
    stages: int
    chunks: int = 2
    cluster_m: int = 1
    store_row: int = 64

    @property
    def cluster(self) -> int:
        """CTAs that take work tiles together."""
        return self.cluster_m

    @property
    def stage_elements(self) -> int:
        """In shared memory: one stage of B."""
        return self.tile_n * self.tile_k

    @property
    def chunk_elements(self) -> int:
        """In shared memory: A's rings."""
        return self.chunks * self.tile_m * self.tile_k

    @property
    def operand_elements(self) -> int:
        return self.stage_elements * self.stages + self.chunk_elements

    @property
    def short(self) -> str:
        text = f"{self.tile_m}x{self.tile_n}x{self.tile_k}/{self.stages} {self.chunks} chunks"
        return text + (f" c{self.cluster_m}x1" if self.cluster_m > 1 else "") + " small blocks"

    def __str__(self) -> str:
        text = f"{self.tile_m}x{self.tile_n}x{self.tile_k} stages {self.stages} chunks {self.chunks} small blocks"
        return text + (f" cluster {self.cluster_m}x1" if self.cluster_m > 1 else "")
