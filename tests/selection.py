"""The tests that run by default, and why they represent the others.

Fast tests without parameters all run. Parametrized ones are grouped by function and class: the family of the case, the
path, the device. Each group keeps one test in KEPT, at least one. Slow tests, which compile kernels or emulate them,
are grouped by file, which keeps one in SLOW_KEPT, at least one. Tests that inspect a kernel run for a few kernels,
which have all kernel_selection.traits among them. The hash of a test's id decides which ones, so every run without
options has the same. Tests with the marker `core` always run.

    --all                   everything
    --share TEXT            besides, one in SHARE of all other tests; each TEXT picks another share
    --changed-since COMMIT  besides, tests of kernel families whose sources differ from the commit's, at most MOST slow

Only runs of the whole suite are shortened: `pytest FILE`, `-k` and `-m` run what they name. GPU tests all run where
there is a GPU. Without one they are deselected: to skip ten thousand tests takes a minute.
"""

import functools
import hashlib
import inspect
import re
import types
import warnings
from collections import defaultdict

import pytest
import torch

from cute_kernels.runtime.families import Family, families

from . import sources

KEPT = 24
SLOW_KEPT = 40
SHARE = 10
MOST = 400  # a kernel takes one to two seconds to compile
COMPILE = {"compile_kernel", "compile_for", "inspect_kernel", "inspect_compiled", "cubin"}
COMPILE |= {"Emulated", "emulated", "emulate_entry", "on_emulator"}
COMPILING_FIXTURES = {"outcome_of", "emulator"}
TEST_MODULE = re.compile(r"tests\.(\w+\.)?test_")
MARKS = ("sm_80", "sm_86", "sm_89", "sm_90")


def rank(item, salt: str = "") -> int:
    """A number that the test's id decides."""
    return int.from_bytes(hashlib.sha256(f"{salt}{item.nodeid}".encode()).digest()[:8])


def names_in(function) -> set[str]:
    """Global names and attributes in a function's code, and in the functions inside it."""
    found, codes = set(), [function.__code__]
    while codes:
        code = codes.pop()
        found |= {*code.co_names}
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


@functools.cache
def compiles(function) -> bool:
    """True if the function, or one of the tests' functions that it reaches, compiles kernels or emulates them."""
    reached, todo = set(), [inspect.unwrap(function)]
    while todo:
        if (one := todo.pop()) in reached:
            continue
        reached.add(one)
        names = names_in(one)
        if not COMPILE.isdisjoint(names):
            return True
        others = (inspect.unwrap(one.__globals__.get(name)) for name in names)
        todo += [
            other
            for other in others
            if isinstance(other, types.FunctionType) and TEST_MODULE.match(other.__module__ or "")
        ]
    return False


def parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def places(item) -> set:
    """Places where the test runs, by its parameters: "cpu", "emulated" (torch in the kernels' place), "emulator"."""
    firsts = (value[0] if isinstance(value, tuple) and value else value for value in parameters(item).values())
    return {first for first in firsts if isinstance(first, str)} & {"cpu", "emulated", "emulator"}


def is_slow(item) -> bool:
    """True if the test compiles kernels or runs them on the emulator."""
    if where := places(item):
        return "emulator" in where
    return not COMPILING_FIXTURES.isdisjoint(item.fixturenames) or "slow" in item.keywords or compiles(item.function)


def family_of(item) -> str | None:
    """The name of the kernel family that a parameter of the test names, as facts, a Family or conformance.Kernels."""
    for value in parameters(item).values():
        family = getattr(value, "family", value)
        if isinstance(family, Family):
            return family.name
        if isinstance(family, str) and hasattr(value, "arch"):
            return family
    return None


def inspects(item) -> bool:
    """True if the test inspects the kernel of its parameter `facts`."""
    return "outcome_of" in item.fixturenames and hasattr(parameters(item).get("facts"), "arch")


def class_of(item) -> tuple:
    """The test's file if it is slow, and whether it inspects a kernel; else its function, family, path and device."""
    if is_slow(item):
        return item.nodeid.partition("::")[0], inspects(item) and family_of(item) is not None
    marks = tuple(mark for mark in MARKS if mark in item.keywords)
    family = getattr(parameters(item).get("family"), "name", None)
    return item.nodeid.partition("[")[0], family, *sorted(places(item)), marks


def representatives(items: list) -> list:
    """Some tests of each class."""
    from .kernel_selection import cover, traits  # imports every package

    groups, found = defaultdict(list), []
    for item in sorted(items, key=rank):
        groups[class_of(item)].append(item)
    for group in groups.values():
        if is_slow(group[0]) and class_of(group[0])[1]:
            found += cover(group, lambda item: traits(item.callspec.params["facts"]))
        else:
            found += group[: max(1, len(group) // (SLOW_KEPT if is_slow(group[0]) else KEPT))]
    return found


def of_changed_families(items: list, commit: str) -> list:
    """Tests of families whose modules, or what these import, differ from the commit's; of slow ones at most MOST."""
    changed = sources.changed_since(commit)
    if changed is None:
        warnings.warn(f"git knows no commit {commit!r} here: every kernel family counts as changed", stacklevel=2)
    names = {
        family.name for family in families() if changed is None or changed & sources.closure(type(family).__module__)
    }
    found = [item for item in items if family_of(item) in names]
    slow = sorted(filter(is_slow, found), key=rank)[:MOST]
    return [item for item in found if not is_slow(item)] + slow


def may_be_left_out(item) -> bool:
    """True if other tests represent this one."""
    return (bool(parameters(item)) or is_slow(item)) and not {"gpu", "core"} & {*item.keywords}


def select(items: list, share: str | None, commit: str | None) -> list:
    """The tests that run, in their order."""
    represented = [item for item in items if may_be_left_out(item)]
    chosen = {*representatives(represented)}
    left_out = {item for item in represented if item not in chosen}
    if commit:
        left_out -= {*of_changed_families([item for item in represented if item in left_out], commit)}
    if share is not None:
        left_out -= {item for item in left_out if rank(item, share) % SHARE == 0}
    return [item for item in items if item not in left_out]


def is_whole_suite(config) -> bool:
    """True if the command line names no tests: no files, no -k, -m or --lf."""
    paths, named = (
        {(config.rootpath / path).resolve() for path in of} for of in (config.getini("testpaths"), config.args)
    )
    return paths == named and not (config.option.keyword or config.option.markexpr or config.getoption("lf", False))


class Selection:
    """The plugin: deselects tests, and says at the end how many and how to run them."""

    def __init__(self, config):
        self.config = config
        self.counts = (0, 0, 0)  # deselected, of all; without a GPU

    def pytest_collection_modifyitems(self, items: list) -> None:
        option = self.config.option
        runs = items if torch.cuda.is_available() else [item for item in items if "gpu" not in item.keywords]
        kept = select(runs, option.share, option.changed_since)
        left_out = {*items}.difference(kept)
        self.counts = len(runs) - len(kept), len(runs), len(items) - len(runs)
        self.config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept
        if hasattr(self.config, "workeroutput"):  # a process of pytest-xdist, whose controller collects nothing
            self.config.workeroutput["left_out"] = self.counts

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.counts = getattr(node, "workeroutput", {}).get("left_out", self.counts)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        *counts, no_gpu = self.counts
        if no_gpu:
            terminalreporter.write_line(f"selection: {no_gpu} tests of kernels on a GPU deselected: no CUDA GPU")
        text = "selection: {} of {} tests deselected; ./run test --all runs everything".format(*counts)
        terminalreporter.write_line(text)
