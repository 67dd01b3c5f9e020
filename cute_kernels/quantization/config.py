"""What a quantising kernel is compiled from, and which one a tensor takes."""

from dataclasses import dataclass
from typing import ClassVar

from ..tile.element import element_of

THREADS = 256  # of a CTA
WARP = 32
GATE = 64  # columns of gates, and of what they multiply, in turn
BLOCK = 128  # rows and columns that share a scale, where blocks do
TOKENS_SERVED = (64, 128, 256)  # columns of tokens
MOST_BYTES = 512  # of a token: a CTA has 128 of them in registers
NO_TOKENS = 2.0**-24  # the scale of a block of tokens that are zeros
MOST_VECTORS = 8  # of a thread, 32 registers
LOOPED_VECTORS = 4  # of a thread in each turn, where a row is longer than that
AMAX_CTAS = 4  # of a multiprocessor, of the kernel that looks for the largest magnitude of a tensor


@dataclass(frozen=True)
class QuantizeFacts:
    """`step`: "groups", a scale for each group of numbers; or of one scale for all "amax" and then "values".

    A group is `rows` rows by `columns` columns of a matrix, or whole rows where columns is 0. So many `lanes` of a CTA
    share it, each of which has `vectors` of 16 bytes at once; not `held`: all that a group has takes several turns,
    and is read twice. The same lanes have `each` groups at once. With `gate`, an activation or "none", a row of x holds
    64 numbers of a gate and 64 that it multiplies in turn, and their products are what becomes 8 bits wide.

    `follows`, `leads`: see tile/chain.py.
    """

    family: ClassVar[str] = "quantize"
    arch: str
    dtype: str  # of x
    out_dtype: str
    step: str = "groups"
    rows: int = 1
    columns: int = 0
    lanes: int = THREADS
    vectors: int = LOOPED_VECTORS
    held: bool = True
    each: int = 1
    gate: str | None = None
    none: float = 1.0  # the scale of a group whose own would be no normal number
    follows: bool = False
    leads: bool = False

    def key(self) -> str:
        """A text that is the same in every process."""
        return repr(self)

    @property
    def elements(self) -> int:
        """Of a vector."""
        return element_of(self.dtype).vector


def facts_for(arch: str, dtype: str, out_dtype: str, per: str, columns: int) -> QuantizeFacts:
    """The kernel for a matrix of so many columns with a scale per "row", "tokens", "1x128" or "128x128"."""
    names, elements = (arch, dtype, out_dtype), element_of(dtype).vector
    if per == "1x128":
        return QuantizeFacts(*names, columns=BLOCK, lanes=8, vectors=BLOCK // elements // 8, each=2)
    if per == "128x128":
        return QuantizeFacts(*names, rows=BLOCK, columns=BLOCK, vectors=BLOCK * BLOCK // elements // THREADS)
    if per == "tokens":
        vectors = BLOCK * columns // elements // THREADS
        return QuantizeFacts(*names, rows=BLOCK, columns=columns, vectors=vectors, none=NO_TOKENS)
    vectors = -(-columns // elements)
    lanes = WARP if vectors <= WARP * 4 else THREADS
    each = 1 << (-(-vectors // lanes) - 1).bit_length()  # a power of two, so that there are few kernels
    held = each <= MOST_VECTORS
    return QuantizeFacts(*names, lanes=lanes, vectors=each if held else LOOPED_VECTORS, held=held)
