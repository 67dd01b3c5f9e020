"""What suites measure beside their rows: checks over several rows, and errors against FP64.

A suite's `findings(rows, only)` prints them and returns them for the result file.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from . import cases_attention, cases_attention_backward
from . import peers_attention as peers
from .peers_attention import FA4, FLASH
from .rows import OURS, Row, reason
from .table import grid, make_console


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


def shown(checks: Sequence[Check]) -> dict:
    """Print the checks; returns them as result files have them."""
    for check in checks:
        text = f"{check}{'' if check.ok else ' MISSED'}"
        make_console().print(Text(text, style="green" if check.ok else "bold red"))
    return {"checks": [check.as_dict() for check in checks]}


def over_all(rows: Sequence[Row], kind: str, least: str, mean_asked: float, least_asked: float) -> list[Check]:
    """The geometric mean and the least of the ratios of rows whose names begin with `kind`."""
    ratios = [row.ratio for row in rows if row.name.startswith(f"{kind} ")]
    if not ratios:
        return []
    mean, worst = (None, None) if None in ratios else (statistics.geometric_mean(ratios), min(ratios))
    named = f"{kind}, geometric mean of {len(ratios)}"
    return [Check(named, mean, mean_asked), Check(f"{kind}, {least}", worst, least_asked)]


def over_peer(row: Row, peer: str, what: str, asked: float) -> Check:
    """Our useful rate over that of a peer other than the one the row is held against."""
    other = row.peer(peer)
    share = None if other is None or row.ours.error else row.ours.tflops / other.tflops
    return Check(f"{row.name}: {what}", share, asked)


HELD_SHARE = 0.97  # asked of a mask that users hold: it was converted by the first call
ERRORS = (((1, 4096, 8, 128), False), ((1, 4096, 8, 64), True), ((1, 4096, 4, 256), True))  # (B, S, H, D), causal
# Over theirs. Most of the error is one rounding of the output, the same for all; the largest error is that of a single
# element.
RMS, LARGEST = 1.01, 1.1
OVER_DENSE = "useful rate over our own dense one"


def attention_checks(rows: Sequence[Row], errors: Sequence[dict]) -> list[Check]:
    """Checks of what was measured: of the rows together, and of the errors."""
    found = over_all(rows, cases_attention.FORWARD, "worst", 1.0, 0.93)
    for row in rows:
        if row.name == cases_attention.EIGHTH:
            found.append(over_peer(row, cases_attention.OUR_DENSE, OVER_DENSE, 0.92))
        if row.name.endswith(tuple(cases_attention.HELD)):
            found.append(over_peer(row, cases_attention.OUR_KEPT, "rate over that of a kept BlockMask", HELD_SHARE))
    for entry in errors:
        ours, *theirs = (entry["errors"].get(name, {}) for name in (OURS, FLASH, FA4))
        theirs = [e for e in theirs if "rms" in e]
        known = "rms" in ours and theirs
        rms = ours["rms"] / min(e["rms"] for e in theirs) if known else None
        largest = ours["max"] / max(e["max"] for e in theirs) if known else None
        found.append(Check(f"rms error over the least of theirs, {entry['shape']}", rms, RMS, at_most=True))
        found.append(Check(f"largest error over the largest of theirs, {entry['shape']}", largest, LARGEST, True))
    return found


def errors(cases: Sequence, device: str = "cuda") -> list[dict]:
    """Largest and root mean square error against fp64 of ours, FlashAttention 2 and 4, of the same tensors.

    Ours of all cases comes first, since FA4's import changes CuTe DSL, with which ours may have to be compiled.
    """
    of_case = [
        cases_attention.operands(cases_attention.dense_problem(shape, causal), device=device) for shape, causal in cases
    ]
    found = [{"shape": cases_attention.named(*case), "rms": None, "errors": {}} for case in cases]
    makes = {
        OURS: lambda x: cases_attention.ours_of(x)[0],
        FLASH: lambda x: peers.sdpa_flash(x, 1.0).setup(),
        FA4: lambda x: peers.fa4(x, 1.0).setup(),
    }
    for name, make in makes.items():
        for x, entry in zip(of_case, found, strict=True):
            exact = x.exact()
            entry["rms"] = exact.square().mean().sqrt().item()
            try:
                wrong = make(x)().double() - exact
                entry["errors"][name] = {"max": wrong.abs().max().item(), "rms": wrong.square().mean().sqrt().item()}
            except Exception as error:
                entry["errors"][name] = {"error": reason(error)}
    return found


def of_attention(rows: Sequence[Row], only: str = "") -> dict:
    """Errors against FP64, and the checks."""
    wrong = errors(ERRORS) if only in ("", "errors") else []
    if wrong:
        table = grid(["shape", *wrong[0]["errors"]], title="Error against fp64: largest, root mean square")
        for entry in wrong:
            cells = (e.get("error") or f"{e['max']:.2e}, {e['rms']:.3e}" for e in entry["errors"].values())
            table.add_row(entry["shape"], *cells)
        make_console().print(table)
    return {"errors": wrong} | shown(attention_checks(rows, wrong))


def of_backward(rows: Sequence[Row], only: str = "") -> dict:
    """The checks of attention's gradients."""
    found, dense = over_all(rows, cases_attention_backward.BACKWARD, "lowest", 1.03, 0.95), cases_attention_backward
    asked = {dense.sparse_name(side): share for side, share in dense.OVER_DENSE.items()}
    found += [over_peer(row, dense.OUR_DENSE, OVER_DENSE, asked[row.name]) for row in rows if row.name in asked]
    return shown(found)
