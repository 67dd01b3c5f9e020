"""A user's element mask as part of a compiled kernel: a key of what it computes, and the tensors that it reads.

mask_mod(b, h, q, kv) is a plain Python function, or a frozen dataclass such as those of mask_mods.py. The numbers that
it captures or holds are constants of the kernel; tensors must be fields of dataclasses, and become arguments.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.function_key import function_key

TENSORS = {torch.int32: "int32", torch.int64: "int64", torch.float32: "float32"} | NAMES  # dtypes, by their names


@dataclass(frozen=True)
class Slot:
    """Stands for the kernel's argument of this number."""

    number: int


@dataclass(frozen=True)
class ElementMask:
    """The compiled half of a mask, equal to another if what they compute is the same."""

    key: str
    tensors: tuple[tuple[str, int], ...]  # dtype and rank of each that is read
    template: Callable = field(compare=False, repr=False)  # with Slots in the place of tensors

    def with_tensors(self, tensors: tuple) -> Callable:
        """The mask itself, on these tensors."""
        return _filled(self.template, tensors)


def element_mask(mask_mod: Callable | None) -> tuple[ElementMask | None, tuple[Tensor, ...]]:
    """What a kernel is compiled from, and the tensors it is called with.

    Raises:
        ValueError: the function captures a tensor, which would be a constant; or a tensor's dtype has no kernel.
        TypeError: it is neither a function nor a frozen dataclass, or captures what has no stable text.
    """
    if mask_mod is None:
        return None, ()
    tensors: list[Tensor] = []
    template, key = _parts(mask_mod, tensors)
    for tensor in tensors:
        if tensor.dtype not in TENSORS or tensor.dim() == 0:
            raise ValueError(
                f"mask_mod reads a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}; kernels read tensors of "
                f"{', '.join(sorted(TENSORS.values()))}, of one or more dimensions"
            )
    kinds = tuple((TENSORS[t.dtype], t.dim()) for t in tensors)
    return ElementMask(key, kinds, template), tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _parts(value, tensors: list) -> tuple:
    """(template, key) of a mask or of a field of one; its tensors are appended."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1), f"tensor({value.dtype}, {value.dim()})"
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        if isinstance(value, types.FunctionType):
            _refuse_tensors(value, set())
            return value, _function_key(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value, repr(value)
        raise TypeError(
            f"mask_mod must be a plain function of (b, h, q, kv) or a frozen dataclass of numbers, tensors and other "
            f"masks (see attention.mask_mods), not a {type(value).__name__}"
        )
    kind = type(value)
    if not kind.__dataclass_params__.frozen:
        raise TypeError(f"mask_mod {kind.__name__} must be a frozen dataclass: a kernel is compiled with what it holds")
    parts = [f"{kind.__module__}.{kind.__qualname__}"]
    for owner in kind.__mro__[:-1]:
        for name, function in sorted(vars(owner).items()):
            if isinstance(function, types.FunctionType) and not _generated(name):
                _refuse_tensors(function, set())
                parts.append(f"{name}: {_function_key(function)}")
    changed = {}
    for part in dataclasses.fields(value):
        changed[part.name], key = _parts(getattr(value, part.name), tensors)
        parts.append(f"{part.name}: {key}")
    return dataclasses.replace(value, **changed), f"({', '.join(parts)})"


def _generated(name: str) -> bool:
    return name != "__call__" and name.startswith("__")


def _function_key(function) -> str:
    try:
        return function_key(function)
    except TypeError as error:
        raise TypeError(str(error).replace("an epilogue function", "mask_mod")) from None


def _refuse_tensors(function, seen: set) -> None:
    """Raise for a tensor that a function captures, or a function that it calls."""
    if id(function) in seen:
        return
    seen.add(id(function))
    code, cells = function.__code__, function.__closure__ or ()
    values = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    values |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    values |= dict(enumerate(function.__defaults__ or ()))
    for name, value in values.items():
        if isinstance(value, Tensor):
            raise ValueError(
                f"mask_mod captures the tensor {name!r}, which a kernel cannot take as a constant: write mask_mod as a "
                "frozen dataclass with a field for the tensor, as attention.mask_mods.SameDocument is"
            )
        if isinstance(value, types.FunctionType):
            _refuse_tensors(value, seen)


def _filled(value, tensors: tuple):
    if isinstance(value, Slot):
        return tensors[value.number]
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return value
    changed = {part.name: _filled(getattr(value, part.name), tensors) for part in dataclasses.fields(value)}
    return dataclasses.replace(value, **changed)
