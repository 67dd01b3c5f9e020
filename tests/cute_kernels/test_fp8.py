"""Products of 8-bit floats: scales, both kinds of sums, copies, refusals, kernels on the emulator and on a GPU."""

import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm, quantize, torch_op
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue
from cute_kernels.matmul.config import EpilogueSpec
from cute_kernels.matmul.family import DENSE
from cute_kernels.testing.reference import ACTIVATIONS, assert_as_good_as_torch, poisoned
from cute_kernels.tile.element import element_of

from ..emulator import emulate
from ..emulator.ops import on_emulator
from ..fp8_parts import assert_as_tensor_cores, some

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
SUMS = pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
ON_ARCHS = pytest.mark.parametrize("arch", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("sm_89", "sm_90")])
needs_compiler = pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler")
SCALES = {  # of a product (M, K) @ (K, N): shapes, and how many of each there are
    "none": (None, None),
    "tensors": ((1,), ()),
    "rows": (("M", 1), (1, "N")),
    "rows, short": (("M",), ("N",)),
    "rows of a": (("M", 1), (1, 1)),
    "columns of b": (None, ("N",)),
}


def numbers(*shape: int, dtype=E4M3, device="cpu") -> torch.Tensor:
    """Normal, with some that are large or subnormal in an 8-bit float."""
    x = torch.randn(*shape, device=device)
    return (x * 2.0 ** torch.randint(-6, 3, shape, device=device)).to(dtype)


def scales(kind: str, M: int, N: int, device="cpu") -> dict:
    """scale_a and scale_b of a kind of SCALES."""
    sizes, found = {"M": M, "N": N}, {}
    for name, shape in zip(("scale_a", "scale_b"), SCALES[kind], strict=True):
        if shape is not None:
            found[name] = torch.rand([sizes.get(n, n) for n in shape], device=device) + 0.25
    return found


def dequantised(a, b, scale_a=None, scale_b=None, dtype=torch.float64):
    """a and b times their scales."""
    a, b = a.to(dtype), b.to(dtype)
    if scale_a is not None:
        a = a * (scale_a.unsqueeze(-1) if scale_a.dim() == 1 and scale_a.numel() > 1 else scale_a).to(dtype)
    return a, b if scale_b is None else b * scale_b.to(dtype)


def wide(a, b, scale_a=None, scale_b=None, dtype=torch.float64):
    """a @ b of the dequantised operands."""
    return torch.matmul(*dequantised(a, b, scale_a, scale_b, dtype))


def check(a, b, *, fast=False, out=None, device="cpu", bias=None, activation=None, residual=None, **terms):
    """gemm(...) against fp64: as torch errs in fp32, but for what tensor cores of a GPU round."""
    ours = gemm(
        a, b, out=out, bias=bias, activation=activation, residual=residual, use_fast_accum=fast, **terms
    )  # fmt: skip
    given = {name: terms[name] for name in ("scale_a", "scale_b") if name in terms}

    def result(dtype):
        x = terms.get("alpha", 1.0) * wide(a, b, **given, dtype=dtype)
        x = x if bias is None else x + bias.to(dtype)
        x = x if residual is None else x + terms.get("beta", 1.0) * residual.to(dtype)
        return ACTIVATIONS[activation](x)

    exact = result(torch.float64)
    if device == "cpu":
        assert_as_good_as_torch(ours, exact, result(FP32).to(ours.dtype), k=a.shape[-1])
        return ours
    alone = activation is None and residual is None and bias is None
    terms = {"fast": fast, "alpha": terms.get("alpha", 1.0), "alone": alone}
    assert_as_tensor_cores(ours, exact, *dequantised(a, b, **given), **terms)
    return ours


# -- quantize -----------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("per", "shape"), [("tensor", (1,)), ("row", (3, 20, 1)), ("column", (3, 1, 36))])
def test_quantize(dtype, per, shape):
    x = torch.randn(3, 20, 36) * torch.randn(3, 20, 1).exp()
    values, scale = quantize(x.to(BF16), dtype=dtype, per=per)
    assert values.dtype == dtype and values.shape == x.shape and scale.dtype == FP32 and scale.shape == shape
    axes = {"tensor": (0, 1, 2), "row": -1, "column": -2}[per]
    top = torch.finfo(dtype).max
    assert (values.float().abs().amax(axes) == top).all()
    again, half = values.float() * scale, torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the least subnormal
    assert ((again - x.to(BF16).float()).abs() <= half * x.abs() * 1.01 + smallest * scale).all()


@pytest.mark.parametrize("per", ["tensor", "row", "column"])
def test_quantize_zeros_and_what_is_next_to_them(per):
    x = torch.zeros(4, 6)
    values, scale = quantize(x, per=per)
    assert (scale == 1).all() and (values.float() == 0).all()
    x[1, 2] = 1e-44
    values, scale = quantize(x, per=per)
    assert scale.isfinite().all() and (values.float() * scale).abs().max() <= 1e-44
    values, scale = quantize(torch.zeros(0, 6), per=per)
    assert values.shape == (0, 6) and scale.shape == {"tensor": (1,), "row": (0, 1), "column": (1, 6)}[per]


def test_quantize_keeps_large_numbers_in_range():
    for dtype in (E4M3, E5M2):
        for x in (torch.full((2, 2), 3.4e38), torch.randn(64, 64) * 1e30):
            values, scale = quantize(x, dtype=dtype)
            assert values.float().isfinite().all() and scale.isfinite().all()
    assert quantize(torch.tensor([[1.0, math.nan]]))[0].float().isnan().all()


def test_quantize_keeps_the_order_of_memory():
    """So that the transpose of a weight stays one that is contiguous along K."""
    assert quantize(torch.randn(8, 16).t())[0].stride() == (1, 16)


@pytest.mark.parametrize(
    ("x", "terms", "error", "words"),
    [
        ([1.0], {}, TypeError, "must be a torch.Tensor"),
        (torch.ones(2, 2, dtype=torch.int32), {}, TypeError, "floating|float32"),
        (torch.ones(2, 2).to(E4M3), {}, TypeError, "float32"),
        (torch.ones(2, 2), {"dtype": FP16}, TypeError, "float8_e4m3fn"),
        (torch.ones(2, 2), {"per": "block"}, ValueError, "'row'"),
        (torch.ones(2), {"per": "row"}, ValueError, "at least 2 dimensions"),
    ],
)
def test_quantize_refuses(x, terms, error, words):
    with pytest.raises(error, match=words):
        quantize(x, **terms)


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


@DTYPES
@SUMS
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("size", [(256, 256, 256), (129, 264, 144), (33, 71, 49)], ids=str)
def test_products(place, dtype, fast, kind, size):
    """Of square tiles, of tails, and of rows that are copied."""
    M, N, K = size
    a, b = numbers(M, K, dtype=dtype, device=place), numbers(N, K, dtype=dtype, device=place).t()
    out = poisoned(M, N, device=place)
    assert check(a, b, fast=fast, out=out, device=place, **scales(kind, M, N, place)) is out


@SUMS
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(place, fast, out_dtype, activation):
    M, N, K = 136, 200, 160
    a, b = (numbers(n, K, device=place) for n in (M, N))
    terms = {"bias": torch.randn(N, device=place), "activation": activation, "alpha": 0.5} | scales("rows", M, N, place)
    residual = torch.randn(M, N, device=place).to(out_dtype)
    check(a, b.t(), fast=fast, device=place, **terms, out_dtype=out_dtype)
    check(a, b.t(), fast=fast, device=place, **terms, out_dtype=out_dtype, residual=residual, beta=-1.5)
    check(a, b.t(), fast=fast, device=place, **terms, out=poisoned(N, M, dtype=out_dtype, device=place).t())
    terms = {"bias": torch.randn(M, 1, device=place).to(BF16)} | scales("tensors", M, N, place)
    check(a, b.t(), fast=fast, device=place, **terms, out_dtype=out_dtype)


@SUMS
def test_a_function_of_one_s_own(place, fast):
    a, b, factors = numbers(64, 96, device=place), numbers(72, 96, device=place).t(), scales("rows", 64, 72, place)
    out = gemm(a, b, epilogue=lambda x: torch.tanh(x) * 2.0, out_dtype=FP32, use_fast_accum=fast, **factors)
    assert (out - 2.0 * torch.tanh(wide(a, b, **factors))).abs().max() < 4e-2


def test_batches(place):
    """Scales of each item's rows and columns, where items are folded into rows and where they are not."""

    def draw(*shape):
        return numbers(*shape, device=place)

    def factor(*shape):
        return torch.rand(*shape, device=place) + 0.25

    for a, b, scale_a, scale_b in (
        ((3, 40, 64), (72, 64), (3, 40, 1), (72,)),
        ((2, 3, 40, 64), (72, 64), (2, 3, 40, 1), (1, 72)),
        ((3, 40, 64), (3, 72, 64), (3, 40, 1), (3, 1, 72)),
        ((40, 64), (3, 72, 64), (40,), (3, 1, 72)),
        ((3, 40, 50), (1, 72, 50), (3, 40, 1), (1, 1, 72)),
        ((2, 1, 40, 64), (1, 3, 72, 64), (2, 1, 40, 1), (1, 3, 1, 72)),
        ((3, 40, 64), (3, 72, 64), (1,), (1, 1, 1)),
    ):
        check(draw(*a), draw(*b).mT, device=place, scale_a=factor(*scale_a), scale_b=factor(*scale_b))
    check(
        draw(3, 40, 64), draw(72, 64).t(), device=place, scale_a=factor(3, 40, 1), bias=torch.randn(40, 1, device=place)
    )


def test_scales_of_any_strides(place):
    a, b, many = numbers(40, 64, device=place), numbers(72, 64, device=place).t(), torch.rand(72, 5, device=place)
    check(a, b, device=place, scale_a=many[:40, 2:3], scale_b=many[:, 1])
    check(a, b, device=place, scale_a=many[3:4, 3:4], scale_b=many[0, 0].expand(1, 72))
    check(a[:1], b[:, :1], device=place, scale_a=many[:1, 1:2], scale_b=many[:1, 2])


def test_empty_results_and_sums(place):
    def given(M, N, K):
        return numbers(M, K, device=place), numbers(N, K, device=place).t(), torch.ones(M, 1, device=place)

    for M, N, K in ((0, 16, 32), (16, 0, 32)):
        a, b, scale = given(M, N, K)
        assert gemm(a, b, scale_a=scale).shape == (M, N)
    a, b, scale = given(24, 40, 0)
    bias = torch.randn(40, device=place)
    assert torch.equal(gemm(a, b, scale_a=scale, bias=bias, out_dtype=FP32), bias.expand(24, 40))


# -- copies and plans -----------------------------------------------------------------------------------------------


def test_operands_that_are_not_contiguous_along_k_are_copied(device):
    """And explain names the copy; others are read where they are."""
    a, b = numbers(64, 96, device=device), numbers(72, 96, device=device)
    layouts = {"k": lambda t: t, "m": lambda t: t.t().contiguous().t(), "wide": lambda t: torch.cat([t, t], 1)[:, :96]}
    layouts |= {
        "offset": lambda t: torch.cat([t[:, :1], t], 1)[:, 1:],
        "spread": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    }
    copied = {"k": 0, "m": 1, "wide": 0, "offset": 1, "spread": 1}
    for first, second in itertools.product(layouts, layouts):
        x, y = layouts[first](a), layouts[second](b).t()
        check(x, y, device=device, **scales("rows", 64, 72, device))
        notes = [note for note in explain(gemm, x, y).notes if "is copied" in note]
        assert [note[0] for note in notes] == ["a"] * copied[first] + ["b"] * copied[second]
        assert all("contiguous along K" in note for note in notes)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_explain_says_how_sums_are_made(arch):
    a, b = numbers(64, 96), numbers(72, 96).t()
    for fast, words in ((False, "promoted to fp32 after every"), (True, "keep fewer bits")):
        plan = explain(gemm, a, b, use_fast_accum=fast, arch=arch)
        assert words in str(plan) and plan.facts.promotes != fast
        assert plan.facts.path == ARCHS[arch].float8


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_architectures_without_such_products_say_what_would_work(arch):
    with pytest.raises(ValueError, match=f"{arch} has no FP8 MMA.*cast to torch.bfloat16"):
        explain(gemm, numbers(64, 96), numbers(72, 96).t(), arch=arch)


def test_hopper_s_other_path_says_what_would_work():
    with cute_kernels.path("sm_80"), pytest.raises(ValueError, match="sm_90 has no FP8 MMA on the path sm_80"):
        explain(gemm, numbers(64, 96), numbers(72, 96).t(), arch="sm_90")


def test_known_plans_are_not_confused(device):
    """Calls that differ in one thing, each of them after all others."""
    a, b, e = (
        numbers(64, 64, device=device),
        numbers(64, 64, device=device).t(),
        numbers(64, 64, dtype=E5M2, device=device),
    )
    calls = [(a, b, fast, kind) for fast in (False, True) for kind in SCALES] + [(e, e.t(), False, "rows")]
    for x, y, fast, kind in calls * 2:
        check(x, y, fast=fast, device=device, **scales(kind, 64, 64, device))
        check(x.float().to(BF16), y.float().to(BF16), device=device)


# -- refusals -------------------------------------------------------------------------------------------------------


def refused(error, words, a=None, b=None, **terms):
    return pytest.param(error, words, a, b, terms, id=words)


@pytest.mark.parametrize(
    ("error", "words", "a", "b", "terms"),
    [
        refused(TypeError, "b is torch.float8_e5m2 but a is torch.float8_e4m3fn", b=lambda t: t.to(FP32).to(E5M2)),
        refused(TypeError, "a is torch.float8_e4m3fnuz", a=lambda t: t.float().to(torch.float8_e4m3fnuz)),
        refused(TypeError, "scale_a must be a torch.Tensor, got float", scale_a=2.0),
        refused(TypeError, "scale_a is torch.bfloat16; scales are torch.float32", scale_a=torch.ones(1, dtype=BF16)),
        refused(ValueError, r"scale_a has shape \(24,\).*\(32,\) or \(32, 1\)", scale_a=torch.ones(24)),
        refused(ValueError, r"scale_a has shape \(1, 32\)", scale_a=torch.ones(1, 32)),
        refused(ValueError, r"scale_b has shape \(24, 1\).*\(24,\) or \(1, 24\)", scale_b=torch.ones(24, 1)),
        refused(ValueError, r"scale_b has shape \(0,\)", scale_b=torch.ones(0)),
        refused(ValueError, "scale_b is on meta", scale_b=torch.ones(1, device="meta")),
        refused(TypeError, "output of torch.int8; torch.bfloat16, torch.float16", out_dtype=torch.int8),
        refused(TypeError, "bias is torch.float8_e4m3fn", bias=torch.ones(24).to(E4M3)),
        refused(TypeError, "use_fast_accum must be a bool, got int", use_fast_accum=1),
        refused(TypeError, "scale_a of torch.bfloat16 operands", *[lambda t: t.to(BF16)] * 2, scale_a=torch.ones(1)),
        refused(ValueError, "use_fast_accum of torch.bfloat16", *[lambda t: t.to(BF16)] * 2, use_fast_accum=True),
    ],
)
def test_refusals(place, error, words, a, b, terms):
    x, y = numbers(32, 48, device=place), numbers(24, 48, device=place).t()
    if place != "cpu":
        terms = {
            k: t.to(place) if isinstance(t, torch.Tensor) and t.device.type == "cpu" else t for k, t in terms.items()
        }
    with pytest.raises(error, match=words):
        gemm(x if a is None else a(x), y if b is None else b(y), **terms)


@pytest.mark.parametrize("name", ["bias", "residual", "scale_a", "scale_b"])
def test_no_gradient_is_dropped_in_silence(place, name):
    a, b = numbers(32, 48, device=place), numbers(24, 48, device=place).t()
    shape, dtype = {"bias": ((24,), FP32), "residual": ((32, 24), BF16)}.get(name, ((1,), FP32))
    leaf = torch.ones(shape, dtype=dtype, device=place, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        gemm(a, b, **{name: leaf})
    with torch.no_grad():
        assert not gemm(a, b, **{name: leaf}).requires_grad
    if name.startswith("scale"):
        wide_a, wide_b = (t.to(BF16).requires_grad_() for t in (a, b))
        with pytest.raises(TypeError, match=f"{name} of torch.bfloat16"):
            gemm(wide_a, wide_b, **{name: leaf})


# -- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled(place):
    torch._dynamo.reset()
    a, b = numbers(48, 64, device=place), numbers(80, 64, device=place).t()
    factors, bias = scales("rows", 48, 80, place), torch.randn(80, device=place)

    def call(a, b, bias, scale_a, scale_b, out=None):
        return gemm(a, b, bias=bias, activation="silu", scale_a=scale_a, scale_b=scale_b, out=out) * 2.0

    compiled = torch.compile(call, fullgraph=True, backend="inductor" if place == "cuda" else "aot_eager")
    assert torch.equal(compiled(a, b, bias, **factors), call(a, b, bias, **factors))
    out = poisoned(48, 80, device=place)
    assert torch.equal(compiled(a, b, bias, **factors, out=out), call(a, b, bias, **factors))
    plain = torch.compile(lambda a, b: gemm(a, b, use_fast_accum=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(plain(a, b), gemm(a, b, use_fast_accum=True))
    with pytest.raises(Exception, match="does not compute gradients"):
        compiled(a, b, bias.clone().requires_grad_(), **factors)
    torch._dynamo.reset()


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(place):
    """Without test_schema: torch compares tensors there, which it cannot where they are 8-bit floats on a CPU."""
    a, b = numbers(3, 48, 64, device=place), numbers(80, 64, device=place).t()
    op, into = torch.ops.cute_kernels.scaled_gemm.default, torch.ops.cute_kernels.scaled_gemm_out.default
    one = torch.ones(1, device=place)
    double = torch_op.register_function(lambda x: x * 2.0)
    out = torch.zeros(3, 48, 80, dtype=FP16, device=place)
    for which, args, terms in (
        (op, (a, b), {}),
        (op, (a, b, one, one, True), {"out_dtype": FP32, "activation": "gelu"}),
        (op, (a, b), {"scale_a": torch.ones(3, 48, 1, device=place), "epilogue": double}),
        (into, (a, b, out, one), {"bias": torch.ones(80, device=place)}),
    ):
        torch.library.opcheck(which, args, terms, test_utils=("test_faketensor",))


# -- kernels --------------------------------------------------------------------------------------------------------

KERNELS = [(name, facts) for name in ("sm_89", "sm_90") for facts in catalogue.float8_kernels(DENSE, name, False)]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_what_is_wrong_with_a_kernel_of_8_bits(arch):
    """test_kernels_compile compiles the kernels, each of which is judged so."""
    promoted = [facts for name, facts in KERNELS if name == arch and facts.promotes]
    kinds = {f.takes_turns or f.epilogue.scales_blocks: f for f in promoted}
    assert set(kinds) == {True, False}
    for multiplies, facts in kinds.items():
        cfg, steps = facts.config, max(facts.k_blocks)
        sums = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * (128 if arch == "sm_90" else 32))
        if facts.epilogue.scales_blocks:
            sums *= 3 * cfg.tile_k // 128 if arch == "sm_90" else 2
        product, added = DENSE.tensor_core(facts), "FFMA" if multiplies else "FADD"

        def judged(before=(), **changed):
            codes = {product: steps, added: sums} | changed  # noqa: B023
            return DENSE.judge(facts, b"", SimpleNamespace(opcodes=codes), list(before))  # noqa: B023

        assert judged() == [] and judged(["x"]) == ["x"]
        few = {
            product: f"{steps - 1} {product} for {steps} MMA steps",
            added: f"{sums - 1} {added}, of at least {sums}",
        }
        for code, count in ((product, steps), (added, sums)):
            (problem,) = judged(**{code: count - 1})
            assert problem.startswith(few[code])
        for code in ("HMMA", "HGMMA"):
            (problem,) = judged(**{code: 1})
            assert problem.startswith("1 16-bit MMAs")


def test_kernels_that_promote_hold_two_kinds_of_sums():
    """So their tiles are smaller, and both consumer warpgroups share one."""
    of = {
        fast: {f.config for _, f in KERNELS if f.path == "sm_90" and f.use_fast_accum == fast} for fast in (False, True)
    }
    assert of[False] < of[True]
    for cfg in of[False]:
        assert cfg.consumer_groups == 1 and cfg.tile_m * cfg.tile_n <= 128 * 256
    for cfg in of[True] - of[False]:
        assert cfg.consumer_groups == 2
        facts = catalogue.dense(
            ARCHS["sm_90"], "sm_90", cfg, dtype="float8_e4m3fn", aligns=(16, 16, 8), majors=("k", "k", "n")
        )
        assert "promoted" in DENSE.unsupported(facts)


def configurations(arch: str, fast: bool) -> list:
    """Facts of each configuration, with scales of rows and columns."""
    spec, terms = ARCHS[arch], {"dtype": "float8_e4m3fn", "aligns": (16, 16, 8), "majors": ("k", "k", "n")}
    terms |= {"use_fast_accum": fast, "epilogue": EpilogueSpec(scale_m="row", scale_n="column")}
    configs = DENSE.candidates(spec.path, None, spec, element_of("float8_e4m3fn"))
    made = [catalogue.dense(spec, spec.path, config, **terms) for config in configs]
    made = some([facts for facts in made if not DENSE.unsupported(facts)])
    return [pytest.param(facts, id=facts.config.short) for facts in made]


def on_the_emulator(facts, K: int = 400):
    """A product whose tiles and K-tiles have tails; of e4m3 numbers each product is exact in fp32."""
    M, N = facts.config.tile_m + 72, facts.config.tile_n * facts.config.cluster_n + 40
    a, b, d = numbers(M, K), numbers(N, K).t(), poisoned(M, N)
    scale_a, scale_b = torch.rand(M) + 0.25, torch.rand(N) + 0.25
    with emulate.emulator(sms=4):
        emulate.emulated(facts)(
            a, b, d, scale_a[None], scale_b[None], None, None, None, 1.0, 0.0, *facts.counts(1, 4)
        )  # fmt: skip
    exact, by_torch = (wide(a, b, scale_a, scale_b, dtype) for dtype in (torch.float64, FP32))
    assert_as_good_as_torch(d, exact, by_torch.to(BF16), k=K)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("facts", configurations("sm_90", False))
def test_promoted_sums_on_the_emulator(facts):
    on_the_emulator(facts)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "facts", [*configurations("sm_90", True)[::4], *configurations("sm_89", False), *configurations("sm_89", True)[2:]]
)
def test_other_kernels_on_the_emulator(facts):
    on_the_emulator(facts)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("sm_90", E4M3), ("sm_89", E5M2)], ids=["sm_90", "sm_89"])
def test_calls_on_the_emulator(arch, dtype):
    """With copies, every kind of scale, a bias and a function."""
    with on_emulator(arch, sms=4):
        for (M, N, K), kind in zip(
            ((70, 90, 130), (64, 72, 96), (33, 136, 49)), ("rows", "tensors", "columns of b"), strict=True
        ):
            a, b = numbers(M, K, dtype=dtype), numbers(N, K, dtype=dtype).t()
            terms = {"bias": torch.randn(N), "activation": "gelu", "out": poisoned(M, N)}
            check(a, b, **scales(kind, M, N), **terms)
            check(a, b.contiguous(), fast=True, **scales(kind, M, N), out=poisoned(M, N, dtype=FP32))
        a, b = numbers(3, 40, 64, dtype=dtype), numbers(3, 72, 64, dtype=dtype).mT
        check(a, b, scale_a=torch.rand(1), scale_b=torch.rand(1, 1))  # one scale for all items of a batch
        check(a, b, scale_a=torch.rand(1, 1, 1), scale_b=torch.rand(72).expand(3, 1, 72))


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@DTYPES
@SUMS
@pytest.mark.parametrize("size", [(256, 256, 256), (1024, 1536, 4096), (129, 257, 1000), (4, 8192, 4096)], ids=str)
def test_large_products(dtype, fast, size):
    M, N, K = size
    a, b = (quantize(torch.randn(n, K, device="cuda"), dtype=dtype, per="row") for n in (M, N))
    terms = {"scale_a": a[1], "scale_b": b[1].t(), "bias": torch.randn(N, device="cuda"), "activation": "gelu"}
    out = poisoned(M, N, device="cuda")
    check(a[0], b[0].t(), fast=fast, device="cuda", out=out, **terms)
    again = poisoned(M, N, device="cuda")
    gemm(a[0], b[0].t(), use_fast_accum=fast, out=again, **terms)
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.sm_90
def test_promoted_sums_are_the_accurate_ones():
    """Sums of 8192 positive numbers: what the tensor cores drop of each step adds up."""
    a, b = (torch.rand(512, 8192, device="cuda").to(E4M3) for _ in range(2))
    exact = a.double() @ b.t().double()
    errors = []
    for fast in (False, True):
        out = gemm(a, b.t(), out_dtype=FP32, use_fast_accum=fast).double()
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert errors[0] < 1e-3 and errors[0] < errors[1] / 3, errors  # torch's own: 6e-4


@pytest.mark.gpu
@SUMS
def test_scales_and_operands_change_in_a_graph(fast):
    a, b = numbers(256, 384, device="cuda"), numbers(512, 384, device="cuda").t()
    factors, out = scales("rows", 256, 512, "cuda"), poisoned(256, 512, device="cuda")
    gemm(a, b, out=out, use_fast_accum=fast, **factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, out=out, use_fast_accum=fast, **factors)
    for _ in range(2):
        a.copy_(numbers(256, 384, device="cuda"))
        factors["scale_a"].uniform_(0.5, 2.0)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, gemm(a, b, use_fast_accum=fast, **factors))
