"""The patterns, against the element masks they stand for; and that no constructor waits for the device."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

from attention.masks import patterns
from attention.masks.block_mask import BlockMask, create_block_mask
from sparse_collective import random_bsr
from tests.attention.mask_parts import (
    BLOCKSIZES,
    LENGTHS,
    assert_exact,
    blocks_of,
    blocksizes,
    by_head,
    elements,
    fuzz,
    lengths_,
    positions,
)
from tests.sparse_collective.bsr_parts import NEEDS_GPU


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal(lengths, blocksize):
    p, kv = positions(*lengths)
    assert_exact(patterns.causal(lengths, blocksize), kv <= p)


bounds = st.none() | st.integers(0, 300)


@fuzz
@given(lengths_, blocksizes, bounds, bounds, st.sampled_from([0, 1, 64, 70, 130]), st.integers(0, 140), st.booleans())
def test_sliding_window(lengths, blocksize, left, right, columns, rows, causal):
    p, kv = positions(*lengths)
    band = (kv >= p - (1000 if left is None else left)) & (kv <= p + (1000 if right is None else right))
    dense = (band | (kv < columns) | ((p >= 0) & (p < rows))) & ((kv <= p) | (not causal))
    options = {"global_columns": columns, "global_rows": rows, "causal": causal}
    assert_exact(patterns.sliding_window(lengths, (left, right), blocksize, **options), dense)


cuts = st.lists(st.integers(0, 150), min_size=1, max_size=5)


@fuzz
@given(cuts, st.data(), blocksizes, bounds, st.booleans(), st.integers(0, 70))
def test_packed_documents(q_lengths, data, blocksize, left, causal, padding):
    n = len(q_lengths)
    k_lengths = data.draw(st.none() | st.lists(st.integers(0, 150), min_size=n, max_size=n))
    cu = [torch.tensor([0, *x]).cumsum(0).int() for x in (q_lengths, k_lengths or q_lengths)]
    lengths = tuple(int(c[-1]) + padding for c in cu)
    if 0 in lengths:
        return
    dense = torch.zeros(lengths, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu[0], cu[0][1:], cu[1], cu[1][1:], strict=False):
        p, kv = positions(int(q1 - q0), int(k1 - k0))
        dense[q0:q1, k0:k1] = (kv >= p - (1000 if left is None else left)) & ((kv <= p) | (not causal))
    given_k = None if k_lengths is None else cu[1]
    options = {"lengths": lengths, "blocksize": blocksize, "window_size": (left, None), "causal": causal}
    assert_exact(patterns.packed_documents(cu[0], given_k, **options), dense)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_by_id(batch, causal):
    q_ids, kv_ids = torch.randint(4, (*batch, 200)), torch.randint(4, (*batch, 333))
    q_ids[..., :128], kv_ids[..., 128:256] = 1, 1
    p, kv = positions(200, 333)
    dense = (q_ids[..., :, None] == kv_ids[..., None, :]) & ((kv <= p) | (not causal))
    mask = patterns.documents(q_ids, kv_ids, blocksize=(64, 128), causal=causal)
    assert_exact(mask, dense[:, None] if batch else dense)
    assert (causal or mask.full_kv_num_blocks.any()) and mask.batch == (3 if batch else 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (150, 20)])
@pytest.mark.parametrize("step", [1, 3, 200])
def test_dilated(step, window, causal):
    p, kv = positions(300, 470)
    dense = ((p - kv) % step == 0) & ((kv <= p) | (not causal))
    if window:
        dense &= (kv >= p - window[0]) & (kv <= p + window[1])
    assert_exact(patterns.dilated((300, 470), step, (64, 128), window_size=window, causal=causal), dense)


@fuzz
@given(lengths_, blocksizes, st.integers(1, 4), st.none() | st.integers(0, 2), st.booleans())
def test_dilated_blocks(lengths, blocksize, step, reach, causal):
    p, kv = positions(*lengths)
    rows = -(-lengths[0] // blocksize[0])
    last = [min((r + 1) * blocksize[0], lengths[0]) - 1 for r in range(rows)]
    centre = torch.tensor([int(p[r]) // blocksize[1] for r in last])[torch.arange(lengths[0]) // blocksize[0], None]
    away = kv // blocksize[1] - centre
    dense = (away % step == 0) & ((kv <= p) | (not causal))
    if reach is not None:
        dense &= away.abs() <= reach * step
    assert_exact(patterns.dilated_blocks(lengths, step, blocksize, reach=reach, causal=causal), dense)


@fuzz
@given(st.integers(0, 6), blocksizes, st.booleans(), st.integers(0, 60), st.integers(1, 3))
def test_top_k(k, blocksize, causal, cut, heads):
    scores = torch.randint(-3, 3, (heads, 4, 5)).float()
    scores[scores == -3] = float("-inf")
    lengths = tuple(n * side - cut for n, side in zip((4, 5), blocksize, strict=True))
    mask = patterns.top_k(scores, k, blocksize, lengths=lengths, causal=causal)
    p, kv = positions(*lengths)
    below = (kv <= p) | (not causal)
    allowed = blocks_of(below.expand(*lengths), blocksize)[0] & (scores > float("-inf"))
    chosen = torch.zeros(heads, 4, 5, dtype=torch.bool)
    for h in range(heads):
        for r in range(4):
            columns = allowed[h, r].nonzero().flatten().tolist()
            for c in sorted(columns, key=lambda c: (-scores[h, r, c].item(), c))[:k]:
                chosen[h, r, c] = True
    assert_exact(mask, elements(chosen, blocksize, lengths) & below)


@fuzz
@given(st.data(), lengths_, blocksizes, st.booleans())
def test_vertical_slash(data, lengths, blocksize, causal):
    numbers = st.lists(st.integers(-2, 420), min_size=3, max_size=3)
    vertical, slash = (torch.tensor([data.draw(numbers), data.draw(numbers)]) for _ in range(2))
    mask = patterns.vertical_slash(vertical, slash, lengths=lengths, blocksize=blocksize, causal=causal)
    p, kv = positions(*lengths)
    distance = p - kv
    slash = slash.where(slash >= 0, 999)
    lines = (kv == vertical[..., None, None]) | (distance == slash[..., None, None])
    held = blocks_of(lines.any(1), blocksize)[0]
    assert_exact(mask, elements(held, blocksize, lengths) & ((kv <= p) | (not causal)))


# No synchronisation


@contextlib.contextmanager
def no_synchronisation(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("this waits for the device")

    with monkeypatch.context() as patch:
        for name in ("item", "cpu", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        for name in ("nonzero", "unique", "bincount", "equal", "masked_select"):
            patch.setattr(torch, name, refuse)
        yield


def every_constructor(device, flex, bsr):
    ids = (torch.arange(300, device=device) * 7) % 3
    cu = torch.tensor([0, 100, 300], device=device, dtype=torch.int32)
    scores = torch.rand(2, 3, 4, device=device)
    yield lambda: BlockMask.from_blocks(scores > 0.5, lengths=(300, 500), causal=True)
    yield lambda: BlockMask.from_bsr(bsr)
    yield lambda: BlockMask.from_flex(flex)
    yield lambda: create_block_mask(by_head, None, 2, 300, 500, device=device)
    yield lambda: patterns.causal((300, 500), device=device)
    tokens = {"global_columns": 3, "global_rows": 3}
    yield lambda: patterns.sliding_window((300, 500), (9, 9), **tokens, causal=True, device=device)
    yield lambda: patterns.packed_documents(cu, lengths=(300, 300), causal=True, window_size=(9, None))
    yield lambda: patterns.documents(ids, causal=True)
    yield lambda: patterns.dilated((300, 500), 3, device=device)
    yield lambda: patterns.dilated_blocks((300, 500), 2, causal=True, device=device)
    yield lambda: patterns.top_k(scores, 2, causal=True)
    yield lambda: patterns.vertical_slash(ids[:5], ids[:4], lengths=(300, 500))


def test_constructors_do_not_wait(monkeypatch):
    flex = create_flex_mask(by_head, 1, 2, 300, 500, device="cpu")
    for make in every_constructor("cpu", flex, random_bsr((256, 384), (64, 128), per_row=1)):
        with no_synchronisation(monkeypatch):
            mask = make()
            mask.tables(), mask.transposed(), mask.to_dense(), repr(mask)


class TestCuda:
    pytestmark = NEEDS_GPU

    def test_constructors_do_not_wait(self):
        flex = create_flex_mask(by_head, 1, 2, 300, 500, device="cuda")
        bsr = random_bsr((256, 384), (64, 128), per_row=1, device="cuda")
        for make in every_constructor("cuda", flex, bsr):
            torch.cuda.set_sync_debug_mode("error")
            try:
                mask = make()
                mask.transposed(), repr(mask)
                dense = mask.to_dense()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(mask.to("cpu").to_dense(), dense.cpu())
            mask._check()
