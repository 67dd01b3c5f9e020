"""sddmm by clusters of two CTAs, which load the rows of A once: on the emulator, and that they are chosen."""

from unittest import mock

import pytest
import torch

from cute_kernels.matmul import choose
from cute_kernels.runtime.device import assume
from sparse_collective import BsrMatrix, random_bsr
from sparse_collective.sampled.eager import plan_sddmm, sddmm
from sparse_collective.sampled.family import SAMPLED

from .emulator.ops import on_emulator
from .reference import normal
from .sampled_products import sampled_truth


def pattern_of(counts: list[int], columns: int, block: tuple[int, int]) -> BsrMatrix:
    """With so many blocks in each block row, the last ones."""
    col = torch.cat([torch.arange(columns - count, columns) for count in counts])
    crow = torch.tensor([0, *counts]).cumsum(0)
    values = torch.zeros(len(col), *block, dtype=torch.bfloat16)
    return BsrMatrix(crow.int(), col.int(), values, (len(counts) * block[0], columns * block[1]))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("boxes", [1, 2])
def test_rows_of_any_length_on_the_emulator(boxes, seed, monkeypatch):
    """Odd rows, of whose last group a CTA has no box; one without blocks; a K that ends inside a K-tile."""
    pattern = pattern_of([3, 0, 1, 4], 5, (128, 128))
    a, b = normal(136, 512).t(), normal(136, 640)
    if seed == 2:  # the other majors
        a, b = a.contiguous(), b.t().contiguous().t()
    exact, torchs = sampled_truth((a, b, pattern), {}, None, torch.bfloat16)

    def only(path, problem, spec):
        found = SAMPLED.candidates(path, problem.block, spec)
        return [(SAMPLED, cfg) for cfg in found if (cfg.cluster_n, cfg.boxes) == (2, boxes)]

    monkeypatch.setattr(choose, "candidates_for", only)
    with on_emulator("sm_90", sms=4, seed=seed):
        outs = [torch.full_like(pattern.values, float("nan")) for _ in range(2)]
        for out in outs:
            sddmm(a, b, pattern, out, False, None)
    assert torch.equal(*outs)
    assert (outs[0].double() - exact).abs().max() <= 2 * (torchs.double() - exact).abs().max()


def config_of(shape, per_row: int, tokens: int, accumulate: bool = False):
    pattern = random_bsr(shape, (128, 128), per_row=per_row, dtype=torch.bfloat16)
    a, b = (torch.empty(tokens, n, dtype=torch.bfloat16) for n in shape)
    out = torch.empty_like(pattern.values) if accumulate else None
    with assume("sm_90"), mock.patch.object(BsrMatrix, "check_indices"):
        return plan_sddmm(a.t(), b, pattern, out, accumulate=accumulate).facts.config


def test_few_blocks_take_them():
    """128 blocks are 64 tiles of two, for 132 multiprocessors; and one of each a CTA asks for more than L2 feeds."""
    for shape, per_row in (((8192, 2048), 2), ((2048, 8192), 8)):
        config = config_of(shape, per_row, 8192)
        assert (config.tile_n, config.boxes, config.cluster_n) == (128, 1, 2)


def test_what_they_cannot_add_to():
    """An absent block is nowhere to be read."""
    assert config_of((8192, 2048), 2, 8192, accumulate=True).cluster_n == 1
