"""Pictures of patterns: print(), the display in notebooks, and plot()."""

import pytest
import torch

from attention import create_block_mask, patterns
from cute_kernels.picture import FULL, PARTIAL, reduced, text_of
from sparse_collective import BsrMatrix


def test_reduced_tables():
    table = torch.zeros(70, 65, dtype=torch.int8)
    table[:35] = FULL
    table[69, 64] = PARTIAL
    small = reduced(table, 32)
    assert small.shape == (24, 22)  # three blocks a cell
    assert (small[:11] == FULL).all() and (small[11] == PARTIAL).all() and small[-1, -1] == PARTIAL
    assert not small[12:, :-1].any()
    assert torch.equal(reduced(table[:32, :32], 32), table[:32, :32].long())


def test_a_block_mask_prints_its_density_and_picture():
    mask = patterns.causal((512, 512))
    lines = str(mask).splitlines()
    assert lines[0] == repr(mask) and "4 x 4 blocks, 62.5 % stored" in lines[1]
    assert lines[3:7] == ["│░░      │", "│██░░    │", "│████░░  │", "│██████░░│"]
    heads = create_block_mask(lambda b, h, q, kv: q >= kv * h, None, 3, 256, 256)
    assert "the first batch item and head of 3" in str(heads)


def test_a_matrix_prints_its_pattern():
    W = BsrMatrix.from_dense(torch.eye(64), (16, 32), density=0.5)
    assert str(W).splitlines()[3:7] == ["│██  │", "│██  │", "│  ██│", "│  ██│"]
    assert str(W.t()).splitlines()[3:5] == ["│████    │", "│    ████│"]
    batch = BsrMatrix.stack([W, W])
    assert "the first matrix of 2" in str(batch) and "4 x 2 blocks, 50 % stored" in str(batch)


def test_notebooks_show_an_svg():
    for shown in (patterns.causal((512, 512)), BsrMatrix.from_dense(torch.eye(64), (16, 32), density=0.5)):
        page = shown._repr_html_()
        assert page.startswith("<pre>") and page.count("<rect") > 2 and "None" not in page.split("<svg")[1]


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    ax = patterns.causal((512, 512)).plot()
    assert ax.get_images()[0].get_array().shape == (4, 4) and "62.5 %" in ax.get_title()
    assert patterns.causal((512, 512)).plot(ax) is ax
    matplotlib.pyplot.close(ax.figure)


def test_tensors_without_data_print_without_a_picture():
    mask = patterns.causal((512, 512), device="meta")
    assert str(mask) == repr(mask)
    with pytest.raises(ValueError, match="no data to plot"):
        mask.plot()
    assert text_of(torch.zeros(0, 4)) == "(no blocks)"
