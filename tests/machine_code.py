"""Whether a change leaves the machine code as it was: a hash of every kernel that the catalogues list.

    python -m tests.machine_code --write          record the hashes, in tests/machine_code.txt; with --only, of those
    python -m tests.machine_code --add            record those of new kernels alone, and forget kernels that are gone
    python -m tests.machine_code [--only TEXT]    compile again, and list kernels whose code is none of those recorded

Hashes are of the instructions alone (the cubin's .text sections), so kernels may be renamed. They hold for one version
of the compiler, which the file names. No GPU is needed; all of it takes some 20 minutes on two cores.
"""

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

import attention  # noqa: F401 (importing it registers its families)
import sparse_collective  # noqa: F401
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import cubin_of
from cute_kernels.runtime.families import compile_kernel, families
from cute_kernels.runtime.parallel import in_parallel

RECORD = Path(__file__).with_suffix(".txt")
COMPILER = "nvidia-cutlass-dsl"


def hash_of(facts) -> str:
    """Of the instructions of the kernel of these facts."""
    return inspect.code_hash(cubin_of(compile_kernel(facts, keep_cubin=True).compiled))


def catalogue() -> dict:
    """name -> facts, of every kernel."""
    found = {}
    for family in families():
        for spec in ARCHS.values():
            for facts in family.catalogue(spec.name):
                found[f"{spec.target}: {family.name}: {family.title(facts)}"] = facts
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the hashes")
    parser.add_argument("--add", action="store_true", help="record the hashes of kernels whose names are new")
    parser.add_argument("--only", default="", metavar="TEXT", help="the kernels whose names have this in them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    args = parser.parse_args()
    named = {name: facts for name, facts in catalogue().items() if args.only in name}
    version = f"{COMPILER} {importlib.metadata.version(COMPILER)}"
    recorded = {}
    if not args.write or args.only:
        first, *lines = RECORD.read_text().splitlines()
        if first != version:
            print(f"{RECORD.name} was recorded with {first}, and this is {version}", file=sys.stderr)
            return 2
        recorded = {name: code for code, name in (line.split("  ", 1) for line in lines)}
    if args.add:
        named = {name: facts for name, facts in named.items() if name not in recorded}
    known, found, changed = set(recorded.values()), {}, 0
    numbered = list(named.items())
    for outcome in in_parallel(_hash_of_named, numbered, args.jobs):
        name = outcome.item[0]
        found[name] = outcome.value or outcome.error
        # A kernel whose name is not recorded may have had another one.
        if not (args.write or args.add) and (
            found[name] != recorded[name] if name in recorded else found[name] not in known
        ):
            changed += 1
            print(f"{'changed' if name in recorded else 'new, or changed'}: {name}: {found[name]}", flush=True)
    if args.write or args.add:
        found = recorded | found
        text = "".join(f"{found[name]}  {name}\n" for name in catalogue() if name in found)
        RECORD.write_text(f"{version}\n{text}")
    print(f"{len(found)} kernels, {changed} whose code is not recorded")
    return 1 if changed else 0


def _hash_of_named(item) -> str:
    return hash_of(item[1])


if __name__ == "__main__":
    sys.exit(main())
