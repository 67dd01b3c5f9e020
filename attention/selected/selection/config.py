"""Kernel parameters of the exact top k of rows of scores, and their selection."""

from dataclasses import dataclass
from typing import ClassVar

WARP = 32
VECTOR = 4  # FP32 scores of a load
VECTORS = 2  # loads of a thread in flight
PER_THREAD = 16  # entries of the buffer per thread
DIGIT = 256  # values of a digit of the radix select
DIGITS = 4  # of a key, at most
CAPACITIES = (2048, 4096, 8192, 16384)  # entries of a buffer; a CTA has a thread for PER_THREAD of them
SAMPLED = 2  # a row is sampled first if it has more candidates than this many times the sample
SAMPLE_DIGITS = 2  # of the bound that a sample gives
WARP_TOP = 32  # longest list that a warp selects
WARP_VALUES = (8, 16, 32, 64)  # scores per lane of a warp
WARPS = 4  # warps of a CTA, if each has a row


@dataclass(frozen=True)
class TopFacts:
    """Kernel parameters. A CTA selects from a row with a buffer of `capacity` candidates in shared memory; or, with
    capacity 0, a warp selects from a row with `values` scores per lane in registers."""

    family: ClassVar[str] = "top blocks"
    arch: str
    capacity: int
    values: int = 0

    @property
    def threads(self) -> int:
        return self.capacity // PER_THREAD if self.capacity else WARPS * WARP

    @property
    def chunk(self) -> int:
        """Scores that a CTA reads at once."""
        return self.threads * VECTOR * VECTORS

    @property
    def longest(self) -> int:
        """Longest list: the buffer holds it and a chunk."""
        return self.capacity - self.chunk if self.capacity else WARP_TOP

    @property
    def smem_bytes(self) -> int:
        """Keys and blocks of the buffer, histograms, four numbers per warp, and three more; blocks of a warp's row."""
        if not self.capacity:
            return WARPS * WARP * self.values * 4
        return 8 * self.capacity + 4 * DIGIT * DIGITS + 16 * self.threads // WARP + 16


def facts_for(arch: str, blocks: int, top: int) -> TopFacts | None:
    """Select the kernel for lists of `top` among `blocks` scores; None if the lists are too long."""
    if top <= WARP_TOP and blocks <= WARP * WARP_VALUES[-1]:
        return TopFacts(arch, 0, next(n for n in WARP_VALUES if n * WARP >= blocks))
    found = (TopFacts(arch, capacity) for capacity in CAPACITIES)
    return next((facts for facts in found if facts.longest >= top), None)
