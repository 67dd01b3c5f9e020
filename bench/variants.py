"""`python -m bench variants`: the configurations of attention's backward beside each other, in turns.

What is chosen comes first in the tables of attention/backward/choose.py; this tells whether it is the fastest. Every
result is compared with the reference first. Needs a GPU.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from unittest.mock import patch

import torch

from attention.backward import choose, eager
from cute_kernels.runtime.call_plan import PlanCache

from . import timing
from .cases_attention_backward import (
    DENSITY,
    DOCUMENT_HEADS,
    DOCUMENTS,
    FIRST,
    SPARSE,
    TrainingProblem,
    dense_problem,
    named,
    operands,
    ours_of,
    sparse_name,
    uniform,
)
from .rows import reason

MOST = 6  # configurations of a row


def problems() -> Iterator[tuple[str, TrainingProblem, torch.Tensor | None]]:
    """(name, problem, blocks or None) of each row."""
    dense = FIRST, (2, 8192, 32, 64), (2, 8192, 16, 96), (2, 8192, 8, 192), (2, 8192, 8, 256)
    for shape in dense:
        for causal in (False, True):
            yield named(shape, causal), dense_problem(shape, causal), None
    yield f"in one order {named(FIRST, True)}", dense_problem(FIRST, True, deterministic=True), None
    heads, dim = DOCUMENT_HEADS
    yield "packed", dense_problem((1, sum(DOCUMENTS), heads, dim), True, lengths=DOCUMENTS), None
    B, S, H, D = SPARSE
    for side in (128, 64):
        blocks = uniform(S // side, S // side, round(DENSITY * S / side))
        kept = blocks.double().mean().item()
        op = "block_sparse_attention"
        yield sparse_name(side), TrainingProblem(op, B, S, S, H, H, D, block=(side, side), density=kept), blocks


def calls_of(problem: TrainingProblem, blocks: torch.Tensor | None, device: str = "cuda") -> dict[str, Callable | str]:
    """configuration -> the call with it, or why there is none."""
    x, found = operands(problem, blocks, device), {}
    for place in range(MOST):
        cache, picked = PlanCache(operands=3), []

        def pick(facts, place=place, picked=picked):
            for one in islice(choose.candidates(facts), place, None):
                picked.append(one)
                return one
            raise LookupError

        @contextlib.contextmanager
        def within(pick=pick, cache=cache) -> Iterator[None]:
            with patch.object(eager, "pick", pick), patch.object(eager, "_PLANS", cache):
                yield

        try:
            call = ours_of(x, deterministic=problem.deterministic, within=within)[0]
        except LookupError:
            break
        except Exception as error:
            call = reason(error)
        found[f"{picked[0].path} {picked[0].config}" if picked else f"number {place}"] = call
    return found


def run(args: argparse.Namespace) -> int:
    """The command; 1 if a configuration failed."""
    if not torch.cuda.is_available():
        print("no CUDA GPU: nothing can be timed here")
        return 0
    failed = 0
    for name, problem, blocks in problems():
        if args.only not in name:
            continue
        calls = calls_of(problem, blocks)
        right = {config: call for config, call in calls.items() if not isinstance(call, str)}
        times = timing.interleaved(right, warm_s=0.5, rounds=args.rounds) if right else {}
        failed += len(calls) - len(right)
        for place, (config, call) in enumerate(calls.items()):
            mark, us = " *"[place == 0], timing.median(times[config]) if config in times else None
            figures = call if us is None else f"{us:9.1f} us {problem.flops / us / 1e6:6.0f} TFLOP/s"
            print(f"{mark} {name:42s} {config:60s} {figures}", flush=True)
    return int(failed > 0)


def add_command(subparsers) -> None:
    """Add `variants` to the subcommands of an argparse parser."""
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sub = subparsers.add_parser("variants", help="configurations of attention's backward in turns", **options)
    sub.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this")
    sub.add_argument("--rounds", type=int, default=20, metavar="N", help="timed rounds a row (default 20)")
    sub.set_defaults(run=run)
