"""Scores that outgrow what came before them: the sm_90 kernel weighs a tile of scores blindly, and again if that fails.

What a row's first tile says of it is made wrong on purpose, in some rows of a warp and not in others: by little, by
more than a p of 16 bits can be, by more than an exponential in fp32 can be, at every tile or at one key.
"""

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, dispatch
from attention.forward import heuristics
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.testing.reference import attention_plainly, band_mask, poisoned

BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64
# (D, tiles): all shapes of tiles that there are on sm_90
TILES = [(dim, tiles) for dim, found in heuristics.SM_90.items() for tiles, _ in found]


def operands(D, growth, spikes, dtype=BF16, device="cuda", rows=400, columns=1000, heads=2):
    """(q, k, v): scores in every third row grow by `growth` every 64 keys, and in every fifth by `spikes` at some keys.

    Growth is in units of the score, after the scale 1 / 8 that the tests use.
    """
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, heads, n, D, generator=generator) for n in (rows, columns, columns))
    q[..., :2] = 0
    q[..., ::3, 0] = 8 * growth / 4
    q[..., ::5, 1] = 8 * spikes / 64
    k[..., 0] = torch.arange(columns) // 64 * 4
    k[..., 1] = 64.0 * (torch.rand(columns, generator=generator) < 0.01)
    return tuple(t.to(device, dtype) for t in (q, k, v))


def check(q, k, v, out, lse, seen):
    """Against fp64: two roundings to 16 bits of what is at most as large as v, and lse to fp32's precision."""
    exact, exact_lse = attention_plainly(*(t.to(FP64) for t in (q, k, v)), seen, scale=1 / 8)
    assert (out - exact).abs().max() <= 2.0**-8 * v.abs().max().double()
    empty = exact_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty) and not out[empty].count_nonzero()
    wrong, size = (lse.double() - exact_lse)[~empty].abs(), exact_lse[~empty].abs().max()
    assert wrong.max() <= 2e-5 * (1 + size)


GROWTHS = [(0.5, 0), (8, 0), (30, 0), (100, 400), (0, 30), (0, 1000), (-100, 300)]


@pytest.mark.parametrize(("growth", "spikes"), GROWTHS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("terms", [{}, {"causal": True}, {"window_size": (300, 100)}], ids=str)
def test_dense(device, path, growth, spikes, dtype, terms):
    q, k, v = operands(64, growth, spikes, dtype, device)
    out = poisoned(*q.shape, dtype=dtype, device=device)
    _, lse = attention(q, k, v, scale=1 / 8, return_lse=True, out=out, **terms)
    left, right = terms.get("window_size", (None, 0 if terms else None))
    check(q, k, v, out, lse, band_mask(q.shape[2], k.shape[2], left, right, device))


@pytest.mark.gpu
@pytest.mark.sm_90
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("D", "tiles"), TILES, ids=str)
def test_tiles(monkeypatch, D, tiles, causal):
    """Every shape of tiles, and more query tiles than a CTA's first one."""
    monkeypatch.setattr(heuristics, "SM_90", {D: ((tiles, 1.0),)})
    monkeypatch.setattr(heuristics, "UNMASKED_ONLY", set())
    monkeypatch.setattr(dispatch, "_PLANS", PlanCache(operands=3))
    q, k, v = operands(D, 40, 500, heads=80)
    out = poisoned(*q.shape, device="cuda")
    _, lse = attention(q, k, v, causal=causal, scale=1 / 8, return_lse=True, out=out)
    check(q, k, v, out, lse, band_mask(q.shape[2], k.shape[2], None, 0 if causal else None, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("side", [128, 64])
@pytest.mark.parametrize("D", heuristics.HEAD_DIMS)
def test_blocks(path, D, side):
    """For a block mask, half of the blocks; full ones, and as its elements say."""
    q, k, v = operands(D, 40, 500, rows=1024, columns=1024)
    blocks = torch.rand(1024 // side, 1024 // side, generator=torch.Generator().manual_seed(1)) < 0.5
    out = poisoned(*q.shape, device="cuda")
    for causal in (False, True):
        mask = BlockMask.from_blocks(blocks.cuda(), (side, side))
        _, lse = block_sparse_attention(q, k, v, mask, causal=causal, scale=1 / 8, return_lse=True, out=out)
        seen = blocks.repeat_interleave(side, 0).repeat_interleave(side, 1).cuda()
        check(q, k, v, out, lse, seen.tril() if causal else seen)
