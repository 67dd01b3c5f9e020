"""The plan of pairs of block rows, made on the GPU by one kernel: what tables.pair_tables makes with thirty.

One CTA a pair. Each row of it is a bitmap over the block columns, in shared memory:

    every block        sets its bit in its row's bitmap
    warps 0, 1, 2      count the columns of both rows, of the upper row alone, of the lower row alone: a scan over words
    every block        finds its entry's place, and the other row's block: counts up to its word, and bits below its own

Works on every architecture: no TMA, no tensor cores.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, range_constexpr

from cute_kernels.dtypes import NAMES_OF_INDEX
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from .tables import PairTables, PairTablesFacts

THREADS = 256
WARP = 32
MOST_WORDS = 2048  # 40 KB of shared memory
MOST_COLUMNS = 32 * MOST_WORDS


class PairTablesKernel:
    """Compiles to one kernel per `PairTablesFacts`."""

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        col_indices: cute.Tensor,  # (nnz,)
        ends: cute.Tensor,  # (pairs, 3)
        entries: cute.Tensor,  # (3, nnz)
        columns: Int32,
        nnz: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(crow_indices, col_indices, ends, entries, columns, nnz).launch(
            grid=(ends.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        ends: cute.Tensor,
        entries: cute.Tensor,
        columns: Int32,
        nnz: Int32,
    ):
        @cute.struct
        class Storage:
            bits: cute.struct.MemRange[Int32, 2 * MOST_WORDS]
            before: cute.struct.MemRange[Int32, 3 * MOST_WORDS]
            totals: cute.struct.MemRange[Int32, 3]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        bits = storage.bits.data_ptr()
        sBits = cute.make_tensor(bits, cute.make_layout((2, MOST_WORDS), stride=(MOST_WORDS, 1)))
        sBefore = cute.make_tensor(storage.before.data_ptr(), cute.make_layout((3, MOST_WORDS), stride=(MOST_WORDS, 1)))
        sTotals = cute.make_tensor(storage.totals.data_ptr(), cute.make_layout(3))
        tidx, pair = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = tidx // WARP, tidx % WARP
        words = (columns + 31) // 32

        for i in cutlass.range(tidx, words, THREADS):
            sBits[0, i] = 0
            sBits[1, i] = 0
        cute.arch.sync_threads()

        begin, middle = Int32(crow_indices[2 * pair]), Int32(crow_indices[2 * pair + 1])
        end = Int32(crow_indices[cutlass.min(2 * pair + 2, crow_indices.shape[0] - 1)])
        for p in cutlass.range(begin + tidx, end, THREADS):
            col = Int32(col_indices[p])
            row = Int32(0)
            if p >= middle:
                row = Int32(1)
            cute.arch.atomic_or(bits + (row * MOST_WORDS + col // 32), Int32(1) << col % 32)
        cute.arch.sync_threads()

        for kind in range_constexpr(3):
            if warp == kind:
                total = Int32(0)
                for first in cutlass.range(0, words, WARP):
                    word = first + lane
                    mine = Int32(0)
                    if word < words:
                        mine = cute.arch.popc(self.word(sBits, word, kind))
                    sum_ = mine
                    for distance in range_constexpr(5):
                        other = cute.arch.shuffle_sync_up(sum_, 1 << distance)
                        if lane >= (1 << distance):
                            sum_ += other
                    if word < words:
                        sBefore[kind, word] = total + sum_ - mine
                    total += cute.arch.shuffle_sync(sum_, WARP - 1)
                if lane == 0:
                    sTotals[kind] = total
        cute.arch.sync_threads()

        both = sTotals[0]
        upper = both + sTotals[1]
        if tidx == 0:
            ends[pair, 0] = both
            ends[pair, 1] = upper
            ends[pair, 2] = upper + sTotals[2]
        for p in cutlass.range(begin + tidx, end, THREADS):
            col = Int32(col_indices[p])
            word, below = col // 32, (Int32(1) << col % 32) - 1
            shared = (self.word(sBits, word, 0) >> col % 32) & 1
            ranks = [sBefore[kind, word] + cute.arch.popc(self.word(sBits, word, kind) & below) for kind in range(3)]
            if p < middle:
                place, lower = both + ranks[1], nnz
                if shared != 0:
                    place, lower = ranks[0], middle + ranks[0] + ranks[2]
                self.put(entries, begin + place, col, p, lower)
            elif shared == 0:
                self.put(entries, begin + upper + ranks[2], col, nnz, p)

    @cute.jit
    def word(self, sBits: cute.Tensor, word: Int32, kind: cutlass.Constexpr):
        """32 columns that both rows have (0), the upper row alone (1), the lower row alone (2)."""
        shared = sBits[0, word] & sBits[1, word]
        return shared if kind == 0 else sBits[kind - 1, word] ^ shared

    @cute.jit
    def put(self, entries: cute.Tensor, place: Int32, col: Int32, upper: Int32, lower: Int32):
        entries[0, place] = col
        entries[1, place] = upper
        entries[2, place] = lower


def pair_tables_on_gpu(crow: torch.Tensor, col: torch.Tensor, columns: int) -> PairTables:
    """tables.pair_tables of a checked pattern on a GPU, for at most MOST_COLUMNS columns."""
    pairs, nnz = len(crow) // 2, len(col)
    ends, entries = (torch.empty(size, dtype=torch.int32, device=col.device) for size in ((pairs, 3), (3, max(1, nnz))))
    facts = PairTablesFacts(device_arch(col.get_device())[0].target, NAMES_OF_INDEX[col.dtype])
    planner = function_for(facts)
    planner(crow, col if nnz else col.new_zeros(1), ends, entries, columns, nnz)
    return PairTables(ends, entries)
