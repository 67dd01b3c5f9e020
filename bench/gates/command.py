"""`python -m bench gates`: may this state of the code be shipped? One page, one exit status.

    resources     registers, spills, shared memory and tensor-core instructions of every kernel; needs no GPU
    tables        whether the shipped tuned tables were measured on these kernels; needs no GPU
    correctness   the tests of the ops' results against fp64; without a GPU those of the CPU references
    determinism   the right bits, and the same ones in a thousand runs
    stability     streams and threads at once, CUDA graphs, memory
    speed         ratios to peers against the floors of this card
    counters      how busy the tensor cores are, counted by ncu
    sanitizer     memcheck, racecheck and synccheck of compute-sanitizer

The exit status is 1 if a gate failed, 2 if the call is wrong, else 0. A gate that cannot be asked is skipped with its
reason. On a GPU machine all of it is written to <out>/<card>/gates.json; gates that --only leaves out keep what an
earlier call found of the same sources.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.parallel import in_parallel

from ..record import RESULTS, file_of
from . import gate
from .gate import NAMES

NOT_QUICK = ("counters", "sanitizer")
PACKAGES = {"products": ("cute_kernels", "sparse_collective"), "attention": ("attention",)}  # of a kind of suite


def add_command(subparsers) -> None:
    """Add `gates` to the subcommands of an argparse parser; its `args.run(args)` gives the exit status."""
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sub = subparsers.add_parser("gates", help="whether this state of the code may be shipped", **options)
    sub.add_argument("--quick", action="store_true", help="fewer cases, and neither ncu nor sanitizer: under a minute")
    sub.add_argument("--only", type=names, default=NAMES, metavar="NAME,...", help="these gates alone")
    text = "measure each row three times and store the medians as this card's floors"
    sub.add_argument("--set-floors", action="store_true", help=text)
    text = "where to write (default: bench/results)"
    sub.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help=text)
    sub.set_defaults(run=run)


def names(text: str) -> tuple[str, ...]:
    """Gates in their own order, of a list with commas."""
    wanted = set(text.split(","))
    if unknown := sorted(wanted - set(NAMES)):
        raise argparse.ArgumentTypeError(f"unknown gate {', '.join(map(repr, unknown))}; there are {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in wanted)


def module(name: str):
    return importlib.import_module(f".{name}", __package__)


def checks(wanted: Sequence[str], quick: bool) -> dict[str, Callable[[], gate.Gate]]:
    """The gates of these names, ready to be run."""

    def left_out():
        raise gate.Skip("left out by --quick")

    return {n: left_out if quick and n in NOT_QUICK else partial(module(n).check, quick=quick) for n in wanted}


def run(args: argparse.Namespace) -> int:
    """The command; see the module."""
    if args.set_floors:
        return set_floors(args)
    gpu = torch.cuda.is_available()
    if gpu:
        compile_first(args.only)

    def keep(gates: list[gate.Gate]) -> None:
        if gpu:
            gate.write(gates, args.out, "quick" if args.quick else "full")

    gates = ask(checks(args.only, args.quick), keep)
    if gpu:
        print("written:", file_of(args.out, torch.cuda.get_device_name(), "gates"))
    return gate.exit_status(gates)


def ask(checks: dict[str, Callable[[], gate.Gate]], keep: Callable[[list], None] = lambda gates: None) -> list:
    """Run the gates and print their page; `keep` as in gate.run."""
    gates = gate.run(checks, tell, keep)
    gate.page(gates)
    return gates


def compile_first(wanted: Sequence[str]) -> None:
    """Compile what gates will launch in many processes, into the disk cache: a gate compiles one after another."""
    cases = [case for name in ("determinism", "stability") if name in wanted for case in module(name).cases()]
    jobs = min(module("correctness").MOST_JOBS, os.cpu_count() or 1)
    if jobs > 1 and KernelCache().directory is not None:
        tell("compiling what will be launched ...")
        list(in_parallel(plan, cases, jobs))


def plan(case) -> str:
    """Plan a tests.calls.Case, which compiles its kernel."""
    return str(case("cuda").plan())


def compile_only(suites: Iterable[str], quick: bool) -> int:
    """Ask the resources gate about the kernels of some suites and print its page; the exit status."""
    kinds = {"attention" if suite.startswith(("attention", "generation")) else "products" for suite in suites}
    check = module("resources").check
    wanted = {kind: partial(check, quick=quick, package=PACKAGES[kind]) for kind in PACKAGES if kind in kinds}
    return gate.exit_status(ask(wanted))


def set_floors(args: argparse.Namespace) -> int:
    """Measure the floors of this card and write them."""
    if args.quick or args.only != NAMES:
        tell("gates: --set-floors measures every row; it goes with neither --quick nor --only")
        return 2
    if not torch.cuda.is_available():
        tell("gates: --set-floors needs a CUDA GPU: floors are measured")
        return 2
    speed = module("speed")
    path = speed.floors_path(args.out)
    for name, row in speed.set_floors(speed.gate_cases(), path)["rows"].items():
        print(f"{row['ratio']:.3f}  {name}")
    print("written:", path)
    return 0


def tell(line: str) -> None:
    """Progress and errors: stdout has the page."""
    print(line, file=sys.stderr, flush=True)
