"""What a tuner's run says at its end: a table, and the same as JSON."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .. import record

SLOW = 1 / 1.1  # the ratio below which the heuristics' pick is more than 10 % slower


@dataclass(frozen=True)
class Row:
    """What became of one problem. Times in microseconds; `ratio` is tuned over heuristic; `kept` says if it is used."""

    problem: str
    problem_class: str
    path: str
    heuristic: str
    heuristic_us: float
    tuned: str
    tuned_us: float
    ratio: float
    kept: bool
    tried: int
    compiled: int
    from_bundle: int
    rejected: int
    stopped: str

    def line(self) -> str:
        """One line, for a log."""
        return f"{self.problem}: {self.heuristic_us:.1f} -> {self.tuned_us:.1f} us, {self.ratio:.3f}: {self.tuned}"

    @property
    def slow(self) -> bool:
        """Whether the heuristics' pick is more than 10 % slower."""
        return self.ratio < SLOW


def print_table(rows: list[Row]) -> None:
    """A line for each problem; those where the heuristics' pick is more than 10 % slower are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("problem", "heuristic pick", "tuned pick"):
        table.add_column(name, overflow="fold")
    for name in ("µs", "tuned µs", "ratio", "tried/compiled/rejected"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        mark = "heuristic > 10 % slower" if row.slow else "kept" if row.kept else "no gain"
        numbers = f"{row.heuristic_us:.1f}", f"{row.tuned_us:.1f}", f"{row.ratio:.3f}"
        counts = f"{row.tried}/{row.compiled + row.from_bundle}/{row.rejected}"
        table.add_row(row.problem, row.heuristic, row.tuned, *numbers, counts, mark, style="bold" if row.slow else "")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def write(rows: list[Row], rates: dict[str, float], folder: Path, **how) -> Path:
    """Write <folder>/<card>/tune.json, in place of an earlier run's; `how` are further facts of the run."""
    where = record.environment()
    path = folder / record.card_name(where["card"]) / "tune.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"suite": "tune", "environment": where, "ceilings": rates} | how
    path.write_text(json.dumps(data | {"rows": [asdict(row) | {"slow": row.slow} for row in rows]}, indent=1) + "\n")
    return path
