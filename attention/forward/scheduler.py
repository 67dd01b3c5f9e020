"""Schedulers: the order of query tiles."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr
from cutlass.cutlass_dsl import select_

from ..seqlen import PackedSeqlens
from .heuristics import L2_BYTES

WARP = 32


@dataclass(frozen=True)
class QueryTile:
    """One query tile: tile m of head h of batch index b; its keys and values are those of KV head h_kv."""

    m: Int32
    h: Int32
    b: Int32
    h_kv: Int32


@dataclass(frozen=True)
class QueryScheduler:
    """All tiles of `l2_heads` heads, then those of the next heads; within them the last tiles of each head first.

    With a causal mask the last tiles are the longest (longest processing time first). The short ones come at the end,
    where a free CTA takes the next one, so that all CTAs finish at about the same time.
    """

    tiles_m: Int32
    heads: Int32
    batch: Int32
    qhead_per_kvhead: Int32  # heads of Q that share a head of K and V
    l2_heads: Int32 | None = None  # None: one

    @staticmethod
    def of(facts, q_shape: tuple, k_shape: tuple) -> "QueryScheduler":
        """Scheduler for Q (B, H, Sq, D) and K (B, Hkv, Sk, D).

        l2_heads: as many heads as fit in L2, if tiles differ in length. It is one on the sm_80 path, which has no
        registers to decode more.
        """
        (batch, heads, rows, _), (_, heads_kv, cols, _) = q_shape, k_shape
        qhead_per_kvhead, l2_heads = heads // heads_kv, None
        if facts.path == "sm_90" and (facts.window.left or facts.window.right):
            fit = L2_BYTES // facts.kv_row_bytes // cols
            l2_heads = cutlass.min(cutlass.max(fit, 1) * qhead_per_kvhead, heads * batch)
        return QueryScheduler(cute.ceil_div(rows, facts.config.tile_m), heads, batch, qhead_per_kvhead, l2_heads)

    @property
    def count(self) -> Int32:
        return self.tiles_m * self.heads * self.batch

    def fields(self, index) -> tuple:
        """m, h and b of tile `index`, from which `of_fields` builds the tile without a division."""
        if self.l2_heads is None:
            m, head = self.tiles_m - 1 - index % self.tiles_m, index // self.tiles_m
        else:
            begin = index // (self.l2_heads * self.tiles_m) * self.l2_heads  # first head of its group
            here = cutlass.min(self.l2_heads, self.heads * self.batch - begin)
            rest = index - begin * self.tiles_m
            m, head = self.tiles_m - 1 - rest // here, begin + rest % here
        return m, head % self.heads, head // self.heads

    def of_fields(self, fields: tuple) -> QueryTile:
        m, h, b = fields
        return QueryTile(m, h, b, h // self.qhead_per_kvhead)

    def decode(self, index) -> QueryTile:
        return self.of_fields(self.fields(index))


@dataclass(frozen=True)
class PackedScheduler:
    """Query tiles of packed sequences: head by head, within a head sequence by sequence, the last tiles of each first.

    The host knows only an upper bound of the number of tiles. A whole warp finds a tile's sequence by prefix sums over
    32 sequences at a time. Each warp does so for itself, with the same result.
    """

    seqlens: PackedSeqlens
    tile_m: cutlass.Constexpr[int]
    tiles_m: Int32  # upper bound per head; exact in the result of `counted`
    heads: Int32
    qhead_per_kvhead: Int32  # heads of Q that share a head of K and V

    @staticmethod
    def at_most(seqlens: PackedSeqlens, tile_m: int, heads, qhead_per_kvhead) -> "PackedScheduler":
        """Scheduler with an upper bound of tiles: each sequence, and the rows after the last one, may end in a partial
        tile."""
        tiles = seqlens.total_q // tile_m + seqlens.sequences
        return PackedScheduler(seqlens, tile_m, tiles, heads, qhead_per_kvhead)

    @property
    def count(self) -> Int32:
        return self.tiles_m * self.heads

    def counted(self, ctas) -> "PackedScheduler":
        """The scheduler with the exact number of tiles, if there may be more than one per CTA."""
        return replace(self, tiles_m=self.tiles_of_a_head(ctas))

    @cute.jit
    def tiles_of_a_head(self, ctas: Int32) -> Int32:
        tiles = Int32(self.tiles_m)
        if ctas < self.count:
            _, _, counted = self.find(Int32(2**31 - 1))
            tiles = cutlass.min(counted, tiles)
        return tiles

    def fields(self, index) -> tuple:
        """(tile, head, sequence); an index past a head's last tile gives an empty sequence. Called by whole warps."""
        h = index // self.tiles_m
        b, m, _ = self.find(index - h * self.tiles_m)
        return m, h, b

    def of_fields(self, fields: tuple) -> QueryTile:
        m, h, b = fields
        return QueryTile(m, h, b, h // self.qhead_per_kvhead)

    def decode(self, index) -> QueryTile:
        return self.of_fields(self.fields(index))

    @cute.jit
    def find(self, wanted: Int32) -> tuple:
        """(sequence, tile in it) of a head's tile `wanted`, and the number of tiles counted until it was found.

        Past the last tile: the first empty sequence after all others, and the number of tiles.
        """
        lane = cute.arch.lane_idx()
        sequences = Int32(self.seqlens.sequences)  # with the rows after the last one
        b, m, before, first = sequences, Int32(0), Int32(0), Int32(0)
        while first < sequences:
            begin, end = self.seqlens.rows(first + lane)
            upto = (end - begin + self.tile_m - 1) // self.tile_m
            for distance in range_constexpr(5):
                other = cute.arch.shuffle_sync_up(upto, 1 << distance)
                upto += select_(lane >= (1 << distance), other, Int32(0))
            upto += before
            before = cute.arch.shuffle_sync(upto, WARP - 1)
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= wanted))
            after = first + WARP
            if passed < WARP:
                b, m = first + passed, cute.arch.shuffle_sync(upto, passed) - 1 - wanted
                after = sequences
            first = after
        return cute.arch.make_warp_uniform(b), cute.arch.make_warp_uniform(m), before
