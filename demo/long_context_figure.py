"""The picture of a long prompt's attention: which blocks are computed, next to what that saves."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from attention import BlockMask

from .figure import FAINT, INK, PRUNED, SERIES, plt
from .long_context import DENSE, SPARSE, TORCH, LongContext
from .report import block_name

PARTIAL, FULL = "#8fc1e3", "#0072b2"


def block_kinds(mask: BlockMask) -> np.ndarray:
    """(Mq, Mk) of the first item and head: 0 where a block is not computed, 1 where partial, 2 where full."""
    partial, full = (table[0, 0].cpu().numpy() for table in mask.tables())
    return partial + 2 * full.astype(np.int64)


def draw_pattern(ax: Axes, mask: BlockMask) -> None:
    """Full blocks dark, partial ones light, those that are skipped grey."""
    rows, columns = mask.lengths
    options = {"cmap": ListedColormap([PRUNED, PARTIAL, FULL]), "vmin": 0, "vmax": 2, "interpolation": "nearest"}
    ax.imshow(block_kinds(mask), extent=(0, columns, rows, 0), **options)
    ax.set_xticks([0, columns])
    ax.set_yticks([0, rows])
    ax.set_xlabel("key", color=INK)
    ax.set_ylabel("query", color=INK)
    ax.set_title(f"Window, global tokens and documents\n{block_name(mask.blocksize)} blocks", fontsize=10, color=INK)
    names = {"all seen": FULL, "some seen": PARTIAL, "skipped": PRUNED}
    patches = [Patch(color=colour, label=name) for name, colour in names.items()]
    ax.legend(handles=patches, loc="upper right", fontsize=8, framealpha=1.0)


def draw_saving(ax: Axes, found: LongContext, device: str) -> None:
    """Bars of the times; of the blocks that are computed where nothing was timed."""
    timed = {name: found.micros[name] for name in (TORCH, DENSE, SPARSE) if isinstance(found.micros.get(name), float)}
    bars = timed or {"causal": 1.0, "this pattern": found.share}
    colours = [SERIES[0][0] if name in (SPARSE, "this pattern") else FAINT for name in bars]
    drawn = ax.barh(list(bars), list(bars.values()), color=colours, height=0.55)
    ax.bar_label(drawn, [f"{us:,.0f} µs" if timed else f"{us:.0%}" for us in bars.values()], padding=4, color=INK)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set_xticks([])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    shape = f"{found.mask.lengths[0]} tokens, {found.heads} heads of {found.depth}"
    if timed:
        title = f"Time on {device}: {shape}"
        if found.speedup is not None:
            title += f"\n{found.share:.0%} of the causal blocks, {found.speedup:.1f}× faster than dense"
    else:
        title = f"Blocks computed: {shape}"
    ax.set_title(title, fontsize=10, color=INK)


def write_png(path: Path, found: LongContext, device: str) -> None:
    """The pattern and, beside it, the saving."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.6), width_ratios=(1, 1.3), layout="constrained", facecolor="white"
    )
    draw_pattern(left, found.mask)
    draw_saving(right, found, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)
