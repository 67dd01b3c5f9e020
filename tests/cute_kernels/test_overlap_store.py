"""FP8 GEMMs that overlap a work tile's store with the next tile (matmul/schedules/overlap_store.py)."""

from unittest import mock

import pytest
import torch

from cute_kernels import explain, quantize
from cute_kernels.matmul import heuristics
from cute_kernels.testing.reference import poisoned
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul, random_bsr

from ..emulator.ops import needs_compiler, on_emulator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def only(columns: int, cluster: int = 1):
    """A context in which tiles of 128 rows and so many columns alone are tried, in clusters of so many CTAs."""
    listed = heuristics.candidates_for

    def some(*args):
        kept = [(family, config) for family, config in listed(*args) if family.name == "bsr"]
        return [(f, c) for f, c in kept if (c.tile_m, c.tile_n, c.cluster, c.split) == (128, columns, cluster, 1)]

    return mock.patch.object(heuristics, "candidates_for", some)


def uneven(block, rows: int, columns: int, dtype=E4M3) -> BsrMatrix:
    """Rows of no blocks, of one, of two and of more, in turns."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        mask[row, torch.randperm(columns)[: (3, 0, 1, columns, 2)[row % 5]]] = True
    W = BsrMatrix.from_dense(torch.randn(rows * block[0], columns * block[1]).to(BF16), block, mask=mask)
    return W.quantize(dtype, "block")


def both(call, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a call with tiles that begin ahead, and with smaller ones that do not, on the emulator."""
    results = []
    for columns, size in ((256, cluster), (128, 1)):
        with only(columns, size), on_emulator("sm_90", sms=4):
            results.append(call(columns == 256))
    return tuple(results)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("block", "cluster"), [((128, 128), 1), ((128, 128), 2), ((256, 128), 2)])
def test_the_bits_of_other_tiles(block, cluster):
    """Sums are added in the same order. Rows of every length, several tiles a CTA, tokens past the last tile."""
    for W in (uneven(block, 5, 4), random_bsr((3 * block[0], 3 * block[1]), block, per_row=2).quantize()):
        x, scale = quantize(torch.randn(300, W.shape[1]).to(BF16), per="row")

        def call(ahead: bool, W=W, x=x, scale=scale):
            assert explain(bsr_linear, x, W, scale_x=scale).facts.overlaps_store == ahead
            return bsr_linear(x, W, activation="relu", out=poisoned(300, W.shape[0]), scale_x=scale)

        assert torch.equal(*both(call, cluster))


@needs_compiler
@pytest.mark.slow
def test_other_calls():
    """W times b, fp16, e5m2; a batch; a number that is no number stays in its row."""
    W = uneven((128, 128), 5, 5, E5M2)
    x, scale = quantize(torch.randn(600, 640).to(BF16), dtype=E5M2, per="row")
    W.values.view(torch.uint8)[0, 3, 7] = 0x7F  # NaN
    b, scales = x.t(), scale.t().contiguous()
    found, wanted = both(lambda _: bsr_matmul(W, b, scale_b=scales, out_dtype=FP16), 2)
    assert torch.equal(found.isnan(), wanted.isnan()) and found[3].isnan().all() and not found[4:].isnan().any()
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    batch = BsrMatrix.stack([uneven((128, 128), 3, 4) for _ in range(2)])
    x, scale = quantize(torch.randn(2, 300, 512).to(BF16), per="row")
    assert torch.equal(*both(lambda _: bsr_linear(x, batch, scale_x=scale), 2))


def test_which_kernels(emulated):
    W = uneven((128, 128), 8, 8)
    x, scale = quantize(torch.randn(4096, 1024).to(BF16), per="row")
    with only(256, 2):
        for more, ahead in (
            ({"scale_x": scale}, True),
            ({"scale_x": scale, "activation": "gelu"}, False),
            ({"scale_x": scale, "out_dtype": FP32}, False),
            ({}, False),
        ):
            assert explain(bsr_linear, x, W, **more).facts.overlaps_store == ahead
        W = uneven((128, 256), 8, 4)
        assert not explain(bsr_linear, x, W, scale_x=scale).facts.overlaps_store
