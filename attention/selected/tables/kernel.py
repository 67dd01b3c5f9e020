"""Kernels that make the tables of selected blocks (dispatch.py).

MakeTables: a CTA for each list and row of blocks of scores, `side` rows of tokens * heads.

    1  a warp sets the bits of a token's blocks in shared memory, `chunk` words at a time
    2  it copies these words to memory, zeros as well, and sets the columns of blocks of scores that they belong to
    3  the first warp writes the columns that any token has, in ascending order, and their number

A token with rows in two tiles is read by both, and its words are written by the first.

MakeOrder: a thread for each query tile, in the order of forward.scheduler.QueryScheduler: within `l2_heads` heads, the
last tiles come first. With causal lists these are the longest.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.tile.bits import lowest_bit, scan_lanes, set_bit

from ..combine import combine
from ..unions.config import SIDE, WORD
from .config import COLUMNS, THREADS, WARPS, TableFacts

ROUNDS = 3  # words of bits that a warp combines by reductions


class MakeTables:
    """Compiles to one kernel per `TableFacts`."""

    def __init__(self, facts: TableFacts):
        self.facts = facts
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        indices: cute.Tensor,  # (B, Sq, G, top) int32
        words: cute.Tensor,  # (B, G, Sq, n) int32
        counts: cute.Tensor,  # (B, G * copies, Mq) int32
        columns: cute.Tensor,  # (B, G * copies, Mq, width) int32
        first: cute.Tensor | None,  # (Sq,) int32: the column of a token's block 0
        end: cute.Tensor | None,  # (Sq,) int32: the column after its last key
        kv_blocks: Int32,  # KV blocks of a sequence
        n_cols: Int32,  # columns of blocks of scores, Mk
        packed: Int32,  # rows of a token
        side: Int32,  # rows of a row of blocks
        shift: Int32,  # token i attends to keys up to i + shift
        copies: Int32,  # heads that get a list each
        stream: cuda.CUstream,
    ):
        tiles = indices.shape[0] * indices.shape[2] * counts.shape[2]
        self.kernel(
            indices, words, counts, columns, first, end, kv_blocks, n_cols, packed, side, shift, copies
        ).launch(grid=(tiles, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        indices: cute.Tensor,
        words: cute.Tensor,
        counts: cute.Tensor,
        columns: cute.Tensor,
        first: cute.Tensor | None,
        end: cute.Tensor | None,
        kv_blocks: Int32,
        n_cols: Int32,
        packed: Int32,
        side: Int32,
        shift: Int32,
        copies: Int32,
    ):
        facts, tidx, number = self.facts, cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sBits = smem.allocate_tensor(Int32, cute.make_layout((facts.chunk, WARPS)), 16)
        sCols = smem.allocate_tensor(Int32, cute.make_layout(COLUMNS), 16)
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        sWarp = sBits[None, warp]

        groups, length, tiles = indices.shape[2], indices.shape[1], counts.shape[2]
        tile, group = number % tiles, number // tiles
        b, g = group // groups, group % groups
        lists = indices[b, None, g, None]  # (Sq, top)
        n = words.shape[3]
        first_token = tile * side // packed
        last_token = cutlass.min((tile * side + (side - 1)) // packed, length - 1)

        for i in cutlass.range(lane, cutlass.min(n, facts.chunk), 32, unroll=1):
            sWarp[i] = Int32(0)
        for i in cutlass.range(tidx, cute.ceil_div(n_cols, WORD), THREADS, unroll=1):
            sCols[i] = Int32(0)
        cute.arch.sync_threads()
        for token in cutlass.range(first_token + warp, last_token + 1, WARPS, unroll=1):
            own = token * packed >= tile * side  # else the tile before writes the words
            low, high = Int32(0), Int32(0)
            if const_expr(facts.ranges):
                low, high = Int32(first[token]), Int32(end[token])
            for begin in cutlass.range(0, n, facts.chunk, unroll=1):
                self.mark(lists[token, None], begin, kv_blocks, low, high, sWarp, sCols)
                cute.arch.sync_warp()
                count = cutlass.min(n - begin, facts.chunk)
                self.store_words(words[b, g, token, None], begin, count, own, sWarp, sCols)
                cute.arch.sync_warp()
        cute.arch.sync_threads()
        if warp == 0:
            last = (tile * side + (side - 1)) // packed + shift
            limit = Int32(0)
            if last >= 0:
                limit = cutlass.min(last // SIDE + 1, n_cols)
            total = self.write_columns(columns[b, None, tile, None], g * copies, copies, limit, sCols)
            for head in cutlass.range(lane, copies, 32, unroll=1):
                counts[b, g * copies + head, tile] = total

    @cute.jit
    def mark(
        self,
        list_: cute.Tensor,  # (top,)
        begin: Int32,  # first word in shared memory
        kv_blocks: Int32,
        low: Int32,
        high: Int32,
        sWarp: cute.Tensor,
        sCols: cute.Tensor,
    ):
        """Set the bits of a token's blocks in the words from `begin` on and, with ranges, of their columns."""
        facts, lane, top = self.facts, cute.arch.lane_idx(), list_.shape[0]
        for start in cutlass.range(0, top, 32 * facts.batch, unroll=1):
            blocks = cute.make_rmem_tensor(facts.batch, Int32)
            for j in range_constexpr(facts.batch):
                i = start + j * 32 + lane
                blocks[j] = Int32(-1)
                if i < top:
                    blocks[j] = list_[i]
            for j in range_constexpr(facts.batch):
                at, bit = Int32(-1), Int32(0)
                if (blocks[j] >= 0) & (blocks[j] < kv_blocks):
                    at = (blocks[j] >> 5) - begin
                    bit = Int32(1) << (blocks[j] & 31)
                if at >= facts.chunk:
                    at = Int32(-1)
                if const_expr(facts.ranges):
                    if at >= 0:
                        key = blocks[j] * facts.block_size + low
                        after = cutlass.min(key + facts.block_size, high)
                        if key < after:
                            self.set_column(sCols, key // SIDE)
                            self.set_column(sCols, (after - 1) // SIDE)
                        else:  # past the end of its sequence
                            at = Int32(-1)
                if const_expr(facts.combines):
                    for _ in range_constexpr(ROUNDS):
                        at = combine(sWarp, at, bit)
                if at >= 0:
                    cute.arch.atomic_or(sWarp.iterator + at, bit)

    @cute.jit
    def set_column(self, sCols: cute.Tensor, column: Int32):
        set_bit(sCols, column)

    @cute.jit
    def store_words(
        self, words: cute.Tensor, begin: Int32, count: Int32, own: cutlass.Boolean, sWarp: cute.Tensor,
        sCols: cute.Tensor,
    ):  # fmt: skip
        """Write a token's words from `begin` on if they are this tile's own, zero them in shared memory, and set their
        columns."""
        lane = cute.arch.lane_idx()
        for start in cutlass.range(0, count, 32, unroll=1):
            i = start + lane
            word = Int32(0)
            if i < count:
                word = sWarp[i]
                sWarp[i] = Int32(0)
                if own:
                    words[begin + i] = word
            if const_expr(not self.facts.ranges):
                self.set_columns(sCols, begin + i, word)

    @cute.jit
    def set_columns(self, sCols: cute.Tensor, w: Int32, word: Int32):
        """Set the columns of the blocks in word w. A lane has word w, and the lanes of a warp consecutive words."""
        size = self.facts.block_size
        if const_expr(size == 1):  # 4 words per column
            bits, target, lanes = Int32(word != 0) << ((w >> 2) & 31), w >> 7, 32
        else:
            per_word, per_column = size // 4, SIDE // size
            bits = word
            if const_expr(per_column > 1):
                bits = Int32(0)
                for j in range_constexpr(per_word):
                    part = word >> (j * per_column)
                    if const_expr(per_column < 32):
                        part = part & ((1 << per_column) - 1)
                    bits = bits | (Int32(part != 0) << j)
            bits, target, lanes = bits << ((w * per_word) & 31), (w * per_word) >> 5, 32 // per_word
        for step in range_constexpr(lanes.bit_length() - 1):  # neighboring lanes have the same target
            bits = bits | cute.arch.shuffle_sync_bfly(bits, 1 << step)
        if (bits != 0) & (cute.arch.lane_idx() % lanes == 0):
            cute.arch.atomic_or(sCols.iterator + target, bits)

    @cute.jit
    def write_columns(
        self, columns: cute.Tensor, first_head: Int32, copies: Int32, limit: Int32, sCols: cute.Tensor
    ) -> Int32:
        """Write the set columns below `limit` to columns (heads, width) of `copies` heads; returns their number."""
        lane, total = cute.arch.lane_idx(), Int32(0)
        for begin in cutlass.range(0, cute.ceil_div(limit, WORD), 32, unroll=1):
            base = (begin + lane) * WORD
            bits = Int32(0)
            if base < limit:
                bits = sCols[begin + lane]
                if limit - base < WORD:
                    bits = bits & ((Int32(1) << (limit - base)) - 1)
            own = cute.arch.popc(bits)
            upto = scan_lanes(own, 32)
            place = total + upto - own
            while bits != 0:
                column = base + lowest_bit(bits)
                for head in cutlass.range(copies, unroll=1):
                    columns[first_head + head, place] = column
                bits = bits & (bits - 1)
                place = place + 1
            total = total + cute.arch.shuffle_sync(upto, 31)
        return total


class MakeOrder:
    """The kernel of `OrderFacts`."""

    @cute.jit
    def __call__(
        self,
        counts: cute.Tensor,  # (B or 1, H or 1, Mq) int32
        table: cute.Tensor,  # (tiles, 3) int32, of block_source.OrderedScheduler
        heads: Int32,
        tiles_m: Int32,  # query tiles of a head
        tiles_q: Int32,  # query tiles of a row of blocks
        l2_heads: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(counts, table, heads, tiles_m, tiles_q, l2_heads).launch(
            grid=(cute.ceil_div(table.shape[0], THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, counts: cute.Tensor, table: cute.Tensor, heads: Int32, tiles_m: Int32, tiles_q: Int32, l2_heads: Int32
    ):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        tiles = table.shape[0]
        if i < tiles:
            begin = i // (l2_heads * tiles_m) * l2_heads  # first head of those whose tiles come together
            here = cutlass.min(l2_heads, tiles // tiles_m - begin)
            rest = i - begin * tiles_m
            head, back = begin + rest % here, rest // here  # tile tiles_m - 1 - back
            b = cutlass.min(head // heads, counts.shape[0] - 1)
            h = cutlass.min(head % heads, counts.shape[1] - 1)
            count = counts[b, h, (tiles_m - 1 - back) // tiles_q]
            table[i, 0] = head * tiles_m + back
            table[i, 1] = count
            table[i, 2] = count
