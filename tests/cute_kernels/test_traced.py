"""Traced functions on the CPU: a Program evaluates to what torch computes when it calls the function itself."""

import functools
import math

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from torch import nn

from cute_kernels.traced.aten import RULES, aten
from cute_kernels.traced.evaluate import evaluate
from cute_kernels.traced.record import trace

from . import traced_trees
from .traced_cases import ALL, CLOSE, EXACT, FLOATS, INTS, cases, differences, of_pairs, pairs, values

CPU = torch.device("cpu")
SHAPE = (2, 3)


def program(function, *dtypes, shape=SHAPE):
    found = trace(function, "function", dtypes, shape, CPU)
    assert shape == () or not found.tensors
    return found.program


def check(function, first, second, units=0, tiny=0.0):
    x, y = pairs(first, second)
    expected = of_pairs(function, x, y)
    got = evaluate(program(lambda x, y: of_pairs(function, x, y), first, second), [x, y])
    assert not differences(x, y, got, expected, units, tiny)


@pytest.mark.parametrize("name, dtype", cases(EXACT))
def test_torch_s_bits(name, dtype):
    check(EXACT[name][0], dtype, dtype)


@pytest.mark.parametrize("name, dtype", cases(CLOSE))
def test_close_to_torch(name, dtype):
    """Torch's own 16-bit functions on the CPU round more than once here and there, and flush denormals to 0."""
    check(CLOSE[name][0], dtype, dtype, *((2, 2.0**-149) if dtype == "float32" else (2, 1e-29)))


MIXED = ("x + y", "x * y", "x < y", "x == y", "maximum", "where", "logical", "masked_fill")


@pytest.mark.parametrize("second", ALL)
@pytest.mark.parametrize("first", ALL)
def test_promotion(first, second):
    for name in MIXED:
        check(EXACT[name][0], first, second)
    if "bool" not in (first, second):
        check(lambda x, y: x / y, first, second, 1)


def test_every_rule_is_covered():
    """Each operation that has a rule is traced by some case."""
    called = set()

    class Noted(dict):
        def get(self, key, default=None):
            called.add(key)
            return super().get(key, default)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cute_kernels.traced.record.RULES", Noted(RULES))
        for function, dtypes in (*EXACT.values(), *CLOSE.values()):
            for dtype in dtypes:
                program(lambda x, y, f=function: of_pairs(f, x, y), dtype, dtype)
        for function in SHAPELESS:
            program(function, "float32")
        table = torch.arange(24).view(2, 3, 4)
        program(lambda q: table[1, q][q] > table[q][0][2], "int32", shape=())
    packets = {op.overloadpacket for op in RULES if op.namespace == "aten"}
    assert packets - {op.overloadpacket for op in called if op.namespace == "aten"} <= NOT_REACHED


# Made of the arguments' shape and device, or copies of them
SHAPELESS = [
    lambda x: torch.zeros_like(x) - torch.ones_like(x) * torch.full_like(x, 3.0),
    lambda x: x.new_zeros(()) + x.new_ones(()) * x + x.new_full((), 2.0),
    lambda x: x.clone().detach().view_as(x).expand_as(x).reshape_as(x).contiguous(),
    lambda x: x * torch.tensor(2.0, device=x.device) + torch.zeros((), device=x.device) + x.new_tensor(1.0),
    lambda x: torch.ldexp(x, torch.tensor(3)).clamp_min(-5.0).clamp_max(7.0),
    lambda x: torch.rsub(x, 2.0, alpha=3.0) + torch.floor_divide(x, 2.0) + torch.pow(2.0, x) + torch.pow(x, x),
    lambda x: x.isnan().logical_not() * x,
]
# Torch has others made of them, or calls others in their place
NOT_REACHED = {aten.alias, aten.lift_fresh, aten.lift_fresh_copy, aten._unsafe_view, aten.reshape, aten.detach}
NOT_REACHED |= {aten.rsub, aten.square, aten.__lshift__, aten.__rshift__, aten.bitwise_left_shift}
NOT_REACHED |= {aten.bitwise_right_shift}


@pytest.mark.parametrize("function", SHAPELESS)
def test_other_forms(function):
    x = values("float32")
    assert not differences(x, x, evaluate(program(function, "float32"), [x]), function(x), 1)


# 16-bit floats, numbers, captured scalars


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounded_after_each_operation(dtype):
    x = torch.randn(10000).to(getattr(torch, dtype))

    def function(x):
        return (x * x + x) / (x.abs() + 0.5) - torch.tanh(x) * x

    assert torch.equal(evaluate(program(function, dtype), [x]), function(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_captured_scalars(dtype, kind):
    """A tensor of no dimension is a number beside tensors of a dimension, and keeps their dtype."""
    x, scalar = values(dtype), torch.tensor(0.3).to(kind)

    def function(x):
        return torch.where(x > scalar, x * scalar, torch.maximum(x, scalar.to(x.dtype)))

    assert not differences(x, x, evaluate(program(function, dtype), [x]), function(x), 0)


def test_promotion_of_scalars_in_masks():
    """All are of no dimension there, so that each counts."""
    table = torch.arange(5) * 2**40
    found = trace(lambda q, kv: (q + table[kv]) // 3 - q / 2, "mask_mod", ("int32", "int32"), (), CPU)
    assert [node.dtype for node in found.program.nodes] == [
        "int64", "int64", "int64", "int64", "int64", "float32", "float32", "float32", "float32", "float32",
    ]  # fmt: skip
    q, kv = torch.arange(7, dtype=torch.int32)[:, None], torch.arange(5, dtype=torch.int32)
    assert torch.equal(evaluate(found.program, [q, kv], found.tensors), (q + table[kv.long()]) // 3 - q / 2)


def test_numbers_out_of_an_int32_s_range():
    x = values("int32")
    got = evaluate(program(lambda x: (x < 2**40) & (x != -(2**31) - 1), "int32"), [x])
    assert got.all()
    with pytest.raises(TypeError, match="torch.add: 1099511627776 does not fit into int32"):
        program(lambda x: x + 2**40, "int32")


def test_constants_are_folded_by_torch():
    found = program(lambda x: x + torch.full_like(x, -7) % 3 + torch.fmod(torch.full_like(x, -7), 3), "int32")
    assert str(found) == "(int32) [] 1:int32 = const 2; 2:int32 = add 0 1; 3:int32 = const -1; 4:int32 = add 2 3 -> 4"
    zero = program(lambda x: x * torch.zeros_like(x).neg(), "float32")
    assert math.copysign(1.0, zero.nodes[0].args[0]) == -1.0


def test_equal_programs():
    first, second = (program(lambda x, by=by: x * by + x * by, "float32") for by in (2.0, 2.0))
    assert first == second and hash(first) == hash(second)
    assert len(first.nodes) == 3, "x * by once"
    assert program(lambda x: x * 0.0, "float32") != program(lambda x: x * -0.0, "float32")
    assert program(lambda x: x, "float32") != program(lambda x: x, "bfloat16")
    assert not program(lambda x: (x.exp(), x)[1], "float32").nodes, "what nothing needs is left out"


def test_float64_in_the_place_of_float32():
    """References of epilogues compute in fp64."""
    x = torch.randn(100, dtype=torch.float64)
    found = program(lambda x: nnf.softplus(x) * x.exp() + 0.5, "float32")
    torch.testing.assert_close(evaluate(found, [x]), nnf.softplus(x) * x.exp() + 0.5, atol=1e-14, rtol=1e-14)


# Ways to write a function

relu = "a global of the name of a function"


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by

    def half(self, x):
        return self(x) * 0.5


def test_callables():
    x = values("float32")
    functions = [
        torch.relu, torch.Tensor.tanh, nnf.silu, functools.partial(torch.clamp, min=0.5), nn.GELU(), nn.Hardswish(),
        nn.Sequential(nn.Tanh(), nn.ReLU()), Scale(3.0), Scale(3.0).half, abs, lambda x: sum([x, x]),
        lambda x: nnf.relu(x), lambda x: torch.relu(x).clamp(max=1.0),
    ]  # fmt: skip
    for function in functions:
        assert not differences(x, x, evaluate(program(function, "float32"), [x]), function(x), 1)


def test_a_number_as_the_result():
    """For a mask, whose arguments have no dimension; of an epilogue it has another shape."""
    seen = trace(lambda b, h, q, kv: torch.tensor(True), "mask_mod", ("int32",) * 4, (), CPU).program
    assert str(seen) == "(int32, int32, int32, int32) [] 4:bool = const True -> 4"
    with pytest.raises(TypeError, match="must return one tensor, .* not a tensor of shape"):
        program(lambda x: torch.tensor(2.0), "float32")


# Captured tensors


def test_elements_of_captured_tensors():
    table, flags = torch.randn(3, 4, 5), torch.arange(5) % 2 == 0
    found = trace(
        lambda i, j: (table[i][1, j] > table[-1, i, j]) & flags[j] & (table[0][i][j - 1] < 1), "f", INTS, (), CPU
    )
    assert any(t is flags for t in found.tensors)
    i, j = torch.arange(3, dtype=torch.int32)[:, None], torch.arange(5)
    expected = (table[i, 1, j] > table[-1][i, j]) & flags[j] & (table[0, i, j - 1] < 1)
    assert torch.equal(evaluate(found.program, [i, j], found.tensors), expected)


def test_what_is_computed_of_captured_tensors_alone():
    lengths = torch.tensor([3, 4, 5])
    found = trace(lambda i: lengths.cumsum(0)[i] > torch.arange(3, device=i.device)[i], "f", ("int32",), (), CPU)
    assert [t.tolist() for t in found.tensors] == [[3, 7, 12], [0, 1, 2]]
    assert [t is lengths for t in found.read] == [True]
    with pytest.raises(IndexError):
        evaluate(found.program, [torch.arange(4, dtype=torch.int32)], found.tensors)


@given(traced_trees.trees())
@settings(deadline=None, max_examples=50)
def test_any_expression(tree):
    leaves = traced_trees.leaves()
    expected = traced_trees.compute(tree, *leaves.values())
    found = program(functools.partial(traced_trees.compute, tree), *traced_trees.DTYPES)
    if not isinstance(expected, torch.Tensor):
        return
    got = evaluate(found, list(leaves.values()))
    assert got.dtype == expected.dtype
    assert torch.equal(got.expand_as(expected).isnan(), expected.isnan())
    assert torch.equal(got.expand_as(expected).nan_to_num(7), expected.nan_to_num(7))
