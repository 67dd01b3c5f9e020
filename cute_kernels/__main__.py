"""`cute-kernels`, or `python -m cute_kernels`: inspect kernels, compile them ahead of time, manage the cache.

    inspect    compile every kernel configuration and read its machine code; fails if one spills
    compile    write a bundle of compiled kernels for machines that should not compile
    wheel      pack a bundle into a wheel, which the library finds where it is installed
    cache      print the location and size of the kernel cache; --clear empties it

No command needs a GPU. Results go to stdout, progress and errors to stderr. The exit status is 0, 1 if a kernel
fails, or 2 if the arguments or the installation are wrong.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

try:
    import rich  # noqa: F401
except ModuleNotFoundError as error:
    print("cute-kernels: the command line requires rich; run pip install rich", file=sys.stderr)
    raise SystemExit(2) from error

from . import __version__
from .arch import ARCHS, MMA_M, arch_named
from .dtypes import NAMES, OPERANDS
from .progress import with_progress
from .report_tables import print_report, row_of
from .runtime import keys, record
from .runtime.bundle import BundleError, BundleWriter
from .runtime.cache import KernelCache
from .runtime.compile import MissingCompiler, import_cutlass
from .runtime.families import Request, bundle_facts, families, family_of, known_ops, load_all
from .runtime.inspect import MissingDisassembler, find_nvdisasm
from .runtime.linked import suffix_of
from .runtime.packages import PackageError, top_of
from .runtime.parallel import compile_library, inspect_kernel
from .runtime.wheel import write_wheel

DTYPES = tuple(NAMES[dtype] for dtype in OPERANDS)
INDEX_DTYPES = ("int32", "int64")
INTERRUPTED = 130  # exit status of shells for SIGINT
# Bytes per kernel, and seconds of one process on two cores, averaged over a bundle of 1,458 kernels for sm_90a.
KERNEL_BYTES, KERNEL_SECONDS = 52_000, 1.4
EPILOG = f"""\
The bundle has the kernels of common calls with contiguous, aligned tensors: GEMMs without an epilogue, with a bias, and
with a bias and an activation; dense, causal and variable-length attention, KV caches, and block masks without a
function. A program that runs with {record.VARIABLE}=FILE records all kernels that it uses; --calls FILE compiles these.
"""


# -- arguments -----------------------------------------------------------------------------------------------


def list_of(parse: Callable[[str], object]) -> Callable[[str], list]:
    """An argparse type: comma-separated values, without duplicates."""

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
    sides = (int(match[1]), int(match[2])) if match else (0, 0)
    if not all(sides) or any(side % MMA_M for side in sides):
        raise ValueError(f"{text!r} is not a block shape; use rows x columns in multiples of {MMA_M}, such as 128x64")
    return sides


def one_of(what: str, known: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"unknown {what} {text!r}; known are {', '.join(known)}")
        return text

    return read


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m cute_kernels", description=__doc__, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"cute-kernels {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    jobs = argparse.ArgumentParser(add_help=False)
    jobs.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="processes (default: one per CPU)")

    def listed(sub, name: str, parse, default: Iterable, **kwargs) -> None:
        text = ",".join(default)  # argparse parses a string default
        if text:
            kwargs |= {"default": text, "help": f"default: {text}"}
        sub.add_argument(name, type=list_of(parse), **kwargs)

    def optional(sub, name: str, dest: str, parse, default: Iterable) -> None:
        """Add an option that is an attribute of the arguments only if it is passed."""
        terms = {"dest": dest, "default": argparse.SUPPRESS, "metavar": "A,B", "help": f"default: {','.join(default)}"}
        sub.add_argument(name, type=list_of(parse), **terms)

    sub = commands.add_parser("inspect", parents=[jobs], help="registers, spills, shared memory, instructions")
    listed(sub, "--arch", arch_target, ARCHS, metavar="A,B")
    sub.add_argument("--quick", action="store_true", help="three kernels per architecture instead of all")
    listed(sub, "--family", one_of("family", [f.name for f in families()]), (), metavar="A,B", help="default: all")
    sub.add_argument("--json", action="store_true", help="print a JSON list to stdout, and nothing else")
    sub.set_defaults(run=run_inspect)

    about = "write an ahead-of-time bundle"
    sub = commands.add_parser("compile", parents=[jobs], formatter_class=raw, help=about, epilog=EPILOG)
    listed(
        sub, "--arch", arch_target, (), metavar="A,B", help="such as sm_90a,sm_89; default with --calls: as recorded"
    )
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle's folder")
    sub.add_argument("--calls", type=Path, metavar="FILE", help="recorded calls, instead of the following options")
    usual = Request("")
    blocks = [f"{bm}x{bk}" for bm, bk in usual.blocks]
    optional(sub, "--op", "ops", one_of("operation", known_ops()), known_ops())
    optional(sub, "--dtype", "dtypes", one_of("operand type", DTYPES), usual.dtypes)
    optional(sub, "--block", "blocks", block_shape, blocks)
    optional(sub, "--index", "index_dtypes", one_of("index type", INDEX_DTYPES), usual.index_dtypes)
    optional(sub, "--head-dim", "head_dims", positive, map(str, usual.head_dims))
    sub.set_defaults(run=run_compile, parser=sub)

    sub = commands.add_parser("wheel", help="pack a bundle into the wheel cute-kernels-prebuilt")
    sub.add_argument("bundle", type=Path, metavar="DIR", help="the bundle's folder")
    sub.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="the wheel's folder (default: dist)")
    sub.set_defaults(run=run_wheel)

    sub = commands.add_parser("cache", help="location and size of the kernel cache")
    sub.add_argument("--clear", action="store_true", help="delete all kernels, of older versions too")
    sub.set_defaults(run=run_cache)
    return top


# -- the commands --------------------------------------------------------------------------------------------


def run_inspect(args: argparse.Namespace) -> int:
    import_cutlass()
    find_nvdisasm()
    start = time.perf_counter()
    chosen = [family for family in families() if not args.family or family.name in args.family]
    facts = [f for arch in args.arch for family in chosen for f in family.catalogue(arch, args.quick)]
    finished = {outcome.item: outcome for outcome in with_progress("inspecting", inspect_kernel, facts, args.jobs)}
    outcomes = [finished[f] for f in facts]
    rows = [row_of(outcome) for outcome in outcomes]
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print_report(outcomes, time.perf_counter() - start)
    return 1 if any(row["problems"] for row in rows) else 0


def requested(args: argparse.Namespace) -> list:
    """Facts of the kernels of a bundle."""
    options = {name: value for name, value in vars(args).items() if name in ("ops", *vars(Request("")))}
    archs = options.pop("arch")
    if args.calls is not None:
        if options:
            args.parser.error(f"--calls names all kernels; leave out the options {', '.join(options)}")
        packages = {top_of(type(family).__module__) for family in families()}
        return [facts for facts in record.read(args.calls, packages) if facts.arch in (archs or [facts.arch])]
    if not archs:
        args.parser.error("the following arguments are required: --arch, or --calls")
    ops = options.pop("ops", known_ops())
    try:
        return [facts for arch in archs for facts in bundle_facts(ops, Request(arch, **options))]
    except ValueError as error:
        return args.parser.error(str(error))


def run_compile(args: argparse.Namespace) -> int:
    facts = requested(args)
    import_cutlass()
    start = time.perf_counter()
    writer = BundleWriter(args.out)
    jobs = max(1, min(args.jobs, len(facts)))
    megabytes, minutes = len(facts) * KERNEL_BYTES / 1e6, len(facts) * KERNEL_SECONDS / jobs / 60
    about = f"about {megabytes:.1f} MB and {minutes:.1f} minutes with {jobs} processes"
    print(f"compiling {len(facts)} kernels into {args.out}: {about}", file=sys.stderr, flush=True)
    named = [(f, keys.function_name(writer.key(f))) for f in facts]
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    failures, objects = [], False
    for outcome in with_progress("compiling", compile_library, named, args.jobs):
        kernel = outcome.item[0]
        if outcome.error:
            failures.append(f"{kernel.arch} {family_of(kernel).title(kernel)}\n    {outcome.error}")
            continue
        data, metadata = outcome.value
        writer.add(kernel, data, metadata)
        objects = objects or suffix_of(data) == ".o"
        count[kernel.arch] += 1
        size[kernel.arch] += len(data)
    if failures:
        print(*failures, sep="\n", file=sys.stderr)
        print(f"{len(failures)} of {len(named)} kernels failed to compile; no bundle was written", file=sys.stderr)
        return 1
    writer.finish()
    for arch in count:
        print(f"{arch}: {count[arch]} kernels, {size[arch]:,} bytes")
    seconds = f"{time.perf_counter() - start:.0f} s"
    print(f"{args.out}: {count.total()} kernels, {size.total():,} bytes, in {seconds}, for CPUs from {keys.host_cpu()}")
    if objects:
        print("Without a C compiler (cc, or $CC) kernels are not linked: the first to be loaded imports CuTe DSL.")
    print(f"To use it: cute_kernels.load_bundle({str(args.out)!r}), or CUTE_KERNELS_BUNDLE={args.out}")
    return 0


def run_wheel(args: argparse.Namespace) -> int:
    path = write_wheel(args.bundle, args.out, __version__)
    print(f"{path}: {path.stat().st_size:,} bytes; to use it: pip install {path}")
    return 0


def kernels_in(folders: Iterable[Path]) -> tuple[int, int]:
    """(kernels, bytes of all files)"""
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    return sum(path.suffix == ".o" for path in files), sum(path.stat().st_size for path in files)


def run_cache(args: argparse.Namespace) -> int:
    if KernelCache().directory is None:
        print("The cache is off in this environment: CUTE_KERNELS_CACHE=0.")
    cache = KernelCache(disk=True)
    root = cache.directory
    assert root is not None
    folders = [p for p in root.iterdir() if re.fullmatch("[0-9a-f]{16}", p.name)] if root.is_dir() else []
    kernels, size = kernels_in(folders)
    current = keys.folder_name(keys.source_fingerprint(), keys.versions())
    usable, _ = kernels_in(p for p in folders if p.name == current)
    print(f"{root}: {kernels} kernels, {size:,} bytes; {usable} fit these sources, this compiler and this CPU")
    if args.clear:
        cache.clear()
        print(f"cleared: {kernels} kernels, {size:,} bytes")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one command. Errors of the installation or a folder, and Ctrl-C, print one line to stderr."""
    try:
        load_all()
        args = parser().parse_args(argv)
        return args.run(args)
    except (MissingCompiler, MissingDisassembler, PackageError, OSError, record.RecordError, BundleError) as error:
        print(f"python -m cute_kernels: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def console() -> None:
    """Entry point of the console script `cute-kernels`."""
    status = main()
    if status == INTERRUPTED:  # skip Python's shutdown, which takes seconds
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    console()
