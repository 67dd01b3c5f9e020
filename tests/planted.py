"""Faults planted on purpose, to show that tests and gates find them.

    slower        10 % more time on the GPU
    race          the sm_80 mainloop compiled without its waits for cp.async and its __syncthreads
    spilling      a kernel with more accumulators a thread than its epilogue leaves registers for
    wrong         a result with one element off by 1e-2

`python -m tests.planted repeat race` compiles and repeats the racing kernel in a process of its own, as the
determinism tests do; the exit status is 1 if its results are wrong or differ. `launch` in place of `repeat` only
launches the kernel, for racecheck. `honest` in place of `race` does the same with the project's mainloop.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from unittest import mock

import torch

from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.family import DENSE

from .calls import Case, dense, matmul
from .repeats import faults


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


class Instead(SimpleNamespace):
    """Some names of a module replaced, `of`; whoever has the real one notices nothing."""

    def __getattr__(self, name):
        return getattr(self.__dict__["of"], name)


@contextlib.contextmanager
def race():
    """Inside, the sm_80 mainloop is compiled without waits and barriers; the kernel's one before the store stays.

    It then reads K-tiles that have not arrived, and overwrites those that other warps still read. No kernel may come
    out of a cache meanwhile, nor go into one: see `main`.
    """
    from cute_kernels.matmul.mainloops import mainloop_sm80

    cute = mainloop_sm80.cute
    arch = Instead(of=cute.arch, sync_threads=lambda: None, cp_async_wait_group=lambda n: None)
    with mock.patch.object(mainloop_sm80, "cute", Instead(of=cute, arch=arch)):
        yield


RACED = (  # deep enough that the ring goes round many times
    Case(partial(dense, 512, 512, 2048), "sm_80"),
    Case(partial(matmul, (128, 128), "all_blocks", 4, 16, 512), "sm_80"),
)


def raced_facts() -> GemmFacts:
    """A kernel that `race` changes."""
    (facts,) = DENSE.catalogue("sm_80", quick=True)
    return facts


def spilling() -> GemmFacts:
    """The catalogue's sm_90 configuration with most accumulators a thread, under a GELU: `unsupported` refuses it."""
    spec = ARCHS["sm_90"]
    configs = DENSE.candidates("sm_90", None, spec)
    most = max(configs, key=lambda c: c.tile_m * c.tile_n / (c.warps_m * c.warps_n))
    return catalogue.dense(spec, "sm_90", most, epilogue=catalogue.COL)


def wrong(op: Callable, amount: float = 1e-2) -> Callable:
    """The op, with `amount` added to the middle element of its result."""

    @wraps(op)
    def wrapped(*args, out, **terms):
        found = op(*args, out=out, **terms)
        out[tuple(extent // 2 for extent in out.shape)] += amount
        return found

    return wrapped


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("repeat", "launch") or arguments[1] not in ("race", "honest"):
        print("python -m tests.planted {repeat,launch} {race,honest}", file=sys.stderr)
        return 2
    os.environ["CUTE_KERNELS_CACHE"] = "0"
    os.environ.pop("CUTE_KERNELS_BUNDLE", None)
    if not torch.cuda.is_available():
        print("planted: no CUDA GPU; this runs a kernel", file=sys.stderr)
        return 2
    with race() if arguments[1] == "race" else contextlib.nullcontext():
        return launch() if arguments[0] == "launch" else repeat()


def launch() -> int:
    """One small product: a sanitizer slows every access down."""
    Case(partial(dense, 128, 128, 512), "sm_80")("cuda").run()
    torch.cuda.synchronize()
    print("launched")
    return 0


def repeat() -> int:
    found = faults([case("cuda") for case in RACED], 1000)
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
