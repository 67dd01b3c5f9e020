"""The tables gate: whether the tuned tables that ship with the package were measured on these kernels.

Needs no GPU. A table of other sources is ignored by the ops, which then take the heuristics' pick: slower perhaps,
never wrong. So it does not fail the gate; the gate is skipped, and says which table and what to run.
"""

from pathlib import Path

from cute_kernels import tuned

from .gate import PASSED, Gate, Skip

NAME = "tables"


def check(quick: bool = False, folder: Path = tuned.SHIPPED) -> Gate:
    """Compare every table's fingerprints with those of the sources; `quick` changes nothing."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise Skip("no tuned tables are shipped: python -m bench tune --standard --keep package")
    stale, entries = [], 0
    for file in files:
        table = tuned.read(file)
        old = [
            key for key, found in table.fingerprints.items() if found != tuned.kernel_fingerprint(*key.split(" ", 1))
        ]
        stale += [f"{file.name} ({path})" for path in old]
        entries += len(table.entries)
    if stale:
        do = "python -m bench tune --renew, or where machine code differs --standard --keep package"
        raise Skip(f"{', '.join(stale)}: measured on other sources, and so not used; {do}")
    return Gate(NAME, PASSED, f"{entries} entries of {len(files)} cards, measured on these kernels")
