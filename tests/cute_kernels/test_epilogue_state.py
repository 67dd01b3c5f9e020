"""Compiled calls with epilogue functions that read globals, objects and variables: a new value makes a new graph."""

import functools
import gc
import types
import weakref

import pytest
import torch
import torch._dynamo.testing

from cute_kernels import gemm, torch_op
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_linear

ON = pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "eager"),
        ("cpu", "aot_eager"),
        ("cpu", "inductor"),
        pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
    ],
)
FACTOR = 2.0
TABLE = {"factor": 2.0, "nested": [{"factor": 2.0}]}


class Config:
    factor = 2.0


class Holder:
    def __init__(self):
        self.factor = 2.0

    def __call__(self, z):
        return z * self.factor

    def method(self, z):
        return z * self.factor


class Scale(torch.nn.Module):
    factor = 2.0

    def forward(self, z):
        return z * self.factor


class Slots:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 2.0


HOLDER, CALLED, SCALE, SLOTS, LEAKY = Holder(), Holder(), Scale(), Slots(), torch.nn.LeakyReLU(2.0)
FILE = types.SimpleNamespace(factor=memoryview(b"2"))  # an object in C, of which nothing can be compared
MODULE = types.ModuleType("user_module")
MODULE.factor = 2.0


def helper():
    return FACTOR


def scaled(z, by):
    return z * by * FACTOR


def by_default(z, table={"factor": 2.0}):  # noqa: B006
    return z * table["factor"]


def by_attribute(z):
    return z * by_attribute.factor


by_attribute.factor = 2.0


def capturing(value):
    return lambda z: z * value["factor"]


def with_variable():
    """(a function, what writes to the variable that it captures)"""
    factor = 2.0

    def write(value):
        nonlocal factor
        factor = value

    return (lambda z: z * factor), write


def write_global(value):
    global FACTOR
    FACTOR = value


def write_item(table):
    return lambda value: table.__setitem__("factor", value)


def write_attribute(owner, name="factor"):
    return lambda value: setattr(owner, name, value)


BY_VARIABLE, WRITE_VARIABLE = with_variable()
# name -> (function, what gives it another factor)
OUTSIDE = {
    "global": (lambda z: z * FACTOR, write_global),
    "dict": (lambda z: z * TABLE["factor"], write_item(TABLE)),
    "nested": (lambda z: z * TABLE["nested"][0]["factor"], write_item(TABLE["nested"][0])),
    "class": (lambda z: z * Config.factor, write_attribute(Config)),
    "object": (lambda z: z * HOLDER.factor, write_attribute(HOLDER)),
    "slots": (lambda z: z * SLOTS.factor, write_attribute(SLOTS)),
    "module": (lambda z: z * MODULE.factor, write_attribute(MODULE)),
    "helper": (lambda z: z * helper(), write_global),
    "nn.Module": (lambda z: SCALE(z), write_attribute(SCALE)),
    "library": (lambda z: -LEAKY(-z.abs()) * torch.sign(z), write_attribute(LEAKY, "negative_slope")),
    "default": (by_default, write_item(by_default.__defaults__[0])),
    "attribute": (by_attribute, write_attribute(by_attribute)),
    "variable": (BY_VARIABLE, WRITE_VARIABLE),
    "captured": (capturing(TABLE), write_item(TABLE)),
    "partial": (functools.partial(scaled, by=1.0), write_global),
    "callable": (CALLED, write_attribute(CALLED)),
    "callable nn.Module": (SCALE, write_attribute(SCALE)),
    "method": (CALLED.method, write_attribute(CALLED)),
}


def inside(value):
    """Functions of (x, op) that make the epilogue function themselves; some capture `value`, which has a factor."""
    return {
        "made: global": lambda x, op: op(x, epilogue=lambda z: z * FACTOR),
        "made: helper": lambda x, op: op(x, epilogue=lambda z: z * helper()),
        "made: class": lambda x, op: op(x, epilogue=lambda z: z * Config.factor),
        "made: partial": lambda x, op: op(x, epilogue=functools.partial(scaled, by=1.0)),
        "made: method": lambda x, op: op(x, epilogue=CALLED.method),
        "made: captured": lambda x, op: op(x, epilogue=lambda z: z * value.factor),
        "made: captured function": (lambda f: lambda x, op: op(x, epilogue=lambda z: f(z) + 0.0))(BY_VARIABLE),
        "made: captured helper": (lambda f: lambda x, op: op(x, epilogue=lambda z: z * f()))(helper),
        "made: captured dict": (lambda d: lambda x, op: op(x, epilogue=lambda z: z * d["factor"]))(TABLE),
    }


WRITES = {
    "made: global": write_global,
    "made: helper": write_global,
    "made: class": write_attribute(Config),
    "made: partial": write_global,
    "made: method": write_attribute(CALLED),
    "made: captured function": WRITE_VARIABLE,
    "made: captured helper": write_global,
    "made: captured dict": write_item(TABLE),
}
CASES = {name: ((lambda x, op, f=f: op(x, epilogue=f)), write) for name, (f, write) in OUTSIDE.items()}
CASES |= {name: (inside(None)[name], write) for name, write in WRITES.items()}
CASES |= {
    f"made: captured {type(value).__name__}": (inside(value)["made: captured"], write_attribute(value))
    for value in (HOLDER, Config, MODULE, SCALE)
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(run, backend):
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(run, fullgraph=True, backend=graphs), graphs


def operators(device):
    w = normal(32, 32, device=device)
    W = BsrMatrix.from_dense(w, (16, 16))
    return {"gemm": lambda x, **terms: gemm(x, w, **terms), "bsr_linear": lambda x, **terms: bsr_linear(x, W, **terms)}


@ON
@pytest.mark.parametrize("name", CASES)
def test_new_values(name, device, backend):
    """Forward and backward, which has the value of the forward pass. The graph of an earlier value is used again."""
    run, write = CASES[name]
    op = operators(device)["bsr_linear" if name in ("global", "made: global") else "gemm"]
    step, graphs = counting(lambda x: run(x, op), backend)
    try:
        for factor in (2.0, 3.0, 2.0, 5.0, 3.0):
            write(factor)
            x = normal(16, 32, device=device).requires_grad_()
            y = step(x)
            write(100.0)
            (found,) = torch.autograd.grad(y.float().sum(), x)
            want = op(x, epilogue=lambda z, by=factor: z * by)
            assert torch.equal(y, want)
            assert torch.equal(found, torch.autograd.grad(want.float().sum(), x)[0])
    finally:
        write(2.0)
    assert graphs.frame_count <= 4


def numbers(op, form):
    """A function of (x, number) whose epilogue function captures the number itself."""

    def make(number):
        return lambda z: z * number

    return {
        "captured": lambda x, number: op(x, epilogue=lambda z: z * number),
        "by a function": lambda x, number: op(x, epilogue=make(number)),
        "default": lambda x, number: op(x, epilogue=lambda z, by=number: z * by),
        "list": lambda x, number: op(x, epilogue=(lambda pair: lambda z: z * pair[1])([1.0, number])),
        "partial": lambda x, number: op(x, epilogue=functools.partial(lambda z, by: z * by, by=number)),
    }[form]


@ON
@pytest.mark.parametrize("form", ["captured", "by a function", "default", "list", "partial"])
def test_numbers(form, device, backend):
    """The advice of errors: from its second value on, Dynamo makes an input of a float."""
    run, x = numbers(operators(device)["gemm"], form), normal(16, 32, device=device)
    step, _ = counting(run, backend)
    for number in (2.0, 3.0, 4.0, 2.0):
        assert torch.equal(step(x, number), run(x, number))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda z: z * FILE.factor, "reads a value whose changes cannot be seen; capture the number"),
        (lambda z: z * globals()["FACTOR"], "reads a value whose changes cannot be seen; capture the number"),
    ],
)
def test_values_that_cannot_be_compared(function, message):
    op, x = operators("cpu")["gemm"], normal(16, 32)
    with pytest.raises(Exception, match=f"torch.compile: the epilogue function {message}"):
        counting(lambda x: op(x, epilogue=function), "eager")[0](x)


def test_objects_without_a_value():
    op, x, scale = operators("cpu")["gemm"], normal(16, 32), torch.tensor(2.0)
    for run in (
        lambda x: op(x, epilogue=lambda z: z * scale),
        lambda x: op(x, epilogue=torch.nn.GELU()),
        lambda x: op(x, epilogue=(lambda holder: lambda z: z * holder.factor)(Holder())),
    ):
        with pytest.raises(Exception, match="is or captures a (Tensor|GELU|Holder).*capture the number itself"):
            counting(run, "eager")[0](x)


def test_writes_inside_the_graph():
    """Dynamo does them after the graph has run."""
    op, x, factor = operators("cpu")["gemm"], normal(16, 32), 2.0

    def by_factor(z):
        return z * factor

    def to_variable(x):
        nonlocal factor
        factor = 3.0
        return op(x, epilogue=by_factor)

    def to_global(x):
        global FACTOR
        FACTOR = 3.0
        return op(x, epilogue=lambda z: z * FACTOR)

    def to_dict(x):
        TABLE["factor"] = 3.0
        return op(x, epilogue=lambda z: z * TABLE["factor"])

    def to_object(x):
        HOLDER.factor = 3.0
        return op(x, epilogue=HOLDER.method)

    for run in (to_variable, to_global, to_dict, to_object):
        with pytest.raises(Exception, match="write it outside of the compiled function"):
            counting(run, "eager")[0](x)


def test_one_guard_for_a_graph():
    """None for functions that read nothing but their argument, torch, and numbers that they capture."""
    op, x, by = operators("cpu")["gemm"], normal(16, 32), 2.0
    states = []

    def look(name, owner, attribute):
        states.append(name)
        guard(name, owner, attribute)

    guard, torch_op.guard_attribute = torch_op.guard_attribute, look
    try:
        for function in (torch.tanh, lambda z: torch.tanh(z) * 2.0, lambda z, by=2.0: z * by, lambda z: z * by):
            counting(lambda x, f=function: op(x, epilogue=f), "eager")[0](x)
        counting(lambda x: op(x, epilogue=lambda z: torch.tanh(z) * by), "eager")[0](x)
        assert not states
        counting(lambda x: op(op(x, epilogue=OUTSIDE["dict"][0]), epilogue=OUTSIDE["dict"][0]), "eager")[0](x)
        assert len(states) == 2 and len(set(states)) == 1
    finally:
        torch_op.guard_attribute = guard


class Layer(torch.nn.Module):
    def __init__(self, w, factor):
        super().__init__()
        self.w, self.factor = w, factor

    def forward(self, x):
        return gemm(x, self.w, epilogue=lambda z: z * self.factor)


def test_graphs_keep_no_modules_alive():
    x, w, layers = normal(16, 32), normal(32, 32), []
    step, _ = counting(lambda layer, x: layer(x), "aot_eager")
    for factor in (2.0, 3.0):
        layer = Layer(w, factor)
        assert torch.equal(step(layer, x), layer(x))
        layers.append(weakref.ref(layer))
    del layer
    gc.collect()
    assert [ref() for ref in layers] == [None, None]
