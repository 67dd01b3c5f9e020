"""A version number for what a function reads through globals, or an instance through its class.

The op of a mask_mod or score_mod takes the version beside the tensors among what is read, so that backward knows the
values of the forward pass. In a compiled graph both are inputs, read at each call. A graph with an epilogue function
has a guard on the version: the numbers are constants of its kernel.

The state of a function is that of memo.py, with a difference: of objects, classes and modules only those attributes
count that the code names. So an attribute that others change, as a counter, makes no new version.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import types
import weakref
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor, nn

from .libraries import library_class, library_module, library_scope, standard_library
from .memo import (
    ATTRIBUTE,
    DYNAMIC,
    MISSING,
    MOST,
    PLAIN,
    STABLE,
    State,
    Unreadable,
    contents_of,
    global_names,
    holder_of,
    is_same,
    is_special,
)

UNNAMED = {"getattr", "attrgetter", "__dict__", "__getattribute__", "asdict", "astuple"}  # read attributes unnamed
LIBRARY_READS = {"__getitem__", "__iter__", "__len__", "__call__", "forward"}
ISSUED = 64  # versions of a state that cannot be compared, which a forward pass may still ask for

STATES: dict[str, GlobalState | None] = {}  # by the name of a function or class in a text
_versions = itertools.count(2)


@functools.lru_cache(maxsize=MOST)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of attributes and of globals, and strings, in code and in code nested in it."""
    names, constants = set(code.co_names), list(code.co_consts)
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            constants += constant
        elif isinstance(constant, types.CodeType):
            names |= names_in(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return frozenset(names)


@dataclass
class _NamedState(State):
    names: frozenset[str] = frozenset()
    codes: set = field(default_factory=set)
    named: list[tuple] = field(default_factory=list)  # (object, [(attribute, holder)])

    def holds(self) -> bool:
        for ref, pairs in self.named:
            owner = ref()
            if owner is None:
                return False
            fields = vars(owner)
            for name, holder in pairs:
                if not is_same(holder, fields.get(name, MISSING)):
                    return False
        return super().holds()

    def function(self, value):
        if standard_library(value.__globals__.get("__name__")):
            return value
        if not library_scope(value.__globals__):
            self.codes.add(value.__code__)
        return super().function(value)

    def module(self, value):
        if standard_library(value.__name__):
            return value.__name__
        return self.following(value, vars(value).keys() & self.names)

    def attributes(self, value):
        if _reads_unnamed(type(value), self.names):
            return super().attributes(value)
        fields = vars(value)
        names = {n for n in self.names if n in fields or any(n in vars(base) for base in type(value).__mro__)}
        parts = [self.following(value, names | fields.keys() & {"__wrapped__"})]
        if isinstance(value, nn.Module):
            for table in (value._parameters, value._buffers, value._modules):
                parts.append(values_named(self, table, sorted(self.names & table.keys())))
        return tuple(parts)

    def type(self, value):
        self.alive.append(weakref.ref(value))
        bases = _own_bases(value)
        names = {n for base in bases for n in vars(base) if _is_followed(base, n, self.names)}
        return id(value), tuple([self.following(base, names) for base in bases])

    def following(self, owner, names) -> tuple:
        """The attributes of these names that the owner has, or may get."""
        fields = vars(owner)
        self.named.append((holder_of(owner), [(name, holder_of(fields.get(name, MISSING))) for name in names]))
        return tuple([(name, self.walk(fields[name])) for name in sorted(names) if name in fields])


class GlobalState:
    """What functions read through globals, and what objects hold.

    roots: (globals, code) of a function, whose captured values do not count, or an object in full: a class is what its
        instances read through it. Objects are not kept alive.
    """

    def __init__(self, *roots):
        self._roots = [root if type(root) is tuple else holder_of(root) for root in roots]
        self._state, self._version = None, 0
        self._tensors: list[weakref.ref] = []
        self._known: dict = {}  # key of a state -> (what must be alive, version)
        self._issued: deque[int] = deque(maxlen=ISSUED)

    @property
    def name(self) -> str:
        """Tells states of different roots apart, while these are alive."""
        parts = [part for root in self._roots for part in (root if type(root) is tuple else (root(),))]
        return "_".join(["__cute_kernels_state", *[f"{id(part):x}" for part in parts]])

    @property
    def version(self) -> int:
        """A number for the values as they are now; a new one in each call if they cannot be compared."""
        self._current()
        return self._version

    @property
    def changes(self) -> bool:
        """True if each call has a new version."""
        self._current()
        return self._state is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that it may read, in a fixed order."""
        if self._state is None:
            self._walk()
        else:
            self._current()
        return tuple([t for ref in self._tensors if (t := ref()) is not None])

    def is_current(self, version: int) -> bool:
        """True if the values are now those of the version."""
        return version in self._issued if self._state is None else version == self.version

    def reads(self, containers: set[int], attributes: set[tuple[int, str]], global_names: set[str]) -> bool:
        """True if it may read one of these; objects are given by their ids."""
        _, names, seen = self._walk()
        if any(key in seen and name in names for key, name in attributes):
            return True
        return not containers.isdisjoint(seen) or not global_names.isdisjoint(names)

    def _current(self) -> None:
        """Make the version that of the values as they are now."""
        if self._state is not None and self._state.holds():
            return
        self._state = state = self._walk()[0]
        if state is None:
            self._version = next(_versions)
            self._issued.append(self._version)
            return
        alive, version = self._known.get(state.key, ((), None))
        if version is None or any(ref() is None for ref in alive):
            version = next(_versions)
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[state.key] = state.alive, version
        self._version = version

    def _walk(self) -> tuple[_NamedState | State | None, frozenset[str], dict[int, object]]:
        """(the state, or None if it cannot be compared; the names in all code that it leads to; what was looked at, by
        id). Finds the tensors, too."""
        names = frozenset().union(*[names_in(root[1]) for root in self._roots if type(root) is tuple])
        while True:
            found, seen = {}, {}
            _collect(self._root_values(), names, found, seen)
            codes = {value.__code__ for value in seen.values() if isinstance(value, types.FunctionType)}
            unnamed = not names.isdisjoint(UNNAMED)
            state = State() if unnamed else _NamedState(names=names, codes=codes)
            try:
                state.key = self._key(state)
            except Unreadable:
                state.key = None
            more = names.union(*map(names_in, codes))
            if more == names:
                self._tensors = [weakref.ref(t) for t in found.values()]
                state.seen.clear()
                return (None if state.key is None else state), names, seen
            names = more

    def _root_values(self) -> list:
        values = []
        for root in self._roots:
            if type(root) is tuple:
                values += [root[0][name] for name in _read_globals(*root) if name in root[0]]
            else:
                values.append(root())
        return values

    def _key(self, state: State):
        parts = []
        for root in self._roots:
            if type(root) is tuple:
                if not DYNAMIC.isdisjoint(global_names(root[1])):
                    raise Unreadable
                parts.append(values_named(state, root[0], _read_globals(*root)))
            elif (value := root()) is None:
                raise Unreadable
            else:
                parts.append(state.walk(value))
        return tuple(parts)


def values_named(state: State, fields: dict, names) -> tuple:
    """The part of the key that the values of a dict under these names are, some of which may be missing."""
    state.items += [(fields, name, holder_of(fields.get(name, MISSING))) for name in names]
    return tuple([(name, state.walk(fields[name])) for name in names if name in fields])


def _read_globals(scope: dict, code: types.CodeType) -> list[str]:
    """The globals that code names: no builtins, and no modules of libraries."""
    return [
        name
        for name in global_names(code)
        if (name in scope or not hasattr(builtins, name))
        and not (isinstance(scope.get(name), types.ModuleType) and library_module(scope[name]))
    ]


def _reads_globals(scope: dict, code: types.CodeType) -> bool:
    reads = _read_globals(scope, code) or not DYNAMIC.isdisjoint(global_names(code))
    return bool(reads) and not library_scope(scope)


def of_values(values: list) -> GlobalState | None:
    """The state of functions, by themselves or as (globals, code), and of objects; None if it can never change."""
    roots, changes = [], False
    for value in values:
        if type(value) is types.FunctionType and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            if not vars(value).keys() - {ATTRIBUTE}:
                value = value.__globals__, value.__code__
        if type(value) is tuple and library_scope(value[0]) or isinstance(value, (*PLAIN, *STABLE, float, complex)):
            continue
        roots.append(value)
        changes |= type(value) is not tuple or _reads_globals(*value)
    return GlobalState(*roots) if changes else None


def of_function(name: str, scope: dict, code: types.CodeType) -> None:
    """Register the state of what code reads from its globals; None if these are all a library's."""
    if name not in STATES:
        STATES[name] = GlobalState((scope, code)) if _reads_globals(scope, code) else None


def of_class(name: str, cls: type) -> None:
    """Register the state of what instances of a class read through it."""
    if name not in STATES:
        STATES[name] = None if library_class(cls) else GlobalState(cls)


def _own_bases(cls: type) -> list[type]:
    """The class and its bases, without those of libraries."""
    return [base for base in cls.__mro__ if not library_class(base) and not standard_library(base.__module__)]


def _reads_unnamed(cls: type, names: frozenset[str]) -> bool:
    """True if code with these names may read attributes of an instance that it does not name: by a library's method, as
    UserDict's, or by __getattr__. nn.Module finds parameters, buffers and modules by their names."""
    for base in cls.__mro__[:-1]:
        fields, own = vars(base), not (library_class(base) or standard_library(base.__module__))
        if base is not nn.Module and ("__getattr__" in fields or not own and not LIBRARY_READS.isdisjoint(fields)):
            return True
        if not own and any(isinstance(fields[name], types.FunctionType) for name in names & fields.keys()):
            return True
    return False


def _is_followed(cls: type, name: str, names: frozenset[str]) -> bool:
    """True if code with these names may read the attribute through the class."""
    return name in names and not name.startswith("__") or name == "forward" or is_special(cls, name)


def _collect(value, names: frozenset[str], found: dict[int, Tensor], seen: dict) -> None:
    """Add the tensors that code with these names may read of a value to `found`, by id."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    parts = []
    if isinstance(value, Tensor):
        found[id(value)] = value
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        parts += value
    elif isinstance(value, (dict, types.MappingProxyType)):
        named = any(isinstance(part, Tensor) and key in names for key, part in value.items() if isinstance(key, str))
        for key, part in value.items():
            if not named or not isinstance(part, Tensor) or not isinstance(key, str) or key in names:
                parts.append(part)
    elif isinstance(value, types.FunctionType):
        scope = value.__globals__
        if library_scope(scope) or standard_library(scope.get("__name__")):
            del seen[id(value)]
        else:
            seen.update((id(cell), cell) for cell in value.__closure__ or ())
            parts += [contents_of(cell) for cell in value.__closure__ or ()]
            parts += [
                value.__defaults__,
                value.__kwdefaults__,
                *(part for name, part in vars(value).items() if name != ATTRIBUTE),
            ]
            parts += [scope[name] for name in global_names(value.__code__) if name in scope]
    elif isinstance(value, types.MethodType):
        parts += [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    elif isinstance(value, property):
        parts.append(value.fget)
    elif isinstance(value, (staticmethod, classmethod)):
        parts.append(value.__func__)
    elif isinstance(value, type):
        bases = _own_bases(value)
        parts += [part for base in bases for n, part in vars(base).items() if _is_followed(base, n, names)]
    elif isinstance(value, types.ModuleType):
        if not library_module(value) and not standard_library(value.__name__):
            parts += [part for name, part in vars(value).items() if name in names]
    else:
        fields = getattr(value, "__dict__", {})
        tables = [fields, *(fields[t] for t in ("_parameters", "_buffers", "_modules") if t in fields)]
        every = _reads_unnamed(type(value), names) or not names.isdisjoint(UNNAMED)
        followed = names | {"__wrapped__"}
        parts += [part for table in tables for name, part in table.items() if every or name in followed]
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()) if name in names]
        parts += [type(value), *(getattr(value, name, None) for name in slots)]
    for part in parts:
        _collect(part, names, found, seen)
