"""Tensors with gradients that an epilogue function captures: refused in every kind of call, never a silent None."""

import pytest
import torch

from cute_kernels import Sparse24, gemm, prune_2_4
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul

REFUSED = "reads a captured tensor that requires a gradient, which the kernel does not compute"
CALLS = ["gemm", "gemm of a Sparse24", "bsr_matmul", "bsr_linear", "bsr_linear of a Bsr24", "bsr_grouped_linear"]


def calls(device: str) -> dict:
    """By name: a function of x (128, 128) and **terms."""
    w = normal(128, 128, device=device)
    W, W24 = BsrMatrix.from_dense(w, (64, 64)), Sparse24.from_dense(prune_2_4(w))
    items, groups = BsrMatrix.stack([W] * 2), torch.tensor([1, 0], dtype=torch.int32, device=device)
    Bsr24 = W.prune_2_4()
    return {
        "gemm": lambda x, **terms: gemm(x, w, **terms),
        "gemm of a Sparse24": lambda x, **terms: gemm(W24, x, **terms),
        "bsr_matmul": lambda x, **terms: bsr_matmul(W, x, **terms),
        "bsr_linear": lambda x, **terms: bsr_linear(x, W, **terms),
        "bsr_linear of a Bsr24": lambda x, **terms: bsr_linear(x, Bsr24, **terms),
        "bsr_grouped_linear": lambda x, **terms: bsr_grouped_linear(x, items, expert_ids=groups, **terms),
    }


def functions(scale) -> dict:
    """Ways to read a learned scalar."""

    class Scaled:
        def __call__(self, z):
            return z * scale

    return {
        "as it is": lambda z: z * scale,
        "computed": lambda z: z * (scale * 2).exp(),
        "as a number": lambda z: z * scale.item(),
        "by an object": Scaled(),
        "beside a detached one": lambda z: z * scale.detach() + z * scale,
    }


@pytest.fixture
def scale():
    return torch.nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize("learned_x", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_refused(name, learned_x, scale, place):
    run, x = calls(place)[name], normal(128, 128, device=place)
    x.requires_grad_(learned_x and "24" not in name)
    for function in functions(scale).values():
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED):
                run(x, epilogue=function)
            with torch.no_grad():
                run(x, epilogue=function)


@pytest.mark.parametrize("name", CALLS)
def test_what_the_error_names(name, scale, place):
    """Both of its ways give the right numbers, and the first the right gradient."""
    run, x = calls(place)[name], normal(128, 128, device=place)
    with pytest.raises(RuntimeError) as error:
        run(x, epilogue=lambda z: z * scale)
    assert "gemm(a, b) * scale" in str(error.value) and "scale.detach().item()" in str(error.value)
    y = run(x)
    outside = run(x) * scale
    outside.float().sum().backward()
    torch.testing.assert_close(scale.grad, y.float().sum().cpu(), rtol=1e-2, atol=1)

    def constant(z):
        return z * scale.detach().item()

    for value in (2.0, 0.5, 4.0):  # powers of two, by which rounding does not change
        with torch.no_grad():
            scale.fill_(value)
        for _ in range(2):
            found = run(x, epilogue=constant)
            torch.testing.assert_close(found, y * value, rtol=0.01, atol=0.01)
            assert not found.requires_grad


def test_a_gradient_asked_for_later(place):
    run, x, scale = calls(place)["gemm"], normal(128, 128, device=place), torch.tensor(2.0)

    def function(z):
        return z * scale

    want = run(x, epilogue=function)
    scale.requires_grad_()
    with pytest.raises(RuntimeError, match=REFUSED):
        run(x, epilogue=function)
    scale.requires_grad_(False)
    assert torch.equal(run(x, epilogue=function), want)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name, learned, place):
    """A graph would keep the value of today, whether it has a gradient or not; a number is guarded."""
    torch._dynamo.reset()
    run, x, scale = calls(place)[name], normal(128, 128, device=place), torch.tensor(2.0).requires_grad_(learned)

    def function(z):
        return z * scale

    with pytest.raises(Exception, match=f"{REFUSED if learned else 'reads the value of'}.*capture a Python number"):
        torch.compile(lambda x: run(x, epilogue=function), fullgraph=True, backend="aot_eager")(x)
    outside = torch.compile(lambda x: run(x) * scale, fullgraph=True, backend="aot_eager")
    assert torch.equal(outside(x), run(x) * 2.0)
    number = 2.0
    assert torch.equal(
        torch.compile(lambda x: run(x, epilogue=lambda z: z * number), backend="aot_eager")(x), run(x) * 2.0
    )
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["gemm", "bsr_matmul", "bsr_linear", "bsr_grouped_linear"])
def test_torch_func(name, place):
    run, x = calls(place)[name], normal(128, 128, device=place)
    with pytest.raises(TypeError, match="a captured tensor belongs to a transform of torch.func"):
        torch.func.grad(lambda scale: run(x, epilogue=lambda z: z * scale).float().sum())(torch.tensor(2.0))


def test_forward_mode(place):
    run, x = calls(place)["gemm"], normal(128, 128, device=place)
    with torch.autograd.forward_ad.dual_level():
        scale = torch.autograd.forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        with pytest.raises(RuntimeError, match=REFUSED):
            run(x, epilogue=lambda z: z * scale.item())
        with pytest.raises(TypeError, match="the epilogue function"):
            run(x, epilogue=lambda z: z * scale)


def test_backward_uses_the_function_of_forward(place):
    """A number that changes between forward and backward has no effect on the gradient."""
    for run in (calls(place)[name] for name in ("gemm", "bsr_linear")):
        factor = [2.0]
        x = normal(128, 128, device=place).requires_grad_()
        y = run(x, epilogue=lambda z, factor=factor: z * factor[0])
        factor[0] = 100.0
        (found,) = torch.autograd.grad(y.float().sum(), x)
        (want,) = torch.autograd.grad(run(x, epilogue=lambda z: z * 2.0).float().sum(), x)
        assert torch.equal(found, want)
