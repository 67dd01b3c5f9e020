"""Checkpoints of models with block-sparse and FP8 layers, by transformers' from_pretrained and save_pretrained.

The layers are recorded in the model's config, as quantization_config with quant_method "cute_kernels". from_pretrained
makes the recorded layers before it loads their tensors; with a config that records none, it loads a dense checkpoint
and prunes it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparse_collective.nn import BsrLinear, Float8BsrLinear, Float8Config, SparsityConfig, quantize_, sparsify_
from sparse_collective.nn.inference import InferenceLinear
from sparse_collective.nn.module import BsrModule

METHOD = "cute_kernels"
KINDS = {"BsrLinear": BsrLinear, "Float8BsrLinear": Float8BsrLinear}


class BlockSparseConfig(QuantizationConfigMixin):
    """Configuration of from_pretrained for block-sparse layers; see register.

    Args:
        blocksize: (bm, bk).
        density: the share of blocks that are kept, in [0, 1].
        modules: patterns of layer names, as in a shell: layers that fit one of them are replaced.
        float8: also quantize the pruned layers, for inference.
        layers: the layers of a saved model, by name; save_pretrained writes them. With them the other arguments have
            no meaning, and are not saved.

    Raises:
        ValueError, TypeError: as SparsityConfig does.
    """

    def __init__(
        self,
        blocksize: Sequence[int] = (128, 128),
        density: float = 0.5,
        modules: Sequence[str] = ("*.mlp.*",),
        float8: bool = False,
        layers: dict[str, dict[str, Any]] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method must be {METHOD!r}, got {quant_method!r}")
        SparsityConfig((blocksize[0], blocksize[1]), density)  # raises for what is not supported
        self.quant_method: Any = METHOD
        self.blocksize, self.density = list(blocksize), density
        self.modules, self.float8, self.layers = list(modules), float8, layers

    def to_dict(self) -> dict[str, Any]:
        """Fields of a model's config: the recorded layers alone, if there are any."""
        if self.layers is None:
            return super().to_dict()
        return {"quant_method": self.quant_method, "layers": copy.deepcopy(self.layers)}

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.modules)


def layers_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The block-sparse layers of a model: what is needed to make layers of the same shapes.

    Raises:
        TypeError: a layer is of a class that from_pretrained cannot make again.
    """
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, (BsrModule, InferenceLinear)):
            continue
        kind, gated = type(module).__name__, getattr(module, "gated", False)
        if kind not in KINDS or gated:
            raise TypeError(
                f"{name} is a {kind}{' with a gate' * gated}, which from_pretrained cannot make; save the model's "
                "state_dict() with torch.save"
            )
        assert isinstance(module, (BsrLinear, Float8BsrLinear))  # KINDS
        found[name] = {"kind": kind, "blocksize": list(module.blocksize), "nnz": len(module.values)}
        if module.activation is not None:
            found[name]["activation"] = module.activation
    return found


def make_layers(model: nn.Module, layers: dict[str, dict[str, Any]]) -> None:
    """Replace the nn.Linear of these names by layers of the recorded kinds, without values."""
    for name, recorded in layers.items():
        parent_name, _, child = name.rpartition(".")
        parent, linear = model.get_submodule(parent_name), model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{name} must be an nn.Linear to become a {recorded['kind']}, got {type(linear).__name__}")
        (bm, bk), kind = recorded["blocksize"], KINDS[recorded["kind"]]
        blocks = (linear.out_features // bm) * (linear.in_features // bk)
        layer = BsrLinear(
            linear.in_features, linear.out_features, linear.bias is not None, (bm, bk),
            density=recorded["nnz"] / max(1, blocks), activation=recorded.get("activation"),
            device=linear.weight.device, dtype=linear.weight.dtype,
        )  # fmt: skip
        setattr(parent, child, Float8BsrLinear(layer) if kind is Float8BsrLinear else layer)


class BlockSparseQuantizer(HfQuantizer):
    """Makes block-sparse layers while from_pretrained loads a model."""

    quantization_config: BlockSparseConfig

    def _process_model_before_weight_loading(self, model, **kwargs):
        if self.quantization_config.layers is not None:
            make_layers(model, self.quantization_config.layers)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        if config.layers is None:
            sparsify_(
                model,
                SparsityConfig((config.blocksize[0], config.blocksize[1]), config.density),
                lambda module, name: config.fits(name),
            )
            if config.float8:
                quantize_(model, Float8Config())
            config.layers = layers_of(model)
        return model

    def get_new_dtype(self, converter, param, dtype):
        """FP8 values and their scales keep the checkpoint's dtype."""
        name = getattr(converter, "target_patterns", [""])[0] or ""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        if "F8" in stored or "float8" in stored or name.endswith(".scales"):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def get_state_dict_and_metadata(self, model):
        """Record the layers as they are now: pruning may have changed their number of blocks."""
        self.quantization_config.layers = layers_of(model)
        model.config.quantization_config = self.quantization_config
        return None, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return not any(layer["kind"] == "Float8BsrLinear" for layer in (self.quantization_config.layers or {}).values())


def register_checkpoints() -> None:
    """Register quant_method "cute_kernels" with transformers, once."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(BlockSparseConfig)
        register_quantizer(METHOD)(BlockSparseQuantizer)


def prepare_saving(model: Any) -> Any:
    """Let save_pretrained record the layers of a model that sparsify_ or quantize_ has changed; returns the model.

    Args:
        model: a transformers model.

    Raises:
        TypeError: a layer is of a class that from_pretrained cannot make again.

    Example:
        sparsify_(model, SparsityConfig((128, 128), 0.25), lambda module, fqn: ".mlp." in fqn)
        prepare_saving(model).save_pretrained("pruned")
        model = AutoModelForCausalLM.from_pretrained("pruned")  # after register()
    """
    register_checkpoints()
    config = BlockSparseConfig(layers=layers_of(model))
    model.hf_quantizer = BlockSparseQuantizer(config)
    model.config.quantization_config = config
    return model
