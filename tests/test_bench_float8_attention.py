"""The rows of attention of 8-bit floats, small and on the CPU: what they compute, and what they are held against."""

import pytest
import torch

from bench import __main__ as command
from bench import cases_float8_attention as cases
from bench.peers import WrongResult
from bench.rows import OURS


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(cases, "device", lambda: "cpu")


def measured(case):
    case.timer = lambda calls, *, warm_s, rounds: {name: [1.0 + (name == OURS)] * rounds for name in calls}
    return case.measure(3)


def test_rows_and_what_is_asked_of_them():
    quick, full = (list(cases.float8_attention_cases(mode)) for mode in ("quick", "full"))
    assert [case.asked for case in quick] == [1.45, 1.45, 1.3] * 4
    assert {case.name for case in quick} < {case.name for case in full} and len({c.name for c in full}) == len(full)
    assert all(case.problem.dtype == "float8_e4m3fn" and case.against == cases.WIDE for case in full)
    assert quick[0].problem.flops == 4 * 2 * 16 * 8192**2 * 128 and quick[2].problem.flops == quick[0].problem.flops / 8


@pytest.mark.parametrize("make", [
    lambda: cases.dense((2, 160, 2, 64), False), lambda: cases.dense((1, 200, 2, 128), True),
    lambda: cases.sparse((1, 1024, 2, 64), 128, 1 / 8, fast=True),
    lambda: cases.dense((1, 200, 2, 128), True, per="tokens"),
    lambda: cases.sparse((1, 1024, 2, 64), 128, 1 / 8, fast=True, per="tokens"),
])  # fmt: skip
def test_a_row(emulated, make):
    row = measured(make())
    assert row.ratio == 0.5 and "sm_90" in row.plan
    assert ("scales are of blocks of 128 tokens" in row.plan) == row.name.endswith("scales of 128 tokens")
    assert row.ours.note.startswith("error ") and row.rival.note.startswith("error ")


@pytest.mark.parametrize(("fast", "tile"), [(fast, tile) for fast, tiles in cases.TILES.items() for tile in tiles])
def test_tiles(emulated, fast, tile):
    row = measured(cases.dense((1, 400, 1, 128), True, fast=fast, tile=tile))
    assert f"{tile[0]}x{tile[1]} stages {tile[2]}" in row.plan and row.ratio == 0.5


@pytest.mark.parametrize("inside", [False, True])
def test_where_v_is_converted(emulated, inside):
    for case in (cases.dense((1, 200, 2, 128), True, inside=inside),
                 cases.sparse((1, 1024, 2, 64), 128, 1 / 8, inside=inside)):  # fmt: skip
        assert measured(case).ratio == 0.5 and case.ours()[1].facts.converts == inside
        assert f"v converted {'inside' if inside else 'before'}" in case.name


def test_a_wrong_result_has_no_time():
    x = cases.NarrowAttention([lambda: torch.randn(1, 160, 2, 64)] * 3)
    with pytest.raises(WrongResult):
        x.verified(lambda: torch.randn(1, 160, 2, 64))


def test_the_suite_is_known(emulated):
    suite = command.SUITES[cases.SUITE]
    assert suite.cases is cases.float8_attention_cases
    for call in suite.host_calls().values():
        assert call().dtype is torch.bfloat16
