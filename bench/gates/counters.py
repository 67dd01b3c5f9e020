"""The counters gate: how busy the tensor cores are, as Nsight Compute (`ncu`) counts it in one launch.

A time can be right by luck of the clocks; the share of cycles in which the tensor pipe works does not depend on them.
ncu needs permission to read the counters, which containers often lack: then the gate is skipped, and says so.

`python -m bench.gates.counters dense` launches what is profiled: one kernel whose name has Gemm in it.
"""

import csv
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from cute_kernels import gemm
from sparse_collective import bsr_matmul, random_bsr

from ..record import RESULTS
from .gate import Gate, Skip, judged, need_gpu

NAME = "counters"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2_READS = "l1tex__m_xbar2l1tex_read_bytes.sum"
DURATION = "gpu__time_duration.sum"
METRICS = (TENSOR, DRAM, L2_READS, DURATION)
LEAST_ACTIVE = {"dense": 75.0, "bsr": 65.0}  # percent of the cycles in which an SM works at all
OPTIONS = "--csv --page raw --print-units base --clock-control none -k regex:Gemm --metrics".split()
ROOT = RESULTS.parent.parent
LIMIT = 300  # seconds of one probe: ncu replays a launch for every group of counters
# ERR_NVGPUCTRPERM: no permission. The other: another tool, such as DCGM, holds the counters.
REFUSALS = ("ERR_NVGPUCTRPERM", "driver resource was unavailable")


def find_ncu() -> str | None:
    """ncu, from PATH or a CUDA toolkit, the newest one."""
    folders = sorted(glob.glob("/usr/local/cuda*/bin"), reverse=True)
    return shutil.which("ncu") or shutil.which("ncu", path=os.pathsep.join(folders) or os.devnull)


def profile(name: str) -> str:
    """What ncu prints of a probe; skips where it cannot be asked."""
    need_gpu()
    ncu = find_ncu()
    if ncu is None:
        raise Skip("ncu was found neither on PATH nor in /usr/local/cuda*/bin")
    command = [ncu, *OPTIONS, ",".join(METRICS), sys.executable, "-m", "bench.gates.counters", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    lines = (done.stdout + done.stderr).splitlines()
    for line in lines:
        if any(refusal in line for refusal in REFUSALS):
            raise Skip("ncu may not read the counters here: " + re.sub(r"^==\w+== ", "", line.strip()))
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: " + " ".join(lines[-5:]))
    return done.stdout


def parse(output: str) -> list[dict[str, float]]:
    """The metrics of each profiled launch, in base units (percent, bytes, nanoseconds), from ncu's raw CSV page.

    Other lines come first: ncu's own, which begin with ==, and the program's. Then a line of names, one of units, and a
    line a launch. Raises ValueError if there is no launch or a metric is missing.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    launches = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))[1:]
    if not launches:
        raise ValueError("ncu profiled no launch: " + " ".join(lines[-3:]))
    if missing := set(METRICS) - launches[0].keys():
        raise ValueError(f"ncu printed no {', '.join(sorted(missing))}")
    return [{name: float(launch[name].replace(",", "")) for name in METRICS} for launch in launches]


def check(profile: Callable[[str], str] = profile, *, quick: bool = False) -> Gate:
    """Profile each probe and hold its tensor activity to the least; `profile` gives what ncu prints of a probe."""
    lines, low = [], []
    for name, least in LEAST_ACTIVE.items():
        (launch,) = parse(profile(name))
        active, micro = launch[TENSOR], launch[DURATION] / 1e3
        lines.append(
            f"{name}: tensor cores active {active:.1f} % (at least {least:.0f} %), memory {launch[DRAM]:.1f} %, "
            f"{launch[L2_READS] / micro / 1e6:.2f} TB/s from L2, {micro:.1f} us"
        )
        low += [] if active >= least else [name]
    found = judged(NAME, low, "; ".join(lines), f"the tensor cores idle too much: {', '.join(low)}")
    return replace(found, details=lines)


def launch(name: str) -> None:
    """dense: 4096^3. bsr: 8192^3 with 128x128 blocks, one in eight stored, the same number in every row."""
    size = {"dense": 4096, "bsr": 8192}[name]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    b = torch.randn(size, size, **options)
    if name == "dense":
        gemm(torch.randn(size, size, **options), b)
    else:
        bsr_matmul(random_bsr((size, size), (128, 128), per_row=8, **options), b)
    torch.cuda.synchronize()


if __name__ == "__main__":
    launch(*sys.argv[1:])
