"""What the benchmark makes of its rows: the table, result files, figures of them, and two runs beside each other."""

import argparse
import importlib
import io
import json
import sys

import pytest
from rich.console import Console

from bench import compare, record, table
from bench.rows import Problem, Row, Timing

CEILINGS = {"copy_tbs": 4.25, "l2_tbs": 8.6, "tensor_tflops": 780.0}
CUBLAS, EQUAL, WHOLE, TRITON = "cuBLAS", "cuBLAS, equal work", "cuBLAS 8192 cubed", "torch's Triton BSR"
DENSITIES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
DENSE_RATE = 700.0


def at(name: str, flops: float, tflops: float | str) -> Timing:
    """A timing whose median is that rate, with some spread around it; or the error that is given in its place."""
    if isinstance(tflops, str):
        return Timing(name, flops, error=tflops)
    us = flops / tflops / 1e6
    return Timing(name, flops, [us * (1 + step / 1000) for step in range(-10, 11)])


def dense(size=4096, layout="NN", rate=720.0, peers=((CUBLAS, 700.0),), asked=None, **facts) -> Row:
    """A square dense row; a peer's figure is its rate, or the reason why it has none."""
    p = Problem("gemm", size, size, size, layout=layout, **facts)
    others, ours = [at(name, p.flops, r) for name, r in peers], at("ours", p.flops, rate)
    return Row("gemm", f"gemm {size} {layout}", p, ours, others, peers[0][0], asked, "sm_90 128x192x64 [stages 5]")


def sparse(side=64, density=1 / 8, rate=500.0, whole: float | str = DENSE_RATE, triton: float | str = 300.0) -> Row:
    p = Problem("bsr_matmul", 8192, 8192, 8192, (side, side), density)
    peers = [at(EQUAL, p.flops, 690.0), at(WHOLE, 2.0 * 8192**3, whole), at(TRITON, p.flops, triton)]
    ours = at("ours", p.flops, rate)
    return Row("block-sparse", f"bsr_matmul {side}x{side}, {density:.3g}", p, ours, peers, EQUAL, None, "sm_90")


def lines(**kinds) -> list[Row]:
    """Rows of two block shapes over all densities, at a rate that is the same at each."""
    return [sparse(side, d, rate, **kinds) for side, rate in ((64, 490.0), (16, 140.0)) for d in DENSITIES]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a result file as a run on a card does; returns its path."""

    def written(suite, rows, ceilings=CEILINGS, folder="run", **facts):
        where = {"card": "NVIDIA H200", "sources": "s1", "commit": "c1", "date": "2026-12-02"} | facts
        monkeypatch.setattr(record, "environment", lambda: where)
        return record.write(suite, rows, ceilings, {}, tmp_path / folder, "full")

    return written


def shown(rows, ceilings=CEILINGS, host=None, width=170) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    table.show(rows, ceilings, host or {}, console)
    return console.export_text()


def line_with(text: str, part: str) -> str:
    return next(line for line in text.splitlines() if part in line)


# -- the table -----------------------------------------------------------------------------------------------


def test_table_shows_ours_and_every_peer():
    peers = [("quack, untuned", 600.0), (CUBLAS, 900.0), *((f"peer {i}", 100.0 * i) for i in range(1, 4))]
    row = dense(peers=(*peers, ("absent", "ImportError: no [module] named absent")), asked=0.95)
    row.against = CUBLAS
    text = shown([row], host={"gemm": 5.724})
    first = line_with(text, "gemm 4096 NN")
    assert "190.9 (" in first and " 720 " in first and "0.95 MISSED" in first and "[stages 5]" in text
    assert CUBLAS in first and "(0.800)" in first  # the peer that it is held against comes first
    assert "(1.200)" in line_with(text, "quack") and "(2.400)" in line_with(text, "peer 3")
    assert "absent: ImportError: no [module] named" in text
    assert "MISSED (1 of 1): gemm 4096 NN" in text
    assert "copy 4.25 TB/s, L2 feed 8.6 TB/s, tensor cores 780 TFLOP/s" in text
    assert "gemm 5.72 µs" in text


def test_table_marks_what_was_asked_and_needs_nothing_optional():
    reached, unknown = dense(asked=1.0), dense(peers=((CUBLAS, "crashed"),), asked=0.9)
    assert not table.is_missed(reached) and table.is_missed(unknown) and not table.is_missed(dense())
    assert "MISSED" not in shown([reached, dense()])
    text = shown([dense(peers=((CUBLAS, "E" * 500),))], ceilings={"copy_tbs": 4.0})
    assert "…" in text and "EEEE" in text and text.count("E") < 150
    assert "ceilings: copy 4 TB/s" in text and "L2" not in text and "host" not in text
    assert shown([], ceilings={}).strip() == ""
    assert all(len(line) <= 170 for line in shown([sparse(), dense(), sparse(triton="no" * 100)]).splitlines())


# -- figures -------------------------------------------------------------------------------------------------


@pytest.fixture
def plots():
    pytest.importorskip("matplotlib")
    from bench import plots

    return plots


@pytest.mark.parametrize(("rate", "even"), [(0.7, 0.7), (0.25, 0.25), (1.1, None), (0.01, None)])
def test_break_even_of_a_constant_rate_is_its_share_of_dense(plots, rate, even):
    """A kernel at 0.7 of dense's rate has speed-up 0.7 / density: one at density 0.7, straight in log space."""
    points = [(d, rate / d) for d in DENSITIES]  # 0.25 is one of them
    for found in (plots.break_even(points), plots.break_even(points[::-1])):
        assert found == (even and pytest.approx(even))
    assert plots.break_even([]) is None


def test_break_even_is_written_into_the_figure(plots, write):
    runs = {"block-sparse": record.load(write("block-sparse", lines()))}
    (ax,) = plots.speedup_density(runs).axes
    names = [text.get_text() for text in ax.texts]
    assert "64×64, even at 70 %" in names and "16×16, even at 20 %" in names
    dots = [line.get_xdata()[0] for line in ax.lines if line.get_zorder() == 5]
    assert dots == pytest.approx([0.7, 0.2], rel=1e-3)  # times are rounded to 10 ns


@pytest.mark.parametrize("crashed", ["", "RuntimeError: CUDA error"])
@pytest.mark.parametrize("ceilings", [{}, {"l2_tbs": 8.6}, {"copy_tbs": 4.25}, {"tensor_tflops": 780.0}, CEILINGS])
def test_draw(plots, write, tmp_path, crashed, ceilings):
    peers = ((CUBLAS, crashed or 700.0), ("quack, untuned", crashed or 650.0))
    rows = [dense(size, layout, peers=peers) for size in (512, 4096) for layout in ("NN", "NT")]
    write("gemm", [*rows, dense(path="sm_80"), dense(epilogue="bias+relu")], ceilings)
    path = write("block-sparse", lines(whole=crashed or 700.0, triton=crashed or 300.0), ceilings)
    drawn = plots.draw(path.parent, tmp_path / "out")
    expected = ["speedup-density", "roofline"]
    left_out = {"roofline" if not set(ceilings) - {"l2_tbs"} else "", "speedup-density" if crashed else ""}
    assert [file.stem for file in drawn] == [name for name in expected if name not in left_out]
    for file in drawn:
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


def test_without_a_dense_product_there_is_no_speedup_and_one_density_makes_no_line(plots, write):
    few = [row for row in lines(whole="crashed") if row.problem.density < 1]
    (drawn,) = plots.draw(write("block-sparse", few).parent)
    assert drawn.name == "roofline.png" and drawn.parent.name == "nvidia-h200"
    assert plots.draw(write("block-sparse", [sparse(64), sparse(16)], {}).parent) == []


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [([0.5, 0.1, 0.9], [0.5, 0.1, 0.9]), ([0.5] * 3, [0.4, 0.5, 0.6]), ([1.0, 0.99], [1.0, 0.9]), ([], [])],
)
def test_spread_keeps_order_and_distance(plots, wanted, placed):
    assert importlib.import_module("bench.figure").spread(wanted, 0.1) == pytest.approx(placed)


def test_drawing_needs_the_extra_bench(monkeypatch, tmp_path, capsys):
    for module in ("bench.plots", "bench.figure"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for module in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="extra `bench`"):
        importlib.import_module("bench.plots")
    assert run("plot", tmp_path) == 2 and "extra `bench`" in capsys.readouterr().err


# -- two runs ------------------------------------------------------------------------------------------------


def run(*argv) -> int:
    """The exit status of a command that compare.py adds."""
    parser = argparse.ArgumentParser()
    compare.add_command(parser.add_subparsers())
    args = parser.parse_args([str(arg) for arg in argv])
    return args.run(args)


def scaled(*factors: float) -> list[Row]:
    return [dense(size, rate=700.0 * factor) for size, factor in zip((512, 1024, 2048, 4096), factors)]


def test_compare_ratios_of_ratios(write, capsys):
    a = write("gemm", [*scaled(1.0, 1.0, 1.0), dense(64)])
    b = write("gemm", [*scaled(1.02, 0.99, 1.1), dense(128)], folder="b")
    found = compare.compare(a, b)
    assert list(found.changes.values()) == pytest.approx([1.02, 0.99, 1.1], rel=1e-3)
    assert found.median == pytest.approx(0.02, abs=1e-3)
    assert found.remarks == ["only in A: gemm 64 NN", "only in B: gemm 128 NN"]
    a, b = write("gemm", scaled(1, 1, 1)), write("gemm", scaled(1.02, 0.98, 1.3), folder="b")
    assert run("compare", a, b) == 0
    text = capsys.readouterr().out
    assert "largest +30.00%: gemm 2048 NN" in text and "median change of 3 rows 2.00%, within 3.00%" in text
    assert run("compare", a, b, "--within", "0.01") == 1
    assert "MORE THAN 1.00%" in capsys.readouterr().out
    assert run("compare", a, a, "--within", "0") == 0


def test_compare_says_what_it_cannot_compare(write, capsys):
    other = dense(1024, peers=(("quack, untuned", 700.0),))
    a = write("gemm", [dense(512), dense(1024), dense(64)])
    b = write("gemm", [dense(512, peers=((CUBLAS, "crashed"),)), other], folder="b", card="NVIDIA A100", sources="s2")
    assert run("compare", a, b) == 1
    text = capsys.readouterr().out
    assert "cards differ: NVIDIA H200 in A, NVIDIA A100 in B" in text and "sources differ" in text
    assert "gemm 512 NN: no ratio in B" in text and "against cuBLAS in A, quack, untuned in B" in text
    assert "only in A: gemm 64 NN" in text and "no row can be compared" in text


def test_a_file_of_another_kind_is_refused(write, tmp_path, capsys):
    good, bad = write("gemm", [dense()]), tmp_path / "bad.json"
    for text in ("no json", "[]", json.dumps({"environment": {}, "rows": [{"name": "x", "ours": {}}]})):
        bad.write_text(text)
        assert run("compare", good, bad) == 2 and "bad.json" in capsys.readouterr().err
    assert run("compare", good, tmp_path / "absent.json") == 2


def test_plot_command(plots, write, tmp_path, capsys):
    path = write("gemm", [dense(512), dense(4096)])
    assert run("plot", path.parent, "--out", tmp_path / "out") == 0
    assert "roofline.png" in capsys.readouterr().out and (tmp_path / "out/roofline.png").exists()
    assert run("plot", tmp_path / "out") == 2  # no result file in it
    assert run("plot", write("gemm", [dense(path="sm_80")], {}, folder="c").parent) == 1
