"""Programs in kernels: the same as torch, on special values, whatever the signs.

Integers, bool values and IEEE arithmetic are compiled for this CPU, too, and run (traced_kernel.py). All operations are
compiled for GPUs, and run where there is one.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import build_object, cubin_of, load_bytes
from cute_kernels.traced.evaluate import evaluate

from . import traced_trees
from .traced_cases import ALL, CLOSE, EXACT, FLOATS, HALVES, INTS, differences, of_pairs, pairs
from .traced_kernel import arguments, compiled, on_host, programs_of, results
from .traced_trees import COUNT, DTYPES, compute, leaves

# Of floats on this CPU: the others are instructions of GPUs, or libdevice's functions, or flush denormals
IEEE = {"const", "load", "cast", "add", "sub", "mul", "div", "neg", "abs", "where", "floor", "ceil", "trunc"}
# Units in the last place that functions may err in a kernel, and what formulas of activations.py may err beside
UNITS = {"float32": 8, "bfloat16": 2, "float16": 2}
FORMULAS = {"sigmoid": (64, 1e-30), "silu": (64, 1e-30), "gelu": (2, 2e-6), "tanh gelu": (64, 2e-6)}
TINY = {"float32": 1.2e-38, "bfloat16": 1.2e-38, "float16": 6.2e-5}  # below are denormals
FEW_LISTS = {"deadline": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}
INTEGER_TREES = st.lists(traced_trees.trees(("int", "bool")), min_size=4, max_size=8)


def on_gpu(traces, count: int) -> list:
    major, minor = torch.cuda.get_device_capability()
    views, outs = arguments(traces, count)
    build = functools.partial(compiled, traces, f"sm_{major}{minor}{'a' if major == 9 else ''}")
    load_bytes(build_object(build, "elementwise")[0], "elementwise")(views, outs)
    return results(traces, outs)


def programs(dtype: str, *tables, device="cpu") -> dict:
    """Cases, by name, as traces of functions of a position in their pairs of values."""
    x, y = (t.to(device) for t in pairs(dtype, dtype))

    def at(function):
        return lambda i: of_pairs(function, x[i], y[i])

    functions = {name: at(f) for table in tables for name, (f, dtypes) in table.items() if dtype in dtypes}
    return dict(zip(functions, programs_of(functions.values(), device), strict=True))


def check(dtype: str, traces: dict, run, allowed) -> None:
    """The result of `run` errs by no more than `allowed(name)`: units in the last place, and a tiny number."""
    x, y = pairs(dtype, dtype)
    wrong = {}
    for (name, found), got in zip(traces.items(), run(list(traces.values()), len(x)), strict=True):
        positions = torch.arange(len(x), dtype=torch.int32, device=got.device)
        expected = evaluate(found.program, [positions], found.tensors).expand(len(x))
        if texts := differences(x, y, got.cpu(), expected.cpu(), *allowed(name)):
            wrong[name] = texts
    assert not wrong


def runs_on_host(found) -> bool:
    nodes = [node for node in found.program.nodes if node.dtype in FLOATS]
    return all(node.op in IEEE and node.dtype != "bfloat16" for node in nodes)


@pytest.mark.parametrize("dtype", [*INTS, "bool", "float32"])
def test_on_this_cpu(dtype):
    traces = {name: found for name, found in programs(dtype, EXACT).items() if runs_on_host(found)}
    assert len(traces) >= {"bool": 30, "float32": 40}.get(dtype, 70)
    check(dtype, traces, on_host, lambda name: (0,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_on_a_gpu(dtype):
    def allowed(name):
        if name not in CLOSE:
            return 1, TINY.get(dtype, 0.0)
        units, tiny = FORMULAS.get(name, (UNITS.get(dtype, UNITS["float32"]), TINY.get(dtype, 0.0)))
        return min(units, 2) if dtype in HALVES else units, tiny

    check(dtype, programs(dtype, EXACT, CLOSE, device="cuda"), on_gpu, allowed)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "arch"), [*zip(ALL, itertools.cycle(("sm_90a", "sm_80")))])
def test_every_operation_compiles(arch, dtype):
    """For one architecture or the other: of what is traced nothing depends on it."""
    built = compiled(list(programs(dtype, EXACT, CLOSE).values()), arch, keep_cubin=True)
    assert inspect.resources(cubin_of(built), arch).instructions > 300


def check_trees(trees, run, device="cpu") -> None:
    """Functions of a position i, of which i // 7 is one of the leaves, against torch."""
    position = torch.arange(COUNT, dtype=torch.int32, device=device)
    elements = {name: t.to(device) for name, t in leaves().items()} | {"int32": position // 7}

    def zero(i):
        return (i < 0).bool()  # what does not depend on a position has a shape of its own

    def function(i, tree):
        return compute(tree, *(i // 7 if name == "int32" else elements[name][i] for name in DTYPES)) | zero(i)

    traces = programs_of([functools.partial(function, tree=tree) for tree in trees], device)
    for tree, found, got in zip(trees, traces, run(traces, COUNT), strict=True):
        assert torch.equal(got, compute(tree, *elements.values()) | zero(position)), f"{tree}: {found.program}"


@given(INTEGER_TREES)
@settings(max_examples=15, **FEW_LISTS)
def test_any_integers_on_this_cpu(trees):
    check_trees(trees, on_host)


@pytest.mark.gpu
@given(INTEGER_TREES)
@settings(max_examples=10, **FEW_LISTS)
def test_any_integers_on_a_gpu(trees):
    check_trees(trees, on_gpu, "cuda")


# Indices

INDICES = {
    "a position": lambda t, i: t[3, i],
    "past the end": lambda t, i: t[i + 3, 2 * i],
    "before the beginning": lambda t, i: t[i - 9, i - 30],
    "64 bits": lambda t, i: t[i.long() * 2**40, 1 - i.long() * 2**40],
    "one by one": lambda t, i: t[-1][9] + t[0][i - 20],
    "of what was loaded": lambda t, i: t[t[0, i + 1] - 100, t[i % 7, 0] // 10],
    "a constant": lambda t, i: t[torch.full_like(i, 20), i],
    "a bool": lambda t, i: (t > 120)[i - 2, i],
}


class Clamped:
    """A tensor whose elements are read as kernels do: negative indices count from the end, and none leads outside."""

    def __init__(self, tensor, indices=()):
        self.tensor, self.indices = tensor, indices

    def __gt__(self, number):
        return Clamped(self.tensor > number)

    def __getitem__(self, more):
        indices = self.indices + (more if isinstance(more, tuple) else (more,))
        if len(indices) < self.tensor.dim():
            return Clamped(self.tensor, indices)
        indices = [torch.as_tensor(i).long() for i in indices]
        pairs = zip(indices, self.tensor.shape, strict=True)
        return self.tensor[tuple(torch.where(i < 0, i + n, i).clamp(0, n - 1) for i, n in pairs)]


@pytest.mark.parametrize("run", [on_host, pytest.param(on_gpu, marks=pytest.mark.gpu)])
def test_indices(run):
    device = "cpu" if run is on_host else "cuda"
    table, count = torch.arange(100, 170, device=device).view(7, 10), 10
    traces = programs_of((functools.partial(function, table) for function in INDICES.values()), device)
    positions = torch.arange(count, dtype=torch.int32, device=device)
    for (name, function), got in zip(INDICES.items(), run(traces, count), strict=True):
        assert torch.equal(got, function(Clamped(table), positions)), name
