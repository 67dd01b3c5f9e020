"""Program: a user's function as a list of typed operations on scalars, which torch and the compiler both run.

A Program is made by tracing the function (record.py). Each operation has the dtype of its result and takes earlier
values by their numbers; every conversion of torch's type promotion stands in it. So it means the same whatever runs it:
evaluate.py on torch tensors of any shape that broadcast, lower.py on the scalars of a kernel.

The text of a Program names all of it, and is the key of kernels that are compiled with it:

    (a:int32, b:int32) [int64 1] 2:int64 = load 0 a+; 3:bool = lt a b -> 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

HALF = ("bfloat16", "float16")  # computed in float32 and rounded after each operation, as torch does
FLOAT, INTEGER = ("float32", *HALF), ("int32", "int64")
DTYPES = {getattr(torch, name): name for name in (*FLOAT, *INTEGER, "bool")}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
BOUNDS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "bool": (0, 1)}
PLAIN = ("const", "argument")  # operations on no values
POSITION = (0, 2**30)  # what the inputs of a mask lie in: no two rows or columns are further apart


class Node(NamedTuple):
    """One operation. `args` are numbers of values; of a "const" the value; of an "argument" which of
    Program.arguments; of a "load" see Load."""

    op: str
    dtype: str
    args: tuple


class Argument(NamedTuple):
    """A number that a kernel gets as an argument; of an integer also the range that it is in."""

    dtype: str
    low: int | None = None
    high: int | None = None


class Load(NamedTuple):
    """args of a "load": element [value of each index] of a tensor. A direct index is an input, which the caller keeps
    inside the tensor; others count from the end where they are negative, and are kept inside it."""

    slot: int
    indices: tuple[int, ...]  # numbers of values
    direct: tuple[bool, ...]


@dataclass(frozen=True)
class Program:
    """Equal to another if what it computes is the same. Values are the inputs, then the nodes."""

    text: str
    inputs: tuple[str, ...] = field(compare=False)  # dtypes
    tensors: tuple[tuple[str, int], ...] = field(compare=False)  # dtype and rank of each tensor that is read
    nodes: tuple[Node, ...] = field(compare=False)
    output: int = field(compare=False)
    arguments: tuple[Argument, ...] = field(default=(), compare=False)  # numbers, given after the tensors

    @staticmethod
    def of(
        inputs: Sequence[str],
        tensors: Sequence[tuple[str, int]],
        nodes: Sequence[Node],
        output: int,
        arguments: Sequence[Argument] = (),
    ) -> Program:
        """The Program of what `output` depends on."""
        nodes, output = _needed(len(inputs), nodes, output)
        parts = [f"{i}:{node.dtype} = {_text(node)}" for i, node in enumerate(nodes, len(inputs))]
        tables = ", ".join(f"{dtype} {rank}" for dtype, rank in tensors)
        if arguments:
            tables += "; " + ", ".join(a.dtype if a.low is None else f"{a.dtype} {a.low}..{a.high}" for a in arguments)
        text = f"({', '.join(inputs)}) [{tables}] {'; '.join(parts)} -> {output}"
        return Program(text, tuple(inputs), tuple(tensors), nodes, output, tuple(arguments))

    def __repr__(self) -> str:
        return self.text

    @property
    def dtype(self) -> str:
        """Dtype of the result."""
        first = len(self.inputs)
        return self.inputs[self.output] if self.output < first else self.nodes[self.output - first].dtype

    @property
    def direct(self) -> tuple[tuple[int, int, int], ...]:
        """(tensor, its dimension, input) wherever an input is an index by itself."""
        found = set()
        for node in self.nodes:
            if node.op == "load":
                load = Load(*node.args)
                pairs = enumerate(zip(load.indices, load.direct, strict=True))
                found |= {(load.slot, dim, value) for dim, (value, direct) in pairs if direct}
        return tuple(sorted(found))

    @property
    def loads(self) -> tuple[tuple[int, Load], ...]:
        """(number of the value, load) of each element that is read."""
        numbered = enumerate(self.nodes, len(self.inputs))
        return tuple((number, Load(*node.args)) for number, node in numbered if node.op == "load")

    def of_value(self, number: int) -> Program:
        """The Program of an earlier value of this one."""
        return Program.of(self.inputs, self.tensors, self.nodes, number, self.arguments)


def operands(node: Node) -> tuple[int, ...]:
    """The numbers of the values that a node takes."""
    if node.op in PLAIN:
        return ()
    return node.args[1] if node.op == "load" else node.args


def _text(node: Node) -> str:
    if node.op == "load":
        load = Load(*node.args)
        indices = (f"{i}{'' if direct else '+'}" for i, direct in zip(load.indices, load.direct, strict=True))
        return f"load {load.slot} {' '.join(indices)}"
    return " ".join([node.op, *(repr(x) for x in node.args)])


def _needed(first: int, nodes: Sequence[Node], output: int) -> tuple[tuple[Node, ...], int]:
    """The nodes that the output depends on, and its number among them."""
    wanted = {output}
    for number in range(first + len(nodes) - 1, first - 1, -1):
        if number in wanted:
            wanted.update(operands(nodes[number - first]))
    new = {i: i for i in range(first)}
    kept: list[Node] = []
    for number, node in enumerate(nodes, first):
        if number not in wanted:
            continue
        new[number] = first + len(kept)
        if node.op == "load":
            load = Load(*node.args)
            node = node._replace(args=tuple(load._replace(indices=tuple(new[i] for i in load.indices))))
        elif node.op not in PLAIN:
            node = node._replace(args=tuple(new[i] for i in node.args))
        kept.append(node)
    return tuple(kept), new[output]
