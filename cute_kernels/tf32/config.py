"""Facts that a kernel which copies FP32 operands is compiled from."""

from dataclasses import dataclass
from typing import ClassVar

THREADS = 256  # of a CTA
UNROLL = 4  # vectors of a thread, of an operand that is contiguous along K
TILE_N, TILE_K = 32, 64  # of one that is not, which a CTA turns in shared memory


@dataclass(frozen=True)
class PartsFacts:
    """`parts`: 1, the numbers as they are, or the 3 of matmul.precision; of them number `small` is the small one.
    `turned`: the operand is contiguous along its rows, and the copy along K."""

    family: ClassVar[str] = "tf32 parts"
    arch: str
    parts: int
    small: int = 0
    turned: bool = False
