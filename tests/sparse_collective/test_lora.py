"""PEFT's LoRA on BsrLinear: training, saving and loading adapters, and what is not supported."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
from sparse_collective.nn import BsrLinear, SparsityConfig, sparsify_  # noqa: E402
from sparse_collective.nn.lora import LoraBsrLinear, on_block_sparse  # noqa: E402


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.Linear(64, 8))
    sparsify_(layers, SparsityConfig((32, 32), 0.5), lambda module, fqn: fqn != "3")
    return layers


def config(**options):
    return on_block_sparse(peft.LoraConfig(r=4, target_modules=["0", "2", "3"], **options))


def test_training_changes_the_adapters_alone(tmp_path):
    adapted = peft.get_peft_model(model(), config())
    first = adapted.base_model.model[0]
    assert isinstance(first, LoraBsrLinear) and isinstance(first.get_base_layer(), BsrLinear)
    x, before = torch.randn(16, 64), first.get_base_layer().values.clone()
    torch.testing.assert_close(adapted(x), model()(x))  # B begins at zero
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (adapted(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and torch.equal(first.get_base_layer().values, before)

    A, B = first.lora_A["default"].weight, first.lora_B["default"].weight
    base = first.get_base_layer()
    expected = x @ (base.weight.to_dense() + first.scaling["default"] * B @ A).T + base.bias
    torch.testing.assert_close(first(x), expected, rtol=1e-4, atol=1e-4)

    adapted.save_pretrained(tmp_path)
    again = peft.get_peft_model(model(), config())
    again.load_adapter(tmp_path, "default")
    torch.testing.assert_close(again(x), adapted(x))


def test_what_is_not_supported():
    with pytest.raises(NotImplementedError, match="cannot be merged"):
        peft.get_peft_model(model(), config()).merge_and_unload()
    with pytest.raises(NotImplementedError, match="init_lora_weights=True"):
        peft.get_peft_model(model(), config(init_lora_weights="pissa"))
    fused = nn.Sequential(BsrLinear(64, 64, blocksize=(32, 32), density=0.5, activation="gelu"))
    with pytest.raises(TypeError, match="without a fused activation"):
        peft.get_peft_model(fused, on_block_sparse(peft.LoraConfig(r=4, target_modules=["0"])))
