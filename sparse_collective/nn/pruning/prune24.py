"""From a model to one with 2:4 sparse layers: masks for training, and the swap for inference."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from cute_kernels.dtypes import FLOAT8
from cute_kernels.sparse24.format import DTYPES, check_groups, prune_2_4

from ...bsr import BsrMatrix
from ...bsr24.matrix import check_blocks
from ..gated import GatedBsrLinear, GatedLinear
from ..grouped import BsrGroupedLinear
from ..linear import BsrLinear
from ..structured import Bsr24Linear, Sparse24Linear
from ..swap import (
    Change,
    FilterFn,
    Report,
    check_config,
    expert_parameters,
    has_hooks,
    owners_of,
    select,
    shape_of,
    size_of,
    skipped,
    swap_layers,
)

__all__ = ["Masked24BsrLinear", "Masked24Linear", "Sparse24Config", "mask_2_4_", "prune_2_4_"]


@dataclass(frozen=True)
class Sparse24Config:
    """Configuration of mask_2_4_ and prune_2_4_: each BsrLinear is changed, and with dense=True each nn.Linear, too."""

    dense: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dense, bool):
            raise TypeError(f"Sparse24Config: dense must be True or False, got {self.dense!r}")


class Masked24BsrLinear(BsrLinear):
    """A BsrLinear in training that multiplies by its values with 2:4 masks; mask_2_4_ makes one."""

    @property
    def weight(self) -> BsrMatrix:
        """The weight with what a mask hides set to zero; gradients pass to all values."""
        values = masked(self.values)
        if torch.compiler.is_compiling():  # which does not trace super().weight; see BsrModule.weight
            return self._matrix(values, check=not self._checked)
        return super().weight.with_values(values)


class Masked24Linear(nn.Linear):
    """An nn.Linear in training that multiplies by its weight with 2:4 masks; mask_2_4_ makes one."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, masked(self.weight), self.bias)


class Masked24GatedBsrLinear(Masked24BsrLinear, GatedBsrLinear):
    """A GatedBsrLinear with 2:4 masks; mask_2_4_ makes one."""


class Masked24GatedLinear(GatedLinear, Masked24Linear):
    """A GatedLinear with 2:4 masks; mask_2_4_ makes one."""


def masked(w: Tensor) -> Tensor:
    """prune_2_4 of finite w (..., K), with the gradient of the identity (straight-through)."""
    return w + (prune_2_4(w.detach()) - w).detach()


MASKED = {
    BsrLinear: Masked24BsrLinear,
    GatedBsrLinear: Masked24GatedBsrLinear,
    nn.Linear: Masked24Linear,
    GatedLinear: Masked24GatedLinear,
}


def mask_2_4_(model: nn.Module, config: Sparse24Config = Sparse24Config(), filter_fn: FilterFn | None = None) -> Report:
    """Train the BsrLinear layers of a model with 2:4 masks.

    In each forward, the two elements of largest magnitude of every four neighbors in a row are multiplied. The gradient
    reaches all four (straight-through), so masks may change.

    The layers remain the same modules, with the same parameters, optimizers, hooks and state; their class becomes
    Masked24BsrLinear. GEMMs take as long as without masks. After training, `prune_2_4_` stores the masked weights.

    Args:
        model: such a layer, or a module that contains some; changed in place. Layers that prune_2_4_ would skip get no
            masks and are reported, except that hooks are allowed.
        config: Sparse24Config(dense=True) also turns each nn.Linear into a Masked24Linear.
        filter_fn: (module, fqn) -> True to mask this layer. Layers that it rejects are not in the report.

    Returns:
        A Report with one line per layer. Layers that already have masks are not in it.

    Raises:
        TypeError: `config` is not a Sparse24Config.
        ValueError: the model has no such layer, or the filter accepts none.

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", 2021.

    Example:
        mask_2_4_(model, Sparse24Config(dense=True))
    """
    check_config("mask_2_4_", config, Sparse24Config)
    report, owners, dense = Report(), owners_of(model), config.dense
    for layer, (name, *_) in select("mask_2_4_", model, kinds_of(dense), filter_fn, hint_of(dense)).items():
        if type(layer) in MASKED.values():
            continue
        why, size = why_not(layer, owners), size_of(layer)
        if not why and type(layer) not in MASKED:
            why = f"is a {type(layer).__name__}"  # parametrized: masks of its own
        stored, blocks = (layer.nnz, math.prod(layer.grid)) if isinstance(layer, BsrLinear) else (0, 0)
        report.changes.append(Change(name, shape_of(layer), size, size, stored, blocks, why))
        if not why:
            layer.__class__ = MASKED[type(layer)]
    report.changes += experts_of(model, dense)
    return report


def prune_2_4_(
    model: nn.Module, config: Sparse24Config = Sparse24Config(), filter_fn: FilterFn | None = None
) -> Report:
    """Replace each BsrLinear of a model by a Bsr24Linear, for inference, also inside a SwiGLU.

    Keeps the two elements of largest magnitude of every four neighbors in a row. A model that was not trained with 2:4
    masks loses accuracy; see mask_2_4_. The weight of a parametrized layer is the computed one.

    These are skipped, and reported: layers whose blocks' sides are not multiples of 64, layers of experts, layers with
    hooks, and layers that share a parameter with another module.

    Args:
        model: a module that contains such layers; changed in place.
        config: Sparse24Config(dense=True) also replaces each nn.Linear by a Sparse24Linear. Skipped are subclasses of
            nn.Linear other than Masked24Linear and GatedLinear, layers whose in_features is not a multiple of 4, and
            3-D parameters, such as those of experts.
        filter_fn: (module, fqn) -> True to replace this layer. Layers that it rejects are not in the report.

    Returns:
        A Report with one line per layer. Parameters count stored values and biases.

    Raises:
        TypeError: `config` is not a Sparse24Config.
        ValueError: `model` is such a layer itself or has none, or the filter accepts none.

    Example:
        prune_2_4_(model, Sparse24Config(dense=True))
    """
    check_config("prune_2_4_", config, Sparse24Config)
    if isinstance(model, (BsrLinear, nn.Linear)):
        kind = "Bsr24Linear" if isinstance(model, BsrLinear) else "Sparse24Linear"
        raise ValueError(f"prune_2_4_ changes the layers inside of a model; of one layer use {kind}(layer)")
    report, owners, made, dense = Report(), owners_of(model), {}, config.dense
    for layer, (name, *_) in select("prune_2_4_", model, kinds_of(dense), filter_fn, hint_of(dense)).items():
        why = why_not(layer, owners) or ("has hooks, which would be lost" if has_hooks(layer) else "")
        if why:
            report.changes.append(skipped(name, layer, why))
            continue
        new = made[layer] = (Bsr24Linear if isinstance(layer, BsrLinear) else Sparse24Linear)(layer)
        blocks = (new.nnz, math.prod(new.grid)) if isinstance(new, Bsr24Linear) else ()
        report.changes.append(Change(name, shape_of(layer), size_of(layer), size_of(new), *blocks))
    swap_layers(model, made)
    report.changes += experts_of(model, dense)
    return report


def hint_of(dense: bool) -> str:
    """Advice for a model that has none of these layers."""
    return "" if dense else "; pass Sparse24Config(dense=True) for its nn.Linear"


def experts_of(model: nn.Module, dense: bool) -> list[Change]:
    """3-D parameters, which are left as they are."""
    found = expert_parameters(model) if dense else []
    return [Change(name, shape, math.prod(shape), math.prod(shape), skipped=why) for name, shape, why in found]


def kinds_of(dense: bool) -> tuple[type[Any], ...]:
    """Layers that are looked at."""
    return (BsrLinear, BsrGroupedLinear, *((nn.Linear,) if dense else ()))


def why_not(layer: Any, owners: Counter) -> str:
    """The reason why a layer gets no 2:4 weight, or ""."""
    kind = type_before_parametrizations(layer)
    if kind is BsrGroupedLinear:
        return "holds a weight for each expert, of which there is no 2:4 layer; bsr_grouped_linear takes a Bsr24"
    if kind not in (*MASKED, *MASKED.values()):
        return f"is a {kind.__name__}"
    sparse = issubclass(kind, BsrLinear)
    values = (layer.values if sparse else layer.weight).data
    if type(values) is not Tensor:
        return f"its weight is a {type(values).__name__}"
    if any(owners[id(p)] > 1 for p in layer.parameters()):
        return "shares a parameter with another module"
    if values.dtype in FLOAT8 or not sparse and values.dtype not in DTYPES:
        return f"its weight is {values.dtype}"
    try:
        if sparse:
            check_blocks("2:4", *layer.blocksize)
        else:
            check_groups("weight", values)
    except ValueError as error:
        return str(error)
    return ""
