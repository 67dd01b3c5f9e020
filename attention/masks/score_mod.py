"""A user's change of the scores: what it computes, the tensors that it reads, and its derivatives.

score_mod(score, b, h, q, kv) has FlexAttention's signature: it is given scale * q @ k.T as float32 and the positions as
int32, and returns the score that the softmax takes, before masks. Torch traces it into a Program (cute_kernels.traced).
A number that it captures is a constant of the kernels, or an argument where it changes; a tensor is an argument.

With m = score_mod(s, ..) and P = softmax(m), backward computes dm = P (dP - delta) as without a score_mod, and of it
ds = dm * dm/ds, and for each captured tensor the sum of dm * dm/dt over the places that read an element t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, overload

import torch
from torch import Tensor

from cute_kernels.traced.derivative import derivative
from cute_kernels.traced.evaluate import evaluate
from cute_kernels.traced.memo import MOST, traced
from cute_kernels.traced.program import HALF, Load, Node, Program, operands

from .element_mask import ElementMask, check_extents, views_of

INPUTS = ("float32", *("int32",) * 4)
SCORE_INPUT, B_INPUT, H_INPUT, Q_INPUT, KV_INPUT = range(5)  # numbers of values
WHAT = "score_mod"


class Read(NamedTuple):
    """An element of a captured tensor that the score depends on."""

    load: Load
    slope: Program  # d result / d element
    of_head: bool  # whether its place depends on b and h alone

    @property
    def needs_score(self) -> bool:
        return SCORE_INPUT in inputs_of(self.slope, self.slope.output)


@dataclass(frozen=True)
class ScoreMod(ElementMask):
    """The traced program of a score_mod; two are equal if their programs are."""

    @cached_property
    def slope(self) -> Program:
        """d result / d score."""
        return derivative(self.program)

    @property
    def adds(self) -> bool:
        """True if d result / d score is 1 everywhere."""
        return constant_of(self.slope) == 1.0

    def reads(self, slots: Sequence[int]) -> list[Read]:
        """The elements that are read of these tensors, where the result depends on them smoothly."""
        found = []
        for number, load in self.program.loads:
            if load.slot not in slots:
                continue
            slope = derivative(self.program, number)
            if constant_of(slope) == 0.0:
                continue
            depends = set().union(*(inputs_of(self.program, i) for i in load.indices))
            found.append(Read(load, slope, depends <= {B_INPUT, H_INPUT}))
        return found

    def check_derivatives(self) -> None:
        """TypeError where an operation has no derivative."""
        try:
            self.slope, self.reads(range(len(self.program.tensors)))  # noqa: B018 (raises)
        except TypeError as error:
            raise TypeError(f"score_mod: {error}; call it under torch.no_grad()") from None

    @cached_property
    def takes_positions(self) -> bool:
        """True if the result depends on the row or the column."""
        return not inputs_of(self.program, self.program.output).isdisjoint((Q_INPUT, KV_INPUT))

    @cached_property
    def kept_inside(self) -> ScoreMod:
        """The same where the host does not know how far rows and columns go: an index past a tensor's end becomes the
        last one. Those of b and h are known."""
        first, nodes = len(self.program.inputs), list(self.program.nodes)
        for number, load in self.program.loads:
            direct = tuple(d and i not in (Q_INPUT, KV_INPUT) for i, d in zip(load.indices, load.direct, strict=True))
            nodes[number - first] = nodes[number - first]._replace(args=tuple(load._replace(direct=direct)))
        program = self.program
        program = Program.of(program.inputs, program.tensors, nodes, program.output, program.arguments)
        return self if program == self.program else replace(self, program=program)


def inputs_of(program: Program, number: int) -> set[int]:
    """The inputs that a value depends on."""
    if number < len(program.inputs):
        return {number}
    part = program.of_value(number)
    return {i for node in part.nodes for i in operands(node) if i < len(program.inputs)}


def constant_of(program: Program) -> float | None:
    """The constant result of a Program, if it has one regardless of its inputs."""
    node = program.nodes[-1] if program.nodes else None
    return node.args[0] if node is not None and node.op == "const" else None


@dataclass(frozen=True)
class BoundScore:
    """A score_mod with the tensors that it captures, those of the user."""

    mod: ScoreMod
    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float, ...] = ()  # that it captures, and that are arguments of the kernels
    first_item: int = 0  # b of the first of the items that it is applied to
    first_column: int = 0  # kv of the first column
    row_offset: int = 0  # q of the first row

    @property
    def wants_gradients(self) -> bool:
        return any(t.requires_grad for t in self.tensors)

    @cached_property
    def reads(self) -> tuple | None:
        """The tensors as a kernel takes them, and then the numbers; None where there are none."""
        return (*views_of(self.tensors), *self.numbers) or None

    @property
    def operands(self) -> tuple:
        return *self.tensors, *self.numbers

    def check(self, batch: int, heads: int, lengths: tuple[int, int]) -> None:
        check_extents(self.mod, self.tensors, batch, heads, lengths, WHAT)

    @property
    def kept_inside(self) -> BoundScore:
        return replace(self, mod=self.mod.kept_inside)

    def of_item(self, b: int, first_column: int = 0) -> BoundScore:
        """For scores (1, H, rows, columns) of item b, whose columns are those from `first_column` on."""
        return replace(self, first_item=b, first_column=first_column)

    def apply(self, scores: Tensor, first_row: int = 0) -> Tensor:
        """Apply it to scores (B, H, rows, Sk) of the rows from `first_row` on."""
        return evaluate(self.mod.program, self._inputs(scores, first_row), self.operands).expand(scores.shape)

    def slopes(self, scores: Tensor, first_row: int) -> Tensor:
        """d result / d score of the same."""
        return evaluate(self.mod.slope, self._inputs(scores, first_row), self.operands)

    def add_gradients(self, sums: dict[int, Tensor], scores: Tensor, of_results: Tensor, first_row: int) -> None:
        """Add to `sums`, gradients of tensors by their slots, what the gradients of results (B, H, rows, Sk) give."""
        inputs = self._inputs(scores, first_row)
        for read in self.mod.reads(tuple(sums)):
            slope = evaluate(read.slope, inputs, self.operands)
            terms = torch.where(of_results == 0, 0.0, of_results * slope)
            places = [evaluate(self.mod.program.of_value(i), inputs, self.operands).long() for i in read.load.indices]
            to = sums[read.load.slot]
            if not places:
                to += terms.sum()
                continue
            shape = torch.broadcast_shapes(*(p.shape for p in places))
            shape = (1,) * (terms.dim() - len(shape)) + tuple(shape)
            places = [p.expand(shape) for p in places]
            to.index_put_(tuple(places), terms.sum_to_size(shape).to(to.dtype), accumulate=True)

    def _inputs(self, scores: Tensor, first_row: int) -> tuple[Tensor, ...]:
        batch, heads, rows, cols = scores.shape
        first_row += self.row_offset
        extents = (self.first_item, batch), (0, heads), (first_row, rows), (self.first_column, cols)
        each = (torch.arange(a, a + n, dtype=torch.int32, device=scores.device) for a, n in extents)
        return scores, *(t.view(-1, *(1,) * (3 - i)) for i, t in enumerate(each))

    def with_tensors(self, tensors: Sequence[Tensor]) -> BoundScore:
        return replace(self, tensors=tuple(tensors))


@overload
def bound(score_mod: None, device: torch.device) -> None: ...


@overload
def bound(score_mod: Callable | BoundScore, device: torch.device) -> BoundScore: ...


def bound(score_mod: Callable | BoundScore | None, device: torch.device) -> BoundScore | None:
    """Facts that kernels are compiled from, and the tensors that the function captures; None for None.

    Raises:
        TypeError: it does what a kernel cannot, which the message names with the line, or returns no number; or a
            tensor that it captures has a dtype without a kernel, or is on another device.
        RuntimeError: it computes something of a captured tensor that requires a gradient, which would be lost.
    """
    if score_mod is None or isinstance(score_mod, BoundScore):
        return score_mod
    if hasattr(score_mod, "bound_score"):  # score_mods.Bias
        return score_mod.bound_score(device)
    return bound_by_trace(score_mod, device)


def bound_by_trace(score_mod: Callable, device: torch.device) -> BoundScore:
    """bound of a function that is traced, or was before."""
    check_callable(score_mod)
    found = traced(score_mod, WHAT, INPUTS, (), device)
    if torch.is_grad_enabled() and any(t.requires_grad for t in found.used):
        raise RuntimeError(
            "score_mod computes something of a captured tensor as a whole, or reads it as a number, and that tensor "
            "requires a gradient, which would be lost; compute it outside of the function, and index the result by b, "
            "h, q and kv inside"
        )
    return BoundScore(mod_of(found.program, found.tensors), found.tensors, found.numbers)


def check_callable(score_mod) -> None:
    if not callable(score_mod):
        raise TypeError(
            f"score_mod must be a function of (score, b, h, q, kv), as FlexAttention's, got {type(score_mod).__name__}"
        )


def mod_of(program: Program, tensors: Sequence[Tensor]) -> ScoreMod:
    """The ScoreMod of a traced program and the tensors that it reads."""
    if program.dtype in ("bool", "int32", "int64"):
        raise TypeError(f"score_mod must return a floating-point score, got a tensor of torch.{program.dtype}")
    if program.dtype in HALF:
        nodes = *program.nodes, Node("cast", "float32", (program.output,))
        output = len(program.inputs) + len(program.nodes)
        program = Program.of(program.inputs, program.tensors, nodes, output, program.arguments)
    return _known(program, tuple(t.stride(-1) == 1 for t in views_of(tensors)))


@lru_cache(maxsize=MOST)
def _known(program: Program, contiguous: tuple[bool, ...]) -> ScoreMod:
    """Cache of ScoreMod objects, which hold their derivatives."""
    return ScoreMod(program, contiguous)
