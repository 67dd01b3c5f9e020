"""Several GPUs of one host: rows of sharded layers, each over what one GPU alone does of the same work.

`python -m bench distributed` starts one process for each GPU, with 1, 2, 4 and 8 of them, and writes
bench/results/<card>/distributed.json. Modules of MODULES give the rows: a function `rows()` that returns Rows.
"""

import argparse
import datetime
import functools
import importlib
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from . import record
from .timing import shuffled

MODULES = ["bench.cases_distributed", "bench.cases_distributed_attention", "bench.cases_distributed_experts"]
SLEEP_CYCLES = 20_000_000  # some 10 ms, in which the host queues a call, as a deep model does
WARM_S = 1.0
COLLECTIVE_S = 300  # that a collective waits: a rank may be compiling kernels


@dataclass(frozen=True)
class Row:
    """A measurement that all ranks make together.

    run(device): returns numbers and texts by name, the same on all ranks; the first rank's are recorded.
    ranks: numbers of ranks that it is for; empty: two and more.
    target: what one of the numbers must be, for a reader of the table: {"ratio": {2: 1.05}}.
    """

    name: str
    run: Callable[[torch.device], dict]
    ranks: Sequence[int] = ()
    target: dict | None = None


def timed(
    calls: dict[str, Callable[[], object]], rounds: int = 30, sleep: int = SLEEP_CYCLES, hot_ms: float = 0
) -> dict[str, float]:
    """Median milliseconds of each call; of every round the slowest rank's. Calls take turns.

    Before each call, or its repeats, the GPUs wait, so that the host's time is hidden; then they meet in a collective.

    hot_ms: a call is repeated for so long before it is timed, so that all are timed at the clock that they can keep. At
        its power limit a GPU lowers its clock for a few 100 ms, and calls that follow a pause, or shorter ones,
        would be timed at a higher one.
    """
    end = time.perf_counter() + WARM_S
    for call in calls.values():
        call()
    while not agree(time.perf_counter() > end):
        for call in calls.values():
            call()
    repeats = dict.fromkeys(calls, 0)
    if hot_ms:
        repeats = {name: math.ceil(hot_ms / ms) for name, ms in medians(calls, repeats, 1, sleep).items()}
    return medians(calls, repeats, rounds, sleep)


def medians(calls: dict[str, Callable], repeats: dict[str, int], rounds: int, sleep: int) -> dict[str, float]:
    """Median milliseconds of each warm call, after so many repeats of it; the same on all ranks."""
    meet = torch.zeros(1, device="cuda")
    pairs: dict[str, list] = {name: [] for name in calls}
    for turn in itertools.islice(shuffled(calls), rounds):
        for name, call in turn:
            torch.cuda._sleep(sleep)
            for _ in range(repeats[name]):
                call()
            dist.all_reduce(meet)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            pairs[name].append((start, stop))
        torch.cuda.synchronize()
    found = {}
    for name, events in pairs.items():
        times = torch.tensor([start.elapsed_time(stop) for start, stop in events], device="cuda")
        dist.all_reduce(times, dist.ReduceOp.MAX)
        found[name] = statistics.median(times.tolist())
    return found


def agree(ready: bool) -> bool:
    """True on every rank once it is true on one: ranks leave a loop in the same round."""
    flag = torch.tensor(int(ready), device="cuda")
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def all_rows() -> list[Row]:
    return list(itertools.chain.from_iterable(importlib.import_module(name).rows() for name in MODULES))


def no_multicast() -> None:
    """Keep NCCL and symmetric memory from NVLink multicast."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def worker(rank: int, world: int, address: str, names: Sequence[str], out: str, keep: Callable) -> None:
    """Measure rows as one rank. An error ends the other ranks, too: they may wait in a collective of the row.

    keep: called by the first rank with all rows so far, after each.
    """
    no_multicast()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=world, device_id=device,
        timeout=datetime.timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    found = []
    for row in all_rows():
        if row.name not in names:
            continue
        begin = time.perf_counter()
        torch.manual_seed(0)
        entry = {"name": row.name, "ranks": world, **row.run(device)}
        if row.target:
            entry["target"] = {name: limits.get(world) for name, limits in row.target.items()}
        found.append(entry)
        torch.cuda.empty_cache()
        if rank == 0:
            print(f"{line(entry)} [{time.perf_counter() - begin:.1f} s]", flush=True)
            Path(out).write_text(json.dumps(found))
            keep(found)
    dist.destroy_process_group()


def line(entry: dict) -> str:
    """One row for a reader."""
    rest = {name: value for name, value in entry.items() if name not in ("name", "ranks")}
    shown = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in rest.items()]
    return f"{entry['ranks']} ranks, {entry['name']}: " + ", ".join(shown)


def chosen(world: int, only: str) -> list[str]:
    """Names of the rows of so many ranks that contain `only`."""
    return [row.name for row in all_rows() if only in row.name and (world in row.ranks if row.ranks else world > 1)]


def measure(world: int, only: str, keep: Callable) -> list[dict]:
    """All rows with so many ranks; processes start again after a row that fails. keep: see worker."""
    found: list[dict] = []
    names = chosen(world, only)
    while names:
        with tempfile.TemporaryDirectory(prefix="cute-kernels-bench-") as folder:
            out = Path(folder, "rows.json")
            arguments = world, f"file://{folder}/meeting", names, str(out), functools.partial(keep, found)
            try:
                torch.multiprocessing.spawn(worker, args=arguments, nprocs=world, daemon=True)  # they end with this one
                error = ""
            except Exception as failure:
                error = str(failure).strip().splitlines()[-1][:500]
                print(failure, flush=True)
            done = json.loads(out.read_text()) if out.exists() else []
        if error and len(done) < len(names):
            done.append({"name": names[len(done)], "ranks": world, "error": error})
            print(line(done[-1]), flush=True)
        found += done
        names = names[len(done) :]
    return found


def run(args: argparse.Namespace) -> int:
    """Measure with each number of ranks, in processes of their own; 1 if a row failed."""
    if args.simulate:
        return simulated(args)
    count = torch.cuda.device_count()
    worlds = args.ranks or [n for n in (1, 2, 4, 8) if n <= count]
    if not worlds or max(worlds) > count:
        print(f"bench distributed: needs at least {max(worlds or [1])} CUDA GPUs, found {count}")
        return 2
    if not any(chosen(world, args.only) for world in worlds):
        print(f"bench distributed: no row of {worlds} ranks has {args.only!r} in its name")
        return 2
    rows: list[dict] = []
    before = earlier(args.out) if args.add else []
    keep = discard if args.only and not args.add else functools.partial(save, args.out, before)
    for world in worlds:
        rows += measure(world, args.only, functools.partial(keep, rows))
        if rows and (path := keep(rows)):
            print("written:", path)
    return 1 if any("error" in row for row in rows) else 0


def save(folder: Path, *parts: list[dict]) -> Path:
    """Write distributed.json with the rows of all parts, of which later ones replace those of the same name and number
    of ranks; after each row, so that a call that is cut loses only one."""
    where = record.environment() | {"gpus": torch.cuda.device_count()}
    rows: dict[tuple, dict] = {}
    for row in (row for part in parts for row in part):
        if "error" not in row or (row["ranks"], row["name"]) not in rows:  # a failure replaces no measurement
            rows[row["ranks"], row["name"]] = row
    data = {"suite": "distributed", "environment": where, "rows": sorted(rows.values(), key=lambda row: row["ranks"])}
    return record.save(folder, where["card"], "distributed", data)


def earlier(folder: Path) -> list[dict]:
    """Rows of the distributed.json that is there, which this commit measured with these versions; none without it."""
    here = record.environment()
    path = record.file_of(folder, here["card"], "distributed")
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    for name in ("card", "commit", *record.what_runs()):
        if data["environment"].get(name) != here[name]:
            raise SystemExit(f"bench distributed: --add: {path} has another {name}; pass another --out, or omit --add")
    return data["rows"]


def discard(*parts: list[dict]) -> None:
    """In place of `save`: write no file."""


def simulated(args: argparse.Namespace) -> int:
    """Print predictions from what was measured, of each card in args.out."""
    from .simulate import simulate

    paths = sorted(args.out.glob("*/distributed.json"))
    for path in paths:
        print(path.parent.name)
        simulate(path, args.simulate)
    if not paths:
        print(f"bench distributed: no distributed.json under {args.out}; --simulate predicts from what was measured")
    return 0 if paths else 2


def add_command(subparsers) -> None:
    """Add `distributed` to the subcommands of an argparse parser."""
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sub = subparsers.add_parser("distributed", help="sharded layers on several GPUs of one host", **options)
    sub.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 1, 2, 4, 8)")
    text = "predict context-parallel attention on so many GPUs from what was measured (bench/simulate.py)"
    sub.add_argument("--simulate", type=int, nargs="+", metavar="N", help=text)
    text = "rows whose name contains this; writes no file without --add"
    sub.add_argument("--only", default="", metavar="TEXT", help=text)
    text = "add rows to the file that this commit has written, in place of those of the same name and number of ranks"
    sub.add_argument("--add", action="store_true", help=text)
    sub.add_argument("--out", type=Path, default=record.RESULTS, metavar="FOLDER", help="folder of the results")
    sub.set_defaults(run=run)
