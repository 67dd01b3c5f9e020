"""Numbers that are asked for beside those of the rows: of several rows together, or of none."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text


@dataclass(frozen=True)
class Check:
    """A number that is asked for, of more than one row or of none. `value` is None where it could not be measured."""

    name: str
    value: float | None
    asked: float
    at_most: bool = False  # whether `value` is to be no larger than `asked`, rather than no smaller

    @property
    def ok(self) -> bool:
        if self.value is None or math.isnan(self.value):
            return False
        return self.value <= self.asked if self.at_most else self.value >= self.asked

    def __str__(self) -> str:
        shown = "not measured" if self.value is None else f"{self.value:.3f}"
        return f"{self.name}: {shown}, asked {'at most' if self.at_most else 'at least'} {self.asked:g}"

    def as_dict(self) -> dict:
        return asdict(self) | {"ok": self.ok}


def show(found: Sequence[Check], console: Console) -> None:
    """A line for each."""
    for check in found:
        console.print(Text(f"{check}{'' if check.ok else ' MISSED'}", style="green" if check.ok else "bold red"))
