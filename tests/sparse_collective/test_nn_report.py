"""Reports of a model's block-sparse layers: text, HTML and a chart."""

import re

import pytest
import torch
from torch import nn

import cute_kernels
from sparse_collective.nn import (
    Bsr24Linear,
    BsrGroupedLinear,
    BsrLinear,
    Report,
    Sparse24Linear,
    SparsityConfig,
    SwiGLU,
    quantize_,
    sparsify_,
    sparsity,
)

from .nn_parts import BF16


def model_of() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "q": BsrLinear(128, 128, blocksize=(32, 32), density=0.25, dtype=BF16),
            "mlp": SwiGLU(64, 128, blocksize=(64, 64), density=0.5, dtype=BF16),
            "shared": BsrGroupedLinear(4, 64, 128, blocksize=(32, 32), density=0.5, dtype=BF16),
            "own": BsrGroupedLinear(4, 64, 128, True, (32, 32), one_pattern=False, density=0.25, dtype=BF16),
            "dense": nn.Linear(8, 8),
        }
    )


def test_any_model_at_any_time():
    model = model_of()
    report = sparsity(model)
    assert {c.name: (c.shape, c.stored, c.blocks, c.note) for c in report.changes} == {
        "q": ((128, 128), 4, 16, "BsrLinear"),
        "mlp.gate_up": ((256, 64), 2, 4, "GatedBsrLinear"),
        "mlp.down": ((64, 128), 1, 2, "BsrLinear"),
        "shared": ((4, 128, 64), 16, 32, "BsrGroupedLinear"),
        "own": ((4, 128, 64), 8, 32, "BsrGroupedLinear"),
    }
    q, own = report.changes[0], report.changes[-1]
    assert (q.before, q.after) == (128 * 128 + 128, 4 * 32 * 32 + 128) and q.density == 0.25
    assert (own.before, own.after) == (4 * 128 * 64 + 4 * 128, 8 * 32 * 32 + 4 * 128)
    assert repr(report) == str(report) and "5 of 5 layers" in str(report)
    quantize_(model, filter_fn=lambda module, fqn: fqn == "q")
    model["two_of_four"], model["both"] = Sparse24Linear(nn.Linear(64, 64, dtype=BF16)), Bsr24Linear(model["mlp"].down)
    found = {c.name: c for c in sparsity(model).changes}
    assert (found["q"].stored, found["q"].note, found["q"].after) == (4, "Float8BsrLinear", 4 * 32 * 32 + 128)
    assert (found["two_of_four"].blocks, found["two_of_four"].after) == (0, 64 * 32 + 64)
    assert (found["both"].stored, found["both"].blocks, found["both"].after) == (1, 2, 64 * 32)
    assert (
        not sparsity(nn.Linear(8, 8)).changes and sparsity(BsrLinear(64, 64, blocksize=(64, 64), density=1.0)).changes
    )


def test_in_a_notebook():
    model = nn.ModuleDict({"<a>": nn.Linear(64, 64, dtype=BF16), "b": nn.Linear(48, 64, dtype=BF16)})
    report = sparsify_(model, SparsityConfig((32, 32), 0.5))
    page = report._repr_html_()
    assert "&lt;a&gt;" in page and "<a>" not in page and page.count("<tr>") == 4
    assert page.count("width:30px") == 1 and "skipped: in_features is 48" in page
    assert len(re.findall("<td", page)) == len(re.findall("</td>", page)) == 12


def test_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    ax = sparsity(model_of()).plot()
    assert [bar.get_width() for bar in ax.patches] == [0.25, 0.5, 0.5, 0.5, 0.25]
    assert ax.get_title().startswith("5 layers store 3")
    assert sparsity(model_of()).plot(ax) is ax
    with pytest.raises(ValueError, match="no layer with blocks to plot"):
        Report().plot()


def test_plans_print_as_they_are_shown():
    plan = cute_kernels.explain(cute_kernels.gemm, torch.zeros(16, 16, dtype=BF16), torch.zeros(16, 16, dtype=BF16))
    assert repr(plan) == str(plan) and "\n" in repr(plan)
