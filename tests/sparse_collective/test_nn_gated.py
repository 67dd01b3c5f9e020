"""Gated layers; and modules call their children, so that hooks, subclasses, wrappers and sharding see each call."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cute_kernels.reference import gate
from cute_kernels.testing.reference import normal
from sparse_collective.nn import (
    BsrLinear,
    BsrMixtureOfExperts,
    DenseGradients,
    Float8SwiGLU,
    GatedBsrLinear,
    GatedLinear,
    InputNorms,
    Sparse24Config,
    SparsityConfig,
    SwiGLU,
    densify_,
    mask_2_4_,
    prune_,
    prune_2_4_,
    sparsify_,
)

from .nn_parts import ACTIVATIONS, BF16, near

BLOCK = (64, 64)


def gated_of(place="cpu", bias=False, dtype=BF16, **more) -> GatedBsrLinear:
    return GatedBsrLinear(128, 256, bias, BLOCK, density=0.6, device=place, dtype=dtype, **more)


def swiglu_of(place="cpu", bias=False) -> SwiGLU:
    return SwiGLU(128, 128, bias, BLOCK, density=0.6, device=place, dtype=BF16)


def dense_gate(layer: GatedBsrLinear, x: torch.Tensor) -> torch.Tensor:
    """The output in fp64."""
    z = x.double() @ layer.weight.to_dense().double().t()
    g, u = (z if layer.bias is None else z + layer.bias.double()).unflatten(-1, (-1, 2, 64)).unbind(-2)
    return (ACTIVATIONS[layer.activation](g) * u).flatten(-2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_gated_layer(place, activation, bias):
    layer, x = gated_of(place, bias, activation=activation), normal(20, 128, device=place).requires_grad_()
    y, wanted = layer(x), dense_gate(layer, x)
    assert y.shape == (20, 128)
    near(y, wanted, 2)
    y.float().square().sum().backward()
    assert layer.values.grad is not None and x.grad is not None and (not bias or layer.bias.grad is not None)
    with torch.no_grad():
        near(layer(x), wanted, 2)
        near(layer.eval()(x), wanted, 2)
    back = layer.to_linear()
    assert type(back) is GatedLinear and back.activation == activation
    near(back(x), wanted, 2)
    again = GatedBsrLinear.from_linear(back, BLOCK, activation=activation)
    assert torch.equal(again.weight.to_dense(), layer.weight.to_dense())


def test_autocast_and_state(place):
    layer, x = gated_of(place, True, torch.float32), torch.randn(20, 128, device=place)
    with torch.autocast(place, BF16):
        y = layer(x)
    assert y.dtype is BF16
    near(y, dense_gate(layer, x), 2)
    other = copy.deepcopy(layer)
    other.load_state_dict(gated_of(place, True, torch.float32).state_dict())
    other.load_state_dict(layer.state_dict())
    with torch.autocast(place, BF16):
        assert torch.equal(other(x), y)


def test_refused():
    with pytest.raises(ValueError, match="out_features is 192, the rows of gate and up .*; use a multiple of 128"):
        GatedBsrLinear(128, 192, blocksize=BLOCK, density=0.5)
    with pytest.raises(TypeError, match="gate_up is a GatedBsrLinear, got BsrLinear"):
        layer = swiglu_of()
        layer.gate_up = BsrLinear(128, 128, blocksize=BLOCK, density=0.5, dtype=BF16)
        Float8SwiGLU(layer)


# -- modules call their children ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["SwiGLU", "SwiGLU, bias", "experts"])
def test_checkpoints_recompute_what_they_computed(place, name, use_reentrant, compiled):
    """In training mode, results and gradients are bitwise those of a plain call, also without grad mode."""
    options = {"blocksize": (128, 128), "density": 0.75, "device": place, "dtype": BF16}
    if name == "experts":
        layer = BsrMixtureOfExperts(256, 256, 4, 2, group_rows=64, **options)
    else:
        layer = SwiGLU(256, 256, "bias" in name, **options)
    x = normal(150, 256, device=place).requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    y = run(x)
    with torch.no_grad():
        assert torch.equal(run(x), y)
    inputs = x, *layer.parameters()
    wanted = torch.autograd.grad(y.float().square().mean(), inputs)
    layer.zero_grad()
    again = checkpoint(run, x, use_reentrant=use_reentrant)
    assert torch.equal(again, y)
    again.float().square().mean().backward()  # a reentrant checkpoint has no autograd.grad
    assert all(torch.equal(t.grad, right) for t, right in zip(inputs, wanted, strict=True))


def composites(place) -> dict[str, nn.Module]:
    """Every module of sparse_collective.nn that contains other modules, in each form."""
    modules = {f"SwiGLU, bias={bias}": swiglu_of(place, bias) for bias in (False, True)}
    modules["Float8SwiGLU"] = Float8SwiGLU(swiglu_of(place))
    modules["experts"] = BsrMixtureOfExperts(
        128, 128, 4, 2, blocksize=BLOCK, density=0.5, group_rows=64, device=place, dtype=BF16
    )
    for name, change in (("2:4", prune_2_4_), ("masked", mask_2_4_), ("dense", densify_)):
        model = nn.Sequential(swiglu_of(place))
        change(model)
        modules[name] = model[0]
    return modules


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", list(composites("cpu")))
def test_every_child_is_called_once(place, name, grad):
    module, x = composites(place)[name], normal(70, 128, device=place)
    inference = name in ("Float8SwiGLU", "2:4")
    if grad and inference:
        pytest.skip("for inference alone")
    seen = []
    with torch.set_grad_enabled(grad):
        wanted = module(x)
        for path, child in module.named_children():
            child.register_forward_pre_hook(lambda layer, args, path=path: seen.append(f"before {path}"))
            child.register_forward_hook(lambda layer, args, y, path=path: seen.append(f"after {path}"))
        y = module(x)
        children = [path for path, _ in module.named_children()]
        assert sorted(seen) == sorted([f"{when} {path}" for path in children for when in ("before", "after")])
        assert torch.equal(y, wanted)
        handle = next(module.children()).register_forward_hook(lambda layer, args, y: torch.zeros_like(y))
        assert not torch.equal(module(x), wanted)  # what a hook returns is what goes on
        handle.remove()
    if grad:
        seen.clear()
        for path, child in module.named_children():
            child.register_full_backward_hook(lambda layer, *_, path=path: seen.append(path))
        module(x.requires_grad_()).float().sum().backward()
        assert set(children) <= set(seen)


class Wrapper(nn.Module):
    """A low-rank adapter around another layer."""

    def __init__(self, base: nn.Module, features: int):
        super().__init__()
        self.base, self.a = base, nn.Linear(128, 4, False, dtype=BF16)
        self.b = nn.Linear(4, features, False, dtype=BF16)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Subclass(GatedBsrLinear):
    def forward(self, x):
        return super().forward(x) * 2


def test_subclasses_and_wrappers_take_part(place):
    layer, x = swiglu_of(place), normal(20, 128, device=place)
    hidden = layer.gate_up(x)
    layer.gate_up.__class__ = Subclass
    assert torch.equal(layer(x), layer.down(2 * hidden))
    wrapper = layer.gate_up = Wrapper(layer.gate_up, 128).to(place)
    assert torch.equal(layer(x), layer.down(2 * hidden + wrapper.b(wrapper.a(x))))
    layer(x).float().sum().backward()
    assert wrapper.a.weight.grad is not None and wrapper.base.values.grad is not None
    layer.gate_up = gated_of(place, activation="gelu")
    near(layer(x), layer.down(dense_gate(layer.gate_up, x).to(BF16)).double())


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_other_modules_in_an_fp8_layer(part):
    layer, x = Float8SwiGLU(swiglu_of()), normal(20, 128)
    wanted = layer(x)
    setattr(layer, part, nn.Sequential(getattr(layer, part)))
    assert torch.equal(layer(x), wanted)
    other = Float8SwiGLU(swiglu_of())
    other.gate_up = type(other.gate_up)(gated_of(activation="gelu"))
    assert torch.equal(other(x), other.down(other.gate_up(x))) and other.gate_up.activation == "gelu"
    getattr(other, part).forward = lambda x: torch.zeros(20, 128, dtype=BF16)
    assert torch.equal(other(x), other.down(other.gate_up(x)))


def test_sharded_parts():
    """FSDP2 of each part alone, in one process."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.fsdp import fully_shard

    layer, x = swiglu_of(), normal(20, 128)
    wanted = layer(x)
    wanted.float().square().mean().backward()
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(layer.gate_up, mesh=mesh)
        fully_shard(layer.down, mesh=mesh)
        y = layer(x)
        assert torch.equal(y, wanted)
        y.float().square().mean().backward()
        for p, right in zip(layer.parameters(), gradients, strict=True):
            assert torch.equal(p.grad.full_tensor(), right)
        with torch.no_grad():
            near(layer(x), wanted.double(), 2)
    finally:
        dist.destroy_process_group()


# -- scores and swaps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_scores_see_gated_layers(place, bias):
    """Norms of inputs, and gradients of absent blocks, as a layer has them that stores all blocks."""
    layer = SwiGLU(128, 128, bias, BLOCK, density=1.0, device=place, dtype=BF16)
    x = normal(30, 128, device=place)
    with InputNorms(layer) as norms, DenseGradients(layer) as gradients:
        layer(x).float().square().mean().backward()
    for part in (layer.gate_up, layer.down):
        wanted = part.values.grad.float().norm(dim=(1, 2)).view(part.grid)
        torch.testing.assert_close(gradients.block_norms(part), wanted, rtol=0.03, atol=1e-6)
        assert norms.norms(part).shape == (128,)
    near(norms.norms(layer.gate_up), x.double().norm(dim=0), 1)
    with torch.no_grad():
        layer(x)
    prune_(layer.gate_up, 0.5, scores=norms)
    assert layer.gate_up.nnz == 4 and layer(x).isfinite().all()


def test_gradients_of_masked_layers(place):
    """z is that of the masked weight."""
    layer = BsrLinear(128, 128, True, BLOCK, density=1.0, activation="gelu", device=place, dtype=BF16)
    mask_2_4_(layer)
    x = normal(30, 128, device=place)
    with DenseGradients(layer) as gradients:
        layer(x).float().square().mean().backward()
    wanted = layer.values.grad.float().norm(dim=(1, 2)).view(layer.grid)
    torch.testing.assert_close(gradients.block_norms(layer), wanted, rtol=0.03, atol=1e-6)


def test_gradients_before_an_activation_that_is_not_known():
    class Own(BsrLinear):
        def forward(self, x):
            return super().forward(x) * 2

    layer = Own(128, 128, False, BLOCK, density=0.5, activation="gelu", dtype=BF16)
    with DenseGradients(layer), pytest.raises(TypeError, match="Own overrides forward and has an activation"):
        layer(normal(8, 128)).sum().backward()
    layer.activation = None
    with DenseGradients(layer) as gradients:
        layer(normal(8, 128)).sum().backward()
    assert gradients.block_norms(layer).shape == (2, 2)


def test_swaps_of_gated_layers(place):
    """From and to a dense layer, then to a 2:4 one, by the functions that change models."""
    layer, x = swiglu_of(place), normal(20, 128, device=place)
    layer.gate_up.activation = "gelu"
    wanted = layer(x)
    densify_(layer)
    assert type(layer.gate_up) is GatedLinear and type(layer.down) is nn.Linear
    near(layer(x), wanted.double(), 2)
    with DenseGradients(layer) as gradients:
        layer(x).float().square().mean().backward()
    norms = gradients.block_norms(layer.gate_up, BLOCK)
    blocks = layer.gate_up.weight.grad.float().unflatten(1, (-1, 64)).unflatten(0, (-1, 64))
    torch.testing.assert_close(norms, blocks.square().sum((1, 3)).sqrt(), rtol=0.03, atol=1e-6)
    other = copy.deepcopy(layer)
    sparsify_(layer, SparsityConfig(BLOCK, 1.0))
    assert type(layer.gate_up) is GatedBsrLinear and layer.gate_up.activation == "gelu"
    near(layer(x), wanted.double(), 2)
    mask_2_4_(other, Sparse24Config(dense=True))
    masked = other(x)
    masked.float().sum().backward()
    prune_2_4_(other, Sparse24Config(dense=True))
    assert other.gate_up.gated and other.gate_up.activation == "gelu" and "gated=True" in repr(other)
    with torch.no_grad():
        near(other(x), masked.double(), 2)


def test_a_dense_gate(place):
    layer, x = GatedLinear(64, 256, device=place, dtype=BF16), normal(5, 64, device=place)
    near(layer(x), gate(nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()), "silu"), 2)
