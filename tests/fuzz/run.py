"""The fuzz: random calls of every op on both paths, in guarded memory, against the truth, and through torch's
mechanisms.


    python -m tests.fuzz [--cases 12000] [--minutes 3] [--seed 0] [--jobs N] [--only TEXT] [--out FILE]
    python -m tests.fuzz --replay "Case(...)"        one case again, as a failure prints it
    python -m tests.fuzz --only mechanism            autograd, torch.func, torch.compile, CUDA graphs, subclasses alone

A worker process draws, with hypothesis and a seed that follows from --seed, some dozens of cases of one family after
the other: cases of a family share kernels, which compile in the worker, so that all CPUs compile at once. Failures do
not end it. The report has the seed, how many cases ran of every op on each path, and every failure with the case to
replay. The exit status is 0 if none failed; where the time is up first, the report says how many of the cases ran. With
no GPU the CPU's references run, on small cases.
"""

import argparse
import collections
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from . import attention, mechanism_cases
from . import gemm as fuzz_products
from .gemm import Placement

MODULES = (fuzz_products, attention, mechanism_cases)
PATIENCE = 180.0  # seconds that one case may take, compilation included
MOST_FAILURES = 400  # that a report holds in full; all are counted
LARGEST = {"cuda": 300, "cpu": 80}
# For tests that draw their cases themselves
RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck)}
ON_GPU = settings(max_examples=25, derandomize=True, **RELAXED)


def module_of(family):
    return next(m for m in MODULES if isinstance(family, m.Family))


def draw_and_run(family, device: str, count: int, seed: int, each) -> None:
    """`each(case, run)` for `count` cases of a family.

    They are the same ones for the same seed, version of hypothesis and loaded modules: hypothesis also draws constants
    from the source of the modules that are loaded. So other selected tests change the cases of a test.
    """
    module = module_of(family)

    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @seeded(seed)
    @given(module.cases(family, LARGEST[device]))
    def go(case):
        each(case, module.run)

    go()


def outcome(case, run, device: str) -> tuple[str, str] | None:
    """None if the case is right, else (kind, text)."""
    try:
        run(case, device)
    except Exception as error:
        kind = getattr(error, "kind", type(error).__name__)
        where = "" if hasattr(error, "kind") else traceback.format_exc(limit=-3)[-800:]
        return kind, f"{str(error)[:600]}\n{where}".rstrip()
    return None


# -- worker ----------------------------------------------------------------------------------------------------


def work(connection, device: str) -> None:
    """Take (family, count, seed) until None comes; tell each case before it runs, then what became of it."""
    torch.set_num_threads(1)
    while (task := connection.recv()) is not None:

        def each(case, run):
            connection.send(("case", repr(case)))
            found = outcome(case, run, device)
            connection.send(("done", found))
            if found and ("CUDA error" in found[1] or found[0] == "AcceleratorError"):
                os._exit(1)  # nothing on the device works in this process any more

        try:
            draw_and_run(task[0], device, task[1], task[2], each)
            connection.send(("end", None))
        except Exception:
            connection.send(("end", traceback.format_exc()))


class Fuzz:
    """Tasks, dealt to worker processes by one thread each."""

    def __init__(self, tasks: list, device: str, jobs: int, end: float):
        self.tasks, self.device, self.end = collections.deque(tasks), device, end
        self.counts, self.kinds, self.failures = collections.Counter(), collections.Counter(), []
        self.lock = threading.Lock()
        threads = [threading.Thread(target=self.deal) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def next_task(self):
        with self.lock:
            return self.tasks.popleft() if self.tasks and time.monotonic() < self.end else None

    def deal(self) -> None:
        context, worker = multiprocessing.get_context("spawn"), None
        while task := self.next_task():
            if worker is None:
                connection, theirs = context.Pipe()
                worker = context.Process(target=work, args=(theirs, self.device), daemon=True)
                worker.start()
                theirs.close()
            try:
                connection.send(task)
                self.hear(task, connection)
            except (EOFError, OSError, TimeoutError):
                worker.kill()
                worker.join()
                worker = None
        if worker is not None:
            connection.send(None)
            worker.join(10)
            worker.kill()

    def hear(self, task, connection) -> None:
        """Read a worker's messages about one task, to its end; raises where the worker died or hangs."""
        family, case = task[0], None
        while True:
            try:
                if not connection.poll(PATIENCE):
                    raise TimeoutError(f"no answer in {PATIENCE:.0f} s")
                what, found = connection.recv()
            except (EOFError, OSError, TimeoutError) as error:
                if case is not None:
                    self.count(family, case, (type(error).__name__, f"the process hangs or died: {error}"))
                raise
            if what == "case":
                case = found
            elif what == "done":
                self.count(family, case, found)
                case = None
            else:
                if found:
                    self.count(family, str(task), ("in the fuzz itself", found))
                return

    def count(self, family, case: str, found) -> None:
        with self.lock:
            self.counts[family.name] += 1
            if found:
                self.kinds[f"{family.name}: {found[0]}"] += 1
                if len(self.failures) < MOST_FAILURES:
                    self.failures.append({"kind": found[0], "text": found[1], "case": case})


# -- command ---------------------------------------------------------------------------------------------------


def tasks_of(cases: int, seed: int, only: str) -> list:
    """(family, cases, seed) of all families, the same number of cases each; the ops and paths in turns.

    So if the time is up before all have run, it is not one op alone that was left out.
    """
    found, turn = [], collections.Counter()
    for module in MODULES:
        for family in module.families():
            if only in family.name:
                found.append((turn[family.name], len(found), family))
                turn[family.name] += 1
    if not found:
        raise SystemExit(f"fuzz: no op and path is called {only!r}")
    each = -(-cases // len(found))
    return [(family, each, seed * 100_003 + i) for _, i, family in sorted(found, key=lambda entry: entry[:2])]


def replay(text: str, device: str) -> int:
    """Run one case, given as its repr."""
    known = {"Placement": Placement, "Signature": fuzz_products.Family, "nan": float("nan")}
    known |= {"Mechanism": mechanism_cases.Family, "Call": mechanism_cases.Case}
    module = attention if "heads=" in text else fuzz_products
    case = eval(text, {"__builtins__": {}}, known | {"Case": module.Case, "Family": module.Family})
    module = module_of(case.signature if hasattr(case, "signature") else case.family)
    found = outcome(case, module.run, device)
    print("right" if found is None else f"{found[0]}: {found[1]}")
    return int(found is not None)


def report_of(fuzz: Fuzz, wanted: int, seed: int, device: str, seconds: float) -> dict:
    total = sum(fuzz.counts.values())
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seed": seed,
        "wanted": wanted,
        "cases": total,
        "failed": sum(fuzz.kinds.values()),
        "seconds": round(seconds, 1),
        "counts": dict(sorted(fuzz.counts.items())),
        "kinds": dict(sorted(fuzz.kinds.items())),
        "failures": fuzz.failures,
    }


def text_of(report: dict) -> str:
    ran = f"{report['cases']} of {report['wanted']} cases of seed {report['seed']} in {report['seconds']} s"
    lines = [f"fuzz: {ran}, {report['failed']} failed"]
    lines += [f"  {name}: {count}" for name, count in report["counts"].items()]
    lines += [f"  failed: {name}: {count}" for name, count in report["kinds"].items()]
    shown = {}
    for failure in report["failures"]:  # one of each kind
        shown.setdefault(failure["kind"], failure)
    for failure in shown.values():
        lines += [f"{failure['kind']}: {failure['text']}", f'  python -m tests.fuzz --replay "{failure["case"]}"']
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=12_000, help="how many, of all ops together (default: 12000)")
    parser.add_argument("--minutes", type=float, default=10.0, help="when to stop, whatever is left (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="what all is drawn from (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each CPU)")
    parser.add_argument("--only", default="", help="ops and paths whose name holds this, such as 'gemm sm_80'")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the report here, too")
    parser.add_argument("--replay", help="one case, as a failure prints it")
    options = parser.parse_args(arguments)
    if options.replay:
        return replay(options.replay, options.device)
    with tempfile.TemporaryDirectory(prefix="cute-kernels-fuzz-") as folder:
        os.environ.setdefault("CUTE_KERNELS_CACHE_DIR", folder)
        tasks, start = tasks_of(options.cases, options.seed, options.only), time.monotonic()
        fuzz = Fuzz(tasks, options.device, min(options.jobs, len(tasks)), start + 60 * options.minutes)
        wanted = sum(count for _, count, _ in tasks)
        report = report_of(fuzz, wanted, options.seed, options.device, time.monotonic() - start)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(text_of(report))
    return int(report["failed"] > 0 or report["cases"] == 0)


if __name__ == "__main__":
    sys.exit(main())
