"""Lengths of the sequences of a batch, where their rows of Q, K and V begin, and the positions of these rows."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cute_kernels.traced.lower import Place


@dataclass(frozen=True)
class SeqlenInfo:
    """One item: its rows of Q and O from q0 on, and those of K and V from k0 on.

    Columns before `begin`, of a batch that is padded on the left, are seen by no row; a window with a left bound counts
    it in.
    """

    b: Int32 | int  # of the tensors' batch dimension
    rows: Int32
    cols: Int32
    q0: Int32 | int = 0
    k0: Int32 | int = 0
    begin: Int32 | int = 0
    q_offset: Int32 | None = None  # position of row 0, and of column 0, where the call gives them
    k_offset: Int32 | None = None

    @property
    def offset(self):
        """From a row to the column at its position: without offsets the last row is at the last column's position."""
        return self.cols - self.rows if self.q_offset is None else self.q_offset - self.k_offset

    def q_position(self, row: Int32 | Place):
        """Position of a row, as mask and score functions see it."""
        return _moved(row, self.q_offset)

    def k_position(self, column: Int32 | Place):
        """Position of a column, as mask and score functions see it."""
        return _moved(column, self.k_offset)


def _moved(index: Int32 | Place, offset: Int32 | None):
    if offset is None:
        return index
    return replace(index, base=index.base + offset) if isinstance(index, Place) else index + offset


@dataclass(frozen=True)
class DenseSeqlens:
    """All items have the same number."""

    rows: Int32
    cols: Int32
    q_offset: Int32 | None = None
    k_offset: Int32 | None = None

    def of(self, b) -> SeqlenInfo:
        return SeqlenInfo(b, self.rows, self.cols, q_offset=self.q_offset, k_offset=self.k_offset)


@dataclass(frozen=True)
class PackedSeqlens:
    """Sequences one after another: sequence b has rows cu_q[b] to cu_q[b + 1] of Q, and so K and V.

    Whatever the entries are, no sequence leaves the tensors: entries are clamped, and an end before its beginning is
    moved to the beginning. The rows after the last sequence are sequence B, which has no keys, so its output is 0. From
    B + 1 on sequences are empty.
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
