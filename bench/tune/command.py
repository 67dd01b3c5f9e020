"""python -m bench tune: search the configurations for a problem, and keep the winner where the ops look for it."""

import argparse
import datetime
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels import tuned
from cute_kernels.arch import PATHS
from cute_kernels.matmul.choose import choose
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.inspect import MissingDisassembler

from .. import ceilings, record
from ..table import grid, make_console
from . import problems
from .build import Builder
from .problems import STANDARD, TuneProblem
from .renew import renew_all
from .search import Result, evolve
from .space import Candidate, Space

FINALISTS = 3
GAIN = 0.99  # of the heuristics' time: a pick that gains less is noise, and is not kept
SLOW = 1 / 1.1  # below this ratio the heuristics' pick is more than 10 % slower

DESCRIPTION = """\
Searches the configurations and launches of one kernel, from the library's own candidates on, until the budget of each
problem is spent or nothing better is found. Candidates must compile without spills, give right and reproducible
results, and then race the heuristics' pick in turns. Winners go into a table that gemm, bsr_matmul and bsr_linear
consult (cute_kernels.tuned). A kernel that hangs ends the process with status 3; problems that were done are kept.
"""


def add_command(subparsers) -> None:
    """Add `tune` to the subcommands of python -m bench; `args.run(args)` runs it and returns the exit status."""
    options = {"description": DESCRIPTION, "epilog": problems.__doc__.partition("\n\n")[2]}
    options["formatter_class"] = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser("tune", help="search the configurations for a problem", **options)
    parser.add_argument("--problem", action="append", type=_problem, default=[], metavar="TEXT", help="see below")
    parser.add_argument("--standard", action="store_true", help=f"the {len(STANDARD)} standard problems")
    parser.add_argument("--budget", type=_seconds, default=120.0, metavar="TIME", help="each problem's; 120s, 2m")
    parser.add_argument("--path", choices=PATHS, help="force a family of kernels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes (default: CPUs)")
    parser.add_argument("--first", type=int, default=32, metavar="N", help="candidates to begin with (default 32)")
    text = "where winners go: the user's cache folder, this package's own tables, nowhere"
    parser.add_argument("--keep", choices=("user", "package", "none"), default="user", help=text)
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of the results")
    text = "search nothing; keep what this package's tables hold of kernels whose machine code is as measured (no GPU)"
    parser.add_argument("--renew", action="store_true", help=text)
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
    """Tune; 0, or 1 without a GPU or where a problem could not be tuned, 2 without a problem."""
    if args.renew and (args.problem or args.standard):
        print("tune: --renew searches nothing; it goes with neither --problem nor --standard", file=sys.stderr)
        return 2
    if args.renew:
        return renew_all()
    wanted = list(dict.fromkeys([*args.problem, *(problems.parse(text) for text in STANDARD if args.standard)]))
    if not wanted:
        print("tune: name a problem with --problem, or --standard", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("tune: no CUDA GPU: candidates cannot be timed here", file=sys.stderr)
        return 1
    try:
        builder = Builder(args.jobs)
    except MissingDisassembler as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            return tune_all(args, wanted, builder, bar)
    finally:
        builder.close()


def tune_all(args: argparse.Namespace, wanted: list[TuneProblem], builder: Builder, bar: Progress) -> int:
    """Tune every problem, write what is known after each, and print the table."""
    from .fitness import device_works

    rates, rows, failed, written = ceilings.measure(rounds=10), [], [], None
    for problem in wanted:
        try:
            rows.append(tune_one(args, problem, builder, bar))
        except (ValueError, RuntimeError) as error:
            failed.append(f"{problem.text}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            print(f"FAILED {failed[-1]}", file=sys.stderr, flush=True)
            if not device_works():
                print("the device is unusable after that: the remaining problems are left out", file=sys.stderr)
                break
            continue
        us, ratio = (rows[-1][name] for name in ("tuned_us", "ratio"))
        print(f"{problem.text}: {us:.1f} us, {ratio:.3f} of the heuristics' pick", file=sys.stderr, flush=True)
        written = write(rows, rates, args)  # a later problem may hang
        torch.cuda.empty_cache()
    print_table(rows)
    if written:
        print("written:", written)
    for line in failed:
        print("FAILED", line)
    return 1 if failed else 0


def tune_one(args: argparse.Namespace, problem: TuneProblem, builder: Builder, bar: Progress) -> dict:
    """Search one problem, time the best against the heuristics' pick on the settled card, and keep a gain.

    Returns the problem's row of the result file. Times in microseconds; `ratio` is tuned over heuristic.
    """
    from .fitness import Fitness

    spec, sms, card = device_arch(torch.cuda.current_device())
    planned = problem.as_planned()
    space = Space(planned, choose(planned, spec, sms, args.path)[0].path, spec, sms)
    compiled, rejected = builder.compiled, len(builder.reasons)
    fitness = Fitness(problem, space, builder)
    task = bar.add_task(problem.text, total=args.budget, state="")

    def show(found: Result) -> None:
        best = f"{found.ranking[0][1]:.3f} of the heuristics' time" if found.ranking else "none usable yet"
        bar.update(task, completed=bar.tasks[task].elapsed, state=f"{found.scored} tried, {best}")

    seeds = space.seeds(args.first, Random(args.seed))
    result = evolve(seeds, fitness, space.vary, seed=args.seed, budget_s=args.budget, progress=show)
    finalists = [candidate for candidate, _ in result.ranking[:FINALISTS] if candidate != fitness.incumbent]
    best, us, base = winner(fitness.incumbent, finalists, fitness.final)
    for candidate, reason in fitness.rejected.items():
        print(f"rejected: {problem.text}: {candidate}: {reason}", file=sys.stderr)
    text, today, kept = tuned.problem_class(planned, space.path), datetime.date.today().isoformat(), us / base <= GAIN
    us, base = round(us, 2), round(base, 2)
    if args.keep != "none":  # a problem without a gain loses its older entry
        kernel, picks = (best.facts.family, best.facts.config, best.group, best.ctas), []
        if kept:
            code = builder.codes[best.facts]
            picks = [tuned.TunedPick(text, space.path, *kernel, us, base, today, problem.text, code)]
        file = tuned.user_file(card) if args.keep == "user" else tuned.shipped_file(card)
        tuned.keep(file, card, space.path, picks, [text])
    row = {"problem": problem.text, "problem_class": text, "path": space.path}
    row |= {"heuristic": str(fitness.incumbent), "heuristic_us": base, "tuned": str(best), "tuned_us": us}
    row |= {"ratio": round(us / base, 4), "kept": kept, "slow": us / base < SLOW, "tried": result.scored}
    rejected = len(builder.reasons) - rejected + len(fitness.rejected)
    return row | {"compiled": builder.compiled - compiled, "rejected": rejected, "stopped": result.stopped}


def winner(
    incumbent: Candidate, finalists: Sequence[Candidate], time: Callable[[Sequence[Candidate]], dict]
) -> tuple[Candidate, float, float]:
    """(candidate, its time, the incumbent's) of the best finalist, or the incumbent if none gains.

    The best is timed once more: who is picked as the best of several was lucky, too.
    """
    final = time(finalists) if finalists else {}
    best = min(final, key=lambda candidate: final[candidate][0], default=incumbent)
    us, base = time([best])[best]
    return (best, us, base) if us < base else (incumbent, base, base)


def print_table(rows: list[dict]) -> None:
    """A line for each problem; those where the heuristics' pick is more than 10 % slower are marked."""
    numbers = ["µs", "tuned µs", "ratio", "tried/compiled/rejected"]
    table = grid(["problem", "heuristic pick", "tuned pick"], [*numbers, ""])
    for row in rows:
        mark = "heuristic > 10 % slower" if row["slow"] else "kept" if row["kept"] else "no gain"
        numbers = f"{row['heuristic_us']:.1f}", f"{row['tuned_us']:.1f}", f"{row['ratio']:.3f}"
        counts = f"{row['tried']}/{row['compiled']}/{row['rejected']}"
        table.add_row(row["problem"], row["heuristic"], row["tuned"], *numbers, counts, mark)
    make_console(200).print(table)


def write(rows: list[dict], rates: dict[str, float], args: argparse.Namespace) -> Path:
    """Write <out>/<card>/tune.json, in place of an earlier run's."""
    where = record.environment()
    how = {"suite": "tune", "environment": where, "ceilings": rates, "budget_s": args.budget, "seed": args.seed}
    return record.save(args.out, where["card"], "tune", how | {"rows": rows})
