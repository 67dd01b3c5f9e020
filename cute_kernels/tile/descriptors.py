"""WGMMA operand descriptors as integers, for operands selected at run time, and for inline PTX.

CuTe's `cute.gemm` rebuilds the shared-memory descriptors of its tensors at each use. In a kernel that branches per
small block these instructions cost more than the WGMMA. Here a descriptor is two halves: the upper one is static
(swizzle and stride), the lower one is an address in units of 16 bytes, which can be incremented.
"""

from cutlass import Int32

SWIZZLE = {128: 1, 64: 2, 32: 3}  # bytes of a swizzled row -> its code in a descriptor
MMA_M = 64


def descriptor_high(row_bytes: int) -> int:
    """Upper half of the descriptor of a tile whose rows of `row_bytes` are swizzled in groups of 8.

    The rows of a K-major tile are along K. A row of an M- or N-major tile has one k and the tile's whole M or N.
    """
    return SWIZZLE[row_bytes] << 30 | 8 * row_bytes >> 4


def descriptor_low(address: Int32, leading: int = 0) -> Int32:
    """Lower half of the descriptor of a tile at a shared-memory address.

    leading: for an M- or N-major tile of several swizzled rows side by side, the distance between two of them in units
    of 16 bytes; 1 for a K-major tile, where each row of an instruction is contiguous.
    """
    return ((address >> 4) & 0x3FFF) | (leading << 16)
