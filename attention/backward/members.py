"""Masks of selected KV blocks (selected/blocks.py) in the sm_90 mainloops.

Rows of scores are `packed` heads of each token, and the keys of a warpgroup are part of one KV block or all of it. So a
bit for each token of a query tile says which scores are unmasked: lane l loads the word of token l, and a ballot gives
the bits to all lanes. If all tokens have selected the block, and it ends before the position of the first one, there is
nothing to mask.

AheadSm90 loads words ahead of their step: first the row of blocks of the next query tile, then the words of its tokens.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from ..masks.element_mask import MemberKind
from ..selected.unions.config import WORD
from .config import BackwardFacts


def tokens_of(kind: MemberKind, rows: int) -> int:
    """Number of tokens in so many rows, which are whole tokens or a part of one."""
    return max(rows // kind.packed, 1)


def words_of(kind: MemberKind, rows: int) -> int:
    """Number of words that a lane loads for so many rows."""
    return -(-tokens_of(kind, rows) // WORD)


def registers_of(facts: BackwardFacts, units: int) -> cute.Tensor | None:
    """Registers for a row of blocks and a lane's words of `units` units, (1 + units * words_of,) Int32; None without
    such a mask."""
    if facts.members is None:
        return None
    return cute.make_rmem_tensor(1 + units * words_of(facts.members, facts.config.tile_m // units), Int32)


def load_words(kind: MemberKind, rows: int, tensors: tuple, row0: Int32, first: Int32, b: Int32, h: Int32) -> list:
    """This lane's words for the KV block that key `first` is in, and `rows` rows of scores from row0 on.

    tensors: captured by the element mask, the words of Member. row0 may be any number.
    """
    (words, *_), tokens = tensors, tokens_of(kind, rows)
    token, last = quotient(row0, kind.packed) + cute.arch.lane_idx() % min(tokens, WORD), words.shape[2] - 1
    word = cutlass.min(quotient(first, kind.block_size * WORD), words.shape[3] - 1)  # past the last key
    places = (cutlass.max(cutlass.min(token + j * WORD, last), 0) for j in range(words_of(kind, rows)))
    return [words[b, quotient(h, kind.share), place, word] for place in places]


@cute.jit
def mask_members(
    scores: cute.Tensor,  # (rows, columns) of this thread, transposed: a column is a row of the score matrix
    kind: cutlass.Constexpr,  # MemberKind
    words: list,  # load_words'
    keys: tuple,  # (first, end): of this warpgroup
    col: Int32,  # first key of this thread
    row0: Int32,  # row of the score matrix for the first column
    seqlen,  # seqlen.SeqlenInfo
):
    """Set scores to -inf where a token has not selected the key's block, after its position, and past the last key."""
    first, end = keys
    shift = quotient(first, kind.block_size) % WORD
    bits = [Int32(cute.arch.vote_ballot_sync((word >> shift) & 1 != 0)) for word in words]
    assert len(bits) <= 2, "a unit of 64 rows has at most 64 tokens"
    every, limit, token = bits[0], seqlen.cols, Int32(0)
    if const_expr(len(bits) > 1):
        every = bits[0] & bits[1]
    if const_expr(kind.causal):  # the first token attends to keys before `token`
        token = quotient(row0, kind.packed) + seqlen.cols - quotient(seqlen.rows, kind.packed) + 1
        limit = cutlass.min(limit, token)
    if (every != -1) | (end > limit):
        low = quotient(cute.arch.lane_idx() % 4 * 2, kind.packed)
        for r in range_constexpr(cute.size(scores, mode=[0])):
            column = col + 8 * r
            ahead = column - token - low
            for c in range_constexpr(cute.size(scores, mode=[1])):
                t = const_expr((c // 2 * 8 + c % 2) // kind.packed)
                seen = ((bits[t // WORD] >> low) >> const_expr(t % WORD)) & 1 != 0
                if const_expr(kind.causal):
                    seen = seen & (ahead < t)
                else:
                    seen = seen & (column < seqlen.cols)
                scores[r, c] = select_(seen, scores[r, c], -Float32.inf)


def quotient(x: Int32, divisor: int) -> Int32:
    """x // divisor of a number that is not negative."""
    return Int32(Uint32(x) // Uint32(divisor)) if divisor > 1 else x
