"""A mask_mod or score_mod as a text, numbers and tensors, which the schema of a registered op can hold.

The text names the code of functions and the classes of dataclasses of this process. What functions capture, their
defaults, fields, and the tensors, numbers and functions among the globals that they name, or among the attributes of
these, stand in it: constants by themselves, integers and tensors by index, so that other ones need no new graph. A
float is a constant of the graph until torch.compile makes it an input; then it is the element of a float64 tensor.
Alibi(slopes, 3) is ["class Alibi", ["tensor", 0], ["int", 0]], with a shortened name.

torch.compile traces `written`. Inside of the op `rebuilt` makes the same function of stand-ins for the tensors, which
have their shapes and one element, and traces it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cute_kernels.runtime.graphs import lasting_memory
from cute_kernels.runtime.torch_compat import (
    constant_variable,
    global_variable,
    load_cell,
    local_variable,
    run_in_trace,
)
from cute_kernels.traced.libraries import library_module, library_scope
from cute_kernels.traced.memo import DYNAMIC, MOST, global_names

_FUNCTIONS: dict[str, tuple] = {}  # name -> (code, globals), kept alive, so that no other code gets its id
_CLASSES: dict[str, type] = {}  # kept alive for the same reason
_STAND_INS: dict[tuple, list[Tensor]] = {}
# (text, numbers, id of the stand-ins) -> (function, stand-ins, globals that it has copies of)
_REBUILT: dict[tuple, tuple[Callable, list[Tensor], list[tuple]]] = {}
NUMBERS = (bool, int, float)
MODULE_NAMES = "__builtins__", "__name__"


class _Attributes:
    """In a module's place: those of its attributes that a function names."""


# ---------------------------------------------------------------------- inside a trace


def written(function: Callable, what: str) -> tuple[str, list[int], list[Tensor]]:
    """(text, numbers, tensors) of a function, which errors call `what`; torch.compile traces it.

    Raises:
        TypeError: it captures something that has no text.
    """
    numbers: list[int] = []
    tensors: list[Tensor] = []
    return _written(function, what, (), numbers, tensors), numbers, tensors


def _written(value, what: str, names: tuple[str, ...], numbers: list[int], tensors: list[Tensor]) -> str:
    """`names`: the attributes that the function which has this value names."""
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
    if isinstance(value, float):
        return _float(value, tensors)
    if isinstance(value, types.FunctionType):
        return _function(value, what, numbers, tensors)
    if isinstance(value, types.MethodType):
        function = _function(value.__func__, what, numbers, tensors)
        owner = _written(value.__self__, what, _names(value.__func__.__code__), numbers, tensors)
        return f'["method", {function}, {owner}]'
    if isinstance(value, functools.partial):
        parts = [_written(part, what, names, numbers, tensors) for part in (value.func, *value.args)]
        keys = [f'"{key}"' for key in value.keywords]
        parts += [_written(part, what, names, numbers, tensors) for part in value.keywords.values()]
        return f'["partial", {len(value.args)}, [{", ".join(keys)}], ' + ", ".join(parts) + "]"
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        parts = [_written(part, what, names, numbers, tensors) for part in value]
        return ", ".join([f'["{kind}"', *parts]) + "]"
    fields = fields_of(type(value))
    if len(fields) > 0 and not isinstance(value, nn.Module):
        parts = [_written(getattr(value, name), what, names, numbers, tensors) for name in fields[1:]]
        text = ", ".join([f'["class {fields[0]}"', *parts]) + "]"
        if _call_reads_data(type(value)):
            return f'["method", {_function(type(value).__call__, what, numbers, tensors)}, {text}]'
        return text
    parts = ['["module"']
    for name in names:
        if hasattr(value, name):
            parts += [f'"{name}"', _written(getattr(value, name), what, names, numbers, tensors)]
    if len(parts) == 1 and not isinstance(value, nn.Module):
        raise TypeError(
            f"under torch.compile a {what} is a function or a dataclass, and captures tensors, numbers, functions, "
            "dataclasses, objects of which it names attributes, and tuples and lists of these, not a "
            f"{type(value).__name__}; capture what of it is needed"
        )
    return ", ".join(parts) + "]"


@torch.compiler.assume_constant_result
def fields_of(cls: type) -> tuple[str, ...]:
    """The class's name, under which it can be found from now on, and those of its fields; () if it is no dataclass."""
    if not dataclasses.is_dataclass(cls):
        return ()
    name = f"{cls.__module__}.{cls.__qualname__} at {id(cls):x}"  # classes made in a function may share a name
    _CLASSES[name] = cls
    return (name, *(field.name for field in dataclasses.fields(cls)))


@torch.compiler.assume_constant_result
def _call_reads_data(cls: type) -> bool:
    """True if the class's __call__ captures something or names globals that are data, as functions do."""
    call = cls.__call__
    if not isinstance(call, types.FunctionType) or library_scope(call.__globals__):
        return False
    if "__class__" in call.__code__.co_freevars:  # of super(), which has no text
        return False
    return bool(call.__closure__ or names_of_globals(call.__code__, call.__globals__))


def _function(fn, what: str, numbers: list[int], tensors: list[Tensor]) -> str:
    """A function by the name of its code, and what it reads."""
    captured, defaults, from_globals, facts = [], [], [], []
    run_in_trace(_parts_of_function)
    if len(facts) == 0:  # this is not a trace of Dynamo: an eager call of the op, or an export that is not strict
        names = names_of_globals(fn.__code__, fn.__globals__)
        from_globals += [fn.__globals__[name] for name in names]
        facts += [_register(fn.__code__, fn.__globals__), _json_of(names)]
    if len(facts) == 2:
        captured += [cell.cell_contents for cell in fn.__closure__ or ()]
        defaults += [value for value in fn.__defaults__ or ()]
        if fn.__kwdefaults__:
            raise TypeError(f"under torch.compile a {what} has no arguments by keyword; capture their values")
    names = _names(fn.__code__)
    parts = [f'["function {facts[0]}", {len(captured)}, {facts[1]}']
    values = [*captured, *from_globals, *defaults]
    return ", ".join([*parts, *[_written(part, what, names, numbers, tensors) for part in values]]) + "]"


def _parts_of_function(context) -> None:
    """Dynamo runs it while it traces `_function`: the name of fn and the names of its globals into facts, and these
    globals into from_globals. For a function that was made inside the trace, of which Dynamo gives Python code no
    closure, also what it captures into captured, and its defaults."""
    names = "fn", "captured", "defaults", "from_globals", "facts"
    fn, captured, defaults, from_globals, facts = (local_variable(context, name) for name in names)
    code, scope = fn.get_code(), fn.get_globals()
    names = names_of_globals(code, scope)
    from_globals.items.extend(global_variable(scope, name) for name in names)
    facts.items.append(constant_variable(_register(code, scope)))
    facts.items.append(constant_variable(_json_of(names)))
    if not hasattr(fn, "closure"):
        return
    facts.items.append(constant_variable("made inside"))
    captured.items.extend(load_cell(cell) for cell in (fn.closure.items if fn.closure else ()))
    defaults.items.extend(fn.defaults.items if fn.defaults else ())
    if fn.kwdefaults:
        raise TypeError("under torch.compile a mask_mod or score_mod has no arguments by keyword; capture their values")


def names_of_globals(code: types.CodeType, scope: dict, above: tuple = ()) -> list[str]:
    """The globals of a function that are data, modules and objects of which it names such data alone, or functions that
    read such data or capture something.

    Others (libraries, classes, dicts) are looked up where the function is called.
    """
    return [name for name in global_names(code) if name in scope and _is_data(scope[name], (*above, code))]


def _is_data(value, above: tuple) -> bool:
    """`above`: the code of functions, and the objects, that lead to the value; none is followed twice."""
    if isinstance(value, (Tensor, *NUMBERS)):
        return True
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list) and len(value) > 0 and all(_is_data(part, above) for part in value)
    if isinstance(value, types.FunctionType):
        if library_scope(value.__globals__) or value.__code__ in above:
            return False
        return bool(value.__closure__ or names_of_globals(value.__code__, value.__globals__, above))
    if isinstance(value, type):
        return False
    if dataclasses.is_dataclass(value):
        return any(isinstance(getattr(value, field.name), Tensor) for field in dataclasses.fields(value))
    if isinstance(value, types.ModuleType) and library_module(value) or not hasattr(value, "__dict__"):
        return False
    if any(value is owner for owner in above):  # it refers to itself
        return False
    code = next(part for part in reversed(above) if isinstance(part, types.CodeType))
    attributes = [getattr(value, name) for name in _names(code) if hasattr(value, name)]
    return len(attributes) > 0 and all(_is_data(part, (*above, value)) for part in attributes)


def _json_of(names: Sequence[str]) -> str:
    return json.dumps(list(names))


def _register(code: types.CodeType, scope: dict) -> str:
    name = f"{code.co_name} at {id(code):x} in {id(scope):x}"
    _FUNCTIONS[name] = code, scope
    return name


def _float(value: float, tensors: list[Tensor]) -> str:
    """A float that is a constant of the graph by its text; one that is an input of the graph as a tensor."""
    texts = []
    run_in_trace(_text_of_constant)
    if len(texts) == 0:  # not a trace of Dynamo
        texts.append(_text_of_float(value))
    if texts[0] == "":
        tensors.append(
            torch.zeros((), dtype=torch.float64, device="cpu") + value
        )  # what AOTAutograd does not specialize
        return f'["float", {len(tensors) - 1}]'
    return f'["float", "{texts[0]}"]'


def _text_of_float(value: float) -> str:
    return repr(float(value))


def _text_of_constant(context) -> None:
    value, texts = (local_variable(context, name) for name in ("value", "texts"))
    constant = value.is_python_constant()
    texts.items.append(constant_variable(_text_of_float(value.as_python_constant()) if constant else ""))


@torch.compiler.assume_constant_result
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of attributes, and of globals, in code and in code nested in it."""
    nested = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(sorted({*code.co_names, *(name for names in nested for name in names)}))


# ---------------------------------------------------------------------- inside of the op


def rebuilt(
    text: str, numbers: Sequence[int], tensors: Sequence[Tensor], stand_ins: Sequence[Tensor] | None = None
) -> tuple[Callable, Sequence[Tensor]]:
    """The function that `written` wrote, with stand-ins for its tensors, and the stand-in of each.

    Raises:
        RuntimeError: the text is of another process.
    """
    if stand_ins is not None:
        return _value(json.loads(text), numbers, stand_ins, tensors, []), stand_ins
    stand_ins = _stand_ins(tensors)
    key = text, tuple(numbers), id(stand_ins)
    found = _REBUILT.get(key)
    if found is not None and all([scope.get(name) is value for scope, name, value in found[2]]):
        return found[0], stand_ins
    scopes: list[tuple] = []
    function = _value(json.loads(text), numbers, stand_ins, tensors, scopes)
    if not _has_inputs(text):
        if len(_REBUILT) >= MOST:
            _REBUILT.clear()
        _REBUILT[key] = function, stand_ins, scopes
    return function, stand_ins


def _has_inputs(text: str) -> bool:
    """True if a float in the text is an input of the graph."""
    return any(part[:1] != '"' for part in text.split('["float", ')[1:])


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


def _value(part, numbers: Sequence[int], stand_ins: Sequence[Tensor], tensors: Sequence[Tensor], scopes: list):
    """The value of a part of the text. scopes: grows by (globals, name, value) of what a function has a copy of."""
    if not isinstance(part, list):
        return part

    def values_of(parts) -> list:
        return [_value(x, numbers, stand_ins, tensors, scopes) for x in parts]

    kind, *rest = part
    if kind in ("int", "tensor"):
        return (numbers if kind == "int" else stand_ins)[rest[0]]
    if kind == "float":
        return float(rest[0]) if isinstance(rest[0], str) else tensors[rest[0]].item()
    if kind == "module":
        owner = _Attributes()
        vars(owner).update(zip(rest[::2], values_of(rest[1::2]), strict=True))
        return owner
    if kind == "partial":
        count, keys, *values = rest
        function, *values = values_of(values)
        return functools.partial(function, *values[:count], **dict(zip(keys, values[count:], strict=True)))
    kind, _, name = kind.partition(" ")
    if kind == "function":
        count, names, *values = rest
        return _function_of(name, count, names, values_of(values), scopes)
    values = values_of(rest)
    if kind == "class":
        if name not in _CLASSES:
            raise RuntimeError(f"no class {name} in this process; trace the model here first")
        return _CLASSES[name](*values)
    return {"tuple": tuple, "list": list, "method": lambda x: types.MethodType(*x)}[kind](values)


def _function_of(name: str, count: int, names: Sequence[str], values: list, scopes: list) -> types.FunctionType:
    """The function of a registered name: of `values` the first `count` are captured, the next are globals."""
    if name not in _FUNCTIONS:
        raise RuntimeError(f"no function {name} in this process; trace the model here first")
    code, scope = _FUNCTIONS[name]
    end = count + len(names)
    if names:
        read = global_names(code)
        scopes += [(scope, other, scope.get(other)) for other in read if other not in names]
        if DYNAMIC.isdisjoint(read):  # a copy of all globals would keep the user's other tensors alive
            scope = {other: scope[other] for other in (*MODULE_NAMES, *read) if other in scope}
        scope = scope | dict(zip(names, values[count:end], strict=True))
    closure = tuple(types.CellType(x) for x in values[:count])
    return types.FunctionType(code, scope, code.co_name, tuple(values[end:]) or None, closure)
