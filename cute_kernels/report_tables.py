"""Reports of `python -m cute_kernels inspect` on compiled kernels, as JSON or as tables followed by problems."""

import sys
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .arch import arch_named
from .report import COUNTED
from .runtime.families import family_of
from .runtime.parallel import Outcome

COLUMNS = ("path", "configuration", "problem", "operands", "epilogue")  # of Family.describe
MOST_COLUMNS = 1000  # width of a table in a file or a pipe
LEGEND = """\
configuration of a GEMM: tile MxNxK/stages, warps (sm_80) or warpgroups (sm_90), k/ split-K, c cluster, pp ping-pong
operands of a GEMM: majors of A, B and D, dtypes, and differences from aligned matrices with 32-bit indices
regs: registers per thread at launch; on the sm_90 path setmaxnreg then moves them to the consumers
"""


def row_of(outcome: Outcome) -> dict:
    """One kernel as a JSON object; without resources if it did not compile."""
    facts, report = outcome.item, outcome.value
    family = family_of(facts)
    row = {"arch": facts.arch, "family": family.name, "name": family.title(facts)}
    row |= dict.fromkeys(COLUMNS, "") | family.describe(facts)
    if report is not None:
        r = report.resources
        row |= {name: getattr(r, name) for name in ("registers", "stack", "stl", "ldl", "static_smem")}
        row |= {"dynamic_smem": report.dynamic_smem, "smem_limit": family.smem_limit(facts)}
        row |= {name: getattr(r, name) for name in (*COUNTED, "instructions")}
    problems = [outcome.error] if outcome.error else list(report.problems)
    return row | {"problems": problems, "seconds": round(outcome.seconds, 3)}


def table_of(arch: str, outcomes: list[Outcome]) -> Table:
    """Table of one architecture's kernels, one row each, without wrapped cells."""
    table = Table(title=title_of(arch, outcomes), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for name in ("family", *COLUMNS):
        table.add_column(name, no_wrap=True)
    for name in ("regs", "stack", "STL/LDL", "smem", *map(str.upper, COUNTED)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for outcome in outcomes:
        row = row_of(outcome)
        cells = [row[name] for name in ("family", *COLUMNS)]
        cells += list(numbers_of(row).values()) if outcome.value is not None else [""] * (4 + len(COUNTED))
        table.add_row(*(Text(str(cell)) for cell in cells), verdict_of(row))
    return table


def title_of(arch: str, outcomes: list[Outcome]) -> str:
    return f"{arch}: {len(outcomes)} kernels, {arch_named(arch).smem} bytes of shared memory a block"


def numbers_of(row: dict) -> dict[str, object]:
    """Resources of a compiled kernel by column name."""
    named = {"regs": row["registers"], "stack": row["stack"], "STL/LDL": f"{row['stl']}/{row['ldl']}"}
    named["smem"] = f"{row['static_smem']}+{row['dynamic_smem']}"
    return named | {name.upper(): row[name] for name in COUNTED}


def verdict_of(row: dict) -> Text:
    return Text("fails", "bold red") if row["problems"] else Text("ok", "green")


def lines_of(arch: str, outcomes: list[Outcome]) -> Iterator[Text]:
    """Report for a narrow terminal: per kernel one line with its name and one with its nonzero resources."""
    yield Text(title_of(arch, outcomes), "italic")
    for outcome in outcomes:
        row = row_of(outcome)
        yield Text(f"{row['family']}: {row['name']}")
        numbers = numbers_of(row) if outcome.value is not None else {}
        text = ", ".join(f"{name} {value}" for name, value in numbers.items() if value not in (0, "0/0", "0+0"))
        yield Text.assemble("    ", verdict_of(row), f"  {text}")


def print_report(outcomes: list[Outcome], seconds: float) -> None:
    """Print a table per architecture, then the problems of the kernels that have any.

    In a file or a pipe a table is as wide as necessary. A terminal that is too narrow for it gets lines instead.
    """
    out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else MOST_COLUMNS)
    for arch in dict.fromkeys(outcome.item.arch for outcome in outcomes):
        of_arch = [outcome for outcome in outcomes if outcome.item.arch == arch]
        table = table_of(arch, of_arch)
        if Measurement.get(out, out.options.update(width=MOST_COLUMNS), table).maximum <= out.width:
            out.print(table, soft_wrap=False)
        else:
            out.print(*lines_of(arch, of_arch), sep="\n")
    out.print(LEGEND, style="dim")
    bad = [row for row in map(row_of, outcomes) if row["problems"]]
    for row in bad:
        out.print(Text(f"{row['arch']} {row['name']}", "bold"))
        for problem in row["problems"]:
            out.print(Text(f"    {problem}"))
    verdict = f"{len(bad)} should not be shipped" if bad else "none spills, each has its tensor-core instruction"
    out.print(f"{len(outcomes)} kernels in {seconds:.0f} s: {verdict}", style="red" if bad else "green")
