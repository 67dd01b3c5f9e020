"""Recognition of modules of other libraries by the numbers that their forward returns.

A module is called on a copy with small FP64 parameters on the CPU, and the result is compared with the formula that it
would be replaced by. So a class of the same name that computes something else is never replaced.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from cute_kernels.annotations import Activation
from cute_kernels.functions import ACTIVATIONS

from .swap import has_hooks

__all__ = ["activation_of", "numbers"]

GATES: dict[Activation | None, Callable[[Tensor], Tensor]] = {None: nn.Identity()}
GATES |= {cast(Activation, name): function for name, function in ACTIVATIONS.items()}


def numbers(*shape: int, scale: float = 1.0, ascending: bool = False) -> Tensor:
    """FP64 numbers in [-scale, scale] on the CPU, without a random generator; others for each scale.

    ascending: rows are multiplied by 0.3 to 100, so that activations get small and large numbers.
    """
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64, device="cpu")
    table = scale * torch.sin(count * (1.3 + 0.1 * scale)).view(shape)
    if ascending:
        table *= torch.logspace(-0.5, 2, shape[-2], dtype=torch.float64, device="cpu")[:, None]
    return table


def activation_of(
    module: nn.Module,
    parts: Mapping[str, nn.Module | nn.Parameter],
    sizes: Mapping[str, int],
    inputs: tuple[Tensor, ...],
    formula: Callable[[Callable[[Tensor], Tensor]], Tensor],
) -> tuple[Activation | None, str]:
    """The activation with which a module computes `formula`.

    Args:
        module: is not changed; its forward is called in training mode, so that dropout shows.
        parts: small FP64 modules and parameters in the place of its own, by name.
        sizes: integers in the place of its attributes of these names.
        inputs: of its forward.
        formula: of an activation, the result that is expected.

    Returns:
        (activation, ""), or (None, reason) if it computes something else, or has hooks or further parameters.
    """
    owned = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    if further := [name for name in owned if name.split(".")[0] not in parts]:
        return None, f"{type(module).__name__} has further parameters ({min(further)})"
    if has_hooks(module):
        return None, f"{type(module).__name__} has hooks, which would be lost"
    if "forward" in vars(module):
        return None, f"the forward of {type(module).__name__} was replaced by another function"
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            found = inspect.unwrap(type(module).forward)(small_copy(module, parts, sizes), *inputs)
    except Exception as error:  # of any code
        return None, f"the forward of {type(module).__name__} fails on small inputs ({type(error).__name__}: {error})"
    for name, function in GATES.items():
        expected = formula(function)
        if type(found) is Tensor and found.shape == expected.shape and found.dtype is expected.dtype:
            if torch.allclose(found, expected, rtol=1e-6, atol=1e-6):
                return name, ""
    known = ", ".join(ACTIVATIONS)
    return None, f"{type(module).__name__} computes no gated feed-forward layer with an activation of {known}"


def small_copy(module: nn.Module, parts: Mapping[str, Any], sizes: Mapping[str, int]) -> nn.Module:
    """A copy of a module with other parts, in training mode."""
    small = copy.copy(module)
    small.__dict__["_modules"] = {
        name: parts[name] if name in parts else copy.deepcopy(child) for name, child in module._modules.items()
    }
    small.__dict__["_parameters"] = {name: parts[name] for name in module._parameters}
    for name, size in sizes.items():
        if isinstance(getattr(module, name, None), int):
            setattr(small, name, size)
    return small.train()
