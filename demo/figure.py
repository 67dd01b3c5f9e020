"""The picture: which blocks of a real weight survive, next to what was measured."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)
from matplotlib.axes import Axes  # noqa: E402

from sparse_collective import BsrMatrix  # noqa: E402

from .accuracy import Accuracy  # noqa: E402
from .report import block_name  # noqa: E402
from .timing import DENSE, OURS, TORCH_BSR, Timing  # noqa: E402

PRUNED = "#ececec"
INK, FAINT = "#222222", "#8a8a8a"
# Told apart in any kind of colour vision, and by their markers too (Okabe and Ito's palette).
SERIES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))


def block_norms(w: BsrMatrix) -> np.ndarray:
    """(M / bm, K / bk) root mean square of each kept block's elements; NaN where a block was pruned."""
    rows, cols = w.shape[0] // w.blocksize[0], w.shape[1] // w.blocksize[1]
    norms = torch.full((rows, cols), float("nan"))
    row = torch.repeat_interleave(torch.arange(rows), w.crow_indices.cpu().long().diff())
    norms[row, w.col_indices.cpu().long()] = w.values.detach().float().square().mean(dim=(1, 2)).sqrt().cpu()
    return norms.numpy()


def draw_pattern(ax: Axes, w: BsrMatrix, name: str) -> None:
    """Kept blocks shaded by their size; pruned ones grey."""
    m, k = w.shape
    ax.set_facecolor(PRUNED)
    image = ax.imshow(block_norms(w), cmap="viridis_r", interpolation="nearest", extent=(0, k, m, 0))
    ax.set_title(f"{name}\n{block_name(w.blocksize)} blocks, {w.density:.0%} kept", fontsize=10, color=INK)
    ax.set_xticks([0, k])
    ax.set_yticks([0, m])
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.1, pad=0.08)
    bar.set_label("RMS of a block's elements (grey: pruned)", fontsize=8, color=FAINT)
    bar.ax.tick_params(labelsize=7)


def density_axis(ax: Axes, densities: Sequence[float]) -> None:
    """A logarithmic axis, since each density halves the one before."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(set(densities)), [f"{d:.3g} %" for d in 100 * np.array(sorted(set(densities)))])
    ax.minorticks_off()
    ax.set_xlabel("blocks kept", color=INK)
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def draw_accuracy(ax: Axes, rows: Sequence[Accuracy]) -> None:
    """How far the output moves when the layer is pruned and not retrained."""
    for (colour, marker), blocksize in zip(SERIES, dict.fromkeys(row.blocksize for row in rows)):
        points = [row for row in rows if row.blocksize == blocksize]
        xs, ys = [row.density for row in points], [row.change for row in points]
        ax.plot(xs, ys, color=colour, marker=marker, label=f"{block_name(blocksize)} blocks")
    density_axis(ax, [row.density for row in rows])
    ax.set_ylabel("relative change of the output", color=INK)
    ax.set_title("What pruning costs: magnitude only, nothing retrained", fontsize=10, color=INK)
    ax.legend(frameon=False, fontsize=9)


def draw_timing(ax: Axes, rows: Sequence[Timing], device: str) -> None:
    """Times of the first product in `rows`: ours solid, torch's sparse one dotted, dense a line across."""
    rows = [row for row in rows if row.layer == rows[0].layer]
    for (colour, marker), blocksize in zip(SERIES, dict.fromkeys(row.blocksize for row in rows)):
        for name, style in ((OURS, "-"), (TORCH_BSR, ":")):
            times = {r.density: r.micros[name] for r in rows if r.blocksize == blocksize}
            points = [(density, t) for density, t in times.items() if not isinstance(t, str)]
            if points:
                label = f"{name}, {block_name(blocksize)} blocks"
                ax.plot(*zip(*points), color=colour, marker=marker, linestyle=style, label=label)
    dense = [row.micros[DENSE] for row in rows if not isinstance(row.micros[DENSE], str)]
    if dense:
        ax.axhline(float(np.median(dense)), color=INK, linestyle="--", linewidth=1, label="torch, dense and unpruned")
    density_axis(ax, [row.density for row in rows])
    m, k = rows[0].shape
    ax.set_ylabel("time of a product, \u00b5s", color=INK)
    ax.set_title(f"{rows[0].tokens} tokens \u00d7 ({m}, {k}) on {device}", fontsize=10, color=INK)
    ax.legend(frameon=False, fontsize=8)


def write_png(path: Path, w: BsrMatrix, name: str, draw_chart: Callable[[Axes], None]) -> None:
    """The pattern of `w` and, beside it, the chart."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(10, 5), width_ratios=(1, 2.4), layout="constrained", facecolor="white"
    )
    draw_pattern(left, w, name)
    draw_chart(right)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)
