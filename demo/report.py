"""The tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .accuracy import Accuracy
from .timing import DENSE, OURS, TORCH_BSR, Timing


def block_name(blocksize: tuple[int, int]) -> str:
    """(128, 64) as 128x64."""
    return f"{blocksize[0]}x{blocksize[1]}"


def make_console() -> Console:
    """A console that does not fold the tables when its output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, 120))


def accuracy_table(rows: Sequence[Accuracy]) -> Table:
    """Left, the product against fp32 on the same pruned weights; right, what pruning changed."""
    table = Table(title="The pruned layer (both weights, fp16)")
    for name in ("blocks", "kept"):
        table.add_column(name, justify="right")
    for name in ("max error", "rel. error", "torch dense fp16", "agrees"):
        table.add_column(name, justify="right", header_style="cyan")
    for name in ("cosine to unpruned", "rel. change"):
        table.add_column(name, justify="right", header_style="yellow")
    for i, row in enumerate(rows):
        table.add_row(
            block_name(row.blocksize),
            f"{row.density:.1%}",
            f"{row.max_error:.1e}",
            f"{row.error:.1e}",
            f"{row.torch_error:.1e}",
            "yes" if row.agrees else "[bold red]NO[/]",
            f"{row.cosine:.4f}",
            f"{row.change:.3f}",
            end_section=i + 1 < len(rows) and rows[i + 1].blocksize != row.blocksize,
        )
    return table


def timing_table(title: str, rows: Sequence[Timing]) -> tuple[Table, list[str]]:
    """The table, and the notes that its failures refer to."""
    table = Table(title=title)
    table.add_column("product")
    columns = (
        "M x K",
        "blocks",
        "kept",
        "dense us",
        "torch BSR us",
        "ours us",
        "x dense",
        "useful TFLOP/s",
        "rel. error",
    )
    for name in columns:
        table.add_column(name, justify="right")
    notes: list[str] = []

    def micros(value: float | str) -> str:
        if not isinstance(value, str):
            return f"{value:.1f}"
        if value not in notes:
            notes.append(value)
        return f"failed ({notes.index(value) + 1})"

    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or (rows[i + 1].layer, rows[i + 1].blocksize) != (row.layer, row.blocksize)
        table.add_row(
            row.layer,
            f"{row.shape[0]} x {row.shape[1]}",
            block_name(row.blocksize),
            f"{row.density:.1%}",
            *(micros(row.micros[name]) for name in (DENSE, TORCH_BSR, OURS)),
            "" if row.speedup is None else f"{row.speedup:.2f}",
            "" if row.useful_tflops is None else f"{row.useful_tflops:.1f}",
            f"{row.error:.1e}" if row.agrees else f"[bold red]{row.error:.1e}[/]",
            end_section=last,
        )
    return table, [f"({i + 1}) {note}" for i, note in enumerate(notes)]
