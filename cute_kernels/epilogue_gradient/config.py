"""What the kernel of an epilogue's gradient is compiled from."""

from dataclasses import dataclass
from typing import ClassVar

from ..traced.program import Program

VECTOR = 8  # elements of 16 bytes
COLUMNS = 256  # of a CTA, one a thread
WARPS = 8
ROWS = 64  # of a CTA


@dataclass(frozen=True)
class EpilogueGradientFacts:
    """`derivative`: of what is stored of the forward pass, z or y. `sums`: whether columns are added up, too."""

    family: ClassVar[str] = "epilogue gradient"
    arch: str
    dtype: str  # of dy, z and dz
    derivative: Program
    sums: bool

    def key(self) -> str:
        """A text that is the same in every process."""
        return repr(self)
