"""Measurements of the speed and counters gates (gates.py).

A floor is the median of three ratios to a peer that `python -m bench gates --set-floors` measured on the same card. A
row fails below floor * (1 - margin). It is then measured twice again, and the median of the three decides.

A time can be right by chance of the clocks; the share of cycles in which the tensor pipe is active does not depend on
them. `python -m bench.floors dense` launches the kernel that ncu profiles.
"""

import csv
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from cute_kernels import gemm
from sparse_collective import bsr_matmul, random_bsr

from . import cases as products
from . import cases_attention as attention
from . import record
from .peers_attention import CUDNN, FLASH
from .rows import Case

MARGIN = 0.06
REPEATS = 3
SET_FLOORS = "python -m bench gates --set-floors"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
NCU = f"--csv --page raw --print-units base --clock-control none -k regex:Gemm --metrics {TENSOR}".split()
NCU_LIMIT = 300  # seconds for one kernel
# No permission; or another tool, such as DCGM, holds the counters.
NCU_REFUSALS = ("ERR_NVGPUCTRPERM", "driver resource was unavailable")
LEAST_ACTIVE = {"dense": 75.0, "bsr": 65.0}  # percent of active cycles


class Skip(Exception):
    """Raised by a gate that cannot run on this machine; the text is the reason."""


def measure(case: Case) -> float:
    """Measure a row's ratio; raises RuntimeError if the peer has no time."""
    row = case.measure(rounds=40, warm_s=0.7)
    if row.ratio is None:
        raise RuntimeError(f"{row.name} has no ratio to {row.against}; {[peer.error for peer in row.peers]}")
    return row.ratio


def judge(name: str, ratios: list[float], floors: dict) -> tuple[bool, str]:
    """(the median ratio of a row reaches its floor, a line about it), given the content of a floors file."""
    if name not in floors["rows"]:
        return False, f"{name}: no floor is recorded: {SET_FLOORS}"
    ratio, floor = median(ratios), floors["rows"][name]["ratio"]
    return ratio >= floor * (1 - floors["margin"]), f"{name}: {ratio:.3f}, floor {floor:.3f} ({ratio / floor - 1:+.1%})"


def compare(cases: list[Case], floors: dict, measure: Callable[[Case], float] = measure) -> tuple[list[str], list[str]]:
    """(lines of rows that reach their floors, lines of the others)."""
    ratios = {case.name: [measure(case)] for case in cases}
    below = [case for case in cases if not judge(case.name, ratios[case.name], floors)[0]]
    for case in (REPEATS - 1) * below:
        ratios[case.name].append(measure(case))
    verdicts = [judge(name, measured, floors) for name, measured in ratios.items()]
    return [line for ok, line in verdicts if ok], [line for ok, line in verdicts if not ok]


def set_floors(folder: Path, cases: list[Case] | None = None, measure: Callable[[Case], float] = measure) -> Path:
    """Measure every row three times, in turns, and write the medians as this card's floors."""
    environment, cases = record.environment(), gate_cases() if cases is None else cases
    turns = [[measure(case) for case in cases] for _ in range(REPEATS)]
    rows = {case.name: {"ratio": round(median(ratios), 4)} for case, *ratios in zip(cases, *turns, strict=True)}
    floors = {"margin": MARGIN, "card": environment["card"], "sources": environment["sources"], "rows": rows}
    return record.save(folder, environment["card"], "floors", floors)


def gate_cases() -> list[Case]:
    """The rows with floors: one for each kernel that must not become slower, with one peer that needs only torch."""
    of_attention = {
        CUDNN: [attention.forward(attention.FIRST, True), attention.forward((2, 8192, 32, 64), False)],
        FLASH: [attention.older(attention.FIRST, True)],
        attention.OUR_DENSE: [attention.sparse(128, 1 / 8, FLASH, 1.0, dense=True)],
        attention.COPY: [attention.decoding(*attention.CACHES[0])],
    }
    return [*products.gate_cases(), *(beside(peer, case) for peer, cases in of_attention.items() for case in cases)]


def beside(name: str, case: Case) -> Case:
    """The case with one of its peers."""
    return replace(case, peers=[peer for peer in case.peers if peer.name == name], against=name, patches_dsl=False)


def profile(name: str) -> str:
    """Run ncu on one kernel and return its output; raises Skip if ncu is missing or may not read the counters."""
    folders = sorted(glob.glob("/usr/local/cuda*/bin"), reverse=True)
    ncu = shutil.which("ncu") or shutil.which("ncu", path=os.pathsep.join(folders) or os.devnull)
    if ncu is None:
        raise Skip("ncu was found neither on PATH nor in /usr/local/cuda*/bin")
    command, root = [ncu, *NCU, sys.executable, "-m", "bench.floors", name], record.RESULTS.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", timeout=NCU_LIMIT)
    lines = (done.stdout + done.stderr).splitlines()
    if refused := [line for line in lines if any(refusal in line for refusal in NCU_REFUSALS)]:
        raise Skip(f"ncu may not read the counters here: {refused[0]}")
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: " + " ".join(lines[-5:]))
    return done.stdout


def parse(output: str) -> float:
    """The tensor-core utilization in ncu's raw CSV page: a line of names, one of units, and one per launch."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    launches = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))[1:]
    if not launches or TENSOR not in launches[0]:
        raise ValueError(f"ncu printed no {TENSOR}: " + " ".join(lines[-3:]))
    return float(launches[0][TENSOR].replace(",", ""))


def utilization(profile: Callable[[str], str] = profile) -> tuple[list[str], list[str]]:
    """(a line for each profiled kernel, those of kernels below LEAST_ACTIVE)."""
    active = {name: parse(profile(name)) for name in LEAST_ACTIVE}
    lines = {n: f"{n}: tensor cores active {active[n]:.1f} % (at least {LEAST_ACTIVE[n]:.0f} %)" for n in active}
    return list(lines.values()), [lines[name] for name in lines if not active[name] >= LEAST_ACTIVE[name]]


def launch(name: str) -> None:
    """dense: 4096^3. bsr: 8192^3 with 128x128 blocks, one in eight stored, the same number in every row."""
    size, options = {"dense": 4096, "bsr": 8192}[name], {"device": "cuda", "dtype": torch.bfloat16}
    a, b = (torch.randn(size, size, **options) for _ in range(2))
    if name == "dense":
        gemm(a, b)
    else:
        bsr_matmul(random_bsr((size, size), (128, 128), per_row=8, **options), b)
    torch.cuda.synchronize()


if __name__ == "__main__":
    launch(*sys.argv[1:])
