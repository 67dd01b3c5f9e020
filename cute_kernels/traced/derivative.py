"""The derivative of a Program by its first input, or by what it loads: another Program, made by the rules of calculus.

Forward mode: each value has a tangent, None if it is zero. So a branch that is not taken adds nothing,
whatever it would have been there. Where an operation has no derivative, as torch has it: half to each of two equal
operands of a maximum or minimum, 0 for the sign of 0 and for roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .builder import Builder, Value
from .program import FLOAT, Load, Program

F = "float32"
RULES: dict[str, Callable] = {}  # (builder, operands, result) -> for each operand the factor of its tangent, or None


def derivative(program: Program, of: int = 0) -> Program:
    """d result / d value number `of`, which is the first input or a load; a Program of the same inputs and tensors.

    Raises:
        TypeError: an operation on the way has no rule.
    """
    t = Builder(program.inputs)
    t.tensors, t.arguments = list(program.tensors), list(program.arguments)
    values = list(t.inputs)
    tangents: list[Value | None] = [t.const(1.0, x.dtype) if x.number == of else None for x in values]
    for number, node in enumerate(program.nodes, len(values)):
        if node.op == "const":
            value, tangent = t.const(node.args[0], node.dtype), None
        elif node.op == "argument":
            value, tangent = t.node(node.op, node.dtype, *node.args), None
        elif node.op == "load":
            load = Load(*node.args)
            value = t.load(load.slot, [values[i] for i in load.indices], load.direct)
            tangent = t.const(1.0, node.dtype) if number == of else None
        else:
            operands = [values[i] for i in node.args]
            value = t.node(node.op, node.dtype, *(x.number for x in operands))
            tangent = _tangent(t, node, operands, [tangents[i] for i in node.args], value)
        values.append(value)
        tangents.append(tangent)
    found = tangents[program.output]
    return t.program(t.const(0.0, program.dtype) if found is None else found)


def followed_by(activation: str | None, program: Program | None) -> Program:
    """The Program of program(activation(x)) of one float32; either None for nothing."""
    t = Builder([F])
    x = t.inputs[0]
    if activation == "relu":
        x = t.where(t.compare("le", x, 0.0), 0.0, x, F)
    elif activation is not None:
        x = t.op(activation, F, x)
    if program is None:
        return t.program(x)
    values = [x]
    for node in program.nodes:
        args = node.args if node.op == "const" else tuple(values[i].number for i in node.args)
        values.append(t.node(node.op, node.dtype, *args))
    return t.program(values[program.output])


def _tangent(t: Builder, node, operands: Sequence[Value], tangents: Sequence, value: Value) -> Value | None:
    if all(tangent is None for tangent in tangents) or node.dtype not in FLOAT:
        return None
    if node.op == "cast":
        return t.cast(tangents[0], node.dtype)
    if node.op == "where":
        zero = t.const(0.0, node.dtype)
        x, y = (zero if tangent is None else tangent for tangent in tangents[1:])
        return t.where(operands[0], x, y, node.dtype)
    if node.op not in RULES:
        raise TypeError(f"{node.op} has no derivative here")
    total = None
    for factor, tangent in zip(RULES[node.op](t, operands, value), tangents, strict=True):
        if factor is None or tangent is None:
            continue
        term = factor if t.number(tangent) == 1.0 else tangent if factor == 1.0 else _mul(t, factor, tangent)
        term = t.operand(term, F)
        total = term if total is None else t.op("add", F, total, term)
    return total


def _rule(*names: str):
    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _mul(t: Builder, *factors) -> Value:
    product, *others = factors
    for factor in others:
        product = t.op("mul", F, product, factor)
    return product


def _add(t: Builder, x, y) -> Value:
    return t.op("add", F, x, y)


def _sub(t: Builder, x, y) -> Value:
    return t.op("sub", F, x, y)


def _div(t: Builder, x, y) -> Value:
    return t.op("div", F, x, y)


def _call(t: Builder, op: str, x) -> Value:
    return t.op(op, F, x)


# Of one operand: (builder, x, result) -> the derivative there.
_OF_ONE = {
    "neg": lambda t, x, y: -1.0,
    "abs": lambda t, x, y: t.where(t.compare("gt", x, 0.0), 1.0, t.where(t.compare("lt", x, 0.0), -1.0, 0.0, F), F),
    "rcp": lambda t, x, y: _mul(t, y, y, -1.0),
    "exp": lambda t, x, y: y,
    "exp2": lambda t, x, y: _mul(t, y, math.log(2)),
    "expm1": lambda t, x, y: _add(t, y, 1.0),
    "log": lambda t, x, y: _call(t, "rcp", x),
    "log2": lambda t, x, y: _call(t, "rcp", _mul(t, x, math.log(2))),
    "log10": lambda t, x, y: _call(t, "rcp", _mul(t, x, math.log(10))),
    "log1p": lambda t, x, y: _call(t, "rcp", _add(t, x, 1.0)),
    "sqrt": lambda t, x, y: _div(t, 0.5, y),
    "rsqrt": lambda t, x, y: _mul(t, y, y, y, -0.5),
    "sin": lambda t, x, y: _call(t, "cos", x),
    "cos": lambda t, x, y: _mul(t, _call(t, "sin", x), -1.0),
    "tan": lambda t, x, y: _add(t, _mul(t, y, y), 1.0),
    "tanh": lambda t, x, y: _sub(t, 1.0, _mul(t, y, y)),
    "sinh": lambda t, x, y: _call(t, "cosh", x),
    "cosh": lambda t, x, y: _call(t, "sinh", x),
    "asin": lambda t, x, y: _call(t, "rsqrt", _sub(t, 1.0, _mul(t, x, x))),
    "acos": lambda t, x, y: _mul(t, _call(t, "rsqrt", _sub(t, 1.0, _mul(t, x, x))), -1.0),
    "atan": lambda t, x, y: _call(t, "rcp", _add(t, _mul(t, x, x), 1.0)),
    "erf": lambda t, x, y: _mul(t, _call(t, "exp", _mul(t, x, x, -1.0)), 2 / math.sqrt(math.pi)),
    "erfc": lambda t, x, y: _mul(t, _call(t, "exp", _mul(t, x, x, -1.0)), -2 / math.sqrt(math.pi)),
    "sigmoid": lambda t, x, y: _mul(t, y, _sub(t, 1.0, y)),
    "gelu": lambda t, x, y: _call(t, "gelu_slope", x),
    "gelu_tanh": lambda t, x, y: _call(t, "gelu_tanh_slope", x),
    "floor": lambda t, x, y: None,
    "ceil": lambda t, x, y: None,
    "round": lambda t, x, y: None,
    "trunc": lambda t, x, y: None,
}
RULES |= {name: lambda t, operands, y, rule=rule: [rule(t, operands[0], y)] for name, rule in _OF_ONE.items()}


@_rule("silu")
def _silu(t: Builder, operands, y):
    """s + x s (1 - s), s the sigmoid: s + y (1 - s)."""
    s = _call(t, "sigmoid", operands[0])
    return [_add(t, s, _mul(t, y, _sub(t, 1.0, s)))]


@_rule("add")
def _of_add(t: Builder, operands, y):
    return [1.0, 1.0]


@_rule("sub")
def _of_sub(t: Builder, operands, y):
    return [1.0, -1.0]


@_rule("mul")
def _of_mul(t: Builder, operands, y):
    return [operands[1], operands[0]]


@_rule("div")
def _of_div(t: Builder, operands, y):
    inverse = _call(t, "rcp", operands[1])
    return [inverse, _mul(t, y, inverse, -1.0)]


@_rule("max", "min")
def _of_extreme(t: Builder, operands, y):
    x, other = operands
    half = t.where(t.compare("eq", x, other), 0.5, 0.0, F)
    # The result is one of the two; of equal ones it is both.
    first = t.where(t.compare("eq", x, y), _sub(t, 1.0, half), 0.0, F)
    return [first, _sub(t, 1.0, first)]


@_rule("remainder", "fmod")
def _of_remainder(t: Builder, operands, y):
    """x - q z with q whole: q is what the result leaves."""
    x, z = operands
    return [1.0, _div(t, _sub(t, y, x), z)]


@_rule("floordiv", "truncdiv")
def _of_whole(t: Builder, operands, y):
    return [None, None]


@_rule("atan2")
def _of_atan2(t: Builder, operands, y):
    a, b = operands
    square = _add(t, _mul(t, a, a), _mul(t, b, b))
    return [_div(t, b, square), _mul(t, _div(t, a, square), -1.0)]


@_rule("pow")
def _of_pow(t: Builder, operands, y):
    x, exponent = operands
    zero = t.compare("eq", exponent, 0.0)
    lower = t.op("pow", F, x, _sub(t, exponent, 1.0))
    by_x = t.where(zero, 0.0, _mul(t, exponent, lower), F)
    nothing = t.where(t.compare("eq", x, 0.0), t.compare("ge", exponent, 0.0), False, "bool")
    return [by_x, t.where(nothing, 0.0, _mul(t, y, _call(t, "log", x)), F)]
