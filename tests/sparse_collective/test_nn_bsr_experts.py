"""BsrExperts, and sparsify_ of modules of experts as transformers has them, against the dense experts."""

import copy

import pytest
import torch
from torch import nn

from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix
from sparse_collective.nn import (
    BsrExperts,
    BsrGroupedLinear,
    InputNorms,
    SparsityConfig,
    densify_,
    quantize_,
    sparsify_,
    sparsity,
)

from .nn_parts import BF16, near

BLOCK = (32, 32)
ACTIVATIONS = {
    "silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU(), None: nn.Identity(),
}  # fmt: skip


class Experts(nn.Module):
    """Dense experts with transformers' parameters and signature."""

    def __init__(self, act=None, experts=4, dim=64, hidden=96, device=None, dtype=BF16):
        super().__init__()
        self.num_experts, self.hidden_dim = experts, dim
        self.gate_up_proj = nn.Parameter(normal(experts, 2 * hidden, dim, device=device, dtype=dtype) / 8)
        self.down_proj = nn.Parameter(normal(experts, dim, hidden, device=device, dtype=dtype) / 8)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states.view(-1, self.hidden_dim))
        for e in range(self.num_experts):
            token, choice = torch.where(top_k_index == e)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2, -1)
            h = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[e])
            y.index_add_(0, token, (h * top_k_weights[token, choice, None]).to(y.dtype))
        return y


class Interleaved(Experts):
    """Another gate, of the same parameters."""

    def forward(self, x, index, weights):
        z = torch.einsum("tjmk,tk->tjm", self.gate_up_proj[index], x)
        h = self.act_fn(z[..., ::2]) * z[..., 1::2]
        return (torch.einsum("tjmk,tjk->tjm", self.down_proj[index], h) * weights[..., None]).sum(1)


def routing(tokens, experts, device, k=2):
    index = torch.rand(tokens, experts, device=device).argsort(1)[:, :k]
    return index, torch.rand(tokens, k, device=device, dtype=torch.float32)


def masked_(dense, sparse):
    """Dense experts whose dropped blocks are zeros."""
    with torch.no_grad():
        for weight, layer in ((dense.gate_up_proj, sparse.gate_up), (dense.down_proj, sparse.down)):
            weight.copy_(layer.weight.to_dense())
    return dense


@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_the_dense_experts(place, name, density):
    model = nn.ModuleDict({"experts": Experts(ACTIVATIONS[name], device=place)}).eval()
    dense = copy.deepcopy(model["experts"]).double()
    report = sparsify_(model, SparsityConfig(BLOCK, density))
    sparse = model["experts"]
    assert type(sparse) is BsrExperts and sparse.activation == name and not sparse.training
    assert [(c.name, c.shape, c.density, c.note) for c in report.changes] == [
        ("experts.gate_up", (4, 192, 64), density, "gate_up_proj of Experts"),
        ("experts.down", (4, 64, 96), density, "down_proj of Experts"),
    ]
    assert [(c.stored, c.after) for c in sparsity(model).changes] == [(c.stored, c.after) for c in report.changes]
    if density == 0.5:
        w, kept = dense.gate_up_proj.detach()[2].view(6, 32, 2, 32), sparse.gate_up.pattern.mask()[2]
        norms = w.transpose(1, 2).norm(dim=(2, 3))
        assert kept.sum() == 6 and norms[kept].min() > norms[~kept].max()
    masked_(dense, sparse)
    index, weights = routing(75, 4, place)
    x, dy = normal(75, 64, device=place).requires_grad_(), normal(75, 64, device=place)
    weights.requires_grad_()
    x64, weights64 = (t.detach().double().requires_grad_() for t in (x, weights))
    y, exact = sparse(x, index, weights), dense(x64, index, weights64)
    near(y, exact.detach(), 2)
    y.backward(dy)
    exact.backward(dy.double())
    near(x.grad, x64.grad, 3)
    near(weights.grad, weights64.grad, 3)
    for layer, weight in ((sparse.gate_up, dense.gate_up_proj), (sparse.down, dense.down_proj)):
        stored = layer.pattern.mask().repeat_interleave(32, -2).repeat_interleave(32, -1)
        near(layer.weight.with_values(layer.values.grad).to_dense(), weight.grad * stored, 3)


def test_no_tokens_and_a_compiled_graph(place):
    torch._dynamo.reset()
    model = nn.ModuleDict({"experts": Experts(device=place)})
    sparsify_(model, SparsityConfig(BLOCK, 0.5))
    layer = model["experts"]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (0, 30, 50):
        x, (index, weights) = normal(tokens, 64, device=place), routing(tokens, 4, place)
        torch.testing.assert_close(layer(x, index, weights), compiled(x, index, weights))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Interleaved(), "Interleaved computes no gated feed-forward layer"),
        (Experts(nn.Hardswish()), "Experts computes no gated feed-forward layer"),
        (Experts(hidden=80), "no multiple of 32"),
    ],
)
def test_what_stays_dense(module, why):
    model = nn.ModuleDict({"experts": module, "q": nn.Linear(64, 64, dtype=BF16)})
    report = sparsify_(model, SparsityConfig(BLOCK, 0.5))
    assert model["experts"] is module and [c.name for c in report.changed] == ["q"]
    assert [c.name for c in report.skipped] == ["experts.gate_up_proj", "experts.down_proj"]
    assert all(why in c.skipped for c in report.skipped)


def test_further_reasons():
    def reason(model, config=SparsityConfig(BLOCK, 0.5)):  # noqa: B008
        (why,) = {c.skipped for c in sparsify_(model, config).skipped}
        return why

    assert "fit only one of gate_up_proj and down_proj" in reason(
        nn.ModuleDict({"experts": Experts()}), SparsityConfig(BLOCK, {"*gate_up_proj": 0.5})
    )
    model = nn.ModuleDict({"experts": Experts(), "q": nn.Linear(64, 64, dtype=BF16)})
    assert "InputNorms sees the inputs of nn.Linear only" in reason(
        nn.ModuleDict({"experts": Experts()}), SparsityConfig(BLOCK, 0.5, scores=InputNorms(model))
    )
    model["again"] = Experts()
    model["again"].down_proj = model["experts"].down_proj
    assert "shares down_proj with another module" in reason(model)


def test_densities_by_name_and_gradients():
    model = nn.ModuleDict({"experts": Experts()})
    model["experts"](normal(20, 64), *routing(20, 4, "cpu")).sum().backward()
    config = SparsityConfig(BLOCK, {"*gate_up_proj": 0.5, "*down_proj": 0.7}, scores="gradient", even_rows=True)
    sparsify_(model, config)
    assert [c.density for c in sparsity(model).changes] == [0.5, 2 / 3]
    rows = model["experts"].gate_up.crow_indices.diff(dim=1)
    assert rows.unique().numel() == 1


def test_meta_has_the_same_shapes():
    found = []
    for device in ("meta", "cpu"):
        model = nn.ModuleDict({"experts": Experts()}).to(device)
        sparsify_(model, SparsityConfig(BLOCK, 0.4))
        found.append({name: t.shape for name, t in model.state_dict().items()})
    assert found[0] == found[1]


def test_other_functions_leave_them():
    model = nn.ModuleDict({"experts": Experts()})
    sparsify_(model, SparsityConfig(BLOCK, 0.5))
    for function in (quantize_, densify_):
        assert {c.name for c in function(model).skipped} == {"experts.gate_up", "experts.down"}


def test_a_grouped_layer_of_matrices():
    matrices = [BsrMatrix.from_dense(normal(64, 96), BLOCK, density=0.1 * i) for i in range(3)]
    W, bias = BsrMatrix.stack(matrices), normal(3, 64)
    layer = BsrGroupedLinear.from_bsr(W, bias, activation="relu")
    assert torch.equal(layer.weight.to_dense(), W.to_dense()) and torch.equal(layer.bias, bias)
    assert layer.values.data_ptr() != W.values.data_ptr() and layer.activation == "relu"
    with pytest.raises(ValueError, match=r"needs a batch \(E, M, K\), got one matrix"):
        BsrGroupedLinear.from_bsr(matrices[0])
    with pytest.raises(ValueError, match=r"bias has shape \(64,\), must be \(3, 64\)"):
        BsrGroupedLinear.from_bsr(W, bias[0])
    with pytest.raises(TypeError, match="needs a BsrMatrix, got Tensor"):
        BsrGroupedLinear.from_bsr(bias)


def test_bad_arguments():
    def grouped(rows, columns, experts=2):
        return BsrGroupedLinear(experts, columns, rows, blocksize=BLOCK, density=1.0)

    with pytest.raises(ValueError, match=r"gate_up is \(2, 128, 32\) and down \(2, 32, 32\)"):
        BsrExperts(grouped(128, 32), grouped(32, 32))
    for more, message in (
        ({"activation": "tanh"}, "activation 'tanh'"),
        ({"group_rows": 96}, "positive multiple of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            BsrExperts(grouped(128, 32), grouped(32, 64), **more)
