"""Element width of an operand, and the tile extents that follow from it.

Hardware counts bytes: of a copy, a core-matrix row, a swizzled row, an MMA step along K. Only this module converts them
to elements, so that GEMM kernels support operands of any width that legality admits.
"""

from dataclasses import dataclass

BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4}
VECTOR_BYTES = 16  # the widest cp.async, a line of ldmatrix, a row of a core matrix (8 rows), TMA's granularity
MMA_K_BYTES = 32  # along K per step of mma.sync or WGMMA: two core matrices
SWIZZLES = (128, 64, 32)  # bytes of a swizzled row of shared memory, widest first


@dataclass(frozen=True)
class Element:
    """An element of 1, 2 or 4 bytes."""

    width: int

    @property
    def vector(self) -> int:
        """Elements per 16 bytes."""
        return VECTOR_BYTES // self.width

    @property
    def mma_k(self) -> int:
        """K of one MMA step."""
        return MMA_K_BYTES // self.width

    @property
    def rows(self) -> tuple[int, ...]:
        """Elements per swizzled row of each supported length, widest first."""
        return tuple(span // self.width for span in SWIZZLES)

    @property
    def transposes(self) -> bool:
        """True if operands may be contiguous along M or N: ldmatrix and WGMMA transpose only 16-bit elements."""
        return self.width == 2


def element_of(dtype: str) -> Element:
    """The element of a dtype, by name; raises KeyError for an unsupported dtype."""
    return Element(BYTES[dtype])


BITS_16 = element_of("bfloat16")  # default of lists of configurations and catalogues
