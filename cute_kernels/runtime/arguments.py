"""Arguments of an op, declared once, as the fields of a NamedTuple.

The op's schema in torch.library, the key of its plans and the list of its tensors derive from the fields. Eager calls
pass the arguments as a plain tuple in the order of the fields, since creating a NamedTuple takes 0.3 us more. Functions
are generated as text, as in dataclasses.
"""

import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .device import forced_path

SCHEMA_TYPES = {
    Tensor: "Tensor", str: "str", bool: "bool", float: "float", torch.dtype: "ScalarType", Callable: "str",
    int: "SymInt", Sequence[int | None]: "SymInt[]",  # None in a sequence is -1
}  # fmt: skip


def schema_types(arguments: Any) -> dict[str, str]:
    """Name -> type in torch's schema of each field, such as "Tensor?"; "" if it has none. A function is its name."""
    found = {}
    for name, hint in typing.get_type_hints(arguments).items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kind = next(kind for kind in kinds if kind is not types.NoneType)
        optional = "?" if types.NoneType in kinds else ""
        found[name] = SCHEMA_TYPES[kind] + optional if kind in SCHEMA_TYPES else ""
    return found


def terms_of(arguments: Any, names: Iterable[str], with_defaults: bool = True) -> str:
    """Arguments of these names, with their defaults or without, in schema syntax."""
    kinds, defaults = schema_types(arguments), arguments._field_defaults
    return ", ".join(f"{kinds[name]} {name}" + f"={defaults[name]}" * with_defaults for name in names)


def with_keywords(
    arguments: Any, run: Callable, inputs: str, function: Callable, scope: dict | None = None, **fields: str
) -> Callable:
    """A function of `inputs` and, by keyword, of the other fields, that calls `run` with a tuple of all fields.

    Args:
        inputs: names, separated by commas.
        function: returns the function that a graph refers to by a name.
        fields: expressions of fields that are not arguments; scope: names in them.
    """
    values, names = [], [name.strip() for name in inputs.split(",")]
    for name, hint in typing.get_type_hints(arguments).items():
        named = Callable in typing.get_args(hint)
        values.append(fields.get(name, f"{name} and function({name})" if named else name))
        if name not in (*names, *fields):
            names += ["*"] * ("*" not in names) + [f"{name}={arguments._field_defaults[name]}"]
    scope = {"run": run, "function": function, **(scope or {})}
    return eval(f"lambda {', '.join(names)}: run(({', '.join(values)}))", scope)


def splitter(
    arguments: Any,
    returns: str,
    *,
    operands: str,
    indices: str = "",
    tables: Iterable[str] = (),
    last: str | None = None,
    **key: str,
) -> Callable:
    """A function of a tuple of all fields that returns (key, tensors, terms, *returns).

    key and tensors are PlanCache's `terms` and `tensors`; terms holds the optional tensors that are passed. A key has,
    of a field: whether an optional tensor is passed; type and value of a bool; the value of anything else.

    Args:
        operands: expressions of the tensors before `out`.
        indices: expressions of further tensors of a call with `out`, right after it.
        tables: optional tensors that do not belong to terms.
        last: expression of the last tensor of terms, or None.
        key: expressions in place of a field's part of the key.
    """
    kinds = schema_types(arguments)
    parts = {"Tensor?": "{0} is None", "bool": "type({0}), {0}"}
    key = {name: parts.get(kind, "{0}").format(name) for name, kind in kinds.items()} | key
    terms = [name for name, kind in kinds.items() if kind == "Tensor?" and name not in ("out", *tables)]
    lines = [
        "def split(values):",
        f"    {', '.join(kinds)} = values",
        f"    tensors = ({operands}) if out is None else ({operands}, out, {indices})",
        *(f"    if {name} is not None: tensors += ({name},)" for name in tables),
        "    terms = ()",
        *(f"    if {name} is not None: terms += ({name},)" for name in [*terms, *([last] if last else [])]),
        "    if terms: tensors += terms",
        "    try:",
        f"        key = forced_path(), {', '.join(key.values())}",
        "    except (AttributeError, RuntimeError):",  # a nested tensor's numel() raises RuntimeError
        "        key = None",  # the checks of planning raise
        f"    return key, tensors, terms, {returns}",
    ]
    scope = {"forced_path": forced_path}
    exec("\n".join(lines), scope)
    return scope["split"]
