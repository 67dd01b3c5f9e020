"""A function is traced once for each state that it can be in, and what it captures is not kept alive."""

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import json
import math
import operator
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn
from torch.nn.attention.flex_attention import and_masks, or_masks
from torch.nn.functional import silu

from attention import mask_mods
from cute_kernels import functions as F
from cute_kernels.traced import memo
from cute_kernels.traced.evaluate import evaluate
from cute_kernels.traced.libraries import LIBRARIES, library_class, library_module, library_scope
from cute_kernels.traced.record import TraceError

CPU = torch.device("cpu")
EPILOGUE, MASK = ("f", ("float32",), (2, 3), CPU), ("mask_mod", ("int32",) * 4, (), CPU)
aten = torch.ops.aten
by, other, slope, relu, nothing = 2.0, 5.0, "a field's name", "a function's name", None


@pytest.fixture
def traces(monkeypatch):
    """Functions that were traced, in order; nothing is kept of other tests."""
    found, trace = [], memo.trace
    monkeypatch.setattr(memo, "trace", lambda function, *rest: found.append(function) or trace(function, *rest))
    monkeypatch.setattr(memo, "_OF_STATE", {})
    return found


def value(function, x=1.0) -> float:
    """Result of a function's Program."""
    found = memo.traced(function, *EPILOGUE)
    return evaluate(found.program, [torch.tensor([x])]).item()


def scaling(factor):
    return lambda x: x * factor


def test_kept(traces):
    function = scaling(2.0)
    first = memo.traced(function, *EPILOGUE)
    assert memo.traced(function, *EPILOGUE) is first and len(traces) == 1
    assert memo.traced(scaling(2.0), *EPILOGUE).program is first.program and len(traces) == 1, "of equal state"
    assert memo.traced(scaling(3.0), *EPILOGUE).program != first.program and len(traces) == 2
    assert memo.traced(scaling(2), *EPILOGUE) and len(traces) == 3, "an int is no float"
    assert [str(value(scaling(zero))) for zero in (0.0, -0.0)] == ["0.0", "-0.0"]
    wide = memo.traced(function, "g", ("bfloat16",), (2, 3), CPU)
    assert wide.program.inputs == ("bfloat16",) and len(traces) == 6, "other arguments"


@pytest.mark.parametrize(
    "make",
    [
        lambda by: functools.partial(torch.clamp, min=by), lambda by: nn.Threshold(0.0, by),
        lambda by: type("Scale", (), {"by": by}), scaling,
    ],
)  # fmt: skip
def test_captured_callables_are_told_apart(make):
    def program(by):
        found = make(by)
        return memo.traced(lambda x: x * found.by if isinstance(found, type) else found(x), *EPILOGUE).program

    assert program(2.0) == program(2.0) != program(3.0)


# Functions that compute 2 x, and by which change 3 x


class Scale:
    """An object with state."""

    more = 1.0

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor * self.more

    def method(self, x):
        return self(x)

    @property
    def twice(self):
        return 2 * self.factor


class Slotted:
    __slots__ = ("factor",)
    __init__, __call__ = Scale.__init__, lambda self, x: x * self.factor


class Base:
    factor = 2.0


class Derived(Base):
    pass


@dataclasses.dataclass(frozen=True)
class Leaky:
    slope: float  # a global has this name, too

    def __call__(self, x):
        return torch.where(x > 0, x, x * self.slope)


@dataclasses.dataclass
class Mutable:
    factor: float

    def __call__(self, x):
        return x * self.factor


def with_default(x, factor=2.0):
    return x * factor


def with_keyword(x, *, factor=2.0):
    return x * factor


def with_attribute(x):
    return x * with_attribute.factor


def of_derived(derived):
    return lambda x: x * derived.factor


def settings(factor):
    module = types.ModuleType("settings")
    module.factor = factor
    return module


def cell(factor):
    """(something whose items are the factor, a function with the factor in its closure)"""

    class Cell:
        def __setitem__(self, key, value):
            nonlocal factor
            factor = value

    return Cell(), lambda x: x * factor


with_attribute.factor = 2.0
TABLE = {"factor": 2.0}
HERE = sys.modules[__name__]
# name -> (owner, attribute or key, its other value, function), made anew for each test
CHANGES = {
    "an object's": lambda: (s := Scale(2.0), "factor", 3.0, s),
    "by a method": lambda: (s := Scale(2.0), "factor", 3.0, s.method),
    "by a property": lambda: (s := Scale(1.0), "factor", 1.5, lambda x: x * s.twice),
    "a class's": lambda: (Scale, "more", 1.5, Scale(2.0)),
    "a base's": lambda: (Base, "factor", 3.0, of_derived(Derived())),
    "shadowed by a class's": lambda: (Derived, "factor", 3.0, of_derived(Derived())),
    "shadowed by an object's": lambda: (d := Derived(), "factor", 3.0, lambda x: x * d.factor),
    "a slot": lambda: (s := Slotted(2.0), "factor", 3.0, s),
    "a field": lambda: (m := Mutable(2.0), "factor", 3.0, m),
    "a function's": lambda: (with_attribute, "factor", 3.0, with_attribute),
    "defaults": lambda: (with_default, "__defaults__", (3.0,), with_default),
    "code, as tools that load a module anew do": lambda: (
        f := lambda x: x * 2.0, "__code__", (lambda x: x * 3.0).__code__, f
    ),
    "an activation's": lambda: (a := nn.LeakyReLU(-2.0), "negative_slope", -3.0, lambda x: a(-x)),
    "a module's": lambda: (m := settings(2.0), "factor", 3.0, lambda x: x * m.factor),
    "a global": lambda: (HERE, "by", 3.0, lambda x: x * by),
    "a callee's global": lambda: (HERE, "by", 3.0, lambda x, f=lambda x: x * by: f(x)),
    "a global by its name": lambda: (HERE, "by", 3.0, lambda x: x * globals()["by"]),
    "a global that is None": lambda: (HERE, "nothing", None, lambda x: x * 2 if nothing is not None else x * 3),
    "a builtin": lambda: (HERE, "abs", lambda x: x * -1.5, lambda x: abs(-x) * 2),
    "a list's": lambda: (c := [1.0, 2.0], 1, 3.0, lambda x: x * c[1]),
    "a nested list's": lambda: ((c := [[2.0]])[0], 0, 3.0, lambda x: x * c[0][0]),
    "a longer list": lambda: (c := [1.0, 1.0], slice(2, 2), [1.0], lambda x: x * sum(c)),
    "a dict's": lambda: (c := {"a": 2.0}, "a", 3.0, lambda x: x * c["a"]),
    "a dict's, by a method": lambda: (c := {"a": 2.0}, "a", 3.0, lambda x, get=c.get: x * get("a")),
    "a longer dict": lambda: (c := {"a": 2.0}, "b", 1.0, lambda x: x * sum(c.values())),
    "a layer": lambda: (c := nn.Sequential(nn.Identity(), nn.Threshold(5.0, 2.0)), 1, nn.Threshold(5.0, 3.0), c),
    "a keyword": lambda: ((f := functools.partial(torch.clamp, min=2.0)).keywords, "min", 3.0, f),
    "a keyword's default": lambda: (with_keyword.__kwdefaults__, "factor", 3.0, with_keyword),
    "a scalar tensor's": lambda: (c := torch.tensor(2.0), (), 3.0, lambda x: x * c),
    "of a tensor that is read while tracing": lambda: (c := torch.ones(2), 0, 2.0, lambda x: x * c.sum()),
    "a cell's": lambda: ((c := cell(2.0))[0], 0, 3.0, c[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes(name, monkeypatch):
    """Whatever was kept of the state before."""
    monkeypatch.setattr(HERE, "nothing", Base())
    owner, where, changed, function = CHANGES[name]()
    assert value(function) == value(function) == 2.0
    if hasattr(owner, "__setitem__"):
        owner[where] = changed
    else:
        monkeypatch.setattr(owner, where, changed, raising=False)
    assert value(function) == value(function) == 3.0


def test_names_that_are_globals_too(traces):
    assert value(Leaky(0.5), -1.0) == -0.5
    assert value(lambda x: F.relu(x) + torch.relu(x), 1.0) == 2.0
    assert value(lambda x: x * Scale(3.0).factor) == 3.0


@pytest.mark.parametrize(
    "function",
    [
        torch.relu, torch.Tensor.relu, nnf.silu, lambda x: nnf.silu(x), lambda x: silu(x), lambda x: F.gelu_tanh(x),
        lambda x: x * by + other, lambda x: aten.relu(x),
    ],
)  # fmt: skip
def test_functions_are_traced_once(function, traces):
    memo.traced(function, *EPILOGUE)
    memo.traced(function, *EPILOGUE)
    assert len(traces) == 1


def test_masks_of_the_project_are_traced_once(traces):
    ids = torch.arange(4)
    mask = mask_mods.And(mask_mods.Or(mask_mods.Band(5, 3), lambda b, h, q, kv: ids[q] > kv), mask_mods.Dilated(2))
    assert memo.traced(mask, *MASK) is memo.traced(mask, *MASK) and len(traces) == 1


@pytest.mark.parametrize(
    "function",
    [
        nn.GELU(), nn.Sequential(nn.ReLU(), nn.Tanh()), Leaky(0.1), Scale(2.0), Scale(2.0).method, TABLE.get,
        functools.partial(torch.clamp, min=0.0), lambda x: x * TABLE["factor"], lambda x: x * Base.factor,
        lambda x, get=TABLE.get: x * get("factor"),
    ],
)  # fmt: skip
def test_functions_that_read_other_things_are_traced_in_each_call(function, traces):
    for _ in range(3):
        with contextlib.suppress(TraceError):
            memo.traced(function, *EPILOGUE)
    assert len(traces) == 3


def test_masks_are_kept(traces):
    def make(table):
        inner = or_masks(lambda b, h, q, kv: q - kv < table[h], lambda b, h, q, kv: kv < 3)
        return and_masks(lambda b, h, q, kv: q >= kv, inner)

    table = torch.arange(4)
    mask = make(table)
    first = memo.traced(mask, *MASK)
    assert memo.traced(mask, *MASK) is first
    again = memo.traced(make(table), *MASK)
    assert again.program is first.program and again.tensors == (table,) and len(traces) == 1
    table.fill_(7)
    assert memo.traced(mask, *MASK) is first, "kernels read what is in it"
    other = memo.traced(make(table.clone()), *MASK)
    assert other.program == first.program and other.tensors[0] is not table and len(traces) == 2


def test_what_is_computed_of_a_tensor_is_computed_again(traces):
    table = torch.arange(4)
    mask = lambda b, h, q, kv: (table + 1)[q] > kv  # noqa: E731
    assert memo.traced(mask, *MASK).tensors[0].tolist() == [1, 2, 3, 4]
    table[0] = 9
    assert memo.traced(mask, *MASK).tensors[0].tolist() == [10, 2, 3, 4]
    assert memo.traced(mask, *MASK) and len(traces) == 2


# What is kept alive


class Masks:
    """An object that leads to a mask which leads to it."""

    def __init__(self, table):
        self.table = table
        self.mask_mod = lambda b, h, q, kv: self.table[q] > kv


@pytest.mark.parametrize(
    ("arguments", "make"),
    [
        (MASK, lambda table: lambda b, h, q, kv: table[q] > kv),
        (MASK, lambda table: lambda b, h, q, kv: (table + 1)[q] > kv),
        (MASK, lambda table: lambda b, h, q, kv: table.sum() > kv),
        (MASK, lambda table: (lambda inner: lambda *at: ~inner(*at))(lambda b, h, q, kv: table[q] > kv)),
        (MASK, lambda table: Masks(table).mask_mod),
        (MASK, lambda table: lambda b, h, q, kv, table=table: table[q] > kv),
        (EPILOGUE, scaling),
    ],
    ids=["captured", "computed", "read", "nested", "cycle", "default", "epilogue"],
)
def test_nothing_is_kept_alive(arguments, make):
    table = torch.arange(1000) if arguments is MASK else torch.tensor(2.0)
    function = make(table)
    memo.traced(function, *arguments)
    memo.traced(function, *arguments)
    alive = weakref.ref(table), weakref.ref(function)
    del table, function
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_new_function_at_an_old_one_s_address():
    """Ids are used again; what was kept of the old function is not."""
    for factor in range(50):
        assert value(scaling(float(factor))) == value(scaling(torch.tensor(float(factor)))) == factor


def test_a_captured_tensor_that_lies_elsewhere():
    """The very tensor, with other memory or another shape."""
    table = torch.arange(6)
    mask = lambda b, h, q, kv: table[q] == table[kv]  # noqa: E731
    first = memo.traced(mask, *MASK)
    assert memo.traced(mask, *MASK) is first
    table.data = torch.arange(3)
    second = memo.traced(mask, *MASK)
    assert second is not first and second.tensors[0].shape == (3,)
    table.data = torch.arange(3).int()
    assert memo.traced(mask, *MASK).program.tensors == (("int32", 1),)


def test_an_import_inside_of_a_function():
    """Attributes of the module may change with every call."""

    def scaled(x):
        import json

        return x * json.factor

    try:
        for json.factor in (2.0, 3.0):
            assert value(scaled) == json.factor
    finally:
        del json.factor


def of_file(path, name):
    """The module of a file, under any name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("name", [*LIBRARIES, "attention.terms", "torch.terms"])
def test_a_users_module_of_a_librarys_name(name, imported, tmp_path, monkeypatch):
    """Its globals, classes and functions may change; only files of the library itself are taken as they are."""
    path = tmp_path / f"{name}.py"
    path.write_text(
        "SCALE = 2.0\n\ndef scaled(x):\n    return x * SCALE\n\nclass Scale:\n    factor = 2.0\n"
        "    def __call__(self, x):\n        return x * self.factor\n"
    )
    module = of_file(path, name)
    if imported and name not in ("torch", "builtins", "numpy"):  # without those nothing else would run
        monkeypatch.setitem(sys.modules, name, module)

    def imports(x):
        return x * importlib.import_module(name).SCALE if imported else x * module.SCALE

    functions = [module.scaled, lambda x: x * module.SCALE, lambda x: module.scaled(x), module.Scale()]
    if imported and sys.modules.get(name) is module:
        functions.append(imports)
    for factor in (2.0, 5.0):
        module.SCALE = module.Scale.factor = factor
        assert [value(function) for function in functions] == [factor] * len(functions)


def test_an_import_of_a_users_module_of_a_librarys_name(tmp_path, monkeypatch):
    """Absolute, and relative: `from .attention import SCALE` reads the user's package."""
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def absolute(x):\n    from attention import SCALE\n    return x * SCALE\n\n"
        "def relative(x):\n    from .attention import SCALE\n    return x * SCALE\n"
    )
    for folder in (tmp_path, package):
        (folder / "attention.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "attention"}
    for name in theirs:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "attention", of_file(tmp_path / "attention.py", "attention"))
    for name in ("some_model", "some_model.attention"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    model = importlib.import_module("some_model")
    importlib.import_module("some_model.attention")
    for factor in (2.0, 5.0):
        sys.modules["attention"].SCALE = sys.modules["some_model.attention"].SCALE = factor
        assert value(model.absolute) == factor and value(model.relative) == factor


def test_libraries_are_taken_as_they_are():
    assert all(library_module(m) for m in (torch, nnf, torch.ops, torch.ops.aten, torch.special, math, operator, F))
    assert library_scope(silu.__globals__) and library_scope(vars(F))
    assert all(library_class(c) for c in (object, torch.Tensor, nn.Module, nn.SiLU, nn.Parameter, torch.nn.Linear))
    assert not library_class(Base) and not library_module(json) and not library_scope(globals())
