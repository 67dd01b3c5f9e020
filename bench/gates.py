"""`python -m bench gates`: decide whether this state of the code may be shipped, on one page with one exit status.

    resources     registers, spills, shared memory and tensor-core instructions of every kernel; needs no GPU
    correctness   GPU tests that compare the ops' results with FP64
    determinism   `pytest -m determinism`: bitwise identical results in a thousand runs
    stability     `pytest -m stability`: concurrent streams and threads, CUDA graphs, memory
    speed         ratios to peers, compared with the floors recorded on this card
    counters      tensor-core utilization, counted by Nsight Compute (ncu)
    sanitizer     memcheck, racecheck and synccheck of compute-sanitizer

The exit status is 1 if a gate failed, 2 if the arguments are wrong, otherwise 0. A gate that cannot run on this machine
is skipped with its reason. On a GPU the verdicts are written to <out>/<card>/gates.json. Gates that --only leaves out
keep their verdict from an earlier call with the same sources and versions.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.text import Text

from tests import gpu_record

from . import floors, record
from .floors import Skip
from .rows import reason
from .table import grid, make_console

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
STYLES = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}
MOST_DETAILS = 40  # lines per gate on the page and in the file
TEST_LIMIT = 900  # seconds for the tests of a gate, including compilation, and for compute-sanitizer
MOST_JOBS = 32  # processes of pytest; each holds a CUDA context of some 500 MB
CORRECTNESS = (
    "cute_kernels/test_dense",
    "attention/test_gpu",
    "test_conformance",
    "sparse_collective/test_bsr_gemm",
    "attention/test_packed",
    "attention/test_decode",
)


@dataclass(frozen=True)
class Gate:
    """The verdict of one gate."""

    name: str
    verdict: str  # PASSED, FAILED or SKIPPED
    summary: str  # one line; the reason if the gate was skipped
    details: list[str] = field(default_factory=list)  # shown if the gate failed
    seconds: float = 0.0


def judged(name: str, problems: list[str], passed: str, failed: str) -> Gate:
    """Return a failed gate if there are problems, otherwise a passed one."""
    return Gate(name, FAILED, failed, problems[:MOST_DETAILS]) if problems else Gate(name, PASSED, passed)


def run_tests(name: str, marker: str, files: Iterable[str], jobs: int) -> Gate:
    """Run the tests of tests/<file>.py that have a marker, in a process of their own."""
    arguments = [*(f"tests/{file}.py" for file in files), "-m", marker, "-W", "ignore"]
    arguments += ["-n", str(jobs)] if importlib.util.find_spec("xdist") else []
    report = gpu_record.tests(arguments, TEST_LIMIT, show=False)
    problems = [f"{failure['name']}: {failure['message']}" for failure in report["failures"]]
    problems += [f"{test}: unfinished after {s} s" for test, s in report.get("unfinished", {}).items()]
    if not problems and (report["status"] != 0 or not report["passed"]):
        problems = report["output"]
    counts = f"{report['passed']} tests passed"
    return judged(name, problems, counts, f"{report['failed']} tests failed; {counts}; status {report['status']}")


def sanitize() -> Gate:
    """Run compute-sanitizer's tools on tests/sanitize_cases.py."""
    if gpu_record.sanitizer() is None:
        raise Skip("compute-sanitizer was found neither on PATH nor under CUDA_HOME")
    verdicts = gpu_record.sanitize(TEST_LIMIT)
    failed = {name: verdict for name, verdict in verdicts.items() if not verdict["ok"]}
    problems = [f"{name}: {line}" for name, verdict in failed.items() for line in verdict.get("output", ["not clean"])]
    clean = ", ".join(f"{name} {verdict['cases']} cases" for name, verdict in verdicts.items())
    return judged("sanitizer", problems, f"clean: {clean}", f"not clean: {', '.join(failed)}")


def resources() -> Gate:
    """Compile and inspect every kernel with `python -m cute_kernels inspect`."""
    command = [sys.executable, "-m", "cute_kernels", "inspect", "--json"]
    kernels = json.loads(subprocess.run(command, cwd=gpu_record.ROOT, stdout=subprocess.PIPE).stdout)
    failed = [f"{k['arch']} {k['name']}: {'; '.join(k['problems'])}" for k in kernels if k["problems"]]
    passed = f"{len(kernels)} kernels: none spills, all use the tensor cores"
    return judged("resources", failed, passed, f"{len(failed)} of {len(kernels)} kernels have problems")


def speed() -> Gate:
    """Compare rows with the floors of this card."""
    path = record.file_of(record.RESULTS, torch.cuda.get_device_name(), "floors")
    if not path.exists():
        raise Skip(f"no floors of this card: {floors.SET_FLOORS} measures and writes {path}")
    rows, slow = floors.compare(floors.gate_cases(), json.loads(path.read_text()))
    gate = judged("speed", slow, f"{len(rows)} rows reach their floors", f"{len(slow)} rows are slower than allowed")
    return replace(gate, details=[*slow, *rows])


def counters() -> Gate:
    """Compare tensor-core utilization with the least expected."""
    lines, low = floors.utilization()
    return judged("counters", low, "; ".join(lines), f"tensor cores are idle too much: {'; '.join(lines)}")


GATES: dict[str, Callable[[], Gate]] = {
    "resources": resources,
    "correctness": partial(run_tests, "correctness", "gpu", CORRECTNESS, min(MOST_JOBS, os.cpu_count() or 1)),
    "determinism": partial(run_tests, "determinism", "determinism", ["test_determinism"], 0),
    "stability": partial(run_tests, "stability", "stability", ["test_stability"], 0),
    "speed": speed,
    "counters": counters,
    "sanitizer": sanitize,
}


def run_gates(gates: Mapping[str, Callable[[], Gate]], after: Callable[[list[Gate]], object] = len) -> list[Gate]:
    """Run gates in order; an exception other than Skip is a failure.

    Args:
        after: called with the verdicts so far after each gate, since a later one may be cut by a time limit.
    """
    verdicts: list[Gate] = []
    for name, check in gates.items():
        start = time.perf_counter()
        try:
            if name != "resources" and not torch.cuda.is_available():
                raise Skip("no CUDA GPU")
            gate = check()
        except Skip as skip:
            gate = Gate(name, SKIPPED, str(skip))
        except Exception as error:
            gate = Gate(name, FAILED, f"the gate raised {reason(error)}", str(error).splitlines()[:MOST_DETAILS])
        verdicts.append(gate := replace(gate, seconds=round(time.perf_counter() - start, 2)))
        print(f"gate {name} {gate.verdict} in {gate.seconds} s: {gate.summary}", file=sys.stderr, flush=True)
        after(verdicts)
    return verdicts


def exit_status(gates: Iterable[Gate]) -> int:
    return int(any(gate.verdict == FAILED for gate in gates))


def conclusion(gates: Iterable[Gate]) -> str:
    """The last line of the page."""
    verdicts = {gate.name: gate.verdict for gate in gates}
    if failed := [name for name, verdict in verdicts.items() if verdict == FAILED]:
        return f"Not to be shipped: {', '.join(failed)} failed."
    missing = [f"{name} {verdicts.get(name, 'not run')}" for name in GATES if verdicts.get(name) != PASSED]
    return f"Nothing failed, but not everything ran: {', '.join(missing)}." if missing else "Every gate passed."


def show(gates: list[Gate]) -> None:
    """Print the page."""
    console, table = make_console(120), grid(["gate", "verdict"], ["s"])
    table.add_column("summary", overflow="fold")
    for gate in gates:
        table.add_row(gate.name, Text(gate.verdict, STYLES[gate.verdict]), f"{gate.seconds:.1f}", Text(gate.summary))
    console.print(table)
    for gate in gates:
        if gate.verdict == FAILED:
            console.print(Text("\n    ".join([gate.name, *gate.details])))
    console.print(Text(conclusion(gates), STYLES[FAILED] if exit_status(gates) else STYLES[PASSED]))


def write(gates: list[Gate], folder: Path) -> Path:
    """Write <folder>/<card>/gates.json: the environment and all verdicts of the same sources and versions."""
    environment, before = record.environment(), []
    path = record.file_of(folder, environment["card"], "gates")
    if path.exists():
        data = json.loads(path.read_text())
        if all(data["environment"].get(name) == environment.get(name) for name in record.what_runs()):
            before = [Gate(**fields) for fields in data["gates"]]
    verdicts = {gate.name: gate for gate in (*before, *gates)}
    gates = [verdicts[name] for name in GATES if name in verdicts]
    data = {"environment": environment, "ok": exit_status(gates) == 0, "conclusion": conclusion(gates)}
    return record.save(folder, environment["card"], "gates", data | {"gates": [asdict(gate) for gate in gates]})


def add_command(subparsers) -> None:
    """Add `gates` to the subcommands of an argparse parser; its `args.run(args)` returns the exit status."""
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sub = subparsers.add_parser("gates", help="whether this state of the code may be shipped", **options)
    sub.add_argument("--only", default=",".join(GATES), metavar="NAME,...", help="these gates alone")
    text = "measure each row of the speed gate three times and store the medians as this card's floors"
    sub.add_argument("--set-floors", action="store_true", help=text)
    sub.add_argument("--out", type=Path, default=record.RESULTS, metavar="FOLDER", help="default: bench/results")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    gpu, wanted = torch.cuda.is_available(), args.only.split(",")
    if unknown := set(wanted) - GATES.keys():
        print(f"gates: unknown gate {', '.join(unknown)}; gates are {', '.join(GATES)}", file=sys.stderr)
        return 2
    if args.set_floors:
        if not gpu:
            print("gates: --set-floors needs a CUDA GPU", file=sys.stderr)
            return 2
        print("written:", floors.set_floors(args.out))
        return 0
    gates = {name: GATES[name] for name in GATES if name in wanted}
    verdicts = run_gates(gates, lambda found: gpu and write(found, args.out))
    show(verdicts)
    return exit_status(verdicts)
