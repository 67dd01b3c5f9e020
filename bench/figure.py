"""The house style of figures: a canvas with title and caption, names beside the lines that they name, density axes."""

from collections.abc import Sequence

import numpy as np

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'cute-kernels[bench]' (the extra `bench`)") from error

INK, FAINT, GRID, DENSE, SHADE = "#222222", "#757575", "#e4e4e4", "#444444", "#f4f4f4"
# Told apart in any kind of colour vision, and by their markers too: Okabe and Ito's palette but for its yellow, which
# is too light for a line, and then Tol's indigo, wine and olive.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#882255", "#8a8a2a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
STYLE = {
    "font.size": 9.5, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "lines.linewidth": 1.8, "lines.markersize": 5.0, "figure.facecolor": "white", "savefig.dpi": 150,
}  # fmt: skip
DASHES = (0, (6, 2))


def styled():
    """A context in which figures are made and saved in this style."""
    return rc_context(STYLE)


def series(count: int) -> list[tuple[str, str]]:
    """(colour, marker) of each of `count` lines."""
    return [(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i in range(count)]


def canvas(title: str, note: str, runs: Sequence[dict], width: float = 8.4) -> tuple[Figure, Axes]:
    """A figure with a title, a line under it, and a caption that says where and when its runs were measured."""
    figure = Figure(figsize=(width, 5.2), layout="constrained")
    figure.get_layout_engine().set(rect=(0.012, 0.055, 0.968, 0.825), w_pad=0.05)
    figure.text(0.02, 0.955, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.02, 0.905, note, fontsize=9.5, color=FAINT, va="center")
    card, date, commit = (
        ", ".join(filter(None, dict.fromkeys(run["environment"].get(key) for run in runs)))
        for key in ("card", "date", "commit")
    )
    caption = " · ".join(filter(None, (card, date, commit and f"commit {commit}")))
    figure.text(0.02, 0.022, caption, fontsize=7.5, color=FAINT, va="center")
    return figure, figure.subplots()


def spread(wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Positions at least `gap` apart, in the same order, as near to the wanted ones as least squares gets them.

    They stay within `low` and `high` if there is room, else they begin at `low`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[list[float]] = []  # isotonic regression of wanted - rank * gap: neighbours that collide share a mean
    for rank, i in enumerate(order):
        pools.append([wanted[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) >= np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    levels = [float(np.mean(pool)) for pool in pools for _ in pool]
    highest = high - gap * (len(wanted) - 1)
    placed = {i: max(low, min(levels[rank], highest)) + rank * gap for rank, i in enumerate(order)}
    return [placed[i] for i in range(len(wanted))]


def label_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]], gap: float = 0.052) -> None:
    """Name lines right of the axes, each near the height of its end (x, y, text, colour), apart from one another.

    The limits of the axes must be final.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    points = [to_axes.transform((x, y)) for x, y, _, _ in ends]
    for (x, y), height, (_, _, text, colour) in zip(points, spread([y for _, y in points], gap), ends):
        ax.plot((x, 1.0, 1.03), (y, y, height), transform=ax.transAxes, color=colour, lw=0.7, alpha=0.5, clip_on=False)
        ax.text(1.04, height, text, transform=ax.transAxes, color=colour, va="center", fontsize=9)


def percent(density: float) -> str:
    return f"{100 * density:.3g} %"


def density_axis(ax: Axes, densities: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at each octave that the densities span."""
    low, high = min(densities), max(densities)
    octaves = [2.0**-i for i in range(12, -1, -1) if low / 1.01 <= 2.0**-i <= high * 1.01] or [low, high]
    ax.set_xscale("log", base=2)
    ax.set_xlim(low / 1.12, high * 1.04)
    ax.set_xticks(octaves, [percent(d) for d in octaves])
    ax.minorticks_off()
    ax.set_xlabel("density: share of blocks stored")
