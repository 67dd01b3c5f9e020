"""torch.nn.utils.parametrize for layers whose weight is a parameter named `values`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

__all__ = ["Parametrizable", "Parametrizations", "check_not_computed", "name_of_values"]


class Parametrizations(nn.ModuleDict):
    """A ModuleDict with an item "values", which nn.ModuleDict refuses since it is the name of a method."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if hasattr(nn.ModuleDict, name):
            modules: dict[str, Any] = self._modules
            modules.setdefault(name, None)  # an item that exists is replaced without a check of its name
        super().add_module(name, module)


class Parametrizable(nn.Module):
    """Base of layers whose `values` register_parametrization supports."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "parametrizations" and type(value) is nn.ModuleDict:
            value = Parametrizations(value)  # type: ignore[arg-type]  # torch takes a ModuleDict for a mapping
        super().__setattr__(name, value)


def name_of_values(layer: nn.Module) -> str:
    """Name in the layer's state of the parameter that `values` is, or is computed of."""
    if is_parametrized(layer, "values"):
        return "parametrizations.values.original"
    return "values_orig" if "values_orig" in layer._parameters else "values"  # of torch.nn.utils.prune


def check_not_computed(op: str, layer: nn.Module) -> None:
    """TypeError if `values` are computed of another parameter, so that a write to them would be lost."""
    if name_of_values(layer) != "values":
        raise TypeError(
            f"{op}: values of this {type(layer).__name__} are computed of {name_of_values(layer)}, and cannot be "
            'changed in place; call torch.nn.utils.parametrize.remove_parametrizations(layer, "values"), or '
            'torch.nn.utils.prune.remove(layer, "values"), before'
        )
