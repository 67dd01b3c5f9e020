"""Scales of blocks of 8-bit floats, 1x128 of a and 128x128 of b: as test_float8 has it of other scales."""

import itertools
import math

import pytest
import torch

from cute_kernels import explain, gemm, quantize
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue
from cute_kernels.matmul.config import EpilogueSpec, GemmConfig
from cute_kernels.matmul.family import DENSE
from cute_kernels.testing.reference import ACTIVATIONS, assert_as_good_as_torch, poisoned
from cute_kernels.tile.element import element_of

from ..emulator import emulate
from ..emulator.ops import on_emulator
from ..fp8_parts import assert_as_tensor_cores, some
from .test_fp8 import BF16, DTYPES, FP32, needs_compiler, numbers, refused

SIZES = [(256, 256, 256), (129, 264, 400), (33, 71, 149), (1, 384, 512), (300, 1, 640), (40, 200, 128), (5, 7, 16)]
KINDS = list(itertools.product(("1x128", "row", "tensor", None), ("128x128", "column", "tensor", None)))
KINDS = [pair for pair in KINDS if "1x128" in pair or "128x128" in pair]


def up(n: int) -> int:
    """Blocks of 128 of so many."""
    return -(-n // 128)


def factors(*shape: int, device="cpu") -> torch.Tensor:
    """Scales that differ much."""
    return 2.0 ** (8 * torch.rand(*shape, device=device) - 4)


def scales(kind: tuple, M: int, N: int, K: int, device="cpu") -> dict:
    """scale_a and scale_b of these kinds."""
    shapes = {"1x128": (M, up(K)), "128x128": (up(K), up(N)), "row": (M, 1), "column": (1, N), "tensor": (1,)}
    named = zip(("scale_a", "scale_b"), kind, strict=True)
    return {name: factors(*shapes[k], device=device) for name, k in named if k}


def spread(scale: torch.Tensor, rows: int, columns: int, blocks: tuple[int, int]) -> torch.Tensor:
    """A scale for each element, whatever there is one for: looked up one by one."""
    i, j = torch.arange(rows) // blocks[0], torch.arange(columns) // blocks[1]
    return scale[..., i.to(scale.device)[:, None], j.to(scale.device)]


def dequantised(a, b, scale_a=None, scale_b=None, dtype=torch.float64):
    """a and b times their scales."""
    M, K, N = *a.shape[-2:], b.shape[-1]
    found = []
    for x, scale, shape, blocks in ((a, scale_a, (M, K), (1, 128)), (b, scale_b, (K, N), (128, 128))):
        if scale is not None and scale.numel() > 1:
            across = tuple(n if of == 1 else size for n, of, size in zip(shape, scale.shape[-2:], blocks, strict=True))
            across = (1, across[1]) if scale.shape[-2] == shape[0] else across
            across = (across[0], 1) if scale.shape[-1] == shape[1] else across
            scale = spread(scale, *shape, across)
        found.append(x.to(dtype) if scale is None else x.to(dtype) * scale.to(dtype))
    return found


def wide(a, b, scale_a=None, scale_b=None, dtype=torch.float64):
    """a @ b of the dequantised operands."""
    return torch.matmul(*dequantised(a, b, scale_a, scale_b, dtype))


def check(a, b, *, out=None, device="cpu", bias=None, activation=None, residual=None, **terms):
    """gemm(...) against fp64: as torch errs in fp32, but for what tensor cores of a GPU round."""
    ours = gemm(a, b, out=out, bias=bias, activation=activation, residual=residual, **terms)
    given = {name: terms[name] for name in ("scale_a", "scale_b") if name in terms}

    def result(dtype):
        x = wide(a, b, **given, dtype=dtype) * terms.get("alpha", 1.0)
        x = x if bias is None else x + bias.to(dtype)
        x = x if residual is None else x + terms.get("beta", 1.0) * residual.to(dtype)
        return ACTIVATIONS[activation](x)

    exact = result(torch.float64)
    if device == "cpu":
        assert_as_good_as_torch(ours, exact, result(FP32).to(ours.dtype), k=a.shape[-1])
        return ours
    assert_as_tensor_cores(ours, exact, *dequantised(a, b, **given), alpha=terms.get("alpha", 1.0))
    return ours


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
    each = spread(scale, rows, columns, blocks)
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


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products(place, dtype, kind, size):
    M, N, K = size
    a, b = numbers(M, K, dtype=dtype, device=place), numbers(N, K, dtype=dtype, device=place).t()
    out = poisoned(M, N, device=place)
    assert check(a, b, out=out, device=place, **scales(kind, M, N, K, place)) is out


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(place, activation):
    M, N, K = 136, 200, 416
    a, b = (numbers(n, K, device=place) for n in (M, N))
    terms = {"bias": torch.randn(N, device=place), "activation": activation, "alpha": 0.5}
    terms |= scales(("1x128", "128x128"), M, N, K, place)
    residual = torch.randn(M, N, device=place).to(FP32)
    check(a, b.t(), device=place, **terms)
    check(a, b.t(), device=place, **terms, out_dtype=FP32, residual=residual, beta=-1.5)
    check(a, b.t(), device=place, **terms, out=poisoned(N, M, dtype=FP32, device=place).t())
    check(a, b.contiguous().t(), device=place, **terms)


def test_scales_of_any_strides(place):
    """As torch._scaled_mm wants them, as DeepSeek stores them, and others."""
    M, N, K = 200, 300, 900
    a, b = numbers(M, K, device=place), numbers(N, K, device=place).t()
    scale_a, scale_b = factors(M, up(K), device=place), factors(up(K), up(N), device=place)
    expected = check(a, b, device=place, scale_a=scale_a, scale_b=scale_b)
    for x, y in (
        (scale_a.t().contiguous().t(), scale_b.t().contiguous().t()),
        (scale_a.repeat_interleave(3, 1)[:, 1::3], torch.cat([scale_b, scale_b])[: up(K)]),
        (torch.cat([scale_a, scale_a], 1)[:, : up(K)], scale_b.repeat_interleave(2, 0)[::2]),
    ):
        assert torch.equal(gemm(a, b, scale_a=x, scale_b=y), expected)
    one = torch.full((1, 1), 0.5, device=place)
    check(a, b, device=place, scale_a=one.expand(M, up(K)), scale_b=one.expand(up(K), up(N)))


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
        check(draw(*a), draw(*b).mT, device=place, **terms)
        terms["scale_a"] = terms["scale_a"].mT.contiguous().mT
        check(draw(*a), draw(*b).mT, device=place, **terms)


def test_shapes_that_may_mean_two_things_mean_the_same(place):
    """Of K up to 128 a scale of 1x128 is one of a row; of one row or column, a column of scales is of blocks."""
    a, b = numbers(64, 100, device=place), numbers(1, 100, device=place).t()
    of_rows = factors(64, 1, device=place)
    assert "1x128" not in str(explain(gemm, a, b, scale_a=of_rows, arch="sm_90").facts)
    check(a, b, device=place, scale_a=of_rows, scale_b=factors(1, 1, device=place))
    a, b = numbers(1, 300, device=place), numbers(1, 300, device=place).t()
    check(a, b, device=place, scale_a=factors(1, 3, device=place), scale_b=factors(3, 1, device=place))
    a, b = numbers(3, 300, device=place), numbers(3, 300, device=place).t()
    check(a, b, device=place, scale_a=factors(3, 3, device=place), scale_b=factors(3, 1, device=place))


def test_empty_results_and_sums(place):
    for M, N, K in ((0, 16, 300), (16, 0, 300)):
        terms = scales(("1x128", "128x128"), M, N, K, place)
        assert gemm(numbers(M, K, device=place), numbers(N, K, device=place).t(), **terms).shape == (M, N)
    bias = torch.randn(40, device=place)
    a, b = numbers(24, 0, device=place), numbers(40, 0, device=place).t()
    for kind in KINDS:
        out = gemm(a, b, bias=bias, out_dtype=FP32, **scales(kind, 24, 40, 0, place))
        assert torch.equal(out, bias.expand(24, 40))


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
    assert f"promoted to fp32 after every {of_k} of K, and multiplied by their scales" in str(plan)
    assert (plan.facts.epilogue.scale_m, plan.facts.epilogue.scale_n) == ("1x128", "128x128")
    assert (plan.facts.config.tile_m, plan.facts.config.tile_n, plan.facts.config.tile_k) == tile


def test_known_plans_are_not_confused(device):
    a, b = numbers(64, 256, device=device), numbers(64, 256, device=device).t()
    for kind in KINDS * 2:
        check(a, b, device=device, **scales(kind, 64, 64, 256, device))


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
        refused(ValueError, "use_fast_accum with scales of blocks", **PAIR, use_fast_accum=True),
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
    """What the refusal of 128x128 of a says to do."""
    a, b = numbers(200, 300, device=place), numbers(70, 300, device=place).t()
    of_a, of_b = factors(2, 3, device=place), factors(3, 70, device=place)
    out = gemm(b.mT, a.mT, scale_a=of_b.mT, scale_b=of_a.mT).mT
    exact = wide(b.mT, a.mT, of_b.mT, of_a.mT).mT
    assert ((out.double() - exact).abs() <= 2.0**-7 * exact.abs() + 1e-2 * exact.abs().mean()).all()


# -- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled(place):
    """With what quantizes its activations."""
    torch._dynamo.reset()
    x, weight = torch.randn(48, 300, device=place), quantize(torch.randn(200, 300, device=place), per="128x128")

    def call(x, w, scale_w):
        a, scale_a = quantize(x, per="1x128")
        return gemm(a, w.t(), scale_a=scale_a, scale_b=scale_w.t(), activation="silu") * 2.0

    compiled = torch.compile(call, fullgraph=True, backend="inductor" if place == "cuda" else "aot_eager")
    ours, eager = compiled(x, *weight), call(x, *weight)
    assert torch.equal(ours, eager) if place == "cpu" else (ours - eager).abs().max() <= 0.02 * eager.abs().max()
    torch._dynamo.reset()


# -- kernels --------------------------------------------------------------------------------------------------------

USUAL = {"dtype": "float8_e4m3fn", "aligns": (16, 16, 8), "majors": ("k", "k", "n")}
BOTH = EpilogueSpec(scale_m="1x128", scale_n="128x128")


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


def configurations(arch: str) -> list:
    spec = ARCHS[arch]
    configs = DENSE.candidates(spec.path, None, spec, element_of("float8_e4m3fn"))
    made = [catalogue.dense(spec, spec.path, config, **USUAL, epilogue=BOTH) for config in configs]
    made = some([facts for facts in made if not DENSE.unsupported(facts)])
    return [pytest.param(facts, K, id=f"{arch}: {facts.config.short}, {K}") for facts in made for K in (400, 1040, 128)]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("facts", "K"), [*configurations("sm_90"), *configurations("sm_89")])
def test_each_configuration_on_the_emulator(facts, K):
    """Even and odd numbers of K-tiles, and of blocks in K-tiles of two; tiles with tails."""
    M, N = facts.config.tile_m + 72, facts.config.tile_n * facts.config.cluster_n + 40
    a, b, d = numbers(M, K), numbers(N, K).t(), poisoned(M, N)
    scale_a, scale_b = factors(M, up(K)), factors(up(K), up(N))
    with emulate.emulator(sms=4, seed=K):
        emulate.emulated(facts)(
            a, b, d, scale_a[None], scale_b.mT[None], None, None, None, 1.0, 0.0, *facts.counts(1, 4)
        )  # fmt: skip
    exact, by_torch = (wide(a, b, scale_a, scale_b, dtype) for dtype in (torch.float64, FP32))
    assert_as_good_as_torch(d, exact, by_torch.to(BF16), k=K)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kind"), [("sm_90", KINDS[0]), ("sm_89", KINDS[0]), ("sm_90", ("row", "128x128"))], ids=str
)
def test_calls_on_the_emulator(arch, kind):
    with on_emulator(arch, sms=4):
        for M, N, K in ((70, 90, 330), (1, 264, 700), (33, 136, 149)):
            a, b = numbers(M, K), numbers(N, K).t()
            terms = {"bias": torch.randn(N), "activation": "gelu"} | scales(kind, M, N, K)
            check(a, b, **terms, out=poisoned(M, N))
            check(a, b.contiguous(), **terms, out=poisoned(M, N, dtype=FP32))
        a, b = numbers(3, 40, 300), numbers(3, 136, 300).mT
        made = [scales(kind, 40, 136, 300) for _ in range(3)]
        stacked = {
            name: first if first.numel() == 1 else torch.stack([s[name] for s in made])
            for name, first in made[0].items()
        }
        check(a, b, **stacked, out=poisoned(3, 40, 136))


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(
    "size",
    [
        (256, 256, 256),
        (1024, 1536, 4096),
        (129, 257, 1000),
        (4, 8192, 4096),
        (1, 129, 16),
        (77, 7168, 2048),
        (2049, 5, 7),
    ],
    ids=str,
)
def test_large_products(dtype, size):
    M, N, K = size
    x = torch.randn(M, K, device="cuda") * torch.randn(M, 1, device="cuda").exp()
    (a, scale_a), (b, scale_b) = (
        quantize(x, dtype=dtype, per="1x128"),
        quantize(torch.randn(N, K, device="cuda"), dtype=dtype, per="128x128"),
    )
    terms = {"scale_b": scale_b.t(), "bias": torch.randn(N, device="cuda"), "activation": "gelu"}
    outs = []
    for given in (scale_a, scale_a.t().contiguous().t()):
        outs.append(poisoned(M, N, device="cuda"))
        check(a, b.t(), device="cuda", out=outs[-1], scale_a=given, **terms)
    assert torch.equal(*outs)


@pytest.mark.gpu
def test_scales_change_in_a_graph():
    a, b = numbers(256, 384, device="cuda"), numbers(512, 384, device="cuda").t()
    given, out = scales(("1x128", "128x128"), 256, 512, 384, "cuda"), poisoned(256, 512, device="cuda")
    gemm(a, b, out=out, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, out=out, **given)
    for _ in range(2):
        a.copy_(numbers(256, 384, device="cuda"))
        for scale in given.values():
            scale.uniform_(0.5, 2.0)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, gemm(a, b, **given))


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
    ours, exact = gemm(a, b.t(), scale_a=scale_a, scale_b=scale_b), wide(a, b.t(), scale_a, scale_b)
    errors = [((x.double() - exact).norm() / exact.norm()).item() for x in (ours, theirs)]
    assert errors[0] < 3e-3 and errors[0] < 1.1 * errors[1], errors
