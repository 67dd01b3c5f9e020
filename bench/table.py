"""The table of a run in a terminal: ours and every peer of each row, then the card's ceilings."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import timing
from .rows import Row, Timing

WIDTH = 170  # where the output goes to a file or a pipe, which has no width of its own
REASON = 110  # characters of a peer's reason that are shown: two lines of its column; the result file has all of it
CEILINGS = (("copy_tbs", "copy", "TB/s"), ("l2_tbs", "L2 feed", "TB/s"), ("tensor_tflops", "tensor cores", "TFLOP/s"))


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
    """Print the rows with all their peers, and a line for the ceilings.

    Args:
        ceilings: {"copy_tbs", "l2_tbs", "tensor_tflops"}; any may be absent.
    """
    console = console or make_console()
    if rows:
        console.print(rows_table(rows))
    if missed := [row.name for row in rows if is_missed(row)]:
        console.print(Text(f"MISSED ({len(missed)} of {len(rows)}): {'; '.join(missed)}", style="bold red"))
    if found := [f"{name} {ceilings[key]:g} {unit}" for key, name, unit in CEILINGS if key in ceilings]:
        console.print(Text("measured ceilings: " + ", ".join(found)))


def rows_table(rows: Sequence[Row]) -> Table:
    """A section of a table for each row, with a line of it for each peer."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False, header_style="bold")
    table.add_column("product", ratio=24)
    table.add_column("ours, µs (p10–p90)", justify="right", no_wrap=True)
    table.add_column("useful\nTFLOP/s", justify="right", no_wrap=True)
    table.add_column("peers, µs (our rate over theirs)", ratio=52)
    table.add_column("asked", no_wrap=True)
    table.add_column("configuration", ratio=26, style="dim")
    width = max((len(peer.name) for row in rows for peer in row.peers if peer.us), default=0)
    for row in rows:
        table.add_row(Text(row.name), *own(row.ours), peers(row, width), asked(row), Text(row.plan))
        if len(row.peers) > 1:  # a gap after a cell of many lines; rows of one line stay together
            table.add_row()
    return table


def own(ours: Timing) -> tuple[Text, Text]:
    """Our median with its spread, and our rate."""
    if not ours.us:
        return Text("no time", style="bold red"), Text("–")
    spread = timing.spread(ours.us)
    time = f"{spread['median_us']:.1f} ({spread['p10']:.1f}–{spread['p90']:.1f})"
    return Text(time), Text(f"{ours.tflops:.0f}", style="bold")


def peers(row: Row, width: int) -> Text:
    """A line for each peer, the one that the row is held against first and bold; names padded to `width`."""
    if row.ours.error:
        return Text(f"ours: {row.ours.error}", style="red")
    held = row.against if row.rival is None else row.rival.name
    lines = []
    for peer in sorted(row.peers, key=lambda peer: peer.name != held):
        if peer.us:
            ratio = f"({row.ours.tflops / peer.tflops:.3f})" if row.ours.us else "(–)"
            text = f"{peer.name:<{width}} {peer.median:>8.1f} µs {ratio}"
        else:
            reason = peer.error or "not timed"
            text = f"{peer.name}: {reason if len(reason) <= REASON else reason[: REASON - 1] + '…'}"
        lines.append(Text(text, style="bold" if peer.name == held else "" if peer.us else "dim"))
    return Text("\n").join(lines)


def is_missed(row: Row) -> bool:
    """Whether a number is asked of the row that it did not reach, or could not be compared with."""
    return row.asked is not None and (row.ratio is None or row.ratio < row.asked)


def asked(row: Row) -> Text:
    if row.asked is None:
        return Text("–", style="dim")
    return Text(f"{row.asked:g} MISSED", style="bold red") if is_missed(row) else Text(f"{row.asked:g}", style="green")
