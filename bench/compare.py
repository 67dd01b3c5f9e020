"""Two runs beside each other, and the figures of one.

    python -m bench compare A.json B.json
    python -m bench plot FOLDER

Times of two runs are no comparison: cards of one kind differ, and so does one card from day to day. What can be
compared is each run's own ratio to the peer that took turns with ours; a row's figure here is B's ratio over A's.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from .record import load
from .table import grid, make_console

WITHIN = 0.03


@dataclass(frozen=True)
class Comparison:
    """What `compare` found of two files A and B."""

    rows: dict[str, tuple[float, float]]  # (A's ratio, B's) of each row that has one in both, against the same peer
    remarks: list[str]  # why the runs are different experiments, and which rows cannot be compared

    @property
    def changes(self) -> dict[str, float]:
        """B's ratio over A's; above 1 where ours gained on its peer."""
        return {name: b / a for name, (a, b) in self.rows.items()}

    @property
    def median(self) -> float:
        """Median of |change - 1|; infinite if no row can be compared."""
        return statistics.median(abs(r - 1) for r in self.changes.values()) if self.rows else math.inf


def compare(a: Path, b: Path) -> Comparison:
    """Match the rows of two result files by name."""
    data = load(a), load(b)
    (here, there), (rows_a, rows_b) = zip(*((d["environment"], {r["name"]: r for r in d["rows"]}) for d in data))
    pairs, remarks = {}, []
    if here.get("card") != there.get("card"):
        remarks.append(f"warning: the cards differ: {here.get('card')} in A, {there.get('card')} in B")
    if here.get("sources") != there.get("sources"):
        commits = f"commit {here.get('commit') or 'unknown'} in A, {there.get('commit') or 'unknown'} in B"
        remarks.append(f"warning: the kernels' sources differ: {commits}")
    for title, rows, others in (("only in A", rows_a, rows_b), ("only in B", rows_b, rows_a)):
        if names := [name for name in rows if name not in others]:
            remarks.append(f"{title}: {'; '.join(names)}")
    for name in (name for name in rows_a if name in rows_b):
        one, other = rows_a[name], rows_b[name]
        if one["against"] != other["against"]:
            remarks.append(f"not compared: {name}: against {one['against']} in A, {other['against']} in B")
        elif missing := [side for side, row in (("A", one), ("B", other)) if not row["ratio"]]:
            remarks.append(f"not compared: {name}: no ratio in {' and '.join(missing)}")
        else:
            pairs[name] = one["ratio"], other["ratio"]
    return Comparison(pairs, remarks)


def show(found: Comparison, within: float) -> None:
    """Print a comparison: every pair, what has none, and the verdict."""
    console = make_console()
    for remark in found.remarks:
        console.print(Text(remark, style="yellow" if remark.startswith("warning") else ""))
    if not found.rows:
        console.print(Text("no row can be compared", style="bold red"))
        return
    table = grid(["product"], ["A", "B", "B over A"])
    for name, (a, b) in found.rows.items():
        change = Text(f"{b / a:.3f}", style="bold yellow" if abs(b / a - 1) > within else "")
        table.add_row(Text(name), f"{a:.3f}", f"{b:.3f}", change)
    console.print(table)
    name, change = max(found.changes.items(), key=lambda item: abs(item[1] - 1))
    verdict = "within" if found.median <= within else "MORE THAN"
    console.print(f"median change of {len(found.rows)} rows {found.median:.2%}, {verdict} {within:.2%}", style="bold")
    console.print(Text(f"largest {change - 1:+.2%}: {name}"))


def add_command(subparsers) -> None:
    """Add `compare` and `plot` to the subcommands of an argparse parser; `args.run(args)` gives the exit status."""
    beside = subparsers.add_parser("compare", help="two runs beside each other", description=__doc__.split("\n\n")[2])
    beside.add_argument("a", type=Path, metavar="A.json")
    beside.add_argument("b", type=Path, metavar="B.json")
    text = f"exit status 1 if the median of the rows' |change| exceeds this (default {WITHIN})"
    beside.add_argument("--within", type=float, default=WITHIN, metavar="FRACTION", help=text)
    beside.set_defaults(run=run_compare)
    plot = subparsers.add_parser("plot", help="figures of a card's result files")
    plot.add_argument("folder", type=Path, metavar="FOLDER", help="as in bench/results/<card>")
    plot.add_argument("--out", type=Path, metavar="FOLDER", help="where to write them (default: beside the results)")
    plot.set_defaults(run=run_plot)


def run_compare(args: argparse.Namespace) -> int:
    """The command: 0 within the limit; 1 beyond it, or with nothing to compare; 2 if a file cannot be read."""
    try:
        found = compare(args.a, args.b)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    show(found, args.within)
    return 0 if found.median <= args.within else 1


def run_plot(args: argparse.Namespace) -> int:
    """The command: 0 if something was drawn, 1 if there was nothing to draw, 2 if it cannot be done here."""
    try:
        from .plots import draw  # needs matplotlib, which measuring does not

        drawn = draw(args.folder, args.out)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in drawn:
        print("written:", path)
    if not drawn:
        print("nothing to draw: no row of these files belongs in a figure")
    return 0 if drawn else 1
