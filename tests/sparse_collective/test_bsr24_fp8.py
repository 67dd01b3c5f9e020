"""FP8 Bsr24 beyond the conformance cases: scales, conversions, plans, errors, machine code."""

import copy
import io
import re

import pytest
import torch

from cute_kernels import Sparse24, explain, prune_2_4
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.inspect import disassemble
from sparse_collective import Bsr24, BsrMatrix, bsr_linear, random_bsr
from sparse_collective.bsr24.family import BSR24

from ..compiled import cubin
from ..gemm_errors import numbers
from .test_fp8_bsr import scales_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
PER = pytest.mark.parametrize("per", [None, "tensor", "block"])
MASK = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.bool)


def sparse(mask=MASK, block=(128, 128), *, per="block", dtype=E4M3, device="cpu") -> Bsr24:
    """With an empty block row, and groups of fewer than two nonzeros."""
    (rows, columns), (bm, bk) = mask.shape, block
    W = BsrMatrix.from_dense(torch.ones(rows * bm, columns * bk, device=device), block, mask=mask.to(device))
    values = numbers(*W.values.shape, dtype=dtype, device=device).float()
    values = (values * (torch.rand(values.shape, device=device) > 0.2)).to(dtype)
    return W.with_values(values, scales_of(per, W)).prune_2_4()


# -- the matrix -------------------------------------------------------------------------------------------------------


@DTYPES
@PER
@pytest.mark.parametrize("block", [(128, 128), (64, 192), (256, 64)], ids=str)
def test_pruning_keeps_two_of_four_in_a_row_and_the_scales(block, per, dtype):
    W = random_bsr((512, 384), block, density=0.5)
    W = W.with_values(numbers(*W.values.shape, dtype=dtype), scales_of(per, W))
    V = W.prune_2_4()
    assert V.dtype == dtype and V.scaled_per == per and (per is None or torch.equal(V.scales, W.scales))
    back = V.to_bsr()
    assert torch.equal(back.values.float(), prune_2_4(W.values).float()) and V.values.shape[-1] == block[1] // 2
    assert torch.equal(V.to_dense().float(), back.to_dense().float())
    again = Bsr24.from_bsr(back)
    assert torch.equal(again.values.float(), V.values.float()) and torch.equal(again.metadata, V.metadata)


def test_a_block_has_the_metadata_of_a_matrix_of_its_own():
    V = sparse(block=(192, 128))
    for number, block in enumerate(V.to_bsr().values):
        assert torch.equal(V.metadata[number], Sparse24.from_dense(block).metadata[:2, :3])


@pytest.mark.parametrize("per", ["tensor", "block"])
def test_quantising_and_other_dtypes(per):
    """Pruned first or quantised first; and back."""
    V = random_bsr((256, 384), (128, 128), density=0.5).prune_2_4()
    Q = V.quantize(per=per)
    assert torch.equal(Q.to_dense(), V.to_bsr().quantize(per=per).prune_2_4().to_dense())
    back = Q.to(FP32)
    assert back.scaled_per is None and torch.equal(back.to_dense(), Q.to_dense())
    assert torch.equal(back.metadata, V.metadata) and not torch.equal(Q.metadata, V.metadata)
    cast = V.to(E5M2)
    assert cast.scales is None and torch.equal(cast.to_dense().float(), V.to_dense().to(E5M2).float())
    assert Q.to("cpu") is Q and Q.to("meta").scales.device.type == "meta"
    assert Q.nbytes < 0.63 * V.to_bsr().values.numel() + 128  # with indices and scales


def test_it_is_copied_and_saved():
    V, file = sparse(), io.BytesIO()
    torch.save(V, file)
    file.seek(0)
    for other in (copy.copy(V), copy.deepcopy(V), torch.load(file, weights_only=True)):
        assert torch.equal(other.to_dense(), V.to_dense()) and torch.equal(other.scales, V.scales)


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "n"), [((0, 128), 8), ((128, 0), 8), ((128, 128), 0), ((128, 128), 8)], ids=str)
def test_empty_products(shape, n):
    V = random_bsr(shape, (64, 128), density=0.0).quantize().prune_2_4() if 0 not in shape else None
    if V is None:
        V = random_bsr(shape, (64, 64), density=0.0).prune_2_4().to(E4M3)
    x = torch.ones(n, shape[1]).to(E4M3)
    assert (bsr_linear(x, V, bias=torch.ones(shape[0])) == 1).all()


def test_plans():
    x = torch.empty(8192, 8192, dtype=E4M3, device="meta")
    for block in ((128, 128), (256, 128), (64, 128)):
        V = random_bsr((8192, 8192), block, per_row=8).prune_2_4().quantize().to("meta")
        plan = explain(bsr_linear, x, V, arch="sm_90")
        assert plan.facts.family == "bsr24" and plan.facts.promotes and "times the scale of their block" in str(plan)
    V = random_bsr((512, 512), (128, 128), per_row=2).prune_2_4().quantize(per="tensor")
    fast = explain(bsr_linear, x[:512, :512], V.to("meta"), use_fast_accum=True, arch="sm_90")
    assert "about 14 bits" in str(fast)


def refusals() -> list:
    V, one = sparse(), torch.ones(1)
    x = numbers(24, 384)
    narrow = random_bsr((128, 384), (64, 64), per_row=2).prune_2_4().quantize()
    return [
        (lambda: bsr_linear(x.to(BF16), V), TypeError, "x is torch.bfloat16 but W is torch.float8_e4m3fn"),
        (lambda: bsr_linear(x, V, scale_x=one.half()), TypeError, "scale_x is torch.float16"),
        (lambda: bsr_linear(x, V, use_fast_accum=True), ValueError, "use_fast_accum with a scale for each block"),
        (lambda: bsr_linear(x, V, out_dtype=E4M3), ValueError, "a Bsr24 does not support FP8 outputs"),
        (lambda: explain(bsr_linear, x, narrow, arch="sm_90"), ValueError, "no whole tiles of 64 rows and 128 columns"),
        (lambda: explain(bsr_linear, x, V, arch="sm_86"), ValueError, r"sm_89 with mma.sync .*; W.to_bsr\(\)"),
        (lambda: V.to(E5M2), TypeError, r"with scales to torch.float8_e5m2"),
        (lambda: V.quantize(), TypeError, "float8_e4m3fn"),
    ]


@pytest.mark.parametrize("number", range(8))
def test_refusals(number):
    call, error, words = refusals()[number]
    with pytest.raises(error, match=words):
        call()


# -- kernels ----------------------------------------------------------------------------------------------------------

KERNELS = [facts for facts in BSR24.catalogue("sm_90") if facts.element.width == 1]


def test_each_configuration_is_in_the_catalogue():
    assert len(KERNELS) == len({BSR24.title(facts) for facts in KERNELS}) > 40
    own = {facts.config for facts in KERNELS}
    for block in ((128, 128), (64, 128)):
        configs = BSR24.candidates("sm_90", BlockFacts(*block, "int32"), KERNELS[0].spec, KERNELS[0].element)
        assert own >= {config for config in configs if config.tile_k == 128 and config.consumer_groups == 1}


def test_products_are_sparse_ones():
    facts = next(facts for facts in KERNELS if facts.promotes)
    sass = disassemble(cubin(facts))
    assert set(re.findall(r"[HQ]GMMA\.\S+", sass)) == {"QGMMA.SP.64x128x64.F32.E4M3.E4M3"}
