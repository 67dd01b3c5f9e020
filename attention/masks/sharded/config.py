"""Kernel parameters of sharded block masks."""

from dataclasses import dataclass
from typing import ClassVar

FAMILY = "sharded masks"
WORD = 32  # bits of a word
MOST_TILES = 4096  # of the whole sequence
MOST_WORDS = 8192  # of the bitmaps of all processes' tiles
MOST_SIZE = 1024  # processes
LINE = 2 * MOST_TILES // WORD  # words of a row's bitmap of blocks
THREADS = 128  # of a CTA that reads lists
DEAL_THREADS = 512  # of a CTA that deals tiles
AHEAD = 8  # loads of a thread in flight
SMEM = {
    "rows": MOST_TILES // WORD + 1,
    "deals": 2 * MOST_TILES + 2 * DEAL_THREADS + MOST_WORDS + MOST_TILES // WORD + MOST_SIZE + 1,
    "lists": 2 * LINE,
}  # words of shared memory, of all steps


@dataclass(frozen=True)
class ShardFacts:
    """The step: "rows" of tiles, their "deals", or the "lists" of one process."""

    family: ClassVar[str] = FAMILY
    arch: str
    step: str

    @property
    def smem_bytes(self) -> int:
        return SMEM[self.step] * 4
