"""The selection of tests that runs by default (selection.py)."""

import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.arch import ARCHS
from cute_kernels.runtime.families import families, family_named

from . import selection, sources
from .kernel_selection import selected, traits
from .selection import KEPT, SLOW_KEPT, compiles, is_slow, is_whole_suite, select


class Item(SimpleNamespace):
    """Attributes of a test that the selection reads."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def item(name: str, *marks: str, fixtures=(), **params):
    callspec = {"callspec": SimpleNamespace(params=params)} if params else {}
    return Item(
        nodeid=f"tests/test_x.py::{name}",
        keywords=dict.fromkeys(marks),
        fixturenames=fixtures,
        function=item,
        **callspec,
    )


FAST = [item(f"test_fast[{n}-{device}]", n=n, device=device) for n in range(60) for device in ("cpu", "emulated")]
SLOW = [item(f"test_slow[{n}]", "slow", n=n) for n in range(40)]


def kernels() -> list:
    every = [facts for spec in ARCHS.values() for facts in selected(spec)]
    return [item(f"test_kernel[{n}]", fixtures=("outcome_of",), facts=facts) for n, facts in enumerate(every)]


def test_each_group_has_representatives():
    plain, gpu = item("test_plain"), [item(f"test_gpu[{n}]", "gpu", n=n) for n in range(50)]
    core = [item(f"test_core[{n}]", "core", "slow", n=n) for n in range(50)]
    items = [*FAST, plain, *SLOW, *gpu, *core]
    chosen = select(items, None, None)
    assert chosen == [each for each in items if each in chosen] == select(items, None, None)
    assert plain in chosen and not [each for each in gpu + core if each not in chosen]
    assert Counter(each.callspec.params["device"] for each in FAST if each in chosen) == dict.fromkeys(
        ("cpu", "emulated"), 60 // KEPT
    )
    assert len([each for each in SLOW if each in chosen]) == len(SLOW) // SLOW_KEPT
    assert select(FAST[:2], None, None) == FAST[:2], "one for each device"


def test_kernels_have_all_traits():
    every = kernels()
    chosen = select(every, None, None)
    wanted, found = (set().union(*(traits(each.callspec.params["facts"]) for each in of)) for of in (every, chosen))
    assert found == wanted and len(chosen) < len(every) / 10
    assert {each.callspec.params["facts"].family for each in chosen} == {family.name for family in families()}


def test_shares_add_up_to_everything():
    items, found = FAST + SLOW, []
    without = select(items, None, None)
    for n in range(200):
        chosen = select(items, f"commit {n}", None)
        assert all(each in chosen for each in without)
        found += [each for each in chosen if each not in found]
    assert len(found) == len(items)
    assert len(select(items, "some commit", None)) < len(without) + len(items) / 4


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("attention.decode.combine", {"decode", "selected decode"}),
        ("attention.selected.decode.mainloop", {"selected decode"}),
        (None, set()),
    ],
)
def test_kernels_of_changed_families(monkeypatch, module, names):
    """No more than MOST of them; of a commit that git does not know all families count as changed."""
    monkeypatch.setattr(sources, "changed_since", lambda commit: {module} if module else set())
    every = kernels()
    without = select(every, None, None)
    added = [each for each in select(every, None, "HEAD") if each not in without]
    assert {each.callspec.params["facts"].family for each in added} == names
    monkeypatch.setattr(sources, "changed_since", lambda commit: None)
    with pytest.warns(UserWarning, match="git knows no commit 'HEAD' here"):
        assert len(select(every, None, "HEAD")) == len(without) + selection.MOST


def test_sources():
    module = type(family_named("decode")).__module__
    assert {module, "attention.decode.kernel_sm90", "cute_kernels.tile.ptx"} <= sources.closure(module)
    assert "attention.decode.kernel_sm90" not in sources.closure(type(family_named("dense")).__module__)
    assert sources.changed_since("no such commit") is None
    if subprocess.run(["git", "-C", str(sources.ROOT), "rev-parse", "HEAD"], capture_output=True).returncode == 0:
        assert sources.changed_since("HEAD") is not None


def test_slow_tests_are_found():
    """Slow tests compile or emulate kernels by themselves or by functions of their file."""
    from . import test_emulated

    assert compiles(test_emulated.test_gradients) and compiles(test_emulated.test_attention)
    assert not compiles(test_emulated.test_lanes_part_and_meet_again) and not compiles(test_sources)
    assert is_slow(item("test_x[emulator]", where=("emulator", "sm_80"))) and is_slow(item("test_x", "slow"))
    assert not is_slow(item("test_x[cpu]", "slow", where="cpu"))


@pytest.mark.parametrize(
    ("args", "options", "whole"),
    [
        (["tests"], {}, True),
        ([str(Path(__file__).parent)], {}, True),
        (["tests/cute_kernels/test_dense.py"], {}, False),
        (["tests"], {"keyword": "bsr"}, False),
        (["tests"], {"markexpr": "gpu"}, False),
        (["tests"], {"lf": True}, False),
    ],
)
def test_tests_that_are_named_all_run(args, options, whole):
    option = {"keyword": "", "markexpr": "", "lf": False} | options
    config = SimpleNamespace(
        rootpath=sources.ROOT,
        args=args,
        option=SimpleNamespace(**option),
        getini=lambda name: [name.replace("testpaths", "tests")],
        getoption=lambda name, default: option[name],
    )
    assert is_whole_suite(config) == whole


def test_it_says_what_it_leaves_out(capsys):
    plugin = selection.Selection(SimpleNamespace())
    plugin.pytest_testnodedown(SimpleNamespace(workeroutput={"left_out": (3, 7, 0)}))
    plugin.pytest_terminal_summary(SimpleNamespace(write_line=print))
    assert capsys.readouterr().out == "selection: 3 of 7 tests deselected; ./run test --all runs everything\n"


@pytest.mark.parametrize("found", [False, True])
def test_gpu_tests_need_a_gpu(monkeypatch, capsys, found):
    """Without one they are told in one line, not skipped one by one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    items = [*FAST, *(item(f"test_gpu[{n}]", "gpu", n=n) for n in range(50))]
    options = SimpleNamespace(share=None, changed_since=None)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    plugin = selection.Selection(SimpleNamespace(option=options, hook=hook))
    plugin.pytest_collection_modifyitems(items)
    assert len([each for each in items if "gpu" in each.keywords]) == (50 if found else 0)
    plugin.pytest_terminal_summary(SimpleNamespace(write_line=print))
    assert ("50 tests of kernels on a GPU deselected: no CUDA GPU" in capsys.readouterr().out) != found
