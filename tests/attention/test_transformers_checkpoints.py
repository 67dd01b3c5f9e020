"""from_pretrained and save_pretrained of transformers models with block-sparse and FP8 layers."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
from attention.integrations.transformers import BlockSparseConfig, prepare_saving, register  # noqa: E402
from sparse_collective.nn import (  # noqa: E402
    BsrLinear,
    Float8BsrLinear,
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


def test_what_is_not_supported(dense):
    with pytest.raises(ValueError, match="density"):
        BlockSparseConfig(density=2.0)
    with pytest.raises(ValueError, match="quant_method must be 'cute_kernels'"):
        BlockSparseConfig(quant_method="other")
    model = load(dense)
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = SwiGLU.from_linears(mlp.gate_proj, mlp.up_proj, mlp.down_proj, (32, 32), 0.5)
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
