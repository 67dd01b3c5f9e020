"""sparsify_(fuse=True): blocks of gate_proj, up_proj and down_proj become SwiGLU, and only where they compute it."""

import copy

import pytest
import torch
from torch import nn

from cute_kernels.testing.reference import normal
from sparse_collective.nn import (
    BsrLinear,
    InputNorms,
    SparsityConfig,
    SwiGLU,
    densify_,
    quantize_,
    sparsify_,
    sparsity,
)

from .nn_parts import BF16, near

BLOCK = (32, 32)
HALF = SparsityConfig(BLOCK, 0.5)


class Mlp(nn.Module):
    """A block as transformers has it."""

    def __init__(self, act=None, bias=False, dim=64, hidden=128, device=None, dtype=torch.float64):
        super().__init__()
        more = {"device": device, "dtype": dtype}
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias, **more) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias, **more)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.mlp, self.q = block, nn.Linear(64, 64, dtype=torch.float64)

    def forward(self, x):
        return self.mlp(self.q(x))


class Clipped(nn.Module):
    def forward(self, x):
        return nn.functional.gelu(x).clamp(-10, 10)


class Dropped(Mlp):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Swapped(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


ACTIVATIONS = {
    "silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU(), None: nn.Identity(),
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_same_numbers_as_unfused(name, bias):
    alone = Model(Mlp(ACTIVATIONS[name], bias)).eval()
    fused = copy.deepcopy(alone)
    state = torch.random.get_rng_state()
    sparsify_(alone, SparsityConfig(BLOCK, 0.4))
    report = sparsify_(fused, SparsityConfig(BLOCK, 0.4), fuse=True)
    assert torch.equal(state, torch.random.get_rng_state())
    assert type(fused.mlp) is SwiGLU and fused.mlp.gate_up.activation == name and not fused.mlp.training
    assert [(c.name, c.note) for c in report.changes] == [
        ("mlp.gate_up", "gate_proj and up_proj, fused"), ("mlp.down", "down_proj, fused"), ("q", ""),
    ]  # fmt: skip
    x = torch.randn(5, 64, dtype=torch.float64)
    y, z = alone(x), fused(x)
    torch.testing.assert_close(y, z)
    y.square().sum().backward(), z.square().sum().backward()
    torch.testing.assert_close(alone.mlp.down_proj.values.grad, fused.mlp.down.values.grad)
    torch.testing.assert_close(
        alone.mlp.gate_proj.values.grad.square().sum() + alone.mlp.up_proj.values.grad.square().sum(),
        fused.mlp.gate_up.values.grad.square().sum(),
    )
    counted = {c.name: (c.stored, c.after) for c in sparsity(fused).changes}
    assert counted == {c.name: (c.stored, c.after) for c in report.changes}
    densify_(fused)
    torch.testing.assert_close(fused(x), z)


@pytest.mark.parametrize("even_rows", [False, True])
@pytest.mark.parametrize("rows", [48, 128, 192])
def test_blocks_of_both_halves_are_scored_by_the_sum(rows, even_rows):
    model = Model(Mlp(dim=384, hidden=192))
    config = SparsityConfig((rows, 32), 0.5, even_rows=even_rows)
    gate, up = (linear.weight.detach() for linear in (model.mlp.gate_proj, model.mlp.up_proj))
    dense = copy.deepcopy(model.mlp)
    report = sparsify_(model, config, lambda module, fqn: "mlp" in fqn, fuse=True)
    assert len(report.changed) == 2 and type(model.mlp) is SwiGLU
    if rows == 128:  # 64 hidden features of both
        scores = sum(w.view(3, 64, 12, 32).transpose(1, 2).float().norm(dim=(2, 3)) for w in (gate, up))
        kept = scores.argsort(1)[:, 6:] if even_rows else scores.flatten().argsort()[18:]
        stored = model.mlp.gate_up.pattern.mask()
        assert stored.sum() == 18
        assert stored.gather(1, kept).all() if even_rows else stored.flatten()[kept].all()
        mask = stored.repeat_interleave(64, 0).repeat_interleave(32, 1)
        with torch.no_grad():
            dense.gate_proj.weight *= mask
            dense.up_proj.weight *= mask
        dense.down_proj = model.mlp.down
        x = torch.randn(3, 384, dtype=torch.float64)
        torch.testing.assert_close(model.mlp(x), dense(x))


def test_on_a_device(place):
    model = Model(Mlp(device=place, dtype=BF16))
    model.q = nn.Identity()
    exact, x = copy.deepcopy(model).double(), normal(40, 64, device=place)
    sparsify_(model, SparsityConfig((64, 64), 1.0), fuse=True)
    y, dy = model(x), normal(40, 64, device=place)
    z = exact(x.double())
    near(y, z, 2)
    y.backward(dy), z.backward(dy.double())
    near(model.mlp.down.weight.with_values(model.mlp.down.values.grad).to_dense(), exact.mlp.down_proj.weight.grad, 2)


def reason_of(model, config=HALF, filter_fn=None, count=3):
    report = sparsify_(model, config, filter_fn, fuse=True)
    assert not any(isinstance(m, SwiGLU) for m in model.modules())
    notes = {c.note for c in report.changed if "_proj" in c.name}
    assert len(notes) == 1 and sum(bool(c.note) for c in report.changed) == count
    assert notes.pop() in str(report)
    return next(c.note for c in report.changed if "_proj" in c.name)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Mlp(Clipped()), "computes no gated feed-forward layer with an activation of relu, gelu"),
        (Mlp(nn.PReLU(dtype=torch.float64)), "has further parameters .act_fn.weight"),
        (Dropped().eval(), "Dropped computes no gated"),
        (Swapped(), "Swapped computes no gated"),
        (Mlp(hidden=96), "96 hidden features are no multiple of 64"),
    ],
)
def test_what_computes_something_else_stays_single(block, why):
    model, x = Model(block), torch.randn(3, 64, dtype=torch.float64)
    model.eval()
    before = copy.deepcopy(model)(x)
    note = reason_of(model, SparsityConfig(BLOCK, 1.0))
    assert note.startswith("not fused: ")
    assert why.split(" .")[0] in note
    torch.testing.assert_close(model(x), before)
    assert all(isinstance(block.get_submodule(n), BsrLinear) for n in ("gate_proj", "up_proj", "down_proj"))


def test_further_reasons():
    assert "up_proj is not to be replaced" in reason_of(Model(Mlp()), filter_fn=lambda m, n: "up" not in n, count=2)
    densities = SparsityConfig(BLOCK, {"*gate_proj": 0.25, "*": 0.5})
    assert "densities 0.25 and 0.5" in reason_of(Model(Mlp()), densities)
    assert "the block is the model itself" in reason_of(Mlp())
    model = Model(Mlp())
    model.again = model.mlp.up_proj
    assert "up_proj has another place outside" in reason_of(model)
    model = Model(Mlp())
    model.mlp.forward = model.mlp.forward
    assert "forward of Mlp was replaced" in reason_of(model)
    model = Model(Mlp())
    model.mlp.register_forward_hook(lambda *_: None)
    assert "Mlp has hooks, which would be lost" in reason_of(model)
    model = Model(Mlp())
    model.mlp.up_proj.weight.requires_grad_(False)
    assert "requires_grad of gate_proj and up_proj differs" in reason_of(model)
    model = Model(Mlp())
    model.mlp.down_proj.register_forward_hook(lambda *_: None)
    assert "down_proj has hooks, which would be lost" in reason_of(model, count=2)


def test_shared_and_meta():
    model = Model(Mlp())
    model.twin = model.mlp
    sparsify_(model, SparsityConfig(BLOCK, 0.5), fuse=True)
    assert model.twin is model.mlp and type(model.mlp) is SwiGLU
    for block in ((32, 32), (128, 32)):
        meta, real = Model(Mlp(dim=128, device="meta")), Model(Mlp(dim=128))
        for m in (meta, real):
            sparsify_(m, SparsityConfig(block, 0.3), lambda module, fqn: "mlp" in fqn, fuse=True)
        shapes = [{k: t.shape for k, t in m.mlp.state_dict().items()} for m in (meta, real)]
        assert shapes[0] == shapes[1] and meta.mlp.gate_up.values.is_meta


def test_scores_of_the_single_layers_and_fp8():
    model = Model(Mlp(dim=128)).float()
    model.q = nn.Identity()
    with InputNorms(model) as norms:
        model(torch.randn(9, 128))
    sparsify_(model, SparsityConfig((128, 32), 0.5, scores=norms), fuse=True)
    quantize_(model)
    assert model.mlp(torch.randn(9, 128)).isfinite().all() and type(model.mlp).__name__ == "Float8SwiGLU"
