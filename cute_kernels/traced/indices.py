"""Indices of a tile in a kernel, of which a part is known when it is compiled, and what they share.

Threads hold pairs of elements, 8 apart. Row or column first + low + offset of a tile has

    first     of the tile, the same for all its elements
    low       2 * (lane % 4): known when the kernel runs, the same for all elements of a thread
    offset    0, 1, 8, 9, 16, ..: known when the kernel is compiled

so that much of what a program computes of it is known as well: its quotient by 64 is first // 64 + offset // 64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..tile.ptx import integer_to_float
from .program import Program


@dataclass(frozen=True)
class Place:
    """An int32 value `base + offset`, or its absolute value, of which the offset is known when a kernel is compiled.

    Elements that lie side by side have the same base, and so one conversion to float32. What is left for each of them
    is a float32 addition of the offset, which rounds as the conversion does up to 2 ** 24.
    """

    base: Int32
    offset: int
    absolute: bool = False

    @property
    def index(self) -> Int32:
        return self.base + self.offset

    def to_float(self) -> Float32:
        value = integer_to_float(self.base)
        if self.offset:
            value = value + Float32(self.offset)
        return cute.math.absf(value) if self.absolute else value


@dataclass(frozen=True)
class InTile:
    """An int32 index `first + low + offset`, 0 or more, of a tile of `side` indices.

    first: a multiple of `side`. low: a multiple of `step`, less than `width`. offset: known when the kernel is
    compiled, less than `side`, and less than `step` above a multiple of `width`.
    """

    first: Int32
    side: int
    low: Int32
    offset: int
    width: int = 8
    step: int = 2

    @property
    def place(self) -> Place:
        return Place(self.first + self.low, self.offset)

    @property
    def index(self) -> Int32:
        return self.place.index

    def clamped(self, last: Int32) -> Clamped:
        """The smaller of the index and `last`, which is the same for all elements."""
        return Clamped(cutlass.min(self.index, last), self.offset)

    def quotient(self, divisor: int) -> InTile | Int32 | None:
        """index // divisor: an Int32 if it is the same in the whole tile; None if nothing is known of it."""
        if divisor == 1:
            return self
        first = _divide(self.first, divisor)
        if divisor % self.side == 0:
            return first
        if self.side % divisor:
            return None
        side = self.side // divisor
        if divisor % self.width == 0:
            return InTile(first, side, Int32(0), self.offset // divisor, 1, 1)
        if self.width % divisor == 0 and divisor % self.step == 0:
            width = self.width // divisor
            return InTile(first, side, _divide(self.low, divisor), self.offset // self.width * width, width, 1)
        return None

    def remainder(self, divisor: int) -> InTile | None:
        """index % divisor; None if nothing is known of it."""
        if divisor % self.side == 0:
            return replace(self, first=Int32(Uint32(self.first) % Uint32(divisor)))
        if self.side % divisor == 0 and divisor % self.width == 0:
            return replace(self, first=Int32(0), side=divisor, offset=self.offset % divisor)
        return None


@dataclass(frozen=True)
class Clamped:
    """An int32 index of a tile, of which nothing is known but that it is the same where the offset is."""

    index: Int32
    offset: int


class Shared:
    """Values that calls of `lower` have in common: calls that follow each other in straight-line code.

    Their inputs are the same but for those of this file's types, which differ in their offset alone, and for those
    numbered `changing`. What depends on no such input, and on equal offsets, is computed, and loaded, once.
    """

    def __init__(self, *changing: int):
        self.changing = changing
        self.values: dict[Program, dict[tuple, object]] = {}


def _divide(x: Int32, divisor: int) -> Int32:
    return Int32(Uint32(x) // Uint32(divisor))
