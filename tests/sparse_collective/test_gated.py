"""bsr_gated_linear: an activation of one half of the features times the other half, in the epilogue of a product."""

import pytest
import torch

from cute_kernels import explain
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_gated_linear, interleaved, random_bsr

ACTIVATIONS = {
    None: lambda g: g,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
}


def truth(x, W, activation):
    z = (x.double() @ W.to_dense().double().t()).unflatten(-1, (-1, 2, 64))
    return (ACTIVATIONS[activation](z[..., 0, :]) * z[..., 1, :]).flatten(-2)


def near(found, exact, fused):
    """Within one rounding; where the halves are rounded, too, within three."""
    assert found.shape == exact.shape
    bound = (1 if fused else 3) * torch.finfo(found.dtype).eps * (exact.abs() + exact.abs().mean())
    assert ((found.double() - exact).abs() <= bound + 1e-3).all()


def made(block, device, rows=3, cols=4, density=0.6, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(5)
    return random_bsr((rows * 256, cols * 128), block, density=density, dtype=dtype, generator=generator).to(device)


@pytest.mark.parametrize("block", [(128, 128), (256, 128), (128, 64), (64, 64), (32, 32), (128, 16)], ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_against_fp64(device, block, activation):
    W = made(block, device)
    fused = block[0] % 128 == 0 and "not fused" not in str(explain(bsr_gated_linear, normal(8, 512, device=device), W))
    for shape in ((300, 512), (2, 70, 512), (512,), (1, 512), (0, 512)):
        x = normal(*shape, device=device)
        found = bsr_gated_linear(x, W, activation=activation)
        near(found, truth(x, W, activation), fused)
        out = torch.full_like(found, float("nan"))
        assert bsr_gated_linear(x, W, activation=activation, out=out) is out and torch.equal(out, found)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full(device, density):
    W, x = made((128, 128), device, density=density), normal(200, 512, device=device)
    near(bsr_gated_linear(x, W), truth(x, W, "silu"), True)


def test_strided_and_transposed(device):
    W = made((128, 128), device)
    x = normal(300, 1024, device=device)[:, 1:513]  # not aligned: the sm_80 path, which has no gate
    near(bsr_gated_linear(x, W), truth(x, W, "silu"), False)
    view = made((128, 128), device, 2, 6).t()  # (768, 512)
    x = normal(100, 512, device=device)
    near(bsr_gated_linear(x, view), truth(x, view, "silu"), False)


def test_gradients_and_compile(device):
    W = made((128, 128), device)
    values = W.values.clone().requires_grad_()
    x = normal(64, 512, device=device).requires_grad_()
    y = bsr_gated_linear(x, W.with_values(values))
    y.sum().backward()
    assert values.grad.shape == values.shape and x.grad.isfinite().all()
    W.check_indices()
    compiled = torch.compile(lambda x: bsr_gated_linear(x, W), fullgraph=True)
    with torch.no_grad():
        near(compiled(x.detach()), truth(x, W, "silu"), True)


def test_what_it_says(emulated):
    W = made((128, 128), "cpu")
    assert explain(bsr_gated_linear, normal(256, 512), W).facts.epilogue.gated
    plan = explain(bsr_gated_linear, normal(256, 512), made((64, 64), "cpu"))
    assert "not fused" in str(plan) and "a gate needs whole tiles of 128 rows" in str(plan)


def test_the_op_itself_has_no_gradient():
    """The function never asks it for one: with a square W its formula would give wrong numbers."""
    W, x = random_bsr((256, 256), (128, 64), density=0.7), normal(8, 256).requires_grad_()
    parts = False, W.crow_indices, W.col_indices, W.values, 256, False
    y = torch.ops.sparse_collective.bsr("bsr_gated_linear", *parts, x, activation="silu")
    with pytest.raises(RuntimeError, match="bsr_gated_linear as an op has no gradient"):
        y.sum().backward()


def test_interleaved():
    gate, up = torch.arange(256).view(128, 2), -torch.arange(256).view(128, 2)
    both = interleaved(gate, up)
    assert torch.equal(both[:64], gate[:64]) and torch.equal(both[64:128], up[:64])
    assert torch.equal(both[128:192], gate[64:])
    with pytest.raises(ValueError, match="multiple of 64"):
        interleaved(gate[:32], up[:32])


def test_bad_inputs():
    x = normal(4, 512)
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        bsr_gated_linear(x, made((128, 128), "cpu"), activation="swish")
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        bsr_gated_linear(x.clone().requires_grad_(), made((128, 128), "cpu"), activation="swish")
    odd = random_bsr((64, 512), (64, 64), density=0.5)
    for argument in (x, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match="W has 64 rows"):
            bsr_gated_linear(argument, odd)
    with pytest.raises(ValueError, match="W is a batch"):
        bsr_gated_linear(x, BsrMatrix.stack([made((128, 128), "cpu")] * 2))
