"""FP8 GEMM with 1x128 and 128x128 scales, beyond the conformance cases: quantize, shapes and strides, errors."""

import itertools
import math

import pytest
import torch

from cute_kernels import explain, gemm, quantize
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue
from cute_kernels.matmul.config import EpilogueSpec, GemmConfig
from cute_kernels.matmul.family import DENSE
from cute_kernels.tile.element import element_of

from ..emulator.ops import needs_compiler
from ..gemm_calls import check
from ..gemm_errors import FP64, dequantized, numbers
from .test_fp8 import BF16, DTYPES, FP32, refused

KINDS = list(itertools.product(("1x128", "row", "tensor", None), ("128x128", "column", "tensor", None)))
KINDS = [pair for pair in KINDS if "1x128" in pair or "128x128" in pair]
USUAL = {"dtype": "float8_e4m3fn", "aligns": (16, 16, 8), "majors": ("k", "k", "n")}
BOTH = EpilogueSpec(scale_m="1x128", scale_n="128x128")


def up(n: int) -> int:
    """Blocks of 128 of so many."""
    return -(-n // 128)


def factors(*shape: int, device="cpu") -> torch.Tensor:
    """Scales from 1/16 to 16."""
    return 2.0 ** (8 * torch.rand(*shape, device=device) - 4)


def scales(kind: tuple, M: int, N: int, K: int, device="cpu") -> dict:
    """scale_a and scale_b of these kinds."""
    shapes = {"1x128": (M, up(K)), "128x128": (up(K), up(N)), "row": (M, 1), "column": (1, N), "tensor": (1,)}
    named = zip(("scale_a", "scale_b"), kind, strict=True)
    return {name: factors(*shapes[k], device=device) for name, k in named if k}


# -- quantize -----------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("shape", [(256, 384), (3, 20, 300), (130, 128), (1, 5)], ids=str)
@pytest.mark.parametrize(("per", "blocks"), [("1x128", (1, 128)), ("128x128", (128, 128))])
def test_quantize(dtype, shape, per, blocks):
    x = (torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()).to(BF16)
    values, scale = quantize(x, dtype=dtype, per=per)
    *batch, rows, columns = shape
    assert values.dtype == dtype and values.shape == x.shape and scale.dtype == FP32
    assert scale.shape == (*batch, rows if per == "1x128" else up(rows), up(columns))
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for i, j in itertools.product(range(scale.shape[-2]), range(scale.shape[-1])):
        block = values[..., i * blocks[0] : (i + 1) * blocks[0], j * 128 : (j + 1) * 128].float()
        assert (block.abs().amax((-2, -1)) == top).all()
    each = scale.repeat_interleave(blocks[0], -2).repeat_interleave(128, -1)[..., :rows, :columns]
    half = torch.finfo(dtype).eps / 2
    assert ((values.float() * each - x.float()).abs() <= half * x.float().abs() * 1.01 + tiny * each).all()


@pytest.mark.parametrize(("per", "shape"), [("1x128", (140, 2)), ("128x128", (2, 2))])
def test_quantize_zeros_and_nothing(per, shape):
    values, scale = quantize(torch.zeros(140, 200), per=per)
    assert scale.shape == shape and (scale == 1).all() and (values.float() == 0).all()
    values, scale = quantize(torch.zeros(0, 200), per=per)
    assert values.shape == (0, 200) and scale.shape == (0, 2)
    x = torch.zeros(140, 200)
    x[3, 130] = math.nan
    assert quantize(x, per=per)[0].float().isnan().sum() == (72 if per == "1x128" else 128 * 72)
    with pytest.raises(ValueError, match="at least 2"):
        quantize(torch.ones(200), per=per)


def test_quantize_keeps_the_order_of_memory():
    for per in ("1x128", "128x128"):
        assert quantize(torch.randn(256, 128).t(), per=per)[0].stride() == (1, 128)
        assert quantize(torch.randn(200, 136).t(), per=per)[0].stride(0) == 1
        assert quantize(torch.randn(200, 136), per=per)[0].stride(1) == 1


@pytest.mark.parametrize("per", ["1x128", "128x128"])
@pytest.mark.parametrize("shape", [(64, 256), (130, 300)], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_quantize_compiled(per, shape, backend):
    torch._dynamo.reset()
    x = torch.randn(shape)
    compiled = torch.compile(lambda x: quantize(x, per=per), fullgraph=True, backend=backend)
    for ours, eager in zip(compiled(x), quantize(x, per=per), strict=True):
        assert torch.equal(ours.float(), eager.float())


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


def test_scales_of_any_strides(place):
    """As torch._scaled_mm wants them, as DeepSeek stores them, and others."""
    M, N, K = 200, 300, 900
    a, b = numbers(M, K, device=place), numbers(N, K, device=place).t()
    scale_a, scale_b = factors(M, up(K), device=place), factors(up(K), up(N), device=place)
    check(gemm, a, b, scale_a=scale_a, scale_b=scale_b)
    expected = gemm(a, b, scale_a=scale_a, scale_b=scale_b)
    for x, y in (
        (scale_a.t().contiguous().t(), scale_b.t().contiguous().t()),
        (scale_a.repeat_interleave(3, 1)[:, 1::3], torch.cat([scale_b, scale_b])[: up(K)]),
        (torch.cat([scale_a, scale_a], 1)[:, : up(K)], scale_b.repeat_interleave(2, 0)[::2]),
    ):
        assert torch.equal(gemm(a, b, scale_a=x, scale_b=y), expected)
    one = torch.full((1, 1), 0.5, device=place)
    check(gemm, a, b, scale_a=one.expand(M, up(K)), scale_b=one.expand(up(K), up(N)))


def test_batches(place):
    """Folded into rows and not; scales of each item."""

    def draw(*shape):
        return numbers(*shape, device=place)

    for a, b, scale_a, scale_b in (
        ((3, 40, 320), (136, 320), (3, 40, 3), (3, 2)),
        ((2, 3, 40, 320), (136, 320), (2, 3, 40, 3), (3, 2)),
        ((3, 40, 320), (3, 136, 320), (3, 40, 3), (3, 3, 2)),
        ((40, 320), (3, 136, 320), (40, 3), (3, 3, 2)),
        ((3, 40, 300), (1, 136, 300), (3, 40, 3), (1, 3, 2)),
        ((2, 1, 40, 320), (1, 3, 136, 320), (2, 1, 40, 3), (1, 3, 3, 2)),
    ):
        terms = {"scale_a": factors(*scale_a, device=place), "scale_b": factors(*scale_b, device=place)}
        check(gemm, draw(*a), draw(*b).mT, **terms)
        terms["scale_a"] = terms["scale_a"].mT.contiguous().mT
        check(gemm, draw(*a), draw(*b).mT, **terms)


def test_shapes_that_may_mean_two_things_mean_the_same(place):
    """For K up to 128 a scale of 1x128 is one of a row; of one row or column, a column of scales is of blocks."""
    a, b = numbers(64, 100, device=place), numbers(1, 100, device=place).t()
    of_rows = factors(64, 1, device=place)
    assert "1x128" not in str(explain(gemm, a, b, scale_a=of_rows, arch="sm_90").facts)
    check(gemm, a, b, scale_a=of_rows, scale_b=factors(1, 1, device=place))
    a, b = numbers(1, 300, device=place), numbers(1, 300, device=place).t()
    check(gemm, a, b, scale_a=factors(1, 3, device=place), scale_b=factors(3, 1, device=place))
    a, b = numbers(3, 300, device=place), numbers(3, 300, device=place).t()
    check(gemm, a, b, scale_a=factors(3, 3, device=place), scale_b=factors(3, 1, device=place))


def test_a_block_s_nan_is_its_own_rows(place):
    a, b = numbers(70, 384, device=place), numbers(200, 384, device=place).t()
    terms = scales(("1x128", "128x128"), 70, 200, 384, place)
    terms["scale_a"][5, 1] = math.nan
    out = gemm(a, b, **terms)
    assert out[5].isnan().all() and out.isnan().sum() == 200


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_explain_says_that_sums_are_scaled(arch):
    a, b = numbers(4096, 4096), numbers(4096, 4096).t()
    plan = explain(gemm, a, b, arch=arch, **scales(("1x128", "128x128"), 4096, 4096, 4096))
    of_k, tile = (128, (128, 256, 128)) if arch == "sm_90" else (32, (128, 128, 64))
    assert f"promoted to FP32 every {of_k} elements of K, multiplied by their scales" in str(plan)
    assert (plan.facts.epilogue.scale_m, plan.facts.epilogue.scale_n) == ("1x128", "128x128")
    assert (plan.facts.config.tile_m, plan.facts.config.tile_n, plan.facts.config.tile_k) == tile


# -- refusals -------------------------------------------------------------------------------------------------------

PAIR = {"scale_a": torch.ones(32, 3), "scale_b": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("error", "words", "a", "b", "terms"),
    [
        refused(ValueError, r"scale_a has shape \(32, 2\).*\(32, 3\), one for each 1x128", scale_a=torch.ones(32, 2)),
        refused(ValueError, r"scale_a has shape \(1, 3\).*128x128 of a is not.*transposes", scale_a=torch.ones(1, 3)),
        refused(ValueError, r"scale_b has shape \(2, 3\).*\(3, 2\), one for each 128x128", scale_b=torch.ones(2, 3)),
        refused(ValueError, r"scale_b has shape \(3, 200\).*128x1 of b is not", scale_b=torch.ones(3, 200)),
        refused(ValueError, r"scale_b has shape \(4, 2\)", scale_b=torch.ones(4, 2)),
        refused(ValueError, "use_fast_accum=True is not supported with block scales", **PAIR, use_fast_accum=True),
        refused(TypeError, "scale_a is torch.bfloat16", scale_a=torch.ones(32, 3, dtype=BF16)),
        refused(TypeError, "scale_a of torch.bfloat16 operands", *[lambda t: t.to(BF16)] * 2, **PAIR),
    ],
)
def test_refusals(place, error, words, a, b, terms):
    x, y = numbers(32, 300, device=place), numbers(200, 300, device=place).t()
    terms = {k: t.to(place) if isinstance(t, torch.Tensor) else t for k, t in terms.items()}
    with pytest.raises(error, match=words):
        gemm(x if a is None else a(x), y if b is None else b(y), **terms)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_architectures_without_such_products_say_what_would_work(arch):
    with pytest.raises(ValueError, match=f"{arch} has no FP8 MMA.*torch.bfloat16"):
        explain(gemm, numbers(32, 300), numbers(200, 300).t(), arch=arch, **PAIR)


def test_the_other_way_round(place):
    """The advice of the error for 128x128 scales of a."""
    a, b = numbers(200, 300, device=place), numbers(70, 300, device=place).t()
    of_a, of_b = factors(2, 3, device=place), factors(3, 70, device=place)
    out = gemm(b.mT, a.mT, scale_a=of_b.mT, scale_b=of_a.mT).mT
    exact = (dequantized(b.mT, of_b.mT, FP64) @ dequantized(a.mT, of_a.mT, FP64, of_b=True)).mT
    assert ((out.double() - exact).abs() <= 2.0**-7 * exact.abs() + 1e-2 * exact.abs().mean()).all()


# -- kernels --------------------------------------------------------------------------------------------------------


def test_configurations_that_cut_blocks_are_refused():
    """And so are those whose products do not take turns; every other one takes scales of blocks."""
    spec = ARCHS["sm_90"]
    configs = DENSE.candidates("sm_90", None, spec, element_of("float8_e4m3fn"))
    plain = [catalogue.dense(spec, "sm_90", config, **USUAL) for config in configs]
    both = [catalogue.dense(spec, "sm_90", config, **USUAL, epilogue=BOTH) for config in configs]
    for alone, facts in zip(plain, both, strict=True):
        taken = not DENSE.unsupported(alone) and facts.takes_turns and facts.config.tile_k == 128
        assert taken == (not DENSE.unsupported(facts)), facts
    for tile_n, tile_k, words in ((96, 128, "two blocks of 128 columns"), (128, 64, "K-tiles of 128")):
        config = GemmConfig(128, tile_n, tile_k, 4, 2, 1, store_row=64)
        facts = catalogue.dense(spec, "sm_90", config, **USUAL, epilogue=BOTH)
        assert words in DENSE.unsupported(facts)


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sm_90
@pytest.mark.parametrize("size", [(4096, 4096, 4096), (8192, 7168, 2048), (257, 1536, 7168)], ids=str)
def test_beside_torch(size):
    """The same operands and scales, in torch's layouts: both err alike."""
    M, N, K = size
    a, scale_a = quantize(torch.randn(M, K, device="cuda"), per="1x128")
    b, scale_b = quantize(torch.randn(N, K, device="cuda"), per="128x128")
    scale_a, scale_b = scale_a.t().contiguous().t(), scale_b.t()
    try:
        theirs = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=BF16)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"torch has no such product here: {error}")
    ours, exact = (
        gemm(a, b.t(), scale_a=scale_a, scale_b=scale_b),
        dequantized(a, scale_a, FP64) @ dequantized(b.t(), scale_b, FP64, of_b=True),
    )
    errors = [((x.double() - exact).norm() / exact.norm()).item() for x in (ours, theirs)]
    assert errors[0] < 3e-3 and errors[0] < 1.1 * errors[1], errors
