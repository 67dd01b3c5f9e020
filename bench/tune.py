"""`python -m bench tune PROBLEM ...`: search legal configurations for one that beats the heuristics' choice.

    gemm 4096x4096x4096 NT bf16                 M x N x K; A and B are row-major (N) or transposes of row-major (T)
    bsr_matmul 8192x8192x8192 128x128 1/8       W (M, K) in blocks, and the share of them that is stored; b (K, N)
    bsr_linear 8192x8192x8288 512x112 16/74     W (M, K), x (N, K)

Two words may follow: the operands' dtype, bf16 or fp16, or operands>output as in bf16>fp32; and epilogue terms joined
by +: bias, residual, relu, gelu, gelu_tanh, silu. Quote each problem.

Candidates are those of the library, then random legal combinations of their fields. Each must compile without spills,
err at most twice as much as torch's FP32 result does against FP64, on an output filled with NaN, and give bitwise
identical results in three runs. Only then is it timed, interleaved with the heuristics' choice. The report is printed
and written to <out>/<card>/tune.json. The library does not read it: add a winner to the candidates of its family, and
the reason why it wins to the cost model. A kernel that hangs ends the process with status 3.
"""

import argparse
import contextlib
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random

import torch

from cute_kernels import gemm
from cute_kernels.arch import PATHS, ArchSpec
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.heuristics import candidates_for, choose, facts_for
from cute_kernels.matmul.plan import Plan, viewed
from cute_kernels.matmul.problem import Extents, Problem
from cute_kernels.operand import Layout, layout_of_tensor
from cute_kernels.runtime import keys
from cute_kernels.runtime.compile import Built, build_object, cubin_of, load_bytes
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.device import path as forced_path
from cute_kernels.runtime.families import compile_kernel, family_of, function_for, unsupported
from cute_kernels.runtime.parallel import in_parallel, report_of
from cute_kernels.testing import reference
from sparse_collective import bsr_linear, bsr_matmul, random_bsr
from tests import calls

from . import record, timing
from .table import grid, make_console

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORM = re.compile(
    r"((?P<op>gemm) (?P<shape>\d+x\d+x\d+)( (?P<layout>[NT]{2}))?"
    r"|(?P<sparse>bsr_matmul|bsr_linear) (?P<extents>\d+x\d+x\d+) (?P<block>\d+x\d+) (?P<share>\d+/[1-9]\d*))"
    r"( (?P<dtype>bf16|fp16)(>(?P<out>bf16|fp16|fp32))?)?( (?P<terms>[a-z_+]+))?"
)
ATTEMPTS = 500  # per candidate, to find a legal combination
GROUPS = (1, 2, 4, 8, 16, 32)  # widths of raster panels
HANG_S, HANG_STATUS = 20.0, 3
FINALISTS, ROUNDS, FINAL_ROUNDS = 4, 10, 100


@dataclass(frozen=True)
class Candidate:
    """A kernel, the width of its raster panels in cluster tiles, and the most CTAs."""

    facts: GemmFacts
    group: int
    ctas: int

    def __str__(self) -> str:
        values = ((f.name, getattr(self.facts.config, f.name), f.default) for f in fields(self.facts.config))
        settings = " ".join(f"{name}={value}" for name, value, default in values if value != default)
        return f"{self.facts.path} {self.facts.family} {settings} group={self.group} ctas={self.ctas}"


def parse(text: str) -> re.Match:
    """Return the match of FORM; the ops check what a text of this form asks for."""
    if found := FORM.fullmatch(text):
        return found
    raise argparse.ArgumentTypeError(f"{text!r} is not OP MxNxK [LAYOUT | BLOCK SHARE] [DTYPE] [TERMS]; see --help")


def operands(found: re.Match) -> tuple[calls.Call, torch.Tensor, float]:
    """Return a problem's call on random operands, its FP64 result, and the largest error that a candidate may make."""
    reference.seed(found.string)
    M, N, K = map(int, (found["shape"] or found["extents"]).split("x"))
    dtype, layout = DTYPES[found["dtype"] or "bf16"], (found["layout"] or "NN").lower()
    out_dtype, options = DTYPES[found["out"] or found["dtype"] or "bf16"], {"dtype": dtype, "device": DEVICE}
    b = reference.operand(K, N, "t" if found["sparse"] == "bsr_linear" else layout[1], **options)
    if found["op"]:
        a = reference.operand(M, K, layout[0], k=K, **options)
        op, args, dense = gemm, (a, b), (a, b)
    else:
        bm, bk = map(int, found["block"].split("x"))
        per_row = max(1, round(Fraction(found["share"]) * (K // bk)))
        W = random_bsr((M, K), (bm, bk), per_row=per_row, scale=(per_row * bk) ** -0.5, **options)
        op, args, dense = bsr_matmul, (W, b), (W.to_dense(), b)
        if found["sparse"] == "bsr_linear":
            op, args, dense = bsr_linear, (b.t(), W), (b.t(), dense[0].t())
    call = calls.product(op, args, dense, out_dtype=out_dtype, terms=found["terms"] or "", device=DEVICE)
    exact, by_torch = reference.exact_and_torch(*dense, out_dtype, **call.terms)
    return call, exact, 2 * float((by_torch.double() - exact).abs().max()) + 2.0**-20 * float(exact.abs().max())


def problem_of(call: calls.Call, facts: GemmFacts) -> Problem:
    """Return the problem that heuristics and legality see, for a call that was planned with `facts`."""
    a, b = call.args if call.op is not bsr_linear else call.args[::-1]
    N, vector = call.out.shape[0 if facts.transposed else 1], facts.element.vector
    layout_a = Layout("row", vector, vector) if facts.block else layout_of_tensor(a)
    known = {"density": a.density, "stats": a.stats} if facts.block else {}
    return Problem(
        Extents(a.shape[0], N, a.shape[1]), facts.dtype, facts.out_dtype,
        (layout_a, layout_of_tensor(b), layout_of_tensor(call.out)),
        facts.majors, facts.ranks, facts.epilogue, facts.block, facts.transposed, **known,
    )  # fmt: skip


def launcher(plan: Plan, call: calls.Call) -> Callable[[Callable, Candidate], object]:
    """Return a function of (kernel, candidate) that launches any kernel for the call, past the checks of the op."""
    a, b = call.args if call.op is not bsr_linear else call.args[::-1]
    operands = (a, b, call.out) if call.op is gemm else (b, call.out)
    rest = *operands, *(call.terms[name] for name in ("bias", "residual") if call.terms.get(name) is not None)
    rest = viewed(plan.views, rest) if plan.views else rest

    def launch(function: Callable, candidate: Candidate) -> object:
        facts, tables = candidate.facts, ()
        if facts.block:
            tables = a.crow_indices, *family_of(facts).pattern(facts, a, None, None), a.values
        return function(*tables, *rest, 1.0, 1.0, *facts.counts(candidate.group, candidate.ctas))

    return launch


def space(problem: Problem, path: str, spec: ArchSpec, sms: int, count: int, rng: Random) -> list[Candidate]:
    """Return the library's candidates, and as many random legal combinations of their fields as make up `count`."""

    def candidate(config) -> Candidate | None:
        facts = facts_for(problem, path, spec, config)
        if unsupported(facts) or family_of(facts).cost(config, problem, sms) == math.inf:
            return None
        return Candidate(facts, *family_of(facts).grid(config, problem, sms))

    known = [found for _, config in candidates_for(path, problem, spec) if (found := candidate(config))]
    values: dict[tuple, set[int]] = {}  # by type of configuration and field
    for config in (each.facts.config for each in known):
        for field in fields(config):
            if type(value := getattr(config, field.name)) is int:
                values.setdefault((type(config), field.name), set()).add(value)
    for found in values.values():  # and those half-way between two
        ordered = sorted(found)
        found.update((low + high) // 2 for low, high in zip(ordered, ordered[1:], strict=False))
    result = dict.fromkeys(known)
    for _ in range(ATTEMPTS * count):
        if len(result) >= count:
            break
        config = rng.choice(known).facts.config
        names = [name for kind, name in values if kind is type(config)]
        names = rng.sample(names, min(len(names), rng.randint(1, 4)))
        new = candidate(replace(config, **{name: rng.choice(sorted(values[type(config), name])) for name in names}))
        if new:
            result[replace(new, group=rng.choice(GROUPS)) if config.panels and rng.random() < 0.2 else new] = None
    return list(result)


def name_of(facts: GemmFacts) -> str:
    return keys.function_name(keys.entry_key(facts, keys.source_fingerprint(), keys.versions()))


def compile_candidate(facts: GemmFacts) -> tuple[bytes, list[str]]:
    """Return the object file of a kernel, and what is wrong with its machine code: spills, missing instructions."""
    problems = []

    def build() -> Built:
        built = compile_kernel(facts, keep_cubin=True)
        problems.extend(report_of(facts, cubin_of(built.compiled), int(built.metadata["smem"])).problems)
        return built

    return build_object(build, name_of(facts))[0], problems


def compile_all(wanted: Iterable[GemmFacts], jobs: int) -> tuple[dict[GemmFacts, Callable], dict[GemmFacts, str]]:
    """Return the functions of sound kernels, and the reasons against the others."""
    functions, reasons = {}, {}
    for outcome in in_parallel(compile_candidate, dict.fromkeys(wanted), jobs):
        data, problems = outcome.value or (b"", [outcome.error])
        if problems:
            reasons[outcome.item] = "; ".join(problems)
        else:
            functions[outcome.item] = load_bytes(data, name_of(outcome.item))
    return functions, reasons


@contextlib.contextmanager
def watched(what: str, seconds: float = HANG_S) -> Iterator[None]:
    """End the process with status 3 if the block takes longer than `seconds`: CUDA would wait forever."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            print(f"\nhung for {seconds:.0f} s, giving up: {what}", file=sys.stderr, flush=True)
            os._exit(HANG_STATUS)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def wrong(run: Callable, out: torch.Tensor, exact: torch.Tensor, bound: float) -> str:
    """Return why a kernel's result cannot be used, "" if it can. Raises where a launch leaves the device unusable."""
    first = None
    for number in range(3):
        out.fill_(math.nan)
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:
            torch.zeros(1, device=DEVICE).item()  # raises if the CUDA context is lost
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        first = out.clone() if first is None else first
        if not torch.equal(calls.bits([out]), calls.bits([first])):
            return f"run {number + 1} differs from the first"
    error = (first.double() - exact).abs()
    if not bool((error <= bound).all()):  # a NaN compares false
        return f"errs by {float(error.nan_to_num(math.inf).max()):.3g}, above {bound:.3g}"
    return ""


def medians(runs: dict[Candidate, Callable], wanted: Iterable[Candidate], rounds: int) -> dict[Candidate, float]:
    """Return the median time of each candidate in microseconds, fastest first, all of them interleaved."""
    us = timing.interleaved({each: runs[each] for each in wanted}, rounds=rounds)
    return dict(sorted(((each, timing.median(us[each])) for each in us), key=lambda item: item[1]))


def tune(found: re.Match, count: int, seed: int, jobs: int, path: str | None = None) -> dict:
    """Search one problem and return its row of the report; times in microseconds, `ratio` is best over heuristic.

    Raises RuntimeError if the heuristics' own choice is wrong.
    """
    call, exact, bound = operands(found)
    with forced_path(path) if path else contextlib.nullcontext():
        plan = call.plan()
    (spec, sms), problem = device_arch(call.out.get_device()), problem_of(call, plan.facts)
    incumbent = Candidate(*choose(problem, spec, sms, path)[:3])
    candidates = space(problem, plan.facts.path, spec, sms, count, Random(seed))
    functions, reasons = compile_all((each.facts for each in candidates if each.facts != incumbent.facts), jobs)
    functions[incumbent.facts] = function_for(incumbent.facts)
    launch, runs, rejected = launcher(plan, call), {}, {}
    for each in dict.fromkeys([incumbent, *candidates]):
        if each.facts not in functions:
            rejected[str(each)] = reasons[each.facts]
            continue
        run = partial(launch, functions[each.facts], each)
        with watched(f"{found.string}: {each}"):
            if reason := wrong(run, call.out, exact, bound):
                rejected[str(each)] = reason
            else:
                runs[each] = run
    if incumbent not in runs:
        raise RuntimeError(f"the heuristics' choice is wrong: {rejected[str(incumbent)]}")
    ranking = medians(runs, runs, ROUNDS)
    final = medians(runs, dict.fromkeys([incumbent, *list(ranking)[:FINALISTS]]), FINAL_ROUNDS)
    best, base = next(iter(final)), final[incumbent]
    row = {"problem": found.string, "heuristic": str(incumbent), "heuristic_us": round(base, 2), "best": str(best)}
    row |= {"best_us": round(final[best], 2), "ratio": round(final[best] / base, 4)}
    return row | {"us": {str(each): round(us, 2) for each, us in ranking.items()}, "rejected": rejected}


def add_command(subparsers) -> None:
    """Add `tune` to the subcommands of python -m bench; `args.run(args)` runs it and returns the exit status."""
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = subparsers.add_parser("tune", help="search the configurations for a problem", **options)
    parser.add_argument("problems", nargs="+", type=parse, metavar="PROBLEM")
    parser.add_argument("--count", type=int, default=64, metavar="N", help="candidates of each problem (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random combinations")
    parser.add_argument("--path", choices=PATHS, help="force a family of kernels")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes (default: CPUs)")
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of the results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune, print and write the report; 1 without a GPU or where a problem failed."""
    if not torch.cuda.is_available():
        print("tune: no CUDA GPU: candidates cannot be timed here", file=sys.stderr)
        return 1
    rows, failed, where = [], [], record.environment()
    table = grid(["problem", "heuristics' choice", "best"], ["µs", "best µs", "ratio", "timed", "rejected"])
    for found in args.problems:
        try:
            rows.append(row := tune(found, args.count, args.seed, args.jobs, args.path))
        except (TypeError, ValueError, RuntimeError) as error:
            failed.append(f"FAILED {found.string}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        numbers = row["heuristic_us"], row["best_us"], row["ratio"], len(row["us"]), len(row["rejected"])
        table.add_row(row["problem"], row["heuristic"], row["best"], *map(str, numbers))
        report = {"suite": "tune", "environment": where, "count": args.count, "seed": args.seed, "rows": rows}
        print("written:", record.save(args.out, where["card"], "tune", report))  # a later problem may hang
    make_console(200).print(table)
    print(*failed, sep="\n", end="\n" if failed else "")
    return 1 if failed else 0
