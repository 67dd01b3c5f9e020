"""The speed gate: every row's ratio to its peer against the floor recorded on the same card.

A floor is the median of three ratios that `python -m bench gates --set-floors` measured, and lies in
bench/results/<card>/floors.json. A row fails below floor * (1 - margin). A row that fails is measured again twice, and
the median of the three decides: one disturbed measurement fails nothing, and a slow kernel is slow three times. The
ratio that was asked for is shown where it is missed, but the verdict is against the floor: the gate says whether the
code got slower, not whether it is fast enough.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from .. import cases as products
from .. import cases_attention as attention
from .. import record
from ..peers_attention import CUDNN, FLASH
from ..rows import Case, Row
from .gate import Gate, Skip, judged, need_gpu

NAME = "speed"
MARGIN = 0.06
REPEATS = 3
QUICK_STEP = 3  # a quick run takes every third of gate_cases(): some three seconds each
SET_FLOORS = "python -m bench gates --set-floors"


@dataclass(frozen=True)
class Judged:
    """A row's median ratio against its floor. `ok` is whether it reached floor * (1 - margin)."""

    name: str
    ratio: float
    floor: float | None  # None: none was recorded, which is no pass
    asked: float | None
    ok: bool

    def __str__(self) -> str:
        if self.floor is None:
            return f"{self.name}: {self.ratio:.3f}, and no floor was recorded: {SET_FLOORS}"
        change = self.ratio / self.floor - 1
        asked = f"; asked {self.asked:.2f}, missed" if self.missed else ""
        return f"{self.name}: {self.ratio:.3f}, floor {self.floor:.3f} ({change:+.1%}){asked}"

    @property
    def missed(self) -> bool:
        """Whether the row is below what was asked of it."""
        return self.asked is not None and self.ratio < self.asked


def judge(name: str, measured: list[float], floors: dict) -> Judged:
    """The median of a row's measured ratios against the content of a floors file."""
    ratio, row = median(measured), floors["rows"].get(name, {})
    floor = row.get("ratio")
    return Judged(name, ratio, floor, row.get("asked"), floor is not None and ratio >= floor * (1 - floors["margin"]))


def measure(case: Case) -> float:
    """A row's ratio, measured as floors are. Raises RuntimeError where the peer did not run: no ratio, no verdict."""
    return ratio_of(case.measure(rounds=40, warm_s=0.7))


def ratio_of(row: Row) -> float:
    if row.ratio is None:
        errors = [f"{timing.name}: {timing.error}" for timing in (row.ours, *row.peers) if timing.error]
        raise RuntimeError(f"{row.name} has no ratio to {row.against}; {'; '.join(errors)}")
    return row.ratio


def compare(
    cases: Iterable[Case], floors: dict, measure: Callable[[Case], float] = measure
) -> tuple[list[Judged], list[str]]:
    """(what is said of each row, which rows were measured again): every case against a floors file's content."""
    cases = list(cases)
    ratios = {case.name: [measure(case)] for case in cases}
    found = [judge(name, measured, floors) for name, measured in ratios.items()]
    again = [row.name for row in found if not row.ok and row.floor is not None]
    for _ in range(REPEATS - 1):
        for case in cases:
            if case.name in again:
                ratios[case.name].append(measure(case))
    return [judge(name, measured, floors) for name, measured in ratios.items()], again


def floors_path(folder: Path = record.RESULTS) -> Path:
    """Where this card's floors lie."""
    return Path(folder, record.card_name(torch.cuda.get_device_name()), "floors.json")


def read_floors(path: Path) -> dict:
    """A floors file; skips, with the way to make one, where there is none."""
    if not path.exists():
        raise Skip(f"no floors of this card: {SET_FLOORS} measures and writes {path}")
    return json.loads(path.read_text())


def set_floors(
    cases: Iterable[Case], path: Path, measure: Callable[[Case], float] = measure, environment: dict | None = None
) -> dict:
    """Measure every case three times, all cases taking turns, and write the medians; returns the file's content."""
    environment, cases = environment or record.environment(), list(cases)
    turns = [[measure(case) for case in cases] for _ in range(REPEATS)]
    ratios = {case.name: round(median(measured), 4) for case, *measured in zip(cases, *turns)}
    rows = {case.name: {"ratio": ratios[case.name], "asked": case.asked} for case in cases}
    floors = {"margin": MARGIN, "card": environment["card"], "sources": environment["sources"], "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(floors, indent=1) + "\n")
    return floors


def gate_cases() -> list[Case]:
    """The rows that are held to floors: attention's beside one peer that needs nothing but torch."""
    batch, keys, asked = attention.CACHES[0]
    return [
        *products.gate_cases(),
        beside(CUDNN, attention.forward(attention.FIRST, True)),
        beside(CUDNN, attention.forward((2, 8192, 32, 64), False)),
        beside(FLASH, attention.older(attention.FIRST, True)),
        beside(attention.OUR_DENSE, attention.sparse(128, 1 / 8, FLASH, 1.0, dense=True)),
        beside(attention.COPY, attention.decoding(batch, keys, asked)),
    ]


def beside(peer: str, case: Case) -> Case:
    """The case with this one of its peers alone; what was asked of a ratio to another peer is not asked of this one."""
    asked = case.asked if case.against == peer else None
    peers = [other for other in case.peers if other.name == peer]
    return replace(case, peers=peers, against=peer, asked=asked, patches_dsl=False)


def check(
    cases: Iterable[Case] | None = None, floors: dict | None = None, *, quick: bool = False,
    measure: Callable[[Case], float] = measure,
) -> Gate:  # fmt: skip
    """Measure and judge: by default gate_cases(), with `quick` every third, against the card's floors."""
    if floors is None:
        need_gpu()
        floors = read_floors(floors_path())
    cases = gate_cases() if cases is None else list(cases)
    lost = [] if quick else sorted(floors["rows"].keys() - {case.name for case in cases})
    if lost:  # a row that nobody measures any more would pass for ever
        return judged(NAME, lost, "", f"{len(lost)} rows have a floor and no case: {SET_FLOORS} forgets them")
    rows, again = compare(cases[::QUICK_STEP] if quick else cases, floors, measure)
    slow = [row for row in rows if not row.ok]
    lowest = min((row for row in rows if row.floor), key=lambda row: row.ratio / row.floor, default=None)
    text = f"{len(rows)} rows" + (f", lowest {lowest}" if lowest else "")
    text += f"; {len(again)} measured again, {sum(row.missed for row in rows)} below what was asked"
    lines = [*(f"{row} SLOWER" for row in slow), *(str(row) for row in rows if row.ok)]
    failed = f"{len(slow)} of {len(rows)} rows below floor - {floors['margin']:.0%}"
    return replace(judged(NAME, slow, text, failed), details=lines)
