"""The mask of gathered KV tiles: the membership of each (token, block), and in partial steps keys' positions.

A thread has two rows, and of each eight columns of a tile the neighbors 2 (lane % 4) and the next. A word of bits has
those of all blocks of 128 keys for a token; it is shifted once by the part of a block's number that depends on the lane
or the step, so that all other parts are constants. The words of a step are loaded after the mask of the step before: a
proxy fence (mainloop) waits for loads in flight, and these have the time of a softmax.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_

from ...selected.unions.config import SIDE, WORD
from ..config import GatherFacts
from .source import UnionSteps

ROWS = 2  # of a thread
BYTES = 4  # of a word


@dataclass(frozen=True)
class Members:
    """Membership of a thread's rows."""

    at: tuple  # address of the first word of each row's token
    end: tuple  # each row attends to keys before this one
    words: cute.Tensor  # (words of a step, rows), in registers: of the step that is masked next


def words_per_step(facts: GatherFacts) -> int:
    """Words that hold the bits of a step for one token."""
    return max(facts.per_tile // WORD, 1)


def members_of(steps: UnionSteps, row: Int32) -> Members:
    """Membership of rows `row` and `row` + 8, with the words of the first step."""
    at, end = [], []
    for r in range(ROWS):
        token = (row + 8 * r) // steps.packed
        at.append(steps.bits.iterator.toint() + Int64(token - steps.first_token) * BYTES)
        last = steps.cols
        if steps.facts.causal:
            last = cutlass.min(token + steps.offset + 1, last)
        end.append(last)
    members = Members(tuple(at), tuple(end), cute.make_rmem_tensor((words_per_step(steps.facts), ROWS), Int32))
    load_words(members, steps, 0)
    return members


def load_words(members: Members, steps: UnionSteps, i):
    """Load the words of the i-th step, or of the first of the union after the last one that is visited."""
    facts, step = steps.facts, cutlass.max(steps.at(i), 0)
    count = words_per_step(facts)
    first = step * count if facts.block_size == 1 else step // (SIDE // facts.config.tile_n)
    for r in range(ROWS):
        for w in range(count):
            at = members.at[r] + Int64((first + w) * steps.tokens) * BYTES
            place = make_ptr(Int32, at, AddressSpace.gmem, assumed_align=BYTES)
            members.words[w, r] = cute.make_tensor(place, cute.make_layout(1))[0]


@cute.jit
def mask_members(
    facts: cutlass.Constexpr,
    scores: cute.Tensor,  # (2, columns) of this thread
    work,  # mask_and_softmax.QueryWork
    i,  # index of the visited step
    partial: cutlass.Constexpr[bool],
):
    """Set scores to -inf where a token has not selected a key's block and, in partial steps, after its position and
    past the end of K. Then load the words of the next step."""
    mask_step(facts, scores, work, i, partial)
    load_words(work.members, work.tiles, i + 1)


@cute.jit
def mask_step(
    facts: cutlass.Constexpr,
    scores: cute.Tensor,  # (2, columns) of this thread
    work,  # mask_and_softmax.QueryWork
    i,  # index of the visited step
    partial: cutlass.Constexpr[bool],
):
    """mask_members without the next step's words."""
    low, step = cute.arch.lane_idx() % 4 * 2, work.tiles.at(i)
    shifted = shifted_words(facts, work, low, step)
    if const_expr(facts.boxes and not partial):
        every = const_expr((1 << facts.per_tile) - 1)  # block of the step
        if shifted[0][0] & shifted[1][0] & every != every:
            mask_blocks(facts, scores, work, shifted, low, step, partial)
    else:
        mask_blocks(facts, scores, work, shifted, low, step, partial)


@cute.jit
def shifted_words(facts: cutlass.Constexpr, work, low: Int32, step: Int32) -> list:
    """Words of a step (rows, words) shifted by the number of the block of column `low`."""
    size, tile_n, words = const_expr(facts.block_size), const_expr(facts.config.tile_n), work.members.words
    shift = low // size
    if const_expr(tile_n < SIDE and size > 1):
        shift += step % const_expr(SIDE // tile_n) * const_expr(facts.per_tile)
    return [[words[w, r] >> shift for w in range(words_per_step(facts))] for r in range(ROWS)]


@cute.jit
def hidden_blocks(facts: cutlass.Constexpr, work, i) -> list:
    """Values (rows, blocks of the i-th step) to subtract from scores besides their maximum: inf if the row's token has
    not selected the block, else 0. Every block has all columns of a thread, or none."""
    words = shifted_words(facts, work, Int32(0), work.tiles.at(i))
    bits = [[words[r][0] & const_expr(1 << block) for block in range(facts.per_tile)] for r in range(ROWS)]
    return [[select_(bit != 0, Float32(0.0), Float32.inf) for bit in row] for row in bits]


@cute.jit
def mask_blocks(
    facts: cutlass.Constexpr,
    scores: cute.Tensor,  # (2, columns) of this thread
    work,  # mask_and_softmax.QueryWork
    shifted: list,  # (rows, words per step): bits of a step, shifted by this lane's first block
    low: Int32,  # first column of the thread
    step: Int32,
    partial: cutlass.Constexpr[bool],
):
    """Set scores to -inf, as mask_members."""
    size = const_expr(facts.block_size)
    block, position, number = Int32(0), Int32(0), const_expr(-1)
    for c in range_constexpr(cute.size(scores, mode=[1])):
        key = const_expr(c // 2 * 8 + c % 2)  # the first lane's
        if const_expr(partial):
            if const_expr(key // size != number):
                number = const_expr(key // size)
                block = Int32(work.tiles.union[step * facts.per_tile + number + low // size])
            position = block * size + (const_expr(key % size) + low % size)
        for r in range_constexpr(ROWS):
            seen = (shifted[r][const_expr(key // size // WORD)] & const_expr(1 << key // size % WORD)) != 0
            if const_expr(partial):
                seen = seen & (position < work.members.end[r])
            scores[r, c] = select_(seen, scores[r, c], -Float32.inf)
