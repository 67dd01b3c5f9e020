"""What the runs found: a table, a picture and a result file."""

import datetime
import json
import platform
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from bench import record
from bench.figure import Axes, percent, series
from bench.table import grid
from cute_kernels.runtime.keys import source_fingerprint

from ..figure import write_png
from .runs import Run


def runs_table(runs: Sequence[Run], title: str) -> Table:
    """A line for each run. Operations are those to train on one token, losses the last ones, in nats a byte."""
    numbers = ["parameters", "hidden", "density", "MFLOP a token", "loss, train", "held out", "ms a step", "peak GiB"]
    table = grid(["feed-forward"], numbers, title=title)
    for run in runs:
        losses = (f"{loss[-1]:.3f}" for loss in (run.train_loss, run.held_out_loss))
        cells = [f"{run.parameters:,}", str(run.hidden), percent(run.density), f"{run.flops_per_token / 1e6:,.2f}"]
        peak = "" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.1f}"
        table.add_row(run.name, *cells, *losses, f"{run.step_ms:.1f}", peak)
    return table


def draw_runs(ax: Axes, runs: Sequence[Run], value: Callable[[Run], list], label: str, title: str) -> None:
    """Held-out loss against something, from the first evaluation after the start."""
    for run, (colour, marker) in zip(runs, series(len(runs)), strict=True):
        name = f"{run.name} (hidden {run.hidden})"
        ax.plot(value(run)[1:], run.held_out_loss[1:], color=colour, marker=marker, label=name)
    ax.set_xlim(left=0)
    ax.set_xlabel(label)
    ax.set_ylabel("held-out loss, nats a byte")
    ax.set_title(title, fontsize=10)
    ax.legend(frameon=False, fontsize=8)


def draw(path: Path, runs: Sequence[Run], device: str) -> None:
    """Two panels: held-out loss against tokens, and against seconds of training."""
    left = partial(draw_runs, runs=runs, value=lambda run: [n / 1e6 for n in run.tokens])
    right = partial(draw_runs, runs=runs, value=lambda run: run.seconds)
    tokens = partial(left, label="million tokens (bytes)", title="Loss against tokens")
    write_png(path, tokens, partial(right, label="seconds of training steps", title=f"Loss against time, {device}"), 1)


def environment(gpu: bool) -> dict:
    """Where this runs: card or kind of CPU, versions, commit and date."""
    if gpu:
        return record.environment() | {"python": platform.python_version()}
    capability = torch.backends.cpu.get_cpu_capability()
    where = {"card": f"CPU, {platform.machine()}, {capability}, {torch.get_num_threads()} threads"}
    where |= {"torch": torch.__version__, "python": platform.python_version(), "sources": source_fingerprint()}
    return where | {"commit": record.commit(), "date": datetime.date.today().isoformat()}


def write_json(path: Path, suite: str, where: dict, arguments: Sequence[str], rows: Sequence, **more) -> None:
    """A result file in the manner of bench/results: suite, environment, command, what else is named, and the rows."""
    command = shlex.join(["./run", "train", *arguments])
    data = {"suite": suite, "environment": where, "command": command, **more, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")
