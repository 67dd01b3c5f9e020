"""The pictures: which blocks are kept or computed, next to what was measured."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from attention import BlockMask
from bench.figure import FAINT, INK, Axes, Figure, density_axis, series, styled
from sparse_collective import BsrMatrix

from . import long_context
from .accuracy import block_name
from .long_context import LongContext
from .timing import DENSE, OURS, TORCH_BSR, Timing

SKIPPED, PARTIAL, FULL = "#ececec", "#8fc1e3", "#0072b2"


def block_norms(w: BsrMatrix) -> np.ndarray:
    """(M / bm, K / bk) root mean square of each kept block's elements; NaN where a block was pruned."""
    rows, cols = w.shape[0] // w.blocksize[0], w.shape[1] // w.blocksize[1]
    norms = torch.full((rows, cols), float("nan"))
    row = torch.repeat_interleave(torch.arange(rows), w.crow_indices.cpu().long().diff())
    norms[row, w.col_indices.cpu().long()] = w.values.detach().float().square().mean(dim=(1, 2)).sqrt().cpu()
    return norms.numpy()


def block_kinds(mask: BlockMask) -> np.ndarray:
    """(Mq, Mk) of the first item and head: 0 where a block is not computed, 1 where partial, 2 where full."""
    partial, full = (table[0, 0].cpu().numpy() for table in mask.tables())
    return partial + 2 * full.astype(np.int64)


def draw_blocks(ax: Axes, blocks: np.ndarray, shape: Sequence[int], title: str, cmap):
    """A pixel for each block, with the matrix's extents at the axes."""
    rows, columns = shape
    ax.set_facecolor(SKIPPED)
    ax.set_title(title, fontsize=10)
    ax.grid(False)
    ax.set_xticks([0, columns])
    ax.set_yticks([0, rows])
    return ax.imshow(blocks, cmap=cmap, interpolation="nearest", extent=(0, columns, rows, 0))


def draw_pattern(ax: Axes, w: BsrMatrix, name: str) -> None:
    """Kept blocks shaded by their size; pruned ones grey."""
    title = f"{name}\n{block_name(w.blocksize)} blocks, {w.density:.0%} kept"
    image = draw_blocks(ax, block_norms(w), w.shape, title, "viridis_r")
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.1, pad=0.08)
    bar.set_label("RMS of a block's elements (grey: pruned)", fontsize=8, color=FAINT)
    bar.ax.tick_params(labelsize=7)


def draw_chart(ax: Axes, rows: Sequence, lines: dict[str, tuple[str, Callable]], title: str, unit: str) -> None:
    """By density, for each block shape of the rows: `lines` has a label's beginning -> (style, value of a row)."""
    shapes = dict.fromkeys(row.blocksize for row in rows)
    for shape, (colour, marker) in zip(shapes, series(len(shapes))):
        for name, (style, value) in lines.items():
            points = [(row.density, value(row)) for row in rows if row.blocksize == shape]
            if points := [point for point in points if not isinstance(point[1], str)]:
                label = f"{name}{block_name(shape)} blocks"
                ax.plot(*zip(*points), color=colour, marker=marker, ls=style, label=label)
    density_axis(ax, [row.density for row in rows])
    ax.set_ylim(bottom=0)
    ax.set_ylabel(unit)
    ax.set_title(title, fontsize=10)
    ax.legend(frameon=False, fontsize=8)


def draw_timing(ax: Axes, rows: Sequence[Timing], device: str) -> None:
    """Times of the first product in `rows`: ours solid, torch's sparse one dotted, dense a line across."""
    rows = [row for row in rows if row.layer == rows[0].layer]
    if dense := [row.micros[DENSE] for row in rows if not isinstance(row.micros[DENSE], str)]:
        ax.axhline(float(np.median(dense)), color=INK, ls="--", lw=1, label="torch, dense and unpruned")
    title = f"{rows[0].tokens} tokens × {rows[0].shape} on {device}"
    lines = {f"{n}, ": (style, lambda row, n=n: row.micros[n]) for n, style in ((OURS, "-"), (TORCH_BSR, ":"))}
    draw_chart(ax, rows, lines, title, "time of a product, µs")


def draw_mask(ax: Axes, mask: BlockMask) -> None:
    """Full blocks dark, partial ones light, those that are skipped grey."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    title = f"Window, global tokens and documents\n{block_name(mask.blocksize)} blocks"
    colours = ListedColormap([SKIPPED, PARTIAL, FULL])
    draw_blocks(ax, block_kinds(mask), mask.lengths, title, colours).set_clim(0, 2)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    names = {"all seen": FULL, "some seen": PARTIAL, "skipped": SKIPPED}
    patches = [Patch(color=colour, label=name) for name, colour in names.items()]
    ax.legend(handles=patches, loc="upper right", fontsize=8, framealpha=1.0)


def draw_saving(ax: Axes, found: LongContext, device: str) -> None:
    """Bars of the times; of the blocks that are computed where nothing was timed."""
    names = long_context.TORCH, long_context.DENSE, long_context.SPARSE
    timed = {name: found.micros[name] for name in names if isinstance(found.micros.get(name), float)}
    bars = timed or {"causal": 1.0, "this pattern": found.share}
    colours = [FULL if name in (long_context.SPARSE, "this pattern") else FAINT for name in bars]
    drawn = ax.barh(list(bars), list(bars.values()), color=colours, height=0.55)
    ax.bar_label(drawn, [f"{us:,.0f} µs" if timed else f"{us:.0%}" for us in bars.values()], padding=4, color=INK)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    title = f"Time on {device}" if timed else "Blocks computed"
    title += f": {found.mask.lengths[0]} tokens, {found.heads} heads of {found.depth}"
    if timed and found.speedup() is not None:
        title += f"\n{found.share:.0%} of the causal blocks, {found.speedup():.1f}× faster than dense"
    ax.set_title(title, fontsize=10)


def write_png(path: Path, left: Callable[[Axes], None], right: Callable[[Axes], None], ratio: float) -> None:
    """Two charts side by side, the right one `ratio` times as wide."""
    with styled():
        figure = Figure(figsize=(10, 4.8), layout="constrained")
        for ax, draw in zip(figure.subplots(1, 2, width_ratios=(1, ratio)), (left, right)):
            draw(ax)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
