"""Torch features with layers: autocast, checkpoints, torch.compile, export, optimizers."""

import copy

import pytest
import torch
from torch import nn

from cute_kernels.testing.reference import normal
from sparse_collective.nn import BsrMixtureOfExperts

from .nn_parts import BF16, blocks_of, layer_of, masked, near


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast(place, dtype):
    layer = layer_of(place, dtype=torch.float32)
    dense, _ = masked(layer)
    x = torch.randn(20, 128, device=place, requires_grad=True)
    with torch.autocast(place, dtype):
        y = layer(x)
    assert y.dtype is dtype
    near(y, dense(x.detach().double()))
    y.float().square().sum().backward()
    dense(x.detach().double()).square().sum().backward()
    assert layer.values.grad.dtype is x.grad.dtype is torch.float32
    near(layer.values.grad, blocks_of(layer, dense.weight.grad), 2)
    near(layer.bias.grad, dense.bias.grad, 2)


def test_a_mixture_under_autocast(place):
    layer = BsrMixtureOfExperts(64, 64, 4, 2, True, (32, 32), density=0.5, group_rows=64, device=place)
    x = torch.randn(30, 64, device=place, requires_grad=True)
    with torch.autocast(place, BF16):
        y = layer(x)
    y.float().square().sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    assert y.shape == x.shape and y.dtype is torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(place, reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = layer_of(place, activation="silu")
    x, dy = normal(20, 128, device=place).requires_grad_(), normal(20, 96, device=place)
    layer(x).backward(dy)
    expected = [t.grad.clone() for t in (x, layer.values, layer.bias)]
    x.grad = layer.values.grad = layer.bias.grad = None
    checkpoint(layer, x, use_reentrant=reentrant).backward(dy)
    assert all(torch.equal(t.grad, e) for t, e in zip((x, layer.values, layer.bias), expected, strict=True))


def test_compile_with_any_number_of_tokens(place):
    torch._dynamo.reset()
    model = nn.Sequential(layer_of(place, activation="silu"), layer_of(place, grid=(2, 3)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    counters = torch._dynamo.utils.counters
    for i, tokens in enumerate((24, 40, 56, 72)):
        x = normal(tokens, 128, device=place).requires_grad_()
        dy = normal(tokens, 64, device=place)
        model.zero_grad()
        compiled(x).backward(dy)
        found = [p.grad.clone() for p in (x, *model.parameters())]
        x.grad = None
        model.zero_grad()
        model(x).backward(dy)
        for a, b in zip(found, (x, *model.parameters()), strict=True):
            torch.testing.assert_close(a, b.grad)
        if i == 1:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again for another number of tokens"


def test_a_compiled_layer_finds_what_is_known_of_its_pattern(emulated):
    """A graph makes its matrix anew in each call; tables are made once all the same."""
    torch._dynamo.reset()
    layer = layer_of()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    kept = layer.weight.pattern.tables.kept
    assert not kept
    compiled(normal(8, 128).requires_grad_()).sum().backward()
    tables = dict(kept)
    assert "transposed" in tables
    compiled(normal(8, 128).requires_grad_()).sum().backward()
    assert kept.keys() == tables.keys() and all(kept[k][0] is tables[k][0] for k in tables)


def test_compile_under_autocast(place):
    torch._dynamo.reset()
    layer = layer_of(place, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 128, device=place)
    with torch.autocast(place, BF16):
        y, expected = compiled(x), layer(x)
    assert y.dtype is BF16 and torch.equal(y, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export(place, strict):
    layer = layer_of(place, activation="gelu")
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    x = normal(5, 128, device=place)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},), strict=strict)
    for n in (5, 9):
        x = normal(n, 128, device=place)
        assert torch.equal(program.module()(x), layer(x))
    assert {"values", "bias", "crow_indices", "col_indices"} == set(program.state_dict)


def test_functional_call(place):
    layer = layer_of(place)
    x = normal(3, 128, device=place)
    W = layer.weight
    doubled = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    near(torch.func.functional_call(layer, doubled, (x,)), 2 * layer(x).double())
    assert layer.weight is W
    other = layer_of(place, density=0.25)
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(torch.func.functional_call(layer, state, (x,)), other(x))
    assert torch.equal(layer(x), copy.deepcopy(layer)(x)) and layer.weight.stored is layer.values


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_training_goes_as_with_the_masked_dense_layer(optimizer):
    """fp32 parameters under autocast, clipped gradients, weight decay; losses stay beside those of dense layers."""
    layer = layer_of(dtype=torch.float32, block=(16, 16), grid=(6, 8))
    dense, mask = masked(layer)
    dense.float()
    target, x = torch.randn(128, 96), torch.randn(128, 128)
    options = {"lr": 0.01, "weight_decay": 0.1}
    mine, theirs = optimizer(layer.parameters(), **options), optimizer(dense.parameters(), **options)
    losses = []
    for _ in range(15):
        pair = []
        for module, steps in ((layer, mine), (dense, theirs)):
            with torch.autocast("cpu", BF16):
                y = module(x)
            loss = nn.functional.mse_loss(y.float(), target)
            steps.zero_grad()
            loss.backward()
            if module is dense:
                dense.weight.grad *= mask
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            steps.step()
            pair.append(loss.item())
        losses.append(pair)
    assert losses[-1][0] < losses[0][0]
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=0.01)
    # Adam divides by a gradient's size, so where that is small a rounding error is a step.
    slack = 1 if optimizer is torch.optim.SGD else 4
    near(layer.values.detach(), blocks_of(layer, dense.weight.detach().double()), slack)
