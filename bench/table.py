"""The table of a run in a terminal: ours and every peer of each row, then the card's copy bandwidth."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .rows import Row, Timing

WIDTH = 170  # where the output goes to a file or a pipe, which has no width of its own
REASON = 110  # characters of a peer's reason that are shown: two lines of its column; the result file has all of it


def make_console(width: int = WIDTH) -> Console:
    """A console that does not fold a table which goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def grid(texts: Sequence[str], numbers: Sequence[str] = (), **options) -> Table:
    """A table with columns of text and then of numbers, which are never folded."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", **options)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show(rows: Sequence[Row], ceilings: dict, console: Console | None = None) -> None:
    """Print a line for each candidate of each row, what is missed, and the ceilings.

    Args:
        ceilings: {"copy_tbs"}, or {}.
    """
    console = console or make_console()
    table = grid(["row", "candidate"], ["µs", "p10–p90", "useful TFLOP/s", "ours over it", "asked"])
    for row in rows:
        table.add_row(Text(row.name, style="bold"), *timed(row.ours, row), asked(row))
        for peer in row.peers:
            style = "bold" if peer is row.rival else ""
            table.add_row("", *timed(peer, row), style=style)
    if rows:
        console.print(table)
    if missed := [row.name for row in rows if is_missed(row)]:
        console.print(Text(f"MISSED ({len(missed)} of {len(rows)}): {'; '.join(missed)}", style="bold red"))
    if "copy_tbs" in ceilings:
        console.print(Text(f"measured copy bandwidth: {ceilings['copy_tbs']:g} TB/s"))


def timed(timing: Timing, row: Row) -> list[Text]:
    """Cells of a candidate: its name, or the reason why it has no time, its time, and our rate over its rate."""
    if not timing.us:
        error = timing.error or "not timed"
        text = f"{timing.name}: {error if len(error) <= REASON else error[: REASON - 1] + '…'}"
        return [Text(text, style="red" if timing is row.ours else "dim"), *map(Text, 4 * ["–"])]
    spread, over = timing.spread, "–"
    if timing is not row.ours and row.ours.us:
        over = f"{row.ours.tflops / timing.tflops:.3f}"
    cells = timing.name, f"{spread['median_us']:.1f}", f"{spread['p10']:.1f}–{spread['p90']:.1f}"
    return [Text(cell) for cell in (*cells, f"{timing.tflops:.0f}", over)]


def is_missed(row: Row) -> bool:
    """True if the row did not reach the ratio asked of it, or has none to compare."""
    return row.asked is not None and (row.ratio is None or row.ratio < row.asked)


def asked(row: Row) -> Text:
    if row.asked is None:
        return Text("–", style="dim")
    return Text(f"{row.asked:g} MISSED", style="bold red") if is_missed(row) else Text(f"{row.asked:g}", style="green")
