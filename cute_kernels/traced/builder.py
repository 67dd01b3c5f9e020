"""Writes a Program: values and operations on them, with torch's type promotion made explicit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .evaluate import fold
from .program import BOUNDS, DTYPES, HALF, PLAIN, Argument, Load, Node, Program


class Value(NamedTuple):
    """A scalar of the program."""

    number: int
    dtype: str


class Element(NamedTuple):
    """A captured tensor of which the first dimensions are indexed, by values; a Value once all are."""

    slot: int
    indices: tuple[Value, ...]


def _fits(x, dtype: str) -> bool:
    """True if a Python number is representable in an integer dtype."""
    low, high = BOUNDS[dtype]
    return isinstance(x, Value) or low <= x <= high


def _empty(dtype: torch.dtype) -> torch.Tensor:
    """A tensor for torch.result_type, on the CPU whatever the default device is."""
    return torch.empty((1,), dtype=dtype, device="cpu")


class Builder:
    """Nodes so far. Equal nodes are one; numbers are constants of the dtype they are used in, and so is what torch
    computes of constants alone."""

    def __init__(self, inputs: Sequence[str]):
        self.inputs = [Value(i, dtype) for i, dtype in enumerate(inputs)]
        self.nodes: list[Node] = []
        self.tensors: list[tuple[str, int]] = []
        self.arguments: list[Argument] = []
        self._known: dict[tuple, Value] = {}

    def program(self, output: Value) -> Program:
        return Program.of([x.dtype for x in self.inputs], self.tensors, self.nodes, output.number, self.arguments)

    def node(self, op: str, dtype: str, *args) -> Value:
        if op not in (*PLAIN, "load"):
            constants = [self.nodes[i - len(self.inputs)] for i in args if i >= len(self.inputs)]
            if len(constants) == len(args) and all(node.op == "const" for node in constants):
                return self.const(fold(op, dtype, constants), dtype)
        key = op, dtype, *(repr(x) for x in args)  # 0.0 and -0.0 are two constants
        if key not in self._known:
            self._known[key] = Value(len(self.inputs) + len(self.nodes), dtype)
            self.nodes.append(Node(op, dtype, args))
        return self._known[key]

    def const(self, number, dtype: str) -> Value:
        """A Python number as torch converts it to a tensor's dtype."""
        if dtype in BOUNDS:
            low, high = BOUNDS[dtype]
            number = bool(number) if dtype == "bool" else int(number)
            if not low <= number <= high:
                raise OverflowError(f"{number} does not fit into {dtype}")
        else:
            number = torch.tensor(number, dtype=getattr(torch, dtype), device="cpu").item()  # rounded here, once
        return self.node("const", dtype, number)

    def number(self, value: Value) -> int | float | bool | None:
        """A constant's number; None of any other value."""
        node = self.nodes[value.number - len(self.inputs)] if value.number >= len(self.inputs) else None
        return node.args[0] if node is not None and node.op == "const" else None

    def cast(self, x, dtype: str) -> Value:
        """A value or a Python number as a value of a dtype."""
        if not isinstance(x, Value):
            return self.const(x, dtype)
        if x.dtype == dtype:
            return x
        if x.dtype in HALF and dtype != "float32":
            x = self.cast(x, "float32")
        if dtype == "bool":
            return self.node("ne", "bool", x.number, self.const(0, x.dtype).number)
        if dtype in HALF and x.dtype != "float32":
            x = self.cast(x, "float32")
        return self.node("cast", dtype, x.number)

    def operand(self, x, dtype: str) -> Value:
        """Operand of an operation of a dtype: BF16 and FP16 as float32. Numbers are not rounded to 16 bits."""
        if isinstance(x, Value) and self.number(x) is None:
            x = self.cast(x, dtype)
        return self.cast(x, "float32" if dtype in HALF else dtype)

    def op(self, op: str, dtype: str, *args) -> Value:
        """An operation whose operands and result have one dtype; 16-bit floats are rounded after it."""
        compute = "float32" if dtype in HALF else dtype
        return self.cast(self.node(op, compute, *(self.operand(x, dtype).number for x in args)), dtype)

    def compare(self, op: str, x, y) -> Value:
        """A bool; operands are converted to the dtype that torch compares them in."""
        dtype = self.common(x, y)
        if dtype == "int32" and not all(_fits(v, dtype) for v in (x, y)):
            dtype = "int64"
        compute = "float32" if dtype in HALF else dtype
        return self.node(op, "bool", *(self.cast(self.cast(v, dtype), compute).number for v in (x, y)))

    def common(self, *args) -> str:
        """The dtype that torch promotes values and numbers to."""
        like = [_empty(getattr(torch, x.dtype)) if isinstance(x, Value) else x for x in args]
        dtype = like[0].dtype if isinstance(like[0], torch.Tensor) else torch.result_type(like[0], like[0])
        for x in like[1:]:
            dtype = torch.result_type(_empty(dtype), x)
        return DTYPES[dtype]

    def where(self, condition, x, y, dtype: str) -> Value:
        compute = "float32" if dtype in HALF else dtype
        branches = (self.cast(self.cast(v, dtype), compute).number for v in (x, y))
        return self.cast(self.node("where", compute, self.cast(condition, "bool").number, *branches), dtype)

    def argument(self, kind: Argument, dtype: str) -> Value:
        """One more number that a kernel gets as an argument, as a value of a dtype."""
        self.arguments.append(kind)
        return self.cast(self.node("argument", kind.dtype, len(self.arguments) - 1), dtype)

    def append(self, program: Program, value_of: Callable = lambda number, node: None) -> Value:
        """The result of a program of the same inputs, whose tensors have the same slots here.

        value_of: (number, node) -> what stands for a node, None for the node itself.
        """
        values, before = list(self.inputs), len(self.arguments)
        self.arguments += program.arguments
        for number, node in enumerate(program.nodes):
            value = value_of(number, node)
            if value is not None:
                pass
            elif node.op == "const":
                value = self.const(node.args[0], node.dtype)
            elif node.op == "argument":
                value = self.node("argument", node.dtype, before + node.args[0])
            elif node.op == "load":
                load = Load(*node.args)
                value = self.load(load.slot, [values[i] for i in load.indices], load.direct)
            else:
                value = self.node(node.op, node.dtype, *(values[i].number for i in node.args))
            values.append(value)
        return values[program.output]

    def tensor(self, dtype: str, rank: int) -> int:
        """A slot for one more tensor that is read."""
        self.tensors.append((dtype, rank))
        return len(self.tensors) - 1

    def load(self, slot: int, indices: Sequence[Value], direct: tuple[bool, ...] | None = None) -> Value:
        """direct: Load's; None: every index that is an input."""
        if direct is None:
            direct = tuple(i.number < len(self.inputs) for i in indices)
        return self.node("load", self.tensors[slot][0], *Load(slot, tuple(i.number for i in indices), direct))
