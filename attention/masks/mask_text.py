"""A mask_mod as a text, numbers and tensors, which the schema of a registered op can hold.

The text names classes and functions of this process and refers to numbers and tensors by index, so that other numbers
and tensors need no new graph. And(Band(None, 0, 5), SameDocument(q_ids, kv_ids, False)) is, in JSON, with the names of
its classes shortened,

    ["And", ["Band", null, ["int", 0], ["int", 1]], ["SameDocument", ["tensor", 0], ["tensor", 1], false]]
"""

from __future__ import annotations

import dataclasses
import json
import types

import torch
from torch import Tensor

from cute_kernels.torch_op import depend_on, function_named, register

from .mask_mods import MaskMod

_CLASSES: dict[str, type] = {}


@torch.compiler.assume_constant_result
def fields_of(cls: type) -> tuple[str, ...]:
    """The class's name, under which it can be found from now on, and those of its fields; () if it is no dataclass."""
    if not dataclasses.is_dataclass(cls):
        return ()
    name = f"{cls.__module__}.{cls.__qualname__}"
    _CLASSES[name] = cls
    return (name, *(field.name for field in dataclasses.fields(cls)))


def class_named(name: str, what: str) -> type:
    """The class of which fields_of gave the name; an error calls it `what`."""
    if name not in _CLASSES:
        raise RuntimeError(f"no {what} {name} in this process; trace the model here first")
    return _CLASSES[name]


@torch.compiler.assume_constant_result
def _function(fn) -> str:
    """The name under which a graph refers to a function; the op traces it when it runs."""
    return register(f"{fn.__qualname__} at {id(fn):x}", fn)  # which is kept alive, so no other function gets its id


def written(mask_mod: MaskMod | None) -> tuple[str | None, list[int], list[Tensor]]:
    """(text, numbers, tensors) of a mask_mod; torch.compile traces it.

    Raises:
        TypeError: it, or a part of it, is neither a dataclass of ints, bools, None, tensors and such masks, nor a plain
            function.
    """
    numbers: list[int] = []
    tensors: list[Tensor] = []
    return None if mask_mod is None else _written(mask_mod, numbers, tensors), numbers, tensors


def written_plainly(value, numbers: list[int], tensors: list[Tensor]) -> str | None:
    """The text of a tensor, an integer, a bool or None; of anything else None."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return f'["tensor", {len(tensors) - 1}]'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):  # under torch.compile it may be a symbol, which has no text
        numbers.append(value)
        return f'["int", {len(numbers) - 1}]'
    return None


def _written(value, numbers: list[int], tensors: list[Tensor]) -> str:
    text = written_plainly(value, numbers, tensors)
    if text is not None:
        return text
    fields = fields_of(type(value))
    if len(fields) == 0:
        if not isinstance(value, types.FunctionType):
            raise TypeError(
                f"under torch.compile the mask_mod, a {type(value).__name__}, must be a plain function, or a dataclass "
                "of ints, tensors and such masks, as those of mask_mods.py are"
            )
        name = _function(value)
        depend_on(value)
        return f'["function", "{name}"]'
    parts = [_written(getattr(value, name), numbers, tensors) for name in fields[1:]]
    return f'["{fields[0]}", ' + ", ".join(parts) + "]"


def read(text: str | None, numbers: list[int], tensors: list[Tensor]) -> MaskMod | None:
    """The mask_mod of what `written` gave."""

    def value(part):
        if not isinstance(part, list):
            return part
        name, *rest = part
        if name in ("int", "tensor"):
            return (numbers if name == "int" else tensors)[rest[0]]
        if name == "function":
            return function_named(rest[0])
        return class_named(name, "mask_mod class")(*(value(x) for x in rest))

    return None if text is None else value(json.loads(text))
