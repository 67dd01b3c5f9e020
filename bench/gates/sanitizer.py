"""The sanitizer gate: compute-sanitizer's three tools on the tiny cases of tests/sanitize_cases.py."""

from collections.abc import Callable

from tests import gpu_record

from .gate import Gate, Skip, judged, need_gpu

NAME = "sanitizer"
LIMIT = 900  # seconds of all tools together


def sanitize() -> dict:
    """tests.gpu_record's verdicts, a tool each; skips where there is no tool."""
    need_gpu()
    if gpu_record.sanitizer() is None:
        raise Skip("compute-sanitizer was found neither on PATH nor under CUDA_HOME")
    return gpu_record.sanitize(LIMIT)


def check(sanitize: Callable[[], dict] = sanitize, *, quick: bool = False) -> Gate:
    """Every tool must be clean; `sanitize` gives the verdicts."""
    verdicts, problems = sanitize(), []
    bad = {name: verdict for name, verdict in verdicts.items() if not verdict["ok"]}
    for name, verdict in bad.items():
        problems.append(f"{name}: {verdict.get('summary', '')} status {verdict['status']}")
        problems += [f"    {line}" for line in verdict.get("output", [])]
    clean = ", ".join(f"{name} {verdict['cases']} cases" for name, verdict in verdicts.items())
    return judged(NAME, problems, f"clean: {clean}", f"not clean: {', '.join(bad)}")
