"""Functions of two elements, as users write them, with the dtypes that they take, and values to call them with."""

import math
import operator

import torch
import torch.nn.functional as nnf
from torch import nn

from cute_kernels import functions as F

HALVES, FLOATS, INTS = ("bfloat16", "float16"), ("float32", "bfloat16", "float16"), ("int32", "int64")
NUMBERS, ALL = (*FLOATS, *INTS), (*FLOATS, *INTS, "bool")
INF, NAN = math.inf, math.nan

_FLOAT = [NAN, INF, -INF, 0.0, -0.0, 0.1, 0.25, 0.49999997, 0.5, 1.0, 1.5, 2.5, 3.0, 6.0, 7.0, 20.5, 88.5, 300.0, 1e-40]
_FLOAT += [1e-30, 8388609.0, 1e10, 3.4e38]
_INT = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 100, 46341, 2**30]
_VALUES = {"int32": [*_INT, 2**31 - 1], "int64": [*_INT, 2**31, 2**32 + 5, 2**62, 2**63 - 1]}


def values(dtype: str) -> torch.Tensor:
    """Special values of a dtype, of both signs."""
    if dtype == "bool":
        return torch.tensor([False, True])
    kind = getattr(torch, dtype)
    positive = torch.tensor(_VALUES.get(dtype, _FLOAT), dtype=kind)
    more = [] if dtype in FLOATS else [torch.tensor([torch.iinfo(kind).min], dtype=kind)]
    return torch.cat([positive, -positive, *more])


def pairs(first: str, second: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Each value of one dtype with each of the other."""
    x, y = values(first), values(second)
    return x.repeat_interleave(len(y)), y.repeat(len(x))


def divisor(x, y):
    """y where torch, C and hardware agree that x can be divided by it."""
    return torch.where((y == 0) | (x == torch.iinfo(x.dtype).min), 3, y)


def tame(x):
    """x as a number that every integer dtype has."""
    return torch.nan_to_num(x).clamp(-3e4, 3e4) if x.is_floating_point() else x


def of(dtypes, functions: dict) -> dict:
    return {name: (function, dtypes) for name, function in functions.items()}


def named(dtypes, names: str, module=torch) -> dict:
    """Functions of x alone."""
    functions = {name: getattr(module, name) for name in names.split()}
    return of(dtypes, {name: lambda x, y, f=f: f(x) for name, f in functions.items()})


def symbols(dtypes, functions: dict) -> dict:
    return of(dtypes, {f"x {symbol} y": function for symbol, function in functions.items()})


# What evaluates to torch's bits: name -> (function, dtypes)
EXACT = {
    # arithmetic
    **symbols(ALL, {"+": operator.add, "*": operator.mul}),
    **symbols(NUMBERS, {"-": operator.sub, "/": operator.truediv}),
    **named(NUMBERS, "neg square round trunc"),
    **named(FLOATS, "reciprocal sqrt"),
    "3 - x": (lambda x, y: 3 - x, NUMBERS),
    "2.5 * x": (lambda x, y: 2.5 * x, ALL),
    "1 / x": (lambda x, y: 1 / x, NUMBERS),
    "x + 3 y": (lambda x, y: torch.add(x, y, alpha=3), INTS),
    "x - 3 y": (lambda x, y: torch.sub(x, y, alpha=3), INTS),
    "abs": (lambda x, y: x.abs() + abs(y), NUMBERS),
    "sign": (lambda x, y: torch.sign(x), ALL),
    "x ** 2": (lambda x, y: x**2, NUMBERS),
    "x ** 4": (lambda x, y: x**4, INTS),
    "x ** 0": (lambda x, y: x**0, NUMBERS),
    "2 ** x": (lambda x, y: 2 ** (x & 15), INTS),
    # quotients and remainders
    **of(INTS, {f"x // {by}": lambda x, y, by=by: x // by for by in (7, -7, 8, -8, 1)}),
    **of(INTS, {f"x % {by}": lambda x, y, by=by: x % by for by in (7, -7, 8, -8)}),
    "x // y": (lambda x, y: x // divisor(x, y), INTS),
    "x % y": (lambda x, y: x % divisor(x, y), INTS),
    "fmod(x, y)": (lambda x, y: torch.fmod(x, divisor(x, y)), INTS),
    "trunc(x / y)": (lambda x, y: torch.div(x, divisor(x, y), rounding_mode="trunc"), INTS),
    "x % 7 == 0": (lambda x, y: x % 7 == 0, INTS),
    "x % 8 != 0": (lambda x, y: 0 != x % 8, INTS),
    "x % y == 0": (lambda x, y: x % divisor(x, y) == 0, INTS),
    "fmod(x, 8)": (lambda x, y: torch.fmod(x, 8), INTS),
    "trunc(x / 8)": (lambda x, y: torch.div(x, 8, rounding_mode="trunc"), INTS),
    "float x // y": (lambda x, y: x // y, FLOATS),
    "float x % y": (lambda x, y: x % y, FLOATS),
    "float fmod": (lambda x, y: torch.fmod(x, y), FLOATS),
    "float x % 0.3": (lambda x, y: x % 0.3, FLOATS),
    "float trunc(x / y)": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), ("float32",)),
    # comparisons and choices
    **symbols(ALL, {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}),
    **symbols(ALL, {"==": operator.eq, "!=": operator.ne}),
    **of(ALL, {"maximum": torch.maximum, "minimum": torch.minimum}),
    "x < 0.5": (lambda x, y: x < 0.5, ALL),
    "1 <= x": (lambda x, y: 1 <= x, ALL),
    "max and min": (lambda x, y: torch.max(x, y) - torch.min(x, y), NUMBERS),
    "where": (lambda x, y: torch.where(x > y, x, y), ALL),
    "where of numbers": (lambda x, y: torch.where(x > y, 1, 0), ALL),
    "where of a number": (lambda x, y: torch.where(x > y, x, 0.5), ALL),
    "where of bools": (lambda x, y: torch.where(x > y, True, x == 1), ALL),
    "F.where": (lambda x, y: F.where(x > y, 1.0, 0.0) + F.where(x > 0, x, 0.0), ALL),
    "masked_fill": (lambda x, y: x.masked_fill(y > 0, 1), ALL),
    "clamp": (lambda x, y: x.clamp(-1, 2), NUMBERS),
    "clamp by one": (lambda x, y: x.clamp(min=-3) + y.clamp(max=3), NUMBERS),
    "clamp by tensors": (lambda x, y: torch.clamp(x, min=y), NUMBERS),
    "clip": (lambda x, y: torch.clip(x, 0.5, 1.5), NUMBERS),
    "hardtanh": (lambda x, y: nnf.hardtanh(x, -2.0, 2.0), FLOATS),
    "leaky_relu": (lambda x, y: nnf.leaky_relu(x, 0.2), FLOATS),
    "threshold": (lambda x, y: nnf.threshold(x, 1.0, -7.0), NUMBERS),
    "hardshrink": (lambda x, y: nnf.hardshrink(x), FLOATS),
    "F.maximum": (lambda x, y: F.maximum(x, 0.5) + F.minimum(0.5, y), FLOATS),
    "nan_to_num": (lambda x, y: torch.nan_to_num(x, 1.0, 2.0, -2.0), FLOATS),
    "is": (lambda x, y: x.isnan() | x.isinf() | y.isfinite(), ALL),
    # rounding and conversions
    "rounded": (lambda x, y: torch.where(y > 0, x.floor(), x.ceil()), NUMBERS),
    "float": (lambda x, y: x.float() + y.float(), ALL),
    "bfloat16": (lambda x, y: x.bfloat16(), ALL),
    "half": (lambda x, y: x.half(), ALL),
    "int": (lambda x, y: tame(x).int(), ALL),
    "long": (lambda x, y: tame(x).long() * 3, ALL),
    "bool": (lambda x, y: x.bool() ^ y.bool(), ALL),
    "to": (lambda x, y: x.to(torch.bfloat16).to(torch.float32).type_as(x), FLOATS),
    # bits and truth values
    **symbols((*INTS, "bool"), {"&": operator.and_, "|": operator.or_, "^": operator.xor}),
    **symbols(INTS, {"<<": operator.lshift, ">>": operator.rshift}),
    "~x": (lambda x, y: ~x, (*INTS, "bool")),
    "x << 3": (lambda x, y: x << 3, INTS),
    "x >> 3": (lambda x, y: x >> 3, INTS),
    "1 << x": (lambda x, y: (1 << x) | (5 & y), INTS),
    "logical": (lambda x, y: torch.logical_and(x, y) | torch.logical_xor(x, torch.logical_not(y)), ALL),
    "logical_or": (torch.logical_or, ALL),
    "abs of where": (lambda x, y: torch.where(x > y, x, y).abs().clamp(min=2), NUMBERS),
    "bool + bool": (lambda x, y: (x > 0) + (y > 0), ALL),
    "bool * int": (lambda x, y: (x > 0) * 3 - (y > 0).int(), ALL),
    "bool < bool": (lambda x, y: (x > 1) < (y > 1), ALL),
    "bool / bool": (lambda x, y: (x > 1) / (y > 1), ALL),
}

# Functions that are made of others, or that formulas stand for in kernels: within a few units in the last place
CLOSE = {
    **named(FLOATS, "frac rsqrt exp2 expm1 log log2 log10 log1p sin cos tan tanh sinh cosh asin acos atan erf erfc"),
    **named(FLOATS, "relu6 silu selu softplus hardswish hardsigmoid mish logsigmoid softsign tanhshrink", nnf),
    **named((*FLOATS, *INTS, "bool"), "exp"),
    **named(FLOATS, "sigmoid"),
    **named(("float32",), "softshrink", nnf),
    **of(("float32", "bfloat16"), {f"x ** {by}": lambda x, y, by=by: x**by for by in (0.5, -0.5)}),
    **of(FLOATS, {f"x ** {by}": lambda x, y, by=by: x**by for by in (3, -2, 1.5)}),
    "x - 0.5 y": (lambda x, y: torch.sub(x, y, alpha=0.5), FLOATS),
    "x ** y": (lambda x, y: x**y, ("float32",)),
    "2 ** float": (lambda x, y: 2**x, FLOATS),
    "3 ** float": (lambda x, y: 3.0**x, ("float32",)),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.25), ("float32",)),
    "lerp from the end": (lambda x, y: torch.lerp(x, y, 0.75), ("float32",)),
    "addcmul": (lambda x, y: torch.addcmul(x.abs(), x.abs(), y.abs().clamp(max=8), value=0.5), ("float32",)),
    "addcdiv": (lambda x, y: torch.addcdiv(x, x, y, value=0.5), ("float32",)),
    "atan2": (torch.atan2, FLOATS),
    "relu": (lambda x, y: torch.relu(x) + x.relu() + nnf.relu(x), FLOATS),
    "gelu": (lambda x, y: nnf.gelu(x), ("float32", "bfloat16")),
    "tanh gelu": (lambda x, y: nnf.gelu(x, approximate="tanh"), ("float32", "bfloat16")),
    "elu": (lambda x, y: nnf.elu(x, 0.7), FLOATS),
    "celu": (lambda x, y: nnf.celu(x, 0.7), FLOATS),
    "module": (nn.Sequential(nn.Hardtanh(), nn.Softplus()), FLOATS),
}


def of_pairs(function, x, y):
    """A case's result; modules take one argument."""
    return function(x) if isinstance(function, nn.Module) else function(x, y)


def cases(table) -> list[tuple[str, str]]:
    """(name, dtype) of each."""
    return [(name, dtype) for name, (_, dtypes) in table.items() for dtype in dtypes]


def units_apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Number of floating-point numbers between them; 0 of two NaNs, of two zeros, and of equal ones."""
    bits = {4: torch.int32, 2: torch.int16}[x.element_size()]

    def place(t):
        t = t.contiguous().view(bits).long()
        return torch.where(t < 0, torch.iinfo(bits).min - t, t)

    apart = (place(x) - place(y)).abs()
    apart = torch.where(x.isnan() != y.isnan(), 2**40, apart)
    return torch.where((x == y) | (x.isnan() & y.isnan()), 0, apart)


def differences(x, y, got, expected, units: int, tiny: float = 0.0) -> list[str]:
    """Elements whose result is further from the expected one than some units in the last place and than `tiny`."""
    assert got.dtype == expected.dtype, f"{got.dtype}, expected {expected.dtype}"
    got = got.expand(expected.shape)
    if not expected.is_floating_point():
        wrong = got != expected
    else:
        wrong = (units_apart(got, expected) > units) & ~((got - expected).abs() <= tiny)
        if units == 0:
            wrong |= (got == 0) & (expected == 0) & (got.signbit() != expected.signbit())
    return [f"{x[i]} {y[i]}: {got[i]}, expected {expected[i]}" for i in wrong.nonzero()[:5, 0].tolist()]
