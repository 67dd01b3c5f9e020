"""`python -m bench.first_call`: seconds of the first call of common uses, in fresh processes.

cold: no kernel is cached, so the call compiles. warm: the kernels are in the disk cache. Both include planning and the
first launch, not the imports, whose time is a row of its own. Results go to <out>/<card>/first-call.json.
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
from cute_kernels import Sparse24, gemm, prune_2_4, quantize
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
TAIL = """
start = time.perf_counter()
{call}
torch.cuda.synchronize()
print(json.dumps([torch_s, import_s, time.perf_counter() - start]))
"""


def seconds(call: str, cache: str) -> list[float]:
    """[import of torch, import of the packages, the call], in a process of its own."""
    environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": cache}
    command = [sys.executable, "-W", "ignore", "-c", SETUP + TAIL.format(call=call)]
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
    for name, call in USES.items():
        with tempfile.TemporaryDirectory() as cache:
            cold = seconds(call, cache)
            warm = min((seconds(call, cache) for _ in range(2)), key=lambda times: times[2])
        imports += [cold[:2], warm[:2]]
        rows.append({"use": name, "cold_s": round(cold[2], 2), "warm_s": round(warm[2], 3)})
    torch_s, import_s = (round(sorted(column)[len(column) // 2], 2) for column in zip(*imports))
    table = grid(["first call"], ["cold, s", "warm, s"])
    for row in rows:
        table.add_row(row["use"], f"{row['cold_s']:.2f}", f"{row['warm_s']:.3f}")
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
