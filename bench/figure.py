"""Style of figures: a canvas with title and caption, density axes."""

from collections.abc import Sequence

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


def canvas(title: str, note: str, run: dict) -> tuple[Figure, Axes]:
    """A figure with a title, a line under it, and a caption that says where and when its run was measured."""
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    figure.get_layout_engine().set(rect=(0.012, 0.055, 0.968, 0.825), w_pad=0.05)
    figure.text(0.02, 0.955, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.02, 0.905, note, fontsize=9.5, color=FAINT, va="center")
    card, date, commit = (run["environment"].get(key) for key in ("card", "date", "commit"))
    caption = " · ".join(filter(None, (card, date, commit and f"commit {commit}")))
    figure.text(0.02, 0.022, caption, fontsize=7.5, color=FAINT, va="center")
    return figure, figure.subplots()


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
