"""LoRA adapters of PEFT on BsrLinear. Needs peft; not imported by sparse_collective.nn."""

from __future__ import annotations

from typing import Any, NoReturn

from peft import LoraConfig
from peft.tuners.lora.layer import Linear

from .linear import BsrLinear

__all__ = ["LoraBsrLinear", "on_block_sparse"]


class LoraBsrLinear(Linear):
    """y = base(x) + B A x * scaling, with dense low-rank A and B beside a BsrLinear; see on_block_sparse.

    Raises:
        TypeError: the layer has a fused activation or gate, which the low-rank term must come before.
        NotImplementedError: adapters are merged, or initialized from the weight.
    """

    def __init__(self, base_layer: Any, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        layer = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        if layer.activation is not None or layer.gated:
            raise TypeError(
                f"LoRA needs a BsrLinear without a fused activation or gate, got {layer}; leave it out of "
                "target_modules, or apply the activation outside of the layer"
            )
        if config.use_dora or config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
            raise NotImplementedError(
                "DoRA, and initializations that read the weight, are not supported for BsrLinear; use "
                "init_lora_weights=True, False, 'gaussian' or 'orthogonal'"
            )
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def merge(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "a low-rank term is dense and cannot be merged into a block-sparse weight; keep the adapter, or convert "
            "the layers with densify_ before"
        )


def on_block_sparse(config: LoraConfig) -> LoraConfig:
    """Let a LoraConfig of PEFT target BsrLinear layers, too; return the config.

    Args:
        config: its target_modules name layers; the nn.Linear among them get PEFT's own LoRA.

    Example:
        sparsify_(model, SparsityConfig((128, 128), 0.25), lambda module, fqn: ".mlp." in fqn)
        config = on_block_sparse(LoraConfig(r=8, target_modules=["up_proj", "down_proj"]))
        model = get_peft_model(model, config)
    """
    config._register_custom_module({BsrLinear: LoraBsrLinear})
    return config
