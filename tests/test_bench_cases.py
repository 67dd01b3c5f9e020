"""The benchmark's cases and patterns: names that tell rows apart, shares of blocks, and work that is what it says."""

import pytest
import torch

from bench import cases, patterns


def test_names_tell_rows_apart_and_quick_rows_are_among_the_full_ones():
    for suite in (cases.gemm_cases, cases.sparse_cases):
        quick, full = (list(suite(mode)) for mode in ("quick", "full"))
        for rows in (quick, full):
            assert len({case.name for case in rows}) == len(rows)
        for case in quick + full:
            assert case.against in [peer.name for peer in case.peers]
            assert len({peer.name for peer in case.peers}) == len(case.peers)
            assert case.problem.flops > 0 and case.problem.bytes > 0
        assert {case.name: case.asked for case in quick}.items() <= {case.name: case.asked for case in full}.items()


def test_a_row_of_sums_in_fp16(monkeypatch):
    """On the CPU: ours rounds sums to fp16, the same of ours with fp32 sums does not."""
    monkeypatch.setattr(cases, "randn", torch.randn)
    case = cases.fp16_sums(136, 80, 96, "NT")
    call, _ = case.ours()
    wide, cublas = (peer.setup() for peer in case.peers)
    assert case.against == case.peers[0].name and call().dtype == torch.float16
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    assert (cublas().float() - wide().float()).norm() < 0.01 * wide().float().norm()


@pytest.mark.parametrize("precision", ["tf32", "3xtf32"])
def test_a_row_of_fp32_operands(monkeypatch, precision):
    """On the CPU: of TF32 ours rounds operands, else it errs by less than the row allows."""
    monkeypatch.setattr(cases, "randn", torch.randn)
    case = cases.tf32(136, 80, 96, "NT", precision)
    call, _ = case.ours()
    (peer,) = (peer.setup() for peer in case.peers)
    assert case.against == case.peers[0].name and call().dtype == torch.float32
    assert not torch.backends.cuda.matmul.allow_tf32
    error = (peer() - call()).norm() / call().norm()
    assert 1e-4 < error < 1e-3 if precision == "tf32" else error < 1e-6


@pytest.mark.parametrize("name", patterns.PATTERNS)
@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (128, 128), (512, 512)])
def test_patterns_keep_what_they_should(name, rows, cols):
    mask = patterns.PATTERNS[name](rows, cols, 1 / 8)
    assert mask.shape == (rows, cols) and mask.dtype is torch.bool
    assert abs(mask.double().mean().item() - 1 / 8) < 0.02
    assert torch.equal(mask, patterns.PATTERNS[name](rows, cols, 1 / 8)), "the same each time"


def test_a_tenth_of_skewed_rows_holds_half_and_bands_are_neighbours():
    lengths = patterns.skewed(64, 64, 1 / 8).sum(1).sort(descending=True).values
    assert abs(lengths[:6].sum().item() / lengths.sum().item() - 0.5) < 0.03
    mask = patterns.banded(64, 64, 1 / 8)
    assert mask.sum(1).tolist() == [8] * 64 and (mask[1:] & mask[:-1]).sum(1).min() >= 7


def test_a_matrix_has_the_mask_s_blocks():
    mask = patterns.scattered(5, 7, 0.4)
    W = patterns.matrix(mask, (16, 32), device="cpu")
    assert W.shape == (80, 224) and W.nnz == int(mask.sum()) and W.checked
    found = W.to_dense().view(5, 16, 7, 32).abs().sum((1, 3)) > 0
    assert torch.equal(found, mask)


def test_a_grouped_row_is_what_its_peers_compute():
    """On the CPU, through the ops' reference; set-ups compare with the truth."""
    case = cases.grouped(512, 256, 384, (128, 128), 0.5, experts=4, run=64, device="cpu")
    call, plan = case.ours()
    truth = call().float()
    for peer in case.peers:
        assert (peer.setup()().float() - truth).norm() < 0.01 * truth.norm()
    assert case.problem.flops == 2 * 512 * 256 * 384 / 2 and case.against in [peer.name for peer in case.peers]
