"""The correctness gate: the tests of the ops' results, in a process of their own.

They compare with fp64 truth, on outputs full of NaN: every layout, type, block shape, pattern and epilogue on every
path, and every form of attention. Without a GPU the ops' CPU references are tested, no kernel.
"""

import importlib.util
import os
from collections.abc import Callable

import torch

from tests import gpu_record

from .gate import Gate, Skip, judged

NAME = "correctness"
LIMIT = 900  # seconds, of which compiling takes the most
CPU = ("tests/test_choice.py",)
QUICK = ("tests/test_dense.py", "tests/test_attention_gpu.py")
FULL = (*QUICK, "tests/test_conformance.py", "tests/test_bsr_gemm.py", "tests/test_packed.py", "tests/test_decode.py")
MOST_JOBS = 32  # each holds a CUDA context: some 500 MB of the device


def arguments(gpu: bool, quick: bool) -> list[str]:
    """pytest's arguments: which tests, and in how many processes where pytest-xdist is installed."""
    files = (QUICK if quick else FULL) if gpu else CPU
    chosen = ["-m", ("gpu" if gpu else "not gpu") + (" and not slow" if quick else "")]
    if importlib.util.find_spec("xdist"):
        chosen += ["-n", str(min(MOST_JOBS, os.cpu_count() or 1) if gpu else 0)]
    return [*files, *chosen, "-W", "ignore"]


def check(*, quick: bool = False, tests: Callable[..., dict] = gpu_record.tests) -> Gate:
    """Run the tests and read their report; `tests` is gpu_record.tests."""
    if importlib.util.find_spec("pytest") is None:
        raise Skip("pytest is not installed: pip install 'cute-kernels[test]'")
    gpu = torch.cuda.is_available()
    found = tests(arguments(gpu, quick), LIMIT, show=False)
    problems = [f"{failure['name']}: {failure['message']}" for failure in found["failures"]]
    if not problems and (found["status"] != 0 or not found["passed"]):
        problems = [f"pytest ended with status {found['status']}"]
        problems += [f"{name}: unfinished after {seconds} s" for name, seconds in found.get("unfinished", {}).items()]
        problems += found["output"]
    where = "on the GPU" if gpu else "of the CPU references"
    counts = f"{found['passed']} tests {where} passed"
    return judged(NAME, problems, counts, f"{found['failed']} tests {where} failed; {counts}, status {found['status']}")
