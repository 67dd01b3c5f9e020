"""Registration of ops: both variants, defaults, outputs after the first, and a gradient, of a toy op."""

import pytest
import torch

from cute_kernels.runtime.library import call, register


def run(x, y, *, out, scale, shift, name):
    result = x * y * scale + (0 if shift is None else shift)
    result = result if out is None else out.copy_(result)
    return (result, x.sum()) if name else result


def fake(x, y, *, scale, shift, name):
    return (torch.empty_like(x), x.new_empty(())) if name else torch.empty_like(x)


def keep(ctx, inputs, output):
    x, y, ctx.scale, shift, _ = inputs
    ctx.shifted = shift is not None
    ctx.save_for_backward(x, y)


def backward(ctx, gradient):
    x, y = ctx.saved_tensors
    return gradient * y * ctx.scale, gradient * x * ctx.scale, None, gradient if ctx.shifted else None, None


TERMS = "float scale=2.0, Tensor? shift=None, str name"
register("cute_kernels_toy::one", "Tensor x, Tensor y", f'{TERMS}=""', run, fake, gradient=(keep, backward))
register("cute_kernels_toy::two", "Tensor x, Tensor y", f'{TERMS}="sum"', run, fake, more="Tensor")
OPS = torch.ops.cute_kernels_toy


@pytest.mark.parametrize("given", [(), (3.0,), (3.0, torch.ones(4)), (3.0, None, "")], ids=len)
def test_terms_are_given_or_their_defaults(given):
    x, y, out = torch.randn(4), torch.randn(4), torch.zeros(4)
    scale, shift = (*given[:2], *(2.0, None)[len(given) :])
    exact = x * y * scale + (0 if shift is None else shift)
    assert torch.equal(OPS.one(x, y, *given), exact)
    assert OPS.one_out(x, y, out, *given) is None and torch.equal(out, exact)


def test_an_output_after_the_first():
    x, y, out = torch.randn(4), torch.randn(4), torch.zeros(4)
    first, total = OPS.two(x, y, 3.0)
    assert torch.equal(first, x * y * 3.0) and torch.equal(total, x.sum())
    assert torch.equal(OPS.two_out(x, y, out, 3.0), total) and torch.equal(out, first)


@pytest.mark.parametrize("name", ["one", "two"])
def test_opcheck(name):
    x, y = (torch.randn(4, requires_grad=name == "one") for _ in range(2))
    torch.library.opcheck(getattr(OPS, name).default, (x, y), {"scale": 0.5})
    torch.library.opcheck(getattr(OPS, f"{name}_out").default, (x.detach(), y.detach(), torch.zeros(4)), {"scale": 0.5})


def test_a_gradient():
    x, y, shift = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda x, y, shift: OPS.one(x, y, 3.0, shift), (x, y, shift))
    step = torch.compile(lambda x, y: call("cute_kernels_toy::one", (x, y), None, (3.0,)).sum(), backend="aot_eager")
    step(x, y).backward()
    assert torch.equal(x.grad, 3.0 * y)
