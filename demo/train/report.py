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
from bench.figure import FAINT, INK, Axes, density_axis, percent, series
from bench.table import grid
from cute_kernels.runtime.keys import source_fingerprint

from ..figure import FULL, write_png
from .long import OURS, SAME_MASK, LongRun
from .recovery import LOW, Recovery
from .runs import Run


def runs_table(runs: Sequence[Run], title: str) -> Table:
    """A line for each run. Operations are those to train on one token, losses the last ones, in nats a byte."""
    numbers = ["parameters", "hidden", "density", "MFLOP a token", "loss, train", "held out", "ms a step", "peak GiB"]
    table = grid(["run"], numbers, title=title)
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


def recovery_table(found: Sequence[Recovery], title: str) -> Table:
    """A line for each density: cosines of held-out sentences with the dense model's."""
    low = f"lowest {percent(LOW)}"
    numbers = ["density", "parameters", "pruned at once", low, "pruned in stages", "trained", low, "tokens", "minutes"]
    table = grid([], numbers, title=title)
    for row in found:
        cosines = (row.at_once, row.low_at_once, row.cosine[0], row.cosine[-1], row.low_cosine[-1])
        cells = [
            percent(row.density),
            f"{row.parameters:,} of {row.dense_parameters:,}",
            *map("{:.3f}".format, cosines),
        ]
        table.add_row(*cells, f"{row.tokens:,}", f"{row.seconds / 60:.1f}")
    return table


def draw_curves(ax: Axes, found: Sequence[Recovery]) -> None:
    """Mean cosine against steps, density after density: each line begins where the model was pruned further."""
    done = 0
    for row, (colour, marker) in zip(found, series(len(found)), strict=True):
        steps = [done + step for step in row.steps]
        ax.plot(steps, row.cosine, color=colour, marker=marker, label=f"{percent(row.density)} of the blocks")
        done = steps[-1]
    ax.set_ylim(top=1.0)
    ax.set_xlabel("training steps")
    ax.set_ylabel("cosine with the dense model's embeddings")
    ax.set_title("Sentences of documents that were held out", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="lower right")


def draw_before_and_after(ax: Axes, found: Sequence[Recovery]) -> None:
    """Means, and the lowest twentieth dashed, against density."""
    densities = [row.density for row in found]
    lines = {
        "pruned at once": ([row.at_once for row in found], [row.low_at_once for row in found]),
        "trained": ([row.cosine[-1] for row in found], [row.low_cosine[-1] for row in found]),
    }
    for (name, (mean, low)), (colour, marker) in zip(lines.items(), series(2), strict=True):
        ax.plot(densities, mean, color=colour, marker=marker, label=f"{name}, mean")
        ax.plot(densities, low, color=colour, marker=marker, ls="--", label=f"{name}, {percent(LOW)} are below")
    density_axis(ax, densities)
    ax.set_ylim(0, 1)
    ax.set_ylabel("cosine")
    ax.set_title("Before and after training", fontsize=10)
    ax.legend(frameon=False, fontsize=8)


def long_table(runs: Sequence[LongRun], tokens: int, title: str) -> Table:
    """A line for each candidate; losses in nats a byte."""
    table = grid(
        ["attention"], ["steps", "ms a step", "tokens a second", "peak GiB", "loss, first", "last"], title=title
    )
    for run in runs:
        if run.error:
            table.add_row(run.name, "", "failed")
            continue
        peak = "" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.1f}"
        speed = f"{run.step_ms:,.1f}", f"{1e3 * tokens / run.step_ms:,.0f}"
        table.add_row(run.name, str(len(run.loss)), *speed, peak, f"{run.loss[0]:.4f}", f"{run.loss[-1]:.4f}")
    return table


def draw_losses(ax: Axes, runs: Sequence[LongRun]) -> None:
    """Against steps; dashed where the mask is another."""
    for run, (colour, marker) in zip(runs, series(len(runs)), strict=True):
        style = "-" if run.name in SAME_MASK else "--"
        ax.plot(range(1, len(run.loss) + 1), run.loss, color=colour, marker=marker, ls=style, label=run.name)
    ax.set_xlabel("step")
    ax.set_ylabel("loss, nats a byte")
    ax.set_title("The same weights and text", fontsize=10)
    ax.legend(frameon=False, fontsize=8)


def draw_steps(ax: Axes, runs: Sequence[LongRun], title: str) -> None:
    """Bars of a step's time, with the peak of memory beside."""
    names = [run.name.replace(", ", ",\n") for run in runs]
    drawn = ax.barh(names, [run.step_ms for run in runs], height=0.55)
    for bar, run in zip(drawn, runs, strict=True):
        bar.set_color(FULL if run.name == OURS else FAINT)
    labels = (f"{run.step_ms:,.0f} ms" for run in runs)
    memory = ("" if run.peak_bytes is None else f", {run.peak_bytes / 2**30:.0f} GiB" for run in runs)
    ax.bar_label(drawn, list(map(str.__add__, labels, memory)), padding=4, color=INK)
    ax.invert_yaxis()
    ax.margins(x=0.3)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.set_title(title, fontsize=10)


def draw_long(path: Path, runs: Sequence[LongRun], title: str) -> None:
    """Two panels: loss against steps, and what a step takes."""
    runs = [run for run in runs if not run.error]
    write_png(path, partial(draw_losses, runs=runs), partial(draw_steps, runs=runs, title=title), 1)


def environment(gpu: bool) -> dict:
    """Where this runs: card or kind of CPU, versions, commit and date."""
    if gpu:
        return record.environment() | {"python": platform.python_version()}
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    where = {"card": f"CPU, {platform.machine()}, {capability}, {threads} thread{'s' * (threads > 1)}"}
    where |= {"torch": torch.__version__, "python": platform.python_version(), "sources": source_fingerprint()}
    return where | {"commit": record.commit(), "date": datetime.date.today().isoformat()}


def portable(argument: str) -> str:
    """An argument of the command line; of an absolute path its last part, which is what a reader can use."""
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def write_json(path: Path, suite: str, where: dict, arguments: Sequence[str], rows: Sequence, **more) -> None:
    """A result file in the manner of bench/results: suite, environment, command, what else is named, and the rows."""
    command = shlex.join(["./run", "train", *map(portable, arguments)])
    data = {"suite": suite, "environment": where, "command": command, **more, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")
