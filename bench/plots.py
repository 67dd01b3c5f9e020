"""Figures of a card's result files, as `python -m bench plot FOLDER` draws them.

speedup-density.png   speed-up over the dense GEMM of the whole matrix
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from .figure import DASHES, DENSE, FAINT, SHADE, Figure, canvas, density_axis, series, styled
from .peers import CUBLAS
from .rows import OURS


def draw(folder: Path) -> list[Path]:
    """Draw what a folder's block-sparse.json has data for, beside it.

    Raises:
        FileNotFoundError: the folder has no block-sparse.json.
    """
    run = json.loads((folder / "block-sparse.json").read_text())
    with styled():
        if (figure := speedup_density(run)) is None:
            return []
        figure.savefig(folder / "speedup-density.png")
    return [folder / "speedup-density.png"]


# -- what the files say --------------------------------------------------------------------------------------


def rate(timing: dict) -> float:
    """Useful TFLOP/s of a timing; the rounded one in the file has too few digits for small rates."""
    return timing["useful_flops"] / timing["median_us"] / 1e6


def timed(row: dict, name: str) -> dict | None:
    """The timing of that name, if it has a time."""
    return next((t for t in row["timings"] if t["name"] == name and "median_us" in t), None)


def whole_dense(row: dict) -> dict | None:
    """cuBLAS's product of the whole matrix: not the one of equal work, which has the useful operations alone."""
    p = row["problem"]
    whole = 2.0 * p["M"] * p["N"] * p["K"]
    found = [t for t in row["timings"] if t["name"].startswith(CUBLAS) and "median_us" in t]
    # K = 8288 stands beside 8192: rates are compared, so that the two need not be quite the same product. At density 1
    # the product of equal work is one of these too; the faster counts.
    return max((t for t in found if 0.9 < t["useful_flops"] / whole < 1.1), key=rate, default=None)


def is_plain(row: dict) -> bool:
    """bf16, the path that the card takes by itself, and blocks spread evenly."""
    p = row["problem"]
    plain = p["path"] is None and p["dtype"] == "bfloat16" and p.get("pattern", "uniform") == "uniform"
    return plain and timed(row, OURS) is not None


def by_block(run: dict) -> dict:
    """The rows of each block shape that has two densities or more, by density; larger blocks first."""
    shapes = defaultdict(list)
    for row in sorted(filter(is_plain, run["rows"]), key=lambda row: row["problem"]["density"]):
        if row["problem"]["op"] == "bsr_matmul":
            shapes[tuple(row["problem"]["block"])].append(row)
    order = sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))
    return {s: shapes[s] for s in order if len({row["problem"]["density"] for row in shapes[s]}) > 1}


# -- the figure ---------------------------------------------------------------------------------------------


def speedup_density(run: dict) -> Figure | None:
    """How much faster than dense: time of the whole matrix's dense product over ours."""
    lines, curves = by_block(run), {}
    for shape, rows in lines.items():
        found = [(row["problem"]["density"], rate(timed(row, OURS)), whole_dense(row)) for row in rows]
        curves[shape] = [(density, ours / (density * rate(dense))) for density, ours, dense in found if dense]
    curves = {shape: points for shape, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    eighth = {shape: dict(points).get(0.125) for shape, points in curves.items()}
    title = "Speed-up of block-sparse GEMMs, BF16"
    if times := max(filter(None, eighth.values()), default=None):
        title = f"One block in eight stored: the GEMM is {times:.1f}× as fast as cuBLAS's dense one"
    note = "speed-up over the dense GEMM of the whole matrix, by block shape; BF16, 8192×8192×8192"
    figure, ax = canvas(title, note, run)
    xs, ys = (np.array(values) for values in zip(*(point for points in curves.values() for point in points)))
    density_axis(ax, xs)
    low, high = min(*ys, 1.0), max(*ys, *(1 / xs))
    ax.set_yscale("log", base=2)
    ax.set_ylim(low / 1.3, high * 1.15)
    ticks = [2.0**i for i in range(-6, 13) if low / 1.3 < 2.0**i < high * 1.15]
    ax.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylabel("time of dense over time of ours")
    ax.axhspan(ax.get_ylim()[0], 1, color=SHADE, lw=0, zorder=0)
    ax.axhline(1, color=DENSE, lw=1.2)
    ideal = np.array([xs.min(), xs.max()])
    ax.plot(ideal, 1 / ideal, color=FAINT, lw=1.2, ls=DASHES)
    for points, (colour, marker) in zip(curves.values(), series(len(curves))):
        ax.plot(*zip(*points), color=colour, marker=marker, ms=4)
    ax.set_xlim(left=xs.min() / 1.7)  # room for the labels
    label_ends(ax, {"×".join(map(str, shape)): points[0] for shape, points in curves.items()})
    ax.annotate(
        "ideal: 1 / density", (ideal[0], 1 / ideal[0]), (6, 4), textcoords="offset points", color=FAINT, fontsize=9
    )
    return figure


def label_ends(ax, ends: dict[str, tuple[float, float]]) -> None:
    """Label lines at their left ends, at least 12 points apart; the axis is logarithmic."""
    ax.figure.canvas.draw()
    colors, taken = dict(zip(ends, series(len(ends)))), []
    for name, (x, y) in sorted(ends.items(), key=lambda item: -item[1][1]):
        at = ax.transData.transform((x, y))[1] * 72 / ax.figure.dpi
        offset = min(0.0, (min(taken) - 12 if taken else at) - at)
        taken.append(at + offset)
        ax.annotate(
            name,
            (x, y),
            (-8, offset),
            textcoords="offset points",
            color=colors[name][0],
            fontsize=9,
            ha="right",
            va="center",
        )
