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
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparse_collective.nn import (
    BsrExperts,
    BsrGroupedLinear,
    BsrLinear,
    Float8BsrLinear,
    Float8Config,
    Float8SwiGLU,
    GatedBsrLinear,
    SparsityConfig,
    SwiGLU,
    quantize_,
    sparsify_,
)
from sparse_collective.nn.inference import InferenceLinear
from sparse_collective.nn.module import BsrModule

LOG = logging.get_logger(__name__)
METHOD = "cute_kernels"
KINDS = ("BsrLinear", "Float8BsrLinear")
PARTS = ("gate_up", "down")
PAIRS: dict[type, tuple[type, type]] = {  # the classes of these parts
    SwiGLU: (GatedBsrLinear, BsrLinear),
    Float8SwiGLU: (Float8BsrLinear, Float8BsrLinear),
    BsrExperts: (BsrGroupedLinear, BsrGroupedLinear),
}


class BlockSparseConfig(QuantizationConfigMixin):
    """Configuration of from_pretrained for block-sparse layers; see register.

    Args:
        blocksize: (bm, bk).
        density: the share of blocks that are kept, in [0, 1].
        modules: patterns of layer names, as in a shell: layers and modules of experts that fit one are replaced.
        float8: also quantize the pruned layers, for inference; experts stay as they are.
        fuse: also fuse feed-forward blocks into SwiGLU, see sparsify_.
        layers: the layers of a saved model, by name; save_pretrained writes them. With them the other arguments have
            no meaning, and are not saved.

    Raises:
        ValueError, TypeError: as SparsityConfig does. from_pretrained raises ValueError if no layer is replaced, and
            warns of each layer that is skipped, with the reason.
    """

    def __init__(
        self,
        blocksize: Sequence[int] = (128, 128),
        density: float = 0.5,
        modules: Sequence[str] = ("*.mlp.*",),
        float8: bool = False,
        fuse: bool = False,
        layers: dict[str, dict[str, Any]] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method must be {METHOD!r}, got {quant_method!r}")
        SparsityConfig((blocksize[0], blocksize[1]), density)  # raises for what is not supported
        if isinstance(modules, str):  # a sequence of letters, and of "*", which all layers fit
            raise TypeError(f"modules must be a list of patterns, got {modules!r}; use [{modules!r}]")
        self.quant_method: Any = METHOD
        self.blocksize, self.density = list(blocksize), density
        self.modules, self.float8, self.fuse, self.layers = list(modules), float8, fuse, layers

    def to_dict(self) -> dict[str, Any]:
        """Fields of a model's config: the recorded layers alone, if there are any."""
        if self.layers is None:
            return super().to_dict()
        return {"quant_method": self.quant_method, "layers": copy.deepcopy(self.layers)}

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.modules)


def layers_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The block-sparse layers of a model, by name, with what makes layers of the same shapes.

    Raises:
        TypeError: a layer is of a class that from_pretrained cannot make again.
    """
    found: dict[str, dict[str, Any]] = {}
    inside: set[nn.Module] = set()  # of layers that are recorded as one
    for name, module in model.named_modules():
        if module in inside:
            continue
        if is_pair(module):
            found[name] = {"kind": type(module).__name__} | {part: record(module.get_submodule(part)) for part in PARTS}
            inside.update(module.children())
            if isinstance(module, BsrExperts):
                found[name] |= {"activation": module.activation, "group_rows": module.group_rows}
                found[name] |= {"one_pattern": module.gate_up.crow_indices.dim() == 1}
        elif isinstance(module, (BsrModule, InferenceLinear)):
            kind, gated = type(module).__name__, getattr(module, "gated", False)
            if kind not in KINDS or gated:
                raise TypeError(
                    f"{name} is a {kind}{' with a gate' * gated}, which from_pretrained cannot make; save the model's "
                    "state_dict() with torch.save"
                )
            found[name] = {"kind": kind} | record(module)
    return found


def is_pair(module: nn.Module) -> bool:
    """True for a SwiGLU, Float8SwiGLU or BsrExperts that from_pretrained can make: one with the layers of its class."""
    parts: list[Any] = [module._modules.get(part) for part in PARTS]
    if tuple(map(type, parts)) != PAIRS.get(type(module)):
        return False
    gate_up, down = parts
    if isinstance(module, BsrExperts):
        patterns = {layer.crow_indices.dim() for layer in parts}
        equal = all(layer.nnz % layer.items == 0 for layer in parts)
        return patterns == {1} or (patterns == {2} and equal)
    return gate_up.gated and not down.gated


def record(layer: Any) -> dict[str, Any]:
    """Blocks and activation of a layer, from which one of the same shapes is made."""
    recorded = {"blocksize": list(layer.blocksize), "nnz": layer.nnz}
    return recorded if layer.activation is None else recorded | {"activation": layer.activation}


def make_layers(model: nn.Module, layers: dict[str, dict[str, Any]]) -> None:
    """Replace the modules of these names by layers of the recorded kinds, without values."""
    for name, recorded in layers.items():
        parent_name, _, child = name.rpartition(".")
        dense, kind = model.get_submodule(name), recorded["kind"]
        if kind == "BsrExperts":
            layer: Any = make_experts(name, dense, recorded)
        elif kind in ("SwiGLU", "Float8SwiGLU"):
            layer = make_swiglu(name, dense, recorded)
        else:
            layer = make_linear(name, dense, recorded)
            layer = Float8BsrLinear(layer) if kind == "Float8BsrLinear" else layer
        setattr(model.get_submodule(parent_name), child, layer.train(dense.training))


def make_linear(
    name: str, dense: nn.Module | None, recorded: dict[str, Any], kind: type[BsrLinear] = BsrLinear, halves: int = 1
) -> Any:
    """A BsrLinear of a dense layer's shape and dtype; `halves` times as many rows."""
    if not isinstance(dense, nn.Linear):
        raise TypeError(f"{name} must be an nn.Linear to become a {kind.__name__}, got {type(dense).__name__}")
    (bm, bk), rows = recorded["blocksize"], halves * dense.out_features
    return kind(
        dense.in_features, rows, dense.bias is not None, (bm, bk),
        density=recorded["nnz"] / max(1, (rows // bm) * (dense.in_features // bk)),
        activation=recorded.get("activation"), device=dense.weight.device, dtype=dense.weight.dtype,
    )  # fmt: skip


def make_swiglu(name: str, block: nn.Module, recorded: dict[str, Any]) -> nn.Module:
    """A SwiGLU in the place of a block of gate_proj, up_proj and down_proj."""
    gate_up = make_linear(
        f"{name}.gate_proj", block._modules.get("gate_proj"), recorded["gate_up"], GatedBsrLinear, halves=2
    )
    layer = SwiGLU.of(gate_up, make_linear(f"{name}.down_proj", block._modules.get("down_proj"), recorded["down"]))
    return Float8SwiGLU(layer) if recorded["kind"] == "Float8SwiGLU" else layer


def make_experts(name: str, dense: nn.Module, recorded: dict[str, Any]) -> BsrExperts:
    """A BsrExperts in the place of a module with the 3-D parameters gate_up_proj and down_proj."""
    layers = []
    for part in PARTS:
        weight = dense._parameters.get(f"{part}_proj")
        if weight is None or weight.dim() != 3:
            raise TypeError(f"{name}.{part}_proj must be a 3-D parameter to become a BsrGroupedLinear")
        (experts, rows, cols), (bm, bk) = weight.shape, recorded[part]["blocksize"]
        patterns, blocks = 1 if recorded["one_pattern"] else experts, (rows // bm) * (cols // bk)
        layers.append(
            BsrGroupedLinear(
                experts,
                cols,
                rows,
                False,
                (bm, bk),
                one_pattern=recorded["one_pattern"],
                density=recorded[part]["nnz"] / max(1, patterns * blocks),
                device=weight.device,
                dtype=weight.dtype,
            )  # fmt: skip
        )
    return BsrExperts(layers[0], layers[1], recorded["activation"], recorded["group_rows"])


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
            report = sparsify_(
                model,
                SparsityConfig((config.blocksize[0], config.blocksize[1]), config.density),
                lambda module, name: config.fits(name),
                fuse=config.fuse,
            )
            if not report.changed:
                raise ValueError(f"BlockSparseConfig replaces no layer of this model:\n{report}")
            for change in report.skipped:
                LOG.warning("BlockSparseConfig leaves %s as it is: %s", change.name, change.skipped)
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
        return not any(layer["kind"].startswith("Float8") for layer in (self.quantization_config.layers or {}).values())


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
