"""Functions that change the layers of a model: one filter, one report, shared layers, and nothing is left silent."""

import copy
import inspect
from functools import partial

import pytest
import torch
from torch import nn

from cute_kernels.testing.reference import normal
from sparse_collective.nn import (
    Bsr24Linear,
    BsrGroupedLinear,
    BsrLinear,
    Float8BsrLinear,
    Masked24BsrLinear,
    Report,
    Sparse24Config,
    Sparse24Linear,
    SparsityConfig,
    densify_,
    mask_2_4_,
    prune_2_4_,
    quantize_,
    sparsify_,
)

from .nn_parts import BF16

BLOCK = (64, 64)
CONFIG = SparsityConfig(BLOCK, 0.5)


def dense() -> nn.Linear:
    return nn.Linear(128, 128, dtype=BF16)


def sparse() -> BsrLinear:
    return BsrLinear(128, 128, blocksize=BLOCK, density=0.5, dtype=BF16)


# name -> (function of (model, filter_fn=...), what makes a layer, its class afterwards)
SWAPS = {
    "sparsify_": (partial(sparsify_, config=CONFIG), dense, BsrLinear),
    "densify_": (densify_, sparse, nn.Linear),
    "mask_2_4_": (mask_2_4_, sparse, Masked24BsrLinear),
    "prune_2_4_": (prune_2_4_, sparse, Bsr24Linear),
    "prune_2_4_ dense": (partial(prune_2_4_, config=Sparse24Config(dense=True)), dense, Sparse24Linear),
    "quantize_": (quantize_, sparse, Float8BsrLinear),
}
every = pytest.mark.parametrize("name", list(SWAPS))


class Model(nn.Module):
    """Layers a and b; a has a second name, and a third inside of a module that has two names itself."""

    def __init__(self, make):
        super().__init__()
        self.a, self.b = make(), make()
        self.again = self.a
        self.block = nn.Sequential(self.a, nn.ReLU())
        self.twin = self.block

    def forward(self, x):
        return self.again(self.b(self.twin(self.a(x))))


def test_one_signature():
    for function in (sparsify_, densify_, mask_2_4_, prune_2_4_, quantize_):
        signature = inspect.signature(function)
        config = [] if function is densify_ else ["config"]
        more = ["fuse"] if function is sparsify_ else []
        assert [*signature.parameters] == ["model", *config, "filter_fn", *more]
        assert signature.return_annotation == "Report"


def test_configs():
    for function, config in (
        (mask_2_4_, "Sparse24Config"),
        (prune_2_4_, "Sparse24Config"),
        (quantize_, "Float8Config"),
    ):
        with pytest.raises(TypeError, match=f"{function.__name__}: config must be a {config}, got function"):
            function(nn.Sequential(sparse()), lambda module, fqn: True)
    with pytest.raises(TypeError, match="dense must be True or False"):
        Sparse24Config(lambda module, fqn: True)


@every
@torch.no_grad()
def test_a_filter_gets_the_module_and_its_name(name):
    swap, make, kind = SWAPS[name]
    model, seen = nn.ModuleDict({"a": make(), "b": make()}), []
    layers = dict(model.named_modules())

    def accept(module, fqn):
        seen.append(module is layers[fqn])
        return fqn == "b"

    report = swap(model, filter_fn=accept)
    assert isinstance(report, Report) and [c.name for c in report.changed] == ["b"] and not report.skipped
    assert len(seen) == 2 and all(seen)
    assert type(model["b"]) is kind and type(model["a"]) is type(make())


@every
@pytest.mark.parametrize("fqn", ["a", "again", "block.0", "twin.0"])
@torch.no_grad()
def test_a_shared_layer_is_swapped_in_all_of_its_places(name, fqn):
    """Whichever of its names the filter accepts."""
    swap, make, kind = SWAPS[name]
    model, x = Model(make).eval(), normal(5, 128)
    report = swap(model, filter_fn=lambda module, name: name == fqn)
    assert [c.name for c in report.changed] == [fqn]
    assert type(model.a) is kind and type(model.b) is type(make())
    assert model.a is model.again is model.block[0] is model.twin[0] and model.block is model.twin
    assert model(x).isfinite().all()


def test_a_shared_layer_and_patterns():
    model = Model(dense)
    report = sparsify_(model, SparsityConfig(BLOCK, {"again": 0.25, "b": 0.5}))
    assert {c.name: c.density for c in report.changes} == {"a": 0.25, "b": 0.5}
    assert isinstance(model.a, BsrLinear) and model.a is model.again
    model = Model(dense)
    with pytest.raises(ValueError, match="one layer has the names 'a', 'again', .* the densities 0.25, 0.5"):
        sparsify_(model, SparsityConfig(BLOCK, {"a": 0.25, "again": 0.5}))
    assert type(model.b) is nn.Linear


@every
def test_nothing_to_change_raises(name):
    swap, make, _ = SWAPS[name]
    model = nn.ModuleDict({"first": make(), "second": make()})
    before = list(model.modules())
    with pytest.raises(ValueError, match="filter_fn accepts none of the 2 layers .'first', 'second'.; .*module first"):
        swap(model, filter_fn=lambda module, fqn: False)
    with pytest.raises(TypeError, match="filter_fn must be a function of .module, fqn., got str"):
        swap(model, filter_fn="first")
    with pytest.raises(ValueError, match=r"the model has no \w+"):
        swap(nn.Sequential(nn.ReLU()))
    assert list(model.modules()) == before


def test_advice_where_there_is_no_layer():
    for swap in (prune_2_4_, mask_2_4_):
        with pytest.raises(
            ValueError, match=r"has no BsrLinear or BsrGroupedLinear; pass Sparse24Config\(dense=True\)"
        ):
            swap(nn.Sequential(dense()))
        assert len(swap(nn.Sequential(dense()), Sparse24Config(dense=True)).changed) == 1


def test_patterns_that_fit_nothing_the_filter_accepts():
    model = nn.ModuleDict({"up": dense(), "down": dense()})
    with pytest.raises(
        ValueError, match=r"no pattern of config.density fits a layer that filter_fn accepts \('down'\)"
    ):
        sparsify_(model, SparsityConfig((32, 32), {"up": 0.5}), lambda module, fqn: fqn == "down")


def test_patterns_that_fit_nothing():
    model = nn.ModuleDict({"up": dense(), "down": dense()})
    with pytest.raises(ValueError, match=r"the pattern '\*.up' of config.density fits none of the model's 2 nn.Linear"):
        sparsify_(model, SparsityConfig(BLOCK, {"*.up": 0.5, "down": 0.25}))
    assert type(model["down"]) is nn.Linear
    report = sparsify_(model, SparsityConfig(BLOCK, {"u*": 0.5, "up": 0.25, "*": 1.0}))  # "up" comes second
    assert {c.name: c.density for c in report.changes} == {"up": 0.5, "down": 1.0}


class Experts(nn.Module):
    """Weights of experts as transformers has them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 128, 256, dtype=BF16))
        self.down_proj = nn.Parameter(torch.randn(4, 128, 128, dtype=BF16))


class Sparse(nn.Module):
    def __init__(self, linear=True):
        super().__init__()
        self.experts = Experts()
        self.position = nn.Parameter(torch.randn(1, 10, 128))
        self.conv = nn.Conv1d(4, 4, 3)
        if linear:
            self.q = dense()


@pytest.mark.parametrize("name", ["sparsify_", "prune_2_4_ dense", "mask_2_4_ dense"])
def test_experts_of_3_d_parameters_are_reported(name):
    swap = partial(mask_2_4_, config=Sparse24Config(dense=True)) if name == "mask_2_4_ dense" else SWAPS[name][0]
    model = Sparse()
    report = swap(model)
    assert [c.name for c in report.changed] == ["q"]
    assert [(c.name, c.shape) for c in report.skipped] == [
        ("experts.gate_up_proj", (4, 128, 256)),
        ("experts.down_proj", (4, 128, 128)),
    ]
    assert "4 x 128 x 256" in str(report) and "a 3-D parameter of Experts, not an nn.Linear" in str(report)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj \(4, 128, 256\) is a 3-D parameter of Experts"):
        swap(Sparse(), filter_fn=lambda module, fqn: "experts" in fqn)
    with pytest.raises(ValueError, match=r"has no .*; experts.gate_up_proj .* see BsrGroupedLinear"):
        swap(Sparse(linear=False))


def test_patterns_and_experts():
    report = sparsify_(Sparse(), SparsityConfig(BLOCK, {"experts.*": 0.5, "q": 0.5}))
    assert len(report.changed) == 1 and len(report.skipped) == 2
    report = sparsify_(Sparse(), SparsityConfig(BLOCK, {"q": 0.5}))
    assert not report.skipped  # no pattern asks for them


def test_our_own_experts_are_no_3_d_parameters():
    model = nn.ModuleDict({"experts": BsrGroupedLinear(4, 128, 128, blocksize=BLOCK, density=0.5), "q": dense()})
    assert not sparsify_(model, CONFIG).skipped


@pytest.mark.slow
def test_a_mixture_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    report = sparsify_(model, CONFIG, lambda module, fqn: fqn.endswith("q_proj"))
    assert len(report.changes) == 1  # the filter refuses the experts
    report = sparsify_(model, CONFIG, lambda module, fqn: fqn.endswith("experts"))
    assert [(len(c.shape), c.density) for c in report.changed] == [(3, 0.5)] * 2


def test_a_module_that_holds_itself():
    model = nn.ModuleDict({"a": dense()})
    model["again"] = nn.ModuleDict({"b": dense()})
    model["again"]._modules["up"] = model
    report = sparsify_(model, CONFIG)
    assert [c.name for c in report.changed] == ["a", "again.b"]


@every
def test_reports_count_what_is_stored(name):
    swap, make, _ = SWAPS[name]
    model = nn.Sequential(make())
    before = sum(p.numel() for p in copy.deepcopy(model).parameters())
    (change,) = swap(model).changed
    stored = {"values", "weight", "bias"}
    after = [*model.named_parameters(), *model.named_buffers()]
    assert change.before == before
    assert change.after == sum(t.numel() for path, t in after if path.split(".")[-1] in stored)
