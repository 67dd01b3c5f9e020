"""Tile schedulers and problem shapes of backward: dense or packed sequences, a window or a block mask, both paths."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from ..forward.heuristics import L2_BYTES
from ..forward.problem import one_item
from .config import BackwardFacts
from .q_tiles import BlockRows, WindowRows
from .row_tiles import DenseRows, PackedRows, interleaved
from .sizes import bytes_of_a_row, tiles_of_a_head

LAST_TILES = 256  # of a KvScheduler's last group: about two for each multiprocessor


@dataclass(frozen=True)
class KvTile:
    """KV tile n in batch b, with the query heads of a work item: the head_group-th KvScheduler.item_heads of them. This
    is the head of K and V unless heads are split."""

    n: Int32
    head_group: Int32
    b: Int32
    range: Int32 | None = None  # of query rows; BackwardFacts.ranges


@dataclass(frozen=True)
class KvScheduler:
    """Schedules all tiles of a group of `l2_heads` heads, then those of the next group. In a group the first tiles of
    each head come first.

    With a causal mask the first tiles are the longest, since all rows attend to them. The last group has LAST_TILES
    tiles or more, so that its longest ones do not finish last. from_last: in all groups but the last one, the last
    tiles come first (q_tiles).

    These heads are head groups: all query heads of a KV head, or `split` of them (items.py).
    """

    tiles_k: Int32
    tiles_q: Int32  # per head, as row_tiles counts
    heads: Int32  # of Q
    heads_kv: Int32
    batch: Int32
    l2_heads: Int32
    last_group: Int32 | None = None  # its first head; None with a table
    from_last: cutlass.Constexpr[bool] = False
    split: Int32 | None = None

    @property
    def item_heads(self) -> Int32:
        return self.heads // self.heads_kv if self.split is None else self.split

    @property
    def items(self) -> Int32:
        """Number of head groups of a batch: each KV tile has a work item for each group of its KV head."""
        return self.heads_kv if self.split is None else self.heads // self.split

    def h_kv(self, tile: KvTile) -> Int32:
        return tile.head_group if self.split is None else tile.head_group * self.heads_kv // self.items

    @property
    def count(self) -> Int32:
        return self.tiles_k * self.items * self.batch

    @property
    def most(self) -> Int32:
        """At least `count`, and known before the launch."""
        return self.count

    def decode(self, index) -> KvTile:
        return KvTile(*self.fields(index))

    def fields(self, index) -> tuple:
        """Fields of a KvTile; undefined for an index past the last tile."""
        begin = cutlass.min(index // (self.l2_heads * self.tiles_k) * self.l2_heads, self.last_group)
        is_last = begin == self.last_group
        here = select_(is_last, self.items * self.batch - begin, self.l2_heads)
        rest = index - begin * self.tiles_k
        n, head = rest // here, begin + rest % here
        if self.from_last:
            n = select_(is_last, n, self.tiles_k - 1 - n)
        return n, head % self.items, head // self.items


@dataclass(frozen=True)
class PackedKvScheduler(KvScheduler):
    """Scheduler for packed sequences, whose KV tiles are numbered consecutively; see PackedRows.find_k."""

    seqlens: PackedRows = None
    tile_n: int = 0

    def fields(self, index) -> tuple:
        number, head_group, _ = KvScheduler.fields(self, index)
        b, n = self.seqlens.find_k(number, self.tile_n)
        return n, head_group, b


@dataclass(frozen=True)
class OrderedKvScheduler(KvScheduler):
    """Scheduler in the order of a table (dispatch.kv_order), for example tiles with the most blocks first."""

    order: cute.Tensor = None  # (tiles of all heads,) int32: n + tiles_k * (head_group + items * b)

    def fields(self, index) -> tuple:
        number = self.order[cutlass.min(index, self.count - 1)]
        head = number // self.tiles_k
        return number % self.tiles_k, head % self.items, head // self.items


@dataclass(frozen=True)
class RangedKvScheduler(KvScheduler):
    """Scheduler of (KV tile, range of query rows) that a table lists (ranges.py), range by range."""

    # (ranges * B * Hkv * blocks,) int32: block of keys + blocks * (h_kv + heads_kv * (b + batch * range))
    order: cute.Tensor = None
    listed: cute.Tensor = None  # (1,) int32: blocks of keys listed
    blocks: Int32 = None
    tiles: cutlass.Constexpr[int] = 1  # KV tiles of a block

    @property
    def count(self) -> Int32:
        return self.listed[0] * self.tiles

    @property
    def most(self) -> Int32:
        return self.order.shape[0] * self.tiles

    def fields(self, index) -> tuple:
        number = self.order[cutlass.min(index, self.most - 1) // self.tiles]
        head = number // self.blocks
        b = head // self.heads_kv  # + batch * range
        n = number % self.blocks * self.tiles + index % self.tiles
        return n, head % self.heads_kv, b % self.batch, b // self.batch


@dataclass(frozen=True)
class Problem:
    """Batched tensors, the KV tile scheduler, sequence lengths, and the source of query tiles."""

    mQ: cute.Tensor  # (B, H, Sq, D)
    mK: cute.Tensor  # (B, Hkv, Sk, D)
    mV: cute.Tensor  # (B, Hkv, Sk, Dv)
    mdO: cute.Tensor  # (B, H, Sq, Dv)
    mdK: cute.Tensor  # (B, Hkv, Sk, D); with split heads (B, items, Sk, D)
    mdV: cute.Tensor  # (B, Hkv, Sk, Dv), likewise
    scheduler: KvScheduler
    seqlens: Any  # row_tiles.DenseRows or PackedRows
    source: Any  # q_tiles.WindowRows or BlockRows


def heads_in_l2(facts: BackwardFacts, rows, heads, heads_kv, batch=1):
    """Number of KV heads whose `rows` query rows fit in L2. rows: for packed sequences, the mean length. With split
    heads, heads_kv is KvScheduler.items.
    """
    bytes_a_row = bytes_of_a_row(facts) * (heads // heads_kv)
    return cutlass.min(cutlass.max(L2_BYTES // bytes_a_row // cutlass.max(rows, 1), 1), heads_kv * batch)


def last_group(heads, tiles_k, l2_heads):
    """The first head of KvScheduler's last group. heads: head groups of all batches."""
    tail = (LAST_TILES - 1) // cutlass.max(tiles_k, 1) + 1
    return cutlass.max(heads - tail, 0) // l2_heads * l2_heads


def problem_of(
    facts: BackwardFacts,
    tensors: tuple,  # Q, K, V, dO, dK, dV
    arrays: cute.Tensor,  # row_tiles' rows (tiles of all heads, 2, tile_m)
    cu_seqlens: tuple,  # (cu_q, cu_k), (B + 1,) each; packed sequences
    blocks: tuple | None,  # (*BlockRows' lists, its ranks if deterministic, else the scheduler's tables, *mask tensors)
    left: Int32 | None,  # bounds of the window; None with a block mask
    right: Int32 | None,
    offsets: tuple | None,  # (q_offset, k_offset); BackwardFacts.offsets
    split: Int32 | None = None,  # KvScheduler's
) -> Problem:
    mQ, mK, *_ = tensors
    cfg = facts.config
    if facts.packed:
        (rows, heads, _), (cols, heads_kv, _) = mQ.shape, mK.shape
        seqlens, sequences, batch = PackedRows(*cu_seqlens, rows, cols), cu_seqlens[0].shape[0] - 1, 1
        tiles = tiles_of_a_head(cols, cfg.tile_n, sequences), arrays.shape[0] // heads
        tensors, rows = [one_item(t, (1, 0, 2)) for t in tensors], rows // cutlass.max(sequences, 1)
    else:
        tensors = [interleaved(t, facts.packed_heads) if i in (0, 3) else t for i, t in enumerate(tensors)]
        (batch, heads, _, _), (_, heads_kv, cols, _) = tensors[0].shape, mK.shape
        rows = mQ.shape[2] * facts.packed_heads
        seqlens = DenseRows(rows, cols, *(offsets or ()))
        tiles = tiles_of_a_head(cols, cfg.tile_n), arrays.shape[0] // (heads * batch)
    items = heads_kv if split is None else heads // split
    fit = heads_in_l2(facts, rows, heads, items, batch)
    shape = *tiles, heads, heads_kv, batch, fit
    if facts.blocks is not None:
        lists, (order, *mask_tensors) = blocks[:4], blocks[4:]
        ranks, ranges = order if facts.deterministic else None, None
        sides = facts.blocks.block_k // cfg.tile_n, facts.blocks.block_q // cfg.tile_m
        if facts.ranges:
            listed, *mask_tensors = mask_tensors
            of_blocks = {"order": order, "listed": listed, "blocks": lists[0].shape[2], "tiles": sides[0]}
            scheduler = RangedKvScheduler(*shape, **of_blocks)
            ranges = cute.ceil_div(tiles[1] // sides[1], lists[1].shape[3])
        elif facts.deterministic:
            scheduler = KvScheduler(*shape, last_group(items * batch, tiles[0], fit))
        else:
            scheduler = OrderedKvScheduler(*shape, split=split, order=order)
        source = BlockRows(*lists, ranks, tuple(mask_tensors), *sides, ranges)
    else:
        last = last_group(items * batch, tiles[0], fit)
        if facts.packed:
            scheduler = PackedKvScheduler(*shape, last, split=split, seqlens=seqlens, tile_n=cfg.tile_n)
        else:
            scheduler = KvScheduler(*shape, last, split=split)
        around = not (facts.window.left or facts.window.right or facts.deterministic)
        down, heads_down = facts.deterministic and facts.window.right, None
        if down and not facts.window.left:
            scheduler = replace(scheduler, from_last=True)
            down, heads_down = False, (last * (heads // heads_kv), 0 if facts.packed else heads)
        source = WindowRows(facts.window, cfg.tile_m, cfg.tile_n, left, right, around, down, heads_down)
    return Problem(*tensors, scheduler, seqlens, source)
