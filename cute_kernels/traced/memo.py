"""Traces a function once for each state that it can be in.

A trace holds as long as the function would do the same again. A call with a function that was traced before compares
its code, its defaults, what it captures and the globals that it names, in about a microsecond. A new function with an
old one's code (a lambda in a loop) is found by its state, in about ten.

Recognized are functions that read plain values, tensors, libraries, functions of this kind, this project's frozen
dataclasses (`attention.mask_mods`), and tuples of these. A function that reads anything else, such as an object's
attributes, a dict or a user's class, is traced in each call, which takes 0.4 to 2 ms: what it would read next cannot be
told without calling it.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..runtime.derived import captured as in_capture
from ..runtime.graphs import lasting_memory
from ..runtime.torch_compat import OpOverload, OpOverloadPacket, uncompiled
from .libraries import library, library_class, library_module, library_scope
from .numbers import with_arguments
from .record import Traced, trace

MOST = 4096  # traces that are kept
LARGEST = 100  # values of a state
PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size)
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)
STABLE = (types.BuiltinFunctionType, *_DESCRIPTORS, OpOverload, OpOverloadPacket)
DYNAMIC = {"globals", "vars", "locals", "eval", "exec", "__import__"}  # what these give is not in the code
MISSING = object()
ATTRIBUTE = "_cute_kernels_trace"  # of functions and objects: their latest trace


class Unreadable(Exception):
    """Part of a state has no value that can be compared."""


class _Strong:
    """Stands for a weak reference to what cannot have one."""

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


def _is_same(holder, now) -> bool:
    value = holder()
    return value is now and (value is not None or type(holder) is _Strong)


@dataclass
class State:
    """The state that a function reads, determined by a walk through it.

    `key` is hashable, and equal for functions that do the same; tensors in it stand by their ids, and `alive` says
    whether they are still those. `holds()` says whether the function would be walked through to the same key. Functions
    are not kept alive: they may lead back to the function whose state this is.
    """

    key: Any = None
    alive: list[weakref.ref] = field(default_factory=list)
    functions: list[tuple] = field(default_factory=list)  # (function, code, defaults, holders of what it captures ...)
    seen: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(function: Callable) -> State | None:
        """None for a function whose state cannot be read."""
        state = State()
        try:
            state.key = state.walk(function)
        except Unreadable:
            return None
        return state

    def holds(self) -> bool:
        for ref, code, defaults, captured, names in self.functions:
            function = ref()
            if function is None or function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            for cell, holder in zip(function.__closure__ or (), captured, strict=True):
                if not _is_same(holder, contents_of(cell)):
                    return False
            if names is None:  # a library's
                continue
            if function.__kwdefaults__ or len(fields := function.__dict__) - (ATTRIBUTE in fields):
                return False
            scope = function.__globals__
            for name, holder in names:
                if not _is_same(holder, scope.get(name, MISSING)):
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
        if isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided:
            self.alive.append(weakref.ref(value))
            return id(value), value.shape, value.stride(), value.dtype, value.device
        if kind is tuple:
            return kind, tuple([self.walk(part) for part in value])
        if is_stable(value) or isinstance(value, type) and library_class(value):
            return kind, value
        if isinstance(value, types.ModuleType) and library_module(value):  # or torch.ops.aten, of a subclass
            return kind, value.__name__
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is not None and parameters.frozen and library_class(kind):
            return kind, tuple([self.walk(getattr(value, name)) for name in kind.__dataclass_fields__])
        raise Unreadable

    def function(self, value: types.FunctionType):
        captured = [contents_of(cell) for cell in value.__closure__ or ()]
        scope, defaults, found, names = value.__globals__, value.__defaults__ or (), {}, None
        if not library_scope(scope):
            read = global_names(value.__code__)
            if not DYNAMIC.isdisjoint(read) or value.__kwdefaults__ or vars(value).keys() - {ATTRIBUTE}:
                raise Unreadable
            names = [(name, holder_of(scope.get(name, MISSING))) for name in read]
            found = {name: scope[name] for name in read if name in scope}
        holders = [holder_of(part) for part in captured]
        self.functions.append((weakref.ref(value), value.__code__, value.__defaults__, holders, names))
        parts = tuple([self.walk(part) for part in (*captured, *found.values(), *defaults)])
        return value.__code__, tuple(found), parts


def is_stable(value) -> bool:
    """True for a function or descriptor in C, and an op, but not for a method that is bound to an object."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (type, type(None), types.ModuleType))
    return isinstance(value, STABLE)


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
        """True if it belongs to this function object, not a copy, and a new trace would be the same."""
        if self.function() is not function or self.arguments != arguments or not self.state.holds():
            return False
        if self.places and self.places != _places(self.result.tensors):
            return False
        return not self.versions or self.versions == _versions(self.result.read)

    def __reduce__(self) -> tuple:
        return type(None), ()  # in a copy, or in a file, None stands for this


@uncompiled
def traced(
    function: Callable, what: str, inputs: Sequence[str], shape: tuple[int, ...], device, make: Callable | None = None
) -> Traced:
    """trace(), kept for functions of the same state; see record.trace for the arguments and what it raises. With `make`
    it is make(function, device).

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
    result = None if state is None else _of_state(state, arguments)
    if result is None:
        with lasting_memory(torch.device(device)):
            result = _traced_now(function, arguments) if make is None else make(function, device)
        if state is None:
            return result
        if not result.read and len(result.tensors) == len(_captured(state, result.tensors)):
            if len(_OF_STATE) >= MOST:
                _OF_STATE.clear()
            refs = tuple(weakref.ref(t) for t in result.tensors)
            _OF_STATE[state.key, arguments] = state.alive, result.program, refs, result.numbers
    if state is not None and type(fields) is dict and _versions(result.read) is not None:
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
    """The trace's tensors that are part of the function's state."""
    ids = {id(ref()) for ref in state.alive}
    return [t for t in tensors if id(t) in ids]


def _places(tensors: Sequence[Tensor]) -> tuple:
    """Address and layout of each tensor, which `t.data = other` and t.resize_() change."""
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])


def _versions(tensors: Sequence[Tensor]) -> tuple | None:
    """Version of each tensor; None if torch does not count it."""
    try:
        return tuple([t._version for t in tensors])
    except RuntimeError:  # made under torch.inference_mode
        return None
