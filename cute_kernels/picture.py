"""Pictures of block patterns: text for print(), SVG for notebooks, matplotlib axes for figures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .runtime.torch_compat import has_memory

EMPTY, PARTIAL, FULL = 0, 1, 2  # values of a table of blocks
CELLS = ("  ", "░░", "██")
COLORS = {PARTIAL: "#9ecae1", FULL: "#0072b2"}
MOST_TEXT, MOST_SVG = 32, 96  # rows and columns of a picture; larger tables are reduced


def reduced(table: Tensor, most: int) -> Tensor:
    """Reduce a table of blocks to at most `most` rows and columns; a cell is EMPTY or FULL if all of its blocks are.

    table: (rows, columns) of EMPTY, PARTIAL and FULL, on the CPU.
    """
    rows, cols = table.shape
    parts = [-(-size // most) if size else 1 for size in (rows, cols)]
    padded = torch.nn.functional.pad(table, (0, -cols % parts[1], 0, -rows % parts[0]), value=-1)
    cells = padded.unflatten(1, (-1, parts[1])).unflatten(0, (-1, parts[0])).transpose(1, 2).flatten(2)
    inside = cells >= 0
    empty = ((cells == EMPTY) | ~inside).all(-1)
    full = ((cells == FULL) | ~inside).all(-1)
    return torch.where(empty, EMPTY, torch.where(full, FULL, PARTIAL))


def text_of(table: Tensor) -> str:
    """The picture as lines of characters: two columns per cell, framed."""
    if not table.numel():
        return "(no blocks)"
    lines = ["".join(CELLS[cell] for cell in row) for row in reduced(table, MOST_TEXT).tolist()]
    edge = "─" * len(lines[0])
    return "\n".join([f"┌{edge}┐", *(f"│{line}│" for line in lines), f"└{edge}┘"])


def svg_of(table: Tensor) -> str:
    """The picture as an SVG element, 4 to 16 pixels per cell."""
    small = reduced(table, MOST_SVG)
    rows, cols = small.shape
    side = max(4, min(16, 320 // max(rows, cols, 1)))
    cells = "".join(
        f'<rect x="{side * j}" y="{side * i}" width="{side}" height="{side}" fill="{COLORS[int(small[i, j])]}"/>'
        for i, j in small.nonzero().tolist()
    )
    size = f'width="{side * cols}" height="{side * rows}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect {size} fill="#f4f4f4" stroke="#999"/>{cells}</svg>'


def axes_of(ax: Any, figsize: tuple[float, float] | None = None) -> Any:
    """`ax`, or matplotlib axes of a new figure, of a size in inches, if it is None.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    return pyplot.subplots(figsize=figsize, layout="constrained")[1] if ax is None else ax


class Pictured:
    """Mixin of print(), the display in notebooks, and plot(), for objects with a pattern of blocks.

    A subclass has `_tables() -> (Tensor, name)`: int8 tables (pictures, rows, columns) of EMPTY, PARTIAL and FULL on
    its device, and the name of what one picture shows, such as "batch item".
    """

    __slots__ = ()

    def _tables(self) -> tuple[Tensor, str]:
        raise NotImplementedError

    def _shown(self) -> tuple[Tensor, str] | None:
        """(the first table, a caption); None if the tensors have no data (meta, fake) or a CUDA graph is captured."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None  # a synchronization would end the capture
        tables, name = self._tables()
        if not has_memory(tables) or not len(tables):
            return None
        stored = (tables != EMPTY).float().mean().item() if tables.numel() else 0.0
        rest = f"; the first {name} of {len(tables)}" if len(tables) > 1 else ""
        return tables[0].cpu(), f"{tables.shape[1]} x {tables.shape[2]} blocks, {100 * stored:.3g} % stored{rest}"

    def __str__(self) -> str:
        shown = self._shown()
        return repr(self) if shown is None else f"{self!r}\n{shown[1]}\n{text_of(shown[0])}"

    def _repr_html_(self) -> str:
        import html

        head = html.escape(repr(self))
        shown = self._shown()
        return f"<pre>{head}</pre>" + ("" if shown is None else f"<div>{html.escape(shown[1])}</div>{svg_of(shown[0])}")

    def plot(self, ax: Any = None) -> Any:
        """Draw the pattern of blocks with matplotlib; synchronizes with the GPU.

        Args:
            ax: matplotlib axes; None for those of a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the tensors have no data.

        Example:
            W.plot().figure.savefig("pattern.png")
        """
        shown = self._shown()
        if shown is None:
            raise ValueError(f"{self!r} has no data to plot")
        ax = axes_of(ax)
        from matplotlib.colors import ListedColormap

        table, caption = shown
        ax.imshow(
            table, cmap=ListedColormap(["#f4f4f4", *COLORS.values()]), vmin=EMPTY, vmax=FULL, interpolation="none"
        )
        ax.set_title(caption, fontsize=9)
        ax.set_xlabel("block column")
        ax.set_ylabel("block row")
        return ax
