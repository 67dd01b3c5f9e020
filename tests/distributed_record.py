"""Run the checks of several ranks on GPUs and record what happened: `python -m tests.distributed_record`.

Runs the checks of tests/ranks.py, and the documents' examples for several GPUs, with NCCL on 2, 4, ... GPUs of this
host; pytest runs them with gloo on the CPU.
Writes FOLDER/<card>/tests-distributed.json: the machine, versions, commit, and the outcome of each check. The exit
status is 0 only if all passed. With --one-gpu all ranks share the first GPU, and the file is
tests-distributed-one-gpu.json: kernels, streams and collectives are those of several GPUs, but NCCL's data pass through
sockets, and the ranks take turns. --one-gpu hosts (tests-distributed-one-gpu-hosts.json) is for what runs on several
hosts, where no rank reads the memory of another. With --gloo the checks run on the CPU, and no file is written.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.record import RESULTS, save

from . import test_documents as documents
from .ranks import Ranks

# Modules with a list CHECKS of functions check(device). A part that adds checks adds its module here.
MODULES = [
    "tests.attention.distributed_checks",
    "tests.attention.stage_checks",
    "tests.sparse_collective.checkpoint_checks",
    "tests.sparse_collective.distributed_checks",
    "tests.sparse_collective.expert_checks",
    "tests.sparse_collective.fsdp_checks",
    "tests.sparse_collective.peer_checks",
    "tests.sparse_collective.refused_checks",
]
if importlib.util.find_spec("transformers"):
    MODULES.append("tests.attention.transformers_checks")


def checks(only: str) -> list[str]:
    """Names, "module:function", of all checks whose name contains `only`."""
    names = [f"{name}:{check.__name__}" for name in MODULES for check in importlib.import_module(name).CHECKS]
    return [name for name in names if only in name]


def examples(only: str) -> dict[str, str]:
    """Title -> code of the documents' examples for several GPUs whose title contains `only`."""
    found = {f"{page.name}, block {i}": documents.BLOCK.findall(page.read_text())[i] for page, i in documents.BLOCKS}
    usable = {
        title: code for title, code in found.items()
        if "init_process_group" in code and ("transformers" not in code or importlib.util.find_spec("transformers"))
    }  # fmt: skip
    return {title: code for title, code in usable.items() if only in title}


def run(
    start: Callable[..., Ranks], names: list[str], codes: dict[str, str], seconds: float, found: dict[str, dict],
    keep: Callable,
) -> None:  # fmt: skip
    """Add the outcome of each check and example to `found`; keep() is called after each.

    start: makes the processes; takes Ranks' argument `group`.
    """

    def outcome(name: str, ranks: Ranks, *arguments: str) -> None:
        begin = time.perf_counter()
        errors = {rank: text for rank, text in enumerate(ranks.outcomes(*arguments, seconds=seconds)) if text}
        found[name] = {"ok": not errors, "seconds": round(time.perf_counter() - begin, 2)}
        if errors:
            found[name]["errors"] = {rank: error.splitlines()[-30:] for rank, error in errors.items()}
        print(f"{ranks.world} ranks, {name.removeprefix('tests.')}: {'ok' if not errors else 'FAILED'}", flush=True)
        for rank, error in errors.items():
            print(f"rank {rank}: {error}", flush=True)
        keep()

    with contextlib.closing(start()) as ranks:
        for name in names:
            outcome(name, ranks, name)
    for title, code in codes.items():
        with contextlib.closing(start(group=False)) as ranks, tempfile.TemporaryDirectory() as folder:
            outcome(title, ranks, f"{documents.__name__}:{documents.run_in_a_rank.__name__}", code, title, folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed_record", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 2, 4, 8)")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name contains this; writes no file")
    parser.add_argument("--seconds", type=float, default=240, help="that a check may take; the first one compiles")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: bench/results)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--one-gpu", nargs="?", default="", const="host", choices=["host", "hosts"],
        help="all ranks on the first GPU, as of one host (the default) or each of its own; 2 and 4 ranks if not given",
    )  # fmt: skip
    where.add_argument("--gloo", action="store_true", help="processes on the CPU; writes no file")
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    count = 8 if options.gloo or options.one_gpu and gpus else gpus
    worlds = options.ranks or [n for n in ((2, 4) if options.gloo or options.one_gpu else (2, 4, 8)) if n <= count]
    if not worlds or max(worlds) > count:
        wanted = 1 if options.one_gpu else max(worlds or [2])
        others = "--one-gpu runs at most 8 ranks on one, --gloo on the CPU"
        print(f"distributed_record: needs {wanted} CUDA GPUs, found {gpus}; {others}", file=sys.stderr)
        return 2
    names, codes = checks(options.only), examples(options.only)
    if options.one_gpu == "hosts":
        names = [name for name in names if "peer_checks" not in name]
    if not names and not codes:
        parser.error(f"argument --only: no check or example has {options.only!r} in its name")
    found: dict[int, dict[str, dict]] = {world: {} for world in worlds}
    about: dict = {}
    if not options.gloo and not options.only:
        from .gpu_record import machine

        used = 1 if options.one_gpu else gpus
        about = machine() | {"gpus": used, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}

    def counts() -> tuple[int, int]:
        """Checks that passed, and that failed."""
        outcomes = [outcome["ok"] for world in found.values() for outcome in world.values()]
        return sum(outcomes), len(outcomes) - sum(outcomes)

    def keep() -> Path | None:
        """Write the file, after each check, so that a run that is cut off loses only one."""
        if not about:
            return None
        passed, all_of_them = counts()[0], len(worlds) * (len(names) + len(codes))
        missing = all_of_them - sum(counts())
        data = {"machine": about, "ok": passed == all_of_them, "not_run": missing, "ranks": found}
        suite = {"": "", "host": "-one-gpu", "hosts": "-one-gpu-hosts"}[options.one_gpu]
        return save(options.out, about["card"], f"tests-distributed{suite}", data)

    for world in worlds:
        start = functools.partial(Ranks, world, "gloo" if options.gloo else "nccl", one_gpu=options.one_gpu)
        run(start, names, codes, options.seconds, found[world], keep)
    if path := keep():
        print("written:", path)
    passed, failed = counts()
    print(f"distributed_record: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
