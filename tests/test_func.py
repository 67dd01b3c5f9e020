"""Layers and block-sparse ops under torch.func: grad, vjp, jacrev, functional_call, and vmap of them."""

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap

from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr

from .sparse_collective.nn_parts import layer_of, near

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of a loop over items


@pytest.fixture
def parts(place):
    """(layer, its parameters, x, the loss of parameters and x, gradients by autograd)"""
    layer, x = layer_of(place, activation="silu"), normal(20, 128, device=place)

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).float().square().mean()

    loss(dict(layer.named_parameters()), x).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return layer, {name: p.detach() for name, p in layer.named_parameters()}, x, loss, gradients


def same(found, expected) -> None:
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_grad_vjp_and_grad_and_value(parts):
    layer, parameters, x, loss, expected = parts
    same(grad(loss)(parameters, x), expected)
    found, value = grad_and_value(loss)(parameters, x)
    same(found, expected)
    assert torch.equal(value, loss(parameters, x))
    value, pull = vjp(loss, parameters, x)
    leaf = x.clone().requires_grad_()
    loss(parameters, leaf).backward()
    found, of_x = pull(torch.ones_like(value))
    same(found, expected)
    assert torch.equal(of_x, leaf.grad)
    assert torch.equal(grad(lambda x: layer(x).float().square().mean())(x), leaf.grad), (
        "parameters that autograd watches"
    )
    assert all(torch.equal(p.grad, expected[name]) for name, p in layer.named_parameters()), "and leaves alone"


def test_jacrev(parts):
    layer, parameters, x, _, _ = parts
    row = x[0].clone()
    found = jacrev(lambda x: functional_call(layer, parameters, (x,)))(row)
    for i in (0, 50, 95):
        leaf = row.clone().requires_grad_()
        functional_call(layer, parameters, (leaf,))[i].backward()
        near(found[i], leaf.grad.double())


def test_gradients_of_each_sample(parts):
    _, parameters, x, loss, expected = parts
    found = vmap(grad(lambda p, row: loss(p, row[None])), in_dims=(None, 0))(parameters, x)
    for name, g in found.items():
        assert g.shape == (len(x), *expected[name].shape)
        near(g.double().mean(0), expected[name].double())


def test_an_ensemble(parts):
    """One pattern, and parameters for each member."""
    layer, parameters, x, loss, expected = parts
    both = {name: torch.stack([p, p / 2]) for name, p in parameters.items()}
    y = vmap(lambda p: functional_call(layer, p, (x,)))(both)
    near(y[0], layer(x).double())
    near(y[1], functional_call(layer, {name: p / 2 for name, p in parameters.items()}, (x,)).double())
    found = vmap(grad(loss), in_dims=(0, None))(both, x)
    for name, g in found.items():
        near(g[0], expected[name].double())


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_ops(place, view, activation):
    W = random_bsr((64, 96), (32, 32), density=0.6).to(place)
    rows, columns = W.shape[::-1] if view else W.shape
    b, bias = normal(columns, 24, device=place), normal(rows, 1, device=place)
    residual = normal(rows, 24, device=place)

    def loss(values, b, bias, residual):
        A = W.with_values(values)
        function = (lambda z: z * torch.sigmoid(z)) if activation == "relu" else None
        y = bsr_matmul(A.t() if view else A, b, bias=bias, activation=activation, residual=residual, epilogue=function)
        return y.float().square().sum()

    given = W.values, b, bias, residual
    leaves = [t.detach().clone().requires_grad_() for t in given]
    loss(*leaves).backward()
    for found, leaf in zip(grad(loss, argnums=(0, 1, 2, 3))(*given), leaves, strict=True):
        assert torch.equal(found, leaf.grad)


def test_experts(place):
    singles = [random_bsr((128, 96), (64, 32), density=0.7).to(place) for _ in range(2)]
    W, x = BsrMatrix.stack(singles), normal(192, 96, device=place)
    groups = torch.tensor([0, 1, 1], dtype=torch.int32, device=place)

    def loss(values):
        return bsr_grouped_linear(x, W.with_values(values), expert_ids=groups, activation="silu").float().square().sum()

    leaf = W.values.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(grad(loss)(W.values), leaf.grad)


def test_what_is_refused(place):
    """A second derivative would be zeros."""
    W, x = random_bsr((64, 64), (32, 32), density=1.0).to(place), normal(8, 64, device=place)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad(lambda x: grad(lambda x: bsr_linear(x, W).float().square().sum())(x).float().sum())(x)
    with pytest.raises(RuntimeError, match="bsr_linear: out= is not supported under a torch.func transform"):
        vmap(lambda x: bsr_linear(x, W, out=torch.empty(64)))(x)


def test_torch_sparse_bsr(place):
    W, x = random_bsr((64, 64), (32, 32), density=1.0).to(place), normal(8, 64, device=place)
    sparse = W.to_torch()
    expected = grad(lambda x: bsr_linear(x, W).float().sum())(x)
    assert torch.equal(grad(lambda x: bsr_linear(x, sparse).float().sum())(x), expected)
