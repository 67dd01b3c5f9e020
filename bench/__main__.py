"""python -m bench: the table of the README, measured on this card.

Every row times ours and its peer in turns (see timing.py), through the public ops, with random normal bf16 operands
and a preallocated output. Writes bench/results/gemm-<card>.json.
"""

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table

from . import cases, record
from .timing import host_cost


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default="", help="run only the rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds of each case (default 60)")
    parser.add_argument("--out", default="bench/results", help="folder of the JSON file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU: a benchmark has nothing to measure here; python -m cute_kernels inspect works without one")
        return 1
    rows, failed = [], []
    for case in cases.all_cases():
        if args.only in case.name:
            try:
                row = case.measure(rounds=args.rounds)
            except Exception as error:  # a row that cannot be measured is a row that says so
                failed.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
            rows.append(row)
            print(row.line(), file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    host = {} if args.only else host_costs()
    table = Table("product", "ours, us", "peer", "us", "ratio", "at least", "TFLOP/s", "configuration")
    for row in rows:
        table.add_row(*row.cells())
    Console(width=170).print(table)
    for name, cost in host.items():
        print(f"host cost of one call, {name}: {cost:.1f} us")
    for line in failed:
        print("FAILED", line)
    if not args.only:
        print("written:", record.write(rows, host, args.out))
    return 1 if failed else 0


def host_costs() -> dict[str, float]:
    """Microseconds of host time of one eager call on a preallocated output, 64 x 64 operands."""
    from cute_kernels import gemm
    from sparse_collective import bsr_linear, random_bsr

    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    W = random_bsr((64, 64), (64, 64), density=1.0, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return {
        "gemm": host_cost(lambda: gemm(a, a, out=out)),
        "bsr_linear": host_cost(lambda: bsr_linear(a, W, out=out)),
        "torch.mm": host_cost(lambda: torch.mm(a, a, out=out)),
        "torch.add": host_cost(lambda: torch.add(a, a, out=out)),
    }


if __name__ == "__main__":
    sys.exit(main())
