"""The tables of small blocks, made on the GPU by one kernel: what tables.block_tables makes with forty.

One CTA a group of rows. Its tables lie in shared memory, so all that is read are the indices, three times:

    every block        sets the bits of its slices
    warp 0             counts the slices before each 32 of them: a scan
    every slice        that is needed goes to its place among those
    every block        sets its bit in the word of its segment and chunk
    warp s             for segment s, counts the blocks in all earlier chunks: a scan over the words
    every block        finds its place: the segment's first, plus the earlier chunks', plus the lower bits of its word

Works on every architecture: no TMA, no tensor cores.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.dtypes import NAMES_OF_INDEX
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from .tables import BlockTables, BlockTablesFacts, table_shapes
from .tile import CONSUMERS, Geometry

THREADS = 512
MOST_CHUNKS = 1536  # words and counts in 72 KB of shared memory: K up to 98,304
MOST_SLICES = 4 * MOST_CHUNKS  # of blocks 16 wide
WARP = 32


class BlockTablesKernel:
    """Compiles to one kernel per `BlockTablesFacts`."""

    def __init__(self, facts: BlockTablesFacts):
        self.g = Geometry.of_block(facts.bm, facts.bk, facts.b_k_major)
        self.segments = CONSUMERS * facts.cluster
        self.rows = self.segments * self.g.rows  # block rows of a group

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        col_indices: cute.Tensor,  # (nnz,)
        counts: cute.Tensor,  # (groups,)
        slices: cute.Tensor,  # (groups, slices of a row)
        words: cute.Tensor,  # (groups, chunks, 4 or 8)
        order: cute.Tensor,  # (nnz,)
        stream: cuda.CUstream,
    ):
        self.kernel(crow_indices, col_indices, counts, slices, words, order).launch(
            grid=(counts.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        counts: cute.Tensor,
        slices: cute.Tensor,
        words: cute.Tensor,
        order: cute.Tensor,
    ):
        segments, rows, parts = const_expr(self.segments), const_expr(self.rows), const_expr(self.g.parts)

        @cute.struct
        class Storage:
            starts: cute.struct.MemRange[Int32, rows + 1]
            needed: cute.struct.MemRange[Int32, MOST_SLICES // WARP]
            ranks: cute.struct.MemRange[Int32, MOST_SLICES // WARP]
            words: cute.struct.MemRange[Int32, MOST_CHUNKS * segments]
            before: cute.struct.MemRange[Int32, MOST_CHUNKS * segments]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sStarts = cute.make_tensor(storage.starts.data_ptr(), cute.make_layout(rows + 1))
        flat = cute.make_layout(MOST_SLICES // WARP)
        sNeeded = cute.make_tensor(storage.needed.data_ptr(), flat)  # a bit for each slice
        sRanks = cute.make_tensor(storage.ranks.data_ptr(), flat)  # needed slices before each 32
        table = cute.make_layout((MOST_CHUNKS, segments), stride=(segments, 1))
        sWords = cute.make_tensor(storage.words.data_ptr(), table)
        sBefore = cute.make_tensor(storage.before.data_ptr(), table)
        tidx, group = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = tidx // WARP, tidx % WARP
        all_slices = slices.shape[1]
        bunches = cute.ceil_div(all_slices, WARP)

        for i in cutlass.range(tidx, words.shape[1] * segments, THREADS):
            sWords[i // segments, i % segments] = 0
        for i in cutlass.range(tidx, bunches, THREADS):
            sNeeded[i] = 0
        if tidx <= rows:
            last = crow_indices.shape[0] - 1
            sStarts[tidx] = Int32(crow_indices[cutlass.min(group * rows + tidx, last)])
        cute.arch.sync_threads()

        begin, end = sStarts[0], sStarts[rows]
        for p in cutlass.range(begin + tidx, end, THREADS):
            for part in range_constexpr(parts):
                slice_ = Int32(col_indices[p]) * parts // self.g.gather + part
                cute.arch.atomic_or(storage.needed.data_ptr() + slice_ // WARP, Int32(1) << slice_ % WARP)
        cute.arch.sync_threads()

        if warp == 0:
            total = Int32(0)
            for first in cutlass.range(0, bunches, WARP):
                mine = Int32(0)
                if first + lane < bunches:
                    mine = cute.arch.popc(sNeeded[first + lane])
                sum_ = self.scan(mine, lane)
                if first + lane < bunches:
                    sRanks[first + lane] = total + sum_ - mine
                total += cute.arch.shuffle_sync(sum_, WARP - 1)
            if lane == 0:
                counts[group] = total
        cute.arch.sync_threads()

        for i in cutlass.range(tidx, all_slices, THREADS):
            if (sNeeded[i // WARP] >> i % WARP) & 1 != 0:
                slices[group, self.rank(i, sNeeded, sRanks)] = i
        for p in cutlass.range(begin + tidx, end, THREADS):
            segment, chunk, bit = self.place(p, col_indices, sStarts, sNeeded, sRanks)
            for part in range_constexpr(parts):
                at = storage.words.data_ptr() + ((chunk + part) * segments + segment)
                cute.arch.atomic_or(at, Int32(1) << bit)
        cute.arch.sync_threads()

        last = bunches - 1
        chunks = cute.ceil_div(sRanks[last] + cute.arch.popc(sNeeded[last]), self.g.slices)
        if warp < segments:
            total = Int32(0)
            for first in cutlass.range(0, chunks, WARP):
                chunk = first + lane
                mine = Int32(0)
                # A block wider than a chunk stands in `parts` words, and is counted in the first.
                if chunk < chunks and chunk % parts == 0:
                    mine = cute.arch.popc(sWords[chunk, warp])
                sum_ = self.scan(mine, lane)
                if chunk < chunks:
                    sBefore[chunk, warp] = total + sum_ - mine
                total += cute.arch.shuffle_sync(sum_, WARP - 1)
        for i in cutlass.range(tidx, chunks * segments, THREADS):
            words[group, i // segments, i % segments] = sWords[i // segments, i % segments]
        cute.arch.sync_threads()

        for p in cutlass.range(begin + tidx, end, THREADS):
            segment, chunk, bit = self.place(p, col_indices, sStarts, sNeeded, sRanks)
            lower = sWords[chunk, segment] & ((Int32(1) << bit) - 1)
            order[sStarts[segment * self.g.rows] + sBefore[chunk, segment] + cute.arch.popc(lower)] = p

    @cute.jit
    def scan(self, mine: Int32, lane: Int32):
        """The sum over this lane and all lower ones."""
        sum_ = mine
        for distance in range_constexpr(5):
            other = cute.arch.shuffle_sync_up(sum_, 1 << distance)
            if lane >= (1 << distance):
                sum_ += other
        return sum_

    def rank(self, slice_: Int32, sNeeded: cute.Tensor, sRanks: cute.Tensor) -> Int32:
        """How many needed slices come before this one."""
        lower = sNeeded[slice_ // WARP] & ((Int32(1) << slice_ % WARP) - 1)
        return sRanks[slice_ // WARP] + cute.arch.popc(lower)

    @cute.jit
    def place(
        self, p: Int32, col_indices: cute.Tensor, sStarts: cute.Tensor, sNeeded: cute.Tensor, sRanks: cute.Tensor
    ):
        """(segment, first chunk, bit) of stored block p."""
        row = Int32(0)
        for i in range_constexpr(1, self.rows):
            if sStarts[i] <= p:
                row += 1
        g, col = self.g, Int32(col_indices[p])
        rank = self.rank(col * g.parts // g.gather, sNeeded, sRanks)
        bit = row % g.rows * g.steps + rank % g.slices * g.gather + col % g.gather
        return row // g.rows, rank // g.slices, bit


def block_tables_on_gpu(
    crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], cluster: int, b_k_major: bool
) -> BlockTables:
    """tables.block_tables of a checked pattern on a GPU, for matrices of at most MOST_CHUNKS chunks; raises as it does.

    Places of `slices` and `words` past a group's count hold anything.
    """
    slices_shape, words_shape = table_shapes(shape, Geometry.of_block(*block, b_k_major), cluster)
    sizes = slices_shape[0], slices_shape, words_shape, max(1, len(col))
    counts, slices, words, order = (torch.empty(size, dtype=torch.int32, device=col.device) for size in sizes)
    facts = BlockTablesFacts(
        device_arch(col.get_device())[0].target, *block, NAMES_OF_INDEX[col.dtype], cluster, b_k_major
    )
    planner = function_for(facts)
    planner(crow, col if len(col) else col.new_zeros(1), counts, slices, words, order)
    return BlockTables(counts, slices, words, order)
