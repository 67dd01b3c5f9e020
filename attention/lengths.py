"""How many rows of Q, and of K and V, an item of the batch has, and where they begin."""

from dataclasses import dataclass

from cutlass import Int32


@dataclass(frozen=True)
class Span:
    """One item: its rows of Q and O from q0 on, and those of K and V from k0 on."""

    b: Int32  # of the tensors' batch dimension
    rows: Int32
    cols: Int32
    q0: Int32 | int = 0
    k0: Int32 | int = 0

    @property
    def offset(self):
        """From a row to the column at its position: the last row is at the last column's."""
        return self.cols - self.rows


@dataclass(frozen=True)
class DenseLengths:
    """All items have as many."""

    rows: Int32
    cols: Int32

    def of(self, b) -> Span:
        return Span(b, self.rows, self.cols)
