"""FP8 bsr_gated_linear: one warpgroup has the gate's rows, another the rows that it multiplies; and its layer."""

import pytest
import torch
from torch import nn

from cute_kernels import explain, quantize, quantize_gated
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.reference import GATE, gate_of_rounded
from cute_kernels.runtime.parallel import inspect_kernel
from cute_kernels.testing.reference import ACTIVATIONS, poisoned
from cute_kernels.tile.element import element_of
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_linear, dispatch, random_bsr
from sparse_collective.bsr_gemm import catalogue
from sparse_collective.bsr_gemm.family import BSR
from sparse_collective.nn import BsrLinear, Float8SwiGLU, SwiGLU, fp8

from ..emulator import emulate
from ..emulator.ops import needs_compiler, on_emulator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def matrix(shape, block=(128, 128), *, dtype=E4M3, per="block", device="cpu") -> BsrMatrix:
    """A matrix with rows that differ in length, the second of them empty."""
    rows, columns = shape[0] // block[0], shape[1] // block[1]
    mask = torch.rand(rows, columns) < torch.linspace(0.9, 0.3, rows)[:, None]
    mask[1:2] = False
    W = BsrMatrix.from_dense(torch.randn(shape).to(BF16), block, mask=mask)
    W = W.to(dtype) if per is None else W.quantize(dtype, per)
    return W.to(device)


def tokens(n: int, W: BsrMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Such that products are of magnitude 1."""
    x = torch.randn(n, W.shape[1], device=W.device) * W.shape[1] ** -0.5
    return quantize(x.to(BF16), dtype=W.dtype, per="row")


def exact_of(x, scale, W, activation, dtype):
    """In fp64, of halves rounded as the product's result is."""
    wide = W.to("cpu").to_dense().double().t().to(x.device)
    z = (x.double() * (1.0 if scale is None else scale.double())) @ wide
    g, u = z.to(dtype).double().unflatten(-1, (-1, 2, GATE)).unbind(-2)
    return (ACTIVATIONS[activation](g) * u).flatten(-2)


def assert_near(found, exact) -> None:
    """Within roundings, but for the few halves that rounded to the neighbour of what fp64 rounds to. Tensor cores keep
    some 14 bits of FP8 accumulators."""
    eps = max(torch.finfo(found.dtype).eps, 2.0**-11 if found.is_cuda else 2.0**-17)
    near = (found.double() - exact).abs() <= 3 * eps * (exact.abs() + exact.abs().mean())
    assert near.float().mean() > 0.999 and (found.double() - exact).norm() <= 2 * eps * exact.norm()


def same_bits(found, wanted) -> bool:
    return torch.equal(*(t.contiguous().view(torch.uint8) for t in (found, wanted)))


def assert_is_the_gate_of_the_product(x, scale, W, activation, dtype=BF16) -> None:
    """Bit for bit: what quantize_gated makes of bsr_linear's result is what quantize makes of this one. But where a
    kernel for few tokens or one that splits K makes that: its sums are in another order."""
    out = poisoned(len(x), W.shape[0] // 2, dtype=dtype, device=x.device)
    assert bsr_gated_linear(x, W, activation=activation, out=out, scale_x=scale) is out and out.isfinite().all()
    z = bsr_linear(x, W, scale_x=scale, out_dtype=dtype)
    facts = explain(bsr_linear, x, W, scale_x=scale, out_dtype=dtype).facts
    if facts.family != "bsr" or facts.config.split > 1:
        assert (out.double() - gate_of_rounded(z, activation).double()).norm() <= 0.02 * out.double().norm()
        return
    for narrow in (E4M3, E5M2) if dtype != FP32 else ():
        pairs = zip(
            quantize(out, dtype=narrow, per="row"), quantize_gated(z, activation=activation, dtype=narrow), strict=True
        )
        assert all(same_bits(*pair) for pair in pairs)
    by_torch = gate_of_rounded(z, activation).double()  # whose activations round otherwise
    most = (torch.finfo(dtype).eps + 1e-5) * by_torch.abs() + 2e-6 * z.abs().max()
    assert ((out.double() - by_torch).abs() <= most).all()


# -- in torch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("per", [None, "tensor", "block"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_against_fp64(place, dtype, per, activation):
    """Also where a GPU's host code runs with torch in the kernels' place, and of the shapes that layers have."""
    for block in ((128, 128), (64, 64)):
        W = matrix((512, 384), block, dtype=dtype, per=per, device=place)
        x, scale = tokens(200, W)
        for out_dtype in (None, FP16, FP32):
            found = bsr_gated_linear(x, W, activation=activation, scale_x=scale, out_dtype=out_dtype)
            assert found.dtype == (out_dtype or BF16) and found.shape == (200, 256)
            assert_near(found, exact_of(x, scale, W, activation, found.dtype))
            out = poisoned(200, 256, dtype=found.dtype, device=place)
            assert bsr_gated_linear(x, W, activation=activation, out=out, scale_x=scale) is out and torch.equal(
                out, found
            )
    parts = bsr_gated_linear(x.view(2, 100, -1), W, activation=activation, scale_x=scale.view(2, 100, 1))
    assert torch.equal(parts.view(200, 256), bsr_gated_linear(x, W, activation=activation, scale_x=scale))
    assert bsr_gated_linear(x[0], W, scale_x=scale[0]).shape == (256,) and bsr_gated_linear(x[:0], W).shape == (0, 256)


def test_sixteen_bits_have_an_out_dtype(place):
    W = random_bsr((256, 256), (128, 128), density=0.6, device=place)
    x = torch.randn(70, 256, device=place).to(BF16)
    found = bsr_gated_linear(x, W, out_dtype=FP32)
    assert found.dtype == FP32 and torch.equal(found.to(BF16), bsr_gated_linear(x, W))


# -- what serves it -------------------------------------------------------------------------------------------------


def test_which_kernel_serves(emulated):
    W = matrix((512, 384))
    x, scale = tokens(4096, W)
    plan = explain(bsr_gated_linear, x, W, scale_x=scale)
    cfg = plan.facts.config
    assert plan.facts.gate_apart and (cfg.tile_m, cfg.warps_m, cfg.warps_n) == (128, 2, 1) and cfg.tile_n >= 128
    assert "both halves are rounded to torch.bfloat16 before it" in str(plan) and "not fused" not in str(plan)
    for block in ((64, 64), (192, 128)):
        W = matrix((768, 384), block)
        text = str(explain(bsr_gated_linear, x, W, scale_x=scale))
        assert "not fused" in text and f"multiple of 128 rows, 64 for each half; got {block[0]}" in text
    W = matrix((256, 384))
    out = torch.empty(4096, 130)[:, 1:129]
    assert "an FP8 gate is stored by TMA" in str(
        explain(bsr_gated_linear, x, W, activation="silu", out=out, scale_x=scale)
    )


def test_other_gpus():
    W = matrix((256, 384))
    x, scale = tokens(200, W)
    for arch in ("sm_80", "sm_89"):
        assert "not fused" in str(explain(bsr_gated_linear, x, W, scale_x=scale, arch=arch))
    with pytest.raises(ValueError, match=r"transposed view.*W.transpose\(\)"):  # of which there is no plain product
        explain(bsr_gated_linear, x[:, :256], W.t(), scale_x=scale, arch="sm_90")


@pytest.mark.sm_90
@pytest.mark.slow
def test_what_a_call_compiles():
    W = matrix((512, 384))
    x, scale = tokens(600, W)
    report = inspect_kernel(explain(bsr_gated_linear, x, W, scale_x=scale, arch="sm_90").facts)
    assert report.problems == () and report.resources.opcodes["QGMMA"] > 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, s, W: bsr_gated_linear(x, W, out_dtype=E4M3), TypeError, "output of torch.float8_e4m3fn"),
        (lambda x, s, W: bsr_gated_linear(x, W, scale_x=s[:3]), ValueError, "scale_x has shape"),
        (
            lambda x, s, W: bsr_gated_linear(x.to(BF16), W),
            TypeError,
            "x is torch.bfloat16 but W is torch.float8_e4m3fn",
        ),
        (
            lambda x, s, W: bsr_gated_linear(x, W, scale_x=s.requires_grad_()),
            RuntimeError,
            "does not compute gradients",
        ),
        (lambda x, s, W: bsr_gated_linear(x, W, activation="swish"), ValueError, "unknown activation 'swish'"),
        (lambda x, s, W: bsr_gated_linear(x, matrix((192, 256), (64, 64))), ValueError, "W has 192 rows"),
        (lambda x, s, W: bsr_gated_linear(x, BsrMatrix.stack([W, W])), ValueError, "W is a batch"),
    ],
)
def test_refusals(call, error, words):
    W = matrix((256, 256))
    with pytest.raises(error, match=words):
        call(*tokens(8, W), W)


# -- on the emulator ------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_configurations_on_the_emulator(columns):
    """Every configuration: uneven rows, an empty one, tokens past the last tile, more tiles than CTAs."""
    spec, element, block = ARCHS["sm_90"], element_of("float8_e4m3fn"), (256, 128) if columns == 128 else (128, 128)
    usual = {"dtype": "float8_e4m3fn", "aligns": (16, 16, 8), "scaled": True}
    spec_of = EpilogueSpec(activation="silu", gated=True, scale_n="column")
    made = [
        catalogue.linear(spec, "sm_90", config, block, **usual, epilogue=spec_of)
        for config in BSR.candidates("sm_90", BlockFacts(*block, "int32"), spec, element)
        if config.tile_n == columns
    ]
    made = [facts for facts in made if not BSR.unsupported(facts)]
    assert made
    W = matrix((4 * block[0], 640), block)
    for facts in made:
        x, scale = tokens(facts.config.tile_n * facts.config.cluster_n + 40, W)
        d, place = poisoned(len(x), W.shape[0] // 2), (W.crow_indices, W.col_indices, None, None, None)
        with emulate.emulator(sms=2):
            emulate.emulated(facts)(
                *place, W.values, x, d, W.scales, scale.t(), 1.0, 0.0, *facts.counts(1, 2)
            )  # fmt: skip
        assert_near(d, exact_of(x, scale, W, "silu", BF16))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("case", range(5))
def test_the_same_bits_on_the_emulator(case):
    """As the gate of the plain product, for calls of every kind."""
    shape, block, dtype, per, activation, n, out_dtype = (
        ((512, 384), (128, 128), E4M3, "block", "silu", 300, BF16),
        ((512, 256), (256, 128), E5M2, "block", "gelu", 200, FP16),
        ((512, 192), (128, 64), E4M3, "tensor", None, 130, BF16),
        ((384, 224), (128, 224), E4M3, None, "gelu_tanh", 70, BF16),
        ((256, 256), (128, 128), E4M3, "block", "silu", 261, FP32),
    )[case]
    W = matrix(shape, block, dtype=dtype, per=per)
    with on_emulator("sm_90", sms=3, seed=11 + case):
        x, scale = tokens(n, W)
        assert explain(
            bsr_gated_linear, x, W, activation=activation, scale_x=scale, out_dtype=out_dtype
        ).facts.gate_apart
        assert_is_the_gate_of_the_product(x, scale, W, activation, out_dtype)


@needs_compiler
@pytest.mark.slow
def test_torch_s_gate_has_the_same_bits_on_the_emulator():
    """No kernel has it for blocks of 64 rows; and an output that TMA does not store."""
    for block, first in (((64, 64), 0), ((128, 128), 1)):
        W = matrix((256, 256), block)
        x, scale = tokens(70, W)
        out = poisoned(70, 130)[:, first : first + 128]
        with on_emulator("sm_90", sms=3):
            bsr_gated_linear(x, W, activation="silu", out=out, scale_x=scale)
            z = bsr_linear(x, W, scale_x=scale)
        assert torch.equal(out, gate_of_rounded(z, "silu"))


def layer_of(block=(128, 128), bias=False, where="cpu") -> Float8SwiGLU:
    dense = [nn.Linear(n, k, bias, device=where, dtype=BF16) for n, k in ((256, 384), (256, 384), (384, 256))]
    return Float8SwiGLU(SwiGLU.from_linears(*dense, block, 0.6).eval())


def kernels_of(call, monkeypatch) -> list[str]:
    """The ops that dispatch.call is called for."""
    ops, run = [], dispatch.call
    monkeypatch.setattr(dispatch, "call", lambda values, **more: (ops.append(values[0]), run(values, **more))[1])
    call()
    monkeypatch.setattr(dispatch, "call", run)
    return ops


@needs_compiler
@pytest.mark.slow
def test_layers_on_the_emulator(monkeypatch):
    """With the same bits as with the gate in the kernel that quantises; few tokens and layers with a bias have that."""
    monkeypatch.setattr(fp8, "LEAST_GATED", 65)
    for block, n, bias, ops in (
        ((128, 128), 130, False, ["bsr_gated_linear", "bsr_linear"]),
        ((128, 128), 64, False, ["bsr_linear", "bsr_linear"]),
        ((128, 128), 70, True, ["bsr_linear", "bsr_linear"]),
        ((64, 64), 70, False, ["bsr_gated_linear", "bsr_linear", "bsr_linear"]),  # which says that it has none
    ):
        layer, x = layer_of(block, bias), torch.randn(n, 256).to(BF16)
        with on_emulator("sm_90", sms=3):
            found = layer(x)
            assert kernels_of(lambda layer=layer, x=x: layer(x), monkeypatch)[: len(ops)] == ops
            with monkeypatch.context() as apart:
                apart.setattr(fp8, "gates_its_store", lambda *_: False)
                assert torch.equal(layer(x), found)


@needs_compiler
@pytest.mark.slow
def test_layers_of_two_dtypes(monkeypatch):
    """Each layer's operand is quantised to its weight's dtype."""
    monkeypatch.setattr(fp8, "LEAST_GATED", 65)
    layer, x = layer_of(), torch.randn(130, 256).to(BF16)
    layer.down = fp8.Float8BsrLinear(BsrLinear(384, 256, False, (128, 128), density=0.5, dtype=BF16), E5M2)
    wanted = layer(x)
    with on_emulator("sm_90", sms=3):
        found = layer(x)
    assert (found.double() - wanted.double()).norm() <= 0.02 * wanted.double().norm()


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("block", [(128, 128), (256, 128), (128, 64), (512, 224)], ids=str)
def test_large_products(block, activation):
    W = matrix((block[0] * 8, block[1] * 24), block, device="cuda")
    for n in (1, 40, 200, 2000, 8192):
        x, scale = tokens(n, W)
        for dtype in (BF16, FP16, FP32):
            assert_is_the_gate_of_the_product(x, scale, W, activation, dtype)


@pytest.mark.gpu
def test_many_times_and_in_a_graph():
    """The same bits, whichever warpgroup is late."""
    W = matrix((4096, 2048), device="cuda")
    x, scale = tokens(3000, W)
    wanted, out = bsr_gated_linear(x, W, scale_x=scale), poisoned(3000, 2048, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bsr_gated_linear(x, W, activation="silu", out=out, scale_x=scale)
    for _ in range(200):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [320, 3000])
def test_layers(n, monkeypatch):
    """Near what they give with the gate in the kernel that quantises: sums of other tiles may round otherwise."""
    layer, x = layer_of(where="cuda"), torch.randn(n, 256, device="cuda").to(BF16)
    found = layer(x)
    monkeypatch.setattr(fp8, "gates_its_store", lambda *_: False)
    wanted = layer(x)
    assert (found.double() - wanted.double()).norm() <= 0.02 * wanted.double().norm()
