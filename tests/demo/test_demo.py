"""The demonstration on a CPU: what it prints fits 80 columns, and its recorded curve is that of the result file."""

import json
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")
from bench.table import make_console  # noqa: E402
from demo import __main__ as demo  # noqa: E402
from demo import recorded  # noqa: E402
from demo.layer import load_layer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_the_recorded_curve_is_that_of_the_result_file():
    measured = json.loads((ROOT / "bench/results/cpu/minilm.json").read_text())
    rows, source = recorded.load()
    assert measured["environment"]["date"] in source and "./run train --minilm" in source
    for row, other in zip(rows, measured["rows"], strict=True):
        assert (row.density, row.parameters, row.steps) == (other["density"], other["parameters"], other["steps"])
        assert row.cosine == [round(x, 4) for x in other["cosine"]]


def test_it_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(demo, "BLOCKS", ((64, 64), (48, 96)))
    console = make_console(80)
    assert isinstance(console, Console)
    demo.show_recovery(console)
    rows = demo.show_accuracy(console, load_layer("cpu"))
    lines = capsys.readouterr().out.splitlines()
    assert all(row.agrees for row in rows) and max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("pruned by")]
