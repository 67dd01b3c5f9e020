"""python -m bench tune: search the configurations for a problem, and keep the winner where the ops look for it."""

import argparse
import datetime
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels import tuned
from cute_kernels.arch import ARCHS, PATHS
from cute_kernels.matmul.choose import choose
from cute_kernels.runtime.bundle import BundleError
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.device import device_arch

from .. import ceilings, record
from . import build, problems
from .build import Builder
from .problems import STANDARD, TuneProblem
from .report import Row, print_table, write
from .search import Result, evolve
from .space import Candidate, Space

ARCH, SMS = "sm_90", 132  # what --compile-only compiles for: an H200
FINALISTS = 3
GAIN = 0.99  # of the heuristics' time: a pick that gains less is noise, and is not kept

DESCRIPTION = """\
Searches tiles, pipelines, clusters and launch of one kernel, from the cost model's best guesses on, until the budget of
each problem is spent or nothing better is found. Candidates must compile without spills, give right and reproducible
results, and then race the heuristics' pick in turns. Winners go into a table that gemm, bsr_matmul and bsr_linear
consult (cute_kernels.tuned). A kernel that hangs ends the process with status 3; problems that were done are kept.
"""


def add_command(subparsers) -> None:
    """Add `tune` to the subcommands of python -m bench; `args.run(args)` runs it and returns the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    epilog = (problems.__doc__ or "").partition("\n\n")[2]
    parser = subparsers.add_parser(
        "tune", help="search the configurations for a problem", description=DESCRIPTION, epilog=epilog,
        formatter_class=raw,
    )  # fmt: skip
    parser.add_argument("--problem", action="append", type=_problem, default=[], metavar="TEXT", help="see below")
    parser.add_argument("--standard", action="store_true", help=f"the {len(STANDARD)} standard problems")
    parser.add_argument("--budget", type=_seconds, default=120.0, metavar="TIME", help="each problem's; 120s, 2m")
    parser.add_argument("--path", choices=PATHS, help="force a family of kernels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes (default: CPUs)")
    parser.add_argument("--first", type=int, default=32, metavar="N", help="candidates to begin with (default 32)")
    parser.add_argument(
        "--keep", choices=("user", "package", "none"), default="user",
        help="where winners go: the user's cache folder, this package's own tables, nowhere",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of the results")
    bundle = parser.add_mutually_exclusive_group()
    bundle.add_argument(
        "--compile-only", type=Path, metavar="DIR",
        help=f"write the first candidates into a bundle and stop; needs no GPU, compiles for an {ARCH} with {SMS} SMs",
    )  # fmt: skip
    bundle.add_argument("--bundle", type=Path, metavar="DIR", help="a bundle that --compile-only has written")
    parser.set_defaults(run=run)


def _problem(text: str) -> TuneProblem:
    try:
        return problems.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 120s, 2m or 1h")
    return float(match[1]) * {None: 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def run(args: argparse.Namespace) -> int:
    """Tune, or compile; 0, or 1 without a GPU or where a problem could not be tuned, 2 without a problem."""
    wanted = list(dict.fromkeys([*args.problem, *(problems.parse(text) for text in STANDARD if args.standard)]))
    if not wanted:
        print("tune: name a problem with --problem, or --standard", file=sys.stderr)
        return 2
    if args.compile_only is None and not torch.cuda.is_available():
        print("tune: no CUDA GPU: candidates can be compiled here (--compile-only DIR), not timed", file=sys.stderr)
        return 1
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    try:
        with (
            Builder(args.jobs, args.bundle) as builder,
            Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ):
            if args.compile_only is not None:
                return compile_only(args, wanted, builder, bar)
            return tune_all(args, wanted, builder, bar)
    except BundleError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1


# -- without a GPU ----------------------------------------------------------------------------------------------


def compile_only(args: argparse.Namespace, wanted: list[TuneProblem], builder: Builder, bar: Progress) -> int:
    """Write the sound ones among the first candidates of all problems into a bundle."""
    facts = []
    for problem in wanted:
        space = space_of(problem, args.path, ARCHS[ARCH], SMS)
        facts += [space.candidate(genome).facts for genome in space.seeds(args.first)]
    facts = list(dict.fromkeys(facts))
    task = bar.add_task("compiling", total=len(facts), state="")
    count = build.write_candidates(args.compile_only, facts, builder, lambda: bar.advance(task))
    print(f"{count} of {len(facts)} candidates of {len(wanted)} problems in {args.compile_only}")
    for rejected, reason in builder.reasons.items():
        print(f"rejected: {rejected.path} {rejected.config}: {reason.splitlines()[0][:150]}")
    print_checks(builder)
    return 0


def space_of(problem: TuneProblem, forced: str | None, spec, sms: int) -> Space:
    """The space of a problem, on the path that the ops would take."""
    planned = problem.as_planned()
    return Space(planned, choose(planned, spec, sms, forced)[0].path, spec, sms)


def print_checks(builder: Builder) -> None:
    if build.ELF in builder.checked:
        print("nvdisasm was not found: candidates were checked for a stack frame and shared memory only, not for")
        print("serialised products or a dropped setmaxnreg, which cost time but no bits")


# -- with one ---------------------------------------------------------------------------------------------------


def tune_all(args: argparse.Namespace, wanted: list[TuneProblem], builder: Builder, bar: Progress) -> int:
    """Tune every problem, keep each winner at once, print the table and write it."""
    if args.bundle is not None:
        default_cache().add_bundle(args.bundle)
    rates, rows, failed = ceilings.measure(rounds=10), [], []
    for problem in wanted:
        try:
            row, pick = tune_one(args, problem, builder, rates, bar)
        except (ValueError, RuntimeError) as error:
            failed.append(f"{problem.text}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            print(f"FAILED {failed[-1]}", file=sys.stderr, flush=True)
            if not device_works():
                break
            continue
        rows.append(row)
        print(row.line(), file=sys.stderr, flush=True)
        keep(args.keep, row, pick)
        written = write(rows, rates, args.out, budget_s=args.budget, seed=args.seed)  # a later problem may hang
        torch.cuda.empty_cache()
    print_table(rows)
    print_checks(builder)
    if rows:
        print("written:", written)
    for line in failed:
        print("FAILED", line)
    return 1 if failed else 0


def device_works() -> bool:
    try:
        torch.zeros(1, device="cuda").add_(1).item()
        return True
    except RuntimeError:
        print("the device is unusable after that: the remaining problems are left out", file=sys.stderr, flush=True)
        return False


def tune_one(
    args: argparse.Namespace, problem: TuneProblem, builder: Builder, rates: dict[str, float], bar: Progress
) -> tuple[Row, tuned.TunedPick]:
    """Search one problem, and time the best against the heuristics' pick on the settled card."""
    from .fitness import Fitness

    spec, sms, _ = device_arch(torch.cuda.current_device())
    space = space_of(problem, args.path, spec, sms)
    before = asdict(builder.counts)
    fitness = Fitness(problem, space, args.path, builder)
    task = bar.add_task(problem.text, total=args.budget, state="")
    result = evolve(
        space,
        fitness,
        space.seeds(args.first, rates),
        seed=args.seed,
        budget_s=args.budget,
        progress=lambda found: bar.update(task, completed=bar.tasks[task].elapsed, state=state_of(found)),
    )
    bar.update(task, completed=args.budget, state=state_of(result))
    finalists = [space.candidate(genome) for genome, _ in result.ranking[:FINALISTS]]
    final = fitness.final([candidate for candidate in finalists if candidate != fitness.incumbent])
    best, (us, base) = winner(fitness.incumbent, final, fitness.final)
    counts = {name: count - before[name] for name, count in asdict(builder.counts).items()}
    counts["rejected"] += len(fitness.rejected)
    for candidate, reason in fitness.rejected.items():
        print(f"rejected: {problem.text}: {candidate}: {reason}", file=sys.stderr)
    text = tuned.problem_class(space.problem, space.path)
    today = datetime.date.today().isoformat()
    pick = tuned.TunedPick(
        text, space.path, best.facts.config, best.group, best.ctas, round(us, 2), round(base, 2), today
    )
    row = Row(
        problem=problem.text,
        problem_class=text,
        path=space.path,
        heuristic=str(fitness.incumbent),
        heuristic_us=round(base, 2),
        tuned=str(best),
        tuned_us=round(us, 2),
        ratio=round(us / base, 4),
        kept=us / base <= GAIN,
        tried=result.scored,
        stopped=result.stopped,
        **counts,
    )
    return row, pick


def winner(
    incumbent: Candidate,
    final: dict[Candidate, tuple[float, float]],
    time: Callable[[Sequence[Candidate]], dict[Candidate, tuple[float, float]]],
) -> tuple[Candidate, tuple[float, float]]:
    """The best of the final, timed once more: picking a best picks its luck as well. The incumbent, if none gains."""
    if final:
        best = min(final, key=lambda candidate: final[candidate][0])
        us, base = time([best])[best]
        if us < base:
            return best, (us, base)
        return incumbent, (base, base)
    us, _ = time([incumbent])[incumbent]
    return incumbent, (us, us)


def state_of(result: Result) -> str:
    best = f"{result.best[1]:.3f} of the heuristics' time" if result.best else "none usable yet"
    return f"{result.scored} tried, {best}"


def keep(where: str, row: Row, pick: tuned.TunedPick) -> None:
    """Put a gain into the table that `where` names; a problem without one loses its older entry."""
    if where == "none":
        return
    card = torch.cuda.get_device_name()
    file = tuned.user_file(card) if where == "user" else tuned.shipped_file(card)
    tuned.keep(file, card, row.path, [pick] if row.kept else [], [row.problem_class])
