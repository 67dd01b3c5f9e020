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


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders for the user's and the shipped tables, and nothing remembered."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv(tuned.ENABLED_VARIABLE, raising=False)
    tuned.forget()
    yield
    tuned.forget()


def problem(text="gemm 4096x4096x4096 NN bf16"):
    return parse(text).as_planned()


def pick(of, path="sm_90", config=CONFIG, **changes):
    text = tuned.problem_class(of, path)
    fields = {"group": 4, "ctas": 132, "us": 198.3, "heuristic_us": 205.1, "date": "2025-11-30"}
    return tuned.TunedPick(text, path, "bsr" if of.block else "dense", config, **(fields | changes))


def keep(file, *picks):
    tuned.keep(file, CARD, "sm_90", picks, [])


# -- classes ----------------------------------------------------------------------------------------------------


def test_a_class_reads_as_what_it_is():
    assert tuned.problem_class(problem(), "sm_90") == "gemm 4096x4096x4096 k,n,n bfloat16 out 2B light tma"
    sparse = problem("bsr_matmul 8192x8192x8192 128x64 12.5% fp16>fp32 bias")
    wanted = "bsr_matmul 128x64 8192x8192x8192 12.5% k,n,n float16 out 4B loaded tma"
    assert tuned.problem_class(sparse, "sm_90") == wanted
    layer = problem("bsr_linear 8192x8192x8288 512x112 16/74")
    wanted = "bsr_linear 512x112 8192x8192x8192 21% k,k,m bfloat16 out 2B light copies 8,8,8"
    assert tuned.problem_class(layer, "sm_80") == wanted
    batch = dataclasses.replace(problem(), extents=Extents(4096, 4096, 4096, 12))
    assert "4096x4096x4096 batch 12 k,n,n" in tuned.problem_class(batch, "sm_90")


def test_d_that_tma_cannot_store_is_a_class_of_its_own():
    odd = problem("gemm 4096x4097x4096 NN bf16")
    assert tuned.problem_class(odd, "sm_90").endswith("direct")


@given(st.integers(1, 30))
def test_powers_of_two_stay_what_they_are(k):
    assert tuned.octave(2**k, 8) == 2**k
    assert tuned.octave(2.0**-k, 4) == 2.0**-k


@given(st.integers(1, 10**6))
def test_extents_of_one_class_differ_by_less_than_an_eighth_of_an_octave(n):
    near = tuned.octave(n, 8)
    assert abs(math.log2(near / n)) <= 1 / 16 + 1e-9
    assert tuned.octave(near, 8) == pytest.approx(near)


def test_near_sizes_share_a_class_and_far_ones_do_not():
    classes = [tuned.problem_class(problem(f"gemm {m}x4096x4096 NN bf16"), "sm_90") for m in (4096, 4160, 4608)]
    assert classes[0] == classes[1] != classes[2]


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
    "same",
    [
        CODE.replace("A.", "Another text."),
        CODE.replace('    """A."""\n\n', "").replace('"""f."""', '"""f."""  # a comment'),
        CODE.replace("x + 1", "(\n            x + 1  # split\n        )"),
        "# first\n" + CODE.replace('"""What it is."""\n', ""),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(same):
    assert same != CODE
    assert tuned.source_text(same) == tuned.source_text(CODE)


@pytest.mark.parametrize(
    ("old", "new"), [("x + 1", "x + 2"), ("x + 1", "x - 1"), ("self, x", "self, x=0"), ("f(", "g(")]
)
def test_code_counts(old, new):
    assert tuned.source_text(CODE.replace(old, new)) != tuned.source_text(CODE)


def test_a_string_that_is_no_docstring_counts():
    assert tuned.source_text("x = 'a'") != tuned.source_text("x = 'b'")


def test_fingerprints_are_those_of_every_python_version(monkeypatch):
    """Python 3.12 gave functions and classes another field, empty in code that does not use it."""
    source = "class A:\n    def f(self, x):\n        return x\n"
    before = tuned.source_text(source)
    for node in (ast.FunctionDef, ast.ClassDef):
        fields = tuple(name for name in node._fields if name != "type_params")
        monkeypatch.setattr(node, "_fields", (*fields, "type_params"))
        monkeypatch.setattr(node, "type_params", [], raising=False)
    assert tuned.source_text(source) == before


def test_fingerprints_tell_paths_apart_and_every_source_exists():
    assert tuned.kernel_fingerprint("sm_90", "dense") != tuned.kernel_fingerprint("sm_80", "dense")
    for path, family in itertools.product(PATHS, families(ProductFamily)):
        modules = family.sources(path)
        assert any(path.replace("_", "") in name for name in modules)
        assert all(tuned._source(name) for name in modules)


# -- looking up -------------------------------------------------------------------------------------------------


def test_without_tables_or_a_card_there_is_nothing():
    assert tuned.lookup(CARD, "sm_90", problem()) is None
    assert tuned.lookup("", "sm_90", problem()) is None


def test_the_users_table_comes_first():
    p = problem()
    keep(tuned.shipped_file(CARD), pick(p, us=190.0))
    assert tuned.lookup(CARD, "sm_90", p).us == 190.0
    keep(tuned.user_file(CARD), pick(p, us=180.0))
    assert tuned.lookup(CARD, "sm_90", p).us == 180.0
    assert tuned.lookup(CARD, "sm_80", p) is None
    assert tuned.lookup("NVIDIA H100", "sm_90", p) is None


def test_the_variable_turns_it_off(monkeypatch):
    keep(tuned.user_file(CARD), pick(problem()))
    monkeypatch.setenv(tuned.ENABLED_VARIABLE, "0")
    assert tuned.lookup(CARD, "sm_90", problem()) is None


def test_a_stale_table_is_ignored_with_a_note_and_the_next_one_serves(monkeypatch):
    p, notes = problem(), []
    keep(tuned.shipped_file(CARD), pick(p, us=190.0))
    file = tuned.user_file(CARD)
    keep(file, pick(p, us=180.0))
    file.write_text(file.read_text().replace(tuned.kernel_fingerprint("sm_90", "dense"), "0" * 16))
    tuned.forget()
    assert tuned.lookup(CARD, "sm_90", p, notes=notes).us == 190.0
    assert len(notes) == 1 and notes[0].startswith("tuned table ignored: its kernels' sources differ")


def test_a_refused_entry_is_ignored_with_its_reason():
    p, notes = problem(), []
    keep(tuned.user_file(CARD), pick(p, us=180.0))
    keep(tuned.shipped_file(CARD), pick(p, us=190.0))
    found = tuned.lookup(CARD, "sm_90", p, lambda entry: "too fast" if entry.us < 185 else "", notes)
    assert found.us == 190.0
    assert len(notes) == 1 and "tuned entry ignored: too fast" in notes[0]


def damage(file):
    text = file.read_text()
    yield "{"
    yield "[]"
    yield text.replace('"format": 1', '"format": 2')
    yield text.replace('"tile_m": 128', '"tile_m": -128')
    yield text.replace('"tile_m": 128', '"tile_m": "128"')
    yield text.replace('"tile_m"', '"tile_q"')
    yield text.replace('"us": 198.3', '"us": NaN')
    yield text.replace('"group"', '"panel"')
    yield text.replace('"family": "dense"', '"family": "sparse"')


def test_damaged_tables_cost_a_warning_and_no_call(caplog):
    p, file = problem(), tuned.user_file(CARD)
    keep(file, pick(p))
    for text in list(damage(file)):
        file.write_text(text)
        tuned.forget()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cute_kernels.tuned"):
            assert tuned.lookup(CARD, "sm_90", p) is None, text
            assert tuned.lookup(CARD, "sm_90", p) is None
        assert len(caplog.records) == 1 and "damaged" in caplog.text


def test_threads_share_one_reading(monkeypatch):
    p, readings, found = problem(), [], []
    keep(tuned.user_file(CARD), pick(p))
    read = tuned.read
    monkeypatch.setattr(tuned, "read", lambda file: readings.append(file) or read(file))
    threads = [threading.Thread(target=lambda: found.append(tuned.lookup(CARD, "sm_90", p))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [pick(p)] * 8
    assert readings == [tuned.user_file(CARD)]


# -- files ------------------------------------------------------------------------------------------------------


def test_a_table_comes_back_as_it_was_one_line_an_entry():
    picks = [pick(problem(f"gemm {n}x{n}x{n} NN bf16"), us=float(n)) for n in (8192, 1024, 4096)]
    file = tuned.user_file(CARD)
    keep(file, *picks)
    table = tuned.read(file)
    assert table.card == CARD and sorted(table.entries.values(), key=lambda p: p.us) == sorted(
        picks, key=lambda p: p.us
    )
    lines = [line for line in file.read_text().splitlines() if '"problem"' in line]
    assert len(lines) == 3 and lines == sorted(lines, key=lambda line: json.loads(line.rstrip(","))["problem"])


def test_keeping_replaces_what_was_measured_again_and_drops_what_nobody_can_use():
    old, new = problem("gemm 1024x1024x1024 NN bf16"), problem()
    file = tuned.user_file(CARD)
    keep(file, pick(old), pick(new))
    tuned.keep(file, CARD, "sm_90", [], [tuned.problem_class(new, "sm_90")])  # measured again, no gain now
    assert tuned.lookup(CARD, "sm_90", new) is None and tuned.lookup(CARD, "sm_90", old) is not None
    file.write_text(file.read_text().replace(tuned.kernel_fingerprint("sm_90", "dense"), "0" * 16))
    keep(file, pick(new))
    assert list(tuned.read(file).entries.values()) == [pick(new)]
    file.write_text("{")
    keep(file, pick(old))
    assert list(tuned.read(file).entries.values()) == [pick(old)]


def test_paths_are_kept_apart():
    p, file = problem(), tuned.user_file(CARD)
    older = pick(p, "sm_80", GemmConfig(128, 128, 32, 4, 2, 2))
    tuned.keep(file, CARD, "sm_80", [older], [])
    keep(file, pick(p))
    assert tuned.lookup(CARD, "sm_80", p) == older and tuned.lookup(CARD, "sm_90", p) == pick(p)


# -- in use -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [None, "sm_90"])
def test_choose_takes_the_tuned_pick(forced):
    p = problem()
    before = choose(p, SPEC, 132, forced, CARD)
    keep(tuned.user_file(CARD), pick(p))
    facts, group, ctas, notes = choose(p, SPEC, 132, forced, CARD)
    assert (facts.config, group, ctas) == (CONFIG, 4, 132)
    assert facts == dataclasses.replace(before[0], config=CONFIG)
    assert notes == ["tuned: 198.3 µs against the cost model's 205.1 on NVIDIA H200, 2025-11-30"]
    assert choose(p, SPEC, 132, forced) == before, "without a card the heuristics decide"
    assert choose(problem("gemm 256x256x256 NN bf16"), SPEC, 132, forced, CARD)[3] == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"config": GemmConfig(256, 256, 64, 2, 2, 1)}, "256 accumulators"),
        ({"config": GemmConfig(128, 256, 64, 8, 2, 1)}, "bytes of shared memory"),
        ({"ctas": 264}, "264 CTAs"),
        ({"config": GemmConfig(128, 128, 64, 5, 2, 1, 1, 2), "ctas": 1}, "in clusters of 2"),
    ],
)
def test_choose_ignores_what_cannot_run_and_says_so(changes, word):
    p = problem()
    before = choose(p, SPEC, 132, None, CARD)
    keep(tuned.user_file(CARD), pick(p, **changes))
    facts, group, ctas, notes = choose(p, SPEC, 132, None, CARD)
    assert (facts, group, ctas) == before[:3]
    assert len(notes) == 1 and notes[0].startswith("tuned entry ignored: ") and word in notes[0]


def test_explain_tells_of_the_tuned_pick(emulated, monkeypatch):
    import cute_kernels.eager as ops

    monkeypatch.setattr(ops, "device_arch", lambda index: (SPEC, 132, CARD))
    keep(tuned.user_file(CARD), pick(problem("gemm 256x512x1024 NN bf16")))
    plan = explain(gemm, normal(256, 1024), normal(1024, 512))
    assert plan.facts.config == CONFIG and (plan.group, plan.max_ctas) == (4, 132)
    assert "tuned: 198.3 µs against the cost model's 205.1 on NVIDIA H200, 2025-11-30" in str(plan)
