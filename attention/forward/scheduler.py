"""Which query tile has which number."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr
from cutlass.cutlass_dsl import select_

from .choose import L2_BYTES
from .config import ELEMENT
from .seqlen import PackedSeqlens

WARP = 32


@dataclass(frozen=True)
class QueryTile:
    """One tile of queries: number m of head h of item b; that head's keys and values are head h_kv of K and V."""

    m: Int32
    h: Int32
    b: Int32
    h_kv: Int32


@dataclass(frozen=True)
class QueryScheduler:
    """Query tiles of `together` heads after those of as many others; among them the last tiles of each head first.

    Where rows see what is before them the last tiles are the longest, and short ones are left for the end: there who
    is free takes one, and all are done at about the same time.
    """

    tiles_m: Int32
    heads: Int32
    batch: Int32
    shared: Int32  # heads of Q that share a head of K and V
    l2_heads: Int32 | None = None  # None: one

    @staticmethod
    def of(facts, q_shape: tuple, k_shape: tuple) -> "QueryScheduler":
        """For Q (B, H, Sq, D) and K (B, Hkv, Sk, D): as many heads together as there is room for in L2, if their tiles
        differ in length. On the sm_80 path one: there are no registers for finding tiles of more."""
        (batch, heads, rows, _), (_, heads_kv, cols, _) = q_shape, k_shape
        shared, l2_heads = heads // heads_kv, None
        if facts.path == "sm_90" and (facts.window.left or facts.window.right):
            fit = L2_BYTES // ((facts.head_dim + facts.head_dim_v) * ELEMENT) // cols
            l2_heads = cutlass.min(cutlass.max(fit, 1) * shared, heads * batch)
        return QueryScheduler(cute.ceil_div(rows, facts.config.tile_m), heads, batch, shared, l2_heads)

    @property
    def count(self) -> Int32:
        return self.tiles_m * self.heads * self.batch

    def fields(self, index) -> tuple:
        """What `of_fields` makes a tile of without dividing: m, h and b of tile number `index`."""
        if self.l2_heads is None:
            m, head = self.tiles_m - 1 - index % self.tiles_m, index // self.tiles_m
        else:
            begin = index // (self.l2_heads * self.tiles_m) * self.l2_heads  # the first of the heads that are together
            here = cutlass.min(self.l2_heads, self.heads * self.batch - begin)
            rest = index - begin * self.tiles_m
            m, head = self.tiles_m - 1 - rest // here, begin + rest % here
        return m, head % self.heads, head // self.heads

    def of_fields(self, fields: tuple) -> QueryTile:
        m, h, b = fields
        return QueryTile(m, h, b, h // self.shared)

    def decode(self, index) -> QueryTile:
        return self.of_fields(self.fields(index))


@dataclass(frozen=True)
class PackedScheduler:
    """Query tiles of packed sequences: one head after the other, in it one sequence after the other, of which the last
    tiles come first.

    The host does not know how many tiles there are, only how many at most. A whole warp finds a tile's sequence, by
    running sums over 32 sequences at a time. All warps do it by themselves, and get the same.
    """

    seqlens: PackedSeqlens
    tile_m: cutlass.Constexpr[int]
    tiles_m: Int32  # of a head: at most so many; of what `counted` gives, as many as there are
    heads: Int32
    shared: Int32  # heads of Q that share a head of K and V

    @staticmethod
    def at_most(seqlens: PackedSeqlens, tile_m: int, heads, shared) -> "PackedScheduler":
        """Each sequence, and the rows after the last one, may end in a tile that is not full."""
        tiles = seqlens.total_q // tile_m + seqlens.sequences
        return PackedScheduler(seqlens, tile_m, tiles, heads, shared)

    @property
    def count(self) -> Int32:
        return self.tiles_m * self.heads

    def counted(self, ctas) -> "PackedScheduler":
        """With the number of tiles that there are, if they are more than one for each CTA."""
        return replace(self, tiles_m=self.tiles_of_a_head(ctas))

    @cute.jit
    def tiles_of_a_head(self, ctas: Int32) -> Int32:
        tiles = Int32(self.tiles_m)
        if ctas < self.count:
            _, _, counted = self.find(Int32(2**31 - 1))
            tiles = cutlass.min(counted, tiles)
        return tiles

    def fields(self, index) -> tuple:
        """(tile, head, sequence); of an index past a head's last tile, an empty sequence. Asked for by whole warps."""
        h = index // self.tiles_m
        b, m, _ = self.find(index - h * self.tiles_m)
        return m, h, b

    def of_fields(self, fields: tuple) -> QueryTile:
        m, h, b = fields
        return QueryTile(m, h, b, h // self.shared)

    def decode(self, index) -> QueryTile:
        return self.of_fields(self.fields(index))

    @cute.jit
    def find(self, wanted: Int32) -> tuple:
        """(sequence, tile in it) of a head's tile number `wanted`, and how many tiles were counted till it was found.

        Past the last tile: the first empty sequence after all others, and how many tiles there are.
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
