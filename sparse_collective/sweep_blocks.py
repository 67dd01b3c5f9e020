"""How A's blocks lie in shared memory in the sweep kernel of the sm_80 path (sweep_sm80.py)."""

from cute_kernels.arch import MMA_K
from cute_kernels.config import ELEMENT
from cute_kernels.gemm_sm80 import log2
from cute_kernels.store_sm80 import WARP

VECTOR = 16  # bytes of a copy
UNIT = 16 * MMA_K * ELEMENT  # bytes of 16 rows x 16 columns of A: one copy of a warp, one ldmatrix


class BlockLayout:
    """Where the elements of a block of A, or of 64 columns of a wider one, lie in shared memory.

    Units of 16 x 16 follow each other half by half, as warps own them, then along k, then the two of a half. In a unit
    rows are 32 bytes, permuted so that eight lanes hit 32 banks both when they copy along a row and when ldmatrix reads
    16 bytes from each of eight. The methods take Python integers as well as Int32, and are checked on the host.
    """

    def __init__(self, bm: int, width: int):
        self.bytes = bm * width * ELEMENT
        self.pieces = self.bytes // UNIT  # copies of a warp
        self.steps = width // MMA_K
        self.slabs = min(2, bm // 16)  # of 16 rows, in one half
        self.units = self.slabs * self.steps  # of one warp
        self.per_row = log2(width * ELEMENT // VECTOR)  # vectors of a row

    def vector(self, piece, lane):
        """(row, which 16 bytes of it) that a lane copies as part of a piece."""
        index = piece * WARP + lane
        return index >> self.per_row, index & ((1 << self.per_row) - 1)

    def flip(self, k):
        """What is XORed to a row's number, for step k."""
        return k * (4 // self.steps)

    def offset(self, row, vector):
        """Bytes from the block's begin."""
        k, half, slab = vector >> 1, vector & 1, row >> 4
        unit = (slab >> 1) * self.units + k * self.slabs + (slab & (self.slabs - 1))
        return unit * UNIT + (((row & 15) ^ self.flip(k)) * 32 + ((half ^ (row >> 2 & 1)) * 16))

    def lane_offset(self, lane):
        """Where a lane's row of its 8 x 8 matrix lies in a unit of step 0: rows first, then k."""
        return self.offset((lane >> 3 & 1) * 8 + (lane & 7), lane >> 4)
