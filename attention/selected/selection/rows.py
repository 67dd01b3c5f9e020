"""The blocks that may be in a row's list, and those that must be."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


class Terms(NamedTuple):
    """Arguments of select_blocks that kernels read.

    first: position of the scores' first row, among `columns` keys.
    causal, whole: 0 or 1; see top_blocks.
    """

    first: Int32
    columns: Int32
    block_size: Int32
    local: Int32
    initial: Int32
    causal: Int32
    whole: Int32


class Bounds(NamedTuple):
    """Blocks of a row: those before `begin` and from `high` to before `visible` are always selected, those from `begin`
    to before `end` are candidates."""

    begin: Int32
    end: Int32
    high: Int32
    visible: Int32


@cute.jit
def bounds_of(terms: Terms, row: Int32) -> Bounds:
    """The bounds of a row of scores."""
    visible = cute.ceil_div(terms.columns, terms.block_size)
    end = visible
    if terms.causal != 0:
        keys = cutlass.max(terms.first + row + 1, 0)  # that the row sees
        visible = cutlass.min(cute.ceil_div(keys, terms.block_size), visible)
        end = visible
        if (terms.whole != 0) & (keys < terms.columns):
            end = keys // terms.block_size
    begin = cutlass.min(terms.initial, visible)
    high = cutlass.max(begin, visible - terms.local)
    end = cutlass.max(cutlass.min(end, high), begin)
    return Bounds(begin, end, high, visible)


@cute.jit
def key_of(score: Float32) -> Int32:
    """An integer in the order of FP32 numbers; -0.0 is 0.0, and NaN the largest: a sum that is NaN is 0x7FFFFFFF."""
    bits = bits_of(score + Float32(0.0))
    if bits < 0:
        bits = bits ^ 0x7FFFFFFF
    return bits


@cute.jit
def below(key: Int32) -> Float32:
    """A number such that all scores whose key is larger are larger, and no others; NaN where that is all scores."""
    if key == -1:  # -0.0, which is not below 0.0
        key = Int32(-2)
    return score_of(key)


@cute.jit
def score_of(key: Int32) -> Float32:
    """The score that has a key."""
    bits = key
    if bits < 0:
        bits = bits ^ 0x7FFFFFFF
    words = cute.make_rmem_tensor(1, Int32)
    words[0] = bits
    return cute.recast_tensor(words, Float32)[0]


def bits_of(x: Float32) -> Int32:
    values = cute.make_rmem_tensor(1, Float32)
    values[0] = x
    return cute.recast_tensor(values, Int32)[0]


@cute.jit
def write_rest(out: cute.Tensor, bounds: Bounds, count: Int32, thread: Int32, threads: cutlass.Constexpr):
    """Write a list's blocks that are always selected, around the `count` selected ones, and -1 up to its end."""
    for i in cutlass.range(thread, bounds.begin, threads, unroll=1):
        out[i] = i
    at = bounds.begin + count
    forced = bounds.visible - bounds.high
    for i in cutlass.range(at + thread, out.shape[0], threads, unroll=1):
        block = Int32(-1)
        if i < at + forced:
            block = bounds.high + i - at
        out[i] = block
