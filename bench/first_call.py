"""`python -m bench.first_call`: seconds of the first call of common uses, in fresh processes.

cold: no kernel is cached, so the call compiles. disk: the kernels are in the disk cache. bundle: they are in a bundle.
warm_up: time of warm_up without a cache, and then of the call in the same process. All include planning and the first
launch, not the imports, whose time is printed at the end. Python's bytecode caches are on: without them these imports
take three times as long. Each row is printed as it is measured, and written to <out>/<card>/first-call.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import record

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
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = WARM_UP if warm_up else "warm_up_s = 0.0"
    command = [sys.executable, "-W", "ignore", "-c", SETUP + (before + TAIL).format(call=call)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


COLUMNS = {
    "cold_s": "cold", "disk_s": "disk", "bundle_s": "bundle", "warm_up_s": "warm_up", "after_warm_up_s": "and then",
}  # fmt: skip


def measured(call: str) -> tuple[dict[str, float], list[list[float]], bool]:
    """(seconds by COLUMNS, [import of torch, import of the packages] of two processes, True if the bundle held shared
    libraries)"""
    with tempfile.TemporaryDirectory() as folder:
        calls, bundle = f"{folder}/calls", f"{folder}/bundle"
        cold = seconds(call, f"{folder}/cache", CUTE_KERNELS_RECORD=calls)
        disk = min((seconds(call, f"{folder}/cache") for _ in range(2)), key=lambda times: times[2])
        warmed = seconds(call, f"{folder}/warmed", warm_up=True)
        command = [sys.executable, "-m", "cute_kernels", "compile", "--calls", calls, "--out", bundle]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        cache = {"CUTE_KERNELS_BUNDLE": bundle, "CUTE_KERNELS_CACHE": "0"}
        bundled = min(seconds(call, f"{folder}/none", **cache)[2] for _ in range(2))
        linked = any(Path(bundle).glob("*.so"))
    times = {"cold_s": cold[2], "disk_s": disk[2], "bundle_s": bundled}
    times |= {"warm_up_s": warmed[3], "after_warm_up_s": warmed[2]}
    return {name: round(value, 3) for name, value in times.items()}, [cold[:2], disk[:2]], linked


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench.first_call", description=__doc__)
    text = "uses whose name contains this; the file then has these alone"
    parser.add_argument("--uses", default="", metavar="TEXT", help=text)
    parser.add_argument("--out", type=Path, default=record.RESULTS, metavar="FOLDER", help="folder of the results")
    options = parser.parse_args(argv)
    uses = {name: call for name, call in USES.items() if options.uses in name}
    if not uses:
        parser.error(f"no use's name contains {options.uses!r}; they are {'; '.join(USES)}")
    with tempfile.TemporaryDirectory() as cache:
        seconds("gemm(a, b)", cache)  # the files of torch and of CuTe DSL are read from disk once
    environment, rows, imports = record.environment(), [], []
    print(f"{'first call, seconds':40}" + "".join(f"{name:>9}" for name in COLUMNS.values()), flush=True)
    for name, call in uses.items():
        times, of_imports, linked = measured(call)
        rows.append({"use": name, **times})
        imports += of_imports
        print(f"{name:40}" + "".join(f"{times[column]:9.2f}" for column in COLUMNS), flush=True)
        torch_s, import_s = (round(sorted(column)[len(column) // 2], 2) for column in zip(*imports))
        data = {"environment": environment, "import_s": import_s, "torch_import_s": torch_s, "linked": linked}
        data["rows"] = rows
        record.save(options.out, environment["card"], "first-call", data)  # after each row, since a run may be cut off
    print(f"import of torch {torch_s} s, of the packages {import_s} s more")
    print(f"bundles of {'shared libraries' if linked else 'object files, since there is no C compiler'}")


if __name__ == "__main__":
    main()
