"""Reports of a model's block-sparse layers: as a table, in notebooks, and as a chart."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cute_kernels.picture import COLORS, FULL, axes_of

from .inference import InferenceLinear, StoredBlocks
from .module import BsrModule

__all__ = ["Change", "Report", "size_of", "sparsity"]

HEAD = ("layer", "shape", "density", "blocks", "parameters", "")
LEFT, RIGHT = "text-align:left", "text-align:right"


@dataclass(frozen=True)
class Change:
    """One layer: what became of it, or in `skipped` the reason why it was left as it is."""

    name: str
    shape: tuple[int, ...]  # (M, K); of experts (E, ...)
    before: int  # parameters
    after: int
    stored: int = 0  # blocks; none of a layer without blocks
    blocks: int = 0
    skipped: str = ""
    note: str = ""  # further facts, such as which layers were fused

    @property
    def density(self) -> float:
        return self.stored / max(1, self.blocks)

    def cells(self) -> tuple[str, ...]:
        """The layer as a row of a table with the columns HEAD."""
        shape = " x ".join(map(str, self.shape))
        if self.skipped:
            return self.name, shape, "-", "-", f"{self.before:,}", f"skipped: {self.skipped}"
        density, blocks = (f"{self.density:.3f}", f"{self.stored} of {self.blocks}") if self.blocks else ("-", "-")
        return self.name, shape, density, blocks, f"{self.before:,} -> {self.after:,}", self.note


@dataclass(repr=False)
class Report:
    """Block-sparse layers of a model, or layers that a function changed or skipped; prints as a table.

    `sparsity` returns one, as do sparsify_, densify_, mask_2_4_, prune_2_4_ and quantize_. Notebooks show it as a table
    with bars.

    Example:
        report = sparsify_(model, SparsityConfig((128, 128), 0.25))
        print(report)
        report.plot().figure.savefig("density.png")
    """

    changes: list[Change] = field(default_factory=list)

    @property
    def changed(self) -> list[Change]:
        return [c for c in self.changes if not c.skipped]

    @property
    def skipped(self) -> list[Change]:
        return [c for c in self.changes if c.skipped]

    def _total(self) -> tuple[str, ...]:
        before, after = (sum(getattr(c, name) for c in self.changes) for name in ("before", "after"))
        return f"{len(self.changed)} of {len(self.changes)} layers", "", "", "", f"{before:,} -> {after:,}", ""

    def __str__(self) -> str:
        rows = [HEAD, *(c.cells() for c in self.changes), self._total()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        styles = (LEFT, RIGHT, RIGHT, RIGHT, RIGHT, LEFT)

        def row(cells: tuple[str, ...], bar: str = "", tag: str = "td") -> str:
            texts = [html.escape(cell) for cell in cells]
            texts[2] += bar
            return f"<tr>{''.join(f'<{tag} style={s!r}>{t}</{tag}>' for s, t in zip(styles, texts, strict=True))}</tr>"

        rows = [row(c.cells(), "" if c.skipped or not c.blocks else bar_of(c.density)) for c in self.changes]
        return f"<table>{row(HEAD, tag='th')}{''.join(rows)}{row(self._total(), tag='th')}</table>"

    def plot(self, ax: Any = None) -> Any:
        """Draw the density of each layer with matplotlib, as horizontal bars; layers without blocks are left out.

        Args:
            ax: matplotlib axes; None for those of a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no layer of the report has blocks.
        """
        shown = [c for c in self.changed if c.blocks]
        if not shown:
            raise ValueError("the report has no layer with blocks to plot; print(report) lists its layers")
        ax = axes_of(ax, (7.0, 1.2 + 0.22 * len(shown)))
        bars = ax.barh([c.name for c in shown], [c.density for c in shown], color=COLORS[FULL])
        ax.bar_label(bars, [f"{c.density:.3g}" for c in shown], padding=3, fontsize=8)
        ax.invert_yaxis()
        ax.set_xlim(0, 1.1)
        ax.set_xlabel("stored blocks over all blocks")
        ax.tick_params(axis="y", labelsize=8)
        dense = sum(math.prod(c.shape) for c in shown)
        stored = sum(math.prod(c.shape) * c.density for c in shown)
        ax.set_title(f"{len(shown)} layers store {100 * stored / max(1, dense):.3g} % of their weights", fontsize=9)
        return ax


def bar_of(share: float) -> str:
    """A horizontal bar of HTML, 60 pixels for 1."""
    color = f"background:{COLORS[FULL]}"
    return f' <span style="display:inline-block;height:0.7em;width:{round(60 * share)}px;{color}"></span>'


def size_of(layer: nn.Module) -> int:
    """Number of stored elements: values and biases."""
    if isinstance(layer, InferenceLinear):
        return layer.values.numel() + (0 if layer.bias is None else layer.bias.numel())
    if isinstance(layer, BsrModule) and hasattr(layer, "place"):  # its parameters have room that no block fills
        return blocks_of(layer)[0] * math.prod(layer.blocksize) + bias_size(layer, whole_shape(layer))
    return sum(p.numel() for p in layer.parameters())


def whole_shape(layer: Any) -> tuple[int, ...]:
    """(M, K), or (E, M, K); of tensor- and expert-parallel layers that of all ranks."""
    shape = layer.out_features, layer.in_features
    return shape if getattr(layer, "items", None) is None else (layer.items, *shape)


def blocks_of(layer: Any) -> tuple[int, int]:
    """(stored blocks, all blocks) of a layer with blocks, of all its items; of parallel layers those of all ranks."""
    shape, (bm, bk) = whole_shape(layer), layer.blocksize
    stored = len(getattr(layer, "global_col_indices", layer.col_indices))
    if layer.crow_indices.dim() == 1:  # one pattern
        stored *= math.prod(shape[:-2])
    return stored, math.prod(shape) // (bm * bk)


def bias_size(layer: Any, shape: tuple[int, ...]) -> int:
    return 0 if getattr(layer, "bias", None) is None else math.prod(shape[:-1])


def sparsity(model: nn.Module) -> Report:
    """Report the block-sparse and 2:4 sparse layers of a model.

    Args:
        model: a module; not changed. A layer with several names is listed once.

    Returns:
        A Report with one line per layer: shape (M, K), or (E, M, K) for experts; stored blocks; parameters of the dense
        layer -> stored ones, biases included. Layers that several ranks share, as by fully_shard or
        parallelize_module, are reported whole, on each rank. It is empty if the model has no such layer.

    Example:
        print(sparsity(model))
    """
    report = Report()
    for name, layer in model.named_modules():
        if not isinstance(layer, (BsrModule, InferenceLinear)):
            continue
        shape, has_blocks = whole_shape(layer), isinstance(layer, (BsrModule, StoredBlocks))
        stored, blocks = blocks_of(layer) if has_blocks else (0, 0)  # a Sparse24Linear has no blocks
        before = math.prod(shape) + bias_size(layer, shape)
        name = name or type(layer).__name__
        report.changes.append(Change(name, shape, before, size_of(layer), stored, blocks, note=type(layer).__name__))
    return report
