"""python -m bench: where we stand, measured on this machine.

    (none)          gemm and block-sparse; without a GPU any suite inspects a few kernels instead
    gemm            dense products beside cuBLAS, cuBLASLt's epilogues and quack
    block-sparse    block-sparse products beside cuBLAS and torch's Triton kernel
    attention       attention beside cuDNN, FlashAttention 2 and 4 and FlexAttention; also as --attention
    attention-float8  FP8 attention beside ours in BF16
    attention-backward  gradients of attention beside the same peers', through torch's autograd
    selected        selected-block attention of QSA, MSA and NSA, and video attention, beside FlashAttention 4, a Triton
                    kernel that gathers blocks, and cuDNN frontend
    generation      tokens that a compiled model of transformers adds to a long prompt, by our attention and by theirs
    training        gradients of block-sparse products, layers and a transformer's step, beside dense ones
    float8          FP8 GEMMs beside torch._scaled_mm and our BF16 ones, and their errors
    single          calls as users make them (no CUDA graph, through autograd), and their kernels alone
    host            host overhead of single calls, eager and compiled, forward and backward, beside torch's and FA4's;
                    with no GPU, counts of Python calls
    distributed     sharded layers on several GPUs of one host, over what one GPU does alone
    structured      products with a 2:4 sparse A beside cuBLAS's dense ones and torch's, and with 2:4 sparse blocks
    gates           may this state of the code be shipped: one page, one exit status
    tune            search the legal configurations for a problem
    plot            figures of result files

Every row times ours and its peers in turns, on random normal operands, L2 flushed, outputs preallocated, after the card
has settled; gradients are allocated by each call. Results go to bench/results/<card>/<suite>.json, figures beside them.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels.__main__ import main as inspect_kernels

from . import (
    cases,
    cases_attention,
    cases_attention_backward,
    cases_float8,
    cases_float8_attention,
    cases_generation,
    cases_selected,
    cases_structured,
    cases_training,
    ceilings,
    distributed,
    findings,
    gates,
    record,
    single,
    table,
    tune,
)
from . import host as host_overhead
from .rows import Case, Row

ROUNDS = {"quick": 30, "full": 60}
WARM_S = {"quick": 0.5, "full": 1.0}  # once a row; a run begins with the ceilings, which warm the card


@dataclass(frozen=True)
class Suite:
    """Rows that are measured and written together.

    `findings(rows, only)` measures what there is beside the rows, shows it, and returns it for the result file.
    """

    cases: Callable[[str], Iterator[Case]]
    findings: Callable[[list[Row], str], dict] = lambda rows, only: {}


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m bench", description=__doc__, formatter_class=raw)
    commands = top.add_subparsers(metavar="COMMAND")
    measure = argparse.ArgumentParser(add_help=False)
    mode = measure.add_mutually_exclusive_group()
    for name, text in (("quick", "a minute, attention three (the default)"), ("full", "every row and every peer")):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=text)
    text = "rows whose name contains this; writes no file; errors: those"
    measure.add_argument("--only", default="", metavar="TEXT", help=text)
    measure.add_argument("--rounds", type=int, metavar="N", help=f"timed rounds a row (default {ROUNDS})")
    measure.add_argument("--limit", type=float, metavar="SECONDS", help="begin no row of a suite later than this")
    measure.add_argument("--out", type=Path, default=record.RESULTS, help="folder of the results")
    measure.set_defaults(run=run_suites, mode="quick", suites=PRODUCTS)
    top.set_defaults(run=None)
    for name in SUITES:
        commands.add_parser(name, parents=[measure], help=f"the {name} rows").set_defaults(suites=(name,))
    commands.add_parser("all", parents=[measure], help="gemm and block-sparse, as with no command")
    for module in (distributed, gates, host_overhead, single, tune):
        module.add_command(commands)
    plot = commands.add_parser("plot", help="figures of a card's result files")
    plot.add_argument("folder", type=Path, metavar="FOLDER", help="as in bench/results/<card>")
    plot.set_defaults(run=lambda args: draw(args.folder))
    return top


def run_suites(args: argparse.Namespace) -> int:
    """Measure the suites, print their tables, write their files; 1 if one of our own products failed."""
    if not torch.cuda.is_available():
        print("no CUDA GPU: nothing can be timed; a few kernels are compiled and inspected instead\n", flush=True)
        return inspect_kernels(["inspect", "--quick", "--arch", "sm_80,sm_90"])
    console, start = Console(stderr=True), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        best = ceilings.measure(rounds=10 if args.mode == "quick" else 30)
        compile_first(args)
        failed = [line for suite in args.suites for line in run_suite(suite, args, best, bar)]
    if not args.only and set(args.suites) & set(PRODUCTS):
        draw(args.out / record.card_name(torch.cuda.get_device_name()))
    for line in failed:
        print("FAILED", line)
    print(f"{time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


def draw(folder: Path) -> int:
    """Draw figures beside a card's result files; returns 1 where that is not possible, as without matplotlib."""
    try:
        from . import plots

        print("drawn:", ", ".join(path.name for path in plots.draw(folder)) or "nothing yet")
        return 0
    except (ImportError, OSError, ValueError) as error:
        print(f"no figures: {error}; python -m bench plot {folder} draws them")
        return 1


def compile_first(args: argparse.Namespace) -> None:
    """Compile ours of those rows in which a peer's import changes CuTe DSL for the whole process."""
    for suite in args.suites:
        for case in SUITES[suite].cases(args.mode):
            if case.patches_dsl and args.only in case.name:
                with contextlib.suppress(Exception):  # its row will say
                    case.ours()


def run_suite(suite: str, args: argparse.Namespace, best: dict, bar: Progress) -> list[str]:
    """Measure one suite; what failed, a line each."""
    rows, failed = [], []
    wanted = [case for case in SUITES[suite].cases(args.mode) if args.only in case.name]
    wanted.sort(key=lambda case: case.patches_dsl)
    task, began = bar.add_task(suite, total=len(wanted)), time.perf_counter()
    while wanted:  # a case holds its operands as long as it lives
        case = wanted.pop(0)
        bar.update(task, description=f"{suite}: {case.name}")
        start = time.perf_counter()
        try:
            if args.limit and start - began > args.limit:
                raise TimeoutError(f"not begun within --limit {args.limit:g}")
            rows.append(case.measure(rounds=args.rounds or ROUNDS[args.mode], warm_s=WARM_S[args.mode]))
        except Exception as error:  # a row that cannot be measured is a row that says so
            failed.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
            rows.append(case.failed(error))
        print(f"{rows[-1].line()} [{time.perf_counter() - start:.1f} s]", file=sys.stderr, flush=True)
        case = None
        if not args.only:  # what was measured stays, whatever ends this
            record.write(suite, rows, best, args.out, args.mode)
        torch.cuda.empty_cache()
        bar.advance(task)
    table.show(rows, best)
    more = SUITES[suite].findings(rows, args.only)
    if not args.only:
        print("written:", record.write(suite, rows, best, args.out, args.mode, **more))
    return failed


SUITES = {
    "block-sparse": Suite(cases.sparse_cases),
    "gemm": Suite(cases.gemm_cases),
    "training": Suite(cases_training.training_cases),
    "attention": Suite(cases_attention.attention_cases, findings.of_attention),
    cases_attention_backward.SUITE: Suite(cases_attention_backward.backward_cases, findings.of_backward),
    cases_float8.SUITE: Suite(cases_float8.float8_cases),
    cases_float8_attention.SUITE: Suite(cases_float8_attention.float8_attention_cases),
    cases_generation.SUITE: Suite(cases_generation.generation_cases),
    cases_selected.SUITE: Suite(cases_selected.selected_cases, cases_selected.of_selected),
    cases_structured.SUITE: Suite(cases_structured.structured_cases),
}
# What runs with no command. Attention's run alone: their first peer to be imported changes CuTe DSL for the process.
PRODUCTS = ("block-sparse", "gemm")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--attention" in argv:
        argv = ["attention", *(arg for arg in argv if arg not in ("--attention", "attention"))]
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["all", *argv]
    args = parser().parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
