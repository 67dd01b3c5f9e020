"""Python numbers that a function captures, as arguments of its kernel from the second value on.

A trace holds numbers as constants, whatever Python made of them: they follow torch's type promotion, and Python's
arithmetic and branches on them are done. So a function with other numbers is traced again, which takes a millisecond.
Where its Program differs from that of an earlier function of the same code in constants alone, those that differ become
arguments, and one kernel serves all further values: a new prefix length or temperature compiles nothing. Numbers that
were traced before get the Program of that time again, whose kernel exists: so a mask that lives long, its copies and
`warm_up` need the same kernels, whatever was traced between them.

Literals never differ, so they remain constants. So do divisors until their ninth value: a kernel divides by a constant
with a multiplication, and a model has few block sizes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection
from dataclasses import replace

from .builder import Builder, Value
from .program import BOUNDS, HALF, Argument, Node, Program
from .record import Traced

MOST = 4096  # shapes of programs that are remembered
VALUES_OF_A_DIVISOR = 8
NEAR = 2**29  # the sum or difference of a position and such a number fits into int32
DIVISIONS = ("remainder", "floordiv", "truncdiv", "fmod")
_SEEN: dict[tuple, list[set[str]]] = {}  # (code, Program without its constants) -> the values seen of each constant
_CHOSEN: dict[tuple, list[int]] = {}  # (key of _SEEN, values of the constants) -> the constants that became arguments


def with_arguments(function: Callable, found: Traced) -> Traced:
    """The trace with those constants as arguments that had other values in earlier traces of functions like this; or
    with those of the first trace of the same values, if it is remembered."""
    program = found.program
    first = len(program.inputs)
    places = [i for i, node in enumerate(program.nodes) if node.op == "const" and node.dtype != "bool"]
    if not places:
        return found
    nodes = [node._replace(args=()) if node.op == "const" else node for node in program.nodes]
    key = code_of(function), program.inputs, program.tensors, tuple(nodes), program.output
    divisors = {node.args[1] - first for node in program.nodes if node.op in DIVISIONS}
    now = key, tuple([repr(program.nodes[i].args[0]) for i in places])  # by repr, as 0.0 and -0.0 differ
    chosen = _CHOSEN.get(now)
    if chosen is None:
        if len(_CHOSEN) >= MOST:
            _CHOSEN.clear()
        chosen = _CHOSEN[now] = _choose(key, places, now[1], divisors)
    if not chosen:
        return found
    numbers = tuple(program.nodes[i].args[0] for i in chosen)
    return replace(found, program=as_arguments(program, chosen, divisors), numbers=numbers)


def _choose(key: tuple, places: list[int], constants: tuple[str, ...], divisors: set[int]) -> list[int]:
    """The places of constants that have had other values; notes these."""
    if len(_SEEN) >= MOST and key not in _SEEN:
        _SEEN.clear()
    seen, chosen = _SEEN.setdefault(key, [set() for _ in places]), []
    for i, constant, values in zip(places, constants, seen, strict=True):
        if len(values) <= VALUES_OF_A_DIVISOR:
            values.add(constant)
        if len(values) > (VALUES_OF_A_DIVISOR if i in divisors else 1):
            chosen.append(i)
    return chosen


def code_of(function: Callable):
    """The code of a function or the class of an object: the same for all that differ in what they capture."""
    if isinstance(function, functools.partial):
        return code_of(function.func)
    if isinstance(function, types.MethodType):
        return code_of(function.__func__)
    return getattr(function, "__code__", type(function))


def as_arguments(program: Program, chosen: list[int], divisors: Collection[int] = ()) -> Program:
    """The Program with these nodes, constants, as arguments; some of them are divisors."""
    t, wanted = Builder(program.inputs), set(chosen)
    t.tensors = list(program.tensors)

    def value_of(i: int, node: Node) -> Value | None:
        return t.argument(_kind(node, i in divisors), node.dtype) if i in wanted else None

    return t.program(t.append(program, value_of))


def _kind(node: Node, divisor: bool) -> Argument:
    """The argument for a constant. An integer gets one of a few ranges, so that few kernels are compiled."""
    if node.dtype not in BOUNDS:
        return Argument("float32" if node.dtype in HALF else node.dtype)
    ranges = ((1, NEAR),) if divisor else ((-NEAR, NEAR),)
    low, high = next((r for r in ranges if r[0] <= node.args[0] <= r[1]), BOUNDS[node.dtype])
    return Argument(node.dtype, low, high)
