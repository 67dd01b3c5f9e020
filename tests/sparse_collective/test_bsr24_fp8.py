"""Block-sparse matrices of 8-bit floats whose blocks are 2:4 sparse: scales, products, refusals, kernels."""

import copy
import io
import re

import pytest
import torch

from cute_kernels import Sparse24, explain, prune_2_4
from cute_kernels.dtypes import TORCH
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.inspect import disassemble
from cute_kernels.testing.reference import assert_as_good_as_torch, poisoned
from sparse_collective import Bsr24, BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr
from sparse_collective.bsr24.family import BSR24

from ..compiled import cubin
from ..emulator import emulate
from ..emulator.ops import needs_compiler, on_emulator
from ..fp8_parts import assert_as_tensor_cores
from .bsr_parts import FORMS, batch
from .test_fp8_bsr import exact_of, numbers, operand, run, scales_of, wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
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


def check(op, V: Bsr24, n: int, kind: str, *, fast=False, out_dtype=BF16, batch=(), **terms) -> None:
    """A product with n columns against fp64: as torch errs in fp32, but for what tensor cores of a GPU round."""
    b, scale = operand(op, V, n, kind, batch=batch)
    M = V.shape[-2]
    out = poisoned(*batch, *((n, M) if op is bsr_linear else (M, n)), dtype=out_dtype, device=V.device)
    assert run(op, V, b, scale, out=out, use_fast_accum=fast, **terms) is out
    W = V.to_bsr()
    exact = exact_of(op, W, b, scale, **terms)
    if V.device.type == "cpu":
        assert_as_good_as_torch(out, exact, exact_of(op, W, b, scale, dtype=FP32, **terms).to(out_dtype), k=b.numel())
    else:
        dense, b = wide(W), b.double() if scale is None else b.double() * scale.double()
        assert_as_tensor_cores(out, exact, *((b, dense.mT) if op is bsr_linear else (dense, b)), fast=fast)


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


def calls(device: str, dtype) -> None:
    """Both ops, kinds of scales of W and of b, sums, tails, terms of an epilogue, batches."""
    of = {"dtype": dtype, "device": device}
    check(bsr_linear, sparse(per="block", **of), 200, "each", bias=torch.randn(512, device=device), activation="gelu")
    check(bsr_matmul, sparse(per="block", **of), 72, "each", out_dtype=FP32)
    check(bsr_linear, sparse(per="tensor", **of), 40, "each", fast=True, out_dtype=FP16)
    check(bsr_matmul, sparse(per=None, **of), 136, "tensor", fast=True)
    V = sparse(block=(64, 128), per="block", **of)
    check(bsr_linear, V, 264, "none")
    check(bsr_linear, V, 1, "each")
    wide_blocks = sparse(block=(256, 256), mask=MASK[:2, 1:], per="tensor", **of)
    check(bsr_linear, wide_blocks, 72, "tensor")
    check(bsr_matmul, wide_blocks, 40, "each", residual=torch.randn(512, 40, device=device).to(BF16))
    for form in FORMS:
        W = batch(form, (64, 128), device, grid=(2, 3), names=("power_law", "no_blocks"))[0]
        W = W.with_values(numbers(*W.values.shape, **of), scales_of("block", W))
        V = W.prune_2_4()
        check(bsr_matmul, V, 72, "each", batch=(2,))
        grouped(V)


def grouped(V: Bsr24) -> None:
    """Runs of 64 tokens, one of them of nobody."""
    groups = torch.tensor([0, 1, 2, 0], dtype=torch.int32, device=V.device)
    x, scale = operand(bsr_linear, V, 256, "each")
    ours, dense = bsr_grouped_linear(x, V, expert_ids=groups, scale_x=scale), wide(V.to_bsr())
    runs = zip((x.double() * scale).unflatten(0, (-1, 64)), groups.tolist(), strict=True)
    exact = torch.cat([run @ (dense[min(g, 1)] * (g < 2)).mT for run, g in runs])
    magnitudes = torch.cat([x.double().abs() * scale]) @ dense.abs().amax(0).mT
    assert ((ours.double() - exact).abs() <= 5e-3 * magnitudes + 1e-2 * exact.abs() + 1e-6).all()


@DTYPES
def test_calls_on_the_cpu(dtype):
    calls("cpu", dtype)


@needs_compiler
@pytest.mark.slow
def test_calls_on_the_emulator():
    with on_emulator("sm_90", sms=4, seed=5):
        calls("cpu", E4M3)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("per", "fast"), [("block", False), ("tensor", True)])
def test_calls_of_ada_on_the_emulator(per, fast):
    with on_emulator("sm_89", sms=4, seed=5):
        check(bsr_linear, sparse(per=per), 72, "each", fast=fast)


@pytest.mark.gpu
@DTYPES
def test_calls_on_a_gpu(dtype):
    if torch.cuda.get_device_capability() not in ((8, 9), (9, 0)):
        pytest.skip("sm_89 and sm_90 alone")
    calls("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [bsr_matmul, bsr_linear])
@pytest.mark.parametrize("block", [(128, 128), (64, 128), (256, 256), (512, 128)], ids=str)
def test_large_products(op, block):
    """Of few and many columns, with sums of either kind."""
    if torch.cuda.get_device_capability() not in ((8, 9), (9, 0)):
        pytest.skip("sm_89 and sm_90 alone")
    for per, fast in (("block", False), ("tensor", True)):
        V = sparse(torch.rand(12, 24) < 0.3, block, per=per, device="cuda")
        for n in (1, 16, 64, 200, 1536):
            check(op, V, n, "each", fast=fast)


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
    assert "fewer bits than fp32" in str(fast)


def refusals() -> list:
    V, one = sparse(), torch.ones(1)
    x = numbers(24, 384)
    narrow = random_bsr((128, 384), (64, 64), per_row=2).prune_2_4().quantize()
    return [
        (lambda: bsr_linear(x.to(BF16), V), TypeError, "x is torch.bfloat16 but W is torch.float8_e4m3fn"),
        (lambda: bsr_linear(x, V, scale_x=one.half()), TypeError, "scale_x is torch.float16"),
        (lambda: bsr_linear(x, V, use_fast_accum=True), ValueError, "use_fast_accum with a scale for each block"),
        (lambda: bsr_linear(x, V, out_dtype=E4M3), ValueError, "a Bsr24 has no float8 outputs"),
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
ADA = [facts for facts in BSR24.catalogue("sm_89") if facts.element.width == 1]


def titled(kernels) -> list:
    marks = [getattr(pytest.mark, facts.spec.name) for facts in kernels]
    return [pytest.param(facts, id=BSR24.title(facts), marks=m) for facts, m in zip(kernels, marks, strict=True)]


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


def configurations() -> list:
    """Facts of each configuration with a scale for each block, and with fast sums, of the first block that has it."""
    found = {}
    for facts in KERNELS:
        plain = facts.epilogue.is_light and not facts.block.batch and facts.transposed and not facts.ordered
        if plain and facts.dtype == "float8_e4m3fn" and (facts.block.scaled or facts.epilogue.scale_m):
            found.setdefault((facts.config, facts.use_fast_accum), facts)
    return list(found.values())


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("facts", titled(configurations()))
def test_configurations_on_the_emulator(facts):
    """An empty row and a full one, columns beyond the last tile; a scale for each block, or one."""
    cfg, block = facts.config, (facts.block.bm, facts.block.bk)
    V, n = sparse(MASK[:3], block, per="block" if facts.block.scaled else "tensor"), cfg.tile_n * cfg.cluster_n + 40
    x, scale = operand(bsr_linear, V, n, "each")
    d = poisoned(n, V.shape[0], dtype=TORCH[facts.out_dtype])
    with emulate.emulator(sms=4, seed=3):
        pattern = V.crow_indices, V.col_indices, None, None, V.metadata
        scales = V.scales, scale.view(1, -1)
        emulate.emulated(facts)(*pattern, V.values, x, d, *scales, None, None, None, 1.0, 1.0, *facts.counts(1, 4))
    W = V.to_bsr()
    expected = exact_of(bsr_linear, W, x, scale, dtype=FP32).to(d.dtype)
    assert_as_good_as_torch(d, exact_of(bsr_linear, W, x, scale), expected, k=V.shape[1])
