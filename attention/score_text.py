"""A score_mod as a text, numbers and tensors, which the schema of a registered op can hold.

The text names the code of functions and the classes of dataclasses of this process. What functions capture, their
defaults, and fields stand in it: constants by themselves, integers and tensors by index, so that other ones need no new
graph, and tensors get gradients. Alibi(slopes, 3) is ["class Alibi", ["tensor", 0], ["int", 0]], with a shortened name.

torch.compile traces `written`; inside of the op `read_score` makes the same function of stand-ins for the tensors,
which have their shapes and one element, and traces it. Tensors that are globals are no part of the text: the op reads
them as they are, and they get no gradient.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cute_kernels.runtime.graphs import lasting_memory
from cute_kernels.runtime.torch_compat import constant_variable, load_cell, local_variable, run_in_trace
from cute_kernels.traced.memo import MOST, traced

from .masks.mask_text import class_named, fields_of, written_plainly
from .score_mod import INPUTS, WHAT, BoundScore, check_callable, mod_of

_FUNCTIONS: dict[str, tuple] = {}  # name -> (code, globals), kept alive, so that no other code gets its id
_STAND_INS: dict[tuple, list[Tensor]] = {}
OUTSIDE = "compute that outside of the function, and index the result by b, h, q and kv inside"


class _Attributes:
    """In a module's place: those of its attributes that a function names."""


# ---------------------------------------------------------------------- inside a trace


def written(score_mod) -> tuple[str, list[int], list[Tensor]]:
    """(text, numbers, tensors) of a score_mod; torch.compile traces it.

    Raises:
        TypeError: it captures what has no text.
    """
    numbers: list[int] = []
    tensors: list[Tensor] = []
    return _written(score_mod, (), numbers, tensors), numbers, tensors


def _written(value, names: tuple[str, ...], numbers: list[int], tensors: list[Tensor]) -> str:
    """`names`: which attributes the function names that has this value."""
    text = written_plainly(value, numbers, tensors)
    if text is not None:
        return text
    if isinstance(value, float):
        return f'["float", "{_constant(value)}"]'
    if isinstance(value, types.FunctionType):
        return _function(value, numbers, tensors)
    if isinstance(value, types.MethodType):
        function = _function(value.__func__, numbers, tensors)
        owner = _written(value.__self__, _names(value.__func__.__code__), numbers, tensors)
        return f'["method", {function}, {owner}]'
    if isinstance(value, functools.partial):
        parts = [_written(part, names, numbers, tensors) for part in (value.func, *value.args)]
        keys = [f'"{key}"' for key in value.keywords]
        parts += [_written(part, names, numbers, tensors) for part in value.keywords.values()]
        return f'["partial", {len(value.args)}, [{", ".join(keys)}], ' + ", ".join(parts) + "]"
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return ", ".join([f'["{kind}"', *[_written(part, names, numbers, tensors) for part in value]]) + "]"
    if isinstance(value, nn.Module):
        parts = ['["module"']
        for name in names:
            if hasattr(value, name):
                parts += [f'"{name}"', _written(getattr(value, name), names, numbers, tensors)]
        return ", ".join(parts) + "]"
    fields = fields_of(type(value))
    if len(fields) == 0:
        raise TypeError(
            "under torch.compile a score_mod is a function or a dataclass, and captures tensors, numbers, functions, "
            f"dataclasses, modules, and tuples and lists of these, not a {type(value).__name__}; capture what of it is "
            "needed"
        )
    parts = [_written(getattr(value, name), names, numbers, tensors) for name in fields[1:]]
    return ", ".join([f'["class {fields[0]}"', *parts]) + "]"


def _function(fn, numbers: list[int], tensors: list[Tensor]) -> str:
    """A function by the name of its code, and what it captures."""
    found, defaults, facts = [], [], []
    run_in_trace(_parts_of_function)
    if len(facts) == 0:  # this is not a trace of Dynamo: an export that is not strict
        facts.append(_register(fn.__code__, fn.__globals__))
    if len(facts) == 1:
        found += [cell.cell_contents for cell in fn.__closure__ or ()]
        defaults += [value for value in fn.__defaults__ or ()]
        if fn.__kwdefaults__:
            raise TypeError("under torch.compile a score_mod has no arguments by keyword; capture their values")
    names = _names(fn.__code__)
    parts = [f'["function {facts[0]}", {len(found)}']
    return ", ".join([*parts, *[_written(part, names, numbers, tensors) for part in [*found, *defaults]]]) + "]"


def _parts_of_function(context) -> None:
    """Dynamo runs it while it traces `_function`: the name of fn into facts. Of a function that was made inside the
    trace, of which Dynamo gives Python code no closure, also what it captures into found, and its defaults."""
    fn, found, defaults, facts = (local_variable(context, name) for name in ("fn", "found", "defaults", "facts"))
    facts.items.append(constant_variable(_register(fn.get_code(), fn.get_globals())))
    if not hasattr(fn, "closure"):
        return
    facts.items.append(constant_variable("made inside"))
    found.items.extend(load_cell(cell) for cell in (fn.closure.items if fn.closure else ()))
    defaults.items.extend(fn.defaults.items if fn.defaults else ())
    if fn.kwdefaults:
        raise TypeError("under torch.compile a score_mod has no arguments by keyword; capture their values")


def _register(code: types.CodeType, scope: dict) -> str:
    name = f"{code.co_name} at {id(code):x} in {id(scope):x}"
    _FUNCTIONS[name] = code, scope
    return name


def _constant(value) -> str:
    """A float's text; a graph serves this one alone."""
    texts = []
    run_in_trace(_text_of_constant)
    return texts[0] if texts else repr(value)


def _text_of_constant(context) -> None:
    value, texts = (local_variable(context, name) for name in ("value", "texts"))
    value = value.as_python_constant() if value.is_python_constant() else value.evaluate_expr()
    texts.items.append(constant_variable(repr(float(value))))


@torch.compiler.assume_constant_result
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of attributes, and of globals, in code and in code nested in it."""
    nested = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(sorted({*code.co_names, *(name for names in nested for name in names)}))


# ---------------------------------------------------------------------- inside of the op


def read_score(text: str, numbers: Sequence[int], tensors: Sequence[Tensor], device) -> tuple[BoundScore, list[int]]:
    """What `written` wrote, for kernels, and of each tensor that it reads its number among `tensors`, -1 of others.

    Raises:
        TypeError: see score_mod.bound; RuntimeError: it computes something of a tensor as a whole, or a tensor that
            requires a gradient is not among `tensors`.
    """
    stand_ins = _stand_ins(tensors)
    function = _value(json.loads(text), numbers, stand_ins)
    check_callable(function)
    found = traced(function, WHAT, INPUTS, (), device)
    at = {id(t): i for i, t in enumerate(stand_ins)}
    if any(id(t) in at for t in found.read):
        raise RuntimeError(
            "score_mod computes something of a captured tensor as a whole, or reads it as a number, which under "
            f"torch.compile is no part of the graph; {OUTSIDE}"
        )
    places = [at.get(id(t), -1) for t in found.tensors]
    others = [t for t, place in zip(found.tensors, places, strict=True) if place < 0]
    if any(t.requires_grad for t in (*others, *found.read)):
        raise RuntimeError(
            "under torch.compile the gradient of a tensor that score_mod reads as a global would be lost; capture it: "
            "write the score_mod inside a function that has the tensor, or as a dataclass with it"
        )
    given = tuple(t if place < 0 else tensors[place] for t, place in zip(found.tensors, places, strict=True))
    return BoundScore(mod_of(found.program, given), given), places


def _stand_ins(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes, dtypes and devices; the same ones for the same, so that traces are found again."""
    key = tuple((t.shape, t.dtype, t.device) for t in tensors)
    if key not in _STAND_INS:
        if len(_STAND_INS) >= MOST:
            _STAND_INS.clear()
        stand_ins = []
        for t in tensors:
            with lasting_memory(t.device):
                stand_ins.append(torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape))
        _STAND_INS[key] = stand_ins
    return _STAND_INS[key]


def _value(part, numbers: Sequence[int], tensors: Sequence[Tensor]):
    """What a part of the text stands for."""
    if not isinstance(part, list):
        return part
    kind, *rest = part
    if kind in ("int", "tensor"):
        return (numbers if kind == "int" else tensors)[rest[0]]
    if kind == "float":
        return float(rest[0])
    if kind == "module":
        owner = _Attributes()
        vars(owner).update({name: _value(x, numbers, tensors) for name, x in zip(rest[::2], rest[1::2], strict=True)})
        return owner
    if kind == "partial":
        count, keys, function, *values = rest
        function, *values = (_value(x, numbers, tensors) for x in (function, *values))
        return functools.partial(function, *values[:count], **dict(zip(keys, values[count:], strict=True)))
    kind, _, name = kind.partition(" ")
    if kind == "function":
        if name not in _FUNCTIONS:
            raise RuntimeError(f"no function {name} in this process; trace the model here first")
        code, scope = _FUNCTIONS[name]
        count, *values = rest
        values = [_value(x, numbers, tensors) for x in values]
        closure = tuple(types.CellType(x) for x in values[:count])
        return types.FunctionType(code, scope, code.co_name, tuple(values[count:]) or None, closure)
    values = [_value(x, numbers, tensors) for x in rest]
    if kind == "class":
        return class_named(name, "class")(*values)
    return {"tuple": tuple, "list": list, "method": lambda x: types.MethodType(*x)}[kind](values)
