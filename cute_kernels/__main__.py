"""python -m cute_kernels: look into the kernels, compile them ahead of time, look after the cache. No GPU needed.

    inspect    compile every kernel configuration and read its machine code; fails if one spills
    compile    write a bundle of compiled kernels for machines that should not compile
    cache      where compiled kernels are kept, how many, and --clear

Results go to stdout, progress and errors to stderr. Exit status: 0, 1 if a kernel fails, 2 for a wrong call.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import catalog
from .arch import ARCHS, arch_named
from .dtypes import NAMES, OPERANDS
from .runtime import keys
from .runtime.bundle import MANIFEST, BundleWriter
from .runtime.cache import KernelCache
from .runtime.compile import MissingCompiler, import_cutlass
from .runtime.inspect import MissingDisassembler, find_nvdisasm
from .runtime.parallel import Outcome, compile_object, in_parallel, inspect_kernel

COUNTED = ("hgmma", "hmma", "ldgsts", "ldsm", "utmaldg")
WIDTH = 180  # columns of a table in a file or a pipe; a terminal has its own
BUNDLE_BLOCKS = ((128, 128), (64, 64), (32, 32))
DTYPES = tuple(NAMES[dtype] for dtype in OPERANDS)
INDEX_DTYPES = ("int32", "int64")


# -- arguments -------------------------------------------------------------------------------------------------


def list_of(parse: Callable[[str], object]) -> Callable[[str], list]:
    """An argparse type: comma-separated values, without repetitions."""

    def read(text: str) -> list:
        try:
            return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def arch_target(name: str) -> str:
    return arch_named(name).target


def block_shape(text: str) -> tuple[int, int]:
    """ "128x64" -> (128, 64)"""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    sides = tuple(map(int, match.groups())) if match else ()
    if not sides or any(side == 0 or side % 16 for side in sides):
        raise ValueError(
            f"{text!r} is no block shape: write rows x columns, both multiples of 16, such as 128x64"
        )
    return sides


def one_of(what: str, known: Iterable[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"unknown {what} {text!r}; known are {', '.join(known)}")
        return text

    return read


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def parser() -> argparse.ArgumentParser:
    blocks = ",".join(f"{bm}x{bk}" for bm, bk in BUNDLE_BLOCKS)
    archs = list_of(arch_target)
    top = argparse.ArgumentParser(
        prog="python -m cute_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    jobs = argparse.ArgumentParser(add_help=False)
    jobs.add_argument(
        "--jobs", type=positive, default=os.cpu_count() or 1, help="processes (default: one a CPU)"
    )

    sub = commands.add_parser(
        "inspect", parents=[jobs], help="registers, spills, shared memory, instructions"
    )
    known = [spec.target for spec in ARCHS.values()]
    sub.add_argument("--arch", type=archs, default=known, metavar="A,B", help=f"default: {','.join(known)}")
    sub.add_argument("--quick", action="store_true", help="three kernels an architecture instead of all")
    sub.add_argument("--json", action="store_true", help="a JSON list on stdout, and nothing else there")
    sub.set_defaults(run=run_inspect)

    sub = commands.add_parser("compile", parents=[jobs], help="write an ahead-of-time bundle")
    sub.add_argument("--arch", type=archs, required=True, metavar="A,B", help="such as sm_90a,sm_89")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle's folder")
    dtypes = list_of(one_of("operand type", DTYPES))
    sub.add_argument("--dtype", type=dtypes, default=["bfloat16"], metavar="T,U", help="default: bfloat16")
    shapes = list_of(block_shape)
    sub.add_argument(
        "--block", type=shapes, default=BUNDLE_BLOCKS, metavar="BMxBK,...", help=f"default: {blocks}"
    )
    ops = list_of(one_of("operation", catalog.OPS))
    sub.add_argument(
        "--op", type=ops, default=catalog.OPS, metavar="OP,...", help=f"default: {','.join(catalog.OPS)}"
    )
    index = list_of(one_of("index type", INDEX_DTYPES))
    sub.add_argument(
        "--index", type=index, default=["int32"], metavar="T,U", help="of BSR indices; default: int32"
    )
    sub.set_defaults(run=run_compile)

    sub = commands.add_parser("cache", help="where compiled kernels are kept")
    sub.add_argument(
        "--clear", action="store_true", help="delete them all, of older sources and versions too"
    )
    sub.set_defaults(run=run_cache)
    return top


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def outcomes(what: str, function, items: list, jobs: int) -> dict[object, Outcome]:
    """Every item's outcome, in the items' order, with a bar on stderr while they come."""
    found = {}
    with progress_bar() as bar:
        task = bar.add_task(what, total=len(items))
        for outcome in in_parallel(function, items, jobs):
            found[outcome.item] = outcome
            bar.advance(task)
    return {item: found[item] for item in items}


# -- inspect ---------------------------------------------------------------------------------------------------


def row_of(outcome: Outcome) -> dict:
    """One kernel as JSON."""
    facts, report = outcome.item, outcome.value
    row = {
        "arch": facts.arch,
        "name": catalog.name_of(facts),
        "path": facts.path,
        "config": str(facts.config),
        "block": catalog.block_text(facts),
        "operands": catalog.operands_text(facts),
        "epilogue": catalog.epilogue_text(facts.epilogue),
    }
    if report is not None:
        r = report.resources
        row |= {name: getattr(r, name) for name in ("registers", "stack", "stl", "ldl", "static_smem")}
        row |= {
            "dynamic_smem": report.dynamic_smem,
            "smem_limit": facts.spec.smem,
            "instructions": r.instructions,
        }
        row |= {name: getattr(r, name) for name in COUNTED}
    problems = [outcome.error] if outcome.error else list(report.problems)
    return row | {"problems": problems, "seconds": round(outcome.seconds, 3)}


def table_of(arch: str, found: list[Outcome]) -> Table:
    spec = arch_named(arch)
    title = f"{arch}: {len(found)} kernels, {spec.smem} bytes of shared memory a block"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("path", "configuration", "block", "operands", "epilogue"):
        table.add_column(name, overflow="fold")
    for name in ("regs", "stack", "STL/LDL", "static+dynamic", *map(str.upper, COUNTED)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for outcome in found:
        facts, row = outcome.item, row_of(outcome)
        cells = [
            facts.path,
            catalog.config_text(facts.config),
            row["block"],
            row["operands"],
            row["epilogue"],
        ]
        if outcome.value is not None:
            cells += [row["registers"], row["stack"], f"{row['stl']}/{row['ldl']}"]
            cells += [f"{row['static_smem']}+{row['dynamic_smem']}", *(row[name] for name in COUNTED)]
        else:
            cells += [""] * (4 + len(COUNTED))
        verdict = Text("fails", "bold red") if row["problems"] else Text("ok", "green")
        table.add_row(*(Text(str(cell)) for cell in cells), verdict)
    return table


def run_inspect(args: argparse.Namespace) -> int:
    import_cutlass()
    find_nvdisasm()
    facts = [f for arch in args.arch for f in catalog.kernel_configurations(arch, args.quick)]
    start = time.perf_counter()
    found = outcomes("inspecting", inspect_kernel, facts, args.jobs)
    rows = [row_of(outcome) for outcome in found.values()]
    bad = [row for row in rows if row["problems"]]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 1 if bad else 0
    out = console()
    for arch in args.arch:
        out.print(table_of(arch, [outcome for f, outcome in found.items() if f.arch == arch]))
    out.print(
        "configuration: tile MxNxK/stages, split among warps (sm_80) or warpgroups (sm_90), c cluster, pp ping-pong. "
        "operands: majors of A,B,D and types.\nregs of an sm_90 kernel are those at its start; setmaxnreg then gives "
        "the producer's to the consumers.\n",
        style="dim",
    )
    for row in bad:
        out.print(Text(f"{row['arch']} {row['name']}", "bold"))
        for problem in row["problems"]:
            out.print(Text(f"    {problem}"))
    seconds = time.perf_counter() - start
    verdict = f"{len(bad)} of them should not be shipped" if bad else "none spills, all use the tensor cores"
    out.print(f"{len(rows)} kernels in {seconds:.0f} s: {verdict}", style="red" if bad else "green")
    return 1 if bad else 0


def console() -> Console:
    """Of stdout; a pipe or a file gets lines as wide as a table needs."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


# -- compile ---------------------------------------------------------------------------------------------------


def run_compile(args: argparse.Namespace) -> int:
    import_cutlass()
    if args.out.is_dir() and any(args.out.iterdir()) and not (args.out / MANIFEST).exists():
        if any(
            path.suffix != ".o" for path in args.out.iterdir()
        ):  # what an interrupted run leaves is .o alone
            raise ValueError(f"{args.out} holds files that are no bundle's; name a new or empty folder")
    facts = [
        f for a in args.arch for f in catalog.bundle_facts(a, args.dtype, args.block, args.op, args.index)
    ]
    start = time.perf_counter()
    writer = BundleWriter(args.out)
    named = [(f, keys.function_name(writer.key(f))) for f in facts]
    count, size, failures = Counter(), Counter(), []
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=len(named))
        for outcome in in_parallel(compile_object, named, args.jobs):
            found = outcome.item[0]
            if outcome.error:
                failures.append(f"{found.arch} {catalog.name_of(found)}\n    {outcome.error}")
            else:
                data, metadata = outcome.value
                writer.add(found, data, metadata)
                count[found.arch] += 1
                size[found.arch] += len(data)
            bar.advance(task)
    if failures:
        print(*failures, sep="\n", file=sys.stderr)
        print(
            f"{len(failures)} of {len(named)} kernels do not compile: no bundle was written", file=sys.stderr
        )
        return 1
    writer.finish()
    for arch in args.arch:
        print(f"{arch}: {count[arch]} kernels, {size[arch]:,} bytes")
    seconds = time.perf_counter() - start
    print(
        f"{args.out}: {count.total()} kernels, {size.total():,} bytes, compiled in {seconds:.0f} s for {keys.host_cpu()}"
    )
    print(f"To use it: cute_kernels.load_bundle({str(args.out)!r}), or set CUTE_KERNELS_BUNDLE={args.out}")
    return 0


# -- cache -----------------------------------------------------------------------------------------------------


def entries_in(folders: Iterable[Path]) -> tuple[int, int]:
    """(kernels, bytes of their files)"""
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    return sum(path.suffix == ".o" for path in files), sum(path.stat().st_size for path in files)


def run_cache(args: argparse.Namespace) -> int:
    cache = KernelCache(disk=True)
    if KernelCache().directory is None:
        print("the cache is off: CUTE_KERNELS_CACHE=0")
    current = keys.folder_name(keys.source_fingerprint(), keys.versions())
    root = cache.directory
    folders = [p for p in root.iterdir() if re.fullmatch("[0-9a-f]{16}", p.name)] if root.is_dir() else []
    kernels, size = entries_in(folders)
    usable, _ = entries_in(p for p in folders if p.name == current)
    print(f"{root}: {kernels} kernels, {size:,} bytes; {usable} of these sources and this compiler")
    if args.clear:
        cache.clear()
        print(f"cleared: {kernels} kernels, {size:,} bytes")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one command; what is wrong with the call or the installation is one line on stderr."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (MissingCompiler, MissingDisassembler, ValueError, OSError) as error:
        print(f"python -m cute_kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
