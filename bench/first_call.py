"""`python -m bench.first_call`: seconds of the first call of common uses, in fresh processes.

cold: no kernel is cached, so the call compiles. disk: the kernels are in the disk cache. bundle: they are in a bundle.
warm_up: time of warm_up without a cache, and then of the call in the same process. All include planning and the first
launch, not the imports, whose time is printed below. Results go to <out>/<card>/first-call.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import record
from .table import grid, make_console

SETUP = """
import time, json
start = time.perf_counter()
import torch
torch_s = time.perf_counter() - start
from cute_kernels import gemm, quantize, warm_up
from sparse_collective import BsrMatrix, bsr_linear
from sparse_collective.nn import BsrLinear, SwiGLU
from attention import attention, block_sparse_attention, patterns
import_s = time.perf_counter() - start - torch_s
kind = {"device": "cuda", "dtype": torch.bfloat16}
a, b, bias = torch.randn(1024, 1024, **kind), torch.randn(1024, 1024, **kind), torch.randn(1024, **kind)
q, k, v = (torch.randn(1, 8, 1024, 128, **kind) for _ in range(3))
W = BsrMatrix.from_dense(b, (128, 128), density=0.25)
mask = patterns.sliding_window((1024, 1024), (255, 0), device="cuda")
layer = BsrLinear(1024, 1024, density=0.25, **kind)
lengths = torch.tensor([1000], dtype=torch.int32, device="cuda")
wanted = [t.requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
torch.cuda.synchronize()
"""
USES = {
    "gemm": "gemm(a, b)",
    "gemm, bias and GELU": "gemm(a, b, bias=bias, activation='gelu')",
    "gemm, FP8": "gemm(quantize(a, per='row'), quantize(b, per='row').mT)",
    "bsr_linear": "bsr_linear(a, W)",
    "bsr_linear, 1 token": "bsr_linear(a[:1], W)",
    "BsrLinear, forward and backward": "layer(a.requires_grad_()).sum().backward()",
    "attention, causal": "attention(q, k, v, causal=True)",
    "attention, causal, forward and backward": "attention(*wanted, causal=True).sum().backward()",
    "attention, decode": "attention(q[:, :, :1], k, v, seqused_k=lengths)",
    "block_sparse_attention, a window": "block_sparse_attention(q, k, v, mask)",
}
WARM_UP = """
start = time.perf_counter()
warm_up(lambda: {call}, (), progress=False)
warm_up_s = time.perf_counter() - start
"""
TAIL = """
start = time.perf_counter()
{call}
torch.cuda.synchronize()
print(json.dumps([torch_s, import_s, time.perf_counter() - start, warm_up_s]))
"""


def seconds(call: str, cache: str, *, warm_up: bool = False, **environment: str) -> list[float]:
    """[import of torch, import of the packages, the call, warm_up before it], in a process of its own."""
    environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": cache} | environment
    before = WARM_UP if warm_up else "warm_up_s = 0.0"
    command = [sys.executable, "-W", "ignore", "-c", SETUP + (before + TAIL).format(call=call)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench.first_call", description=__doc__)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args(argv)
    rows, imports = [], []
    with tempfile.TemporaryDirectory() as cache:
        seconds("gemm(a, b)", cache)  # the files of torch and of CuTe DSL are read from disk once
    with tempfile.TemporaryDirectory() as folder:
        calls, bundle = f"{folder}/calls", f"{folder}/bundle"
        for name, call in USES.items():
            with tempfile.TemporaryDirectory() as cache:
                cold = seconds(call, cache, CUTE_KERNELS_RECORD=calls)
                disk = min((seconds(call, cache) for _ in range(2)), key=lambda times: times[2])
            with tempfile.TemporaryDirectory() as cache:
                warmed = seconds(call, cache, warm_up=True)
            imports += [cold[:2], disk[:2]]
            times = {"cold_s": cold[2], "disk_s": disk[2], "warm_up_s": warmed[3], "after_warm_up_s": warmed[2]}
            rows.append({"use": name, **times})
        command = [sys.executable, "-m", "cute_kernels", "compile", "--calls", calls, "--out", bundle]
        subprocess.run(command, check=True)
        for row in rows:
            runs = (
                seconds(USES[row["use"]], folder, CUTE_KERNELS_BUNDLE=bundle, CUTE_KERNELS_CACHE="0") for _ in range(2)
            )
            row["bundle_s"] = min(times[2] for times in runs)
    torch_s, import_s = (round(sorted(column)[len(column) // 2], 2) for column in zip(*imports))
    table = grid(["first call, seconds"], ["cold", "disk", "bundle", "warm_up", "and then"])
    columns = "cold_s", "disk_s", "bundle_s", "warm_up_s", "after_warm_up_s"
    for row in rows:
        row |= {name: round(row[name], 3) for name in columns}
        table.add_row(row["use"], *(f"{row[name]:.2f}" for name in columns))
    console = make_console(80)
    console.print(table)
    console.print(f"import of torch {torch_s} s, of the packages {import_s} s more")
    environment = record.environment()
    record.save(
        options.out,
        environment["card"],
        "first-call",
        {"environment": environment, "import_s": import_s, "torch_import_s": torch_s, "rows": rows},
    )


if __name__ == "__main__":
    main()
