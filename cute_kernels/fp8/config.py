"""Kernel parameters of the quantization kernels, and their selection."""

from dataclasses import dataclass
from typing import ClassVar

from ..tile.element import element_of

THREADS = 256  # per CTA
WARP = 32
GATE = 64  # columns of gate and of up, which alternate
BLOCK = 128  # rows or columns per block scale
TOKENS_SERVED = (64, 128, 256)  # supported columns of tokens
MOST_BYTES = 512  # per token: a CTA holds 128 tokens in registers
NO_TOKENS = 2.0**-24  # scale of a block of tokens that are all zero
MOST_VECTORS = 8  # per thread, 32 registers
LOOPED_VECTORS = 4  # per thread and iteration, for longer rows
AMAX_CTAS = 4  # CTAs per SM of the amax kernel


@dataclass(frozen=True)
class QuantizeFacts:
    """Kernel parameters of one quantization kernel.

    step: "groups", one scale per group of elements; or, for one scale per tensor, "amax" and then "values".
    rows, columns: extents of a group; columns is 0 for whole rows.
    lanes, vectors: threads per group, and vectors of 16 bytes that each of them loads at once.
    held: True if the lanes hold a whole group in registers; otherwise it takes several iterations and is read twice.
    each: groups that the same lanes process at once.
    gate: an activation or "none"; a row of x then alternates 64 columns of gate and 64 of up, and activation(gate) * up
        is quantized.
    follows, leads: programmatic dependent launch as the secondary and the primary kernel; see tile/dependent_launch.py.
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
    none: float = 1.0  # scale of a group whose own would not be a normal number
    follows: bool = False
    leads: bool = False

    @property
    def elements(self) -> int:
        """Elements per vector."""
        return element_of(self.dtype).vector


def facts_for(arch: str, dtype: str, out_dtype: str, per: str, columns: int) -> QuantizeFacts:
    """Select the kernel for a matrix with this many columns and a scale per "row", "tokens", "1x128" or "128x128"."""
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
    each = 1 << (-(-vectors // lanes) - 1).bit_length()  # a power of two, to limit the number of kernels
    held = each <= MOST_VECTORS
    return QuantizeFacts(*names, lanes=lanes, vectors=each if held else LOOPED_VECTORS, held=held)
