"""Selection of a model's layers by a filter, and their replacement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from .module import BsrModule
from .report import Change, Report, size_of

__all__ = ["Change", "FilterFn", "Report", "expert_parameters", "select", "size_of", "swap_layers"]

Layer = TypeVar("Layer", bound=nn.Module)
FilterFn = Callable[[nn.Module, str], bool]  # (module, fully qualified name) -> True to change it
SHOWN = 3  # names in a message
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))  # torch's attributes of hooks


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Each module of a model with all the names that it has there: one for each path to it."""
    found: dict[nn.Module, list[str]] = {}

    def walk(module: nn.Module, name: str, above: tuple[nn.Module, ...]) -> None:
        found.setdefault(module, []).append(name)
        for child_name, child in module._modules.items():
            if child is not None and child not in above:  # a module may hold itself
                walk(child, f"{name}.{child_name}" if name else child_name, (*above, child))

    walk(model, "", (model,))
    return found


def check_config(op: str, config, kind: type) -> None:
    """TypeError for what is no config of the function `op`."""
    if not isinstance(config, kind):
        raise TypeError(
            f"{op}: config must be a {kind.__name__}, got {type(config).__name__}; filter_fn comes after it"
        )


def select(
    op: str, model: nn.Module, kinds: tuple[type[Layer], ...], filter_fn: FilterFn | None, hint: str = ""
) -> dict[Layer, list[str]]:
    """The modules of these kinds that a filter accepts by one of their names, with the names that it accepts.

    Args:
        op: the function that asks, for messages.
        hint: what to do where the model has no such module.

    Raises:
        TypeError: filter_fn cannot be called.
        ValueError: the model has no such module, or the filter accepts none.
    """
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"{op}: filter_fn must be a function of (module, fqn), got {type(filter_fn).__name__}")
    candidates = {m: names for m, names in names_of(model).items() if isinstance(m, kinds)}
    experts = "".join(f"; {name} {shape} is {why}" for name, shape, why in expert_parameters(model)[:SHOWN])
    if not candidates:
        raise ValueError(f"{op}: the model has no {' or '.join(kind.__name__ for kind in kinds)}{hint}{experts}")
    if filter_fn is None:
        return candidates
    chosen = {m: [name for name in names if filter_fn(m, name)] for m, names in candidates.items()}
    chosen = {m: names for m, names in chosen.items() if names}
    if not chosen:
        raise ValueError(
            f"{op}: filter_fn accepts none of the {len(candidates)} layers ({some_names(candidates)}); it is called as "
            f"filter_fn(module, fqn), with the module first{experts}"
        )
    return chosen


def some_names(modules: Mapping[Any, list[str]]) -> str:
    """The first names, for a message."""
    names = [repr(names[0]) for names in modules.values()]
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def expert_parameters(model: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, description) of the 3-D parameters that no layer of this package or torch.nn owns.

    These are mostly weights of experts, (E, ., .), which have no nn.Linear that could be changed.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, BsrModule) or type(module).__module__.startswith("torch.nn."):
            continue
        for name, p in module._parameters.items():
            if p is not None and p.dim() == 3 and min(p.shape) > 1 and p.is_floating_point():
                why = f"a 3-D parameter of {type(module).__name__}, not an nn.Linear; for experts see BsrGroupedLinear"
                found.append((f"{path}.{name}" if path else name, tuple(p.shape), why))
    return found


def swap_layers(model: nn.Module, made: Mapping[Any, nn.Module]) -> None:
    """Put each new module in every place of the one that it replaces."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]


def owners_of(model: nn.Module) -> Counter:
    """By a parameter's id, how many modules have it."""
    return Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)


def has_hooks(module: nn.Module) -> bool:
    return any(value for name, value in module.__dict__.items() if name.endswith("_hooks") and "state_dict" not in name)


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that it has, by the names of torch's attributes."""
    return [name for name in HOOKS if getattr(module, name, None)]


def skipped(name: str, layer: nn.Module, why: str) -> Change:
    """The Change of a layer that stays."""
    return Change(name, shape_of(layer), size_of(layer), size_of(layer), skipped=why)


def shape_of(layer: Any) -> tuple[int, int]:
    return layer.out_features, layer.in_features
