"""Kernels that deal the tiles of a block mask to processes, and count what these need of each other.

MarkTiles: a CTA for each row of tiles makes a bitmap of the tiles that it has blocks in, and counts the blocks.

DealTiles: a CTA for each deal and process. It makes bitmaps of each process's tiles, and of the tiles that its own one
needs: the bits of its rows, together. The place of a tile in a buffer is the number of bits before it. `balanced` is
computed first, as by distributed.deal: a cut is a prefix sum of the work along a ring of tiles, and the window of it
that comes closest to its share. With a capacity, needs are filled: tiles that are not needed are added, the first ones
first, until a process gets as many of each other, and all of its own.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.tile.bits import lowest_bit, set_bit

from .bits import load, ones
from .config import AHEAD, DEAL_THREADS, MOST_SIZE, MOST_TILES, MOST_WORDS, THREADS, WORD, ShardFacts

EACH = MOST_TILES // DEAL_THREADS  # most tiles of a thread
WORDS = MOST_TILES // WORD  # of a bitmap of tiles


class MarkTiles:
    """Compiles to the kernel of the step "rows"."""

    def __init__(self, facts: ShardFacts):
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        lists: tuple,  # of the mask: counts (B, H, Mq), columns (B, H, Mq, width), and those of full blocks
        bits: cute.Tensor,  # (tiles, words) int32
        work: cute.Tensor,  # (tiles,) int32
        per_row: Int32,  # rows of blocks of a tile
        per_column: Int32,
        end: Int32,  # columns of blocks; other numbers in the lists are ignored
        stream: cuda.CUstream,
    ):
        self.kernel(lists, bits, work, per_row, per_column, end).launch(
            grid=(work.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, lists: tuple, bits: cute.Tensor, work: cute.Tensor, per_row: Int32, per_column: Int32, end: Int32):
        tidx, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sBits = smem.allocate_tensor(Int32, cute.make_layout(WORDS), 16)
        sTotal = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        batch, heads, rows = lists[0].shape
        words, total = bits.shape[1], Int32(0)
        for i in cutlass.range(tidx, words, THREADS, unroll=1):
            sBits[i] = Int32(0)
        if tidx == 0:
            sTotal[0] = Int32(0)
        cute.arch.sync_threads()
        for i in cutlass.range(batch * heads * per_row, unroll=1):
            head, m = i // per_row, tile * per_row + i % per_row
            if m < rows:
                b, h = head // heads, head % heads
                for kind in range_constexpr(2):
                    count, listed = lists[2 * kind][b, h, m], lists[2 * kind + 1][b, h, m, None]
                    for start in cutlass.range(0, count, THREADS * AHEAD, unroll=1):
                        columns = load(listed, start, count, end)
                        for u in range_constexpr(AHEAD):
                            if columns[u] >= 0:
                                set_bit(sBits, columns[u] // per_column)
                                total = total + 1
        cute.arch.atomic_add(sTotal.iterator, total)
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, words, THREADS, unroll=1):
            bits[tile, i] = sBits[i]
        if tidx == 0:
            work[tile] = sTotal[0]


class DealTiles:
    """Compiles to the kernel of the step "deals"."""

    def __init__(self, facts: ShardFacts):
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        bits: cute.Tensor,  # (tiles, words) int32
        work: cute.Tensor,  # (tiles,) int32
        owners: cute.Tensor,  # (deals, tiles) int32: the process that has a tile, or -1
        cuts: cute.Tensor,  # (cuts, 3) int32 of `balanced`: first place of a ring, its tiles, and those cut off
        order: cute.Tensor,  # (size,) int32: the processes that have the pieces of `balanced`
        tiles: cute.Tensor,  # (deals, tiles) int64: those of each process, ascending
        places: cute.Tensor,  # (deals, size, tiles) int32: the place of a tile in a process's buffer, or -1
        counts: cute.Tensor,  # (deals, size, 1 + size) int32: work of a process, and tiles it gets of each
        balanced: Int32,  # the deal that is computed, or -1
        piece: Int32,  # its tiles of a process
        capacity: Int32,  # tiles that a process gets of each other, at most those of one, or -1: those that it needs
        stream: cuda.CUstream,
    ):
        self.kernel(bits, work, owners, cuts, order, tiles, places, counts, balanced, piece, capacity).launch(
            grid=(counts.shape[0] * counts.shape[1], 1, 1), block=(DEAL_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, bits: cute.Tensor, work: cute.Tensor, owners: cute.Tensor, cuts: cute.Tensor, order: cute.Tensor,
        tiles: cute.Tensor, places: cute.Tensor, counts: cute.Tensor, balanced: Int32, piece: Int32, capacity: Int32,
    ):  # fmt: skip
        tidx, number = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sKeys = smem.allocate_tensor(Int64, cute.make_layout(DEAL_THREADS), 16)
        sTiles = smem.allocate_tensor(Int32, cute.make_layout(MOST_TILES), 16)
        sSums = smem.allocate_tensor(Int32, cute.make_layout(MOST_TILES), 16)
        sOwned = smem.allocate_tensor(Int32, cute.make_layout(MOST_WORDS), 16)
        sNeed = smem.allocate_tensor(Int32, cute.make_layout(WORDS), 16)
        sCounts = smem.allocate_tensor(Int32, cute.make_layout(MOST_SIZE), 16)
        sLoad = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        warp, lane = cute.arch.make_warp_uniform(tidx // 32), tidx % 32
        size, words = counts.shape[1], bits.shape[1]
        d, p = number // size, number % size
        for i in cutlass.range(tidx, size * words, DEAL_THREADS, unroll=1):
            sOwned[i] = Int32(0)
        for i in cutlass.range(tidx, words, DEAL_THREADS, unroll=1):
            sNeed[i] = Int32(0)
        if tidx == 0:
            sLoad[0] = Int32(0)
        cute.arch.sync_threads()

        if d == balanced:
            for i in cutlass.range(tidx, size * piece, DEAL_THREADS, unroll=1):
                sTiles[i] = i
            cute.arch.sync_threads()
            for c in cutlass.range(cuts.shape[0], unroll=1):
                self.cut(work, cuts[c, 0], cuts[c, 1], cuts[c, 2], sTiles, sSums, sKeys)
            for i in cutlass.range(tidx, size * piece, DEAL_THREADS, unroll=1):
                set_bit(sOwned, order[i // piece] * words * WORD + sTiles[i])
        else:
            for t in cutlass.range(tidx, work.shape[0], DEAL_THREADS, unroll=1):
                owner = owners[d, t]
                if owner >= 0:
                    set_bit(sOwned, owner * words * WORD + t)
        cute.arch.sync_threads()

        sMine = cute.make_tensor(sOwned.iterator + p * words, cute.make_layout(WORDS))
        each = ones(sMine, sMine, words)
        for w in cutlass.range(tidx, words, DEAL_THREADS, unroll=1):
            place, rest = ones(sMine, sMine, w), sMine[w]
            while rest != 0:
                tile = w * WORD + lowest_bit(rest)
                sTiles[place] = tile
                tiles[d, p * each + place] = Int64(tile)
                rest = rest & (rest - 1)
                place = place + 1
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, each, DEAL_THREADS, unroll=1):
            cute.arch.atomic_add(sLoad.iterator, work[sTiles[i]])
        for w in cutlass.range(lane, words, 32, unroll=1):
            need = Int32(0)
            for i in cutlass.range(warp, each, DEAL_THREADS // 32, unroll=AHEAD):
                need = need | bits[sTiles[i], w]
            if need != 0:
                cute.arch.atomic_or(sNeed.iterator + w, need)
        cute.arch.sync_threads()

        for q in cutlass.range(tidx, size, DEAL_THREADS, unroll=1):
            sTheirs = cute.make_tensor(sOwned.iterator + q * words, cute.make_layout(WORDS))
            count = ones(sTheirs, sNeed, words)
            if capacity >= 0:
                wanted, w = capacity, Int32(0)
                if q == p:
                    wanted = each
                while (count < wanted) & (w < words):
                    free, added = sTheirs[w] & (sNeed[w] ^ -1), Int32(0)
                    while (count < wanted) & (free != 0):
                        added = added | (free & -free)
                        free = free & (free - 1)
                        count = count + 1
                    if added != 0:
                        cute.arch.atomic_or(sNeed.iterator + w, added)
                    w = w + 1
            sCounts[q] = count
            counts[d, p, 1 + q] = count
        if tidx == 0:
            counts[d, p, 0] = sLoad[0]
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, size * words, DEAL_THREADS, unroll=1):
            q, w = i // words, i % words
            sTheirs = cute.make_tensor(sOwned.iterator + q * words, cute.make_layout(WORDS))
            place = ones(sTheirs, sNeed, w)
            if q != p:
                for other in cutlass.range(q, unroll=1):
                    place = place + sCounts[other]
                if q < p:
                    place = place + sCounts[p]
            rest, need = sTheirs[w], sNeed[w]
            while rest != 0:
                found = Int32(-1)
                if (need & rest & -rest) != 0:
                    found = place
                    place = place + 1
                places[d, p, w * WORD + lowest_bit(rest)] = found
                rest = rest & (rest - 1)

    @cute.jit
    def cut(
        self, work: cute.Tensor, first: Int32, n: Int32, length: Int32, sTiles: cute.Tensor, sSums: cute.Tensor,
        sKeys: cute.Tensor,
    ):  # fmt: skip
        """Turn a ring of n tiles in shared memory so that the window of `length` tiles comes first whose work is
        closest to its share."""
        tidx, parts = cute.arch.thread_idx()[0], cute.make_rmem_tensor(EACH, Int32)
        for i in cutlass.range(tidx, n, DEAL_THREADS, unroll=1):
            sSums[i] = work[sTiles[first + i]]
        cute.arch.sync_threads()
        step = Int32(1)
        while step < n:
            for u in range_constexpr(EACH):
                i = tidx + u * DEAL_THREADS
                parts[u] = Int32(0)
                if (i >= step) & (i < n):
                    parts[u] = sSums[i - step]
            cute.arch.sync_threads()
            for u in range_constexpr(EACH):
                i = tidx + u * DEAL_THREADS
                if i < n:
                    sSums[i] = sSums[i] + parts[u]
            cute.arch.sync_threads()
            step = step * 2
        total, best = sSums[n - 1], Int64(2**62)
        for i in cutlass.range(tidx, n, DEAL_THREADS, unroll=1):
            last, inside = i + length - 1, Int32(0)
            if last >= n:
                last = last - n
                inside = total
            inside = inside + sSums[last]
            if i > 0:
                inside = inside - sSums[i - 1]
            away = Int64(n) * Int64(inside) - Int64(length) * Int64(total)
            if away < 0:
                away = -away
            best = cutlass.min(best, away * MOST_TILES + Int64(i))  # the first of equal ones
        sKeys[tidx] = best
        cute.arch.sync_threads()
        for step_down in range_constexpr(DEAL_THREADS.bit_length() - 1):
            half = DEAL_THREADS >> (step_down + 1)
            if tidx < half:
                sKeys[tidx] = cutlass.min(sKeys[tidx], sKeys[tidx + half])
            cute.arch.sync_threads()
        begin = Int32(sKeys[0] & (MOST_TILES - 1))
        for i in cutlass.range(tidx, n, DEAL_THREADS, unroll=1):
            at = begin + i
            if at >= n:
                at = at - n
            sSums[i] = sTiles[first + at]
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, n, DEAL_THREADS, unroll=1):
            sTiles[first + i] = sSums[i]
        cute.arch.sync_threads()
