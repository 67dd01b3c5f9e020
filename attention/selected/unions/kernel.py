"""Kernel that makes union tiles (dispatch.py): a CTA makes those of one list and query tile.

    1  threads read the lists of the tile's tokens, and set a bit of shared memory for each block
    2  warps scan the bitmap: a block's rank in the union is the number of bits before its own
    3  threads write the blocks whose bits are set, at their ranks
    4  threads read the lists again, look up each block's rank, and set the (step, token) bits in shared memory, in
       parts of BITS words; each part is copied to memory

`lanes` consecutive threads read one list, so that a warp reads 128 bytes at a time, of several lists if they are short.
`batch` loads of a thread are in flight at once.

In step 4 most of the 32 blocks that a warp reads together belong to one word of bits, which atomics would write one
after another. So the warp first combines the bits of up to ROUNDS words by reductions, with one atomic each. Lists need
not ascend; the more they are shuffled, the more bits are left for atomics.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from cute_kernels.tile.bits import scan_lanes, set_bit

from ..combine import combine
from .config import BITS, SIDE, THREADS, WORD, UnionFacts

WARPS = THREADS // 32
ROUNDS = 3  # words of bits that a warp combines by reductions


class MakeUnions:
    """Compiles to one kernel per `UnionFacts`."""

    def __init__(self, facts: UnionFacts):
        self.facts = facts
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        indices: cute.Tensor,  # (B, Sq, G, top) int32
        blocks: cute.Tensor,  # (B * G * tiles, capacity) int32
        counts: cute.Tensor,  # (B * G * tiles,) int32
        bits: cute.Tensor,  # (B * G * tiles, words * tokens) int32
        kv_blocks: Int32,  # KV blocks of a sequence
        packed: Int32,  # rows of a token
        tokens: Int32,  # most tokens of a tile
        stream: cuda.CUstream,
    ):
        self.kernel(indices, blocks, counts, bits, kv_blocks, packed, tokens).launch(
            grid=(counts.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        indices: cute.Tensor,
        blocks: cute.Tensor,
        counts: cute.Tensor,
        bits: cute.Tensor,
        kv_blocks: Int32,
        packed: Int32,
        tokens: Int32,
    ):
        tidx, number = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sBitmap, sRank = (smem.allocate_tensor(Int32, cute.make_layout(self.facts.bitmap), 16) for _ in range(2))
        sBits = smem.allocate_tensor(Int32, cute.make_layout(BITS), 16)
        sWarp = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)  # bits in each warp's part of the bitmap
        sLast = smem.allocate_tensor(Int32, cute.make_layout(1), 16)  # the last block

        batch, length, groups, _ = indices.shape
        tiles = counts.shape[0] // (batch * groups)
        tile, group = number % tiles, number // tiles
        lists = indices[group // groups, None, group % groups, None]  # (Sq, top)
        first = tile * SIDE // packed
        last = cutlass.min((tile * SIDE + (SIDE - 1)) // packed, length - 1)
        span = cute.ceil_div(cute.ceil_div(kv_blocks, WORD), THREADS) * 32  # words of the bitmap per warp

        for i in cutlass.range(tidx, span * WARPS, THREADS, unroll=1):
            sBitmap[i] = Int32(0)
        cute.arch.sync_threads()
        self.mark(lists, first, last, kv_blocks, sBitmap)
        cute.arch.sync_threads()
        total = self.scan(sBitmap, sRank, sWarp, span)
        self.write_list(blocks[number, None], total, sBitmap, sRank, sWarp, sLast, span)
        if tidx == 0:
            counts[number] = total
        cute.arch.sync_threads()
        facts = self.facts
        steps = cute.ceil_div(total, facts.per_step)
        for i in cutlass.range(total + tidx, steps * facts.per_step, THREADS, unroll=1):
            blocks[number, i] = sLast[0]
        words = steps * facts.words
        part = BITS // tokens
        for begin in cutlass.range(0, words, part, unroll=1):
            count = cutlass.min(part, words - begin) * tokens
            for i in cutlass.range(tidx, count, THREADS, unroll=1):
                sBits[i] = Int32(0)
            cute.arch.sync_threads()
            self.set_bits(lists, first, last, kv_blocks, sBitmap, sRank, sBits, begin, count, tokens)
            cute.arch.sync_threads()
            for i in cutlass.range(tidx, count, THREADS, unroll=1):
                bits[number, begin * tokens + i] = sBits[i]
            cute.arch.sync_threads()

    @cute.jit
    def load(self, lists: cute.Tensor, token: Int32, last: Int32, begin: Int32, kv_blocks: Int32) -> cute.Tensor:
        """This lane's entries of a token's list from `begin` on, -1 for those that are no block."""
        facts = self.facts
        found = cute.make_rmem_tensor(facts.batch, Int32)
        for n in range_constexpr(facts.batch):
            i = begin + n * facts.lanes
            found[n] = Int32(-1)
            if (token <= last) & (i < lists.shape[1]):
                found[n] = lists[token, i]
        for n in range_constexpr(facts.batch):
            if found[n] >= kv_blocks:
                found[n] = Int32(-1)
        return found

    @cute.jit
    def mark(self, lists: cute.Tensor, first: Int32, last: Int32, kv_blocks: Int32, sBitmap: cute.Tensor):
        """Set the bits of all blocks in the lists of tokens `first` to `last`."""
        facts, tidx = self.facts, cute.arch.thread_idx()[0]
        for token in cutlass.range(first + tidx // facts.lanes, last + 1, facts.lists, unroll=1):
            for begin in cutlass.range(tidx % facts.lanes, lists.shape[1], facts.lanes * facts.batch, unroll=1):
                found = self.load(lists, token, last, begin, kv_blocks)
                for n in range_constexpr(facts.batch):
                    if found[n] >= 0:
                        set_bit(sBitmap, found[n])

    @cute.jit
    def scan(self, sBitmap: cute.Tensor, sRank: cute.Tensor, sWarp: cute.Tensor, span: Int32) -> Int32:
        """Write the number of bits before each word, from the beginning of its warp's part, and those of each part;
        returns the number of all bits."""
        tidx = cute.arch.thread_idx()[0]
        warp, lane = tidx // 32, tidx % 32
        before = Int32(0)
        for begin in cutlass.range(warp * span, (warp + 1) * span, 32, unroll=1):
            own = cute.arch.popc(sBitmap[begin + lane])
            upto = scan_lanes(own, 32)
            sRank[begin + lane] = before + upto - own
            before = before + cute.arch.shuffle_sync(upto, 31)
        if lane == 0:
            sWarp[warp] = before
        cute.arch.sync_threads()
        total = Int32(0)
        for w in range_constexpr(WARPS):
            total = total + sWarp[w]
        return total

    @cute.jit
    def write_list(
        self,
        blocks: cute.Tensor,  # (capacity,)
        total: Int32,
        sBitmap: cute.Tensor,
        sRank: cute.Tensor,
        sWarp: cute.Tensor,
        sLast: cute.Tensor,
        span: Int32,
    ):
        """Write the ascending list of blocks and the last of them; makes sRank count from the first word."""
        tidx = cute.arch.thread_idx()[0]
        warp, lane = tidx // 32, tidx % 32
        before = Int32(0)
        for w in range_constexpr(WARPS):
            if w < warp:
                before = before + sWarp[w]
        for begin in cutlass.range(warp * span, (warp + 1) * span, 32, unroll=1):
            word = begin + lane
            rank = sRank[word] + before
            sRank[word] = rank
            rest = Uint32(sBitmap[word])
            while rest != 0:
                below = rest - 1
                block = word * WORD + Int32(cute.arch.popc(below & ~rest))
                blocks[rank] = block
                rank = rank + 1
                if rank == total:
                    sLast[0] = block
                rest = rest & below

    @cute.jit
    def set_bits(
        self,
        lists: cute.Tensor,
        first: Int32,
        last: Int32,
        kv_blocks: Int32,
        sBitmap: cute.Tensor,
        sRank: cute.Tensor,
        sBits: cute.Tensor,
        begin_word: Int32,  # the first word of bits of this part
        count: Int32,  # words of this part times tokens
        tokens: Int32,
    ):
        """Set the bits of the blocks of this part's words."""
        facts, tidx = self.facts, cute.arch.thread_idx()[0]
        per_warp = const_expr(32 // facts.lanes)  # lists that a warp reads at once
        shift = const_expr(facts.per_word.bit_length() - 1)  # a power of two
        lane = tidx % 32
        # All lanes of a warp have the same number of iterations, since they combine their bits
        for some in cutlass.range(first + tidx // 32 * per_warp, last + 1, facts.lists, unroll=1):
            token = some + lane // facts.lanes
            for start in cutlass.range(0, lists.shape[1], facts.lanes * facts.batch, unroll=1):
                found = self.load(lists, token, last, start + lane % facts.lanes, kv_blocks)
                for n in range_constexpr(facts.batch):
                    at, bit = Int32(-1), Int32(0)
                    if found[n] >= 0:
                        word = found[n] >> 5
                        below = sBitmap[word] & ((Int32(1) << (found[n] & 31)) - 1)
                        rank = sRank[word] + cute.arch.popc(below)
                        at = ((rank >> shift) - begin_word) * tokens + token - first
                        bit = Int32(1) << (rank & (facts.per_word - 1))
                        if at >= count:
                            at = Int32(-1)
                    if const_expr(facts.combines):
                        for _ in range_constexpr(ROUNDS):
                            at = combine(sBits, at, bit)
                    if at >= 0:
                        cute.arch.atomic_or(sBits.iterator + at, bit)
