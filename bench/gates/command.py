"""`python -m bench gates`: may this state of the code be shipped? One page, one exit status.

    resources     registers, spills, shared memory and tensor-core instructions of every kernel; needs no GPU
    tables        whether the shipped tuned tables were measured on these kernels; needs no GPU
    correctness   the tests of the ops' results against fp64; without a GPU those of the CPU references
    determinism   the same bits in a thousand runs
    stability     hundreds of shapes, streams and threads at once, CUDA graphs, memory
    speed         ratios to peers against the floors of this card
    counters      how busy the tensor cores are, counted by ncu
    sanitizer     memcheck, racecheck and synccheck of compute-sanitizer

The exit status is 1 if a gate failed, 2 if the call is wrong, else 0. A gate that cannot be asked is skipped with its
reason. On a GPU machine all of it is written to <out>/<card>/gates.json, unless --only left gates out.
"""

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from ..record import RESULTS

NAMES = ("resources", "tables", "correctness", "determinism", "stability", "speed", "counters", "sanitizer")


def add_command(subparsers) -> None:
    """Add `gates` to the subcommands of an argparse parser; its `args.run(args)` gives the exit status."""
    sub = subparsers.add_parser(
        "gates",
        help="whether this state of the code may be shipped",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("--quick", action="store_true", help="fewer cases, and neither ncu nor sanitizer: under a minute")
    sub.add_argument("--only", type=names, default=NAMES, metavar="NAME,...", help="these gates alone")
    sub.add_argument(
        "--set-floors",
        action="store_true",
        help="measure each row three times and store the medians as this card's floors",
    )
    sub.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="where to write (default: bench/results)"
    )
    sub.set_defaults(run=run)


def names(text: str) -> tuple[str, ...]:
    """Gates in their own order, of a list with commas."""
    wanted = set(text.split(","))
    if unknown := sorted(wanted - set(NAMES)):
        raise argparse.ArgumentTypeError(f"unknown gate {', '.join(map(repr, unknown))}; there are {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in wanted)


def checks(wanted: tuple[str, ...], quick: bool) -> dict:
    """The gates of these names, ready to be run."""
    from . import correctness, counters, determinism, resources, sanitizer, speed, stability, tables
    from .gate import Skip

    def left_out():
        raise Skip("left out by --quick")

    found = {module.NAME: partial(module.check, quick=quick) for module in (resources, tables, correctness)}
    found |= {module.NAME: partial(module.check, quick=quick) for module in (determinism, stability, speed)}
    found |= {module.NAME: left_out if quick else module.check for module in (counters, sanitizer)}
    return {name: found[name] for name in wanted}


def run(args: argparse.Namespace) -> int:
    """The command; see the module."""
    from . import gate

    if args.set_floors:
        return set_floors(args)
    gpu = torch.cuda.is_available()
    if gpu:
        from . import warm

        tell("compiling what will be launched ...")
        warm.kernels(warm.cases(args.only, args.quick))
    gates = gate.run(checks(args.only, args.quick), tell)
    gate.page(gates)
    if gpu and args.only == NAMES:
        print("written:", gate.write(gates, args.out, "quick" if args.quick else "full"))
    return gate.exit_status(gates)


# Whose families a kind of suite is about
PACKAGES = {"products": ("cute_kernels", "sparse_collective"), "attention": ("attention",)}


def compile_only(suites: Iterable[str], quick: bool) -> int:
    """Ask the resources gate about the kernels of some suites and print its page; the exit status."""
    from . import gate, resources

    kinds = {"attention" if suite == "attention" else "products" for suite in suites}
    checks = {kind: partial(resources.check, quick=quick, package=PACKAGES[kind]) for kind in PACKAGES if kind in kinds}
    gates = gate.run(checks, tell)
    gate.page(gates)
    return gate.exit_status(gates)


def set_floors(args: argparse.Namespace) -> int:
    """Measure the floors of this card and write them."""
    from . import speed

    if args.quick or args.only != NAMES:
        tell("gates: --set-floors measures every row; it goes with neither --quick nor --only")
        return 2
    if not torch.cuda.is_available():
        tell("gates: --set-floors needs a CUDA GPU: floors are measured")
        return 2
    path = speed.floors_path(args.out)
    floors = speed.set_floors(speed.gate_cases(), path)
    for name, row in floors["rows"].items():
        print(f"{row['ratio']:.3f}  {name}")
    print("written:", path)
    return 0


def tell(line: str) -> None:
    """Progress and errors: stdout has the page."""
    print(line, file=sys.stderr, flush=True)
