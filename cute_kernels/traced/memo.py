"""Traces a function once for each state that it can be in.

A trace holds as long as the function would do the same again. What decides that is its code, its defaults and
attributes, what it captures, and the globals that it names, followed into the functions and objects among them. A call
with a function that was traced before looks whether all of these are what they were, in a few microseconds; a new
function with an old one's code (a lambda in a loop) is compared with that one's state, in about ten. A function whose
state cannot be read is traced in each call, which takes milliseconds.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..runtime.derived import captured as in_capture
from ..runtime.graphs import lasting_memory
from ..runtime.torch_compat import OpOverload, OpOverloadPacket
from .libraries import library, library_class, library_module, library_scope
from .numbers import with_arguments
from .record import Traced, trace

MOST = 4096  # traces that are kept
LARGEST = 100  # values of a state
PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size)
STABLE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
)
STABLE += (OpOverload, OpOverloadPacket)
DYNAMIC = {"globals", "vars", "locals", "eval", "exec", "__import__"}  # what these give is not in the code
GENERATED = {"__init__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__"}  # of a dataclass: they read its fields
SPECIAL = {f"__{name}__" for name in (
    "call getitem len contains iter next getattr getattribute post_init init eq ne lt le gt ge bool int index float "
    "neg pos abs invert add sub mul truediv floordiv mod pow and or xor lshift rshift radd rsub rmul rtruediv "
    "rfloordiv rmod rpow rand ror rxor torch_function"
).split()}  # fmt: skip
HEAP = 1 << 9  # in type.__flags__: the class is written in Python, or lives as such a one does
MISSING = object()
ATTRIBUTE = "_cute_kernels_trace"  # of functions and objects: their latest trace


class Unreadable(Exception):
    """Part of a state has no value that can be compared."""


class _Strong:
    """What no weak reference can be made to."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __call__(self):
        return self.value


def holder_of(value):
    """Gives the value back when it is called, as long as others keep it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return _Strong(value)


def _holders(values) -> list[tuple]:
    return [(name, holder_of(value)) for name, value in values.items()]


def is_same(holder, now) -> bool:
    value = holder()
    return value is now and (value is not None or type(holder) is _Strong)


@dataclass
class State:
    """What a function read when it was walked through.

    `key` is hashable, and equal for functions that do the same; objects in it stand by their ids, and `alive` says
    whether they are still those. `holds()` says whether the function would be walked through to the same key. Functions
    and objects are not kept alive: they may lead back to the function whose state this is.
    """

    key: Any = None
    alive: list[weakref.ref] = field(default_factory=list)
    functions: list[tuple] = field(default_factory=list)  # (function, code, defaults, holders of what it captures ...)
    owners: list[tuple] = field(default_factory=list)  # (object, class or function, [(attribute, holder)])
    items: list[tuple] = field(default_factory=list)  # (dict, key, holder)
    lists: list[tuple] = field(default_factory=list)  # (list, set or dict, its contents or keys)
    seen: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(function: Callable) -> State | None:
        """None of a function whose state cannot be read."""
        state = State()
        try:
            state.key = state.walk(function)
        except Unreadable:
            return None
        return state

    def holds(self) -> bool:
        for ref, code, defaults, keywords, captured, names in self.functions:
            function = ref()
            if function is None or function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__ is not keywords:
                return False
            for cell, holder in zip(function.__closure__ or (), captured, strict=True):
                if not is_same(holder, contents_of(cell)):
                    return False
            scope = function.__globals__
            for name, holder in names:
                if not is_same(holder, scope.get(name, MISSING)):
                    return False
        for ref, names in self.owners:
            owner = ref()
            if owner is None:
                return False
            fields = vars(owner)
            if len(fields) - (ATTRIBUTE in fields) != len(names):
                return False
            for name, holder in names:
                if not is_same(holder, fields.get(name, MISSING)):
                    return False
        for owner, name, holder in self.items:
            if not is_same(holder, owner.get(name, MISSING)):
                return False
        for owner, values in self.lists:
            if len(owner) != len(values) or any(a is not b for a, b in zip(owner, values, strict=True)):
                return False
        return True

    def walk(self, value: Any):
        """The part of the key that a value is."""
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind is float or kind is complex:
            return kind, repr(value)  # 0.0 and -0.0 differ, and a NaN is itself
        if id(value) in self.seen:
            return self.seen[id(value)]
        if len(self.seen) >= LARGEST:
            raise Unreadable
        self.seen[id(value)] = len(self.seen)
        if kind is types.FunctionType:
            return self.function(value)
        if isinstance(value, Tensor):
            if value.is_nested or value.layout is not torch.strided:  # no strides; the trace says what is wrong
                raise Unreadable
            self.alive.append(weakref.ref(value))
            return id(value), value.shape, value.stride(), value.dtype, value.device
        if isinstance(value, type):
            return self.type(value)
        if kind is property:
            return kind, self.walk(value.fget)
        if kind in (staticmethod, classmethod):
            return kind, self.walk(value.__func__)
        if isinstance(value, STABLE):
            return kind, value
        if isinstance(value, types.ModuleType):
            return value.__name__ if library_module(value) else self.module(value)
        if kind in (list, set, frozenset) or isinstance(value, tuple):
            if kind in (list, set):
                self.lists.append((value, tuple(value)))
            return kind, tuple([self.walk(part) for part in value])
        if kind in (dict, OrderedDict, defaultdict):
            self.lists.append((value, tuple(value)))
            self.items += [(value, k, holder_of(v)) for k, v in value.items()]
            default = self.walk(value.default_factory) if kind is defaultdict else None
            return kind, default, tuple([(self.walk(k), self.walk(v)) for k, v in value.items()])
        if isinstance(value, (list, set, dict)):
            raise Unreadable  # a subclass, which may hold more than its elements
        if kind is types.MethodType:
            return kind, self.walk(value.__func__), self.walk(value.__self__)
        if isinstance(value, functools.partial):
            return kind, self.walk(value.func), self.walk(value.args), self.walk(value.keywords)
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is not None and parameters.frozen:
            return self.walk(kind), tuple([self.walk(getattr(value, name)) for name in kind.__dataclass_fields__])
        if not hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__[:-1]):
            raise Unreadable
        return self.walk(kind), _of_builtin(value), self.attributes(value)

    def module(self, value: types.ModuleType):
        raise Unreadable  # its attributes may change, and which of them are read is not known

    def attributes(self, value):
        """Those of an object, which may change."""
        try:
            ref = weakref.ref(value)
        except TypeError:
            raise Unreadable from None
        fields = {name: part for name, part in vars(value).items() if name != ATTRIBUTE}
        self.owners.append((ref, _holders(fields)))
        return tuple([(name, self.walk(part)) for name, part in fields.items()])

    def type(self, value: type):
        """A class stands by its id, with the attributes and methods of those of its bases that are of no library."""
        self.alive.append(weakref.ref(value))
        parts = []
        for base in value.__mro__:
            if not library_class(base):
                self.owners.append((weakref.ref(base), _holders(vars(base))))
                for name, part in vars(base).items():
                    if not name.startswith("__") or is_special(base, name):
                        parts.append((name, self.walk(part)))
        return id(value), tuple(parts)

    def function(self, value: types.FunctionType):
        captured, scope, names, found = (
            [contents_of(cell) for cell in value.__closure__ or ()],
            value.__globals__,
            (),
            {},
        )
        if not library_scope(scope):
            names = global_names(value.__code__)
            if not DYNAMIC.isdisjoint(names):
                raise Unreadable
            found = {name: scope[name] for name in names if name in scope}
        defaults, keywords = value.__defaults__, value.__kwdefaults__
        holders = [holder_of(part) for part in captured], _holders({name: scope.get(name, MISSING) for name in names})
        self.functions.append((weakref.ref(value), value.__code__, defaults, keywords, *holders))
        parts = [*captured, *found.values(), *(defaults or ()), keywords]
        return value.__code__, tuple(found), tuple([self.walk(part) for part in parts]), self.attributes(value)


def _of_builtin(value) -> str | None:
    """What an object of a subclass of int, float, str, ... holds beside its attributes."""
    for base in type(value).__mro__[1:-1]:
        if not base.__flags__ & HEAP:
            if base not in PLAIN and base is not float:
                raise Unreadable
            return base.__repr__(value)
    return None


def is_special(cls: type, name: str) -> bool:
    """True for a method that Python calls without its name, as __call__, if the class has it as a function."""
    if name not in SPECIAL or not isinstance(vars(cls).get(name), types.FunctionType):
        return name == "__call__"
    return name not in GENERATED or "__dataclass_params__" not in vars(cls)


def contents_of(cell):
    try:
        return cell.cell_contents
    except ValueError:  # empty: a name that is assigned later
        return MISSING


@functools.lru_cache(maxsize=MOST)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code, and code nested in it, looks up in its module; with __import__ if it imports no library."""
    found = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    names = {i.argval for i in found if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for i in range(2, len(found)):
        if found[i].opname == "IMPORT_NAME" and (found[i - 2].argval != 0 or library(found[i].argval) is None):
            names.add("__import__")  # the level is not 0: a relative import, of the user's package
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(sorted(names.union(*(global_names(c) for c in nested))))


# ---------------------------------------------------------------------- what is kept

_OF_STATE: dict[tuple, tuple] = {}  # (State.key, arguments) -> (State.alive, Program, weak references to its tensors)


class Kept:
    """A function's latest trace. It is an attribute of the function, and not in a table, which would keep functions for
    ever that refer to what holds them.

    `pinned` are the tensors that were handed out while a CUDA graph was captured, of this trace and of earlier ones.
    """

    __slots__ = ("arguments", "function", "pinned", "places", "result", "state", "versions")

    def __init__(self, function: Callable, arguments: tuple, state: State, result: Traced, pinned: tuple):
        self.function, self.arguments, self.state, self.result = weakref.ref(function), arguments, state, result
        self.versions, self.places, self.pinned = _versions(result.read), _places(result.tensors), pinned

    def is_of(self, function: Callable, arguments: tuple) -> bool:
        """Whether it is this very function, no copy, and would be traced to the same."""
        if self.function() is not function or self.arguments != arguments or not self.state.holds():
            return False
        if self.places and self.places != _places(self.result.tensors):
            return False
        return not self.versions or self.versions == _versions(self.result.read)

    def __reduce__(self) -> tuple:
        return type(None), ()  # in a copy, or in a file, None stands for this


def traced(function: Callable, what: str, inputs: Sequence[str], shape: tuple[int, ...], device) -> Traced:
    """trace(), kept for functions of the same state; see record.trace for the arguments and what it raises.

    Without a shape, numbers that differ between functions of one code are arguments of the program, see numbers.py. The
    captured tensors, and what was computed of them, are kept as long as the function is.
    """
    arguments = what, inputs, shape, device
    fields = getattr(function, "__dict__", None)
    known = None if fields is None else fields.get(ATTRIBUTE)
    if known is not None and known.is_of(function, arguments):
        tensors = known.result.tensors
        if tensors and in_capture(tensors[0]) and not any(t is tensors for t in known.pinned):
            known.pinned += (tensors,)
        return known.result
    state = State.of(function)
    if state is None:
        return _traced_now(function, arguments)
    result = _of_state(state, arguments)
    if result is None:
        with lasting_memory(torch.device(device)):
            result = _traced_now(function, arguments)
        if not result.read and len(result.tensors) == len(_captured(state, result.tensors)):
            if len(_OF_STATE) >= MOST:
                _OF_STATE.clear()
            refs = tuple(weakref.ref(t) for t in result.tensors)
            _OF_STATE[state.key, arguments] = state.alive, result.program, refs, result.numbers
    if type(fields) is dict and _versions(result.read) is not None:
        state.seen.clear()
        earlier = known.pinned if known is not None and known.function() is function else ()
        fields[ATTRIBUTE] = Kept(function, arguments, state, result, earlier)
    return result


def _of_state(state: State, arguments: tuple) -> Traced | None:
    """The trace of another function of this state."""
    known = _OF_STATE.get((state.key, arguments))
    if known is None:
        return None
    alive, program, refs, numbers = known
    tensors = tuple(ref() for ref in refs)
    if any(ref() is None for ref in alive) or any(t is None for t in tensors):
        return None
    return Traced(program, tensors, (), numbers=numbers)


def _traced_now(function: Callable, arguments: tuple) -> Traced:
    """A trace; a function of positions has the numbers that change as arguments."""
    found, (_, _, shape, _) = trace(function, *arguments), arguments
    return found if shape else with_arguments(function, found)


def _captured(state: State, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of a trace's tensors that are part of the function's state."""
    ids = {id(ref()) for ref in state.alive}
    return [t for t in tensors if id(t) in ids]


def _places(tensors: Sequence[Tensor]) -> tuple:
    """Where each lies, and how: `t.data = other` and t.resize_() change that of the same tensor."""
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])


def _versions(tensors: Sequence[Tensor]) -> tuple | None:
    """How often each has been written to; None where torch does not count it."""
    try:
        return tuple([t._version for t in tensors])
    except RuntimeError:  # made under torch.inference_mode
        return None
