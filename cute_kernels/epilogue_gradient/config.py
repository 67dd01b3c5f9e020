"""Facts that the kernel of an epilogue's gradient is compiled from."""

from dataclasses import dataclass
from typing import ClassVar

from ..traced.program import Program

VECTOR = 8  # elements of 16 bytes
COLUMNS = 256  # of a CTA, one a thread
WARPS = 8
UNROLL = 2  # rows of a warp whose loads are in flight together
CTAS = 3  # of a multiprocessor: 80 registers a thread, of which GELU takes 73


def parts_of(rows: int, cols: int, sms: int) -> int:
    """CTAs that share the rows of COLUMNS columns: as many in all as are resident at once, each with equally many
    groups of rows. Where so many columns would leave a few of them or none, several times as many."""
    tiles, groups, resident = -(-cols // COLUMNS), -(-rows // (WARPS * UNROLL)), sms * CTAS
    parts = resident // tiles if 4 * tiles <= resident else -(-4 * resident // tiles)
    turns = -(-groups // max(1, min(parts, groups)))
    return -(-groups // turns)


@dataclass(frozen=True)
class EpilogueGradientFacts:
    """`derivative`: of what is stored of the forward pass, z or y. `sums`: whether columns are added up, too."""

    family: ClassVar[str] = "epilogue gradient"
    arch: str
    dtype: str  # of dy, z and dz
    derivative: Program
    sums: bool
