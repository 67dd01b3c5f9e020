"""Compare the machine code of two commits, kernel by kernel.

    python -m tests.machine_code BASE               the working tree (tracked files) and BASE
    python -m tests.machine_code BASE HEAD          two commits
    python -m tests.machine_code BASE --only "dense: 128x256" --arch sm_90a

Both commits' sources are unpacked into a temporary folder, and their catalogues are compiled there. What is compared is
a hash of a kernel's instructions (the cubin's .text sections), so a renamed kernel counts as unchanged. Hashes are kept
in the user's cache folder by the sources and the compiler's version. No GPU is needed. All kernels of a commit take
some 20 minutes on two cores. The exit status is 1 if a kernel changed or does not compile.
"""

import argparse
import hashlib
import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import platformdirs

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_kernels", "sparse_collective", "attention")
COMPILER = "nvidia-cutlass-dsl"


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], stdout=subprocess.PIPE, check=True).stdout


def catalogue() -> dict:
    """name -> facts of every kernel of the packages on sys.path."""
    import attention  # noqa: F401 (importing it registers its families)
    import sparse_collective  # noqa: F401
    from cute_kernels.arch import ARCHS
    from cute_kernels.runtime.families import families

    kernels = [(s.target, f, facts) for f in families() for s in ARCHS.values() for facts in f.catalogue(s.name)]
    return {f"{target}: {family.name}: {family.title(facts)}": facts for target, family, facts in kernels}


def hash_of(named: tuple) -> str:
    """Compile a kernel and hash its instructions."""
    from cute_kernels.runtime import inspect
    from cute_kernels.runtime.compile import cubin_of
    from cute_kernels.runtime.families import compile_kernel

    return inspect.code_hash(cubin_of(compile_kernel(named[1], keep_cubin=True).compiled))


def read(cache: Path) -> dict[str, str]:
    """name -> hash, from lines of a hash and a name."""
    lines = cache.read_text().splitlines() if cache.exists() else ()
    return {name: code for code, name in (line.split("  ", 1) for line in lines)}


def compile_missing(cache: Path, names: Path, only: str, archs: list[str], jobs: int) -> None:
    """Write the names of wanted kernels, and add missing hashes to a cache file. sys.path has one commit's sources."""
    from cute_kernels.runtime.parallel import in_parallel

    wanted = {n: f for n, f in catalogue().items() if only in n and (not archs or n.split(":")[0] in archs)}
    names.write_text("\n".join(wanted))
    known = read(cache)
    missing = [(name, facts) for name, facts in wanted.items() if name not in known]
    with cache.open("a") as file:
        for count, outcome in enumerate(in_parallel(hash_of, missing, jobs), start=1):
            if outcome.error:
                print(f"{outcome.item[0]}: {outcome.error}", file=sys.stderr, flush=True)
            else:
                file.write(f"{outcome.value}  {outcome.item[0]}\n")
                file.flush()
            print(f"\r{count} of {len(missing)} kernels", end="", file=sys.stderr, flush=True)


def hashes(commit: str, arguments: list[str]) -> dict[str, str]:
    """name -> hash of a commit's kernels, or "no code" where one does not compile."""
    trees = b"".join(git("rev-parse", f"{commit}:{package}") for package in PACKAGES)
    key = hashlib.sha256(trees + importlib.metadata.version(COMPILER).encode()).hexdigest()[:16]
    cache = platformdirs.user_cache_path("cute-kernels-machine-code") / f"{key}.txt"
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="machine-code-") as folder:
        tarfile.open(fileobj=io.BytesIO(git("archive", commit, *PACKAGES))).extractall(folder, filter="data")
        names = Path(folder, "names")
        command = [sys.executable, "-P", __file__, str(cache), str(names), "--compile", *arguments]
        path = os.pathsep.join([folder, str(ROOT)])  # the packages of the commit, and these tests
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=folder, check=True)
        known = read(cache)
        return {name: known.get(name, "no code") for name in names.read_text().splitlines()}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.machine_code", description=__doc__, formatter_class=raw)
    parser.add_argument("base")
    parser.add_argument("head", nargs="?", help="default: the working tree's tracked files")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose names contain TEXT")
    parser.add_argument("--arch", action="append", default=[], metavar="NAME", help="such as sm_90a; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)  # this process has a commit's sources
    args = parser.parse_args()
    if args.compile:
        from tests import machine_code  # worker processes do not import __main__

        machine_code.compile_missing(Path(args.base), Path(args.head), args.only, args.arch, args.jobs)
        return 0
    options = ["--only", args.only, "--jobs", str(args.jobs), *(o for name in args.arch for o in ("--arch", name))]
    head = args.head or git("stash", "create").decode().strip() or "HEAD"
    before, after = hashes(args.base, options), hashes(head, options)
    changed = [name for name in before.keys() & after.keys() if before[name] != after[name] or after[name] == "no code"]
    new = [name for name, code in after.items() if name not in before and code not in before.values()]
    gone = [name for name, code in before.items() if name not in after and code not in after.values()]
    for what, names in (("gone", gone), ("new", new), ("changed", sorted(changed))):
        print("".join(f"{what}: {name}\n" for name in names), end="")
    print(f"{len(after)} kernels: {len(changed)} changed, {len(new)} new, {len(gone)} gone")
    return int(bool(changed) or "no code" in after.values())


if __name__ == "__main__":
    sys.exit(main())
