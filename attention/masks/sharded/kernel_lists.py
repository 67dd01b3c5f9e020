"""The kernel that makes the block lists of one process's mask, and the lists of tiles that it sends and receives.

A CTA for each row of blocks lists the places of its blocks in the buffer, in ascending order. One for each process
lists the tiles that come from it, and those that go there.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.tile.bits import set_bit

from .bits import load, write_bits
from .config import AHEAD, LINE, THREADS, WORD, ShardFacts


class ListBlocks:
    """Compiles to the kernel of the step "lists"."""

    def __init__(self, facts: ShardFacts):
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        lists: tuple,  # as of MarkTiles
        tiles: cute.Tensor,  # (size, tiles of one) int64
        places: cute.Tensor,  # (size, tiles) int32
        needs: cute.Tensor,  # (size, 1 + size) int32, the counts of DealTiles
        moved: cute.Tensor,  # int64 (tiles,): own, sends and buffer of ContextParallelPlan
        q_tiles: cute.Tensor,  # (tiles of one,) int32: this process's
        k_tiles: cute.Tensor,  # int32 (tiles,): those of the buffer
        counts: cute.Tensor,  # (2, B, H, rows) int32: of partial and full blocks
        columns: cute.Tensor,  # (2, B, H, rows, columns) int32
        rank: Int32,
        per_row: Int32,
        per_column: Int32,
        cut_row: Int32,  # row of blocks that ends past the last row of scores, or -1
        end: Int32,  # as of MarkTiles
        stream: cuda.CUstream,
    ):
        rows = counts.shape[1] * counts.shape[2] * counts.shape[3]
        self.kernel(
            lists,
            tiles,
            places,
            needs,
            moved,
            q_tiles,
            k_tiles,
            counts,
            columns,
            rank,
            per_row,
            per_column,
            cut_row,
            end,
        ).launch(grid=(rows + tiles.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, lists: tuple, tiles: cute.Tensor, places: cute.Tensor, needs: cute.Tensor, moved: cute.Tensor,
        q_tiles: cute.Tensor, k_tiles: cute.Tensor, counts: cute.Tensor, columns: cute.Tensor, rank: Int32,
        per_row: Int32, per_column: Int32, cut_row: Int32, end: Int32,
    ):  # fmt: skip
        number, smem = cute.arch.block_idx()[0], cutlass.memory.SmemAllocator()
        sBits = smem.allocate_tensor(Int32, cute.make_layout(2 * LINE), 16)
        batch, heads, rows = counts.shape[1], counts.shape[2], counts.shape[3]
        if number < batch * heads * rows:
            m, head = number % rows, number // rows
            b, h = head // heads, head % heads
            row = Int32(tiles[rank, m // per_row]) * per_row + m % per_row
            self.mark(lists, b, h, row, places[rank, None], per_column, cut_row, end, sBits)
            warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
            if warp < 2:
                sKind = cute.make_tensor(sBits.iterator + warp * LINE, cute.make_layout(LINE))
                count = write_bits(columns[warp, b, h, m, None], sKind)
                if cute.arch.lane_idx() == 0:
                    counts[warp, b, h, m] = count
        else:
            self.move(number - batch * heads * rows, rank, tiles, places, needs, moved, q_tiles, k_tiles)

    @cute.jit
    def mark(
        self, lists: tuple, b: Int32, h: Int32, row: Int32, places: cute.Tensor, per_column: Int32, cut_row: Int32,
        end: Int32, sBits: cute.Tensor,
    ):  # fmt: skip
        """Set a bit for each partial block of a row, at its place in the buffer, and behind these for the full ones."""
        tidx = cute.arch.thread_idx()[0]
        for i in cutlass.range(tidx, 2 * LINE, THREADS, unroll=1):
            sBits[i] = Int32(0)
        cute.arch.sync_threads()
        if row < lists[0].shape[2]:
            for kind in range_constexpr(2):
                begin = Int32(kind * LINE * WORD)
                if row == cut_row:
                    begin = Int32(0)
                count, listed = lists[2 * kind][b, h, row], lists[2 * kind + 1][b, h, row, None]
                for start in cutlass.range(0, count, THREADS * AHEAD, unroll=1):
                    columns = load(listed, start, count, end)
                    for u in range_constexpr(AHEAD):
                        column = columns[u]
                        if column >= 0:
                            columns[u] = begin + places[column // per_column] * per_column + column % per_column
                    for u in range_constexpr(AHEAD):
                        if columns[u] >= 0:
                            set_bit(sBits, columns[u])
        cute.arch.sync_threads()

    @cute.jit
    def move(
        self, q: Int32, rank: Int32, tiles: cute.Tensor, places: cute.Tensor, needs: cute.Tensor, moved: cute.Tensor,
        q_tiles: cute.Tensor, k_tiles: cute.Tensor,
    ):  # fmt: skip
        """List the tiles that come from process q, and those that go there."""
        tidx, each = cute.arch.thread_idx()[0], tiles.shape[1]
        buffer = moved.shape[0] - k_tiles.shape[0]
        for i in cutlass.range(tidx, each, THREADS, unroll=1):
            tile = Int32(tiles[q, i])
            place = places[rank, tile]
            if place >= 0:
                moved[buffer + place] = Int64(tile)
                k_tiles[place] = tile
            if q == rank:
                q_tiles[i] = tile
                if place >= 0:
                    moved[place] = Int64(i)
        if q != rank:
            begin = needs[rank, 1 + rank]  # of what goes to q: after this process's own tiles and what goes to others
            first = Int32(0)  # place of this process's tiles in the buffer of q: after q's own and those of others
            for other in cutlass.range(tiles.shape[0], unroll=1):
                if (other < q) & (other != rank):
                    begin = begin + needs[other, 1 + rank]
                if other < rank:
                    first = first + needs[q, 1 + other]
            if rank < q:
                first = first + needs[q, 1 + q]
            for i in cutlass.range(tidx, each, THREADS, unroll=1):
                place = places[q, Int32(tiles[rank, i])]
                if place >= 0:
                    moved[begin + place - first] = Int64(i)
