"""The recorded recovery of all-MiniLM-L6-v2 after pruning, as `./run train --minilm` measured it."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from bench.figure import FAINT, INK, Axes, series
from bench.table import grid

DATA = Path(__file__).parent / "data" / "minilm_recovery.json"


@dataclass(frozen=True)
class Recovery:
    """One density: cosines between sentence embeddings of the pruned and of the dense model, on held-out sentences."""

    density: float
    parameters: int  # of the feed-forward layers
    dense_parameters: int
    at_once: float  # pruned from the dense model, not trained
    steps: list[int]  # training steps at this density
    cosine: list[float]  # after each of `steps`


def load(path: Path = DATA) -> tuple[list[Recovery], str]:
    """(the rows, a line that says how they were recorded)."""
    data = json.loads(path.read_text())
    source = (
        f"Recorded {data['date']} by {data['command']}\n({data['card']}, {data['minutes']} minutes);"
        " pruned in stages, 800 steps each."
    )
    return [Recovery(**row) for row in data["rows"]], source


def table(rows: list[Recovery]) -> Table:
    """A row for each density."""
    title = "Cosine of sentence embeddings to the dense model's"
    shown = grid([], ["blocks kept", "parameters", "pruned", "then trained"], title=title)
    for row in rows:
        cells = f"{row.density:.1%}", f"{row.parameters:,}", f"{row.at_once:.2f}", f"{row.cosine[-1]:.2f}"
        shown.add_row(*cells)
    return shown


def draw(ax: Axes, rows: list[Recovery]) -> None:
    """Cosine against training steps after each stage of pruning, a line for each density, labelled at its end."""
    for row, (color, marker) in zip(rows, series(len(rows)), strict=True):
        ax.plot(row.steps, row.cosine, color=color, marker=marker)
        label = f"{row.density:.1%} of the blocks"
        offset = {0.5: 6, 0.25: -2, 0.125: -10}.get(row.density, 0)
        ax.annotate(
            label, (row.steps[-1], row.cosine[-1]), (8, offset), textcoords="offset points", color=color, fontsize=9
        )
    last = rows[-1]
    ax.set_xlim(-20, rows[0].steps[-1] * 1.45)
    ax.set_ylim(0, 1)
    ax.set_xlabel("training steps at this density", color=INK)
    ax.set_ylabel("cosine to the dense model's embeddings", color=FAINT)
    ax.set_title(
        f"MiniLM with {last.density:.1%} of its blocks recovers to a cosine of {last.cosine[-1]:.2f}", fontsize=10
    )
