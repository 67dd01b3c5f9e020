"""quantize_: FP8 layers in the place of a model's block-sparse ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.dtypes import FLOAT8

from .feed_forward import SwiGLU
from .fp8 import Float8BsrLinear, Float8SwiGLU
from .gated import GatedBsrLinear
from .grouped import BsrGroupedLinear
from .linear import BsrLinear
from .pruning.prune24 import Masked24BsrLinear, Masked24GatedBsrLinear
from .structured import Bsr24Linear
from .swap import (
    Change,
    FilterFn,
    Layer,
    Report,
    check_config,
    hooks_of,
    names_of,
    select,
    shape_of,
    size_of,
    skipped,
    swap_layers,
)

__all__ = ["Float8Config", "quantize_"]

CARRIED_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CARRIED = (  # with what says how they are called
    *CARRIED_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
NARROW = (BsrLinear, GatedBsrLinear, Masked24BsrLinear, Masked24GatedBsrLinear)  # classes that quantize_ replaces


@dataclass(frozen=True)
class Float8Config:
    """Configuration of quantize_: the FP8 dtype of weights and activations, float8_e4m3fn or float8_e5m2.

    Raises:
        TypeError: dtype is not an FP8 dtype.
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.dtype not in FLOAT8:
            raise TypeError(f"Float8Config: dtype is {self.dtype}; use one of {', '.join(map(str, FLOAT8))}")


def quantize_(model: nn.Module, config: Float8Config = Float8Config(), filter_fn: FilterFn | None = None) -> Report:
    """Replace each BsrLinear of a model by a Float8BsrLinear, for inference.

    A SwiGLU whose two layers are replaced becomes a Float8SwiGLU. Forward hooks and forward pre-hooks of a layer are
    kept, and their handles remove them. These are skipped, and reported: BsrGroupedLinear, Bsr24Linear, subclasses, and
    parametrized and sharded layers.

    Args:
        model: a module that contains such layers; changed in place.
        config: see Float8Config.
        filter_fn: (module, fqn) -> True to replace this layer, as in torchao; it is called with each BsrLinear, also
            inside a SwiGLU. Layers that it rejects are not in the report.

    Returns:
        A Report with one line per layer. Parameters count values and biases.

    Raises:
        TypeError: `config` is not a Float8Config.
        ValueError: `model` is a BsrLinear itself or has none, the filter accepts none, or a layer to replace has hooks
            of gradients or of its state, or a pre-hook of torch.nn.utils that computes its weight. The model is
            unchanged.

    Example:
        report = quantize_(model, filter_fn=lambda module, fqn: not fqn.endswith("lm_head"))
    """
    check_config("quantize_", config, Float8Config)
    if isinstance(model, BsrLinear):
        raise ValueError("quantize_ changes the layers inside of a model; of one layer use Float8BsrLinear(layer)")
    chosen: dict[Any, list[str]] = select("quantize_", model, (BsrLinear, BsrGroupedLinear, Bsr24Linear), filter_fn)
    reasons = {layer: why_not(layer) for layer in chosen}
    ready = {layer for layer, why in reasons.items() if not why}
    fused: dict[Any, list[str]] = {
        m: names for m, names in names_of(model).items() if type(m) is SwiGLU and ready.issuperset(m.children())
    }
    for module, (name, *_) in [*((layer, chosen[layer]) for layer in ready), *fused.items()]:
        check_hooks(name or type(module).__name__, module)
    report, made = Report(), {}
    for layer, (name, *_) in chosen.items():
        if reasons[layer]:
            report.changes.append(skipped(name, layer, reasons[layer]))
            continue
        new = made[layer] = with_hooks_of(layer, Float8BsrLinear(layer, config.dtype))
        blocks = new.nnz, math.prod(new.grid)
        report.changes.append(Change(name, shape_of(layer), size_of(layer), size_of(new), *blocks))
    swap_layers(model, made)
    for module in fused:
        module.__class__ = Float8SwiGLU
    return report


def why_not(layer: nn.Module) -> str:
    """The reason why quantize_ skips a layer, or ""."""
    if type(layer) not in NARROW:
        return f"is a {type(layer).__name__}, of which there is no FP8 layer"
    values = layer.values.data
    return "" if type(values) is Tensor else f"its weight is a {type(values).__name__}"


def check_hooks(name: str, module: nn.Module) -> None:
    """ValueError if a layer has hooks that its replacement would not call, or not with what they were made for."""
    for hook in module._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils"):
            raise ValueError(
                f"quantize_: {name} has a hook that makes its weight in each call ({type(hook).__name__}); make it "
                "permanent first, as by torch.nn.utils.prune.remove or remove_spectral_norm"
            )
    if "forward" in vars(module):
        raise ValueError(
            f"quantize_: {name}.forward was replaced by another function, which its replacement would not call; put "
            "that on the new layer, or set it back"
        )
    for kind in hooks_of(module):
        if kind not in CARRIED_HOOKS:
            why = "has no gradients" if "backward" in kind else "has another state"
            raise ValueError(
                f"quantize_: {name} has hooks ({kind[1:]}), and its replacement {why}; remove them by their handles, "
                "and register on the new layer what it is to have. Forward hooks and pre-hooks are taken over"
            )


def with_hooks_of(module: nn.Module, new: Layer) -> Layer:
    """`new` with the same dicts of forward hooks, which handles know."""
    for name in CARRIED:
        setattr(new, name, getattr(module, name))
    return new
