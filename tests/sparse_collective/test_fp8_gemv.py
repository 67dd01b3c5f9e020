"""Small-M FP8 GEMM (1 to 16 tokens): selection, conversions and loads; results beyond the conformance cases."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch

import cute_kernels
from cute_kernels import explain
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.tile.element import element_of
from cute_kernels.tile.ptx import BY_BITS_SCALE, float8_to_fp16
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul, random_bsr
from sparse_collective.bsr_gemm.catalogue import linear
from sparse_collective.bsr_gemm.family import BSR
from sparse_collective.bsr_gemm.k_tiles import BsrKTiles
from sparse_collective.gemv.config import SkinnyConfig
from sparse_collective.gemv.family import SKINNY
from sparse_collective.gemv.fp8 import Float8SkinnyKernel

from ..emulator import emulate
from ..emulator.ops import needs_compiler, on_emulator
from ..gemm_errors import numbers
from .bsr_parts import skinny_loads
from .test_fp8_bsr import DTYPES, FP32, PER, checked, operand, run, sparse

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (128, 64), (48, 112), (64, 256)]
SQUARE = pytest.mark.parametrize("block", BLOCKS, ids=str)
ON_ARCHS = pytest.mark.parametrize("arch", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ARCHS])


def configs(block, scaled: bool, arch="sm_90") -> list[SkinnyConfig]:
    spec, facts = ARCHS[arch], BlockFacts(*block, "int32", scaled=scaled)
    return SKINNY.candidates(spec.path, facts, spec, element_of("float8_e4m3fn"))


def facts_of(config, block, scaled: bool, arch="sm_90", **more):
    spec, more = ARCHS[arch], {"aligns": (16, 16, 8), "dtype": "float8_e4m3fn", "scaled": scaled} | more
    return linear(spec, spec.path, config, block, **more)


# -- choice ---------------------------------------------------------------------------------------------------------


@ON_ARCHS
@PER
@SQUARE
def test_few_tokens_take_this_kernel(arch, per, block):
    W = random_bsr((16 * block[0], 24 * block[1]), block, density=0.25)
    W = W.to(E4M3) if per is None else W.quantize(per=per)
    for n in (1, 8, 9, 15):
        plan = explain(bsr_linear, numbers(n, W.shape[1]), W, arch=arch)
        assert plan.facts.family == "skinny" and "FP32, of operands converted to FP16" in str(plan)
        assert (plan.facts.config.tile_n == 8) is (n <= 8) and not any("slow" in note for note in plan.notes)
        assert ("times the scale of their block" in str(plan)) is (per == "block")
    others = explain(bsr_linear, numbers(64, W.shape[1]), W, arch=arch)
    only = block[1] % 32 != 0 or not ARCHS[arch].float8
    assert (others.facts.family == "skinny") is only is any("slow: only the skinny" in note for note in others.notes)


def test_fast_accumulation_changes_nothing():
    W, x = sparse(per="tensor"), numbers(8, 320)
    plans = [explain(bsr_linear, x, W, arch="sm_90", use_fast_accum=fast) for fast in (False, True)]
    assert plans[0].facts == plans[1].facts and "use_fast_accum has no effect" in str(plans[1])
    assert "use_fast_accum" not in str(plans[0])
    with pytest.raises(ValueError, match="use_fast_accum with a scale for each block"):
        explain(bsr_linear, x, sparse(), arch="sm_90", use_fast_accum=True)


def test_columns_that_are_not_along_k_are_copied():
    plan = explain(bsr_matmul, sparse(), numbers(320, 8), arch="sm_90")
    assert plan.facts.family == "skinny" and any("b is copied" in note for note in plan.notes)


def test_what_the_predicate_refuses():
    block, (config, *_) = (64, 64), configs((64, 64), True)

    def reason(scaled=True, block=block, more=None, **changes):
        return SKINNY.unsupported(facts_of(replace(config, **changes), block, scaled, **more or {}))

    assert reason() == reason(block=(16, 16), tile_k=4) == reason(block=(16, 16), scaled=False) == ""
    assert "four must lie in one block" in reason(block=(16, 16)) and "K-tiles of 12" in reason(tile_k=12)
    assert "contiguous along K" in reason(more={"majors": ("k", "any", "m"), "aligns": (16, 1, 8), "arch": "sm_80"})
    assert "bk of 16" in reason(block=(16, 8)) or "multiples of 16" in reason(block=(16, 8))
    assert reason(more={"batch": "patterns", "run": 64, "ranks": (3, 2, 2)}) == ""
    assert "transposed view of blocks of float8" in reason(more={"permuted": True, "majors": ("m", "k", "m")})
    wide = facts_of(SkinnyConfig(16, 8, 4, 4, 16), block, False, dtype="bfloat16", aligns=(8, 8, 8))
    assert "a lane loads 16 bytes" in SKINNY.unsupported(wide)


@pytest.mark.sm_90
@pytest.mark.parametrize(("block", "stages"), [((128, 128), 8), ((64, 64), 16), ((32, 32), 32)], ids=str)
def test_narrow_tiles_keep_as_many_bytes_under_way(block, stages):
    """For 17 to 64 tokens, by TMA."""
    spec, element = ARCHS["sm_90"], element_of("float8_e4m3fn")
    found = BSR.candidates("sm_90", BlockFacts(*block, "int32"), spec, element)
    found = [c.stages for c in found if (c.tile_m, c.tile_n, c.consumer_groups) == (64, 32, 1)]
    assert found == [stages]


# -- loads and conversions ------------------------------------------------------------------------------------------


@SQUARE
@pytest.mark.parametrize("scaled", [False, True])
def test_every_k_tile_is_loaded_once_and_blocks_are_not_mixed(block, scaled):
    for config in configs(block, scaled):
        kernel, steps = Float8SkinnyKernel(facts_of(config, block, scaled)), block[1] // config.tile_k
        assert kernel.uniform or not scaled
        for blocks in range(1, 24):
            row = BsrKTiles([0] * blocks, blocks * steps, 0, 7, 0, 0, 0, steps)
            assert sorted(skinny_loads(kernel, row)) == [(7 + p, k) for p in range(blocks) for k in range(steps)]
        # The K-tiles whose sum has one scale: of four lanes, and as many after one another as are together.
        for first in range(0, config.stages, kernel.together) if scaled else ():
            i = kernel.number(3, 0, first)
            assert i // steps == (i + 4 * kernel.together - 1) // steps


class Convert:
    """All 256 elements of a dtype, four a thread, as fp16."""

    def __init__(self, dtype: str, by_bits: bool):
        self.dtype, self.by_bits = dtype, by_bits

    @cute.jit
    def __call__(self, words: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(words, out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, words: cute.Tensor, out: cute.Tensor):
        t = cute.arch.thread_idx()[0]
        out[2 * t], out[2 * t + 1] = float8_to_fp16(cutlass.Int32(words[t]), self.dtype, self.by_bits)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "by_bits"), [(E4M3, False), (E4M3, True), (E5M2, False)], ids=str)
def test_conversions_are_exact(dtype, by_bits):
    """NaN and infinities stay what they are."""
    entry = Convert(str(dtype).removeprefix("torch."), by_bits)
    run = emulate.emulate_entry("sm_90a", entry, (fake_tensor("int32", 1, 0, 1), fake_tensor("int32", 1, 0, 1),
                                                  fake_stream()))  # fmt: skip
    elements, out = torch.arange(256, dtype=torch.uint8), torch.zeros(128, dtype=torch.int32)
    with emulate.emulator(sms=1):
        run(elements.view(torch.int32), out)
    found = out.view(torch.float16).view(64, 4).double()
    if dtype == E4M3 and by_bits:
        found = found[:, [0, 2, 1, 3]] / BY_BITS_SCALE
    exact = elements.view(dtype).view(64, 4).double()
    assert torch.equal(found.nan_to_num(12345.0), exact.nan_to_num(12345.0))
    assert torch.equal(found.signbit() & ~found.isnan(), exact.signbit() & ~exact.isnan())
    assert exact.isnan().any() and bool(exact.isinf().any()) == (dtype == E5M2)


# -- results --------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64)], ids=str)
def test_what_is_infinite_stays_in_its_row(arch, block):
    """Lanes past the end of a row multiply nothing, and by no other row's scale."""
    keep = [0, 3, 7, 8, 9, 10, 11, 14]  # rows of 2, 5 and 1 blocks
    mask = torch.zeros(21, dtype=torch.bool).index_fill(0, torch.tensor(keep), True).view(3, 7)
    W = BsrMatrix.from_dense(torch.ones(3 * block[0], 7 * block[1]), block, mask=mask)
    W = W.with_values(numbers(*W.values.shape), torch.rand(W.nnz) + 0.5)
    x = numbers(5, W.shape[1])
    with on_emulator(arch, sms=4):
        clean = bsr_linear(x, W)
        W.scales[2] = torch.inf
        W.values.view(torch.uint8)[7, 0, 0] = 0x7F  # NaN
        out = bsr_linear(x, W)
    rows = block[0]
    assert torch.equal(out[:, :rows], clean[:, :rows]) and clean.isfinite().all()
    assert not out[:, rows : 2 * rows].isfinite().any()
    assert out[:, 2 * rows].isnan().all() and torch.equal(out[:, 2 * rows + 1 :], clean[:, 2 * rows + 1 :])


@pytest.mark.gpu
@DTYPES
@PER
@SQUARE
def test_on_a_gpu(dtype, per, block):
    """Every number of tokens; the same bits each time, and by the other path."""
    W = sparse((block[0] * 9, block[1] * 33), block, per=per, dtype=dtype, device="cuda", density=0.3)
    for n in range(1, 17):
        for op, kind in ((bsr_linear, "each"), (bsr_matmul, "tensor"), (bsr_linear, "none")):
            b, scale = operand(op, W, n, kind)
            terms = {"bias": torch.randn(W.shape[0] if op is bsr_linear else n, device="cuda"), "activation": "silu"}
            checked(op, W, b, scale, **terms)
            assert torch.equal(*(run(op, W, b, scale, **terms) for _ in range(2)))
            checked(op, W, b, scale, out_dtype=FP32)
    b, scale = operand(bsr_linear, W, 8, "each")
    assert explain(bsr_linear, b, W).facts.family == "skinny"
    with cute_kernels.path("sm_80"):
        checked(bsr_linear, W, b, scale)
        other = run(bsr_linear, W, b, scale)
    assert torch.equal(run(bsr_linear, W, b, scale), other)


@pytest.mark.gpu
@PER
def test_many_strips_and_wide_rows(per):
    W = random_bsr((8192, 8192), (64, 64), density=0.25, device="cuda")
    W = W.to(E4M3) if per is None else W.quantize(per=per)
    for n in (1, 8, 16, 32, 64):
        b, scale = operand(bsr_linear, W, n, "each")
        checked(bsr_linear, W, b, scale)
