"""from_pretrained and save_pretrained of transformers models with block-sparse and FP8 layers."""

import json
from collections import OrderedDict

import pytest
import torch

transformers = pytest.importorskip("transformers")
from attention.integrations.transformers import BlockSparseConfig, prepare_saving, register  # noqa: E402
from sparse_collective.nn import (  # noqa: E402
    BsrExperts,
    BsrLinear,
    Float8BsrLinear,
    Float8SwiGLU,
    GatedBsrLinear,
    Sparse24Config,
    SparsityConfig,
    SwiGLU,
    prune_,
    prune_2_4_,
    quantize_,
    sparsify_,
)

BF16 = torch.bfloat16
TOKENS = torch.arange(16).view(1, 16)


@pytest.fixture(name="dense")
def dense_fixture(tmp_path):
    """(the folder of a dense checkpoint, a loader)."""
    register()
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=2, **shape)
    transformers.LlamaForCausalLM(config).to(BF16).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, **options).eval()


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


def sparse(model):
    sparsify_(model, SparsityConfig((32, 32), 0.5), lambda module, fqn: ".mlp." in fqn)
    return model


def test_a_dense_checkpoint_is_pruned_while_it_is_loaded(dense):
    model = load(dense, quantization_config=BlockSparseConfig((32, 32), 0.5))
    assert torch.equal(logits(model), logits(sparse(load(dense))))
    assert isinstance(model.model.layers[0].mlp.up_proj, BsrLinear)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear and model.hf_quantizer.is_trainable


def test_saved_and_loaded(dense, tmp_path):
    model = sparse(load(dense))
    prepare_saving(model).save_pretrained(tmp_path / "sparse")
    found = load(tmp_path / "sparse")
    assert torch.equal(logits(found), logits(model))
    recorded = json.loads((tmp_path / "sparse/config.json").read_text())["quantization_config"]
    assert set(recorded) == {"quant_method", "layers"} and len(recorded["layers"]) == 6

    prune_(found.model.layers[1].mlp.up_proj, 0.25)  # then it has another number of blocks
    found.save_pretrained(tmp_path / "pruned")
    again = load(tmp_path / "pruned")
    assert len(again.model.layers[1].mlp.up_proj.values) == 2 and torch.equal(logits(again), logits(found))
    again(TOKENS, labels=TOKENS).loss.backward()
    assert again.model.layers[1].mlp.up_proj.values.grad.abs().sum() > 0


@pytest.mark.parametrize("by", ["config", "quantize_"])
def test_float8(dense, tmp_path, by):
    if by == "config":
        model = load(dense, quantization_config=BlockSparseConfig((32, 32), 0.5, float8=True))
    else:
        model = sparse(load(dense))
        quantize_(model)
        prepare_saving(model)
    model.save_pretrained(tmp_path / "float8")
    found = load(tmp_path / "float8")
    layer = found.model.layers[0].mlp.down_proj
    assert isinstance(layer, Float8BsrLinear) and layer.values.dtype is torch.float8_e4m3fn
    assert layer.scales.dtype is torch.float32 and torch.equal(logits(found), logits(model))
    assert not found.hf_quantizer.is_trainable


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("block", [(32, 32), (128, 64)])
def test_fused(dense, tmp_path, block, float8):
    """Blocks of 128 rows hold rows of gate_proj and up_proj; down_proj has 64, which they do not divide."""
    model = load(dense)
    filter_fn = None if block == (32, 32) else lambda module, fqn: ".mlp." in fqn and "down" not in fqn
    sparsify_(model, SparsityConfig((32, 32), 0.5), lambda module, fqn: ".mlp." in fqn, fuse=True)
    if filter_fn:
        mlp = load(dense).model.layers[0].mlp
        up = GatedBsrLinear.from_linears(mlp.gate_proj, mlp.up_proj, block, 0.5, activation="gelu")
        model.model.layers[0].mlp = SwiGLU.of(up, BsrLinear.from_linear(mlp.down_proj, (64, 32), 0.25)).eval()
    if float8:
        quantize_(model)
    prepare_saving(model).save_pretrained(tmp_path / "fused")
    found = load(tmp_path / "fused")
    kind = Float8SwiGLU if float8 else SwiGLU
    assert all(type(layer.mlp) is kind for layer in found.model.layers)
    assert torch.equal(logits(found), logits(model)) and found.hf_quantizer.is_trainable is not float8
    recorded = json.loads((tmp_path / "fused/config.json").read_text())["quantization_config"]["layers"]
    assert set(recorded) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    if not float8:
        found(TOKENS, labels=TOKENS).loss.backward()
        assert found.model.layers[1].mlp.gate_up.values.grad.abs().sum() > 0
        found.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(load(tmp_path / "again")), logits(found))


def test_fused_while_it_is_loaded(dense, tmp_path):
    model = load(dense, quantization_config=BlockSparseConfig((32, 32), 0.5, fuse=True))
    other = load(dense)
    sparsify_(other, SparsityConfig((32, 32), 0.5), lambda module, fqn: ".mlp." in fqn, fuse=True)
    assert type(model.model.layers[0].mlp) is SwiGLU and torch.equal(logits(model), logits(other))
    model.save_pretrained(tmp_path / "fused")
    assert torch.equal(logits(load(tmp_path / "fused")), logits(model))


MOE = {"num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_mixtures_of_experts(tmp_path, model_type):
    register()
    config = transformers.AutoConfig.for_model(
        model_type, num_experts_per_tok=2, num_local_experts=4, intermediate_size=128, moe_intermediate_size=96,
        shared_expert_intermediate_size=128, head_dim=32, **MOE,
    )  # fmt: skip
    if model_type != "mixtral":
        config.num_experts = 4
    transformers.AutoModelForCausalLM.from_config(config).to(BF16).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    report = sparsify_(model, SparsityConfig((32, 32), 0.5), lambda module, fqn: ".mlp." in fqn, fuse=True)
    assert not report.skipped or {c.name.split(".")[-1] for c in report.skipped} == {"shared_expert_gate"}
    assert type(model.model.layers[0].mlp.experts) is BsrExperts
    prepare_saving(model).save_pretrained(tmp_path / "sparse")
    pruning = BlockSparseConfig((32, 32), 0.5, modules=["*.mlp.*"], fuse=True)
    for found in (load(tmp_path / "sparse"), load(tmp_path / "dense", quantization_config=pruning)):
        assert type(found.model.layers[1].mlp.experts) is BsrExperts
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)
        found.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(load(tmp_path / "again")), logits(found))
        found(TOKENS, labels=TOKENS).loss.backward()
        assert found.model.layers[0].mlp.experts.down.values.grad.abs().sum() > 0


def test_what_is_not_supported(dense):
    with pytest.raises(ValueError, match="density"):
        BlockSparseConfig(density=2.0)
    with pytest.raises(ValueError, match="quant_method must be 'cute_kernels'"):
        BlockSparseConfig(quant_method="other")
    with pytest.raises(TypeError, match=r"modules must be a list of patterns, got '\*.mlp.\*'"):
        BlockSparseConfig(modules="*.mlp.*")
    model = load(dense)
    mlp = model.model.layers[0].mlp
    gate_up = GatedBsrLinear.from_linears(mlp.gate_proj, mlp.up_proj, (32, 32), 0.5)
    model.model.layers[0].mlp = torch.nn.Sequential(OrderedDict(gate_up=gate_up, down_proj=mlp.down_proj))
    with pytest.raises(TypeError, match="mlp.gate_up is a GatedBsrLinear with a gate, which from_pretrained"):
        prepare_saving(model)
    quantize_(model)  # a gated FP8 layer, which an ungated one of the same class cannot stand for
    with pytest.raises(TypeError, match="mlp.gate_up is a Float8BsrLinear with a gate"):
        prepare_saving(model)
    model = load(dense)
    prune_2_4_(model, Sparse24Config(dense=True), lambda module, fqn: ".up_proj" in fqn)
    with pytest.raises(TypeError, match="mlp.up_proj is a Sparse24Linear, which"):
        prepare_saving(model)
    with pytest.raises(ValueError, match="accepts no layer|no nn.Linear|filter"):
        load(dense, quantization_config=BlockSparseConfig((32, 32), 0.5, modules=["*.nothing"]))
    with pytest.raises(ValueError, match="replaces no layer of this model:(.|\n)*no multiple of 96"):
        load(dense, quantization_config=BlockSparseConfig((96, 96), 0.5))
