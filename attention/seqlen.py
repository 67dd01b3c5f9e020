"""Lengths of the sequences of a batch, the first rows of their Q, K and V, and the positions of these rows."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cute_kernels.traced.indices import Clamped, InTile, Place


@dataclass(frozen=True)
class SeqlenInfo:
    """One sequence: its rows of Q and O begin at q0, those of K and V at k0.

    Columns before `begin`, in a left-padded batch, are masked for all rows; a window with a left bound includes this
    bound.
    """

    b: Int32 | int  # index in the tensors' batch mode
    rows: Int32
    cols: Int32
    q0: Int32 | int = 0
    k0: Int32 | int = 0
    begin: Int32 | int = 0
    q_offset: Int32 | None = None  # position of row 0; k_offset: of column 0; None without offsets
    k_offset: Int32 | None = None

    @property
    def offset(self):
        """Offset from a row to the column at its position; without offsets the last row is at the last column's
        position."""
        return self.cols - self.rows if self.q_offset is None else self.q_offset - self.k_offset

    def q_position(self, row: Int32 | Place | InTile | Clamped):
        """Position of a row, as passed to mask and score functions."""
        return _shifted(row, self.q_offset)

    def k_position(self, column: Int32 | Place | InTile | Clamped):
        """Position of a column, as passed to mask and score functions."""
        return _shifted(column, self.k_offset)


def _shifted(index: Int32 | Place | InTile | Clamped, offset: Int32 | None):
    if offset is None:
        return index
    if isinstance(index, InTile):  # an offset is of any size, so tiles of positions are others
        index = index.place
    if isinstance(index, Clamped):
        return replace(index, index=index.index + offset)
    return replace(index, base=index.base + offset) if isinstance(index, Place) else index + offset


@dataclass(frozen=True)
class DenseSeqlens:
    """All sequences have the same length."""

    rows: Int32
    cols: Int32
    q_offset: Int32 | None = None
    k_offset: Int32 | None = None

    def of(self, b) -> SeqlenInfo:
        return SeqlenInfo(b, self.rows, self.cols, q_offset=self.q_offset, k_offset=self.k_offset)


@dataclass(frozen=True)
class PackedSeqlens:
    """Packed sequences: sequence b has rows cu_q[b] to cu_q[b + 1] of Q, and cu_k[b] to cu_k[b + 1] of K and V.

    No entries make a sequence leave the tensors: they are clamped, and an end before its beginning is moved to the
    beginning. The rows after the last sequence are sequence B, which has no keys, so its output is 0. From B + 1 on
    sequences are empty.
    """

    cu_q: cute.Tensor  # (B + 1,) int32
    cu_k: cute.Tensor  # (B + 1,) int32
    total_q: Int32
    total_k: Int32

    @property
    def sequences(self) -> Int32:
        return self.cu_q.shape[0]

    def rows(self, b) -> tuple:
        """(begin, end) of a sequence's rows of Q."""
        begin, end = self.between(self.cu_q, b, self.total_q)
        return begin, select_(b == self.cu_q.shape[0] - 1, self.total_q, end)

    def between(self, cu: cute.Tensor, b, total) -> tuple:
        last = cu.shape[0] - 1
        begin = cutlass.min(cutlass.max(cu[cutlass.min(b, last)], 0), total)
        return begin, cutlass.min(cutlass.max(cu[cutlass.min(b + 1, last)], begin), total)

    def of(self, b) -> SeqlenInfo:
        (q0, q1), (k0, k1) = self.rows(b), self.between(self.cu_k, b, self.total_k)
        uniform = cute.arch.make_warp_uniform
        return SeqlenInfo(0, uniform(q1 - q0), uniform(k1 - k0), uniform(q0), uniform(k0))
