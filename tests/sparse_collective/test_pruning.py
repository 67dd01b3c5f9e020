"""Selection of the stored blocks: scores, pruning, regrowth, the optimizer's state, and layers of a model."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix
from sparse_collective.nn import (
    Blocks,
    BsrLinear,
    CubicSchedule,
    DenseGradients,
    InputNorms,
    SparsityConfig,
    SwiGLU,
    carry_optimizer_state,
    change_pattern_,
    cosine_fraction,
    densify_,
    prune_,
    sparsify_,
)
from sparse_collective.pattern import Pattern, indices_of, random_keys, top_keys, top_keys_of_rows
from sparse_collective.pattern_update import moved, origins

from .nn_parts import layer_of, masked, near

BF16 = torch.bfloat16
READS = ("_local_scalar_dense", "nonzero", "unique2", "_unique2", "masked_select", "bincount", "equal")


class NoReads(TorchDispatchMode):
    """Nothing that reads a tensor's contents on the host, for which a GPU would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in READS, name
        if name == "index":  # a bool mask is a nonzero
            assert all(t is None or t.dtype is not torch.bool for t in args[1])
        return func(*args, **(kwargs or {}))


def dense(layer: BsrLinear) -> torch.Tensor:
    return layer.weight.to_dense().detach()


def grid_of(layer: BsrLinear, per_block: torch.Tensor) -> torch.Tensor:
    """(nnz,) as a grid, NaN where no block is stored."""
    grid = torch.full(layer.grid, float("nan"), device=per_block.device).flatten()
    return grid.index_copy(0, layer.pattern.keys(), per_block.float()).view(layer.grid)


# Patterns


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 7), (8, 3), (4, 0), (0, 3)])
def test_keys_and_indices(rows, cols):
    for nnz in {0, rows * cols // 3, rows * cols}:
        with NoReads():
            keys = random_keys(rows, cols, nnz)
            crow, col = indices_of(keys, rows, cols)
            pattern = Pattern(crow, col, (16 * rows, 16 * cols), (16, 16))
            again, mask = pattern.keys(), pattern.mask()
        assert torch.equal(again, keys) and torch.equal(mask.flatten().nonzero().flatten(), keys)
        assert pattern.error() == ""


def test_top_keys():
    scores = torch.tensor([[3.0, 1.0, 3.0], [2.0, float("nan"), 0.0]])
    assert top_keys(scores, 3).tolist() == [0, 2, 4], "NaN first, then the earlier of equal ones"
    assert top_keys(scores, 2).tolist() == [0, 4]
    assert top_keys_of_rows(scores, 1).tolist() == [0, 4]
    assert top_keys_of_rows(scores, 2).tolist() == [0, 2, 3, 4]


def test_origins():
    old, new = torch.tensor([1, 4, 9]), torch.tensor([0, 4, 5, 9, 12])
    origin = origins(old, new)
    assert origin.tolist() == [-1, 1, -1, 2, -1]
    blocks = torch.tensor([[1.0], [float("nan")], [3.0]])
    assert moved(blocks, origin).nan_to_num(7.0).flatten().tolist() == [0, 7, 0, 3, 0]


# Scores


def test_magnitude_and_gradient(place):  # noqa: F811
    layer = layer_of(place)
    with pytest.raises(ValueError, match="needs a gradient of the weight"):
        Blocks.of(layer).score("gradient")
    layer(normal(9, 128, device=place)).float().square().sum().backward()
    values, gradient = layer.values.detach().double(), layer.values.grad.double()
    found = Blocks.of(layer)
    torch.testing.assert_close(found.score("magnitude").double(), values.flatten(1).norm(dim=1), rtol=1e-5, atol=0)
    expected = (values * gradient).flatten(1).sum(1).abs()
    torch.testing.assert_close(found.score("gradient").double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.score(lambda blocks: blocks.columns), layer.col_indices.float())
    for wrong, message in (("size", "use one of magnitude, gradient"), (torch.ones(2), "have shape")):
        with pytest.raises(ValueError, match=message):
            found.score(wrong)
    with pytest.raises(TypeError, match="a name, a tensor or a function"):
        found.score(3)


def test_scores_of_a_dense_layer_are_those_of_its_blocks():
    layer = layer_of(density=1.0)
    linear = layer.to_linear()
    x = normal(9, 128)
    for module in (layer, linear):
        module(x).float().square().sum().backward()
    ours, theirs = Blocks.of(layer), Blocks.of(linear, (32, 32))
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.columns, theirs.columns)
    assert torch.equal(ours.score("magnitude"), theirs.score("magnitude"))
    torch.testing.assert_close(ours.score("gradient"), theirs.score("gradient"), rtol=0.1, atol=0.1)


def test_input_norms(place):  # noqa: F811
    """For Wanda: |W| times the norm of the feature, over all batches; of sparse and of dense layers."""
    model = nn.Sequential(layer_of(place), nn.Linear(96, 64, device=place, dtype=BF16))
    batches = [normal(2, 5, 128, device=place), normal(7, 128, device=place)]
    with InputNorms(model) as norms, torch.no_grad():
        for x in batches:
            model(x)
    model(batches[0])  # not seen
    x = torch.cat([b.flatten(0, -2) for b in batches]).double()
    torch.testing.assert_close(norms.norms(model[0]).double(), x.norm(dim=0), rtol=1e-4, atol=1e-5)
    layer = model[0]
    exact = grid_of(layer, Blocks.of(layer).score(norms))
    scored = (dense(layer).double().abs() * x.norm(dim=0)).view(3, 32, 4, 32).sum((1, 3))
    stored = layer.pattern.mask()
    torch.testing.assert_close(exact[stored].double(), scored[stored], rtol=1e-4, atol=1e-4)
    scored = Blocks.of(model[1], (32, 32)).score(norms)
    hidden = torch.cat([layer(b).flatten(0, -2) for b in batches]).double()
    expected = (model[1].weight.double().abs() * hidden.norm(dim=0)).view(2, 32, 3, 32).sum((1, 3)).flatten()
    torch.testing.assert_close(scored.double(), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(KeyError, match="has seen no input"):
        norms.norms(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="no nn.Linear and no BsrLinear"):
        InputNorms(nn.ReLU())


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_dense_gradients(place, activation, monkeypatch):  # noqa: F811
    """Block norms of the whole gradient, of several calls and in chunks, without a dense matrix."""
    from sparse_collective.nn.pruning import scores

    monkeypatch.setattr(scores, "CHUNK_BYTES", 4 * 32 * 128)  # one block row at a time
    layer = layer_of(place, activation=activation)
    weights, _ = masked(layer)
    act = {None: lambda z: z, "relu": torch.relu, "silu": nn.functional.silu}[activation]
    with DenseGradients(nn.ModuleList([layer])) as gradients:
        for x in (normal(2, 5, 128, device=place), normal(7, 128, device=place)):
            layer(x).float().square().sum().backward()
            act(weights(x.double())).square().sum().backward()
    exact = weights.weight.grad.view(3, 32, 4, 32).square().sum((1, 3)).sqrt()
    near(gradients.block_norms(layer), exact, 2)
    gradients.clear()
    with pytest.raises(KeyError, match="no gradient has come"):
        gradients.block_norms(layer)


# Pruning


@pytest.mark.parametrize("scores", ["magnitude", "gradient", "tensor"])
def test_prune(place, scores):  # noqa: F811
    layer = layer_of(place, density=0.75)
    layer(normal(9, 128, device=place)).float().square().sum().backward()
    values, before, gradient = layer.values, dense(layer), layer.values.grad.clone()
    given = torch.rand(layer.nnz, device=place) if scores == "tensor" else scores
    found = grid_of(layer, Blocks.of(layer).score(given)).nan_to_num(-1.0)
    assert prune_(layer, 0.34, scores=given) is layer
    expected = torch.zeros(12, dtype=torch.bool, device=place)
    expected[found.flatten().argsort(descending=True)[:4]] = True
    assert torch.equal(layer.pattern.mask().flatten(), expected)
    assert layer.values is values and layer.nnz == 4 == len(values) == len(values.grad)
    mask = expected.view(3, 4).repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(dense(layer), before * mask)
    assert all(any(torch.equal(g, other) for other in gradient) for g in values.grad)
    x = normal(5, 128, device=place)
    near(layer(x), masked(layer)[0](x.double()))
    layer(x).sum().backward()


def test_prune_blocks_of_each_row(place):  # noqa: F811
    layer = layer_of(place, density=0.75)
    found = grid_of(layer, Blocks.of(layer).score("magnitude")).nan_to_num(-1.0)
    prune_(layer, per_row=2)
    assert layer.crow_indices.tolist() == [0, 2, 4, 6] and layer.weight.even
    assert torch.equal(layer.pattern.mask(), found >= found.topk(2, dim=1).values[:, -1:])
    with pytest.raises(ValueError, match="per_row is 3; the shortest block row has 2 blocks"):
        prune_(layer, per_row=3)
    negative = -torch.rand(layer.nnz, device=place)
    negative[0] = -math.inf
    prune_(layer, per_row=1, scores=negative)
    assert layer.nnz == 3


def test_bad_prunes():
    layer = layer_of(density=0.5)
    for arguments, error, message in (
        ({}, ValueError, "either density or per_row"),
        ({"density": 0.5, "per_row": 1}, ValueError, "either density or per_row"),
        ({"density": 0.75}, ValueError, r"density 0.75 is not in \[0, 0.5\]"),
        ({"density": -0.1}, ValueError, "density -0.1"),
    ):
        with pytest.raises(error, match=message):
            prune_(layer, **arguments)
    with pytest.raises(TypeError, match="prune_ needs a BsrLinear, got Linear"):
        prune_(nn.Linear(1, 1), 0.5)
    with pytest.raises(ValueError, match="on the meta device"):
        prune_(layer_of("meta"), 0.5)
    nnz, col = layer.nnz, layer.col_indices
    prune_(layer, 0.5)
    assert layer.nnz == nnz and layer.col_indices is col


def test_schedules():
    schedule = CubicSchedule(0.1, 100, 200, start=0.9)
    assert [schedule(step) for step in (0, 100, 200, 999)] == [0.9, 0.9, 0.1, 0.1]
    assert schedule(150) == pytest.approx(0.1 + 0.8 / 8)
    falling = [schedule(step) for step in range(90, 210)]
    assert falling == sorted(falling, reverse=True)
    for wrong in ((0.5, 10, 10, 1.0), (0.5, 0, 10, 0.4), (-0.1, 0, 10, 1.0)):
        with pytest.raises(ValueError, match="must"):
            CubicSchedule(*wrong)
    assert [cosine_fraction(step, 0.3, 100) for step in (0, 100, 200)] == [0.3, 0.0, 0.0]
    assert cosine_fraction(50, 0.3, 100) == pytest.approx(0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_graph_of_the_step_before_may_live(dtype):
    """A training loop's `loss` does."""
    layer, x = BsrLinear(64, 64, blocksize=(16, 16), density=1.0, dtype=dtype), torch.randn(4, 64, dtype=dtype)
    for density in (1.0, 0.5, 0.25):
        prune_(layer, density)
        loss = layer(x).sum()
        loss.backward()
        assert layer.values.grad.shape == layer.values.shape == (16 * density, 16, 16)
        layer.zero_grad()
    del loss


def test_prune_by_a_schedule():
    layer = layer_of(density=1.0, grid=(8, 8), block=(16, 16))
    optimizer = torch.optim.AdamW(layer.parameters())
    schedule = CubicSchedule(0.25, 0, 6)
    counts = []
    for step in range(8):
        layer(normal(9, 128)).float().square().mean().backward()
        optimizer.step()
        prune_(layer, schedule(step), optimizer=optimizer)
        counts.append(layer.nnz)
        assert len(optimizer.state[layer.values]["exp_avg"]) == layer.nnz
    assert counts == sorted(counts, reverse=True) and counts[0] == 64 and counts[-1] == 16


# Regrowth


@pytest.mark.parametrize("even_rows", [False, True])
@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_change_the_pattern(place, grow, even_rows):  # noqa: F811
    layer = layer_of(place, density=0.5, grid=(6, 8), block=(16, 32))
    optimizer = torch.optim.AdamW(layer.parameters())
    x = normal(9, 256, device=place)
    with DenseGradients(layer) as gradients:
        layer(x).float().square().sum().backward()
    optimizer.step()
    W = layer.weight
    kept = (
        layer.values,
        layer.crow_indices,
        layer.col_indices,
        layer.values.grad,
        *optimizer.state[layer.values].values(),
    )
    addresses, plans = [t.data_ptr() for t in kept], W.pattern
    old, before, scores = layer.pattern.clone(), dense(layer), Blocks.of(layer).score("magnitude")
    moments = W.with_values(optimizer.state[layer.values]["exp_avg"].clone()).to_dense()
    gradient = W.with_values(layer.values.grad.clone()).to_dense()
    wanted = gradients.block_norms(layer) if grow == "gradient" else "random"
    with NoReads():
        change_pattern_(layer, 0.25, grow=wanted, even_rows=even_rows, optimizer=optimizer)
    after = (
        layer.values,
        layer.crow_indices,
        layer.col_indices,
        layer.values.grad,
        *optimizer.state[layer.values].values(),
    )
    assert [t.data_ptr() for t in after] == addresses and all(a is b for a, b in zip(kept, after, strict=True))
    assert layer.weight.pattern is plans and layer.pattern.error() == "" and layer.weight.checked
    assert layer.weight.even == even_rows
    was, now = old.mask(), layer.pattern.mask()
    if even_rows:
        assert (now.sum(1) == 4).all() and ((now & was).sum(1) >= 3).all()
    else:
        assert now.sum() == 24 and (now & was).sum() >= 18
        survivors = torch.zeros(48, dtype=torch.bool, device=place)
        survivors[old.keys()[scores.argsort(descending=True)[:18]]] = True
        assert now.flatten()[survivors].all(), "the blocks of highest score stay"
        if grow == "gradient":
            others = torch.where(survivors, -1.0, wanted.flatten())
            assert torch.equal(now.flatten() & ~survivors, others >= others.topk(6).values[-1])
    both = (now & was).repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.equal(dense(layer), before * both), "blocks that stay keep their values, others begin at zero"
    carried = layer.weight.with_values(optimizer.state[layer.values]["exp_avg"]).to_dense()
    assert torch.equal(carried, moments * both)
    assert torch.equal(layer.weight.with_values(layer.values.grad).to_dense(), gradient * both)
    near(layer(x), masked(layer)[0](x.double()))
    optimizer.step()


def test_compiled_layers_follow_the_pattern(place):  # noqa: F811
    torch._dynamo.reset()
    layer = layer_of(place, density=0.5, grid=(6, 8))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = normal(9, 256, device=place)
    compiled(x).sum().backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        change_pattern_(layer, 0.5, grow="random")
        nn.init.normal_(layer.values)
        layer.values.grad = None
        y = compiled(x)
        near(y, masked(layer)[0](x.double()))
        y.float().square().sum().backward()
        found = layer.values.grad.clone()
        layer.values.grad = None
        layer(x).float().square().sum().backward()
        torch.testing.assert_close(found, layer.values.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_edges_of_change():
    layer = layer_of(density=1.0)
    before = dense(layer)
    change_pattern_(layer, 1.0, grow="random")
    assert torch.equal(dense(layer), before), "what is dropped may grow again, and keeps its values"
    change_pattern_(layer, 0.0, grow=torch.full((3, 4), -math.inf))
    assert torch.equal(dense(layer), before)
    layer = layer_of(density=0.5)
    change_pattern_(layer, 0.5, grow=torch.full((3, 4), -math.inf))
    assert layer.pattern.error() == ""
    change_pattern_(layer, 0.5, grow=torch.full((3, 4), float("nan")))
    assert layer.pattern.error() == ""
    empty = layer_of(density=0.0)
    assert change_pattern_(empty, 0.5, grow="random").nnz == 0
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    twins = [copy.deepcopy(layer) for _ in generators]
    for twin, generator in zip(twins, generators, strict=True):
        change_pattern_(twin, 0.5, grow="random", generator=generator)
    assert torch.equal(twins[0].col_indices, twins[1].col_indices)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fraction": 1.5, "grow": "random"}, ValueError, r"fraction is 1.5; it must be in \[0, 1\]"),
        ({"fraction": 0.5, "grow": "gradient"}, ValueError, 'pass "random" or a tensor'),
        ({"fraction": 0.5, "grow": 3}, TypeError, "must be a tensor or"),
        ({"fraction": 0.5, "grow": torch.ones(2, 2)}, ValueError, r"grow has shape \(2, 2\); the blocks are \(3, 4\)"),
        ({"fraction": 0.5, "grow": torch.ones(3, 4), "generator": torch.Generator()}, ValueError, "alone"),
        ({"fraction": 0.5, "grow": "random", "even_rows": True}, ValueError, "block rows hold equally many"),
    ],
)
def test_bad_changes(arguments, error, message):
    layer = layer_of(density=5 / 12)
    with pytest.raises(error, match=message):
        change_pattern_(layer, **arguments)


def test_optimizer_state_by_hand():
    layer = layer_of(density=0.5)
    optimizer = torch.optim.Adam(layer.parameters(), amsgrad=True)
    carry_optimizer_state(optimizer, layer.values, layer.pattern, layer.pattern)  # no state yet
    layer(normal(9, 128)).float().square().sum().backward()
    optimizer.step()
    state = optimizer.state[layer.values]
    old, steps = layer.pattern.clone(), state["step"].clone()
    before = {k: layer.weight.with_values(state[k].clone()).to_dense() for k in ("exp_avg", "max_exp_avg_sq")}
    change_pattern_(layer, 0.5, grow="random")
    carry_optimizer_state(optimizer, layer.values, old, layer.pattern)
    both = (old.mask() & layer.pattern.mask()).repeat_interleave(32, 0).repeat_interleave(32, 1)
    for name, was in before.items():
        assert torch.equal(layer.weight.with_values(state[name]).to_dense(), was * both)
    assert torch.equal(state["step"], steps)
    state["factors"] = torch.ones(7)
    with pytest.raises(ValueError, match="the optimizer's factors has shape"):
        carry_optimizer_state(optimizer, layer.values, old, layer.pattern)
    with pytest.raises(ValueError, match="patterns of"):
        carry_optimizer_state(optimizer, layer.values, old, layer_of(grid=(2, 4)).pattern)


def test_regrowth_finds_the_blocks_of_a_sparse_teacher():
    """A toy task: the teacher's blocks are found by gradients, and the loss falls below that of a fixed pattern."""
    teacher = layer_of(density=0.25, grid=(4, 8), block=(16, 16), bias=False, dtype=torch.float32)
    losses = {}
    for kind in ("fixed", "regrown"):
        torch.manual_seed(3)
        layer = layer_of(density=0.25, grid=(4, 8), block=(16, 16), bias=False, dtype=torch.float32)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01, weight_decay=0.0)
        for step in range(60):
            x = torch.randn(128, 128)
            change = kind == "regrown" and step % 6 == 5 and step < 50
            gradients = DenseGradients(layer)
            with torch.autocast("cpu", BF16):
                if change:
                    gradients.__enter__()
                loss = (layer(x).float() - teacher(x).float().detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            gradients.__exit__()
            if change:
                change_pattern_(layer, 0.3, grow=gradients.block_norms(layer), optimizer=optimizer)
            else:
                optimizer.step()
        losses[kind] = loss.item()
        found = (layer.pattern.mask() & teacher.pattern.mask()).sum().item()
    assert found >= 7 and losses["regrown"] < 0.5 * losses["fixed"]


# Models


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in "ab"])
        self.odd = nn.Linear(64, 50)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.blocks[0]  # a second place of the same layers

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) + self.odd(x)


def test_sparsify_and_densify(place):  # noqa: F811
    model = Model().to(place, BF16)
    weights = copy.deepcopy(model)
    report = sparsify_(model, SparsityConfig((32, 32), 0.5))
    assert [c.name for c in report.changed] == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    assert {c.name: c.skipped for c in report.skipped} == {
        "odd": "out_features is 50, no multiple of 32; pad it to 64",
        "head": "shares a parameter with another module",
    }
    assert model.again is model.blocks[0] and isinstance(model.again[0], BsrLinear)
    kept = BsrMatrix.from_dense(weights.blocks[1][2].weight.detach(), (32, 32), density=0.5)
    assert torch.equal(dense(model.blocks[1][2]), kept.to_dense())
    text = str(report)
    assert "blocks.0.0" in text and "4 of 8" in text and "skipped: out_features is 50" in text
    assert "4 of 6 layers" in text.splitlines()[-1]
    assert report.changed[0].before == 64 * 128 + 128 and report.changed[0].after == 64 * 64 + 128
    tokens = torch.randint(50, (2, 7), device=place)
    y = model(tokens)
    y.float().square().mean().backward()
    assert model.blocks[0][0].values.grad is not None
    back = densify_(model)
    assert len(back.changed) == 4 and not back.skipped and not any(isinstance(m, BsrLinear) for m in model.modules())
    near(model(tokens), y.double())
    assert set(model.state_dict()) == set(weights.state_dict()) and model.again is model.blocks[0]


def test_densities_by_name_filters_and_rows():
    model = Model()
    config = SparsityConfig((32, 32), {"blocks.0.*": 0.25, "blocks.*": 0.5}, even_rows=True)
    report = sparsify_(model, config, lambda module, fqn: not fqn.endswith(".2"))
    assert {c.name: c.density for c in report.changes} == {"blocks.0.0": 0.0, "blocks.1.0": 0.5}
    assert model.blocks[1][0].weight.even and isinstance(model.blocks[1][2], nn.Linear)


def test_sparsify_by_activations_and_gradients():
    model = Model()
    with InputNorms(model) as norms:
        model(torch.randint(50, (4, 9))).square().mean().backward()
    expected = Blocks.of(model.blocks[0][0], (32, 32)).score(norms)
    sparsify_(model, SparsityConfig((32, 32), {"blocks.0.*": 0.5}, scores=norms))
    assert torch.equal(model.blocks[0][0].pattern.keys(), top_keys(expected.view(4, 2), 4))
    expected = Blocks.of(model.blocks[1][0], (32, 32)).score("gradient")
    sparsify_(model, SparsityConfig((32, 32), {"blocks.1.*": 0.5}, scores="gradient"))
    assert torch.equal(model.blocks[1][0].pattern.keys(), top_keys(expected.view(4, 2), 4))


def test_what_is_left_alone():
    model = nn.Module()
    model.attention = nn.MultiheadAttention(64, 4)
    model.hooked = nn.Linear(64, 64)
    model.hooked.register_forward_hook(lambda *_: None)
    model.complex = nn.Linear(64, 64, dtype=torch.complex64)
    model.own = BsrLinear(64, 64, blocksize=(32, 32), density=0.5)
    model.gated = SwiGLU(64, 64, blocksize=(32, 32), density=0.5)
    model.fused = BsrLinear(64, 64, blocksize=(32, 32), density=0.5, activation="silu")
    model.twice = nn.Module()
    model.twice.a = model.twice.b = nn.Linear(64, 64)
    report = sparsify_(model, SparsityConfig((32, 32), 0.5))
    assert isinstance(model.twice.a, BsrLinear) and model.twice.a is model.twice.b
    assert [c.name for c in report.changed] == ["twice.a"]
    assert {c.name: c.skipped for c in report.skipped} == {
        "attention.out_proj": "is a NonDynamicallyQuantizableLinear",
        "hooked": "has hooks, which would be lost",
        "complex": "values cannot be torch.complex64; use one of torch.bfloat16, torch.float16, torch.float32, on the "
        "CPU also torch.float64 (multiply real and imaginary parts separately, cast with .to())",
    }
    report = densify_(model)
    assert [c.name for c in report.changed] == ["own", "gated.gate_up", "gated.down", "twice.a"]
    assert [(c.name, c.skipped) for c in report.skipped] == [("fused", "applies silu, which nn.Linear does not")]
    with pytest.raises(ValueError, match="use BsrLinear.from_linear"):
        sparsify_(nn.Linear(64, 64), SparsityConfig())
    with pytest.raises(ValueError, match="to_linear"):
        densify_(layer_of())
    with pytest.raises(TypeError, match="config must be a SparsityConfig"):
        sparsify_(model, 0.5)
    with pytest.raises(ValueError, match="multiple of 16"):
        SparsityConfig((32, 30))
    with pytest.raises(ValueError, match="density is 2"):
        SparsityConfig(density={"*": 2.0})


def test_transformer_encoder():
    """Its inference path reads the weights of its linear layers; with a BsrMatrix among them it is not taken."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(BF16).eval()
    report = sparsify_(model, SparsityConfig((32, 32), 1.0))
    assert len(report.changed) == 4 and len(report.skipped) == 2
    x, padding = normal(2, 7, 64), torch.zeros(2, 7, dtype=torch.bool)
    with torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
        densify_(model)
        near(y, model(x, src_key_padding_mask=padding).double(), 2)


def test_a_model_on_the_meta_device_takes_a_sparse_state():
    source = Model().to(BF16)
    sparsify_(source, SparsityConfig((32, 32), 0.5))
    with torch.device("meta"):
        model = Model().to(BF16)
    assert len(sparsify_(model, SparsityConfig((32, 32), 0.25)).changed) == 4
    model.load_state_dict(source.state_dict(), assign=True)
    tokens = torch.randint(50, (2, 7))
    assert torch.equal(model(tokens), source(tokens))
