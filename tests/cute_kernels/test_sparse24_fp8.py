"""gemm with an FP8 Sparse24, beyond the conformance cases: the format, plans, errors, machine code, planted faults."""

import re

import pytest
import torch
from torch.sparse import _semi_structured_conversions as conversions

import cute_kernels
from cute_kernels import Sparse24, explain, gemm, prune_2_4, quantize
from cute_kernels.runtime.inspect import disassemble
from cute_kernels.sparse24 import SPARSE24
from cute_kernels.sparse24.format import metadata_shape
from cute_kernels.testing.reference import poisoned

from ..compiled import cubin
from ..emulator import emulate
from ..emulator.ops import needs_compiler, on_emulator
from ..gemm_errors import numbers, same_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def pruned(M: int, K: int, dtype=E4M3, device="cpu") -> torch.Tensor:
    """2:4 sparse, with groups of fewer than two nonzeros."""
    w = prune_2_4(numbers(M, K, dtype=dtype, device=device))
    return (w.float() * (torch.rand(M, K, device=device) > 0.2)).to(dtype)


def columns_major(b: torch.Tensor) -> torch.Tensor:
    """b, contiguous along K."""
    return b.t().contiguous().t()


# -- the format -------------------------------------------------------------------------------------------------------


@DTYPES
def test_another_dtype_has_metadata_in_its_own_order(dtype):
    w = pruned(130, 132, dtype)
    W, wide = Sparse24.from_dense(w), Sparse24.from_dense(w.to(BF16))
    for to in (BF16, FP32):
        assert torch.equal(W.to(to).metadata, wide.metadata) and torch.equal(W.to(to).to_dense(), w.to(to))
    back = wide.to(dtype)
    assert torch.equal(back.metadata, W.metadata) and same_bits(back.to_dense(), W.to_dense())
    assert W.to(dtype) is W and not torch.equal(W.metadata, wide.metadata)


@DTYPES
def test_zeros_have_a_sign_and_nan_is_none(dtype):
    w = torch.tensor([[0.0, -0.0, 2.0, float("nan"), -0.0, -0.0, -0.0, -3.0]]).to(dtype)
    W = Sparse24.from_dense(w)
    assert W.to_dense().float().nan_to_num(7.0).tolist() == [[0, 0, 2, 7, 0, 0, 0, -3]]
    with pytest.raises(ValueError, match="1 groups of 4 .*row 0, columns 0 to 3"):
        Sparse24.from_dense(torch.tensor([[1.0, float("nan"), -2.0, 0.0]]).to(dtype))


def test_a_quantised_weight():
    w = prune_2_4(torch.randn(64, 128))
    for per, shape in (("tensor", (1,)), ("row", (64, 1))):
        values, scale = quantize(w, per=per)
        W, b = Sparse24.from_dense(values), numbers(128, 24)
        assert scale.shape == shape
        assert torch.equal(gemm(W, b, scale_a=scale), gemm(values, b, scale_a=scale))


def places_of(W: Sparse24, row: int, group: int) -> tuple[int, int]:
    """Positions of the two stored elements of a group, as in the PTX ISA of m64nNk64: of row r of a warp's 16 lanes
    4 (r % 8) + r // 8 has columns 0 to 31 of 64, and the second one after it columns 32 to 63."""
    span, rest = divmod(group, 16)
    slab, r = divmod(row, 64)
    warp, r = divmod(r, 16)
    lane = 4 * (r % 8) + 2 * (rest // 8) + r // 8
    found = int(W.metadata[span, slab, 32 * warp + lane]) >> 4 * (rest % 8) & 15
    return found & 3, found >> 2


def test_metadata_are_where_the_isa_says():
    w = pruned(130, 132)
    W = Sparse24.from_dense(w)
    for row in (*range(0, 130, 7), 8, 15, 16, 63, 64, 129):
        for group in range(33):
            first, second = places_of(W, row, group)
            four, stored = w[row, 4 * group : 4 * group + 4].float(), W.values[row, 2 * group : 2 * group + 2].float()
            assert first < second and torch.equal(four[[first, second]], stored)
            assert four.count_nonzero() == stored.count_nonzero()
    # What fills up is defined, too.
    assert places_of(W, 255, 31) == places_of(W, 129, 40) == (0, 1)


def test_words_are_those_of_torch_s_conversion():
    """For 16 rows and 64 columns torch has 32 words of int8 for mma.sp.m16n8k64, one for each lane."""
    w = prune_2_4(torch.randint(1, 100, (128, 192)).float()).to(torch.int8)
    _, meta = conversions.sparse_semi_structured_from_dense_cutlass(w)
    W = Sparse24.from_dense(w.float()).to(E4M3)
    assert meta.dtype == torch.int32
    assert torch.equal(W.metadata[:3, :2].reshape(3, 8, 32), meta.reshape(3, 8, 32))


# -- the op -----------------------------------------------------------------------------------------------------------


def test_plans():
    """Sums of K-tiles are promoted unless asked; b is copied where it is not contiguous along K."""

    def meta(M, K):
        metadata = torch.empty(metadata_shape(M, K), dtype=torch.int32, device="meta")
        return Sparse24(torch.empty(M, K // 2, dtype=E4M3, device="meta"), metadata, (M, K))

    b = torch.empty(8192, 8192, dtype=E4M3, device="meta")
    plan = explain(gemm, meta(8192, 8192), b.t(), arch="sm_90")
    assert plan.facts.family == "sparse24" and plan.facts.promotes
    assert "promoted to FP32 every" in str(plan) and "copied" not in str(plan)
    fast = explain(gemm, meta(8192, 8192), b, use_fast_accum=True, arch="sm_90")
    assert "about 14 bits" in str(fast) and "b is copied" in str(fast)


def refusals() -> list:
    W, b = Sparse24.from_dense(pruned(32, 256)), numbers(256, 24)
    one = torch.ones(1)
    return [
        (lambda: gemm(W, b.to(E5M2)), TypeError, "b is torch.float8_e5m2 but a is torch.float8_e4m3fn"),
        (lambda: gemm(W, b.to(BF16)), TypeError, "b is torch.bfloat16 but a is torch.float8_e4m3fn"),
        (lambda: gemm(W, b, scale_a=one.half()), TypeError, "scale_a is torch.float16"),
        (lambda: gemm(W, b, scale_a=torch.ones(31)), ValueError, r"scale_a has shape \(31,\).*\(32, 256\)"),
        (lambda: gemm(W, b, scale_a=torch.ones(32, 2)), ValueError, r"scale_a has shape \(32, 2\)"),
        (lambda: gemm(W, b, scale_b=torch.ones(2, 1)), ValueError, r"scale_b has shape \(2, 1\)"),
        (lambda: gemm(W, b, use_fast_accum=1), TypeError, "must be a bool"),
        (lambda: gemm(W, b, accumulation_dtype=FP16), ValueError, "accumulate in FP32"),
        (lambda: gemm(W, b, out_dtype=E4M3), TypeError, "output of torch.float8_e4m3fn"),
        (lambda: gemm(W, b, return_amax=True), ValueError, "return_amax are for FP8 outputs"),
        (
            lambda: explain(gemm, Sparse24.from_dense(pruned(32, 252)), b[:252], arch="sm_89"),
            ValueError,
            r"K must be a multiple of 8 .*; gemm\(a.to_dense\(\), b\)",
        ),
        (lambda: explain(gemm, W, b, arch="sm_80"), ValueError, "sm_90 supports FP8 with WGMMA"),
        (lambda: W.to_torch(), TypeError, "torch keeps 2 of 4 of bfloat16 and float16"),
    ]


@pytest.mark.parametrize("number", range(13))
def test_refusals(number):
    call, error, words = refusals()[number]
    with pytest.raises(error, match=words):
        call()


def test_no_kernel_of_16_bits_is_asked():
    W, b = Sparse24.from_dense(pruned(32, 256)), numbers(256, 24)
    with cute_kernels.path("sm_80"), pytest.raises(ValueError, match=r"gemm\(a.to_dense\(\), b\)"):
        explain(gemm, W, b, arch="sm_90")


# -- kernels ----------------------------------------------------------------------------------------------------------

KERNELS = [facts for facts in SPARSE24.catalogue("sm_90") if facts.element.width == 1]
ADA = [facts for facts in SPARSE24.catalogue("sm_89") if facts.element.width == 1]
PLAIN = [f for f in KERNELS if f.epilogue.is_light and not f.epilogue.scales_operands and f.dtype == "float8_e4m3fn"]


def test_the_architectures_that_have_kernels():
    assert len(KERNELS) == len({SPARSE24.title(facts) for facts in KERNELS}) > 50
    configs = set(SPARSE24.candidates("sm_90", None, KERNELS[0].spec, KERNELS[0].element))
    assert {facts.config for facts in KERNELS} == configs
    for arch in ("sm_80", "sm_86"):
        assert all(facts.element.width == 2 for facts in SPARSE24.catalogue(arch))
    assert {f.config for f in ADA} == set(SPARSE24.candidates("sm_80", None, ADA[0].spec, ADA[0].element))


@pytest.mark.parametrize("fast", [False, True])
def test_products_are_sparse_ones(fast):
    facts = next(facts for facts in KERNELS if facts.use_fast_accum == fast)
    sass = disassemble(cubin(facts))
    columns = 256 if fast else 128
    assert set(re.findall(r"[HQ]GMMA\.\S+", sass)) == {f"QGMMA.SP.64x{columns}x64.F32.E4M3.E4M3"}


def test_products_of_ada_are_sparse_ones():
    sass = disassemble(cubin(ADA[0]))
    assert set(re.findall(r"[HQ]MMA\.\S+", sass)) == {"QMMA.SP.16864.F32.E4M3.E4M3"}


@needs_compiler
def test_faults_are_seen_on_the_emulator():
    """Selector 1, which is not defined, and each K-tile's first metadata in place of the others."""
    facts, seen = PLAIN[0], []

    def selector(ptx: str) -> str:
        return re.sub(r"(db, %r\d+), 0, p", lambda m: seen.append(0) or f"{m[1]}, 1, p", ptx)

    def first_words(ptx: str) -> str:
        word = re.search(r"wgmma.mma_async.sp[^;]*db, (%r\d+), 0, p", ptx)[1]
        return re.sub(r"(db, )%r\d+, 0, p", lambda m: seen.append(1) or f"{m[1]}{word}, 0, p", ptx)

    w, b = prune_2_4(numbers(128, 256)), columns_major(numbers(256, 256))
    W = Sparse24.from_dense(w)
    for number, change in enumerate((selector, first_words)):
        d = poisoned(128, 256, dtype=BF16)
        run = emulate.emulate_entry(facts.arch, SPARSE24.entry(facts), SPARSE24.arguments(facts), change)
        with emulate.emulator(sms=2):
            arguments = (W.values, W.metadata, b, d, 1.0, 1.0, *facts.counts(1, 2))
            if number == 0:
                with pytest.raises(emulate.EmulatorError, match="a sparsity selector of 1"):
                    run(*arguments)
            else:
                run(*arguments)
                assert (d - w.float() @ b.float()).abs().max() > 1
        assert number in seen


@needs_compiler
def test_the_emulator_refuses_equal_places():
    """Two elements of a group at one place are not defined, of any lane."""
    W, b = Sparse24.from_dense(pruned(64, 64)), numbers(64, 64)
    W.metadata[0, 0, 7] = 0
    with on_emulator("sm_90", sms=1), pytest.raises(emulate.EmulatorError, match="lane 7: both elements"):
        gemm(W, b)
