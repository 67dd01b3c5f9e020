"""Tuned tables: classes of problems, fingerprints of sources, what counts and what is ignored, and that ops use it."""

import ast
import dataclasses
import itertools
import json
import logging
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cute_kernels.eager as ops
from bench.tune import renew
from bench.tune.problems import parse
from cute_kernels import explain, gemm, tuned
from cute_kernels.arch import ARCHS, PATHS
from cute_kernels.matmul.choose import choose
from cute_kernels.matmul.config import GemmConfig
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.matmul.problem import Extents
from cute_kernels.runtime.families import families

from .reference import normal

CARD = "NVIDIA H200"
SPEC = ARCHS["sm_90"]
CONFIG = GemmConfig(128, 128, 64, 5, 2, 1)  # none of the heuristics'
TOLD = "tuned: 198.3 µs against the cost model's 205.1 on NVIDIA H200, 2025-11-30"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders for the user's and the shipped tables, and nothing remembered."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv(tuned.ENABLED_VARIABLE, raising=False)
    tuned.forget()
    yield
    tuned.forget()


SHIPPED = tuned.SHIPPED


@pytest.fixture
def file():
    """The user's table."""
    return tuned.user_file(CARD)


def problem(text="gemm 4096x4096x4096 NN bf16"):
    return parse(text).as_planned()


def pick(of=None, path="sm_90", config=CONFIG, **changes):
    of = of or problem()
    text = tuned.problem_class(of, path)
    fields = {"group": 4, "ctas": 132, "us": 198.3, "heuristic_us": 205.1, "date": "2025-11-30"}
    fields |= {"measured": "gemm 4096x4096x4096 NN bf16", "code": "0" * 16}
    return tuned.TunedPick(text, path, "bsr" if of.block else "dense", config, **(fields | changes))


def keep(file, *picks, path="sm_90", settled=()):
    tuned.keep(file, CARD, path, picks, settled)


def found(path="sm_90", of=None, card=CARD, **more):
    return tuned.lookup(card, path, of or problem(), **more)


def make_stale(file):
    file.write_text(file.read_text().replace(tuned.kernel_fingerprint("sm_90", "dense"), "0" * 16))
    tuned.forget()


# -- classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ("gemm 4096x4096x4096 NN bf16", "sm_90", "gemm 4096x4096x4096 k,n,n bfloat16 out 2B light tma"),
        (
            "bsr_matmul 8192x8192x8192 128x64 12.5% fp16>fp32 bias", "sm_90",
            "bsr_matmul 128x64 8192x8192x8192 12.5% k,n,n float16 out 4B loaded tma",
        ),
        (
            "bsr_linear 8192x8192x8288 512x112 16/74", "sm_80",
            "bsr_linear 512x112 8192x8192x8192 21% k,k,m bfloat16 out 2B light copies 8,8,8",
        ),
        ("gemm 4096x4097x4096 NN bf16", "sm_90", "gemm 4096x4096x4096 k,n,n bfloat16 out 2B light direct"),
        ("gemm 4160x4096x4096 NN bf16", "sm_90", "gemm 4096x4096x4096 k,n,n bfloat16 out 2B light tma"),
        ("gemm 4608x4096x4096 NN bf16", "sm_90", "gemm 4467x4096x4096 k,n,n bfloat16 out 2B light tma"),
    ],
)  # fmt: skip
def test_a_class_reads_as_what_it_is(text, path, wanted):
    """D that TMA cannot store is a class of its own; near sizes share one."""
    assert tuned.problem_class(problem(text), path) == wanted
    batch = dataclasses.replace(problem(), extents=Extents(4096, 4096, 4096, 12))
    assert "4096x4096x4096 batch 12 k,n,n" in tuned.problem_class(batch, "sm_90")


@given(st.integers(1, 30), st.integers(1, 10**6))
def test_extents_of_one_class_differ_by_less_than_an_eighth_of_an_octave(k, n):
    assert tuned.octave(2**k, 8) == 2**k and tuned.octave(2.0**-k, 4) == 2.0**-k
    near = tuned.octave(n, 8)
    assert abs(math.log2(near / n)) <= 1 / 16 + 1e-9
    assert tuned.octave(near, 8) == pytest.approx(near)


# -- fingerprints -----------------------------------------------------------------------------------------------

CODE = '''"""What it is."""
import math


class A:
    """A."""

    def f(self, x):
        """f."""
        return x + 1
'''


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (CODE.replace("A.", "Another text."), True),
        (CODE.replace('    """A."""\n\n', "").replace('"""f."""', '"""f."""  # a comment'), True),
        (CODE.replace("x + 1", "(\n            x + 1  # split\n        )"), True),
        ("# first\n" + CODE.replace('"""What it is."""\n', ""), True),
        (CODE.replace("x + 1", "x + 2"), False),
        (CODE.replace("x + 1", "x - 1"), False),
        (CODE.replace("self, x", "self, x=0"), False),
        (CODE.replace("f(", "g("), False),
        (CODE.replace("x + 1", "x + 'a'"), False),
    ],
)
def test_code_counts_and_comments_docstrings_and_layout_do_not(other, same):
    assert other != CODE
    assert (tuned.source_text(other) == tuned.source_text(CODE)) is same


def test_fingerprints_are_those_of_every_python_version(monkeypatch):
    """Python 3.12 gave functions and classes another field, empty in code that does not use it."""
    before = tuned.source_text(CODE)
    for node in (ast.FunctionDef, ast.ClassDef):
        fields = tuple(name for name in node._fields if name != "type_params")
        monkeypatch.setattr(node, "_fields", (*fields, "type_params"))
        monkeypatch.setattr(node, "type_params", [], raising=False)
    assert tuned.source_text(CODE) == before


def test_fingerprints_tell_paths_apart_and_every_source_exists():
    assert tuned.kernel_fingerprint("sm_90", "dense") != tuned.kernel_fingerprint("sm_80", "dense")
    for path, family in itertools.product(PATHS, families(ProductFamily)):
        modules = family.sources(path)
        assert any(path.replace("_", "") in name for name in modules)
        assert all(tuned._source(name) for name in modules)


# -- looking up -------------------------------------------------------------------------------------------------


def test_the_users_table_comes_first_and_the_variable_turns_it_off(file, monkeypatch):
    assert found() is None and found(card="") is None
    keep(tuned.shipped_file(CARD), pick(us=190.0))
    assert found().us == 190.0
    keep(file, pick(us=180.0))
    assert found().us == 180.0
    assert found("sm_80") is None and found(card="NVIDIA H100") is None
    monkeypatch.setenv(tuned.ENABLED_VARIABLE, "0")
    assert found() is None


@pytest.mark.parametrize(
    ("stale", "note"),
    [(True, "tuned table ignored: its kernels' sources differ"), (False, "tuned entry ignored: too fast")],
)
def test_what_is_stale_or_refused_is_ignored_with_a_note_and_the_next_one_serves(file, stale, note):
    notes = []
    keep(tuned.shipped_file(CARD), pick(us=190.0))
    keep(file, pick(us=180.0))
    if stale:
        make_stale(file)
    assert found(refuse=lambda entry: "too fast" if entry.us < 185 and not stale else "", notes=notes).us == 190.0
    assert len(notes) == 1 and notes[0].startswith(note)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "{"),
        ("", "[]"),
        ('"format": 3', '"format": 2'),
        ('"tile_m": 128', '"tile_m": -128'),
        ('"tile_m": 128', '"tile_m": "128"'),
        ('"tile_m"', '"tile_q"'),
        ('"us": 198.3', '"us": NaN'),
        ('"group"', '"panel"'),
        ('"family": "dense"', '"family": "sparse"'),
    ],
)
def test_damaged_tables_cost_a_warning_and_no_call(file, caplog, old, new):
    keep(file, pick())
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new) if old else new)
    with caplog.at_level(logging.WARNING, "cute_kernels.tuned"):
        assert found() is None and found() is None
    assert len(caplog.records) == 1 and "damaged" in caplog.text


def test_shipped_tables_are_of_these_sources():
    for file in SHIPPED.glob("*.json"):
        for key, fingerprint in tuned.read(file).fingerprints.items():
            assert fingerprint == tuned.kernel_fingerprint(*key.split(" ", 1)), "python -m bench tune --renew"


@pytest.mark.parametrize("code", ["0" * 16, "1" * 16])
def test_a_stale_entry_of_the_same_machine_code_is_renewed_and_others_go(file, monkeypatch, code):
    keep(file, pick())
    make_stale(file)
    monkeypatch.setattr(renew, "code_of", lambda entry: code)
    left, dropped = renew.renew(file)
    tuned.forget()
    if code == pick().code:
        assert (left, dropped) == (1, []) and found() == pick()
    else:
        assert (left, dropped) == (0, ["sm_90: gemm 4096x4096x4096 NN bf16"]) and found() is None


@pytest.mark.slow
@pytest.mark.sm_90
def test_the_shipped_entries_are_of_the_machine_code_that_was_measured():
    for table in SHIPPED.glob("*.json"):
        assert [entry.measured for entry in tuned.read(table).entries.values() if not renew.same(entry)] == []


def test_threads_share_one_reading(file, monkeypatch):
    readings, picks = [], []
    keep(file, pick())
    read = tuned.read
    monkeypatch.setattr(tuned, "read", lambda path: readings.append(path) or read(path))
    threads = [threading.Thread(target=lambda: picks.append(found())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert picks == [pick()] * 8 and readings == [file]


# -- files ------------------------------------------------------------------------------------------------------


def test_a_table_comes_back_as_it_was_one_line_an_entry(file):
    picks = [pick(problem(f"gemm {n}x{n}x{n} NN bf16"), us=float(n)) for n in (1024, 4096, 8192)]
    keep(file, *picks[::-1])
    table = tuned.read(file)
    assert table.card == CARD and sorted(table.entries.values(), key=lambda p: p.us) == picks
    lines = [line for line in file.read_text().splitlines() if '"problem"' in line]
    assert len(lines) == 3 and lines == sorted(lines, key=lambda line: json.loads(line.rstrip(","))["problem"])


def test_keeping_replaces_what_was_measured_again_and_drops_what_nobody_can_use(file):
    old, new = problem("gemm 1024x1024x1024 NN bf16"), problem()
    keep(file, pick(old), pick(new))
    keep(file, settled=[tuned.problem_class(new, "sm_90")])  # measured again, no gain now
    assert found(of=new) is None and found(of=old) is not None
    make_stale(file)
    keep(file, pick(new))
    assert list(tuned.read(file).entries.values()) == [pick(new)]
    file.write_text("{")
    older = pick(old, "sm_80", GemmConfig(128, 128, 32, 4, 2, 2))
    keep(file, older, path="sm_80")
    assert list(tuned.read(file).entries.values()) == [older]
    keep(file, pick(old))
    assert found("sm_80", old) == older and found(of=old) == pick(old), "paths are kept apart"


# -- in use -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [None, "sm_90"])
def test_choose_takes_the_tuned_pick(file, forced):
    p = problem()
    before = choose(p, SPEC, 132, forced, CARD)
    keep(file, pick(p))
    facts, *launch = choose(p, SPEC, 132, forced, CARD)
    assert facts == dataclasses.replace(before[0], config=CONFIG) and launch == [4, 132, [TOLD]]
    assert choose(p, SPEC, 132, forced) == before, "without a card the heuristics decide"
    assert choose(problem("gemm 256x256x256 NN bf16"), SPEC, 132, forced, CARD)[3] == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"config": GemmConfig(256, 256, 64, 2, 2, 1)}, "256 registers of accumulators"),
        ({"config": GemmConfig(128, 256, 64, 8, 2, 1)}, "bytes of shared memory"),
        ({"ctas": 264}, "264 CTAs"),
        ({"config": GemmConfig(128, 128, 64, 5, 2, 1, 1, 2), "ctas": 1}, "in clusters of 2"),
    ],
)
def test_choose_ignores_what_cannot_run_and_says_so(file, changes, word):
    p = problem()
    before = choose(p, SPEC, 132, None, CARD)
    keep(file, pick(p, **changes))
    *chosen, notes = choose(p, SPEC, 132, None, CARD)
    assert chosen == list(before[:3])
    assert len(notes) == 1 and notes[0].startswith("tuned entry ignored: ") and word in notes[0]


def test_explain_tells_of_the_tuned_pick(file, emulated, monkeypatch):
    monkeypatch.setattr(ops, "device_arch", lambda index: (SPEC, 132, CARD))
    keep(file, pick(problem("gemm 256x512x1024 NN bf16")))
    plan = explain(gemm, normal(256, 1024), normal(1024, 512))
    assert plan.facts.config == CONFIG and (plan.group, plan.max_ctas) == (4, 132) and TOLD in str(plan)
