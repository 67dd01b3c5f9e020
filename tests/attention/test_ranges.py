"""Backward in ranges of query rows (backward/ranges.py), of masks with equal rows; test_selected.py has others."""

import itertools

import pytest
import torch

from attention import BlockMask, block_sparse_attention
from attention.backward import dispatch, ranges
from cute_kernels.testing.reference import normal

from .parts import qkv
from .test_gradients import check as check_gradients
from .test_gradients import machine_fixture as machine_fixture


def test_items_of_ranges():
    """Each nonempty (KV block, range) once: range by range, head by head, the longest first."""
    counts = torch.randint(4, (2, 1, 3, 5), dtype=torch.int32)
    order, listed = ranges.items_of(counts, 3, 2, 4, 2)
    found = order[: listed.item()].tolist()
    lengths = counts.expand(2, 4, 3, 5).unflatten(1, (2, 2)).sum(2).permute(2, 0, 1, 3).flatten()
    assert sorted(found) == lengths.nonzero().flatten().tolist()
    sections = [number // 5 for number in found]
    assert sections == sorted(sections)
    same = [lengths[a] >= lengths[b] for a, b in itertools.pairwise(found) if a // 5 == b // 5]
    assert all(same)


@pytest.fixture
def small_ranges(monkeypatch):
    """Ranges of three or four of eleven rows of blocks, for any mask of equal rows."""
    monkeypatch.setattr(ranges, "ENTRIES", 0)
    monkeypatch.setattr(ranges, "MOST_BYTES", 2**18)


@pytest.mark.parametrize(("side", "head_dim"), [(64, 128), (64, 64), (128, 128)])
def test_masks_of_equal_rows(machine, small_ranges, side, head_dim):
    """Four blocks of each row, one of which no row has, with a list for each query head."""
    device, kernels, _ = machine
    length = 11 * 64 - 20
    indices = torch.rand(1, 4, -(-length // side), -(-length // side) - 1).argsort(-1)[..., :4].int()
    mask = BlockMask.from_indices(indices.to(device), (side, side), lengths=(length, length))
    q, k, v = (t.requires_grad_() for t in qkv(length, length, head_dim, B=1, H=4, heads=2, device=device))
    out = block_sparse_attention(q, k, v, mask)
    dout = normal(*out.shape, device=device)
    with kernels():
        got = torch.autograd.grad(out, (q, k, v), dout)
    check_gradients(got, q, k, v, mask.to_dense(1, 4), dout, None)


def test_when_masks_of_equal_rows_have_ranges():
    """If Q, dO and dq_accum of a head exceed L2 by far, and lists are long: the shapes of two video models."""

    def part(rows, top, head_dim=128):
        facts = dispatch.BackwardFacts(
            "sm_90a", "sm_90", None, head_dim=head_dim, head_dim_v=head_dim, blocks=dispatch.BlockKind(64, 64, None)
        )
        return ranges.rows_of_a_range(facts, rows, top, 7, 7)

    assert part(1713, 64) == 429
    assert part(590, 152) == 590 and part(1713, 30) == 1713 and part(1713, 64, 32) == 1713
