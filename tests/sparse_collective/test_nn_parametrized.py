"""torch.nn.utils.parametrize and torch.nn.utils.prune on the values of layers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from cute_kernels.testing.reference import normal
from sparse_collective import nn as layers

BLOCK = (64, 64)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def made(kind: str, device: str) -> nn.Module:
    options = {"blocksize": BLOCK, "density": 0.5, "device": device, "dtype": torch.bfloat16}
    if kind == "BsrGroupedLinear":
        return layers.BsrGroupedLinear(2, 64, 128, True, **options)
    layer = getattr(layers, kind.removesuffix(", masked"))(64, 128, True, **options)
    if "masked" in kind:
        layers.mask_2_4_(layer)
    return layer


@pytest.mark.parametrize("kind", ["BsrLinear", "GatedBsrLinear", "BsrGroupedLinear", "BsrLinear, masked"])
def test_values(kind, device):
    layer, x = made(kind, device), normal(64, 64, device=device)
    more = {"expert_ids": torch.zeros(1, dtype=torch.int32, device=device)} if "Grouped" in kind else {}
    kept, exact = type(layer), layer(x, **more)
    parametrize.register_parametrization(layer, "values", Doubled())
    assert torch.equal(layer(x, **more), exact)
    original = layer.parametrizations["values"].original
    layer(x, **more).sum().backward()
    assert original.grad.shape == original.shape and original.grad.any()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, **more), exact)
    with parametrize.cached():
        assert torch.equal(layer(x, **more), exact)
    other = copy.deepcopy(layer)
    other.reset_parameters()
    assert not torch.equal(other(x, **more), exact)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, **more), exact)
    parametrize.remove_parametrizations(layer, "values")
    assert type(layer) is kept and torch.equal(layer(x, **more), exact)


def test_weight_norm(device):
    """A parametrization of two parameters."""
    layer, x = made("BsrLinear", device), normal(16, 64, device=device)
    exact = layer(x).detach()
    weight_norm(layer, "values", dim=0)
    torch.testing.assert_close(layer(x), exact, rtol=0.02, atol=0.02)
    other = weight_norm(made("BsrLinear", device), "values", dim=0)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_torch_prune():
    layer, other = (prune.l1_unstructured(made("BsrLinear", "cpu"), "values", 0.5) for _ in range(2))
    layer(normal(16, 64)).sum().backward()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.values_orig, layer.values_orig)


@pytest.mark.parametrize("form", ["parametrize", "prune"])
def test_patterns_of_computed_values_stay(form):
    layer = made("BsrLinear", "cpu")
    before = layer.pattern.clone()
    if form == "prune":
        prune.identity(layer, "values")
    else:
        parametrize.register_parametrization(layer, "values", Doubled())
    for change in (lambda: layers.prune_(layer, 0.25), lambda: layers.change_pattern_(layer, 0.5, grow="random")):
        with pytest.raises(TypeError, match=r"cannot be changed in place; call .*remove_parametrizations"):
            change()
    assert torch.equal(layer.pattern.keys(), before.keys())
    state = layers.BsrLinear(64, 128, True, BLOCK, density=1.0, dtype=torch.bfloat16)
    if form == "parametrize":
        parametrize.register_parametrization(state, "values", Doubled())
    else:
        prune.identity(state, "values")
    with pytest.raises(RuntimeError, match="2 blocks do not fit the 1 of this layer, whose values are of"):
        layer.load_state_dict(state.state_dict())


def test_what_cannot_be_parametrized():
    layer = made("BsrLinear", "cpu")
    with pytest.raises(TypeError, match="col_indices of a BsrLinear cannot be deleted or parametrized"):
        parametrize.register_parametrization(layer, "col_indices", nn.Identity())
    x = normal(16, 64)
    for kind in (layers.Float8BsrLinear(layer), layers.Bsr24Linear(layer), layers.Sparse24Linear(nn.Linear(64, 64))):
        y = kind(x.to(kind.values.dtype) if kind.values.dtype.itemsize > 1 else x)
        with pytest.raises(TypeError, match=r"values of a .*Linear cannot be .*; parametrize an? .*Linear, and make a"):
            parametrize.register_parametrization(kind, "values", nn.Identity(), unsafe=True)
        assert torch.equal(kind(x.to(kind.values.dtype) if kind.values.dtype.itemsize > 1 else x), y)
