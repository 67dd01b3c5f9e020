"""FP8 layers for inference, and the documents' recipe for training with an FP8 forward pass."""

import copy
import math
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from cute_kernels import gemm, quantize, quantize_gated
from cute_kernels.reference import gate
from sparse_collective import bsr_gated_linear, bsr_linear, dispatch, random_bsr
from sparse_collective.nn import (
    Bsr24Linear,
    BsrLinear,
    Float8BsrLinear,
    Float8Config,
    Float8SwiGLU,
    Sparse24Linear,
    SwiGLU,
    fp8,
    prune_2_4_,
    quantize_,
)

from ..emulator.ops import needs_compiler, on_emulator

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
HOWTO = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "fp8.md").read_text()
ONE_PLACE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def feed_forward(where="cpu", bias=False) -> SwiGLU:
    """For 256 and 384 features, from dense layers, half of the blocks kept."""
    dense = [nn.Linear(n, k, bias, device=where, dtype=BF16) for n, k in ((256, 384), (256, 384), (384, 256))]
    return SwiGLU.from_linears(*dense, (64, 64), 0.5).eval()


def tokens(*shape, where="cpu"):
    return torch.randn(*shape, 256, device=where).to(BF16)


def off(found, wanted) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


# -- gates ----------------------------------------------------------------------------------------------------------


@ONE_PLACE
@pytest.mark.parametrize("activation", [None, "silu", "relu", "gelu"])
@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 1024), (256,), (0, 128), (3, 4096 * 8)], ids=str)
def test_gates(where, activation, shape):
    z = torch.randn(shape, device=where).to(BF16)
    values, scale = quantize_gated(z, activation=activation)
    h = gate(z.double(), activation)
    assert values.shape == h.shape and scale.shape == (*shape[:-1], 1) and values.dtype == E4M3
    if h.numel():
        top = h.abs().amax(-1, keepdim=True)
        assert ((scale.double() * 448 - top).abs() <= 2**-7 * top).all()
        assert ((values.double() * scale.double() - h).abs() <= 2**-3.9 * h.abs() + 2**-9 * scale).all()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_gates_on_the_emulator(dtype):
    for shape, activation in (((5, 1152), "silu"), ((2, 2 * 40000 // 128 * 128), "gelu"), ((3, 2, 256), None)):
        z = torch.randn(shape).to(dtype)
        wanted = quantize_gated(z, activation=activation)
        with on_emulator("sm_90", sms=2):
            found = quantize_gated(z, activation=activation)
        assert ((found[1] - wanted[1]).abs() <= 2**-7 * wanted[1]).all()
        differs = found[0].view(torch.uint8) != wanted[0].view(torch.uint8)
        assert differs.float().mean() < 0.02
        assert off(found[0].float() * found[1], wanted[0].float() * wanted[1]) < 5e-3


@pytest.mark.parametrize(
    ("z", "terms", "error", "words"),
    [
        ([1.0], {}, TypeError, "z must be a torch.Tensor"),
        (torch.ones(2, 128).to(E4M3), {}, TypeError, "it must be torch.bfloat16"),
        (torch.ones(2, 128), {"activation": "tanh"}, ValueError, "activation 'tanh'; use None or one of"),
        (torch.ones(2, 128), {"dtype": BF16}, TypeError, "known are torch.float8_e4m3fn"),
        (torch.ones(2, 192), {}, ValueError, "multiple of 128"),
    ],
)
def test_gates_refused(z, terms, error, words):
    with pytest.raises(error, match=words):
        quantize_gated(z, **terms)


# -- layers ---------------------------------------------------------------------------------------------------------


@ONE_PLACE
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (40,), (2, 3)], ids=str)
def test_feed_forward(where, bias, shape):
    """It errs as much as 3 bits of mantissa do, in two products."""
    layer, x = feed_forward(where, bias), tokens(*shape, where=where)
    narrow = Float8SwiGLU(layer)
    y = narrow(x)
    assert y.shape == x.shape and y.dtype == BF16 and not y.requires_grad and not narrow.training
    with torch.no_grad():
        assert 1e-3 < off(y, layer(x)) < 0.08


@ONE_PLACE
def test_linear(where):
    W = random_bsr((192, 256), (64, 64), density=0.5, device=where)
    layer = BsrLinear.from_bsr(W, torch.randn(192, device=where).to(BF16), activation="relu")
    narrow, x = Float8BsrLinear(layer), tokens(30, where=where)
    with torch.no_grad():
        assert off(narrow(x), layer(x)) < 0.06
    assert narrow(x.half() if where == "cpu" else x).dtype in (torch.float16, BF16)
    assert f"density={W.nnz / 12:.4g}" in repr(narrow) and "float8_e4m3fn" in repr(narrow)


@torch.no_grad()
def test_a_model():
    """Layers are swapped once, others stay; .to(), copies and the state keep FP8 values and scales."""
    shared = BsrLinear(256, 256, bias=False, blocksize=(64, 64), density=0.5, dtype=BF16)
    model = nn.Sequential(feed_forward(), shared, nn.LayerNorm(256, dtype=BF16), shared)
    x = tokens(8)
    report = quantize_(model)
    assert [c.name for c in report.changed] == ["0.gate_up", "0.down", "1"] and not report.skipped
    assert report.changed[0].before == report.changed[0].after and "3 of 3 layers" in str(report)
    assert [type(m).__name__ for m in model] == ["Float8SwiGLU", "Float8BsrLinear", "LayerNorm", "Float8BsrLinear"]
    assert model[1] is model[3] and not [p for m in (model[0], model[1]) for p in m.parameters()]
    y = model(x)
    again = copy.deepcopy(model).to(torch.float16).to(BF16)
    assert again[0].down.weight.dtype is E4M3 and again[0].down.weight.scales.dtype is FP32
    assert torch.equal(again(x), y)
    other = nn.Sequential(feed_forward(), shared, nn.LayerNorm(256, dtype=BF16), shared)
    quantize_(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), y)
    layer = feed_forward()
    quantize_(layer)
    assert isinstance(layer, Float8SwiGLU)


def both() -> list[nn.Module]:
    return [
        Float8BsrLinear(BsrLinear(256, 256, blocksize=(64, 64), density=0.5, dtype=BF16)),
        Float8SwiGLU(feed_forward()),
    ]


@pytest.mark.parametrize("number", range(2))
def test_gradients_are_refused_and_autocast_is_followed(number):
    layer, x = both()[number], tokens(8)
    with pytest.raises(RuntimeError, match=f"{type(layer).__name__} does not compute gradients"):
        layer(x.clone().requires_grad_())
    with torch.no_grad():
        assert layer(x.clone().requires_grad_()).dtype == BF16
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(layer(x.float()), layer(x))
    assert layer(x.float()).dtype == FP32 and off(layer(x.float()), layer(x)) < 0.02


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("number", range(2))
def test_state_of_another_pattern(number, assign):
    """It is copied, or taken with assign=True; layers on the meta device take it."""
    layer, x = both()[number], tokens(8)
    other, empty = both()[number], copy.deepcopy(layer).to("meta")
    if not assign:
        empty.to_empty(device="cpu")
    for made in (other, empty):
        made.load_state_dict(layer.state_dict(), assign=assign)
        assert torch.equal(made(x), layer(x))
        pairs = zip(made.modules(), layer.modules(), strict=True)
        weights = [(a.values, b.values) for a, b in pairs if isinstance(a, Float8BsrLinear)]
        assert len(weights) == number + 1 and all((a.data_ptr() == b.data_ptr()) == assign for a, b in weights)


def old_state(layer: nn.Module) -> dict:
    """The state dict that these layers had before their weight was made of buffers."""
    state, new = {}, layer.state_dict()
    for path, part in layer.named_modules():
        if isinstance(part, Float8BsrLinear):
            prefix = f"{path}." if path else ""
            tensors = {name: new.pop(prefix + name) for name in part.TENSORS}
            state[f"{prefix}weight._extra_state"] = {"shape": (part.out_features, part.in_features), **tensors}
    return {**new, **state}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("number", range(2))
def test_old_states_load(number, assign, tmp_path):
    layer, x = both()[number], tokens(8)
    torch.save(old_state(layer), tmp_path / "old.pt")
    state = torch.load(tmp_path / "old.pt", weights_only=True)
    other, empty = both()[number], copy.deepcopy(layer).to("meta")
    if not assign:
        empty.to_empty(device="cpu")
    for made in (other, empty):
        assert str(made.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
        assert torch.equal(made(x), layer(x))
    state = old_state(Float8BsrLinear(BsrLinear(128, 256, blocksize=(64, 64), density=1.0, dtype=BF16)))
    with pytest.raises(RuntimeError, match=r"the state is of a weight \(256, 128\), and this one is \(256, 256\)"):
        both()[0].load_state_dict(state)


def test_states_that_do_not_fit():
    layer = both()[0]
    state = layer.state_dict()
    for change, words in (
        ({"values": state["values"].to(BF16)}, "values is torch.bfloat16, .* quantize that"),
        ({"scales": state["scales"][:1]}, r"scales is \(1,\) of torch.float32; it must be \(8,\)"),
        ({"values": state["values"][:, :32]}, "the layer has blocks of"),
    ):
        with pytest.raises(RuntimeError, match=words):
            both()[0].load_state_dict({**state, **change})
    del state["scales"]
    with pytest.raises(RuntimeError, match="the state has .* alone; the weight of this layer is .*, scales"):
        layer.load_state_dict(state)
    other = Float8BsrLinear(BsrLinear(256, 256, blocksize=(64, 64), density=0.25, dtype=BF16), torch.float8_e5m2)
    x, layer = tokens(8), both()[0]
    layer.load_state_dict(other.state_dict())
    assert layer.values.dtype is torch.float8_e5m2 and torch.equal(layer(x), other(x))


def saved_layers(where="cpu") -> list[nn.Module]:
    """One of each kind of layer for inference, and a model of FP8 layers."""
    sparse = BsrLinear(256, 256, blocksize=(64, 64), density=0.5, device=where, dtype=BF16)
    dense = nn.Linear(200, 192, device=where, dtype=BF16)
    return [
        Float8BsrLinear(sparse),
        Float8BsrLinear(sparse, torch.float8_e5m2),
        Bsr24Linear(sparse),
        Sparse24Linear(dense),
        nn.Sequential(Float8SwiGLU(feed_forward(where)), Float8BsrLinear(sparse)),
    ]


def like(layer: nn.Module) -> nn.Module:
    """A layer of the same kind and shape with other numbers."""
    other = copy.deepcopy(layer)
    for t in other.buffers():
        if t.is_floating_point():
            t.view(torch.uint8).zero_() if t.is_contiguous() else t.zero_()
    return other


@ONE_PLACE
@pytest.mark.parametrize("number", range(5))
def test_safetensors(where, number, tmp_path):
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file, load_model, save_file, save_model

    layer = saved_layers(where)[number]
    other, x = like(layer), torch.randn(8, 200 if number == 3 else 256, device=where).to(BF16)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors", device=where))
    assert torch.equal(other(x), layer(x))
    save_model(layer, str(tmp_path / "model.safetensors"))
    other = like(layer)
    load_model(other, str(tmp_path / "model.safetensors"), device=where)
    assert torch.equal(other(x), layer(x))


@ONE_PLACE
@pytest.mark.parametrize("number", range(5))
def test_distributed_checkpoints(where, number, tmp_path):
    import torch.distributed.checkpoint as dcp

    layer = saved_layers(where)[number]
    other, x = like(layer), torch.randn(8, 200 if number == 3 else 256, device=where).to(BF16)
    dcp.save(layer.state_dict(), checkpoint_id=tmp_path / "state", no_dist=True)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "state", no_dist=True)
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))


def test_save_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            sparse = BsrLinear(256, 256, blocksize=(64, 64), density=0.5, dtype=BF16)
            self.layers = nn.Sequential(feed_forward(), sparse, nn.LayerNorm(256, dtype=BF16))
            quantize_(self)
            self.post_init()

    model, x = Model(transformers.PretrainedConfig()), tokens(8)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert torch.equal(Model.from_pretrained(tmp_path, dtype=BF16).layers(x), model.layers(x))


def test_moves_keep_dtypes():
    layer, x = both()[0], tokens(8)
    y, before = layer(x), layer.values
    for move in (nn.Module.half, nn.Module.double, lambda m: m.to(BF16), nn.Module.share_memory):
        move(layer)
        assert layer.values.dtype is E4M3 and layer.scales.dtype is FP32 and layer.values is before
        assert layer.bias.dtype in (BF16, torch.float16, torch.float64)
    assert torch.equal(layer(x), y) and layer.values.is_shared()
    empty = copy.deepcopy(layer).to("meta")
    assert empty.values.is_meta and empty.values.dtype is E4M3 and empty.scales.dtype is FP32
    empty.to_empty(device="cpu").crow_indices.fill_(-1)
    with pytest.raises(ValueError, match="the indices of this layer are no pattern"):
        empty(x)


def test_other_layers_stay():
    """Layers with 2:4 values, also inside of a SwiGLU."""
    model = nn.Sequential(feed_forward(), feed_forward())
    prune_2_4_(model, filter_fn=lambda module, fqn: fqn != "1.down")
    report = quantize_(model)
    assert [c.name for c in report.changed] == ["1.down"]
    assert [c.name for c in report.skipped] == ["0.gate_up", "0.down", "1.gate_up"]
    assert report.skipped[0].skipped == "is a Bsr24Linear, of which there is no FP8 layer"
    names = [[type(layer).__name__ for layer in part.children()] for part in model]
    assert names == [["Bsr24Linear", "Bsr24Linear"], ["Bsr24Linear", "Float8BsrLinear"]]
    with torch.no_grad():
        assert model(tokens(8)).isfinite().all()


@torch.no_grad()
def test_hooks_of_forward_are_taken_over():
    """With keywords and after an error, too; a handle still removes its hook."""
    shared, seen = BsrLinear(256, 256, blocksize=(64, 64), density=0.5, dtype=BF16), []
    model = nn.Sequential(feed_forward(), shared, shared)
    before = [
        model[0].register_forward_pre_hook(lambda layer, args: (seen.append(type(layer).__name__), (args[0] * 2,))[1]),
        shared.register_forward_pre_hook(lambda layer, args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True),
        shared.register_forward_hook(lambda layer, args, y: y + 1.0),
        model[0].register_forward_hook(lambda *_: seen.append("always"), always_call=True),
    ]
    x = tokens(8)
    plain = [kind(layer) for kind, layer in ((Float8SwiGLU, model[0]), (Float8BsrLinear, shared))]
    quantize_(model)
    assert torch.equal(model(x), plain[1](plain[1](plain[0](x * 2)) + 1.0) + 1.0)
    assert seen == ["Float8SwiGLU", "always", [], []]
    with pytest.raises(Exception, match="dimension|shape|columns|K"):
        model[0](x[:, :64])
    assert seen[4:] == ["Float8SwiGLU", "always"]
    assert model[1](x=x).shape == x.shape and seen[6:] == [["x"]]
    for handle in before:
        handle.remove()
    assert torch.equal(model(x), plain[1](plain[1](plain[0](x)))) and len(seen) == 7


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda layer: layer.down.register_full_backward_hook(lambda *_: None), "0.down has hooks .*no gradients"),
        (lambda layer: layer.register_full_backward_hook(lambda *_: None), "0 has hooks .backward.*no gradients"),
        (lambda layer: layer.register_state_dict_post_hook(lambda *_: None), "0 has hooks .state_dict.*another state"),
        (lambda layer: layer.register_state_dict_pre_hook(lambda *_: None), "0 has hooks.*another state"),
        (lambda layer: layer.register_load_state_dict_pre_hook(lambda *_: None), "0 has .*another state"),
        (lambda layer: layer.register_load_state_dict_post_hook(lambda *_: None), "0 has hooks.*another state"),
    ],
)
def test_hooks_that_are_refused(hook, words):
    """Before anything is replaced."""
    model = nn.Sequential(feed_forward(), feed_forward())
    hook(model[0])
    with pytest.raises(ValueError, match=f"quantize_: {words}"):
        quantize_(model)
    assert all(type(layer) is SwiGLU for layer in model)


def test_hooks_inside_of_a_feed_forward_layer_are_taken_over():
    model, x, seen = nn.Sequential(feed_forward()), tokens(8), []
    handles = [
        model[0].down.register_forward_hook(lambda layer, args, y: (seen.append(type(layer).__name__), y + 1)[1]),
        model[0].gate_up.register_forward_pre_hook(lambda layer, args: seen.append("before")),
    ]
    plain = Float8SwiGLU(copy.deepcopy(model[0]))
    quantize_(model)
    assert type(model[0]) is Float8SwiGLU
    assert torch.equal(model(x), plain(x) + 1) and seen == ["before", "Float8BsrLinear"]
    for handle in handles:
        handle.remove()
    assert torch.equal(model(x), plain(x))


def test_filters():
    """A SwiGLU is one layer of FP8 where both of its layers are."""
    for accept, kinds in (
        (lambda module, fqn: isinstance(module, BsrLinear), ["Float8SwiGLU", "Float8BsrLinear"]),
        (lambda module, fqn: fqn == "0.down", ["SwiGLU", "BsrLinear"]),
        (lambda module, fqn: fqn == "1", ["SwiGLU", "Float8BsrLinear"]),
    ):
        model = nn.Sequential(feed_forward(), BsrLinear(256, 256, blocksize=(64, 64), density=0.5, dtype=BF16)).eval()
        x = tokens(8)
        with torch.no_grad():
            wanted = model(x)
            report = quantize_(model, filter_fn=accept)
            assert [type(m).__name__ for m in model] == kinds and not report.skipped
            assert off(model(x), wanted) < 0.1


def test_hooks_that_make_weights_are_refused():
    layer = BsrLinear(256, 256, blocksize=(64, 64), density=0.5, dtype=BF16)
    prune.random_unstructured(layer, "values", 0.5)
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match="0 has a hook that makes its weight.*prune.remove"):
        quantize_(model)
    prune.remove(layer, "values")
    quantize_(model)
    assert isinstance(model[0], Float8BsrLinear)


def test_layers_that_are_refused():
    with pytest.raises(TypeError, match="needs a BsrLinear, got Linear"):
        Float8BsrLinear(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="needs a SwiGLU, got Linear"):
        Float8SwiGLU(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="dtype is torch.bfloat16"):
        quantize_(feed_forward(), Float8Config(BF16))
    with pytest.raises(ValueError, match=r"of one layer use Float8BsrLinear\(layer\)"):
        quantize_(BsrLinear(256, 256, blocksize=(64, 64), density=0.5, dtype=BF16))


@needs_compiler
@pytest.mark.slow
def test_feed_forward_on_the_emulator():
    narrow, x = Float8SwiGLU(feed_forward()), tokens(20)
    wanted = narrow(x)
    with on_emulator("sm_90", sms=3):
        assert off(narrow(x), wanted) < 1e-2


# -- the recipe -----------------------------------------------------------------------------------------------------


def snippets(heading: str) -> list[str]:
    """The Python code of a section of the documents."""
    section = HOWTO.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_the_recipe_for_training():
    """Its forward pass is in FP8, its gradients are those of the layer in bf16; and a layer learns."""
    names = {}
    exec(compile(snippets("Train with an FP8 forward pass")[0], "fp8.md", "exec"), names)
    layer = BsrLinear(256, 192, blocksize=(64, 64), density=0.5, dtype=BF16)
    x = tokens(40).requires_grad_()
    y = names["float8_forward"](layer, x)
    narrow = Float8BsrLinear(layer)
    assert torch.equal(y.detach(), narrow(x.detach()))
    dy = torch.randn_like(y)
    y.backward(dy)
    found = [t.grad.clone() for t in (x, layer.values, layer.bias)]
    x.grad = layer.values.grad = layer.bias.grad = None
    layer(x).backward(dy)
    for mine, right in zip(found, (x, layer.values, layer.bias), strict=True):
        assert off(mine, right.grad) < 1e-2
    optimizer, target = torch.optim.SGD(layer.parameters(), lr=2.0), torch.randn(40, 192).to(BF16)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (names["float8_forward"](layer, x.detach()) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0] and all(map(math.isfinite, losses))


def test_the_recipe_for_delayed_scales():
    weight, tokens_of = torch.randn(192, 256), tokens(16)
    (w, scale_w), (x, scale_x) = quantize(weight, per="row"), quantize(tokens_of, per="row")
    terms = {"scale_a": scale_x, "scale_b": scale_w.t(), "activation": "silu", "out_dtype": E4M3}
    _, amax = gemm(x, w.t(), **terms, return_amax=True)
    scale_y = amax / 448
    y, amax = gemm(x, w.t(), **terms, scale_out=scale_y.reciprocal(), return_amax=True)
    exact = torch.nn.functional.silu(tokens_of.double() @ weight.double().t())
    assert off(y.to(FP32) * scale_y, exact) < 0.06 and abs(amax.item() / exact.abs().max().item() - 1) < 0.05


# -- launches that overlap ------------------------------------------------------------------------------------------


def apart(layer: Float8SwiGLU, x) -> torch.Tensor:
    """The layer's kernels with a wait after each, so that none begins before the one before has ended."""
    gates = len(x) >= fp8.LEAST_GATED  # whether the first product has them
    for part in (layer.gate_up, layer.down):
        values, scale = quantize(x, per="row") if gates or part is layer.gate_up else quantize_gated(x)
        torch.cuda.synchronize()
        terms = {"scale_x": scale, "out_dtype": x.dtype}
        if gates and part is layer.gate_up:
            x = bsr_gated_linear(values, part.weight, **terms)
        else:
            x = bsr_linear(values, part.weight, bias=part.bias, **terms)
        torch.cuda.synchronize()
    return x


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
def test_a_chain_on_the_emulator(block):
    """For 3 tokens by the kernel for few columns, of 20 by narrow tiles. Kernels there run one after another."""
    layer = Float8SwiGLU(SwiGLU(256, 512, False, block, density=0.5, dtype=BF16)).eval()
    for rows in (3, 20):
        x = tokens(rows)
        wanted = layer(x)
        with on_emulator("sm_90", sms=3), patch.object(dispatch, "_launch", wraps=dispatch._launch) as launched:
            assert off(layer(x), wanted) < 1e-2
        assert [call.args[0].facts.chained for call in launched.call_args_list] == [True, True]


def test_hooks_end_a_chain(monkeypatch):
    """Kernels that a hook launches may write the weights of the next product."""
    layer, seen = Float8SwiGLU(feed_forward()), []
    monkeypatch.setattr(fp8, "quantized_gated", lambda *_, **more: seen.append(more))
    layer(tokens(2))
    handle = layer.gate_up.register_forward_hook(lambda *_: None)
    layer(tokens(2))
    handle.remove()
    layer(tokens(65))
    assert seen == [{"chained": True}]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64, 400])
def test_launches_that_overlap(rows):
    layer = Float8SwiGLU(SwiGLU(2048, 4096, False, (128, 128), density=0.25, device="cuda", dtype=BF16))
    inputs = [torch.randn(rows, 2048, device="cuda").to(BF16) for _ in range(8)]
    W = layer.gate_up.weight.values.view(torch.uint8)
    weights = [W.clone(), torch.roll(W, 1, 0)]
    wanted = []
    for i, x in enumerate(inputs):
        W.copy_(weights[i % 2])
        wanted.append(apart(layer, x))
    graph, place = torch.cuda.CUDAGraph(), inputs[0].clone()
    with patch.object(dispatch, "_launch", wraps=dispatch._launch) as launched:
        layer(place)
    assert [call.args[0].facts.chained for call in launched.call_args_list] == [rows <= 64] * 2
    with torch.cuda.graph(graph):
        y = layer(place)
    torch.cuda.synchronize()
    for _ in range(20):
        found, replayed = [], []
        for i, x in enumerate(inputs):  # nothing waits, and weights change right before
            W.copy_(weights[i % 2])
            found.append(layer(x))
            place.copy_(x)
            graph.replay()
            replayed.append(y.clone())
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert all(torch.equal(*pair) for pair in zip(replayed, wanted, strict=True))
