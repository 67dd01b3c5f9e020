"""Faults planted on purpose, to show that the gates of `python -m bench gates` find them.

    slower        10 % more time on the GPU
    race          the sm_80 mainloop compiled without its waits for cp.async and its __syncthreads
    spilling      a kernel with more accumulators a thread than its epilogue leaves registers for
    wrong         a result with one element off by 1e-2

`python -m tests.planted gates race` compiles and runs the racing kernel in a process of its own and asks the
correctness and the determinism gate; the exit status is 1 if they find it. `launch` in place of `gates` only launches
it, for racecheck to look at. `honest` in place of `race` does the same with the project's own mainloop.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from bench.gates.products import Product
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue as catalog
from cute_kernels.matmul.config import GemmFacts

# -- a slow-down ----------------------------------------------------------------------------------------------


def slower(call: Callable, share: float = 0.1) -> Callable:
    """The call, then an idle kernel for `share` of the time that the call takes."""
    cycles = 10_000_000
    idle = min(milliseconds(lambda: torch.cuda._sleep(cycles)) for _ in range(3))
    busy = sorted(milliseconds(call) for _ in range(21))[10]
    wait = int(cycles * share * busy / idle)

    def wrapped():
        result = call()
        torch.cuda._sleep(wait)
        return result

    return wrapped


def milliseconds(call: Callable) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


# -- a race ---------------------------------------------------------------------------------------------------


class Instead:
    """A module with some of its names replaced; whoever has the real one notices nothing."""

    def __init__(self, module, **named):
        self._module, self._named = module, named

    def __getattr__(self, name):
        named = self.__dict__["_named"]
        return named[name] if name in named else getattr(self.__dict__["_module"], name)


@contextlib.contextmanager
def race():
    """Inside, the sm_80 mainloop is compiled without waits and barriers; the kernel's one before the store stays.

    It then reads K-tiles that have not arrived, and overwrites those that other warps still read. No kernel may come
    out of a cache meanwhile, nor go into one: see `main`.
    """
    from cute_kernels.matmul import mainloop_sm80

    cute = mainloop_sm80.cute
    arch = Instead(cute.arch, sync_threads=lambda: None, cp_async_wait_group=lambda n: None)
    mainloop_sm80.cute = Instead(cute, arch=arch)
    try:
        yield
    finally:
        mainloop_sm80.cute = cute


RACED = (  # deep enough that the ring goes round many times
    Product("gemm", 512, 512, 2048, "nn", path="sm_80"),
    Product("bsr_matmul", 512, 512, 2048, "nn", (128, 128), "all_blocks", path="sm_80"),
)


def raced_facts() -> GemmFacts:
    """A kernel that `race` changes."""
    (facts,) = catalog.main(catalog.dense, ARCHS["sm_80"], "sm_80", None)
    return facts


# -- a spill --------------------------------------------------------------------------------------------------


def spilling() -> GemmFacts:
    """The catalogue's sm_90 configuration with most accumulators a thread, under a GELU: `unsupported` refuses it."""
    spec = ARCHS["sm_90"]
    configs = catalog.configurations("sm_90", None, spec)
    most = max(configs, key=lambda c: c.tile_m * c.tile_n / (c.warps_m * c.warps_n))
    return catalog.dense(spec, "sm_90", most, epilogue=catalog.COL)


# -- a wrong result -------------------------------------------------------------------------------------------


def wrong(op: Callable, amount: float = 1e-2) -> Callable:
    """The op, with `amount` added to the middle element of its result."""

    def wrapped(*args, **kwargs):
        out = op(*args, **kwargs)
        out[tuple(extent // 2 for extent in out.shape)] += amount
        return out

    return wrapped


# -- the process that races -----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("gates", "launch") or arguments[1] not in ("race", "honest"):
        print("python -m tests.planted {gates,launch} {race,honest}", file=sys.stderr)
        return 2
    os.environ["CUTE_KERNELS_CACHE"] = "0"
    os.environ.pop("CUTE_KERNELS_BUNDLE", None)
    if not torch.cuda.is_available():
        print("planted: no CUDA GPU; this runs a kernel", file=sys.stderr)
        return 2
    with race() if arguments[1] == "race" else contextlib.nullcontext():
        return launch() if arguments[0] == "launch" else ask_gates()


def launch() -> int:
    """One small product: a sanitizer slows every access down."""
    call = replace(RACED[0], m=128, n=128, k=512).call("cuda")
    call.run()
    torch.cuda.synchronize()
    print("launched")
    return 0


def ask_gates() -> int:
    from bench.gates import correctness, determinism, gate

    checks = {
        module.NAME: lambda module=module: module.check(RACED, families=["sm_80"])
        for module in (correctness, determinism)
    }
    gates = gate.run(checks)
    gate.page(gates)
    return gate.exit_status(gates)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
