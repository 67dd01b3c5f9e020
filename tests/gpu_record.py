"""Run the GPU tests and record what happened: `python -m tests.gpu_record [--sanitize] [--out FOLDER] [pytest args]`.

Writes FOLDER/<card>/tests.json: the machine, the versions, the state of the sources, counts, failures, and with
--sanitize the verdicts of compute-sanitizer's memcheck, racecheck and synccheck on tests/sanitize_cases.py. The exit
status is 0 only if all of it passed. Arguments that are not its own go to pytest, such as `-k bsr` or `-x`.

With --fuzz the fuzz (tests/fuzz) runs instead, to which all other arguments go, such as `--cases 100000 --minutes 20
--seed 7`; it writes FOLDER/<card>/fuzz.json.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.record import RESULTS, card_name, environment, save

from . import sanitize_cases
from .outcomes import ROOT, first_line, read_outcomes

TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZER_JOBS = 16  # for each tool; each holds a CUDA context: some 500 MB of the device
# The DSL probes for driver functions that may be absent; as API errors those would hide the real ones.
TOOL_OPTIONS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": []}
MOST_FAILURES = 50


def tests(arguments: list[str], limit: float, *, show: bool = True) -> dict:
    """pytest -m gpu in a process of its own, and what its report says; of what is not shown the last lines.

    pytest writes its report when it ends. Where the limit ends it, the outcomes until then count, and the tests that
    were running are named, with their seconds.
    """
    with tempfile.TemporaryDirectory(prefix="cute-kernels-tests-") as folder:
        report, outcomes = Path(folder, "report.xml"), Path(folder, "outcomes")
        # After two minutes in one test the stack is printed: a hang then has a name.
        options = ["-q", "-m", "gpu", "-o", "faulthandler_timeout=120", f"--junitxml={report}"]
        options += ["-p", "tests.outcomes", f"--outcomes={outcomes}"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        start = time.perf_counter()
        status, output = run(command, limit, show=show)
        seconds = round(time.perf_counter() - start, 1)
        found = read_report(report) if report.exists() else read_outcomes(outcomes)
    found["failures"] = found["failures"][:MOST_FAILURES]
    more = {} if show else {"output": output.splitlines()[-40:]}
    return {"arguments": arguments, "status": status, "seconds": seconds, **found, **more}


def read_report(path: Path) -> dict:
    """Counts and failures of a JUnit report; an error in a fixture counts as a failure, an xfail as skipped."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(path).iter("testcase"):
        bad = [node for node in case if node.tag in ("failure", "error")]
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if bad:
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            failures.append({"name": name, "message": first_line(bad[0].get("message") or bad[0].text or "")})
    return {**counts, "failures": failures}


def run(command: list[str], limit: float, *, show: bool = False) -> tuple[int | str, str]:
    """(exit status or "timed out", output) of a process in the repository's root."""
    options = {} if show else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options |= {"env": os.environ | {"PYTHONPATH": path}, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output or ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started: they hold the pipe
        output, _ = process.communicate()
        return "timed out", output or ""
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def sanitizer() -> str | None:
    """compute-sanitizer, from PATH or the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(home, "bin")) for home in homes if home]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def sanitize(limit: float, jobs: int = SANITIZER_JOBS) -> dict:
    """A verdict a tool, within `limit` seconds for everything. `jobs` processes share a tool's cases.

    The cases run bare first, so that kernels come from the cache and wrong results show; then all tools at once, as far
    as there are CPUs.
    """
    tool, end = sanitizer(), time.monotonic() + limit
    shares = [sanitize_cases.NAMES[i::jobs] for i in range(jobs)]
    common = ["--error-exitcode", "86", "--launch-timeout", "600"]  # seconds until Python is loaded, on a busy CPU
    runs = {name: [tool, "--tool", name, *TOOL_OPTIONS[name], *common] for name in TOOLS}

    def one(prefix: list[str], share: tuple[str, ...], wanted: str) -> dict:
        command = [*prefix, sys.executable, "-m", "tests.sanitize_cases", *share]
        return verdict(*run(command, max(1.0, end - time.monotonic())), wanted)

    with ThreadPoolExecutor(max(jobs, min(len(TOOLS) * jobs, os.cpu_count() or 1))) as pool:
        verdicts = {"bare": together(list(pool.map(lambda share: one([], share, "right"), shares)))}
        if tool is None:
            missing = {"ok": False, "status": "compute-sanitizer was not found; put it on PATH or set CUDA_HOME"}
            return verdicts | dict.fromkeys(TOOLS, missing)
        clean = r"(ERROR|RACECHECK) SUMMARY: 0 "
        found = {name: [pool.submit(one, runs[name], share, clean) for share in shares] for name in TOOLS}
        return verdicts | {name: together([future.result() for future in found[name]]) for name in TOOLS}


def together(parts: list[dict]) -> dict:
    """The verdict of several processes: the first that is not ok, with the cases of all."""
    first = next((part for part in parts if not part["ok"]), parts[0])
    return first | {"cases": sum(part["cases"] for part in parts)}


def verdict(status, output: str, wanted: str) -> dict:
    """ok: status 0, and the output says what it must; with the summary, and of a failure the last lines."""
    summary = re.findall(r"=+ *((?:ERROR|RACECHECK) SUMMARY.*)", output)
    ok = status == 0 and re.search(wanted, output) is not None
    found = {"ok": ok, "status": status, "cases": len(re.findall(r": right$", output, re.MULTILINE))}
    if summary:
        found["summary"] = summary[-1].strip()
    if not ok:
        found["output"] = output.splitlines()[-40:]
    return found


def machine() -> dict:
    """The machine, and the tested version: as in the benchmark's results, and the time."""
    properties, now = torch.cuda.get_device_properties(0), datetime.datetime.now(datetime.UTC)
    return environment() | {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "python": platform.python_version(),
        "date": now.isoformat(timespec="seconds"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_record", description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", action="store_true", help="also run compute-sanitizer on a few tiny cases")
    parser.add_argument("--fuzz", action="store_true", help="run the fuzz in place of the tests")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: bench/results)")
    text = "seconds that the tests may take, and the sanitizer's tools"
    parser.add_argument("--limit", type=float, default=1800, help=text)
    options, rest = parser.parse_known_args(arguments)
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
        print(f"gpu_record: no CUDA GPU ({why}). `python -m pytest` runs all tests that need none.", file=sys.stderr)
        return 2
    if options.fuzz:
        return fuzz(rest, options.out, options.limit)
    record = {"machine": machine(), "tests": tests(rest, options.limit)}
    passed = record["tests"]["status"] == 0
    if options.sanitize:
        record["sanitizer"] = sanitize(options.limit)
        passed = passed and all(v["ok"] for v in record["sanitizer"].values())
    record["ok"] = passed
    path = save(options.out, record["machine"]["card"], "tests", record)
    print(summary(record), f"gpu_record: written to {path}", sep="\n")
    return 0 if passed else 1


def fuzz(arguments: list[str], out: Path, limit: float) -> int:
    """Run the fuzz in a process of its own, and add the machine to its report; returns its exit status."""
    about = machine()
    path = out / card_name(about["card"]) / "fuzz.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    status, _ = run([sys.executable, "-m", "tests.fuzz", *arguments, "--out", str(path)], limit, show=True)
    if not path.exists():
        print(f"gpu_record: the fuzz ended without a report ({status})", file=sys.stderr)
        return 1
    report = json.loads(path.read_text())
    path.write_text(json.dumps({"machine": about, "arguments": arguments, "status": status, **report}, indent=1) + "\n")
    print(f"gpu_record: written to {path}")
    return 0 if status == 0 else 1


def summary(record: dict) -> str:
    t = record["tests"]
    end = ", timed out" if t["status"] == "timed out" else ""
    counts = f"{t['passed']} passed, {t['failed']} failed, {t['skipped']} skipped"
    lines = [f"gpu_record: {counts} in {t['seconds']} s{end}"]
    lines += [f"  {failure['name']}: {failure['message']}" for failure in t["failures"]]
    lines += [f"  {name}: unfinished after {seconds} s" for name, seconds in t.get("unfinished", {}).items()]
    for name, v in record.get("sanitizer", {}).items():
        lines.append(f"  {name}: {'clean' if v['ok'] else v['status']} {v.get('summary', '')}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
