"""A product as the kernels see it: what its kernel is chosen by."""

from dataclasses import dataclass
from typing import NamedTuple

from ..operand import Layout
from ..tile.element import Element, element_of
from .config import BlockFacts, EpilogueSpec

STATS_ROWS = 192  # of PatternStats


@dataclass(frozen=True)
class Extents:
    """The shape of a product."""

    M: int
    N: int
    K: int
    L: int = 1


class PatternStats(NamedTuple):
    """What is known of a sparse operand's pattern, as shares of its block columns. None: as of blocks at random.

    listed: the columns in which a group of STATS_ROWS rows has a block. longest: that the longest block row has.
    """

    listed: float | None = None
    longest: float | None = None


NOT_KNOWN = PatternStats()


@dataclass(frozen=True)
class Problem:
    """A product as the kernels see it: extents, operand layouts (A, B, D) and what is fused."""

    extents: Extents
    dtype: str
    out_dtype: str
    layouts: tuple[Layout, Layout, Layout]
    majors: tuple[str, str, str]
    ranks: tuple[int, int, int]
    epilogue: EpilogueSpec
    block: BlockFacts | None = None
    transposed: bool = False
    density: float = 1.0  # of a sparse operand, as its statistics
    stats: PatternStats = NOT_KNOWN
    use_fast_accum: bool = False  # see GemmFacts
    structured: bool = False  # whether A is 2:4 sparse: its layout is that of the stored half
    acc_dtype: str = "float32"  # what sums may be kept in; see GemmFacts
    promoted: bool = False  # see GemmFacts
    mma_rate: float = 1.0  # how many times as fast tensor cores are as with fp32 sums

    @property
    def element(self) -> Element:
        """Of A and B."""
        return element_of(self.dtype)

    @property
    def width(self) -> int:
        """Bytes of an element of A and B."""
        return self.element.width


def listed_at_random(density: float, block: BlockFacts, rows: int) -> float:
    """The share of block columns in which `rows` rows of a random pattern have a block."""
    return 1 - (1 - density) ** max(1, rows // block.bm)
