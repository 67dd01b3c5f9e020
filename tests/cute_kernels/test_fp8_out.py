"""FP8 outputs beyond the conformance cases: saturation, NaN, amax, errors."""

import math

import pytest
import torch

from cute_kernels import explain, gemm
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr

from ..emulator.ops import needs_compiler, on_emulator
from ..gemm_calls import check
from ..gemm_errors import assert_within, numbers

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32


def operands(M, N, K, dtype=E4M3, device="cpu"):
    """a (M, K) and b (K, N), contiguous along K."""
    return numbers(M, K, device=device).to(dtype), numbers(N, K, device=device).to(dtype).t()


def unwritten(*shape, dtype=E4M3, device="cpu", layout="n"):
    """NaN everywhere, contiguous along the last mode, the one before, or neither."""
    if layout == "m":
        return unwritten(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).mT
    if layout == "any":
        return unwritten(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)[..., ::2]
    return torch.full(shape, math.nan, device=device).to(dtype)


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


def test_scales_functions_and_strided_outputs(place):
    a, b = operands(96, 80, 64, device=place)
    scale_a, scale_b = torch.rand(96, 1, device=place) + 0.5, torch.rand(1, 80, device=place) + 0.5
    terms = {"scale_a": scale_a, "scale_b": scale_b, "alpha": 0.5, "epilogue": torch.tanh, "return_amax": True}
    for layout in ("n", "any"):
        out = unwritten(96, 80, device=place, layout=layout)
        check(gemm, a, b, **terms, scale_out=torch.tensor(300.0, device=place), out=out)
    x = gemm(a, b, out_dtype=E4M3, scale_out=torch.full((1, 1), 0.25, device=place), use_fast_accum=True)
    assert x.dtype == E4M3 and x.is_contiguous()
    assert_within(x, a.double() @ b.double(), 0.1, 0.25)


def test_batches_and_out_dtype_of_block_sparse_products(place):
    W, x = random_bsr((128, 192), (64, 64), density=0.5, device=place), numbers(3, 40, 192, device=place).to(BF16)
    y = bsr_linear(x, W, out_dtype=E4M3, scale_out=torch.ones(1, device=place))
    assert y.shape == (3, 40, 128) and y.dtype == E4M3
    assert_within(y, bsr_linear(x, W, out_dtype=FP32), 1e-3, 1.0)
    assert bsr_matmul(W, x.mT, out_dtype=FP32).dtype == FP32
    a, b = numbers(3, 40, 64, device=place), numbers(3, 72, 64, device=place).mT
    y, amax = gemm(a, b, out_dtype=E4M3, return_amax=True)
    assert_within(y, a.double() @ b.double(), 0.1, 1.0)
    assert abs(amax.item() - (a.double() @ b.double()).abs().max().item()) < 0.1


def test_what_saturates_and_what_is_nan(place):
    a, b = torch.zeros(40, 64, device=place).to(BF16), torch.zeros(64, 48, device=place).to(BF16)
    bias, two = torch.zeros(48, device=place), torch.full((1,), 2.0, device=place)

    def call(bias, dtype=E4M3, **terms):
        out, amax = gemm(a, b, bias=bias, out_dtype=dtype, return_amax=True, **terms)
        return out.to(FP32), amax

    bias[:3] = torch.tensor([1e6, -2e6, 3.0])
    for dtype, top in ((E4M3, 448.0), (E5M2, 57344.0)):
        out, amax = call(bias, dtype)
        assert out[-1, :4].tolist() == [top, -top, 3.0, 0.0] and amax.item() == 2e6
    bias[2] = -math.inf
    out, amax = call(bias, scale_out=two)
    assert out[-1, :4].tolist() == [448.0, -448.0, -448.0, 0.0] and amax.item() == math.inf
    bias[1] = math.nan
    out, amax = call(bias)
    assert amax.isnan().all() and out[:, 1].isnan().all() and not out[:, 3:].any() and out[0, 2] == -448
    out, amax = call(bias.nan_to_num(0, 0, 0))
    assert out.shape == (40, 48) and amax == 1e6


def test_bias_outside_of_the_result_is_not_in_amax(place):
    """Tiles reach past the last row and column, where terms are those of the last ones inside."""
    a, b = torch.zeros(33, 64, device=place).to(BF16), torch.zeros(64, 40, device=place).to(BF16)
    bias = -torch.arange(40.0, device=place)
    _, amax = gemm(a, b, bias=bias, epilogue=lambda x: x + 39.0, out_dtype=E4M3, return_amax=True)
    assert amax.item() == 39.0


def test_empty_results(place):
    terms = {"out_dtype": E4M3, "return_amax": True}
    out, amax = gemm(*operands(0, 16, 32, device=place), **terms)
    assert out.shape == (0, 16) and amax.item() == 0
    out, amax = gemm(*operands(16, 24, 0, device=place), bias=torch.full((24,), 2.0, device=place), **terms)
    assert (out.to(FP32) == 2).all() and amax.item() == 2


def test_amax_of_two_calls(device):
    a, b = operands(32, 48, 64, device=device)
    first, second = (gemm(a, b, out_dtype=E4M3, return_amax=True)[1] for _ in range(2))
    for amax in (first, second):
        assert abs(amax.item() - (a.double() @ b.double()).abs().max().item()) < 0.1


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words", "terms"),
    [
        (ValueError, "scale_out requires an output of", {"scale_out": torch.ones(1)}),
        (ValueError, "return_amax requires an output of", {"return_amax": True, "out_dtype": FP32}),
        (TypeError, "scale_out must be a torch.Tensor, got float", {"scale_out": 2.0, "out_dtype": E4M3}),
        (TypeError, "return_amax must be True or False, got 1", {"return_amax": 1, "out_dtype": E4M3}),
        (ValueError, r"scale_out has shape \(2,\); it must have one", {"scale_out": torch.ones(2), "out_dtype": E4M3}),
        (
            ValueError,
            "residual is not supported with an output",
            {"residual": torch.ones(32, 24).to(E4M3), "out_dtype": E4M3},
        ),
        (RuntimeError, "does not compute gradients", {"bias": torch.ones(24).requires_grad_(), "out_dtype": E4M3}),
    ],
)
def test_refusals(error, words, terms):
    for dtype in (E4M3, BF16):
        with pytest.raises(error, match=words):
            gemm(*operands(32, 24, 48, dtype), **terms)
    W, x = random_bsr((32, 48), (16, 16), density=1.0), numbers(32, 48).to(BF16)
    if "residual" not in terms:
        if "bias" in terms:
            terms = terms | {"bias": torch.ones(32).requires_grad_()}
        with pytest.raises(error, match=words):
            bsr_linear(x, W, **terms)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_architectures_without_the_conversion_say_what_would_work(arch):
    with pytest.raises(ValueError, match=f"{arch} has no FP8 conversion instruction.*quantize"):
        explain(gemm, *operands(64, 64, 64, BF16), out_dtype=E4M3, arch=arch)
    W = random_bsr((128, 128), (64, 64), density=0.5)
    for tokens in (1, 128):
        with pytest.raises(ValueError, match=f"{arch} has no FP8 conversion instruction"):
            explain(bsr_linear, numbers(tokens, 128).to(BF16), W, out_dtype=E4M3, arch=arch)


def test_other_ops_have_no_such_outputs():
    W, x = random_bsr((128, 128), (64, 64), density=0.5), numbers(64, 128).to(BF16)
    with pytest.raises(TypeError, match="output of torch.float8_e4m3fn"):
        bsr_gated_linear(x, W, out=unwritten(64, 64))
    many = BsrMatrix.stack([W, W])
    with pytest.raises(TypeError, match="output of torch.float8_e4m3fn"):
        bsr_grouped_linear(x, many, expert_ids=torch.zeros(1, dtype=torch.int32), out=unwritten(64, 128))
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        torch.func.grad(lambda x: bsr_linear(x, W, out_dtype=FP32).sum())(x)
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        bsr_linear(x.clone().requires_grad_(), W, out_dtype=FP32)


# -- kernels --------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
def test_what_saturates_on_the_emulator():
    with on_emulator("sm_90", sms=2):
        test_what_saturates_and_what_is_nan("cpu")
        test_bias_outside_of_the_result_is_not_in_amax("cpu")
