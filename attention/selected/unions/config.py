"""Kernel parameters of union tiles, and their selection.

A query tile is SIDE rows, tokens * packed query heads: tile m has rows m * SIDE to before (m + 1) * SIDE, and the
tokens of these rows, of which the first and the last may be in two tiles. The union of its tokens' lists is walked in
steps of SIDE keys, SIDE // block_size blocks each.
"""

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

SIDE = 128  # rows of a query tile, and keys of a step
WORD = 32  # bits of a word
THREADS = 128
BITS = 2048  # words of bits that are in shared memory at once; at least the tokens of a tile
BITMAPS = (128, 1024)  # words of a bitmap of KV blocks that kernels are compiled for; larger ones: multiples of 1024
BATCH = 8  # most loads of a thread in flight


@dataclass(frozen=True)
class UnionFacts:
    """Kernel parameters.

    bitmap: words of shared memory for the bitmap of KV blocks, a multiple of THREADS.
    lanes: threads that read one list, a power of two up to 32.
    batch: loads of a thread in flight.
    """

    family: ClassVar[str] = "union tiles"
    arch: str
    block_size: int
    bitmap: int
    lanes: int
    batch: int

    @property
    def per_step(self) -> int:
        """Blocks per step."""
        return SIDE // self.block_size

    @property
    def per_word(self) -> int:
        """Blocks per word of bits, a power of two."""
        return min(self.per_step, WORD)

    @property
    def words(self) -> int:
        """Words of bits per step and token."""
        return self.per_step // self.per_word

    @property
    def lists(self) -> int:
        """Lists that a CTA reads at once."""
        return THREADS // self.lanes

    @property
    def combines(self) -> bool:
        """True if most of the blocks that a warp reads at once have their bits in few words."""
        return self.per_word == WORD

    @property
    def smem_bytes(self) -> int:
        return (2 * self.bitmap + BITS) * 4 + 32


def facts_for(arch: str, block_size: int, kv_blocks: int, top: int) -> UnionFacts:
    """Select the kernel for lists of `top` among kv_blocks blocks."""
    words = -(-kv_blocks // WORD)
    bitmap = next((n for n in BITMAPS if n >= words), -(-words // BITMAPS[-1]) * BITMAPS[-1])
    lanes = min(32, 1 << max(top - 1, 0).bit_length())
    batch = min(BATCH, 1 << max(-(-top // lanes) - 1, 0).bit_length())
    return UnionFacts(arch, block_size, bitmap, lanes, batch)


def tokens_of(packed: int, side: int = SIDE) -> int:
    """The most tokens that a tile of `side` rows has rows of, `packed` rows each."""
    return (side - 1 + packed - gcd(side, packed)) // packed + 1
