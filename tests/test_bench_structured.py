"""The structured suite's rows, small and on the CPU: what they compute, what they are held against, what is asked."""

import pytest
import torch

from bench import __main__ as command
from bench import cases_structured, cases_structured_layers
from bench.cases_models import DENSE_SWIGLU
from bench.cases_structured import (
    BSR,
    DENSE,
    blocks,
    blocks_float8,
    structured,
    structured_cases,
    structured_float8,
)
from bench.cases_structured_layers import OUR_SWIGLU
from bench.peers import CUBLAS, SEMI_STRUCTURED
from bench.rows import OURS
from sparse_collective import random_bsr


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(cases_structured, "randn", lambda *shape: torch.randn(*shape, dtype=torch.bfloat16))
    monkeypatch.setattr(cases_structured, "of_rows", lambda M, K, block, n: random_bsr((M, K), block, per_row=n))


def measured(case):
    case.timer = lambda calls, *, warm_s, rounds: {name: [1.0 + (name == OURS)] * rounds for name in calls}
    return case.measure(3)


def test_rows_and_what_is_asked_of_them():
    quick, full = (list(structured_cases(mode)) for mode in ("quick", "full"))
    assert [case.asked for case in quick] == [*[1.45, 1.10] * 4, 1.4, 1.45, *[1.3] * 4, None, None]
    assert {case.name for case in quick} < {case.name for case in full} and len({c.name for c in full}) == len(full)
    assert all(case.against in [peer.name for peer in case.peers] for case in full)


@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_a_row(layout):
    """cuBLAS's product counts as many operations as ours. torch has no semi-structured product on the CPU."""
    row = measured(structured(136, 80, 96, layout, CUBLAS, 1.45))
    assert row.ratio == 0.5 and row.ours.flops == row.rival.flops == 136 * 80 * 96
    assert row.peer(SEMI_STRUCTURED) is None


def test_a_row_of_blocks():
    """Both count the stored elements."""
    row = measured(blocks((64, 128), 0.5, 40, 1.4, size=256))
    assert row.ratio == 0.5 and row.against == BSR and row.ours.flops == row.rival.flops == 256 * 256 * 40 * 0.5


@pytest.mark.parametrize("density", [None, 0.5])
def test_a_row_of_a_feed_forward(density):
    """Layers with 2:4 inside, compiled, are right, and both count as many operations."""
    torch._dynamo.reset()
    case = cases_structured_layers.feed_forward(
        128, 256, 8, density, block=(64, 64), device="cpu", backend="aot_eager"
    )  # fmt: skip
    row = measured(case)
    assert row.ratio == 0.5 and row.against == (DENSE_SWIGLU if density is None else OUR_SWIGLU)
    assert row.ours.flops == row.rival.flops == 2 * 3 * 128 * 256 * 8 * 0.5 * (density or 1.0)
    torch._dynamo.reset()


@pytest.mark.parametrize(("per", "fast"), [("row", False), ("tensor", True)])
def test_a_row_of_8_bit_floats(per, fast):
    """All count the stored elements. torch has no semi-structured product of 8-bit floats on the CPU."""
    row = measured(structured_float8(144, 80, 96, per, fast, DENSE, 1.3))
    assert row.ratio == 0.5 and row.ours.flops == row.rival.flops == 144 * 80 * 96 and "error" in row.ours.note
    assert row.peer(SEMI_STRUCTURED) is None


def test_a_row_of_blocks_of_8_bit_floats():
    row = measured(blocks_float8((64, 128), 0.5, 40, size=256))
    assert row.ratio == 0.5 and row.against == BSR and row.ours.flops == row.rival.flops == 256 * 256 * 40 * 0.5


def test_the_command_knows_the_suite():
    suite = command.SUITES[cases_structured.SUITE]
    assert [call() is not None for call in suite.host_calls().values()] == [True, True, True]
