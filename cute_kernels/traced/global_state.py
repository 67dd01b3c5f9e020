"""A version number for what a function reads through globals, or an instance through its class.

The op of a mask_mod or score_mod takes the version beside the tensors among what is read, so that backward knows the
values of the forward pass. In a compiled graph both are inputs, read at each call. A graph with an epilogue function
has a guard on the version: the numbers are constants of its kernel.

Each reading walks through the values: 2 us for a number, 5 for a small dict, 12 for an object. Of objects, classes and
modules only those attributes count that the code names, so an attribute that others change, such as a counter, makes no
new version.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.torch_compat import uncompiled
from .libraries import library_class, library_module, library_scope, standard_library
from .memo import ATTRIBUTE, DYNAMIC, LARGEST, MISSING, MOST, PLAIN, contents_of, global_names, holder_of, is_stable

UNNAMED = {"getattr", "attrgetter", "__dict__", "__getattribute__", "asdict", "astuple"}  # read attributes unnamed
LIBRARY_READS = {"__getitem__", "__iter__", "__len__", "__call__", "forward"}
# Of a dataclass
GENERATED = {
    f"__{name}__" for name in "init repr eq hash lt le gt ge setattr delattr replace".split()
}  # of a dataclass
HEAP = 1 << 9  # in type.__flags__: the class is written in Python, or lives as such a one does
SEQUENCES, DICTS = (tuple, list, set, frozenset, deque), (dict, types.MappingProxyType)
CONTAINERS = {*SEQUENCES, *DICTS, OrderedDict, defaultdict}
WRAPPERS = (  # (class, attributes that its instances lead to)
    (types.MethodType, ("__func__", "__self__")),
    (types.BuiltinFunctionType, ("__name__", "__self__")),
    (functools.partial, ("func", "args", "keywords")),
    (property, ("fget",)),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
)
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


class _Walk:
    """A walk through what code with these names may read of values.

    key: hashable, and equal if the values are the same; tensors and classes in it stand by their ids, and `alive` says
        whether they are still those. None if part of a value cannot be compared; then the walk goes on all the same.
    tensors: those that were met, by id.
    codes: of functions.
    seen: what was met, by id: (number, value).
    """

    def __init__(self, roots: list, names: frozenset[str]):
        self.names, self.every = names, not names.isdisjoint(UNNAMED)
        self.seen: dict[int, tuple] = {}
        self.tensors: dict[int, Tensor] = {}
        self.alive: list[weakref.ref] = []
        self.codes: set[types.CodeType] = set()
        self.comparable = True
        parts = tuple([self._scope(*root) if type(root) is tuple else self._root(root()) for root in roots])
        self.key = parts if self.comparable else None

    def _scope(self, scope: dict, code: types.CodeType):
        names = global_names(code)
        self.comparable &= DYNAMIC.isdisjoint(names)
        return self._fields(scope, names)

    def _root(self, value):
        self.comparable &= value is not None  # which is no longer alive
        return self._of(value)

    def _of(self, value):
        """The part of the key that a value is."""
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind is float or kind is complex:
            return kind, repr(value)  # 0.0 and -0.0 differ, and a NaN is itself
        if kind is types.MemberDescriptorType:  # of a class with slots
            return kind
        if id(value) in self.seen:
            return self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value  # the value, so that no other gets its id
        self.comparable &= len(self.seen) <= LARGEST
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, type):
            return self._type(value)
        if is_stable(value):
            return kind, value
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        for wrapper, names in WRAPPERS:
            if isinstance(value, wrapper):
                return wrapper, tuple([self._of(getattr(value, name)) for name in names])
        elements = self._elements(value)
        return (kind, elements) if kind in CONTAINERS else (elements, self._object(value, elements is not None))

    def _fields(self, fields, names) -> tuple:
        """Part of the key for the items of a dict, or the attributes of an object, with these names."""
        return tuple([(name, self._of(fields[name])) for name in sorted(fields.keys() & names)])

    def _tensor(self, value: Tensor):
        self.tensors[id(value)] = value
        self.alive.append(weakref.ref(value))
        if value.is_nested or value.layout is not torch.strided:  # no strides; the trace says what is wrong
            self.comparable = False
            return None
        return id(value), value.shape, value.stride(), value.dtype, value.device

    def _type(self, value: type):
        """A class, with the attributes and methods of those of its bases that are of no library."""
        self.alive.append(weakref.ref(value))
        bases = [vars(base) for base in _own_bases(value)]
        return id(value), tuple([self._fields(fields, self._followed(fields)) for fields in bases])

    def _followed(self, fields) -> set[str]:
        """Names of the attributes of a class that code may read through it."""
        named = fields.keys() if self.every else self.names & fields.keys() | fields.keys() & {"forward"}
        special = {name for name in fields if _is_special(fields, name)}
        return special.union(name for name in named if not name.startswith("__"))

    def _function(self, value: types.FunctionType):
        scope, fields = value.__globals__, vars(value)
        names: tuple[str, ...] = ()
        if standard_library(scope.get("__name__")):
            return value
        if not library_scope(scope):
            self.codes.add(value.__code__)
            names = global_names(value.__code__)
            self.comparable &= DYNAMIC.isdisjoint(names)
        for cell in value.__closure__ or ():
            self.seen[id(cell)] = len(self.seen), cell
        captured = tuple([self._of(contents_of(cell)) for cell in value.__closure__ or ()])
        defaults = self._of(value.__defaults__), self._of(value.__kwdefaults__)
        attributes = self._fields(fields, fields.keys() - {ATTRIBUTE} if self.every else self.names | {"__wrapped__"})
        return value.__code__, captured, defaults, self._fields(scope, names), attributes

    def _module(self, value: types.ModuleType):
        if library_module(value) or standard_library(value.__name__):
            return value.__name__
        self.comparable &= not self.every  # which attributes are read is not known
        return self._fields(vars(value), self.names)

    def _elements(self, value):
        """Part of the key for a container's elements; None for another object."""
        if isinstance(value, SEQUENCES):
            return tuple([self._of(part) for part in value])
        if not isinstance(value, DICTS):
            return None
        items = list(value.items())
        if any(isinstance(part, Tensor) and key in self.names for key, part in items if isinstance(key, str)):
            items = [(k, part) for k, part in items if not (isinstance(part, Tensor) and _is_other(k, self.names))]
        return self._of(getattr(value, "default_factory", None)), *[(self._of(k), self._of(x)) for k, x in items]

    def _object(self, value, has_elements: bool):
        """Part of the key for an object's attributes."""
        kind, fields = type(value), dict(getattr(value, "__dict__", ()))
        slots = [name for base in kind.__mro__ if "__slots__" in vars(base) for name in _slots_of(base)]
        self.comparable &= has_elements or bool(slots) or hasattr(value, "__dict__")
        fields.pop(ATTRIBUTE, None)
        fields |= {name: part for name in slots if (part := getattr(value, name, MISSING)) is not MISSING}
        every = self.every or _reads_unnamed(kind, self.names)
        parts = [self._fields(fields, fields.keys() if every else self.names | {"__wrapped__"})]
        if isinstance(value, nn.Module) and not every:
            tables = value._parameters, value._buffers, value._modules
            parts += [self._fields(table, self.names) for table in tables]
        return self._of(kind), self._of_builtin(value), *parts

    def _of_builtin(self, value) -> str | None:
        """The plain value of an object of a subclass of int, float, str, ..., apart from its attributes."""
        base: Any
        for base in type(value).__mro__[1:-1]:
            if not base.__flags__ & HEAP:
                if base in PLAIN or base is float:
                    return base.__repr__(value)
                self.comparable &= base in CONTAINERS
        return None


class GlobalState:
    """State that functions read through globals, and state that objects hold.

    roots: (globals, code) of a function, whose captured values do not count, or an object in full: a class is what its
        instances read through it. Objects are not kept alive.
    """

    def __init__(self, *roots):
        self._roots = [root if type(root) is tuple else holder_of(root) for root in roots]
        self._names = frozenset().union(*[names_in(root[1]) for root in roots if type(root) is tuple])
        self._known: dict = {}  # key of a state -> (what must be alive, version)
        self._issued: deque[int] = deque(maxlen=ISSUED)

    @property
    def name(self) -> str:
        """Tells states of different roots apart, while these are alive."""
        parts = [part for root in self._roots for part in (root if isinstance(root, tuple) else (root(),))]
        return "_".join(["__cute_kernels_state", *[f"{id(part):x}" for part in parts]])

    @property
    def version(self) -> int:
        """A number for the values as they are now; a new one in each call if they cannot be compared."""
        return self._version_of(self._walk())

    def _version_of(self, walk: _Walk) -> int:
        if walk.key is None:
            self._issued.append(next(_versions))
            return self._issued[-1]
        alive, version = self._known.get(walk.key, ((), None))
        if version is None or any(ref() is None for ref in alive):
            version = next(_versions)
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[walk.key] = walk.alive, version
        return version

    @property
    def changes(self) -> bool:
        """True if each call has a new version."""
        return self._walk().key is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that it may read, in a fixed order."""
        return tuple(self._walk().tensors.values())

    def is_current(self, version: int) -> bool:
        """True if the values are now those of the version."""
        walk = self._walk()
        return version in self._issued if walk.key is None else version == self._version_of(walk)

    def reads(self, containers: set[int], attributes: set[tuple[int, str]], global_names: set[str]) -> bool:
        """True if it may read one of these; objects are given by their ids."""
        seen = self._walk().seen
        if any(key in seen and name in self._names for key, name in attributes):
            return True
        return not containers.isdisjoint(seen) or not global_names.isdisjoint(self._names)

    @uncompiled
    def _walk(self) -> _Walk:
        """A walk by the names in all code that it leads to."""
        while True:
            walk = _Walk(self._roots, self._names)
            names = self._names.union(*map(names_in, walk.codes))
            if names == self._names:
                return walk
            self._names = names


def _reads_globals(scope: dict, code: types.CodeType) -> bool:
    """True if code names a global that is neither a builtin nor a library."""
    if library_scope(scope):
        return False
    for name in global_names(code):
        value = scope.get(name, MISSING)
        if name in DYNAMIC or value is MISSING and not hasattr(builtins, name):
            return True
        if value is not MISSING and not (isinstance(value, types.ModuleType) and library_module(value)):
            return True
    return False


def of_values(values: list) -> GlobalState | None:
    """The state of functions, by themselves or as (globals, code), and of objects; None if it can never change."""
    roots, changes = [], False
    for value in values:
        if type(value) is types.FunctionType and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            if not vars(value).keys() - {ATTRIBUTE}:
                value = value.__globals__, value.__code__
        if (
            type(value) is tuple
            and library_scope(value[0])
            or is_stable(value)
            or isinstance(value, (*PLAIN, float, complex))
        ):
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


def _is_special(fields, name: str) -> bool:
    """True for a method of a class that Python may call without its name."""
    if not name.startswith("__") or name in GENERATED and "__dataclass_params__" in fields:
        return False
    return name == "__call__" or isinstance(fields[name], types.FunctionType)


def _is_other(key, names: frozenset[str]) -> bool:
    """True for a key of a dict that the code does not name."""
    return isinstance(key, str) and key not in names


def _slots_of(cls: type) -> list[str]:
    return [name for name, part in vars(cls).items() if type(part) is types.MemberDescriptorType]
