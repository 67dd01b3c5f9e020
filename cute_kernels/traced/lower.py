"""A Program in a kernel: on scalars of the compiler, operation by operation, with torch's semantics.

Integers wrap; floor division and remainder take the divisor's sign, as torch's and Python's do and C's do not; NaN
compares false, differs from everything and wins a maximum; rounding is to even. Functions of floats are libdevice's but
for sigmoid, silu, gelu and its slopes, whose errors activations.py states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cutlass_dsl import select_

from . import activations
from .indices import Clamped, InTile, Place, Shared
from .program import BOUNDS, FLOAT, INTEGER, POSITION, Load, Program, operands

TYPES = {
    "float32": Float32, "bfloat16": cutlass.BFloat16, "float16": cutlass.Float16,
    "int32": Int32, "int64": Int64, "bool": Boolean,
}  # fmt: skip
UNSIGNED = {"int32": Uint32, "int64": Uint64}
QUOTIENTS, REMAINDERS = ("floordiv", "truncdiv"), ("remainder", "fmod")


def lower(program: Program, inputs: Sequence, tensors: Sequence = (), shared: Shared | None = None):
    """The result for these scalars, of the program's dtypes. Nothing outside of `tensors` is read, as long as direct
    indices lie inside them. After the tensors come the program's arguments, scalars.

    Args:
        inputs: scalars of the compiler, of which an int32 may be a Place, an InTile or Clamped.
        shared: what the first of some calls computes, and loads, for all of them.
    """
    return values_of(program, inputs, tensors, shared)[program.output]


def values_of(program: Program, inputs: Sequence, tensors: Sequence = (), shared: Shared | None = None) -> list:
    """All values, the inputs first, as scalars; what is not used costs nothing. For arguments see `lower`."""
    tiles = {number: x for number, x in enumerate(inputs) if isinstance(x, InTile)}
    places = {number: x for number, x in enumerate(inputs) if isinstance(x, Place)}
    places |= {number: tile.place for number, tile in tiles.items()}
    known = {number: x for number, x in enumerate(inputs) if isinstance(x, (InTile, Place, Clamped))}
    values = [known[number].index if number in known else x for number, x in enumerate(inputs)]
    memo = {} if shared is None else shared.values.setdefault(program, {})
    depends = {number: {number: x.offset} for number, x in known.items()}  # on which offsets; None: on more
    depends |= {} if shared is None else dict.fromkeys((n for n in shared.changing if n not in known), None)
    ranges = ranges_of(program)
    for number, node in enumerate(program.nodes, len(inputs)):
        divided = _divided(program, node, tiles)
        if isinstance(divided, InTile):
            tiles[number], places[number], depends[number] = divided, divided.place, {number: divided.offset}
        elif divided is not None:
            depends[number] = {}
        else:
            found = [depends.get(i, {}) for i in operands(node)]
            depends[number] = None if None in found else {i: n for each in found for i, n in each.items()}
        key = None if depends[number] is None else (number, *sorted(depends[number].items()))
        if key in memo:
            value, place = memo[key]
            values.append(value)
            places |= {} if place is None else {number: place}
            continue
        if divided is not None:
            value = divided.index if isinstance(divided, InTile) else divided
        elif node.op == "const":
            value = TYPES[node.dtype](node.args[0])
        elif node.op == "argument":
            value = tensors[len(program.tensors) + node.args[0]]
        elif node.op == "load":
            value = _load(Load(*node.args), values, ranges, tensors, node.dtype)
        elif node.op == "cast" and node.dtype == "float32" and node.args[0] in places:
            value = places[node.args[0]].to_float()
        elif node.op == "cast":
            value = values[node.args[0]].to(TYPES[node.dtype])
        elif node.op in (*QUOTIENTS, *REMAINDERS) and node.dtype in INTEGER:
            value = _divide(node, values, ranges)
        else:
            value = OPERATIONS[node.op](*(values[i] for i in node.args))
        kind = TYPES[node.dtype]
        values.append(value if type(value) is kind else kind(value))  # a choice is of no type of the DSL
        if place := _place_of_node(program, node, ranges[number], values, places):
            places[number] = place
        if key is not None:
            memo[key] = values[number], places.get(number)
    return values


def _divided(program: Program, node, tiles: dict) -> InTile | Int32 | None:
    """The quotient or remainder of an InTile by a constant, if something is known of it."""
    if node.op not in (*QUOTIENTS, *REMAINDERS) or node.args[0] not in tiles or node.args[1] < len(program.inputs):
        return None
    divisor = program.nodes[node.args[1] - len(program.inputs)]
    if divisor.op != "const" or divisor.args[0] <= 0:
        return None
    tile = tiles[node.args[0]]
    return (tile.quotient if node.op in QUOTIENTS else tile.remainder)(divisor.args[0])


def _select(condition, x, y):
    """x or y, of their type: what the compiler's own gives has none."""
    return type(x)(select_(condition, x, y))


# ---------------------------------------------------------------------- integers


def _place_of_node(program: Program, node, span: tuple | None, values: list, places: dict) -> Place | None:
    """The Place that is a sum, a difference or an absolute value of Places and others, and cannot wrap."""
    if node.op == "abs" and node.args[0] in places:
        return replace(places[node.args[0]], absolute=True)
    if node.op not in ("add", "sub") or node.dtype != "int32" or span == BOUNDS["int32"]:
        return None
    if not any(i in places for i in node.args) or any(i in places and places[i].absolute for i in node.args):
        return None
    terms = []
    for i in node.args:
        at = i - len(program.inputs)
        if at >= 0 and program.nodes[at].op == "const":
            terms.append(Place(Int32(0), program.nodes[at].args[0]))
        else:
            terms.append(places.get(i) or Place(values[i], 0))
    x, y = terms
    join = OPERATIONS[node.op]
    return Place(join(x.base, y.base), join(x.offset, y.offset))


def ranges_of(program: Program) -> list[tuple[int, int] | None]:
    """(least, largest) of each integer value, None of others. The inputs are positions."""
    ranges = [POSITION if dtype in INTEGER else None for dtype in program.inputs]
    for node in program.nodes:
        if node.op == "argument" and node.dtype in INTEGER:
            ranges.append(program.arguments[node.args[0]][1:])
        else:
            ranges.append(_range(node, ranges) if node.dtype in INTEGER else None)
    return ranges


def _range(node, ranges) -> tuple[int, int]:
    low, high = whole = BOUNDS[node.dtype]
    if node.op == "const":
        low = high = node.args[0]
    elif node.op == "cast":
        low, high = ranges[node.args[0]] or whole
    elif node.op in ("add", "sub", "mul", "max", "min", "floordiv", "remainder", "shr"):
        (a, b), (c, d) = (ranges[i] for i in node.args)
        if node.op == "add":
            low, high = a + c, b + d
        elif node.op == "sub":
            low, high = a - d, b - c
        elif node.op == "mul":
            corners = a * c, a * d, b * c, b * d
            low, high = min(corners), max(corners)
        elif node.op == "max":
            low, high = max(a, c), max(b, d)
        elif node.op == "min":
            low, high = min(a, c), min(b, d)
        elif node.op == "floordiv" and c > 0:
            low, high = min(a // c, a // d), max(b // c, b // d)
        elif node.op == "remainder" and c > 0:
            low, high = 0, d - 1
        elif node.op == "shr" and c >= 0:
            low, high = min(a, 0), max(b, 0)
    return (low, high) if whole[0] <= low and high <= whole[1] else whole


def _divide(node, values, ranges):
    """Floor or truncated quotient or remainder."""
    x, y = (values[i] for i in node.args)
    (least, most), (divisor, largest) = (ranges[i] for i in node.args)
    kind, quotient = TYPES[node.dtype], node.op in ("floordiv", "truncdiv")
    positive = divisor > 0
    if least >= 0 and positive:  # all four agree, and unsigned ones are the shortest
        x, y = (UNSIGNED[node.dtype](v) for v in (x, y))
        return (x // y if quotient else x % y).to(kind)
    constant = positive and divisor == largest
    power = constant and divisor & (divisor - 1) == 0
    whole = -(least // divisor) * divisor if constant else 0  # a multiple that makes x positive, if added
    if constant and not power and node.op in ("floordiv", "remainder") and whole + most < 2 ** TYPES[node.dtype].width:
        x = UNSIGNED[node.dtype](x) + UNSIGNED[node.dtype](whole)
        y = UNSIGNED[node.dtype](divisor)
        return (x // y).to(kind) - kind(whole // divisor) if quotient else (x % y).to(kind)
    if node.op == "floordiv":
        return x >> kind(divisor.bit_length() - 1) if power else x // y
    if node.op == "remainder":
        if power:
            return x & kind(divisor - 1)
        rest = x % y  # of the sign of x
        wrong = rest < 0 if positive else (rest != 0) & ((rest ^ y) < 0)
        return _select(wrong, rest + y, rest)
    rest = x % y
    return rest if node.op == "fmod" else (x - rest) // y  # exact, so that rounding does not matter


def _load(load: Load, values, ranges, tensors, dtype: str):
    """An element; indices that are computed are kept inside the tensor."""
    at = place_of(load, values, ranges, tensors[load.slot])
    value = tensors[load.slot][at] if at else tensors[load.slot][0]
    return value != 0 if dtype == "bool" else value


def place_of(load: Load, values, ranges, tensor) -> tuple:
    """The coordinates of the element of `tensor` that a load reads, of a program's values and ranges_of it."""
    at = []
    for dim, (number, direct) in enumerate(zip(load.indices, load.direct, strict=True)):
        index = values[number]
        if not direct:
            extent = type(index)(tensor.shape[dim])
            if ranges[number][0] < 0:
                index = cutlass.max(_select(index < 0, index + extent, index), type(index)(0))
            index = cutlass.min(index, extent - 1)
        at.append(index)
    return tuple(at)


# ---------------------------------------------------------------------- operations


def _is_float(x) -> bool:
    return type(x) is Float32


def _abs(x):
    return cute.math.absf(x) if _is_float(x) else cute.math.absi(x)


def _max(x, y):
    return cute.arch.fmax(x, y, nan=True) if _is_float(x) else cutlass.max(x, y)


def _min(x, y):
    return cute.arch.fmin(x, y, nan=True) if _is_float(x) else cutlass.min(x, y)


def _remainder(x, y):
    """Float remainder with the divisor's sign."""
    rest = cute.math.rem(x, y)
    return _select((rest != 0.0) & ((rest < 0.0) ^ (y < 0.0)), rest + y, rest)


def _floor_divide(x, y):
    """Float floor division as in torch: (x - remainder) / y, rounded to the nearest integer."""
    rest = cute.math.rem(x, y)
    quotient = (x - rest) / y
    quotient = _select((rest != 0.0) & ((rest < 0.0) ^ (y < 0.0)), quotient - 1.0, quotient)
    whole = cute.math.floor(quotient)
    whole = _select(quotient - whole > 0.5, whole + 1.0, whole)
    whole = _select(quotient == 0.0, cute.math.copysign(Float32(0.0), x / y), whole)
    return _select(y == 0.0, x / y, whole)


def _shift_left(x, y):
    """As torch: 0 past the last bit, and by a negative number."""
    bits = type(x).width
    return _select((y >= 0) & (y < bits), x << (y & (bits - 1)), type(x)(0))


def _shift_right(x, y):
    """As torch: the sign past the last bit, and by a negative number."""
    bits = type(x).width
    return x >> _select((y >= 0) & (y < bits), y, type(y)(bits - 1))


def _math(name: str):
    return lambda *args: getattr(cute.math, name)(*args)


OPERATIONS = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y,
    "neg": lambda x: -x, "abs": _abs, "max": _max, "min": _min,
    "floordiv": _floor_divide, "remainder": _remainder, "fmod": lambda x, y: cute.math.rem(x, y),
    "rcp": lambda x: 1.0 / x, "round": _math("roundeven"),
    "sigmoid": activations.sigmoid, "silu": activations.silu, "gelu": activations.gelu,
    "gelu_tanh": activations.gelu_tanh,
    "gelu_slope": activations.gelu_slope, "gelu_tanh_slope": activations.gelu_tanh_slope,
    "isnan": lambda x: x != x,
    "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
    "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y, "not": lambda x: ~x,
    "shl": _shift_left, "shr": _shift_right,
    "where": _select,
}  # fmt: skip
OPERATIONS |= {
    name: _math(name)
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "sinh",
        "cosh", "asin", "acos", "atan", "atan2", "erf", "erfc", "floor", "ceil", "trunc", "pow",
    )
}  # fmt: skip
assert FLOAT
