"""Swap the linear layers of a model for block-sparse ones, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks as arguments
from ..pattern import top_keys, top_keys_of_rows
from .gated import GatedBsrLinear, GatedLinear
from .linear import BsrLinear
from .module import block_grid
from .pruning.scores import Blocks, Scores
from .swap import (
    Change,
    FilterFn,
    Report,
    check_config,
    expert_parameters,
    has_hooks,
    names_of,
    owners_of,
    select,
    shape_of,
    size_of,
    skipped,
    some_names,
    swap_layers,
)

__all__ = ["SparsityConfig", "densify_", "sparsify_"]


@dataclass(frozen=True)
class SparsityConfig:
    """Configuration of sparsify_ for the layers of a model.

    blocksize: (bm, bk).
    density: in [0, 1], of each layer; or densities by name, of which the first pattern that fits a layer's name counts
        (as in a shell, {"*.mlp.*": 0.25, "*": 0.5}), and layers that none fits are left out. Each pattern must fit one.
    scores: by which blocks are kept: "magnitude", "gradient", or a function of Blocks such as InputNorms.
    even_rows: whether each block row keeps equally many, round(density * K / bk).

    Raises:
        TypeError, ValueError: a block's side or a density is unsupported.
    """

    blocksize: tuple[int, int] = (128, 128)
    density: float | Mapping[str, float] = 0.5
    scores: str | Scores = "magnitude"
    even_rows: bool = False

    def __post_init__(self) -> None:
        arguments.block_grid((0, 0), arguments.pair(self.blocksize, "blocksize"))
        for density in self.density.values() if isinstance(self.density, Mapping) else [self.density]:
            arguments.check_density(density)

    def density_of(self, name: str) -> float | None:
        """The density of the layer of this name; None where no pattern fits it."""
        if not isinstance(self.density, Mapping):
            return self.density
        return next((d for pattern, d in self.density.items() if fnmatchcase(name, pattern)), None)


def sparsify_(model: nn.Module, config: SparsityConfig, filter_fn: FilterFn | None = None) -> Report:
    """Put a BsrLinear in the place of each nn.Linear of a model, with the blocks that a config chooses.

    Left as they are, and reported: layers whose features the blocks do not divide, of another dtype than BsrLinear has,
    with hooks, with a weight that another module shares, subclasses of nn.Linear, which other code may read in its
    own way (as nn.MultiheadAttention does), and 3-D parameters, as of experts. A GatedLinear becomes a GatedBsrLinear.
    On the meta device layers get the shapes alone; load a state.

    Args:
        model: any module that contains nn.Linear; changed in place. A layer with several names is replaced in all of
            its places if one of them is accepted and fits a pattern.
        config: see SparsityConfig.
        filter_fn: (module, fqn) -> True to swap this nn.Linear, as torchao has it. Layers that it refuses are not in
            the report.

    Returns:
        What was done, layer by layer.

    Raises:
        TypeError: `config` is no SparsityConfig.
        ValueError: `model` is an nn.Linear itself or has none, the filter accepts no layer, a pattern of the config
            fits no layer, no pattern fits one that the filter accepts, or two names of one layer have different
            densities. The model is as it was.

    Example:
        report = sparsify_(model, SparsityConfig((128, 128), 0.25), lambda module, fqn: ".mlp." in fqn)
    """
    check_config("sparsify_", config, SparsityConfig)
    if isinstance(model, nn.Linear):
        raise ValueError("sparsify_ changes the layers inside of a model; of one layer use BsrLinear.from_linear")
    chosen, owners, experts = select("sparsify_", model, (nn.Linear,), filter_fn), owners_of(model), []
    for name, shape, why in expert_parameters(model):
        if config.density_of(name) is not None:
            experts.append(Change(name, shape, math.prod(shape), math.prod(shape), skipped=why))
    _check_patterns(model, config)
    densities = {m: _density("sparsify_", config, names) for m, names in chosen.items()}
    if all(density is None for density in densities.values()) and not experts:
        raise ValueError(
            f"sparsify_: no pattern of config.density fits a layer that filter_fn accepts ({some_names(chosen)}); "
            "widen one of them"
        )
    report, made = Report(), {}
    for linear, density in densities.items():
        if density is None:
            continue
        name = chosen[linear][0]
        if why := _why_not(linear, config, owners):
            report.changes.append(skipped(name, linear, why))
            continue
        layer = made[linear] = _sparse(linear, config, density)
        stored, blocks = layer.nnz, math.prod(layer.grid)
        report.changes.append(Change(name, shape_of(linear), size_of(linear), size_of(layer), stored, blocks))
    swap_layers(model, made)
    report.changes += experts
    return report


def _density(op: str, config: SparsityConfig, names: list[str]) -> float | None:
    """The density of a layer with these names; None where no pattern fits one."""
    found = {name: d for name in names if (d := config.density_of(name)) is not None}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{op}: one layer has the names {', '.join(map(repr, found))}, for which config.density has the densities "
            f"{', '.join(map(str, found.values()))}; give them one"
        )
    return next(iter(found.values()), None)


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
    """Put an nn.Linear in the place of each BsrLinear of a model; dropped blocks are zeros.

    A GatedBsrLinear becomes a GatedLinear. Left as they are, and reported: layers with a fused activation or with
    hooks.

    Args:
        model: any module that contains such layers; changed in place.
        filter_fn: (module, fqn) -> True to swap this BsrLinear. Layers that it refuses are not in the report.

    Returns:
        What was done, layer by layer.

    Raises:
        ValueError: `model` is a BsrLinear itself or has none, or the filter accepts no layer.
    """
    if isinstance(model, BsrLinear):
        raise ValueError("densify_ changes the layers inside of a model; of one layer use its to_linear()")
    report, made = Report(), {}
    for layer, (name, *_) in select("densify_", model, (BsrLinear,), filter_fn).items():
        why = "has hooks" if has_hooks(layer) else ""
        if layer.activation is not None and not layer.gated:
            why = f"applies {layer.activation}, which nn.Linear does not"
        if why:
            report.changes.append(skipped(name, layer, why))
            continue
        linear, blocks = layer.to_linear(), math.prod(layer.grid)
        made[layer] = linear
        report.changes.append(Change(name, shape_of(layer), size_of(layer), size_of(linear), blocks, blocks))
    swap_layers(model, made)
    return report


def _why_not(linear: nn.Linear, config: SparsityConfig, owners: Counter) -> str:
    """The reason why a layer cannot be swapped, or ""."""
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
        block_grid(linear.in_features, linear.out_features, config.blocksize)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _sparse(linear: nn.Linear, config: SparsityConfig, density: float) -> BsrLinear:
    kind = GatedBsrLinear if isinstance(linear, GatedLinear) else BsrLinear
    more: dict[str, Any] = {"activation": linear.activation} if isinstance(linear, GatedLinear) else {}
    rows, cols = block_grid(linear.in_features, linear.out_features, config.blocksize)
    per_row = round(density * cols)
    if linear.weight.is_meta:  # which blocks is in the state that will be loaded; here, how many
        density = per_row / max(1, cols) if config.even_rows else density
        return kind.from_linear(linear, config.blocksize, density, **more)
    scores = Blocks.of(linear, config.blocksize).score(config.scores).view(rows, cols)
    if config.even_rows:
        keys = top_keys_of_rows(scores, per_row)
    else:
        keys = top_keys(scores, round(density * rows * cols))
    mask = torch.zeros(rows * cols, dtype=torch.bool, device=scores.device).index_fill_(0, keys, True)
    return kind.from_linear(linear, config.blocksize, mask=mask.view(rows, cols), **more)
