"""Kernel parameters of the tables of selected blocks, and their selection."""

from dataclasses import dataclass
from typing import ClassVar

from ..unions.config import SIDE, WORD

FAMILY = "selected tables"
THREADS = 128
WARPS = THREADS // 32
CHUNKS = (128, 1024)  # words of bits that a warp has in shared memory at once
COLUMNS = 1024  # words of the bitmap of columns of blocks
MOST_COLUMNS = COLUMNS * WORD * SIDE  # keys of a sequence
BATCH = 8  # most loads of a thread in flight
LONG = 64  # entries from which a warp combines the bits of a word


@dataclass(frozen=True)
class TableFacts:
    """Kernel parameters.

    chunk: words of bits that a warp has in shared memory at once.
    batch: loads of a thread in flight.
    combines: True if most of the blocks that a warp reads at once have their bits in few words.
    ranges: True for packed sequences: each token has a first column and an end.
    """

    family: ClassVar[str] = FAMILY
    arch: str
    block_size: int
    chunk: int
    batch: int
    combines: bool
    ranges: bool

    @property
    def smem_bytes(self) -> int:
        return (WARPS * self.chunk + COLUMNS) * 4


@dataclass(frozen=True)
class OrderFacts:
    """Parameters of the kernel that makes the table of query tiles."""

    family: ClassVar[str] = FAMILY
    arch: str


def facts_for(arch: str, block_size: int, kv_blocks: int, top: int, ranges: bool) -> TableFacts:
    """Select the kernel for lists of `top` among kv_blocks blocks."""
    words = -(-kv_blocks // WORD)
    chunk = next((n for n in CHUNKS if n >= words), CHUNKS[-1])
    batch = min(BATCH, 1 << max(-(-top // 32) - 1, 0).bit_length())
    return TableFacts(arch, block_size, chunk, batch, top >= LONG, ranges)
