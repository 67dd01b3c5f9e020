"""accumulation_dtype=torch.float16 beyond the conformance cases: overflow, plans, gradients, errors, machine code."""

from dataclasses import replace

import pytest
import torch

import cute_kernels
from cute_kernels import Sparse24, explain, gemm
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue, cost
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.matmul.family import DENSE
from cute_kernels.runtime.families import family_named
from cute_kernels.runtime.inspect import disassemble
from cute_kernels.testing.reference import ACTIVATIONS, poisoned
from sparse_collective import BsrMatrix, bsr_linear, random_bsr
from sparse_collective.bsr_gemm import catalogue as bsr_catalogue
from sparse_collective.bsr_gemm.family import BSR

from ..compiled import cubin
from ..emulator.ops import needs_compiler, on_emulator
from ..gemm_calls import check
from ..sparse_collective.bsr_parts import products_refuse

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = {"accumulation_dtype": FP16}
LARGEST = 65504.0


def numbers(*shape: int, device="cpu") -> torch.Tensor:
    return torch.randn(*shape, device=device).to(FP16)


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues_begin_with_fp32(place, activation):
    """So neither a bias nor a product with alpha is bound to what fp16 holds."""
    M, N, K = 136, 200, 160
    a, b = numbers(M, K, device=place), numbers(K, N, device=place)
    bias, residual = torch.randn(N, device=place), torch.randn(M, N, device=place)
    terms = HALF | {"activation": activation, "out_dtype": FP32}
    check(gemm, a, b, bias=bias, residual=residual, beta=-1.5, **terms)
    large = {"bias": 1e5 + bias, "alpha": 1e4}
    check(gemm, a, b, **large, **terms)
    assert gemm(a, b, **large, **terms).abs().max() > 2 * LARGEST


def test_a_sum_beyond_fp16_is_infinite(place):
    """In fp32 it is not, though the result may be."""
    a, b = torch.full((16, 512), 16.0, device=place).to(FP16), torch.full((512, 24), 16.0, device=place).to(FP16)
    assert (gemm(a, b, out_dtype=FP32, **HALF) == torch.inf).all()
    assert (gemm(a, b, out_dtype=FP32) == 131072.0).all()
    assert (gemm(a, -b, out_dtype=FP32, **HALF) == -torch.inf).all()
    assert (gemm(a[:, :128], b[:128], out_dtype=FP32, **HALF) == 32768.0).all()


# -- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_plans(arch):
    a, b = (torch.empty(2048, 2048, dtype=FP16, device="meta") for _ in range(2))
    plan = explain(gemm, a, b, arch=arch, **HALF)
    assert plan.facts.acc_dtype == "float16" and "accumulation: float16 in the tensor cores" in str(plan)
    for wide in (None, FP32):
        plan = explain(gemm, a, b, arch=arch, accumulation_dtype=wide)
        assert plan.facts.acc_dtype == "float32" and "sums:" not in str(plan)
    x = torch.randn(2048, 256).to(FP16)
    plan = explain(bsr_linear, x, random_bsr((256, 256), (128, 128), density=0.5, dtype=FP16), arch=arch, **HALF)
    assert plan.facts.acc_dtype == "float16" and plan.facts.family == "bsr"


def test_kernels_for_special_shapes_say_that_they_add_up_in_fp32():
    W = random_bsr((256, 256), (128, 128), density=0.5, dtype=FP16)
    plan = explain(bsr_linear, torch.randn(4, 256).to(FP16), W, arch="sm_90", **HALF)
    assert plan.facts.family == "skinny" and plan.facts.acc_dtype == "float32"
    assert "accumulation_dtype has no effect: the skinny kernels accumulate in FP32" in plan.notes


@pytest.mark.parametrize(("arch", "rate"), [("sm_80", 1.0), ("sm_86", 2.0), ("sm_89", 2.0), ("sm_90", 1.0)])
def test_the_cost_model_knows_where_the_rate_is_doubled(monkeypatch, arch, rate):
    """On GeForce a product that tensor cores bound takes half the clocks."""
    seen = []
    monkeypatch.setattr(type(DENSE), "cost", lambda _, config, problem, sms: seen.append((config, problem)) or 1.0)
    a = torch.empty(4096, 4096, dtype=FP16, device="meta")
    for dtype, expected in ((FP16, rate), (None, 1.0)):
        seen.clear()
        explain(gemm, a, a, arch=arch, accumulation_dtype=dtype)
        assert {problem.mma_rate for _, problem in seen} == {expected}
    config, problem = next(pair for pair in seen if pair[0].cluster == 1)  # GeForce has no clusters, which wait besides
    halved, fast_l2 = replace(problem, mma_rate=2.0), 1e9  # bytes a clock
    assert 1.9 < cost.cost(config, problem, 64, fast_l2) / cost.cost(config, halved, 64, fast_l2) <= 2.0


def test_larger_tiles_are_for_fp16_sums_alone():
    """256 sums a thread, of which fp16 ones take 128 registers."""
    spec = ARCHS["sm_90"]
    wide = [cfg for cfg in DENSE.candidates("sm_90", None, spec) if cfg.tile_m * cfg.tile_n // cfg.warps_m > 192 * 128]
    assert len(wide) == 2 and all(cfg.consumer_groups == 2 for cfg in wide)
    for cfg in wide:
        half = catalogue.dense(spec, "sm_90", cfg, **catalogue.FP16_SUMS)
        assert "registers of accumulators" in DENSE.unsupported(catalogue.dense(spec, "sm_90", cfg))
        assert not DENSE.unsupported(half)
        direct = catalogue.dense(spec, "sm_90", cfg, **catalogue.FP16_SUMS, aligns=(8, 8, 1))
        assert "store element by element" in DENSE.unsupported(direct)


def test_what_no_kernel_is_built_from():
    spec = ARCHS["sm_90"]
    cfg = DENSE.candidates("sm_90", None, spec)[1]
    for changes, words in (
        ({"acc_dtype": "float16"}, "accumulator of float16 with bfloat16 operands"),
        ({"acc_dtype": "bfloat16", "dtype": "float16"}, "accumulator of bfloat16 with float16 operands"),
    ):
        assert words in DENSE.unsupported(catalogue.dense(spec, "sm_90", cfg, **changes))
    for name, side in (("small blocks", 32), ("skinny", 128), ("sparse24", 0)):
        block = BlockFacts(side, side, "int32") if side else None
        config = family_named(name).candidates("sm_90", block, spec)[0]
        facts = catalogue.dense(spec, "sm_90", config, **catalogue.FP16_SUMS, block=block)
        assert "only dense and BSR kernels support it" in family_named(name).unsupported(facts)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "error", "words"),
    [
        (
            BF16,
            FP16,
            ValueError,
            "accumulation_dtype=torch.float16 requires torch.float16 operands, got torch.bfloat16",
        ),
        (
            BF16,
            FP32,
            ValueError,
            "accumulation_dtype=torch.float32 requires torch.float16 operands, got torch.bfloat16",
        ),
        (FP32, FP16, ValueError, "got torch.float32; .*accumulate in FP32 or wider .leave it out"),
        (torch.float8_e4m3fn, FP16, ValueError, "got torch.float8_e4m3fn; .*use_fast_accum=True"),
        (
            FP16,
            BF16,
            ValueError,
            "accumulation_dtype must be torch.float32, the default, or torch.float16, got torch.bfloat16",
        ),
        (FP16, torch.int32, ValueError, "or torch.float16, got torch.int32"),
        (FP16, True, TypeError, "accumulation_dtype must be a torch.dtype or None, got bool"),
        (FP16, "float16", TypeError, "accumulation_dtype must be a torch.dtype or None, got str"),
    ],
)
def test_refusals(dtype, value, error, words):
    products_refuse(dtype, error, words, accumulation_dtype=value)


def test_it_is_named_at_the_call():
    a = numbers(16, 16)
    with pytest.raises(TypeError, match="positional"):
        gemm(a, a, FP16)


def test_structured_sparsity_has_none():
    W = Sparse24.from_dense(cute_kernels.prune_2_4(numbers(64, 64)))
    with pytest.raises(ValueError, match=r"kernels accumulate in FP32.*gemm\(a.to_dense\(\), b\)"):
        gemm(W, numbers(64, 32), **HALF)


# -- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_are_products_with_fp32_sums(place, activation):
    """Gradients are those of FP32 accumulation. Forward sums are
    whole numbers that FP16 represents, so derivatives are the same."""
    a, b = (torch.randint(-2, 3, (64, 64), device=place).to(FP16) for _ in range(2))
    W, dy = BsrMatrix.from_dense(b, (32, 32)), numbers(64, 64, device=place)
    found = []
    for dtype in (FP16, FP32):
        x, y, bias = a.clone().requires_grad_(), b.clone().requires_grad_(), numbers(64).to(place) * 0
        V = W.with_values(W.values.clone().requires_grad_())
        terms = {"activation": activation, "accumulation_dtype": dtype}
        gemm(x, y, bias=bias.requires_grad_(), **terms).backward(dy)
        gradients = [x.grad, y.grad, bias.grad]
        x.grad = None
        bsr_linear(x, V, bias=bias.detach(), **terms).backward(dy)
        found.append([*gradients, x.grad, V.values.grad])
    for ours, wide in zip(*found, strict=True):
        assert torch.equal(ours, wide)


def test_gradients_under_torch_func():
    x, W = numbers(32, 64), BsrMatrix.from_dense(numbers(64, 64), (32, 32))
    of = torch.func.grad(lambda x: bsr_linear(x, W, **HALF).float().sum())(x)
    torch.testing.assert_close(of, W.to_dense().float().sum(0).to(FP16).expand(32, 64))


# -- kernels --------------------------------------------------------------------------------------------------------

KERNELS = [
    (name, facts)
    for name in ("sm_86", "sm_90")
    for made, family in ((catalogue, DENSE), (bsr_catalogue, BSR))
    for facts in made.fp16_sums_kernels(family, name, False)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "instruction"), [("sm_86", "HMMA.16816.F16 "), ("sm_90", "HGMMA.64x192x16.F16 ")], ids=["sm_86", "sm_90"]
)
def test_machine_code(arch, instruction):
    facts = next(facts for name, facts in KERNELS if name == arch)
    sass = disassemble(cubin(facts))
    steps = 2 * facts.config.tile_m // 64 * 4 if arch == "sm_90" else 64
    assert sass.count(instruction) == steps and "MMA" in sass and ".F32 " not in instruction
    assert f"{instruction.split('.')[0]}." in sass and not any(
        "MMA" in line and ".F32" in line for line in sass.splitlines()
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_calls_on_the_emulator(arch):
    """With an epilogue, and overflow."""
    with on_emulator(arch, sms=4):
        a, b = numbers(70, 136), numbers(136, 96)
        terms = {"bias": torch.randn(96), "activation": "gelu", "residual": torch.randn(70, 96)}
        check(gemm, a, b, **terms, **HALF, out=poisoned(70, 96, dtype=FP32))
        a, b = torch.full((16, 512), 16.0).to(FP16), torch.full((512, 24), 16.0).to(FP16)
        assert (gemm(a, b, out_dtype=FP32, **HALF) == torch.inf).all()
