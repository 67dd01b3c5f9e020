"""Query tiles of backward: locations of LSE, delta and dq_accum in memory.

Every tile of `tile_m` rows of every head has an index. Tiles of a head are consecutive, with gaps for packed sequences:
sequence b, whose rows begin at q0, has the tiles from q0 // tile_m + b on, so no two sequences share a tile. Arrays
consist of whole tiles:

    rows       (tiles, 2, tile_m) FP32   LSE times log2(e), inf for fully masked rows and rows past the end; and delta
    dq_accum   (tiles, tile_m * D) FP32  in the order of threads and their registers (dq_sums)
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from ..seqlen import SeqlenInfo


def interleaved(tensor: cute.Tensor, packed: int) -> cute.Tensor:
    """(B, H / packed, (packed, S), D) of (B, H, S, D): row r is of token r // packed and head r % packed. The tensor
    itself for packed of 1."""
    if packed == 1:
        return tensor
    (batch, heads, rows, width), (b, h, s, d) = tensor.shape, tensor.stride
    shape, stride = (batch, heads // packed, (packed, rows), width), (b, h * packed, (h, s), d)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


@dataclass(frozen=True)
class DenseRows:
    """All batches have the same number of rows and columns."""

    rows: Int32
    cols: Int32
    q_offset: Int32 | None = None
    k_offset: Int32 | None = None

    def of(self, b) -> SeqlenInfo:
        return SeqlenInfo(b, self.rows, self.cols, q_offset=self.q_offset, k_offset=self.k_offset)

    rows_of = of

    def first_tile(self, seqlen: SeqlenInfo, b, tile: int):
        return 0


@dataclass(frozen=True)
class PackedRows:
    """Sequence b has rows cu_q[b] to cu_q[b + 1] of Q, and cu_k[b] to cu_k[b + 1] of K and V; see
    seqlen.PackedSeqlens.

    The rows of Q or K after the last sequence form sequence B. They attend to nothing, and their gradients are zero.
    """

    cu_q: cute.Tensor  # (B + 1,) int32
    cu_k: cute.Tensor  # (B + 1,) int32
    total_q: Int32
    total_k: Int32

    def of(self, b) -> SeqlenInfo:
        """Lengths for KV tiles: no rows attend to the columns after the last sequence."""
        info = self.rows_of(b)
        return replace(info, rows=info.rows * Int32(b < self.cu_q.shape[0] - 1))

    def rows_of(self, b) -> SeqlenInfo:
        """Lengths for query tiles."""
        uniform = cute.arch.make_warp_uniform
        (q0, q1), (k0, k1) = _between(self.cu_q, b, self.total_q), _between(self.cu_k, b, self.total_k)
        return SeqlenInfo(0, uniform(q1 - q0), uniform(k1 - k0), uniform(q0), uniform(k0))

    def first_tile(self, seqlen: SeqlenInfo, b, tile: int):
        return seqlen.q0 // tile + b

    def find_q(self, number, tile: int) -> tuple:
        """(sequence, tile in the sequence) of a head's query tile."""
        return _find(self.cu_q, self.total_q, tile, number)

    def find_k(self, number, tile: int) -> tuple:
        """(sequence, tile in the sequence) of a KV tile, indexed in the same way."""
        return _find(self.cu_k, self.total_k, tile, number)


def _clamped(cu: cute.Tensor, b, total):
    return cutlass.min(cutlass.max(cu[b], 0), total)


def _between(cu: cute.Tensor, b, total) -> tuple:
    """(begin, end) of sequence b; the remaining rows for sequence B. Entries are clamped to 0 and the total."""
    last = cu.shape[0] - 1
    begin = _clamped(cu, cutlass.min(b, last), total)
    end = cutlass.max(_clamped(cu, cutlass.min(b + 1, last), total), begin)
    return begin, select_(b == last, total, end)


@cute.jit
def _find(cu: cute.Tensor, total: Int32, tile: cutlass.Constexpr[int], number: Int32) -> tuple:
    low, high = Int32(0), Int32(cu.shape[0] - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if _clamped(cu, middle, total) // tile + middle <= number:
            low = middle
        else:
            high = middle - 1
    return low, number - _clamped(cu, low, total) // tile - low
