"""Torch's ATen operations as operations of a Program, a rule each. Others are decomposed by torch, or refused.

A rule is called with the Builder, the dtype of the result, and the operation's arguments: tensors as Values, captured
ones that are not fully indexed as Elements, everything else as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .builder import Builder, Element, Value
from .program import FLOAT, INTEGER

aten, prims = torch.ops.aten, torch.ops.prims
RULES: dict[object, Callable] = {}


def rule(*overloads):
    """Register a rule for these operations."""

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(overloads, function))
        return function

    return register


def names() -> list[str]:
    """The operations that have a rule, by the names that torch's functions have."""
    return sorted({str(op).removeprefix("aten.").partition(".")[0].strip("_") for op in RULES})


# ---------------------------------------------------------------------- arithmetic


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(t: Builder, dtype: str, x, y, alpha=1):
    if dtype == "bool":
        return t.op("or", dtype, x, y)
    return _sum(t, "add", dtype, x, y, alpha)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(t: Builder, dtype: str, x, y, alpha=1):
    if any(isinstance(v, Value) and v.dtype == "bool" for v in (x, y)):
        raise TypeError("bool tensors are not subtracted; write ~ for not, or convert with .int()")
    return _sum(t, "sub", dtype, x, y, alpha)


def _sum(t: Builder, op: str, dtype: str, x, y, alpha):
    """x + alpha y or x - alpha y, rounded once."""
    if alpha == 1:
        return t.op(op, dtype, x, y)
    x, y = t.operand(x, dtype), t.operand(y, dtype)
    return t.cast(t.op(op, x.dtype, x, t.op("mul", x.dtype, y, alpha)), dtype)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(t: Builder, dtype: str, x, y, alpha=1):
    return _sub(t, dtype, y, x, alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(t: Builder, dtype: str, x, y):
    return t.op("and" if dtype == "bool" else "mul", dtype, x, y)


@rule(aten.div.Tensor, aten.div.Scalar)
def _div(t: Builder, dtype: str, x, y):
    return t.op("div", dtype, x, y)


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(t: Builder, dtype: str, x, y, rounding_mode=None):
    if rounding_mode is None:
        return _div(t, dtype, x, y)
    if rounding_mode == "floor":
        return t.op("floordiv", dtype, x, y)
    if dtype in INTEGER:
        return t.op("truncdiv", dtype, x, y)
    x, y = t.operand(x, dtype), t.operand(y, dtype)
    return t.cast(t.op("trunc", x.dtype, t.op("div", x.dtype, x, y)), dtype)


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(t: Builder, dtype: str, x, y):
    return t.op("floordiv", dtype, x, y)


@rule(aten.square.default)
def _square(t: Builder, dtype: str, x):
    return t.op("mul", dtype, x, x)


@rule(aten.reciprocal.default)
def _reciprocal(t: Builder, dtype: str, x):
    return t.op("rcp", dtype, x)


@rule(aten.abs.default)
def _abs(t: Builder, dtype: str, x):
    return t.op("abs", dtype, x)


@rule(aten.neg.default)
def _neg(t: Builder, dtype: str, x):
    return t.op("neg", dtype, x)


@rule(aten.sign.default)
def _sign(t: Builder, dtype: str, x):
    if dtype == "bool":
        return x
    negative = t.where(t.compare("lt", x, 0), -1, 0, dtype)
    return t.where(t.compare("gt", x, 0), 1, negative, dtype)


@rule(aten.pow.Tensor_Scalar)
def _pow(t: Builder, dtype: str, x, exponent):
    """Small whole exponents by products, halves by square roots, as torch does; rounded once."""
    if dtype in INTEGER:
        if exponent < 0:
            raise ValueError("integers to negative integer powers are not allowed")
        return _product(t, dtype, x, int(exponent))
    x = t.operand(x, dtype)
    wide = x.dtype
    if exponent in (0, 1, 2, 3):
        power = _product(t, wide, x, int(exponent))
    elif exponent == 0.5:
        power = t.op("sqrt", wide, x)
    elif exponent in (-0.5, -1, -2):
        power = t.op("rsqrt" if exponent == -0.5 else "rcp", wide, _product(t, wide, x, 2 if exponent == -2 else 1))
    else:
        power = t.op("pow", wide, x, exponent)
    return t.cast(power, dtype)


def _product(t: Builder, dtype: str, x, factors: int):
    if factors == 0:
        return t.cast(1, dtype)
    if factors == 1:
        return t.cast(x, dtype)
    half = _product(t, dtype, x, factors // 2)
    square = t.op("mul", dtype, half, half)
    return t.op("mul", dtype, square, x) if factors % 2 else square


@rule(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow_tensor(t: Builder, dtype: str, x, exponent):
    if dtype in INTEGER:
        if x == 2:
            return t.op("shl", dtype, 1, exponent)
        raise TypeError("an integer to a power that is no Python number; convert it to float first, or use 2 ** n")
    return t.op("exp2", dtype, exponent) if x == 2 else t.op("pow", dtype, x, exponent)


@rule(aten.lerp.Scalar)
def _lerp(t: Builder, dtype: str, x, y, weight):
    away = t.op("sub", dtype, y, x)
    if abs(weight) < 0.5:
        return t.op("add", dtype, x, t.op("mul", dtype, away, weight))
    return t.op("sub", dtype, y, t.op("mul", dtype, away, 1 - weight))


# ---------------------------------------------------------------------- functions of floats

for _name, _op in {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos", "tan": "tan", "tanh": "tanh", "sinh": "sinh",
    "cosh": "cosh", "asin": "asin", "acos": "acos", "atan": "atan", "erf": "erf", "erfc": "erfc",
    "sigmoid": "sigmoid", "silu": "silu",
}.items():  # fmt: skip
    RULES[getattr(aten, _name).default] = lambda t, dtype, x, op=_op: t.op(op, dtype, x)

for _name in ("floor", "ceil", "round", "trunc"):  # an integer is whole already
    RULES[getattr(aten, _name).default] = lambda t, dtype, x, op=_name: x if dtype in INTEGER else t.op(op, dtype, x)


@rule(aten.gelu.default)
def _gelu(t: Builder, dtype: str, x, approximate="none"):
    return t.op("gelu_tanh" if approximate == "tanh" else "gelu", dtype, x)


@rule(aten.atan2.default)
def _atan2(t: Builder, dtype: str, x, y):
    return t.op("atan2", dtype, x, y)


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def _remainder(t: Builder, dtype: str, x, y):
    return t.op("remainder", dtype, t.cast(x, dtype), t.cast(y, dtype))  # torch rounds numbers, too, first


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(t: Builder, dtype: str, x, y):
    return t.op("fmod", dtype, t.cast(x, dtype), t.cast(y, dtype))


# ---------------------------------------------------------------------- comparisons, choices, bounds

for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    for _overload in ("Tensor", "Scalar"):
        RULES[getattr(getattr(aten, _name), _overload)] = lambda t, dtype, x, y, op=_name: t.compare(op, x, y)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(t: Builder, dtype: str, condition, x, y):
    return t.where(condition, x, y, dtype)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(t: Builder, dtype: str, x, condition, value):
    return t.where(condition, value, x, dtype)


@rule(aten.maximum.default)
def _maximum(t: Builder, dtype: str, x, y):
    return t.op("or" if dtype == "bool" else "max", dtype, x, y)


@rule(aten.minimum.default)
def _minimum(t: Builder, dtype: str, x, y):
    return t.op("and" if dtype == "bool" else "min", dtype, x, y)


@rule(aten.clamp.default, aten.clamp.Tensor)
def _clamp(t: Builder, dtype: str, x, low=None, high=None):
    x = x if low is None else t.op("max", dtype, x, low)
    return x if high is None else t.op("min", dtype, x, high)


@rule(aten.hardtanh.default)
def _hardtanh(t: Builder, dtype: str, x, low=-1.0, high=1.0):
    return _clamp(t, dtype, x, low, high)


@rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(t: Builder, dtype: str, x, low):
    return _clamp(t, dtype, x, low)


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(t: Builder, dtype: str, x, high):
    return _clamp(t, dtype, x, None, high)


@rule(aten.relu.default)
def _relu(t: Builder, dtype: str, x):
    return _clamp(t, dtype, x, 0)


@rule(aten.leaky_relu.default)
def _leaky_relu(t: Builder, dtype: str, x, negative_slope=0.01):
    return t.where(t.compare("gt", x, 0), x, t.op("mul", dtype, x, negative_slope), dtype)


@rule(aten.threshold.default)
def _threshold(t: Builder, dtype: str, x, threshold, value):
    return t.where(t.compare("le", x, t.cast(threshold, dtype)), value, x, dtype)


@rule(aten.isnan.default)
def _isnan(t: Builder, dtype: str, x):
    return t.node("isnan", "bool", t.cast(x, "float32").number) if x.dtype in FLOAT else t.const(False, "bool")


@rule(aten.isinf.default)
def _isinf(t: Builder, dtype: str, x):
    return t.compare("eq", t.op("abs", x.dtype, x), math.inf) if x.dtype in FLOAT else t.const(False, "bool")


# ---------------------------------------------------------------------- bits and truth values

for _name, _op in {"and": "and", "or": "or", "xor": "xor"}.items():
    for _overload in ("Tensor", "Scalar", "Scalar_Tensor"):
        _aten = getattr(getattr(aten, f"bitwise_{_name}"), _overload)
        RULES[_aten] = lambda t, dtype, x, y, op=_op: t.op(op, dtype, x, y)
    _aten = getattr(aten, f"logical_{_name}").default
    RULES[_aten] = lambda t, dtype, x, y, op=_op: t.op(op, "bool", x, y)


@rule(aten.bitwise_not.default)
def _bitwise_not(t: Builder, dtype: str, x):
    return t.op("not", dtype, x)


@rule(aten.logical_not.default)
def _logical_not(t: Builder, dtype: str, x):
    return t.op("not", "bool", x)


@rule(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor)
@rule(aten.__lshift__.Tensor, aten.__lshift__.Scalar)
def _shift_left(t: Builder, dtype: str, x, y):
    return t.op("shl", dtype, x, y)


@rule(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor)
@rule(aten.__rshift__.Tensor, aten.__rshift__.Scalar)
def _shift_right(t: Builder, dtype: str, x, y):
    return t.op("shr", dtype, x, y)


# ---------------------------------------------------------------------- conversions, copies, elements


@rule(aten._to_copy.default, prims.convert_element_type.default)
def _to(t: Builder, dtype: str, x, *_, **__):
    return t.cast(x, dtype)


@rule(aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
@rule(aten.lift_fresh.default)
def _same(t: Builder, dtype: str, x, **_):
    return x


@rule(aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _same_shape(t: Builder, dtype: str, x, *_, **__):
    return x  # the recorder refuses a result of another shape


@rule(aten.full_like.default, aten.new_full.default)
def _full(t: Builder, dtype: str, x, *args, **_):
    return t.const(args[-1], dtype)


@rule(aten.zeros_like.default, aten.new_zeros.default)
def _zeros(t: Builder, dtype: str, x, *_, **__):
    return t.const(0, dtype)


@rule(aten.ones_like.default, aten.new_ones.default)
def _ones(t: Builder, dtype: str, x, *_, **__):
    return t.const(1, dtype)


CONSTANTS = [op for op, function in RULES.items() if function in (_full, _zeros, _ones)]


@rule(aten.index.Tensor)
def _index(t: Builder, dtype: str, x, indices):
    if not isinstance(x, Element):
        raise TypeError("only captured tensors can be indexed")
    if any(not isinstance(i, Value) for i in indices):
        raise TypeError("an index must be a number, or an integer tensor of no dimension")
    if any(i.dtype not in INTEGER for i in indices):
        raise TypeError(f"an index must be an integer, not {indices[0].dtype}; write torch.where(condition, x, y)")
    return _element(t, x, indices)


@rule(aten.select.int)
def _select(t: Builder, dtype: str, x, dim, index):
    if not isinstance(x, Element) or dim != 0:
        raise TypeError("only captured tensors can be indexed, dimension by dimension from the first on")
    return _element(t, x, [t.const(index, "int32")])


def _element(t: Builder, x: Element, more):
    indices = (*x.indices, *more)
    return Element(x.slot, indices) if len(indices) < t.tensors[x.slot][1] else t.load(x.slot, indices)
