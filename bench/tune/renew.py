"""The shipped tables where sources have changed: what was measured on the same machine code still counts.

A table's fingerprints are of sources, which can be compared in a call; machine code cannot. So a change of sources that
leaves the kernels as they are makes a table stale, and `python -m bench tune --renew` compares the code, without a GPU.
"""

from pathlib import Path

from cute_kernels import tuned
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.choose import facts_for
from cute_kernels.runtime.compile import cubin_of
from cute_kernels.runtime.families import compile_kernel
from cute_kernels.runtime.inspect import code_hash

from .problems import parse


def code_of(pick: tuned.TunedPick) -> str:
    """What TunedPick.code would be of today's sources. Raises what compiling raises."""
    facts = facts_for(parse(pick.measured).as_planned(), pick.path, ARCHS[pick.path], pick.config)
    return code_hash(cubin_of(compile_kernel(facts, keep_cubin=True).compiled))


def same(pick: tuned.TunedPick) -> bool:
    """Whether an entry is of the class that its problem belongs to today, and of the same machine code."""
    planned = parse(pick.measured).as_planned()
    return tuned.problem_class(planned, pick.path) == pick.problem and code_of(pick) == pick.code


def renew(file: Path) -> tuple[int, list[str]]:
    """Write a table with the fingerprints of today's sources; (entries left, what was dropped since its code differs).

    Entries of families whose fingerprints are right are not compiled. Raises as tuned.read.
    """
    table, dropped = tuned.read(file), []
    for key, pick in list(table.entries.items()):
        if not table.fits(pick) and not same(pick):
            dropped.append(f"{pick.path}: {pick.measured}")
            del table.entries[key]
    table.stamp()
    tuned.write(file, table)
    return len(table.entries), dropped


def renew_all(folder: Path = tuned.SHIPPED) -> int:
    """Renew the tables of a folder and tell; the exit status of the command, 0."""
    for file in sorted(folder.glob("*.json")):
        left, dropped = renew(file)
        print(f"{file.name}: {left} entries were measured on today's machine code")
        for text in dropped:
            print(f"  dropped, its machine code differs: {text}")
    return 0
