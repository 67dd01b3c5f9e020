"""The demonstration's long prompt: the pattern is what it is said to be, and its picture shows what was measured."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("matplotlib")
from demo import figure, long_context  # noqa: E402


@pytest.mark.parametrize("length", [1000, 2048])
def test_the_pattern_is_a_window_global_tokens_and_documents(length):
    mask = long_context.pattern(length, 100, 70, "cpu")
    ends = torch.tensor([round(length * sum(long_context.DOCUMENTS[:i])) for i in range(1, 8)])
    assert ends[-1] == length
    i, j = torch.arange(length)[:, None], torch.arange(length)
    document = torch.searchsorted(ends, torch.arange(length), right=True)
    must = ((i - j < 100) | (j < 70) | (document[:, None] == document)) & (j <= i)
    assert torch.equal(mask.to_dense()[0, 0], must)


def test_the_study_agrees_and_the_check_finds_a_wrong_row(monkeypatch):
    monkeypatch.setattr(long_context, "SMALL_LENGTH", 1024)
    found = long_context.study("cpu")
    assert found.agrees and 0 < found.share < 1 and found.micros == {} and found.speedup() is None
    q, k, v = (torch.randn(1, 2, 1024, 64) for _ in range(3))
    out = long_context.block_sparse_attention(*(t.bfloat16() for t in (q, k, v)), found.mask)
    out[:, :, -1] *= 1.5
    assert long_context.check(out, *(t.bfloat16() for t in (q, k, v)), found.mask) > 0.02


def test_an_op_that_raises_is_a_result_that_disagrees(monkeypatch):
    def absent(*args):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(long_context, "SMALL_LENGTH", 512)
    monkeypatch.setattr(long_context, "block_sparse_attention", absent)
    found = long_context.study("cpu")
    assert math.isnan(found.error) and not found.agrees and "no kernel" in found.micros[long_context.SPARSE]


@pytest.mark.parametrize("timed", [False, True])
def test_picture(monkeypatch, tmp_path, timed):
    monkeypatch.setattr(long_context, "SMALL_LENGTH", 4096)
    monkeypatch.setattr(long_context, "SMALL_HEADS", 1)
    found = long_context.study("cpu")
    if timed:
        names = long_context.TORCH, long_context.DENSE, long_context.SPARSE
        found = replace(found, micros=dict(zip(names, (900.0, 800.0, 200.0), strict=True)))
        assert found.speedup() == 4.0
    saving = partial(figure.draw_saving, found=found, device="NVIDIA H200" if timed else "")
    figure.write_png(tmp_path / "attention.png", partial(figure.draw_mask, mask=found.mask), saving, 1.3)
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert long_context.table(found).row_count == 3
    kinds = figure.block_kinds(found.mask)
    assert kinds.shape == (32, 32) and set(kinds.flatten().tolist()) == {0, 1, 2}
