"""W @ b, x @ W.t(), torch.matmul, torch.mm and torch.nn.functional.linear of a Sparse24, against the dense matrix."""

import operator

import numpy
import pytest
import torch
from torch.nn.functional import linear

from cute_kernels import Sparse24, prune_2_4
from cute_kernels.testing.reference import normal

from ..sparse_collective.bsr_parts import DEVICES
from ..sparse_collective.nn_parts import near

BF16 = torch.bfloat16
ON = pytest.mark.parametrize("device", DEVICES)


def matrices(device, M=96, K=128) -> tuple:
    """(W, the same in FP64)"""
    w = prune_2_4(normal(M, K, device=device))
    return Sparse24.from_dense(w), w.double()


@ON
def test_products(device):
    W, w = matrices(device)
    b, x, bias = (normal(*shape, device=device) for shape in ((128, 40), (40, 128), (96,)))
    for multiply in (operator.matmul, torch.matmul, torch.mm):
        near(multiply(W, b), w @ b.double())
        for transposed in (W.t(), W.T, W.mT):
            near(multiply(x, transposed), x.double() @ w.t())
    near(W @ b[:, 0], w @ b[:, 0].double())
    out = b.new_empty(96, 40)
    assert torch.matmul(W, b, out=out) is out
    near(out, w @ b.double())
    out = x.new_empty(40, 96)
    assert torch.matmul(x, W.t(), out=out) is out
    near(out, x.double() @ w.t())
    for tokens in (x, x[0], x.view(4, 10, 128), x.view(4, 10, 128).transpose(0, 1), x[:0]):
        for given in (None, bias):
            y = linear(tokens, W, given)
            assert y.is_contiguous() and y.shape == (*tokens.shape[:-1], 96)
            if y.numel():
                near(y, linear(tokens.double(), w, None if given is None else given.double()))
    near(x.view(4, 10, 128) @ W.t(), x.view(4, 10, 128).double() @ w.t())


@ON
def test_autocast(device):
    W, w = matrices(device)
    x = normal(40, 128, device=device)
    with torch.autocast(device, BF16):
        for y in (linear(x.float(), W.to(torch.float32)), x.float() @ W.t(), (W @ x.float().t()).t()):
            assert y.dtype is BF16
            near(y, x.double() @ w.t())


@ON
def test_compiled(device):
    torch._dynamo.reset()
    W, w = matrices(device)
    x, bias = normal(40, 128, device=device), normal(96, device=device)
    backend = "inductor" if device == "cuda" else "aot_eager"

    def step(x):
        return torch.matmul(W, x.t()).t(), torch.matmul(x, W.t()), linear(x, W, bias)

    first, second, third = torch.compile(step, fullgraph=True, backend=backend)(x)
    near(first, x.double() @ w.t())
    near(second, x.double() @ w.t())
    near(third, x.double() @ w.t() + bias.double())


def test_views():
    W, w = matrices("cpu")
    view = W.t()
    assert view.shape == (128, 96) and view.t() is W and (view.dtype, view.device, view.dim()) == (BF16, W.device, 2)
    assert torch.equal(view.to_dense().double(), w.t()) and W.size() == (96, 128) and W.size(1) == 128 and W.ndim == 2
    assert not view.requires_grad and repr(view).endswith(".t()")


def test_what_is_refused():
    W, _ = matrices("cpu", 128, 128)
    x = normal(128, 128)
    for call, error, message in (
        (lambda: x @ W, TypeError, r"x @ W have no kernel. Compress the transpose"),
        (lambda: W.t() @ x, TypeError, r"W.t\(\) @ b and x @ W have no kernel"),
        (lambda: W @ W.t(), TypeError, "a Sparse24 times a Sparse24 has no kernel"),
        (lambda: torch.add(W, x), TypeError, r"add does not take a Sparse24; supported with a Sparse24 W"),
        (lambda: numpy.ones((128, 128)) @ W, TypeError, "x @ W have no kernel"),
        (lambda: numpy.ones((128, 128)) @ W.t(), TypeError, "linear takes a Sparse24 as its weight alone"),
        (lambda: linear(W, x), TypeError, "linear takes a Sparse24 as its weight alone"),
        (lambda: linear(x, W.t()), TypeError, "linear takes a Sparse24 as its weight alone"),
        (lambda: linear(x[:, :8], W), ValueError, r"the weight is 128x128, so x must be \(..., 128\), got \(128, 8\)"),
        (lambda: linear(x, W, x[0, :8]), ValueError, r"bias has shape \(8,\); it must be \(128,\)"),
        (lambda: linear(x.clone().requires_grad_(), W), RuntimeError, "does not compute gradients"),
        (lambda: W @ x[None], ValueError, "fold the batch into its columns"),
    ):
        with pytest.raises(error, match=message):
            call()
    # The advice works.
    dense = normal(128, 96)
    V = Sparse24.from_dense(prune_2_4(dense.t()))
    x = normal(4, 128)
    near(x @ V.t(), x.double() @ V.to_dense().t().double())


def test_operators_in_a_graph():
    """torch.compile tells W @ b from b @ W, although both orders have fitting shapes."""
    torch._dynamo.reset()
    W, w = matrices("cpu", 128, 128)
    x = normal(128, 128)
    for f, exact in ((lambda x: W @ x, w @ x.double()), (lambda x: x @ W.t(), x.double() @ w.t())):
        near(torch.compile(f, fullgraph=True, backend="eager")(x), exact)
    with pytest.raises(Exception, match="x @ W have no kernel"):
        torch.compile(lambda x: x @ W, fullgraph=True, backend="eager")(x)
