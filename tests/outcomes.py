"""Outcome of each test, written as soon as it is known: of a run that is killed this is left.

A plugin of pytest, `-p tests.outcomes --outcomes FILE`: FILE gets a line of JSON for each test that starts, and
for each outcome. Where processes share the tests (pytest-xdist), the one that they report to writes.
"""

import json
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, required=True, help="file to which outcomes of tests are added")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """Adds a line where a test starts, where its function ends, and where a fixture skips the test or fails."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logstart(self, nodeid):
        self.add({"name": nodeid, "outcome": "unfinished", "start": round(time.monotonic(), 1)})

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        found = {"name": report.nodeid, "outcome": report.outcome}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # a worker that dies has none
            found["message"] = first_line(str(report.longrepr) if crash is None else crash.message)
        self.add(found)

    def add(self, found: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(found) + "\n")


def first_line(message: str) -> str:
    """For a failure; the same on any machine."""
    text = message.strip().replace(f"{ROOT}/", "")
    return text.splitlines()[0][:300] if text else ""


def read_outcomes(path: Path) -> dict:
    """Counts and failures, as gpu_record.read_report, and for how many seconds each unfinished test has run until now.

    A test of several outcomes has failed if one of them is that.
    """
    tests = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        found = json.loads(line)
        if tests.get(found["name"], {}).get("outcome") != "failed":
            tests[found["name"]] = found
    outcomes = [found["outcome"] for found in tests.values()]
    counts = {kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped")}
    failures = [{"name": t["name"], "message": t["message"]} for t in tests.values() if t["outcome"] == "failed"]
    now = time.monotonic()
    unfinished = {t["name"]: round(now - t["start"], 1) for t in tests.values() if t["outcome"] == "unfinished"}
    return {**counts, "failures": failures, "unfinished": unfinished}
