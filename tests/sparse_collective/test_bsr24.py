"""Bsr24 beyond the conformance cases: the matrix, torch functions, plans, errors, machine code, planted faults."""

import copy
import io
import re

import pytest
import torch

import cute_kernels
from cute_kernels import Sparse24, explain, prune_2_4
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.inspect import disassemble
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import (
    Bsr24,
    BsrMatrix,
    bsr_gated_linear,
    bsr_grouped_linear,
    bsr_linear,
    bsr_matmul,
    random_bsr,
    sddmm,
)
from sparse_collective.bsr24.family import BSR24
from sparse_collective.nn import BsrLinear

from ..compiled import cubin
from ..emulator import emulate
from ..emulator.ops import needs_compiler
from .bsr_parts import BOTH_OPS, FORMS, assert_same, batch, bsr

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BLOCKS = [(128, 128), (64, 64), (256, 64), (192, 192)]


def holes(W: BsrMatrix) -> BsrMatrix:
    """W with elements of its blocks set to zero at random, so that groups have fewer than two nonzeros."""
    return W.with_values(W.values * (torch.rand(W.values.shape, device=W.device) > 0.2).to(W.dtype))


def sparse(pattern="power_law", block=(128, 128), device="cpu", **more) -> Bsr24:
    return holes(bsr(pattern, block, device, **more)).prune_2_4()


# -- the matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_pruning_keeps_two_of_four_in_a_row(block, dtype):
    W = holes(bsr("power_law", block, dtype=dtype))
    V = W.prune_2_4()
    assert torch.equal(V.to_dense(), prune_2_4(W.to_dense())) and V.dtype == dtype
    assert V.shape == W.shape and V.blocksize == block and V.nnz == W.nnz and V.density == W.density
    assert V.values.shape == (W.nnz, block[0], block[1] // 2)
    assert V.metadata.shape == (W.nnz, block[1] // 64, block[0] // 64, 128)
    assert_same(V.to_bsr(), W.with_values(prune_2_4(W.values)))
    again = Bsr24.from_bsr(V.to_bsr())
    assert torch.equal(again.values, V.values) and torch.equal(again.metadata, V.metadata)


def test_a_block_has_the_metadata_of_a_matrix_of_its_own():
    V = sparse(block=(192, 128))
    for number, block in enumerate(V.to_bsr().values):
        of_block = Sparse24.from_dense(block)
        assert torch.equal(V.values[number], of_block.values)
        assert torch.equal(V.metadata[number], of_block.metadata[:2, :3])


@pytest.mark.parametrize("form", FORMS)
def test_batches(form):
    W, _ = batch(form)
    V = W.prune_2_4()
    assert torch.equal(V.to_dense(), prune_2_4(W.to_dense())) and V.batch == form and V.shape == W.shape
    assert V.metadata.shape == (*W.values.shape[:-2], 1, 1, 128)


def test_a_transposed_view_and_patterns_without_blocks():
    W = bsr("power_law", (128, 64))
    assert torch.equal(W.t().prune_2_4().to_dense(), prune_2_4(W.to_dense().t()))
    for shape in ((0, 128), (128, 0), (256, 256)):
        V = random_bsr(shape, (64, 64), density=0.0).prune_2_4()
        assert V.nnz == 0 and V.to_dense().shape == shape and V.metadata.shape == (0, 1, 1, 128)


def test_the_pattern_s_tensors_are_its_own():
    """Facts about a pattern are cached with its tensors, and here the blocks are narrower."""
    W = random_bsr((256, 256), (128, 128), per_row=1)
    V = W.prune_2_4()
    assert V.even and V.crow_indices is not W.crow_indices and W.even
    V.check_indices()
    assert V.checked and torch.equal(V.col_indices, W.col_indices)


def test_it_is_moved_copied_and_saved():
    V = sparse()
    assert V.to(BF16) is V and V.to("cpu") is V and V.cpu() is V
    half = V.to(FP16)
    assert half.dtype == FP16 and torch.equal(half.to_dense().float(), V.to_dense().to(FP16).float())
    meta = V.to("meta")
    assert meta.device.type == meta.metadata.device.type == "meta" and meta.shape == V.shape
    file = io.BytesIO()
    torch.save(V, file)
    file.seek(0)
    for other in (copy.copy(V), copy.deepcopy(V), torch.load(file, weights_only=True)):
        assert torch.equal(other.to_dense(), V.to_dense())
    assert copy.deepcopy(V).metadata is not V.metadata
    assert repr(V).startswith("Bsr24(shape=(384, 640), blocksize=(128, 128), nnz=")
    dense = V.to_bsr()
    assert V.nbytes < 0.57 * dense.values.nbytes + 64


def test_a_module_keeps_it_as_tensors():
    V, module = sparse(), torch.nn.Module()
    names = "crow_indices", "col_indices", "values", "metadata"
    for name in names:
        module.register_buffer(name, getattr(V, name))
    crow, col, values, metadata = (module.state_dict()[name] for name in names)
    M, K = V.shape
    again = Bsr24(BsrMatrix(crow, col, values, (M, K // 2)), metadata)
    assert torch.equal(again.to_dense(), V.to_dense()) and again.values.data_ptr() == V.values.data_ptr()


def other_metadata(V: Bsr24, change):
    return lambda: Bsr24(V.compressed, change(V.metadata))


def wrong() -> list:
    W = random_bsr((128, 256), (128, 128), per_row=1)
    V = W.prune_2_4()
    narrow = random_bsr((128, 96), (32, 96), per_row=1)
    return [
        (lambda: Bsr24.from_bsr(W), ValueError, r"row 0 of stored block 0, columns 0 to 3; W.prune_2_4\(\)"),
        (lambda: narrow.prune_2_4(), ValueError, "blocks of 32x96; .*multiples of 64 rows and 64 columns"),
        (lambda: Bsr24.from_bsr(narrow), ValueError, "blocks of 32x96"),
        (lambda: Bsr24.from_bsr(W.quantize()), ValueError, "row 0 of stored block 0, columns 0 to 3"),
        (lambda: Bsr24.from_bsr(W.to_dense()), TypeError, "must be a BsrMatrix, got Tensor"),
        (lambda: Bsr24(W.values, V.metadata), TypeError, "must be a BsrMatrix, got Tensor"),
        (lambda: V.quantize(per="row"), ValueError, "known are 'block' and 'tensor'"),
        (lambda: Bsr24(random_bsr((64, 64), (64, 64), per_row=1).t(), V.metadata), ValueError, "transposed view"),
        (lambda: Bsr24(random_bsr((64, 48), (64, 48), per_row=1), V.metadata), ValueError, "blocks of 64x96"),
        (other_metadata(V, lambda t: t.long()), TypeError, "torch.int32, got a torch.strided tensor of torch.int64"),
        (other_metadata(V, lambda t: t[:, :1]), ValueError, r"must be \(1, 2, 2, 128\), contiguous"),
        (other_metadata(V, lambda t: t.to("meta")), ValueError, "metadata are on meta"),
        (lambda: BsrLinear.from_bsr(V), TypeError, r"no gradients; Bsr24Linear.from_bsr\(W, bias\)"),
        (lambda: sddmm(normal(128, 8), normal(8, 256), V), TypeError, "pattern must be a BsrMatrix, got Bsr24"),
        (lambda: torch.add(V, V), TypeError, "add does not take a Bsr24; .*bsr_linear"),
        (lambda: normal(4, 128) @ V, TypeError, "left operand alone.*W.to_bsr"),
    ]


@pytest.mark.parametrize("number", range(16))
def test_what_is_refused(number):
    call, error, words = wrong()[number]
    with pytest.raises(error, match=words):
        call()


# -- products ---------------------------------------------------------------------------------------------------------


def operand(op, V: Bsr24, n: int, batch=()):
    K, more = V.shape[-1], {"dtype": V.dtype, "device": V.device}
    return normal(*batch, n, K, **more) if op is bsr_linear else normal(*batch, K, n, **more)


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
@BOTH_OPS
def test_wide_numbers_on_the_cpu(op, dtype):
    V = sparse(dtype=dtype)
    b = operand(op, V, 24)
    ours = op(b, V) if op is bsr_linear else op(V, b)
    exact = b.double() @ V.to_dense().double().t() if op is bsr_linear else V.to_dense().double() @ b.double()
    assert ours.dtype == dtype and (ours - exact).abs().max() < (1e-3 if dtype is FP32 else 1e-10)


def test_torch_s_functions():
    V, x = sparse(), normal(24, 640)
    bias = torch.randn(384, dtype=BF16)
    assert torch.equal(torch.nn.functional.linear(x, V, bias), bsr_linear(x, V, bias=bias))
    assert torch.equal(V @ x.t(), bsr_matmul(V, x.t())) and torch.equal(torch.matmul(V, x.t()), V @ x.t())
    assert torch.equal(V @ x[0], bsr_linear(x[0], V))
    double = bsr_linear(x, V, epilogue=lambda t: t * 2.0)
    assert torch.equal(double, 2.0 * bsr_linear(x, V))


def test_a_gate_follows_the_gemm():
    V, x = sparse(block=(128, 64)), normal(24, 320)
    assert torch.equal(bsr_gated_linear(x, V), bsr_gated_linear(x, V.to_bsr()))
    assert "not fused" in str(explain(bsr_gated_linear, x, V, arch="sm_90"))


@pytest.mark.parametrize(("shape", "n"), [((0, 128), 8), ((128, 0), 8), ((128, 128), 0), ((128, 128), 8)], ids=str)
def test_empty_products(shape, n):
    V = random_bsr(shape, (64, 64), density=0.0).prune_2_4()
    out = bsr_linear(torch.ones(n, shape[1], dtype=BF16), V, bias=torch.ones(shape[0]))
    assert out.shape == (n, shape[0]) and (out == 1).all()


def test_plans():
    x = torch.empty(8192, 8192, dtype=BF16, device="meta")
    for block in ((128, 128), (256, 128)):
        V = random_bsr((8192, 8192), block, per_row=8).prune_2_4().to("meta")
        plan = explain(bsr_linear, x, V, arch="sm_90")
        assert plan.facts.family == "bsr24" and "2:4" in str(plan)
    assert explain(bsr_linear, x, V.to_bsr(), arch="sm_90").facts.family == "bsr"
    assert "CPU" in str(explain(bsr_matmul, sparse(), normal(640, 8)))


def refusals() -> list:
    V, x = sparse(), normal(24, 640)

    def leaf(t):
        return t.clone().requires_grad_()

    def of(values):
        return Bsr24(V.compressed.with_values(values), V.metadata)

    return [
        (lambda: bsr_linear(x[:, :512], V), ValueError, "W is 384x640 and x"),
        (lambda: bsr_linear(x.half(), V), TypeError, "x is torch.float16 but W is torch.bfloat16"),
        (lambda: bsr_linear(x, V, scale_x=torch.ones(1)), TypeError, "scale_x of torch.bfloat16 operands"),
        (
            lambda: bsr_matmul(V, x.t(), use_fast_accum=True),
            ValueError,
            "use_fast_accum=True requires .* operands, got torch.bfloat16",
        ),
        (lambda: bsr_linear(leaf(x), V), RuntimeError, "bsr_linear of a Bsr24 does not compute gradients"),
        (lambda: bsr_linear(x, of(leaf(V.values))), RuntimeError, "does not compute gradients"),
        (lambda: bsr_linear(x, V, bias=leaf(torch.ones(384))), RuntimeError, "does not compute gradients"),
        (lambda: bsr_gated_linear(leaf(x), V), RuntimeError, "does not compute gradients"),
        (lambda: bsr_grouped_linear(x, V, expert_ids=torch.zeros(1).int()), ValueError, "W is one matrix"),
        (lambda: bsr_linear(x, V.values), TypeError, "must be a BsrMatrix or a"),
        (lambda: explain(bsr_linear, x.float(), V.to(FP32), arch="sm_90"), TypeError, "torch.float32; the kernels"),
        (
            lambda: explain(bsr_linear, x.half(), V.to(FP16), accumulation_dtype=FP16),
            ValueError,
            "always accumulates in FP32",
        ),
        (lambda: explain(bsr_linear, x, V, out_dtype=torch.float8_e5m2), ValueError, "does not support FP8 outputs"),
    ]


@pytest.mark.parametrize("number", range(13))
def test_refusals(number):
    call, error, words = refusals()[number]
    with pytest.raises(error, match=words):
        call()


def test_vmap(place):
    V, x = sparse().to(place), normal(2, 24, 640, device=place)
    y = torch.func.vmap(lambda x: bsr_linear(x, V))(x)
    assert torch.equal(y, torch.stack([bsr_linear(item, V) for item in x]))


def test_paths():
    """Ampere and Ada have mma.sp, and Hopper where TMA cannot read x, or where it is asked for."""
    V, x = sparse(), normal(24, 641)[:, 1:]
    for arch in ("sm_80", "sm_86", "sm_89"):
        assert explain(bsr_linear, x, V, arch=arch).facts.path == "sm_80"
        assert "not fused" in str(explain(bsr_gated_linear, x, V, arch=arch))
    assert "not on path sm_90: B's address" in str(explain(bsr_linear, x, V, arch="sm_90"))
    with cute_kernels.path("sm_80"):
        assert explain(bsr_linear, normal(24, 640), V, arch="sm_90").facts.path == "sm_80"
    with cute_kernels.path("sm_90"), pytest.raises(ValueError, match=r"bsr_linear: .*16 bytes.*; W.to_bsr\(\)"):
        explain(bsr_linear, x, V, arch="sm_90")


def test_wrong_indices_are_seen():
    V = sparse()
    crow = V.crow_indices.clone()
    crow[-1] += 1
    wrong = Bsr24(BsrMatrix(crow, V.col_indices, V.values, (384, 320)), V.metadata)
    with pytest.raises(ValueError, match="crow_indices"):
        bsr_linear(normal(24, 640), wrong)


# -- kernels ----------------------------------------------------------------------------------------------------------

KERNELS = [facts for facts in BSR24.catalogue("sm_90") if facts.element.width == 2]
AMPERE = BSR24.catalogue("sm_80")


def test_each_architecture_has_kernels():
    assert len(KERNELS) == len({BSR24.title(facts) for facts in KERNELS}) > 60
    for name, spec in ARCHS.items():
        own = {facts.config for facts in BSR24.catalogue(name) if facts.path == spec.path}
        for block in BLOCKS:
            assert own >= set(BSR24.candidates(spec.path, BlockFacts(*block, "int32"), spec))
        assert not BSR24.candidates(spec.path, BlockFacts(32, 32, "int32"), spec)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_products_are_sparse_ones(arch):
    facts = (AMPERE if arch == "sm_80" else KERNELS)[0]
    sass = disassemble(cubin(facts))
    products = set(re.findall(r"HG?MMA\S*", sass))
    assert products == {"HMMA.SP.16832.F32.BF16" if arch == "sm_80" else "HGMMA.SP.64x192x32.F32.BF16"}


@needs_compiler
def test_metadata_of_another_block_are_seen_on_the_emulator():
    """A planted fault: each block has those of the next one."""
    facts, seen = KERNELS[0], []
    with emulate.emulator(sms=4):
        V = sparse(torch.ones(1, 3, dtype=torch.bool), (128, 128))
        x, d = operand(bsr_linear, V, 40), poisoned(40, V.shape[0])
        shifted = V.metadata.roll(1, 0).contiguous()
        for metadata in (V.metadata, shifted):
            pattern = V.crow_indices, V.col_indices, None, None, metadata
            emulate.emulated(facts)(*pattern, V.values, x, d, 1.0, 1.0, *facts.counts(1, 4))
            seen.append((d - x.float() @ V.to_dense().float().t()).abs().max().item())
    assert seen[0] < 1 < seen[1]
