"""`python -m bench host`: host overhead of single calls with tiny tensors, ours beside torch's and FlashAttention 4's.

Calls are made as users make them: eager and compiled, forward and backward, without a CUDA graph. On a GPU the calls of
a row are timed in turns, in bursts that the GPU keeps up with, and each row also times torch.mm, which tells how fast
the host is. Results go to bench/results/<card>/host.json.

Without a GPU the ops plan CPU calls as on a GPU, kernel launches are replaced by empty functions, and Python calls are
counted instead of time. The counts do not depend on the machine, but on the versions of torch and Python.
tests/bench/test_host.py compares them with recorded limits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cute_kernels.arch import ARCHS
from cute_kernels.runtime.call_plan import PlanCache

from . import record
from .cases_host import DTYPE, FA4, OURS, TORCH, HostCase, cases
from .rows import reason
from .table import grid, make_console
from .timing import median

BURST = 60  # calls between two synchronizations
ROUNDS = 41
WARM_UP = 10  # calls before timing: compilation, plans, allocator
COUNTED = 10  # calls of which the Python calls are counted
MM = "torch.mm"
PACKAGES = ("cute_kernels", "sparse_collective", "attention")


def timed(case: HostCase, rounds: int = ROUNDS) -> dict:
    """Time the calls of a row on the GPU's host.

    Returns:
        us: median microseconds of a call of each candidate, and of torch.mm.
        rounds: how many rounds, in each of which every candidate makes BURST calls.
        ratio, missed, missed_rounds: our median over torch's; True if it is above the limit of the row; number of
            rounds whose own ratio is above it. Absent if the row has no time of torch's.
        errors: the reason for each peer without a time. Absent if there is none.
    """
    a, errors = torch.randn(128, 128, device=case.inputs[0].device, dtype=DTYPE), {}
    calls: dict[str, Callable[[], object]] = {}
    with case.grad_mode():
        for name in case.candidates:  # ours first: importing FlashAttention 4 changes CuTe DSL
            try:
                calls[name] = warmed_up(case.call(name))
            except Exception as error:
                if name == OURS:
                    raise
                errors[name] = reason(error)
        calls[MM] = warmed_up(lambda: torch.mm(a, a))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(BURST):
                    call()
                times[name].append((time.perf_counter() - start) / BURST * 1e6)
        torch.cuda.synchronize()
    return compared(times, case.limit) | ({"errors": errors} if errors else {})


def compared(times: dict[str, list[float]], limit: float) -> dict:
    """What `timed` returns, except `errors`: medians, and how often ours is above the limit.

    Args:
        times: microseconds of each candidate, one per round.
        limit: the largest ratio of ours to torch's that is asked for.
    """
    us = {name: round(median(each), 2) for name, each in times.items()}
    row = {"us": us, "rounds": len(times[OURS])}
    if TORCH in times:
        ratio = median(times[OURS]) / median(times[TORCH])
        above = sum(ours > limit * theirs for ours, theirs in zip(times[OURS], times[TORCH], strict=True))
        row |= {"ratio": round(ratio, 3), "missed": ratio > limit, "missed_rounds": above}
    return row


def warmed_up(call: Callable[[], object]) -> Callable[[], object]:
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    return call


def counted(case: HostCase) -> dict:
    """Python calls, of Python and C functions, in one call of ours and of torch's: {"calls": {candidate: number}}.

    Call it within `launches_replaced`.
    """
    counts = {}
    with case.grad_mode():
        for name in case.candidates:
            call = case.call(name)
            for _ in range(4):
                call()
            counts[name] = python_calls(call) / COUNTED
    return {"calls": counts}


def python_calls(call: Callable[[], object]) -> int:
    """Number of Python calls that COUNTED calls of a function make, its own included."""
    count = -1  # the call of sys.setprofile that ends the count

    def profile(frame, event: str, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection in between would run finalizers
    sys.setprofile(profile)
    try:
        for _ in range(COUNTED):
            call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


@contextlib.contextmanager
def launches_replaced(arch: str = "sm_90", sms: int = 132) -> Iterator[None]:
    """A context in which CPU calls are planned as on a GPU and kernel launches do nothing.

    Outputs are uninitialized memory. Plan caches are empty at the start and are restored at the end.
    """
    # A module that is first imported in the context would keep the replacements.
    import attention.backward.dispatch  # noqa: F401
    import sparse_collective.torch_op  # noqa: F401

    replacements = {
        "function_for": lambda facts: lambda *arguments: None,
        "device_arch": lambda index: (ARCHS[arch], sms),
        "plans_kernel": lambda device: True,
        "has_kernel": lambda tensor: True,
    }
    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PACKAGES:
                for attribute, value in replacements.items():
                    if hasattr(module, attribute):
                        patches.enter_context(mock.patch.object(module, attribute, value))
                if isinstance(getattr(module, "_PLANS", None), PlanCache):
                    patches.enter_context(mock.patch.object(module, "_PLANS", PlanCache(module._PLANS.operands)))
        yield


def measure(only: str = "", rounds: int = ROUNDS, after_row: Callable[[list[dict]], None] = lambda rows: None) -> list:
    """Measure all rows whose title contains `only`: `timed` on a GPU, `counted` without one.

    A row that raises has an "error", the reason, in place of its results. Rows with FlashAttention 4 come last, since
    its import changes CuTe DSL; all our kernels are compiled before.

    Args:
        after_row: called with the rows so far after each row.
    """
    on_gpu, rows = torch.cuda.is_available(), []
    with contextlib.nullcontext() if on_gpu else launches_replaced():
        selected = [case for case in cases("cuda" if on_gpu else "cpu") if only in case.title]
        selected.sort(key=lambda case: case.fa4 is not None)
        for case in selected:
            if case.fa4 is not None:
                with contextlib.suppress(Exception):  # its row records the reason
                    case.call(OURS)()
        for case in selected:
            torch.compiler.reset()
            row = {"name": case.title, "call": case.name, "form": case.form, "asked": case.limit}
            try:
                rows.append(row | (timed(case, rounds) if on_gpu else counted(case)))
            except Exception as error:
                rows.append(row | {"error": reason(error)})
            after_row(rows)
    return rows


def times_table(rows: Sequence[dict]) -> Table:
    """The table of rows that were timed; FlashAttention 4 has a column if a row has a time of it."""
    candidates = [OURS, TORCH, *([FA4] if any(FA4 in row.get("us", ()) for row in rows) else [])]
    table = grid(
        ["call", "form"], [*(f"{name}, µs" for name in candidates), "ratio", "asked", "rounds above", f"{MM}, µs"]
    )
    for row in rows:
        us, ratio = row.get("us", {}), row.get("ratio")
        cells = [f"{us[name]:.1f}" if name in us else "–" for name in (*candidates, MM)]
        asked = Text(f"{row['asked']:g}" + " MISSED" * is_missed(row), style="bold red" if is_missed(row) else "")
        above = "–" if ratio is None else f"{row['missed_rounds']}/{row['rounds']}"
        shown = "–" if ratio is None else f"{ratio:.2f}"
        table.add_row(row["call"], row["form"], *cells[:-1], shown, asked, above, cells[-1])
    return table


def counts_table(rows: Sequence[dict]) -> Table:
    """The table of rows that were counted."""
    table = grid(["call", "form"], ["ours, Python calls", "torch, Python calls", "ours - torch"])
    for row in rows:
        counts = row.get("calls", {})
        numbers = [counts.get(OURS), counts.get(TORCH), None]
        if None not in numbers[:2]:
            numbers[2] = numbers[0] - numbers[1]
        table.add_row(row["call"], row["form"], *("–" if number is None else f"{number:g}" for number in numbers))
    return table


def is_missed(row: dict) -> bool:
    """True if the row is above its limit, or has no ratio to compare with it."""
    return row.get("missed", True)


def write(rows: Sequence[dict], folder: Path) -> Path:
    """Write <folder>/<card>/host.json."""
    where, missed = record.environment(), [row["name"] for row in rows if is_missed(row)]
    data = {"suite": "host", "environment": where, "missed": missed, "rows": list(rows)}
    return record.save(folder, where["card"], "host", data)


def run(args: argparse.Namespace) -> int:
    """The command; 1 if one of our own calls failed, 2 if there is no such row."""
    on_gpu, errors = torch.cuda.is_available(), Console(stderr=True)
    if not on_gpu:
        print("no CUDA GPU: Python calls are counted, with kernel launches replaced; nothing is timed or written")

    def after_row(rows: list[dict]) -> None:
        if on_gpu and not args.only:  # what was measured stays, whatever ends the run
            write(rows, args.out)
        if errors.is_terminal:
            errors.print(f"{len(rows)}: {rows[-1]['name']}", highlight=False)

    rows = measure(args.only, args.rounds, after_row)
    if not rows:
        print(f"no row contains {args.only!r}; python -m bench host shows all rows")
        return 2
    make_console().print(times_table(rows) if on_gpu else counts_table(rows))
    failed = [row for row in rows if "error" in row]
    missed = [row["name"] for row in rows if on_gpu and is_missed(row)]
    if missed:
        print(f"MISSED ({len(missed)} of {len(rows)}): {'; '.join(missed)}")
    for row in rows:
        for peer, text in row.get("errors", {}).items():
            print(f"no time of {peer}, {row['name']}: {text}")
    for row in failed:
        print(f"FAILED {row['name']}: {row['error']}")
    if on_gpu and not args.only:
        print("written:", write(rows, args.out))
    return int(bool(failed))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def add_command(subparsers) -> None:
    """Add `host` to the subcommands of an argparse parser."""
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sub = subparsers.add_parser("host", help="host overhead of single calls, ours and torch's", **options)
    sub.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this; writes no file")
    text = f"timed rounds per row on a GPU (default {ROUNDS}); Python calls are counted once"
    sub.add_argument("--rounds", type=positive, default=ROUNDS, metavar="N", help=text)
    sub.add_argument("--out", type=Path, default=record.RESULTS, metavar="FOLDER", help="folder of the results")
    sub.set_defaults(run=run)
