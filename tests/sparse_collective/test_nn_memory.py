"""Memory that layers take between forward and backward, under torch.autocast too."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cute_kernels.testing.reference import normal
from sparse_collective import bsr_linear, random_bsr
from sparse_collective.nn import BsrGroupedLinear

from .nn_parts import BF16, layer_of

NNZ = 11  # a shape that no other tensor of these tests has


def model_of(place, layers=4, **more) -> nn.Sequential:
    """Square layers of fp32 with NNZ blocks each."""
    density = NNZ / 16
    return nn.Sequential(
        *(layer_of(place, density=density, grid=(4, 4), dtype=torch.float32, **more) for _ in range(layers))
    )


def copies(shape=(NNZ, 32, 32), dtype=BF16) -> int:
    """Tensors of this shape and dtype that are alive, and take as much memory as their elements do."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == shape and t.dtype is dtype]
    return len({t.data_ptr() for t in found if t.untyped_storage().nbytes() >= t.nbytes})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_bytes_kept_for_backward(place, bias, activation):
    """Saved are each layer's 16-bit input, z of an activation, and parameters; backward casts the weights again."""
    model, x = model_of(place, bias=bias, activation=activation), torch.randn(24, 128, device=place)
    saved, parameters = {}, {p.data_ptr() for p in model.parameters()}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast(place, BF16):
        y = model(x)
    tokens = 24 * 128 * 2
    assert sum(saved.values()) == 4 * tokens * (1 if activation is None else 2)
    assert copies() == 0
    loss = y.float().square().mean()
    del y
    loss.backward()
    assert copies() == 0 and all(layer.values.grad is not None for layer in model)
    assert loss.grad_fn is not None


def test_saved_tensors_hooks_hold_all_of_it(place):
    """Tensors that they take are freed before backward, and tensors that they return are what backward reads."""
    model, x = model_of(place), torch.randn(24, 128, device=place)
    other = copy.deepcopy(model)
    held = []

    def pack(t):
        held.append(t.detach().cpu().view(torch.uint8).numpy().tobytes() if t.numel() else b"")
        return len(held) - 1, t.shape, t.dtype

    def unpack(packed):
        number, shape, dtype = packed
        return torch.frombuffer(bytearray(held[number]), dtype=dtype).view(shape).to(place)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), torch.autocast(place, BF16):
        loss = model(x).float().square().mean()
    assert copies() == 0
    loss.backward()
    with torch.autocast(place, BF16):
        loss = other(x).float().square().mean()
    loss.backward()
    for mine, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, right.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_no_weight(place, reentrant):
    model, x = model_of(place), torch.randn(24, 128, device=place, requires_grad=True)
    with torch.autocast(place, BF16):
        y = checkpoint(model, x, use_reentrant=reentrant)
    assert copies() == 0
    y.float().square().mean().backward()
    assert copies() == 0 and all(p.grad is not None for p in model.parameters())


def test_values_that_are_no_parameter(place):
    """Values that are computed, as by a mask, are freed by backward."""
    W, x = random_bsr((128, 128), (32, 32), per_row=2, device=place), normal(24, 128, device=place).requires_grad_()
    source = W.values.float().requires_grad_()
    loss = bsr_linear(x, W.with_values(source.to(BF16))).float().square().mean()
    assert copies(W.values.shape) == 2
    loss.backward()
    assert copies(W.values.shape) == 1 and source.grad is not None
    view = W.with_values(source.to(BF16)).t()
    loss = (view @ normal(128, 24, device=place).requires_grad_()).float().square().mean()
    del view
    loss.backward()
    assert copies(W.values.shape) == 1


@pytest.mark.parametrize("one_pattern", [True, False])
def test_experts(place, one_pattern):
    shape = (3, NNZ, 32, 32) if one_pattern else (3 * NNZ, 32, 32)
    layer = BsrGroupedLinear(3, 128, 128, False, (32, 32), one_pattern=one_pattern, density=NNZ / 16, device=place)
    x, offsets = torch.randn(192, 128, device=place), torch.tensor([64, 128, 192], dtype=torch.int32, device=place)
    with torch.autocast(place, BF16):
        loss = layer(x, offsets, group_rows=64).float().square().mean()
    loss.backward()
    assert copies(shape) == 0


def test_a_batch_keeps_no_values(place):
    """For one pattern for all items, a table for backward is kept with the pattern."""
    W = random_bsr((128, 128), (32, 32), per_row=2, device=place)
    pattern = type(W).stack([W, W, W]) if hasattr(type(W), "stack") else None
    values = pattern.values.float().requires_grad_()
    x = torch.randn(3, 20, 128, device=place).to(BF16)
    loss = bsr_linear(x, pattern.with_values(values.to(BF16))).float().square().mean()
    loss.backward()
    assert copies(values.shape) == 1 and values.grad is not None


def test_operands_that_backward_does_not_read(place):
    """With a frozen weight the input is not saved."""
    layer, x = layer_of(place, bias=False), normal(24, 128, device=place).requires_grad_()
    layer.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        y = layer(x * 1)
    assert saved == [layer.values.shape]
    y.backward(torch.ones_like(y))
    wanted, x.grad = x.grad, None
    layer.requires_grad_(True)
    y = layer(x * 1)
    y.backward(torch.ones_like(y))
    assert torch.equal(wanted, x.grad)


def test_a_weight_that_is_used_often(place):
    """No use keeps a copy, and gradients are those of all uses."""
    layer, x = model_of(place, 1)[0], torch.randn(24, 128, device=place, requires_grad=True)
    with torch.autocast(place, BF16):
        losses = [layer(times * x).float().square().mean() for times in (1, 2, 3)]
        assert copies() == 0
    sum(losses).backward()
    found = layer.values.grad.clone()
    layer.zero_grad()
    for times in (1, 2, 3):
        with torch.autocast(place, BF16):
            loss = layer(times * x).float().square().mean()
        loss.backward()
    torch.testing.assert_close(found, layer.values.grad, rtol=1e-5, atol=1e-6)


def test_a_weight_that_changes(place):
    """Backward reads the parameter, and says so if that was written; the next forward reads the new one."""
    layer, x = model_of(place, 1)[0], torch.randn(24, 128, device=place, requires_grad=True)
    with torch.autocast(place, BF16):
        y = layer(x)
        with torch.no_grad():
            layer.values.add_(1)  # as a step of an optimizer inside of one autocast
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()
        z = layer(x)
        layer.values.data.mul_(2)  # which torch does not count
        assert torch.equal(layer(x), copy.deepcopy(layer)(x)) and not torch.equal(layer(x), z)


def test_computed_values_of_fp32(place):
    """Values that are computed are kept as the 16-bit copy, not as what they were cast from."""
    W, x = random_bsr((128, 128), (32, 32), per_row=2, device=place), torch.randn(24, 128, device=place)
    leaf = W.values.float().requires_grad_()
    with torch.autocast(place, BF16):
        y = bsr_linear(x.requires_grad_(), W.with_values(leaf * 2))
    del W
    assert copies(leaf.shape) == 1 and copies(leaf.shape, torch.float32) == 1  # the leaf
    y.float().sum().backward()
    assert copies(leaf.shape) == 0 and leaf.grad is not None


def test_layers_are_saved_and_copied_between_forward_and_backward(place):
    layer, x = model_of(place, 1)[0], torch.randn(24, 128, device=place, requires_grad=True)
    with torch.autocast(place, BF16):
        y = layer(x)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
            assert torch.equal(other(x), y)
