"""beta=0 of gemm: the residual is not read, as in torch.addmm, forward and backward, eager and compiled."""

import math

import pytest
import torch

from cute_kernels import Sparse24, gemm, prune_2_4
from cute_kernels.testing.reference import normal


@pytest.fixture(params=["dense", "Sparse24"])
def product(request, place):
    a, b = prune_2_4(normal(64, 64, device=place)), normal(64, 64, device=place)
    return (Sparse24.from_dense(a) if request.param == "Sparse24" else a), b


@pytest.mark.parametrize("beta", [0, 0.0, -0.0, False])
@pytest.mark.parametrize("out", [None, "residual", "other"])
def test_residual_is_not_read(product, beta, out):
    a, b = product
    residual = torch.full_like(b, math.nan)
    want = gemm(a, b, activation="silu")
    for _ in range(2):
        given = None if out is None else residual.clone() if out == "other" else residual
        assert torch.equal(gemm(a, b, residual=residual, beta=beta, out=given, activation="silu"), want)
        residual = torch.full_like(b, math.nan)
    assert gemm(a, b, residual=residual, beta=1).isnan().all()
    assert gemm(a, b, residual=residual, beta=math.nan).isnan().all()
    ones = torch.ones_like(b)
    assert torch.equal(gemm(a, b, residual=ones, beta=1), gemm(a, b, residual=ones))


def test_residual_is_checked(product):
    a, b = product
    for _ in range(2):
        with pytest.raises(ValueError, match="residual has shape"):
            gemm(a, b, residual=b[:1], beta=0)
        with pytest.raises(TypeError, match="residual is torch.float32"):
            gemm(a, b, residual=b.float(), beta=0)
        with pytest.raises(TypeError, match="beta must be a Python number"):
            gemm(a, b, residual=b, beta=torch.zeros(2))
        gemm(a, b, residual=b, beta=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(compiled, place):
    a, b = normal(64, 64, device=place), normal(64, 64, device=place)
    residual = torch.full_like(b, math.nan)
    tensors = [t.requires_grad_() for t in (a, b, residual)]

    def run(a, b, residual):
        return gemm(a, b, residual=residual, beta=0.0, activation="gelu")

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    dy = normal(64, 64, device=place)
    found = torch.autograd.grad(run(*tensors), tensors, dy)
    want = torch.autograd.grad(gemm(a, b, activation="gelu"), tensors[:2], dy)
    assert all(map(torch.equal, found, (*want, torch.zeros_like(b))))
    dy[0, 0] = math.inf
    assert torch.equal(torch.autograd.grad(run(*tensors), residual, dy)[0], torch.zeros_like(b))


def test_alpha_of_0_multiplies(place):
    a, b = normal(64, 64, device=place), normal(64, 64, device=place)
    bias = torch.ones(64, device=place)
    assert torch.equal(gemm(a, b, alpha=0.0, bias=bias), torch.ones_like(b))
    a[3, 5] = math.nan
    y = gemm(a, b, alpha=0, bias=bias)
    assert y[3].isnan().all() and torch.equal(y[4:], torch.ones_like(b[4:]))
