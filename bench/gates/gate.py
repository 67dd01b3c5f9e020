"""What a gate says, how gates are run, and the one page and the one file they end up in.

A gate is a function without arguments that returns a `Gate`. It may raise `Skip` with the reason why it cannot be
asked here. Any other exception is a failure: a gate that could not look has not seen that all is well.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from .. import record
from ..rows import reason
from ..table import grid, make_console

NAMES = ("resources", "tables", "correctness", "determinism", "stability", "speed", "counters", "sanitizer")
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
STYLES = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}
MOST_DETAILS = 40  # lines of one gate on the page and in the file; what comes first says most
WIDTH = 120  # columns of the page in a file or a pipe; a terminal has its own


class Skip(Exception):
    """Raised by a gate that cannot be asked on this machine; the text is the reason."""


@dataclass(frozen=True)
class Gate:
    """The verdict of one gate. `summary` is one line, of a skipped gate the reason; `details` tell a failure."""

    name: str
    verdict: str  # PASSED, FAILED or SKIPPED
    summary: str
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self):
        if self.verdict not in STYLES:
            raise ValueError(f"verdict {self.verdict!r}; there are {', '.join(STYLES)}")
        if not self.summary.strip():
            raise ValueError(f"gate {self.name}: {self.verdict}, but not a word why")


def judged(name: str, problems: list[str], passed: str, failed: str) -> Gate:
    """Failed with `problems` as the details if there are any, else passed; each with its own summary."""
    return Gate(name, FAILED, failed, list(problems)) if problems else Gate(name, PASSED, passed)


def need_gpu() -> None:
    """Skip where there is no CUDA GPU."""
    if not torch.cuda.is_available():
        raise Skip("no CUDA GPU")


def run(
    checks: Mapping[str, Callable[[], Gate]],
    tell: Callable[[str], None] = lambda line: None,
    keep: Callable[[list[Gate]], None] = lambda gates: None,
) -> list[Gate]:
    """Ask every gate in order. `tell` gets a line before and after each, for whoever is waiting, and `keep` all gates
    so far after each: a later one may be cut by a time limit."""
    gates = []
    for name, check in checks.items():
        tell(f"gate {name} ...")
        start = time.perf_counter()
        try:
            gate = check()
        except Skip as skip:
            gate = Gate(name, SKIPPED, str(skip))
        except Exception as error:
            gate = Gate(name, FAILED, f"the gate itself broke: {reason(error)}", str(error).splitlines())
        gates.append(gate := replace(gate, seconds=round(time.perf_counter() - start, 2)))
        tell(f"gate {name} {gate.verdict} in {gate.seconds} s: {gate.summary}")  # the page comes at the very end
        keep(gates)
    return gates


def exit_status(gates: list[Gate]) -> int:
    """1 if any gate failed, else 0. A skipped gate does not fail a run; the page says that it was not asked."""
    return int(any(gate.verdict == FAILED for gate in gates))


def shown(gate: Gate) -> list[str]:
    """The details of a gate, cut to what a page bears, with how many lines were left out."""
    rest = len(gate.details) - MOST_DETAILS
    return gate.details if rest <= 0 else [*gate.details[:MOST_DETAILS], f"and {rest} lines more"]


def conclusion(gates: list[Gate], missing: Sequence[str] = ()) -> str:
    """The last line of the page; `missing` names gates that a record lacks."""
    named = {verdict: [gate.name for gate in gates if gate.verdict == verdict] for verdict in STYLES}
    if named[FAILED]:
        return f"Not to be shipped: {', '.join(named[FAILED])} failed."
    left = [f"{', '.join(names)} {why}" for names, why in ((named[SKIPPED], SKIPPED), (missing, "not asked")) if names]
    if left:
        return f"Nothing failed, but not all was looked at: {'; '.join(left)}."
    return "Every gate passed."


def page(gates: list[Gate], console: Console | None = None) -> None:
    """A line a gate, the details of those that failed, and the conclusion, on stdout unless told."""
    console = console or make_console(WIDTH)
    table = grid(["gate", "verdict"], ["s"])
    table.add_column("what was found", overflow="fold")
    for gate in gates:
        verdict = Text(gate.verdict, STYLES[gate.verdict])
        table.add_row(Text(gate.name), verdict, f"{gate.seconds:.1f}", Text(gate.summary))
    console.print(table)
    for gate in gates:
        if gate.verdict == FAILED and gate.details:
            console.print(Text(gate.name, "bold"))
            for line in shown(gate):
                console.print(Text(f"    {line}"))
    console.print(Text(conclusion(gates), STYLES[FAILED] if exit_status(gates) else STYLES[PASSED]))


def write(gates: list[Gate], folder: Path, mode: str) -> Path:
    """Write <folder>/<card>/gates.json: the environment, whether anything failed, and every gate.

    Gates that were not asked now keep what the file says of them, if it is of the same mode, sources and versions: all
    of them can be asked in several calls; the conclusion names those that were in none. `mode` is "quick" or "full".
    Only a machine with a GPU has a card, and so a place for this file.
    """
    environment = record.environment()
    asked = [replace(gate, details=shown(gate)) for gate in gates]
    before = earlier(record.file_of(folder, environment["card"], "gates"), mode, environment)
    found = {gate.name: gate for gate in (*before, *asked)}
    gates = [found[name] for name in sorted(found, key=order)]
    missing = [name for name in NAMES if name not in found]
    data = {"mode": mode, "environment": environment, "ok": exit_status(gates) == 0}
    data |= {"conclusion": conclusion(gates, missing), "gates": [asdict(gate) for gate in gates]}
    return record.save(folder, environment["card"], "gates", data)


def order(name: str) -> int:
    """A gate's place on the page; those of no place come last."""
    return NAMES.index(name) if name in NAMES else len(NAMES)


def earlier(path: Path, mode: str, environment: Mapping) -> list[Gate]:
    """The gates of a file of the same mode, sources and versions; none where there is no such file."""
    try:
        data = json.loads(path.read_text())
        before = data["environment"]
        if data["mode"] == mode and all(before.get(name) == environment.get(name) for name in record.what_runs()):
            return [Gate(**fields) for fields in data["gates"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return []
