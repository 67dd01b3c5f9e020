"""A mask_mod or score_mod as a text, numbers and tensors, which the schema of a registered op can hold.

The text names the code of functions and the classes of dataclasses of this process. What functions capture, their
defaults and fields stand in it: constants by themselves, integers and tensors by index, so that other ones need no new
graph. A float is a constant of the graph until torch.compile makes it an input; then it is the element of a float64
tensor. Alibi(slopes, 3) is ["class Alibi", null, ["tensor", 0], ["int", 0]], with a shortened name.

What code reads through globals, and instances through their class, has a version number among the numbers, and its
tensors are among the tensors (global_state.py): [number, first tensor, count] where the example has null.

torch.compile traces `written`. Inside of the op `read` makes the same function of stand-ins for the tensors, which have
their shapes and one element, and traces it. The forward pass does so while the version is that of the globals; backward
finds the trace by the version, whatever the globals are by then.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cute_kernels.runtime.graphs import lasting_memory
from cute_kernels.runtime.torch_compat import (
    constant_variable,
    entry_variable,
    load_cell,
    local_variable,
    pending_writes,
    run_in_trace,
)
from cute_kernels.traced import global_state
from cute_kernels.traced.memo import MOST
from cute_kernels.traced.program import Program
from cute_kernels.traced.record import Traced

_FUNCTIONS: dict[str, tuple] = {}  # name -> (code, globals), kept alive, so that no other code gets its id
_CLASSES: dict[str, type] = {}  # kept alive for the same reason
_STAND_INS: dict[tuple, list[Tensor]] = {}
_TRACES: OrderedDict[tuple, _Trace] = OrderedDict()  # by text, numbers, stand-ins and device
FLOAT = re.compile(r'\["float", (\d+)\]')
DICTS = dict, OrderedDict, defaultdict
CHANGED = (
    "under torch.compile: a global that a mask_mod or score_mod reads has changed since the forward pass, whose trace "
    "is not cached (it is not if the function computes something of a captured tensor as a whole); capture the value: "
    "write the function inside another one that has it"
)
WRITTEN = (
    "the compiled function writes to a global, or to what it leads to, that a mask_mod or score_mod reads, which "
    "torch.compile does after the graph has run; write it outside of the compiled function, or capture the value"
)
HIDDEN = (
    "under torch.compile a mask_mod or score_mod reads a tensor through a global in a way that its code does not show; "
    "capture the tensor: write the function inside another one that has it, or as a dataclass with it"
)


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
    if isinstance(value, str):
        return f'["str", {_json_of(value)}]'
    if type(value) in DICTS:
        parts = [_written(part, what, names, numbers, tensors) for item in value.items() for part in item]
        return ", ".join(['["dict"', *parts]) + "]"
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        parts = [_written(part, what, names, numbers, tensors) for part in value]
        return ", ".join([f'["{kind}"', *parts]) + "]"
    fields = fields_of(type(value))
    if len(fields) > 0 and not isinstance(value, nn.Module):
        state = _state(fields[0], numbers, tensors)
        parts = [_written(getattr(value, name), what, names, numbers, tensors) for name in fields[1:]]
        return ", ".join([f'["class {fields[0]}", {state}', *parts]) + "]"
    parts = ['["module"']
    for name in names:
        if hasattr(value, name):
            parts += [f'"{name}"', _written(getattr(value, name), what, names, numbers, tensors)]
    if len(parts) == 1 and not isinstance(value, nn.Module):
        raise TypeError(
            f"under torch.compile a {what} is a function or a dataclass, and captures tensors, numbers, functions, "
            "dataclasses, objects of which it names attributes, strings, and tuples, lists and dicts of these, not a "
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
    global_state.of_class(name, cls)
    return (name, *(field.name for field in dataclasses.fields(cls)))


def _function(fn, what: str, numbers: list[int], tensors: list[Tensor]) -> str:
    """A function by the name of its code, and what it reads."""
    captured: list = []
    defaults: list = []
    facts: list = []
    run_in_trace(_parts_of_function)
    if len(facts) == 0:  # this is not a trace of Dynamo: an eager call of the op, or an export that is not strict
        facts.append(_register(fn.__code__, fn.__globals__))
    if len(facts) == 1:
        captured += [cell.cell_contents for cell in fn.__closure__ or ()]
        defaults += [value for value in fn.__defaults__ or ()]
        if fn.__kwdefaults__:
            raise TypeError(f"under torch.compile a {what} has no arguments by keyword; capture their values")
    names = _names(fn.__code__)
    parts = [f'["function {facts[0]}", {_state(facts[0], numbers, tensors)}, {len(captured)}']
    parts += [_written(part, what, names, numbers, tensors) for part in (*captured, *defaults)]
    return ", ".join(parts) + "]"


def _parts_of_function(context) -> None:
    """Dynamo runs it while it traces `_function`: the name of fn into facts. For a function that was made inside the
    trace, of which Dynamo gives Python code no closure, also what it captures into captured, and its defaults."""
    fn, captured, defaults, facts = (local_variable(context, n) for n in ("fn", "captured", "defaults", "facts"))
    facts.items.append(constant_variable(_register(fn.get_code(), fn.get_globals())))
    if not hasattr(fn, "closure"):
        return
    facts.items.append(constant_variable("made inside"))
    captured.items.extend(load_cell(cell) for cell in (fn.closure.items if fn.closure else ()))
    defaults.items.extend(fn.defaults.items if fn.defaults else ())
    if fn.kwdefaults:
        raise TypeError("under torch.compile a mask_mod or score_mod has no arguments by keyword; capture their values")


def _state(name: str, numbers: list[int], tensors: list[Tensor]) -> str:
    """[index of the version, index of the first tensor, number of tensors] of the registered globals; or null."""
    values: list = []
    run_in_trace(_values_of_state)
    if len(values) == 0:
        state = global_state.STATES[name]
        values += [None] if state is None else [state.version, state.tensors]
    if values[0] is None:
        return "null"
    numbers.append(values[0])
    first = len(tensors)
    tensors.extend(values[1])
    return f"[{len(numbers) - 1}, {first}, {len(tensors) - first}]"


def _values_of_state(context) -> None:
    name, values = (local_variable(context, name) for name in ("name", "values"))
    state = global_state.STATES[name.as_python_constant()]
    if state is None:
        values.items.append(constant_variable(None))
    elif state.reads(*pending_writes()):
        raise RuntimeError(WRITTEN)
    else:
        entry = global_state.__name__, "STATES", name.as_python_constant()
        values.items.extend(
            (entry_variable(*entry, "version", changes=state.changes), entry_variable(*entry, "tensors"))
        )


@torch.compiler.assume_constant_result
def _json_of(value: str) -> str:
    return json.dumps(value)


def _register(code: types.CodeType, scope: dict) -> str:
    name = f"{code.co_name} at {id(code):x} in {id(scope):x}"
    _FUNCTIONS[name] = code, scope
    global_state.of_function(name, scope, code)
    return name


def _float(value: float, tensors: list[Tensor]) -> str:
    """A float that is a constant of the graph by its text; one that is an input of the graph as a tensor."""
    texts: list[str] = []
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


@dataclass(frozen=True)
class _Trace:
    """A trace without the tensors of the call that it was made in."""

    program: Program
    numbers: tuple
    tensors: tuple[Tensor | int, ...]  # a number stands for the tensor at this place among the call's
    whole: str  # "captured" or "globals": the program depends on what such tensors hold

    def of_call(self, tensors: Sequence[Tensor]) -> tuple[Traced, list[int]]:
        values = tuple([tensors[t] if isinstance(t, int) else t for t in self.tensors])
        places = [t if isinstance(t, int) else -1 for t in self.tensors]
        return Traced(self.program, values, (), numbers=self.numbers), places


def read(
    text: str, numbers: Sequence[int], tensors: Sequence[Tensor], device, trace: Callable, whole: str = ""
) -> tuple[Traced, list[int]]:
    """(what the function that `written` wrote computes, the place of each of its tensors among `tensors`, or -1)

    Args:
        trace: (function, device) -> Traced.
        whole: the error if the function computes something of a tensor as a whole; "" if it may.

    Raises:
        RuntimeError: the text is of another process; or the function reads a tensor in a way that its code does not
            show; or its globals have changed since the forward pass, and that one's trace is not cached.
    """
    facts = tuple([(t.shape, t.dtype, t.device) for t in tensors])
    floats = tuple([repr(tensors[int(i)].item()) for i in FLOAT.findall(text)])
    key = text, tuple(numbers), facts, floats, torch.device(device)
    known = _TRACES.get(key)
    if known is not None and not known.whole:
        return known.of_call(tensors)
    stand_ins = _stand_ins(facts)
    states: list = []
    function = _value(json.loads(text), numbers, stand_ins, tensors, states)
    if not all([state.is_current(numbers[number]) for state, number, _ in states]):
        if known is None or known.whole == "captured":  # which may be other tensors than those of the trace
            raise RuntimeError(CHANGED)
        return known.of_call(tensors)
    found = trace(function, device)
    of_globals = {id(t): first + i for state, _, first in states for i, t in enumerate(state.tensors)}
    at = {id(t): i for i, t in enumerate(stand_ins)} | of_globals
    parts = ["globals" if id(t) in of_globals else "captured" for t in found.read if id(t) in at]
    if parts and whole:
        raise RuntimeError(whole)
    if "captured" in parts:
        found = trace(_value(json.loads(text), numbers, tensors, tensors, []), device)
        at = {id(t): i for i, t in enumerate(tensors)} | of_globals
    known_ids = at.keys() | {id(t) for t in found.made}
    if any(id(t) not in known_ids for t in (*found.tensors, *found.read)):
        raise RuntimeError(HIDDEN)
    if len(_TRACES) >= MOST:
        _TRACES.popitem(last=False)
    places = tuple([at.get(id(t), t) for t in found.tensors])
    known = _TRACES[key] = _Trace(found.program, found.numbers, places, min(parts, default=""))
    return known.of_call(tensors)


def _stand_ins(facts: tuple) -> list[Tensor]:
    """Tensors of these shapes, dtypes and devices; the same ones for the same, so that traces are found again."""
    if facts not in _STAND_INS:
        if len(_STAND_INS) >= MOST:
            _STAND_INS.clear()
        stand_ins = []
        for shape, dtype, device in facts:
            with lasting_memory(device):
                stand_ins.append(torch.zeros((), dtype=dtype, device=device).expand(shape))
        _STAND_INS[facts] = stand_ins
    return _STAND_INS[facts]


def _value(part, numbers: Sequence[int], stand_ins: Sequence[Tensor], tensors: Sequence[Tensor], states: list):
    """The value of a part of the text. states: grows by (GlobalState, index of its version, of its first tensor)."""
    if not isinstance(part, list):
        return part

    def values_of(parts) -> list:
        return [_value(x, numbers, stand_ins, tensors, states) for x in parts]

    kind, *rest = part
    if kind in ("int", "tensor"):
        return (numbers if kind == "int" else stand_ins)[rest[0]]
    if kind == "float":
        return float(rest[0]) if isinstance(rest[0], str) else tensors[rest[0]].item()
    if kind == "str":
        return rest[0]
    if kind == "dict":
        return dict(zip(values_of(rest[::2]), values_of(rest[1::2]), strict=True))
    if kind == "module":
        owner = _Attributes()
        vars(owner).update(zip(rest[::2], values_of(rest[1::2]), strict=True))
        return owner
    if kind == "partial":
        count, keys, *values = rest
        function, *values = values_of(values)
        return functools.partial(function, *values[:count], **dict(zip(keys, values[count:], strict=True)))
    kind, _, name = kind.partition(" ")
    if kind in ("function", "class"):
        table = _FUNCTIONS if kind == "function" else _CLASSES
        if name not in table:
            raise RuntimeError(f"no {kind} {name} in this process; trace the model here first")
        state, *rest = rest
        if state is not None:
            states.append((global_state.STATES[name], *state[:2]))
    if kind == "class":
        return _CLASSES[name](*values_of(rest))
    if kind == "function":
        (code, scope), (count, *parts) = _FUNCTIONS[name], rest
        values = values_of(parts)
        closure = tuple(types.CellType(x) for x in values[:count])
        return types.FunctionType(code, scope, code.co_name, tuple(values[count:]) or None, closure)
    values = values_of(rest)
    if kind == "method":
        return types.MethodType(*values)
    return tuple(values) if kind == "tuple" else values
