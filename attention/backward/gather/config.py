"""Kernel parameters of backward with gathered KV tiles."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.tile.element import Element, element_of

from ...selected.unions.config import SIDE
from ..config import ALIGN

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (1, 4, 16, 64)  # tokens of a KV block, at most those of a KV tile
KEYS = 64  # of a KV tile: the rows of one WGMMA of dK and dV
GROUPS = 2


@dataclass(frozen=True)
class Tiles:
    """Tiles of all kernels: query rows, keys, consumer warpgroups."""

    tile_m: int = SIDE
    tile_n: int = KEYS
    groups: int = GROUPS

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n} groups {self.groups}"


@dataclass(frozen=True)
class GatherBackwardFacts:
    """Everything that selects one compiled kernel.

    block_size, causal: see forward.config.GatherFacts.
    lse_gradient: True if LSE has a gradient.
    """

    family: ClassVar[str] = "gathered backward"
    path: ClassVar[str] = "sm_90"
    config: ClassVar[Tiles] = Tiles()
    boxes: ClassVar[bool] = False  # see forward.config.GatherFacts
    arch: str
    dtype: str = "bfloat16"
    head_dim: int = 128
    block_size: int = 4
    causal: bool = True
    lse_gradient: bool = False

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @cached_property
    def element(self) -> Element:
        """Element type of Q, K, V, O and their gradients."""
        return element_of(self.dtype)

    @property
    def per_tile(self) -> int:
        """Blocks of a KV tile."""
        return self.config.tile_n // self.block_size

    @property
    def stages(self) -> int:
        """Stages of the rings of K and V, as many as there is room for, up to two."""
        return 1 if self.head_dim > 128 else 2

    @property
    def splits(self) -> bool:
        """True if the warpgroups split the columns of dK and dV; otherwise the first has dV, and the second dK."""
        return self.head_dim > KEYS

    @property
    def columns(self) -> int:
        """Columns of dK or dV that a warpgroup computes at a time."""
        return KEYS

    @property
    def parts(self) -> int:
        """Number of times that a warpgroup computes such columns of dK or of dV."""
        return self.head_dim // (KEYS * GROUPS) if self.splits else 1

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory: barriers and delta, padded, Q, dO, K and V, P and dS."""
        rows = 2 * (self.config.tile_m + self.stages * KEYS) * self.head_dim + 2 * self.config.tile_m * KEYS
        return rows * self.element.width + ALIGN
