"""What a result file says of where it was measured: card, driver, versions, and the code that ran."""

import datetime
import json
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cute_kernels.runtime.keys import source_fingerprint

from .timing import median


def environment() -> dict:
    """Card, driver, software versions and a fingerprint of the kernels' sources."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    shown = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    found = {"card": torch.cuda.get_device_name(), "nvidia_smi": shown[0] if shown else ""}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "sources": source_fingerprint()}
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not found"
    found["commit"] = os.environ.get("GIT_COMMIT", "")
    found["date"] = datetime.date.today().isoformat()
    return found


def write(rows, host: dict, folder: str) -> Path:
    """One JSON file for each card; a row holds medians and the spread of both sides."""
    where = environment()
    path = Path(folder, f"gemm-{where['card'].replace(' ', '-').lower()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"environment": where, "host_us": host, "rows": [row_data(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def row_data(row) -> dict:
    def stats(times):
        ordered = sorted(times)
        tenth = len(ordered) // 10
        return {"median_us": median(times), "p10": ordered[tenth], "p90": ordered[-1 - tenth], "rounds": len(times)}

    return {
        "name": row.name,
        "ours": stats(row.ours_us),
        "peer": {"name": row.peer, **stats(row.peer_us)},
        "ratio": round(row.ratio, 4),
        "floor": row.floor,
        "tflops": round(row.tflops, 1),
        "configuration": row.plan,
    }
