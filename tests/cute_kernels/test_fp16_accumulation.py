"""accumulation_dtype=torch.float16: sums against a bound of 11 bits, plans, gradients, refusals, kernels."""

import itertools
from dataclasses import replace

import pytest
import torch

import cute_kernels
from cute_kernels import Sparse24, explain, gemm, torch_op  # noqa: F401 (torch_op registers ops)
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue, cost
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.matmul.family import DENSE
from cute_kernels.runtime.families import family_named
from cute_kernels.runtime.inspect import disassemble
from cute_kernels.testing.reference import ACTIVATIONS, poisoned
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr
from sparse_collective.bsr_gemm import catalogue as bsr_catalogue
from sparse_collective.bsr_gemm.family import BSR

from ..compiled import cubin
from ..emulator import emulate
from ..emulator.ops import needs_compiler, on_emulator
from ..sparse_collective.bsr_parts import products_refuse

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HALF = {"accumulation_dtype": FP16}
STEP = 8  # products that tensor cores add before they round; of WGMMA, and of the emulator, 16
LARGEST = 65504.0


def numbers(*shape: int, device="cpu") -> torch.Tensor:
    return torch.randn(*shape, device=device).to(FP16)


def allowed(a, b, parts: int = 1) -> torch.Tensor:
    """What sums in fp16 of a (..., M, K) @ b (..., K, N) may err by.

    Every addition rounds to 11 bits, by 2^-11 of the partial sum at most; it adds STEP products, in the order of K.
    With K among `parts` CTAs, each has partial sums of its own. 2 % for what partial sums have erred by before.
    """
    a, b = a.to(FP64), b.to(FP64)
    steps = -(-a.shape[-1] // STEP // parts) * parts
    pad = steps * STEP - a.shape[-1]
    a = torch.nn.functional.pad(a, (0, pad)).unflatten(-1, (parts, steps // parts, STEP))
    b = torch.nn.functional.pad(b, (0, 0, 0, pad)).unflatten(-2, (parts, steps // parts, STEP))
    total = 0.0
    for part in range(parts):
        sums = torch.zeros(())
        for step in range(steps // parts):
            sums = sums + a[..., part, step, :] @ b[..., part, step, :, :]
            total = total + sums.abs()
    return 1.02 * 2.0**-11 * total + 2.0**-24 * steps


def assert_within(ours, exact, bound) -> None:
    """`ours` errs by `bound`, and by what it is rounded to."""
    assert ours.shape == exact.shape
    eps = torch.finfo(ours.dtype).eps
    wrong = ~((ours.to(FP64) - exact).abs() <= bound + eps / 2 * (exact.abs() + bound) + 1e-7)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements, {wrong.nonzero()[:4].tolist()}"


def check(a, b, *, bias=None, activation=None, residual=None, alpha=1.0, beta=1.0, parts: int = 1, slack=1.0, **more):
    """gemm(...) against fp64."""
    terms = {"bias": bias, "activation": activation, "residual": residual, "alpha": alpha, "beta": beta}
    ours = gemm(a, b, **terms, **HALF, **more)
    x = alpha * (a.to(FP64) @ b.to(FP64))
    x = x if bias is None else x + bias.to(FP64)
    x = x if residual is None else x + beta * residual.to(FP64)
    # Derivatives of activations are below 1.2.
    assert_within(ours, ACTIVATIONS[activation](x), 1.2 * slack * abs(alpha) * allowed(a, b, parts))
    return ours


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(256, 256, 256), (129, 264, 144), (33, 71, 49)], ids=str)
def test_products(place, size):
    M, N, K = size
    a, b = numbers(M, K, device=place), numbers(N, K, device=place).t()
    for out in (poisoned(M, N, dtype=dtype, device=place) for dtype in (FP16, BF16, FP32)):
        assert check(a, b, out=out, slack=2.0) is out  # a GPU may round to zero


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues_begin_with_fp32(place, activation):
    """So neither a bias nor a product with alpha is bound to what fp16 holds."""
    M, N, K = 136, 200, 160
    a, b = numbers(M, K, device=place), numbers(K, N, device=place)
    bias, residual = torch.randn(N, device=place), torch.randn(M, N, device=place)
    check(a, b, bias=bias, activation=activation, slack=2.0)
    check(a, b, bias=bias, activation=activation, residual=residual, beta=-1.5, out_dtype=FP32, slack=2.0)
    large = check(a, b, bias=1e5 + bias, alpha=1e4, out_dtype=FP32, slack=2.0)
    assert large.abs().max() > 2 * LARGEST
    function = gemm(a, b, epilogue=lambda x: torch.tanh(x) * 2.0, out_dtype=FP32, **HALF)
    assert_within(function, 2.0 * torch.tanh(a.double() @ b.double()), 4.0 * allowed(a, b))


def test_a_sum_beyond_fp16_is_infinite(place):
    """In fp32 it is not, though the result may be."""
    a, b = torch.full((16, 512), 16.0, device=place).to(FP16), torch.full((512, 24), 16.0, device=place).to(FP16)
    assert (gemm(a, b, out_dtype=FP32, **HALF) == torch.inf).all()
    assert (gemm(a, b, out_dtype=FP32) == 131072.0).all()
    assert (gemm(a, -b, out_dtype=FP32, **HALF) == -torch.inf).all()
    assert (gemm(a[:, :128], b[:128], out_dtype=FP32, **HALF) == 32768.0).all()


def test_batches(place):
    for a, b in (((3, 40, 64), (64, 72)), ((3, 40, 64), (3, 64, 72)), ((40, 64), (3, 64, 72))):
        check(numbers(*a, device=place), numbers(*b, device=place), slack=2.0)


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (16, 16)], ids=str)
def test_block_sparse_products(place, block):
    W = random_bsr((256, 256), block, density=0.5, dtype=FP16).to(place)
    dense, x, bias = W.to_dense(), numbers(80, 256, device=place), torch.randn(256, device=place)
    bound = 2.0 * allowed(x, dense.t())
    ours = bsr_linear(x, W, bias=bias, out=poisoned(80, 256, dtype=FP32, device=place), **HALF)
    assert_within(ours, x.double() @ dense.double().t() + bias.double(), bound)
    ours = bsr_matmul(W, x.t(), out=poisoned(256, 80, dtype=FP16, device=place), **HALF)
    assert_within(ours, dense.double() @ x.t().double(), bound.t())
    experts = BsrMatrix.stack([W, W])
    tokens, groups = numbers(128, 256, device=place), torch.tensor([1, 0], dtype=torch.int32, device=place)
    ours = bsr_grouped_linear(
        tokens, experts, expert_ids=groups, out=poisoned(128, 256, dtype=FP32, device=place), **HALF
    )
    assert_within(ours, tokens.double() @ dense.double().t(), 2.0 * allowed(tokens, dense.t()))


# -- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_plans(arch):
    a, b = (torch.empty(2048, 2048, dtype=FP16, device="meta") for _ in range(2))
    plan = explain(gemm, a, b, arch=arch, **HALF)
    assert plan.facts.acc_dtype == "float16" and "sums: of the tensor cores, in float16" in str(plan)
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


def test_known_plans_are_not_confused(device):
    a, b = torch.full((16, 512), 16.0, device=device).to(FP16), torch.full((512, 16), 16.0, device=device).to(FP16)
    for dtype, expected in ((None, 131072.0), (FP16, torch.inf), (FP32, 131072.0), (FP16, torch.inf)):
        assert (gemm(a, b, out_dtype=FP32, accumulation_dtype=dtype) == expected).all()


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "error", "words"),
    [
        (BF16, FP16, ValueError, "accumulation_dtype=torch.float16 of torch.bfloat16 operands; those of torch.float16"),
        (BF16, FP32, ValueError, "accumulation_dtype=torch.float32 of torch.bfloat16 operands"),
        (FP32, FP16, ValueError, "of torch.float32 operands; .*add up in fp32 or wider .leave it out"),
        (torch.float8_e4m3fn, FP16, ValueError, "of torch.float8_e4m3fn operands.*have use_fast_accum=True"),
        (FP16, BF16, ValueError, "accumulation_dtype=torch.bfloat16; .* in torch.float32, the default, or in torch.fl"),
        (FP16, torch.int32, ValueError, "accumulation_dtype=torch.int32"),
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


# -- gradients and torch.compile ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_are_products_with_fp32_sums(place, activation):
    """Those of a call with fp32 sums. Forward sums are whole numbers that fp16 has, so derivatives are the same."""
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


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled(place):
    torch._dynamo.reset()
    a, b = (torch.full((64, 512), 16.0, device=place).to(FP16) for _ in range(2))
    W = BsrMatrix.from_dense(b, (64, 64))
    W.check_indices()

    def call(x, w):
        dense = gemm(x, w.t(), activation="relu", out_dtype=FP32, **HALF)
        return dense + bsr_linear(x, W, **HALF).float() + gemm(x, w.t(), out_dtype=FP32)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert (call(a, b) == torch.inf).all() and torch.equal(compiled(a, b), call(a, b))
    x = numbers(64, 512, device=place).requires_grad_()
    w = (numbers(64, 512, device=place) / 16).requires_grad_()
    gradients = []
    for function in (call, compiled):
        x.grad = w.grad = None
        function(x, w).sum().backward()
        gradients.append((x.grad.clone(), w.grad.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    torch._dynamo.reset()


def test_opcheck():
    a, b = numbers(48, 64), numbers(64, 80)
    op = torch.ops.cute_kernels.gemm.default
    for terms in (HALF, HALF | {"activation": "gelu"}):
        torch.library.opcheck(op, (a.requires_grad_(), b), terms)


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


def on_the_emulator(facts, K: int = 304) -> None:
    """A product whose tiles and K-tiles have tails."""
    cfg = facts.config
    K = K if cfg.split == 1 else cfg.split * cfg.tile_k * 2
    M, N = cfg.tile_m + 72, cfg.tile_n * cfg.cluster_n + 40
    a, b, d = numbers(M, K), numbers(N, K).t(), poisoned(M, N, dtype=FP16)
    with emulate.emulator(sms=4):
        emulate.emulated(facts)(a, b, d, None, None, None, 1.0, 0.0, *facts.counts(1, 4))
    assert_within(d, a.double() @ b.double(), allowed(a, b, cfg.split))


def configurations(arch: str) -> list:
    """One of each kind of loop."""
    plain = [
        facts
        for name, facts in KERNELS
        if name == arch and facts.family == "dense" and facts.epilogue == type(facts.epilogue)()
    ]
    wanted = {"sm_86": ["256x128", "64x64"], "sm_90": ["128x256x64/4 1x1 c2x1", "128x192", "128x64x64/8 2x1 k/4"]}[arch]
    found = [next(facts for facts in plain if facts.config.short.startswith(name)) for name in wanted]
    return [
        pytest.param(catalogue.dense(ARCHS[arch], f.path, f.config, **catalogue.FP16_SUMS, majors=("k", "k", "n")),
                     id=f.config.short)
        for f in found
    ]  # fmt: skip


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("facts", [*configurations("sm_86"), *configurations("sm_90")])
def test_on_the_emulator(facts):
    on_the_emulator(facts)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_calls_on_the_emulator(arch):
    """With an epilogue, overflow, and block-sparse operands."""
    with on_emulator(arch, sms=4):
        a, b = numbers(70, 136), numbers(136, 96)
        terms = {"bias": torch.randn(96), "activation": "gelu", "residual": torch.randn(70, 96)}
        check(a, b, **terms, out=poisoned(70, 96, dtype=FP32))
        a, b = torch.full((16, 512), 16.0).to(FP16), torch.full((512, 24), 16.0).to(FP16)
        assert (gemm(a, b, out_dtype=FP32, **HALF) == torch.inf).all()
        W, x = random_bsr((128, 192), (64, 64), density=0.5, dtype=FP16), numbers(72, 192)
        ours = bsr_linear(x, W, out=poisoned(72, 128, dtype=FP16), **HALF)
        assert_within(ours, x.double() @ W.to_dense().double().t(), allowed(x, W.to_dense().t()))


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(256, 256, 256), (1024, 1536, 2048), (129, 257, 1000), (64, 512, 4096)], ids=str)
def test_large_products(size):
    M, N, K = size
    a, b = numbers(M, K, device="cuda"), numbers(N, K, device="cuda").t()
    out, again = (poisoned(M, N, dtype=FP32, device="cuda") for _ in range(2))
    parts = explain(gemm, a, b, out=out, **HALF).facts.config.split
    check(a, b, out=out, parts=parts, slack=2.0)
    assert torch.equal(out, gemm(a, b, out=again, **HALF))


@pytest.mark.gpu
def test_every_configuration_of_this_gpu():
    """And how many roundings a sum of ones shows: 4097 is no fp16 number."""
    major, minor = torch.cuda.get_device_capability()
    spec = ARCHS[f"sm_{major}{minor}"]
    a, b = numbers(640, 512, device="cuda"), numbers(768, 512, device="cuda").t()
    with cute_kernels.path(spec.path):
        for extents in itertools.product((64, 128, 640), (32, 256, 768)):
            M, N = extents
            x, y = a[:M], b[:, :N]
            parts = explain(gemm, x, y, **HALF).facts.config.split
            check(x, y, out=poisoned(M, N, dtype=FP16, device="cuda"), parts=parts, slack=2.0)
