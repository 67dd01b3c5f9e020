"""Swap the linear layers of a model for block-sparse ones, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.runtime.torch_compat import is_dtensor

from .. import checks as arguments
from .config import SparsityConfig, density_of, sparse_of, why_no_grid
from .experts import ExpertsModules, experts_in, swap_experts
from .fuse import Fused, fuse_blocks
from .gated import GatedLinear
from .grouped import BsrGroupedLinear
from .linear import BsrLinear
from .report import Change, Report, size_of
from .shards import WHOLE, check_held
from .swap import (
    FilterFn,
    check_config,
    expert_parameters,
    has_hooks,
    names_of,
    owners_of,
    select,
    shape_of,
    skipped,
    some_names,
    swap_layers,
)

__all__ = ["SparsityConfig", "densify_", "sparsify_"]


def sparsify_(
    model: nn.Module, config: SparsityConfig, filter_fn: FilterFn | None = None, fuse: bool = False
) -> Report:
    """Replace each nn.Linear of a model by a BsrLinear, which stores the blocks that the config selects.

    A GatedLinear becomes a GatedBsrLinear. Experts with 3-D parameters gate_up_proj (E, 2 I, H) and down_proj (E, H,
    I), as in transformers, become BsrExperts with one pattern per expert, if they compute a gated feed-forward layer
    with a supported activation; a call of a small copy of the module tests this.

    These are skipped, and reported with the reason: layers whose features are not multiples of the block's sides, with
    an unsupported dtype, with hooks, or with a weight that another module shares; subclasses of nn.Linear, which other
    code may read in its own way, as nn.MultiheadAttention does; and other 3-D parameters. On the meta device layers get
    shapes only; load a state afterwards.

    Args:
        model: a module that contains nn.Linear or such experts; changed in place. A layer with several names is
            replaced everywhere if one of its names is accepted and matches a pattern.
        config: see SparsityConfig. Experts have the names of their parameters.
        filter_fn: (module, fqn) -> True to replace this nn.Linear or experts module, as in torchao. Layers that it
            rejects are not in the report.
        fuse: True also replaces blocks of gate_proj, up_proj and down_proj by SwiGLU if their forward computes
            down_proj(activation(gate_proj(x)) * up_proj(x)), as in transformers' Llama, Qwen, Mistral and Gemma; a call
            of a small copy of the block tests this. With blocks of 16, 32 or 64 rows the patterns are those of the
            unfused layers. Larger blocks hold rows of gate_proj and of up_proj in groups of 64, which share a pattern:
            a block's score is the sum over its parts. Other linear layers are replaced one by one, and the report has
            the reason.

    Returns:
        A Report with one line per layer.

    Raises:
        TypeError: `config` is not a SparsityConfig.
        ValueError: `model` is an nn.Linear itself or has none, the filter accepts no layer, a name pattern of the
            config matches no layer, no pattern matches an accepted layer, or two names of one layer have different
            densities. The model is unchanged.

    Example:
        report = sparsify_(model, SparsityConfig((128, 128), 0.25), lambda module, fqn: ".mlp." in fqn)
    """
    check_config("sparsify_", config, SparsityConfig)
    if isinstance(model, nn.Linear):
        raise ValueError("sparsify_ changes the layers inside of a model; of one layer use BsrLinear.from_linear")
    experts, owners = experts_in(model), owners_of(model)
    kinds: tuple[Any, ...] = nn.Linear, *{type(m) for m, (_, why) in experts.items() if not why}
    chosen: dict[Any, list[str]] = select("sparsify_", model, kinds, filter_fn)
    left = _left(model, config, experts)
    _check_patterns(model, config)
    asked = {m: density_of("sparsify_", config, names) for m, names in chosen.items() if isinstance(m, nn.Linear)}
    densities = {linear: density for linear, density in asked.items() if density is not None}
    made, changes = swap_experts({m: names for m, names in chosen.items() if m in experts}, experts, config, owners)
    if not densities and not changes and not left:
        raise ValueError(
            f"sparsify_: no pattern of config.density fits a layer that filter_fn accepts ({some_names(chosen)}); "
            "widen one of them"
        )
    reasons = {linear: _why_not(linear, owners) for linear in densities}
    fused = fuse_blocks(names_of(model), config, densities, reasons) if fuse else Fused({}, {}, {})
    report = Report()
    for linear, density in densities.items():
        name = chosen[linear][0]
        if linear in fused.changes:
            report.changes += fused.changes[linear]
        elif why := reasons[linear] or why_no_grid(linear, config):
            report.changes.append(skipped(name, linear, why))
        else:
            layer = made[linear] = sparse_of(linear, config, density)
            blocks, note = (layer.nnz, math.prod(layer.grid)), fused.notes.get(linear, "")
            report.changes.append(Change(name, shape_of(linear), size_of(linear), size_of(layer), *blocks, note=note))
    swap_layers(model, made | fused.layers)
    report.changes += changes + left
    return report


def _left(model: nn.Module, config: SparsityConfig, experts: ExpertsModules) -> list[Change]:
    """3-D parameters that a pattern fits, but that no layer replaces."""
    changes = []
    for name, shape, why in expert_parameters(model):
        reason = experts[model.get_submodule(name.rpartition(".")[0])][1]
        if reason and config.density_of(name) is not None:
            changes.append(Change(name, shape, math.prod(shape), math.prod(shape), skipped=f"{why}; {reason}"))
    return changes


def _check_patterns(model: nn.Module, config: SparsityConfig) -> None:
    """ValueError for a pattern of the config that fits no nn.Linear and no 3-D parameter."""
    if not isinstance(config.density, Mapping):
        return
    layers = {m: names for m, names in names_of(model).items() if isinstance(m, nn.Linear)}
    names = [name for of_one in layers.values() for name in of_one] + [name for name, *_ in expert_parameters(model)]
    for pattern in config.density:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"sparsify_: the pattern {pattern!r} of config.density fits none of the model's {len(layers)} "
                f"nn.Linear ({some_names(layers)}); correct it, or leave it out"
            )


def densify_(model: nn.Module, filter_fn: FilterFn | None = None) -> Report:
    """Replace each BsrLinear of a model by an nn.Linear; dropped blocks become zeros. The reverse of sparsify_.

    A GatedBsrLinear becomes a GatedLinear. These are skipped, and reported: layers with a fused activation or with
    hooks, and BsrGroupedLinear.

    Args:
        model: a module that contains such layers; changed in place.
        filter_fn: (module, fqn) -> True to replace this BsrLinear. Layers that it rejects are not in the report.

    Returns:
        A Report with one line per layer.

    Raises:
        TypeError: several ranks share a layer that the filter accepts, by fully_shard or parallelize_module. The model
            is unchanged.
        ValueError: `model` is a BsrLinear itself or has none, or the filter accepts no layer.

    Example:
        densify_(model)
    """
    if isinstance(model, BsrLinear):
        raise ValueError("densify_ changes the layers inside of a model; of one layer use its to_linear()")
    report, made = Report(), {}
    chosen: dict[Any, list[str]] = select("densify_", model, (BsrLinear, BsrGroupedLinear), filter_fn)
    for layer, (name, *_) in chosen.items():
        check_held("densify_", name, layer)
        if layer._shard_mesh is not None or is_dtensor(layer.values):
            raise TypeError(f"densify_: fully_shard has split {name} over ranks; {WHOLE.format('densify_')}")
    for layer, (name, *_) in chosen.items():
        why = "has hooks" if has_hooks(layer) else ""
        if isinstance(layer, BsrGroupedLinear):
            why = "is a BsrGroupedLinear, of which torch has no dense layer"
        elif layer.activation is not None and not layer.gated:
            why = f"applies {layer.activation}, which nn.Linear does not"
        if why:
            report.changes.append(skipped(name, layer, why))
            continue
        linear, blocks = layer.to_linear(), math.prod(layer.grid)
        made[layer] = linear
        report.changes.append(Change(name, shape_of(layer), size_of(layer), size_of(linear), blocks, blocks))
    swap_layers(model, made)
    return report


def _why_not(linear: nn.Linear, owners: Counter) -> str:
    """The reason why a layer cannot be swapped, whatever its blocks, or ""."""
    if type(linear) not in (nn.Linear, GatedLinear):
        return f"is a {type(linear).__name__}"
    if has_hooks(linear):
        return "has hooks, which would be lost"
    if type(linear.weight.data) is not Tensor:
        return f"its weight is a {type(linear.weight.data).__name__}"
    if any(owners[id(p)] > 1 for p in linear.parameters(recurse=False)):
        return "shares a parameter with another module"
    try:
        arguments.check_dtypes(linear.weight.dtype, torch.int32, linear.weight.device)
    except TypeError as error:
        return str(error)
    return ""
