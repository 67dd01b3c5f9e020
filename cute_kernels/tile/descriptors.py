"""Descriptors of WGMMA's operands as numbers, for operands that are chosen at run time, and for inline PTX.

CuTe's `cute.gemm` takes tensors whose shared-memory descriptors it rebuilds wherever they are used. In a kernel that
branches for each small block those few instructions cost more than the product. Here a descriptor is its two halves:
the upper one static (swizzle and stride), the lower one an address in units of 16 bytes, to be added to.
"""

from cutlass import Int32

SWIZZLE = {128: 1, 64: 2, 32: 3}  # bytes of a swizzled row -> its code in a descriptor
MMA_M = 64


def descriptor_high(row_bytes: int) -> int:
    """Upper half of the descriptor of a tile whose rows of `row_bytes` are swizzled in groups of 8.

    Rows are along K of a K-major tile. Of one that is M- or N-major a row is one k, and all of the tile's M or N.
    """
    return SWIZZLE[row_bytes] << 30 | 8 * row_bytes >> 4


def descriptor_low(address: Int32, leading: int = 0) -> Int32:
    """Lower half of the descriptor of a tile at a shared-memory address.

    leading: of an M- or N-major tile of several swizzled rows side by side, from one to the next, in units of 16 bytes;
    1 of a K-major one, whose rows of an instruction are whole.
    """
    return ((address >> 4) & 0x3FFF) | (leading << 16)
