"""Result files: where and what was measured, the ceilings of that run, and the rows.

bench/results/<card>/<suite>.json    gemm, block-sparse, attention, attention-backward, float8, generation, selected,
                                     training: what `python -m bench` measured
bench/results/<card>/host.json       host overhead of single calls: `python -m bench host`
bench/results/<card>/distributed.json        sharded layers on several GPUs: `python -m bench distributed`
bench/results/<card>/tests-distributed.json  what `python -m tests.distributed_record` ran; with --one-gpu
                                     tests-distributed-one-gpu.json and tests-distributed-one-gpu-hosts.json
bench/results/<card>/tests.json      what `python -m tests.gpu_record` ran
bench/results/<card>/floors.json     what `python -m bench gates` holds the ratios to
bench/results/<card>/gates.json      the verdicts of all gates; tune.json what `python -m bench tune` found
"""

import datetime
import functools
import json
import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cute_kernels.runtime.keys import source_fingerprint

RESULTS = Path(__file__).resolve().parent / "results"
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
PACKAGES = (
    "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "triton", "quack-kernels", "flash-attn-4",
    "nvidia-cudnn-frontend",
)  # fmt: skip


def query(fields: str) -> dict[str, str]:
    """What nvidia-smi says of the current device; empty where it is not installed."""
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    values = shown[index].split(",") if index < len(shown) else []
    return dict(zip(fields.split(","), map(str.strip, values), strict=False))


def environment() -> dict:
    """Card, driver, clocks as they stand now, software versions, and a fingerprint of the kernels' sources."""
    card, date = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    return {"card": card, "clocks": query(CLOCKS), **what_runs(), "commit": commit(), "date": date}


@functools.cache
def what_runs() -> dict:
    """Of `environment`, what a process does not change: driver, versions, and the fingerprint."""
    found = {"driver": query("driver_version").get("driver_version", "")}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not found"
    return found | {"sources": source_fingerprint()}


def commit() -> str:
    """The commit of this checkout, with a + if files differ from it; GIT_COMMIT where there is no git."""
    if named := os.environ.get("GIT_COMMIT"):
        return named
    try:
        git = ["git", "-C", str(RESULTS), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def write(suite: str, rows: list, ceilings: dict, folder: Path, mode: str, **more) -> Path:
    """Write <folder>/<card>/<suite>.json; `rows` are rows.Row, `mode` how they were measured: "quick" or "full".

    `more` is what else was found, under names of its own.
    """
    where = environment()
    data = {"suite": suite, "mode": mode, "environment": where, "ceilings": ceilings}
    return save(folder, where["card"], suite, data | more | {"rows": [row.as_dict() for row in rows]})


def card_name(card: str) -> str:
    """Return the name of a card's folder: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def file_of(folder: Path, card: str, name: str) -> Path:
    """<folder>/<card>/<name>.json"""
    return Path(folder, card_name(card), f"{name}.json")


def save(folder: Path, card: str, name: str, data: dict) -> Path:
    """Write <folder>/<card>/<name>.json, in place of an earlier one."""
    path = file_of(folder, card, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path
