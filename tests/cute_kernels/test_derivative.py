"""Derivatives of traced functions, against autograd of the functions themselves."""

import pytest
import torch
import torch.nn.functional as nnf

from cute_kernels.traced.derivative import RULES, derivative, followed_by
from cute_kernels.traced.evaluate import OPERATIONS, evaluate
from cute_kernels.traced.memo import traced

FUNCTIONS = {
    "swish": lambda x: x * torch.sigmoid(x),
    "gelu": nnf.gelu,
    "silu": nnf.silu,
    "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "squared relu": lambda x: torch.relu(x) ** 2,
    "softsign of tanh": lambda x: torch.tanh(x) / (1 + x.abs()),
    "where": lambda x: torch.where(x > 0, torch.sqrt(x.abs()), x * 0.25),
    "bell": lambda x: torch.exp(-x * x),
    "leaky": nnf.leaky_relu,
    "elu": nnf.elu,
    "mish": nnf.mish,
    "softplus": nnf.softplus,
    "hardswish": nnf.hardswish,
    "clamp": lambda x: x.clamp(-1, 1) * 3,
    "sines": lambda x: torch.sin(x) * torch.cos(2 * x),
    "atan2": lambda x: torch.atan2(x, x * x + 1),
    "power": lambda x: (x * x + 1) ** 1.5,
    "power of two": lambda x: 2.0**x,
    "logarithms": lambda x: torch.log1p(x * x) + torch.log2(x * x + 1) + torch.log10(x * x + 2) + torch.log(x * x + 3),
    "remainder": lambda x: torch.remainder(x * x, 1.25) * x,
    "fmod": lambda x: torch.fmod(x * 3, 1.25),
    "rsqrt": lambda x: torch.rsqrt(1 + x * x),
    "erf": lambda x: torch.erf(x) - torch.erfc(2 * x),
    "constant": lambda x: torch.full_like(x, 3.0),
    "reciprocal": lambda x: 1 / (2 + torch.exp2(x)) - torch.reciprocal(3 + x * x),
    "maximum": lambda x: torch.maximum(x, x * x) + torch.minimum(x, 1 - x),
    "inverse": lambda x: torch.asin(torch.tanh(x)) + torch.acos(torch.tanh(x) / 2) + torch.atan(x),
    "hyperbolic": lambda x: torch.sinh(x) - torch.cosh(x / 2) + torch.expm1(x),
    "tan": lambda x: torch.tan(x / 4),
    "steps": lambda x: torch.floor(x) * x + torch.round(x) + torch.trunc(x) - torch.ceil(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_autograd(name):
    function = FUNCTIONS[name]
    slope = derivative(traced(function, name, ("float32",), (2, 3), torch.device("cpu")).program)
    x = torch.linspace(-4, 4, 1001, dtype=torch.float64) + 1e-3
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    exact = torch.autograd.grad(y.sum(), leaf)[0] if y.requires_grad else torch.zeros_like(x)
    found = evaluate(slope, [x]).expand(x.shape)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)  # numbers in a program are of fp32


def test_rounding_passes_the_tangent_on():
    program = traced(lambda x: x.bfloat16().float() * 2, "f", ("float32",), (2, 3), torch.device("cpu")).program
    assert (evaluate(derivative(program), [torch.randn(5)]) == 2).all()


def test_every_operation_of_floats_has_a_rule():
    """Others give no float that depends on one: comparisons, logic, shifts; slopes are derivatives themselves."""
    others = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "shl", "shr", "isnan", "where"}
    others |= {"gelu_slope", "gelu_tanh_slope"}
    assert set(OPERATIONS) - others == set(RULES)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", None])
def test_of_an_activation_and_then_a_function(activation):
    program = traced(lambda x: x * torch.tanh(x), "f", ("float32",), (2, 3), torch.device("cpu")).program
    x = torch.linspace(-3, 3, 301, dtype=torch.float64) + 1e-3
    leaf = x.clone().requires_grad_()
    tanh = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    z = leaf if activation is None else getattr(nnf, activation.removesuffix("_tanh"))(leaf, **tanh)
    exact = torch.autograd.grad((z * torch.tanh(z)).sum(), leaf, retain_graph=True)[0]
    torch.testing.assert_close(evaluate(derivative(followed_by(activation, program)), [x]), exact)
    alone = derivative(followed_by(activation, None))
    exact = torch.autograd.grad(z.sum(), leaf)[0] if activation else torch.ones_like(x)
    torch.testing.assert_close(evaluate(alone, [x]).expand(x.shape), exact)


def test_relu_of_zero_is_flat():
    slope = derivative(followed_by("relu", None))
    found = evaluate(slope, [torch.tensor([-1.0, -0.0, 0.0, 1.0, torch.nan])])
    assert found.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
