"""dz = dy f'(z) and the sums of its columns, in one pass: the kernel, and torch where it does not serve."""

import pytest
import torch

from cute_kernels.epilogue_gradient import dispatch
from cute_kernels.epilogue_gradient.config import parts_of
from cute_kernels.matmul.epilogue.terms import epilogue_program
from cute_kernels.testing.reference import normal

from ..emulator.ops import on_emulator

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def truth(dy, saved, activation, function=None):
    z = saved.double().requires_grad_()
    approximate = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    y = z if activation is None else getattr(torch.nn.functional, activation.removesuffix("_tanh"))(z, **approximate)
    y = y if function is None else function(y)
    return torch.autograd.grad(y, z, dy.double())[0]


def check(dy, saved, activation, function=None, sums=True):
    program = None if function is None else epilogue_program("gemm", function)
    dz, total = dispatch.epilogue_gradient(dy, saved, activation, program, sums)
    exact = truth(dy, saved, activation, function)
    assert dz.shape == dy.shape and dz.dtype == dy.dtype and dz.is_contiguous()
    eps = torch.finfo(dy.dtype).eps if dy.dtype != torch.float32 else 1e-5
    assert ((dz.double() - exact).abs() <= 0.6 * eps * exact.abs() + 5e-5 * dy.double().abs() + 1e-7).all()
    if sums:
        assert total.shape == dy.shape[-1:] and total.dtype == torch.float32
        columns = exact.reshape(-1, dy.shape[-1])
        assert ((total.double() - columns.sum(0)).abs() <= 1e-4 * (columns.abs().sum(0) + 1)).all()
    else:
        assert total is None
    return dz, total


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(64, 256), (1, 8), (200, 1000), (3, 70, 264), (65, 24), (40, 33), (0, 16)], ids=str)
def test_against_fp64(place, dtype, activation, shape):
    dy, z = (normal(*shape, device=place, dtype=dtype) * 3 for _ in range(2))
    saved = torch.relu(z) if activation == "relu" else z
    check(dy, saved, activation)
    check(dy, saved, activation, sums=False)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_other_strides(place):
    z = normal(96, 128, device=place)
    for dy in (normal(128, 96, device=place).t(), normal(96, 1, device=place).expand(96, 128)):
        check(dy, z, "gelu")
    check(normal(96 * 128 + 1, device=place)[1:].view(96, 128), z, "silu")  # not aligned


@pytest.mark.parametrize("place", PLACES)
def test_a_function_of_ones_own(place):
    def function(x):
        return torch.where(x > 0, x * torch.tanh(x), 0.1 * x)

    for activation in (None, "silu"):
        check(normal(130, 264, device=place), normal(130, 264, device=place), activation, function)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_on_the_emulator(activation):
    """Several CTAs a column tile, of which some have more rows; columns and rows that end inside of a tile."""
    dy, z = (normal(101, 264) * 3 for _ in range(2))
    with on_emulator("sm_90", sms=3):
        assert parts_of(101, 264, 3) > 1
        dz, total = check(dy, z, activation)
        again = dispatch.epilogue_gradient(dy, z, activation, None, True)
    assert torch.equal(dz, again[0]) and torch.equal(total, again[1])


def test_every_bfloat16_on_the_emulator():
    z = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    with on_emulator("sm_90", sms=2):
        dz, _ = dispatch.epilogue_gradient(torch.ones_like(z), z, "gelu", None, False)
    assert torch.equal(dz.isnan(), z.isnan())
    exact = truth(torch.ones_like(z), z.clamp(-100, 100), "gelu").nan_to_num()
    assert ((dz.double().nan_to_num() - exact).abs() <= 0.51 * 2**-7 * exact.abs() + 4e-6).all()


@pytest.mark.parametrize("rows, cols", [(8192, 8192), (1, 8), (100_000, 264), (64, 300_000), (8192, 2048)])
def test_all_ctas_are_resident_or_many(rows, cols):
    parts, tiles, groups = parts_of(rows, cols, 132), -(-cols // 256), -(-rows // 16)
    assert 1 <= parts <= groups and (parts * tiles <= 396 or tiles > 99)


@pytest.mark.gpu
def test_the_same_bits_on_every_run():
    dy, z = (normal(1000, 520, device="cuda") for _ in range(2))
    dz, total = dispatch.epilogue_gradient(dy, z, "gelu", None, True)
    for _ in range(20):
        again, sums = dispatch.epilogue_gradient(dy, z, "gelu", None, True)
        assert torch.equal(again, dz) and torch.equal(sums, total)
