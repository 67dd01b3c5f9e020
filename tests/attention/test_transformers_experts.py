"""experts_implementation="cute_kernels": dense experts of transformers' models by the grouped GEMM."""

import copy
import importlib
import re
from pathlib import Path

import pytest
import torch

from cute_kernels.testing.reference import normal

transformers = pytest.importorskip("transformers")
from attention.integrations.transformers import register  # noqa: E402
from attention.integrations.transformers.experts import dense_experts, experts_forward  # noqa: E402
from sparse_collective.nn import BsrExperts, SparsityConfig, sparsify_  # noqa: E402

register()
BF16 = torch.bfloat16
SIZES = {
    "num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 96, "moe_intermediate_size": 96,
    "head_dim": 32,
}  # fmt: skip
TOKENS = torch.arange(48).view(2, 24)


def model_of(model_type, dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    if model_type == "qwen3_moe":
        config.num_experts = 4
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():  # biases are zeros, and experts of some models not initialized
            p.normal_(std=0.05)
    return model


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_model_forward_and_backward(model_type):
    """gpt_oss has transposed weights, biases and a gate of its own."""
    eager = model_of(model_type)
    ours = copy.deepcopy(eager)
    eager.set_experts_implementation("eager")
    ours.set_experts_implementation("cute_kernels")
    found = [model(TOKENS, labels=TOKENS) for model in (ours, eager)]
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=1e-5, atol=1e-6)  # routers compute in FP32
    for output in found:
        output.loss.backward()
    experts = 0
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        experts += p.grad.any().item() and "experts" in name
    assert experts >= 4


def test_from_pretrained(tmp_path):
    model_of("mixtral", BF16).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours, eager = (load(tmp_path, dtype=BF16, experts_implementation=name) for name in ("cute_kernels", "eager"))
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS).logits, eager(TOKENS).logits, rtol=0.05, atol=0.02)


def layer_of(place, dtype=BF16, model_type="mixtral"):
    layer = model_of(model_type, dtype).model.layers[0].mlp.experts.to(place)
    layer.config._experts_implementation = "cute_kernels"
    return layer


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_on_a_device(place, model_type):
    layer = layer_of(place, model_type=model_type)
    exact = copy.deepcopy(layer).double()
    exact.config = copy.deepcopy(layer.config)
    exact.config._experts_implementation = "eager"
    x, dy = normal(200, 64, device=place).requires_grad_(), normal(200, 64, device=place)
    x64 = x.detach().double().requires_grad_()
    index, weights = torch.rand(200, 4, device=place).argsort(1)[:, :2], torch.rand(200, 2, device=place)
    y, z = layer(x, index, weights), exact(x64, index, weights.double())
    y.backward(dy)
    z.backward(dy.double())
    pairs = [(y, z), (x.grad, x64.grad), *((p.grad, q.grad) for p, q in zip(layer.parameters(), exact.parameters()))]  # noqa: B905
    for found, truth in pairs:
        assert (found.double() - truth).abs().max() <= 0.03 * truth.abs().max()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_of_other_processes(model_type):
    layer = layer_of("cpu", torch.float64, model_type)
    x = torch.randn(40, 64, dtype=torch.float64, requires_grad=True)
    index, weights = torch.randint(6, (40, 2)).clamp(max=4), torch.rand(40, 2, dtype=torch.float64).requires_grad_()
    layer._is_expert_parallel = True
    here = weights.masked_fill(index == 4, 0.0)
    y, z = layer(x, index, weights), experts_forward(layer, x, index.clamp(max=3), here)
    torch.testing.assert_close(y, z)
    (grad,) = torch.autograd.grad(y.square().sum(), weights)
    assert not grad[index == 4].any() and grad[index < 4].all()
    assert not layer(x, torch.full_like(index, 4), weights).any()


def test_weights_are_shared_and_bad_shapes_raise():
    layer = layer_of("cpu")
    W = dense_experts(layer.down_proj, False)
    assert W.values.data_ptr() == layer.down_proj.data_ptr() and W.shape == (4, 64, 96) and W.density == 1.0
    assert dense_experts(layer.down_proj, False).pattern is W.pattern
    assert dense_experts(layer.down_proj, True).shape == (4, 96, 64)
    with pytest.raises(ValueError, match=r"multiples of 16, got \(2, 24, 32\); use \"grouped_mm\""):
        dense_experts(torch.zeros(2, 24, 32), False)
    with pytest.raises(ValueError, match="reserves"):
        register("grouped_mm")


def test_in_one_compiled_graph():
    torch._dynamo.reset()
    layer = layer_of("cpu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (30, 50):
        x, index = normal(tokens, 64).requires_grad_(), torch.rand(tokens, 4).argsort(1)[:, :2]
        weights, found = torch.rand(tokens, 2), []
        for module in (compiled, layer):
            layer.zero_grad()
            x.grad = None
            y = module(x, index, weights)
            y.square().sum().backward()
            found.append([y, x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*found)


def test_exported():
    layer = layer_of("cpu")
    args = normal(30, 64), torch.rand(30, 4).argsort(1)[:, :2], torch.rand(30, 2)
    torch.testing.assert_close(torch.export.export(layer, args).module()(*args), layer(*args))
    assert layer(*args).isfinite().all()  # cached indices are no fake tensors


class SmallConfig:
    """Sizes for the experts of any model: whatever the name of an attribute, a number that fits it."""

    _experts_implementation = "cute_kernels"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if re.fullmatch("hidden_act|hidden_activation|activation_function|mlp_hidden_act", name):
            return "silu"
        if "limit" in name or "alpha" in name:
            return 7.0
        if "eps" in name:
            return 1e-6
        if "expert" in name and ("num" in name or name.startswith("n_")):
            return 4
        return 64 if "hidden_size" in name and "moe" not in name else 32


def experts_classes():
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for name in re.findall(r"@use_experts_implementation[^\n]*\nclass (\w+)", path.read_text()):
            yield f"transformers.models.{path.parent.name}.{path.stem}", name


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), list(experts_classes()))
def test_every_experts_class_of_the_installed_transformers(module, name):
    """Ours are the numbers of eager; and of BsrExperts at density 1, where sparsify_ takes the class."""
    model = torch.nn.ModuleDict({"experts": getattr(importlib.import_module(module), name)(SmallConfig()).double()})
    layer, model["q"] = model["experts"], torch.nn.Linear(16, 16, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.2)
    first = getattr(layer, "gate_up_proj", getattr(layer, "up_proj", None))
    x = torch.randn(20, first.shape[1 if layer.is_transposed else 2], dtype=torch.float64)
    index, weights = torch.rand(20, 4).argsort(1)[:, :2], torch.rand(20, 2, dtype=torch.float64)
    with torch.no_grad():
        ours = layer(x, index, weights)
        layer.config._experts_implementation = "eager"
        torch.testing.assert_close(ours, layer(x, index, weights), rtol=1e-5, atol=1e-6)
        report = sparsify_(model, SparsityConfig((16, 16), 1.0))
        if len(report.changed) > 1:
            torch.testing.assert_close(model["experts"](x, index, weights), ours, rtol=1e-5, atol=1e-6)
    assert isinstance(model["experts"], BsrExperts) is (len(report.changed) == 3)
    if name in ("MixtralExperts", "Qwen2MoeExperts", "Qwen3MoeExperts", "DeepseekV3Experts", "OlmoeExperts"):
        assert not report.skipped
