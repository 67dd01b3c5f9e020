"""FP8 GEMM beyond the conformance cases: quantize, forms of scales, copies, errors and precision."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm, quantize
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue
from cute_kernels.matmul.family import DENSE

from ..gemm_calls import check
from ..gemm_errors import factors, numbers

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
SCALES = {  # of (M, K) @ (K, N): shapes of scale_a and scale_b
    "none": (None, None),
    "tensors": ((1,), ()),
    "rows": (("M", 1), (1, "N")),
    "rows, short": (("M",), ("N",)),
    "rows of a": (("M", 1), (1, 1)),
    "columns of b": (None, ("N",)),
}


def scales(kind: str, M: int, N: int, device="cpu") -> dict:
    """scale_a and scale_b of an entry of SCALES."""
    sizes, found = {"M": M, "N": N}, {}
    for name, shape in zip(("scale_a", "scale_b"), SCALES[kind], strict=True):
        if shape is not None:
            found[name] = factors(*(sizes.get(n, n) for n in shape), device=device)
    return found


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


def test_batches(place):
    """Scales of each item, folded into rows or not, and broadcast."""

    def draw(*shape):
        return numbers(*shape, device=place)

    def factor(*shape):
        return factors(*shape, device=place)

    for a, b, scale_a, scale_b in (
        ((3, 40, 64), (72, 64), (3, 40, 1), (72,)),
        ((2, 3, 40, 64), (72, 64), (2, 3, 40, 1), (1, 72)),
        ((3, 40, 64), (3, 72, 64), (3, 40, 1), (3, 1, 72)),
        ((40, 64), (3, 72, 64), (40,), (3, 1, 72)),
        ((3, 40, 50), (1, 72, 50), (3, 40, 1), (1, 1, 72)),
        ((2, 1, 40, 64), (1, 3, 72, 64), (2, 1, 40, 1), (1, 3, 1, 72)),
        ((3, 40, 64), (3, 72, 64), (1,), (1, 1, 1)),
    ):
        check(gemm, draw(*a), draw(*b).mT, scale_a=factor(*scale_a), scale_b=factor(*scale_b))
    check(gemm, draw(3, 40, 64), draw(72, 64).t(), scale_a=factor(3, 40, 1), bias=torch.randn(40, 1, device=place))


def test_scales_of_any_strides(place):
    a, b, many = numbers(40, 64, device=place), numbers(72, 64, device=place).t(), torch.rand(72, 5, device=place)
    check(gemm, a, b, scale_a=many[:40, 2:3], scale_b=many[:, 1])
    check(gemm, a, b, scale_a=many[3:4, 3:4], scale_b=many[0, 0].expand(1, 72))
    check(gemm, a[:1], b[:, :1], scale_a=many[:1, 1:2], scale_b=many[:1, 2])


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
        check(gemm, x, y, **scales("rows", 64, 72, device))
        notes = [note for note in explain(gemm, x, y).notes if "is copied" in note]
        assert [note[0] for note in notes] == ["a"] * copied[first] + ["b"] * copied[second]
        assert all("contiguous along K" in note for note in notes)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_explain_says_how_sums_are_made(arch):
    a, b = numbers(64, 96), numbers(72, 96).t()
    for fast, words in ((False, "promoted to FP32 every"), (True, "about 14 bits")):
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
        refused(
            ValueError,
            "use_fast_accum=True requires .* operands, got torch.bfloat16",
            *[lambda t: t.to(BF16)] * 2,
            use_fast_accum=True,
        ),
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


# -- kernels --------------------------------------------------------------------------------------------------------

KERNELS = [(name, facts) for name in ("sm_89", "sm_90") for facts in catalogue.float8_kernels(DENSE, name, False)]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_judge_of_fp8_kernels(arch):
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


# -- on a GPU -------------------------------------------------------------------------------------------------------


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
