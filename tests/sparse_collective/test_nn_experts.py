"""Gated feed-forward layers, grouped layers and mixtures of experts, against dense ones."""

import copy

import pytest
import torch
from torch import nn

from cute_kernels.testing.reference import normal
from sparse_collective.nn import BsrGroupedLinear, BsrMixtureOfExperts, SwiGLU, densify_
from sparse_collective.nn.feed_forward import routing_of
from sparse_collective.padded_rows import Padding, spread

from .nn_parts import BF16, blocks_of, masked, near


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [(32, 32), (128, 64)])
def test_swiglu(place, bias, block):
    layer = SwiGLU(128, 192, blocksize=block, density=0.5, bias=bias, device=place, dtype=BF16)
    gate_up, down = (masked(m)[0] for m in (layer.gate_up, layer.down))
    x = normal(20, 128, device=place).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    gate, up = gate_up(x64).unflatten(-1, (-1, 2, 64)).transpose(1, 2).flatten(2).unbind(1)
    y, exact = layer(x), down(nn.functional.silu(gate) * up)
    near(y, exact, 2)
    with torch.no_grad():
        near(layer(x), exact, 2)
    dy = normal(*y.shape, device=place)
    y.backward(dy)
    exact.backward(dy.double())
    near(x.grad, x64.grad, 2)
    for mine, theirs in ((layer.gate_up, gate_up), (layer.down, down)):
        near(mine.values.grad, blocks_of(mine, theirs.weight.grad), 2)


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_from_linears(bias):
    gate, up = (nn.Linear(64, 128, bias) for _ in range(2))
    down = nn.Linear(128, 64, bias)
    layer, x = SwiGLU.from_linears(gate, up, down, (32, 32)), torch.randn(5, 64)
    torch.testing.assert_close(layer(x), down(nn.functional.silu(gate(x)) * up(x)))
    densify_(layer)
    torch.testing.assert_close(layer(x), down(nn.functional.silu(gate(x)) * up(x)))
    with pytest.raises(ValueError, match="both have a bias"):
        SwiGLU.from_linears(gate, nn.Linear(64, 128, not bias), down)
    with pytest.raises(ValueError, match="multiple of 64"):
        SwiGLU(64, 96, density=0.5)


@pytest.mark.parametrize("one_pattern", [True, False])
@pytest.mark.parametrize("given", ["density", "mask"])
def test_grouped_linear(place, one_pattern, given):
    more = {"density": 0.5}
    if given == "mask":
        more = {"mask": torch.rand((3, 4) if one_pattern else (5, 3, 4), device=place) < 0.5}
    layer = BsrGroupedLinear(
        5, 128, 96, True, (32, 32), one_pattern=one_pattern, activation="silu", device=place, dtype=BF16, **more
    )
    assert layer.weight.batch == ("values" if one_pattern else "patterns") and layer.pattern.error() == ""
    if given == "mask":
        assert torch.equal(layer.pattern.mask(), more["mask"])
    x = normal(384, 128, device=place)
    offsets = torch.tensor([64, 64, 192, 256, 384], dtype=torch.int32, device=place)
    groups = torch.tensor([0, 2, 2, 3, 4, 4], dtype=torch.int32, device=place)
    experts = groups.repeat_interleave(64)
    dense = layer.weight.to_dense().double()[experts]  # (T, M, K)
    z = torch.einsum("tmk,tk->tm", dense, x.double()) + layer.bias.double()[experts]
    for y in (layer(x, offsets), layer(x, offsets, group_rows=64), layer(x, expert_ids=groups)):
        near(y, nn.functional.silu(z))
    other = copy.deepcopy(layer)
    assert torch.equal(other(x, offsets), layer(x, offsets))
    other.load_state_dict(layer.state_dict())


def test_routing():
    for tokens, k, experts, group in ((1, 1, 4, 64), (50, 2, 3, 64), (300, 3, 8, 64), (0, 2, 4, 64), (7, 4, 4, 128)):
        choices = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k)
        rows, slots, groups = routing_of(choices.long(), experts, group)
        assert slots.unique().numel() == tokens * k and rows == group * len(groups)
        assert torch.equal(groups[slots // group].long(), choices.long().flatten())


@pytest.mark.parametrize("shape", [(4, 8), (4, 3), (1, 8), (4, 0), (0, 8), (4, 2, 4), (4,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_any_layout(shape, dtype):
    """Rows are copied 8 bytes at a time where their layout allows it."""
    slots, n = torch.tensor([3, 0, 5, 1])[: shape[0]], torch.Size(shape).numel()
    strided = torch.randn(*shape[::-1]).to(dtype).permute(*range(len(shape))[::-1])
    for x in (strided.contiguous(), strided, torch.randn(n + 1).to(dtype)[1:].view(shape)):
        assert torch.equal(spread(x, Padding(6, slots, slots))[slots], x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("experts", [100, 300])
def test_choices_of_any_integer_type(dtype, experts):
    """Types that cannot hold -1, or the number of experts, too."""
    choices = torch.randint(100, (50, 2)).to(dtype)
    for found, expected in zip(routing_of(choices, experts, 64), routing_of(choices.long(), experts, 64), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize("one_pattern", [True, False])
def test_mixture_of_experts(place, one_pattern):
    layer = BsrMixtureOfExperts(
        64, 96, 4, 2, True, (32, 32), density=0.5, one_pattern=one_pattern, group_rows=64, device=place, dtype=BF16
    )
    x = normal(3, 25, 64, device=place)
    y = layer(x)
    tokens = x.flatten(0, 1)
    weights, choices = layer.route(tokens)
    gate, up, down = ((m.weight.to_dense().double(), m.bias.double()) for m in (layer.gate, layer.up, layer.down))
    exact = torch.zeros(75, 64, dtype=torch.float64, device=place)
    for t in range(75):
        for w, e in zip(weights[t].double(), choices[t].tolist(), strict=True):
            h = nn.functional.silu(gate[0][e] @ tokens[t].double() + gate[1][e])
            h = h * (up[0][e] @ tokens[t].double() + up[1][e])
            exact[t] += w * (down[0][e] @ h + down[1][e])
    near(y, exact.view_as(x), 2)
    assert y.shape == x.shape and y.dtype is BF16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (1, 64)])
def test_a_mixture_of_no_tokens(place, bias, shape):
    layer = BsrMixtureOfExperts(64, 96, 4, 2, bias, (32, 32), density=0.5, device=place, dtype=BF16)
    x = normal(*shape, device=place).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    if 0 in shape:
        assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)


def experts_densely(layer, x, weights, choices, parameters):
    """The same in fp64: every expert on every token, of which the chosen ones count."""
    (gate, gate_bias), (up, up_bias), (down, down_bias) = parameters
    h = nn.functional.silu(torch.einsum("emk,tk->tem", gate, x) + gate_bias)
    h = h * (torch.einsum("emk,tk->tem", up, x) + up_bias)
    y = torch.einsum("emk,tek->tem", down, h) + down_bias
    return (y.gather(1, choices[..., None].expand(-1, -1, y.shape[-1])) * weights[..., None]).sum(1)


@pytest.mark.parametrize("one_pattern", [True, False])
def test_gradients_of_a_mixture_of_experts(place, one_pattern):
    layer = BsrMixtureOfExperts(
        64, 96, 4, 2, True, (32, 32), density=0.5, one_pattern=one_pattern, group_rows=64, device=place, dtype=BF16
    )
    x = normal(75, 64, device=place).requires_grad_()
    x64, router = x.detach().double().requires_grad_(), layer.router.weight.detach().double().requires_grad_()
    modules = layer.gate, layer.up, layer.down
    weights = [[m.weight.to_dense().detach().double().requires_grad_() for m in modules]]
    weights += [[m.bias.detach().double().requires_grad_() for m in modules]]
    choices = layer.route(x)[1]
    shares = (x64 @ router.t()).gather(1, choices).softmax(-1)
    exact = experts_densely(layer, x64, shares, choices, list(zip(*weights, strict=True)))
    y, dy = layer(x), normal(75, 64, device=place)
    near(y, exact.detach(), 2)
    y.backward(dy)
    exact.backward(dy.double())
    near(x.grad, x64.grad, 3)
    near(layer.router.weight.grad, router.grad, 3)
    for module, weight, bias in zip(modules, *weights, strict=True):
        near(module.bias.grad, bias.grad, 3)
        stored = module.pattern.mask().repeat_interleave(32, -2).repeat_interleave(32, -1)
        near(module.weight.with_values(module.values.grad).to_dense(), weight.grad * stored, 3)


def test_mixture_of_experts_compiles(place):
    """In one graph with its gradient, for any number of tokens."""
    torch._dynamo.reset()
    layer = BsrMixtureOfExperts(64, 64, 4, 2, True, (32, 32), density=0.5, group_rows=64, device=place, dtype=BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (30, 50):
        x, dy = normal(tokens, 64, device=place).requires_grad_(), normal(tokens, 64, device=place)
        found = []
        for module in (compiled, layer):
            layer.zero_grad()
            x.grad = None
            y = module(x)
            y.backward(dy)
            found.append([y, x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*found)


def test_mixture_of_experts_does_not_synchronise(monkeypatch):
    """Nothing reads a tensor's contents on the host: on a GPU each of these would wait for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "unique2", "masked_select")
            return func(*args, **(kwargs or {}))

    choices = torch.randint(4, (30, 2))
    with NoReads():
        routing_of(choices, 4, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"top_k": 5}, r"top_k is 5; it must be in \[1, 4\]"), ({"group_rows": 96}, "positive multiple of 64")],
)
def test_bad_mixtures(changes, message):
    arguments = {"dim": 64, "hidden": 64, "experts": 4, "top_k": 2, "blocksize": (32, 32), "density": 0.5, **changes}
    with pytest.raises(ValueError, match=message):
        BsrMixtureOfExperts(**arguments)
