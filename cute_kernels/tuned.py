"""Measured picks: what a tuner found to be faster than the heuristics' choice, on one card, for one class of problems.

A table is a JSON file of one card. Two are looked into: the user's, `tuned/<card>.json` in the cache's folder
(what `python -m bench tune` writes), then the one that ships in this package's folder `tuned`. An entry counts only
while the kernels it was measured with are those of this process: each table carries a fingerprint of the sources
for each path. An entry also has a hash of its kernel's machine code: where sources changed and the code did not,
`python -m bench tune --renew` writes the fingerprint anew.

    CUTE_KERNELS_TUNED=0     look into neither

Tables are read at the first call that could use one, once per process; `forget` makes the next one read them again.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arch import PATHS
from .matmul.problem import STATS_ROWS, listed_at_random
from .runtime.cache import cache_directory
from .runtime.disk_store import write_atomically
from .runtime.families import family_named
from .runtime.packages import folder_of
from .tile.element import BYTES

if TYPE_CHECKING:
    from .matmul.problem import Problem

LOG = logging.getLogger("cute_kernels.tuned")
ENABLED_VARIABLE = "CUTE_KERNELS_TUNED"
SHIPPED = Path(__file__).with_suffix("")  # the folder of the package's own tables
FORMAT = 3


@dataclass(frozen=True)
class TunedPick:
    """One entry of a table: `config`, with panels of `group` cluster tiles on at most `ctas` CTAs, takes `us`.

    `heuristic_us` is what the heuristics' own pick took, timed in turns with it. Both in microseconds. `measured` is
    the problem of the class that was timed, as `python -m bench tune --problem` takes it, and `code` a hash of the
    kernel's instructions for it (runtime.inspect.code_hash).
    """

    problem: str  # problem_class()
    path: str
    family: str  # of kernels
    config: Any  # the family's
    group: int
    ctas: int
    us: float
    heuristic_us: float
    date: str  # ISO 8601, of the measurement
    measured: str
    code: str


@dataclass
class Table:
    """The contents of one file.

    `fingerprints` maps a path and a family, as "sm_90 dense", to the kernel_fingerprint of when it was measured.
    """

    card: str
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    entries: dict[tuple[str, str], TunedPick] = dataclasses.field(default_factory=dict)  # (path, problem class)

    def fits(self, pick: TunedPick) -> bool:
        """Whether an entry was measured with kernels of today's sources."""
        return self.fingerprints.get(key_of(pick.path, pick.family)) == kernel_fingerprint(pick.path, pick.family)

    def stamp(self) -> None:
        """Say of all entries, and of nothing else, that they are of today's sources."""
        used = {(pick.path, pick.family) for pick in self.entries.values()}
        self.fingerprints = {key_of(*each): kernel_fingerprint(*each) for each in used}


# -- classes of problems ----------------------------------------------------------------------------------------


def octave(x: float, parts: int) -> float:
    """`x` rounded to the nearest 2 ** (k / parts); 0 stays 0."""
    return 2.0 ** (round(parts * math.log2(x)) / parts) if x > 0 else 0.0


def problem_class(problem: Problem, path: str) -> str:
    """The class that a problem belongs to on a path; problems of one class share an entry.

    A text such as "bsr_matmul 128x128 8192x8192x8192 12.5% k,n,n bfloat16 out 2B light tma". It says: the operation
    with its block shape; M x N x K, each rounded to an eighth of an octave; the batch, if there is one, and how one of
    sparse operands is stored and grouped; the kept density of a sparse operand, rounded to a quarter of an octave, and
    whether its rows are known to share columns more than random ones; the contiguous modes of A, B and D; the operands'
    type and the bytes of an output element, and of a sum that is not of 4; whether the epilogue is light
    (EpilogueSpec.is_light) or loaded; and how the path accesses memory: on sm_90 whether D is stored by TMA, on sm_80
    how many elements one copy of each holds.
    """
    e, out_bytes = problem.extents, BYTES[problem.out_dtype]
    words = ["gemm 2:4" if problem.structured else "gemm"]
    if problem.block:
        words = ["bsr_linear" if problem.transposed else "bsr_matmul", f"{problem.block.bm}x{problem.block.bk}"]
    words.append("x".join(str(round(octave(extent, 8))) for extent in (e.M, e.N, e.K)))
    if e.L > 1:
        words.append(f"batch {round(octave(e.L, 8))}")
    if problem.block and problem.block.batch:
        words.append(f"of {problem.block.batch}" + (f" in runs of {problem.block.run}" if problem.block.run else ""))
    if problem.block:
        words.append(f"{100 * octave(problem.density, 4):.3g}%")
        random = listed_at_random(problem.density, problem.block, STATS_ROWS)
        if problem.stats.listed is not None and problem.stats.listed < 0.8 * random:
            words.append("shared columns")
    words += [",".join(problem.majors), problem.dtype, f"out {out_bytes}B"]
    words += ["sums 2B"] if problem.acc_dtype == "float16" else []
    words.append("light" if problem.epilogue.is_light else "loaded")
    if path == "sm_90":
        tma = problem.majors[2] != "any" and problem.layouts[2].vector * out_bytes % 16 == 0
        words.append("tma" if tma else "direct")
    else:
        words.append("copies " + ",".join(str(layout.vector) for layout in problem.layouts))
    return " ".join(words)


# -- fingerprints -----------------------------------------------------------------------------------------------


@functools.cache
def kernel_fingerprint(path: str, family: str) -> str:
    """A hash of the sources that decide the speed of a family's kernels, without comments, docstrings and layout.

    Takes 10 to 20 ms, once per process, and only where a table has an entry for the call. Equal on all Python versions.
    """
    digest = hashlib.sha256()
    for module in family_named(family).sources(path):
        digest.update(f"{module}\0{source_text(_source(module))}\0".encode())
    return digest.hexdigest()[:16]


def key_of(path: str, family: str) -> str:
    """Of Table.fingerprints."""
    return f"{path} {family}"


def _source(module: str) -> str:
    """A module's source, found without importing it: importing a kernel takes the whole DSL."""
    package, _, name = module.rpartition(".")
    folder = folder_of(package)
    if folder is None:
        spec = importlib.util.find_spec(package)
        folder = next(iter(spec.submodule_search_locations or ())) if spec else ""
    return Path(folder, f"{name}.py").read_text(encoding="utf-8")


def source_text(source: str) -> str:
    """What `source` means: its syntax tree as text, without docstrings. Raises SyntaxError."""
    words: list[str] = []
    _append_node(ast.parse(source), words)
    return " ".join(words)


def _append_node(node: ast.AST, words: list[str]) -> None:
    # Not ast.dump, which writes empty fields out or not depending on Python's version, as do the fields that later
    # versions have added: 3.12 gives every function and class a list of type parameters.
    words.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            _append_node(value, words)
        elif isinstance(value, list):
            if name == "body" and value and _is_text(value[0]):
                value = value[1:]
            if not value:
                continue
            words.append(f"{name} (")
            for item in value:
                if isinstance(item, ast.AST):
                    _append_node(item, words)
                else:
                    words.append(repr(item))
            words.append(")")
        elif value is not None:
            words.append(repr(value))


def _is_text(statement: ast.AST) -> bool:
    """Whether a block's first statement is a bare string: a docstring."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


# -- looking up -------------------------------------------------------------------------------------------------


def lookup(
    card: str,
    path: str,
    problem: Problem,
    refuse: Callable[[TunedPick], str] = lambda pick: "",
    notes: list[str] | None = None,
) -> TunedPick | None:
    """The pick for a problem on `card`, a torch device name; the user's table comes before the shipped one.

    `refuse` says why a pick cannot be used, "" if it can. What is found and not used is told in `notes`. None where
    there is nothing, where `card` is "" and where CUTE_KERNELS_TUNED is 0. Never raises because of a table's contents.
    """
    notes = [] if notes is None else notes
    if not card or os.environ.get(ENABLED_VARIABLE, "1").lower() in ("0", "false", "off"):
        return None
    text = ""
    for file in (user_file(card), shipped_file(card)):
        table = read_once(file)
        if table is None or table.card != card:
            continue
        text = text or problem_class(problem, path)
        pick = table.entries.get((path, text))
        if pick is None:
            continue
        if not table.fits(pick):
            notes.append(f"tuned table ignored: its kernels' sources differ ({file})")
        elif reason := refuse(pick):
            notes.append(f"tuned entry ignored: {reason} ({file})")
        else:
            return pick
    return None


def user_file(card: str) -> Path:
    return cache_directory() / "tuned" / shipped_file(card).name


def shipped_file(card: str) -> Path:
    """ "NVIDIA H200" -> tuned/nvidia-h200.json in this package."""
    return SHIPPED / f"{card_name(card)}.json"


def card_name(card: str) -> str:
    """ "NVIDIA H200" -> "nvidia-h200", the name of its files."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


_TABLES: dict[Path, Table | None] = {}
_LOCK = threading.Lock()


def read_once(file: Path) -> Table | None:
    """The table of a file, read at the first call; None if there is none, or, with a logged warning, a damaged one."""
    with _LOCK:
        if file not in _TABLES:
            _TABLES[file] = None
            try:
                _TABLES[file] = read(file)
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                LOG.warning("tuned table %s is damaged and not used: %s", file, error)
        return _TABLES[file]


def forget() -> None:
    """Read tables anew at the next lookup. Plans that calls have made already stay as they are."""
    with _LOCK:
        _TABLES.clear()


# -- files ------------------------------------------------------------------------------------------------------


def read(file: Path) -> Table:
    """The table in `file`. Raises OSError, or ValueError if its contents are no table."""
    try:
        data = json.loads(file.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}; this version reads {FORMAT}")
        table = Table(str(data["card"]), {path: str(data["fingerprints"][path]) for path in data["fingerprints"]})
        for entry in data["entries"]:
            pick = _pick(entry)
            table.entries[pick.path, pick.problem] = pick
        return table
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _pick(entry: Mapping[str, Any]) -> TunedPick:
    config = family_named(entry["family"]).config(**entry["config"])
    pick = TunedPick(**{**entry, "config": config})
    counts = [*dataclasses.astuple(config), pick.group, pick.ctas]
    if any(type(n) is not int or n < 1 for n in counts):
        raise ValueError(f"a count in {entry} is no positive integer")
    if pick.path not in PATHS or not pick.us > 0 or not pick.heuristic_us > 0:
        raise ValueError(f"{entry} has no path or no times")
    return pick


def write(file: Path, table: Table) -> None:
    """Write a table, its entries sorted, one a line; others see the old file or the new one."""
    rows = [json.dumps(dataclasses.asdict(table.entries[key])) for key in sorted(table.entries)]
    head = {"format": FORMAT, "card": table.card, "fingerprints": dict(sorted(table.fingerprints.items()))}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    body = ",\n".join(f"  {row}" for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, ("{\n" + "\n".join(lines) + f'\n "entries": [\n{body}\n ]\n}}\n').encode())


def keep(file: Path, card: str, path: str, picks: Iterable[TunedPick], settled: Iterable[str]) -> None:
    """Put `picks`, measured with this process's kernels, into a table of `path`.

    `settled` are all problem classes that were measured: an older entry of one that has no pick any more goes. So do
    entries measured with other sources, and a file that is damaged or another card's, which nobody could use.
    """
    picks = list(picks)
    try:
        found = read(file)
    except (OSError, ValueError):
        found = None
    table = found if found is not None and found.card == card else Table(card)
    settled = set(settled)
    for key, pick in list(table.entries.items()):
        if key[0] == path and (key[1] in settled or not table.fits(pick)):
            del table.entries[key]
    for pick in picks:
        table.entries[pick.path, pick.problem] = pick
    used = {(pick.path, pick.family) for pick in table.entries.values()}
    table.fingerprints = {key_of(*each): kernel_fingerprint(*each) for each in used if each[0] == path} | {
        key: value for key, value in table.fingerprints.items() if not key.startswith(f"{path} ")
    }
    write(file, table)
    forget()
