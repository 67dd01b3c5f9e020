"""Kernel parameters of transposed lists."""

from dataclasses import dataclass
from typing import ClassVar

FAMILY = "transposed lists"
WORD = 32  # bits of a word
WORDS = 1024  # words of a row's bitmap
MOST_COLUMNS = WORDS * WORD
ROWS = 4  # rows of blocks of a CTA of the first kernel
WARPS = 16  # of a CTA of the second kernel


@dataclass(frozen=True)
class TransposeFacts:
    """The first kernel (rows) makes a bitmap of each row of blocks, the second one the transposed lists of these."""

    family: ClassVar[str] = FAMILY
    arch: str
    rows: bool

    @property
    def smem_bytes(self) -> int:
        return (ROWS * WORDS if self.rows else WARPS * WORD) * 4
