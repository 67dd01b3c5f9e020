"""A GEMM problem as the kernels see it: the input of kernel selection."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..operand import Layout
from ..tile.element import Element, element_of
from .config import BlockFacts, EpilogueSpec

STATS_ROWS = 192  # of PatternStats


@dataclass(frozen=True)
class Extents:
    """Shape of a GEMM."""

    M: int
    N: int
    K: int
    L: int = 1


class PatternStats(NamedTuple):
    """Statistics of a sparse operand's pattern, as fractions of its block columns. None assumes random blocks.

    listed: columns in which a group of STATS_ROWS rows has a block. longest: columns of the longest block row.
    """

    listed: float | None = None
    longest: float | None = None


NOT_KNOWN = PatternStats()


@dataclass(frozen=True)
class Problem:
    """A GEMM problem as the kernels see it: extents, operand layouts (A, B, D) and epilogue."""

    extents: Extents
    dtype: str
    out_dtype: str
    layouts: tuple[Layout, Layout, Layout]
    majors: tuple[str, str, str]
    ranks: tuple[int, int, int]
    epilogue: EpilogueSpec
    block: Any = None  # BlockFacts of a BSR operand
    transposed: bool = False
    density: float = 1.0  # of the sparse operand, like `stats`
    stats: PatternStats = NOT_KNOWN
    use_fast_accum: bool = False  # see GemmFacts
    structured: bool = False  # True if A is 2:4 sparse; its layout is that of the stored half
    acc_dtype: str = "float32"  # accumulator that the kernel may use; see GemmFacts
    promoted: bool = False  # see GemmFacts
    source: Any = None  # see GemmFacts
    mma_rate: float = 1.0  # speed of the tensor cores relative to an FP32 accumulator

    @property
    def element(self) -> Element:
        """Element type of A and B."""
        return element_of(self.dtype)

    @property
    def width(self) -> int:
        """Bytes per element of A and B."""
        return self.element.width

    @property
    def promotes(self) -> bool:
        """True if partial sums are promoted to FP32, unless the kernel converts FP8 operands to FP16."""
        return self.promoted or self.width == 1 and not self.use_fast_accum


def listed_at_random(density: float, block: BlockFacts, rows: int) -> float:
    """Expected fraction of block columns in which `rows` rows of a random pattern have a block."""
    return 1 - (1 - density) ** max(1, rows // block.bm)
