"""KV tiles gathered from the union of the lists of a query tile's tokens (attention/selected/unions).

The union ascends, and its steps, tile_n keys each, are visited from the last to the first:

    | partial: reach past the first token's position, or past the end of K | others: masked by membership alone |

All steps are masked by the membership of each (token, block). Entries after the union's end repeat its last block, and
are members of no token.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...selected.unions.config import SIDE, WORD
from ..config import GatherFacts
from ..heads import GqaPacking
from ..kv_tiles import FULL, PARTIAL
from ..scheduler import QueryScheduler, QueryTile


@dataclass(frozen=True)
class UnionSteps:
    """Steps that one query tile visits."""

    facts: cutlass.Constexpr[GatherFacts]
    count: Int32
    union: cute.Tensor  # (capacity,): blocks, ascending
    bits: cute.Tensor  # (words * tokens,)
    tokens: Int32  # of a tile, at most: words of bits from one step to the next
    first_token: Int32
    packed: Int32  # rows per token
    cols: Int32  # of K
    offset: Int32  # from a token to the key at its position
    ends: tuple  # number of steps up to the end of each segment
    kinds: cutlass.Constexpr[tuple] = (PARTIAL, FULL)
    first: cutlass.Constexpr[int] = PARTIAL  # kind of the first step; masking it always needs no branch

    def at(self, i):
        """Number of the i-th step that is visited, from the beginning of the union."""
        return self.count - 1 - i

    at_partial = at


@dataclass(frozen=True)
class UnionSource:
    """The union tiles of all lists (selected.unions.dispatch.UnionTiles), with G = 1 or as many as heads of K."""

    facts: cutlass.Constexpr[GatherFacts]
    union: cute.Tensor  # (B, G, tiles, capacity) int32
    counts: cute.Tensor  # (B, G, tiles) int32: blocks of each union
    bits: cute.Tensor  # (B, G, tiles, words * tokens) int32
    tokens: Int32  # of a query tile, at most
    heads: GqaPacking

    def for_tile(self, tile: "UnionTile", seqlen) -> UnionSteps:
        """Steps of a query tile."""
        place, packed = self.place(tile.b, tile.h_kv, tile.m), self.heads.qhead_per_kvhead
        return UnionSteps(
            self.facts, tile.steps, self.union[(*place, None)], self.bits[(*place, None)], self.tokens,
            tile.m * SIDE // packed, packed, seqlen.cols, seqlen.offset, (tile.partial, tile.steps),
        )  # fmt: skip

    def place(self, b, h, m) -> tuple:
        """Place of a query tile's list in the tables."""
        return b, cutlass.min(h, self.counts.shape[1] - 1), m

    def segments(self, b, h, m, rows: Int32, cols: Int32) -> tuple:
        """(partial steps, steps) of tile m of KV head h, for so many queries and keys. Called by whole warps."""
        place, tile_n = self.place(b, h, m), self.facts.config.tile_n
        steps = cute.ceil_div(Int32(self.counts[place]) * self.facts.block_size, tile_n)
        visible = cols  # keys before this one are unmasked in all rows
        if self.facts.causal:
            first = m * SIDE // self.heads.qhead_per_kvhead + cols - rows
            visible = cutlass.min(cutlass.max(first + 1, 0), cols)
        partial = self.partial(self.union[(*place, None)], steps, visible // self.facts.block_size)
        return cute.arch.make_warp_uniform(partial), cute.arch.make_warp_uniform(steps)

    @cute.jit
    def partial(self, union: cute.Tensor, steps: Int32, block: Int32) -> Int32:
        """Number of steps that have `block` or a later one, which are the last ones: 32 are looked at at a time."""
        found, more = Int32(0), steps > 0
        while more:
            step = steps - 1 - found - cute.arch.lane_idx()
            last = Int32(-1)
            if step >= 0:
                last = Int32(union[(step + 1) * self.facts.per_tile - 1])
            some = cute.arch.popc(cute.arch.vote_ballot_sync(last >= block))
            found += some
            more = some == WORD
        return found


@dataclass(frozen=True)
class UnionTile(QueryTile):
    """A query tile with its number of partial steps and its number of steps."""

    partial: Int32
    steps: Int32


@dataclass(frozen=True)
class UnionScheduler(QueryScheduler):
    """QueryScheduler's tiles, with their steps: the producer finds these before consumers need them."""

    source: Any = None  # UnionSource
    rows: Int32 = None  # queries
    cols: Int32 = None  # keys

    def fields(self, index) -> tuple:
        """QueryScheduler's fields and UnionSource.segments; past the last tile those of the last one. Called by whole
        warps."""
        fields = QueryScheduler.fields(self, cutlass.min(index, self.count - 1))
        m, h, b = fields
        return *fields, *self.source.segments(b, h, m, self.rows, self.cols)

    def of_fields(self, fields: tuple) -> UnionTile:
        m, h, b, partial, steps = fields
        return UnionTile(m, h, b, h // self.qhead_per_kvhead, partial, steps)


def with_unions(facts: GatherFacts, mQ: cute.Tensor, mK: cute.Tensor, tables: tuple) -> tuple:
    """(scheduler, source) for Q (B, H, Sq, D), K (B, Hkv, Sk, D) and the output of selected.gather.tables. Tiles are
    numbered by KV head."""
    union, counts, bits, tokens, packed = tables
    source = UnionSource(facts, union, counts, bits, tokens, GqaPacking(packed))
    (batch, heads, cols, _), queries = mK.shape, mQ.shape[2]
    tiles_m = cute.ceil_div(source.heads.rows(queries), facts.config.tile_m)
    return UnionScheduler(tiles_m, heads, batch, 1, source=source, rows=queries, cols=cols), source
