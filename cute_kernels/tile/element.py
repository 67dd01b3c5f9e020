"""How wide an operand's elements are, and what follows from it for tiles.

Hardware counts bytes: of a copy, of a row of a core matrix, of a swizzled row, of an MMA step along K. How many
elements those are is asked here and written nowhere else, so that kernels of products are for operands of any width
that legality admits.
"""

from dataclasses import dataclass

BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4}
VECTOR_BYTES = 16  # the widest cp.async, a line that ldmatrix reads, a row of a core matrix (8 rows), TMA's granule
MMA_K_BYTES = 32  # along K, of one step of mma.sync or WGMMA: two core matrices
SWIZZLES = (128, 64, 32)  # bytes of a swizzled row of shared memory, the widest first


@dataclass(frozen=True)
class Element:
    """An element of so many bytes: 1, 2 or 4."""

    width: int

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return VECTOR_BYTES // self.width

    @property
    def mma_k(self) -> int:
        """K of one MMA step."""
        return MMA_K_BYTES // self.width

    @property
    def rows(self) -> tuple[int, ...]:
        """Elements that fill a swizzled row, of each length that there is: the widest first."""
        return tuple(span // self.width for span in SWIZZLES)

    @property
    def transposes(self) -> bool:
        """Whether tensor cores take operands that are contiguous along M or N: ldmatrix and WGMMA turn 16 bits."""
        return self.width == 2


def element_of(dtype: str) -> Element:
    """The element of a dtype, by its name; KeyError of one that no kernel has."""
    return Element(BYTES[dtype])


BITS_16 = element_of("bfloat16")  # what lists of configurations and catalogues are of, unless told
