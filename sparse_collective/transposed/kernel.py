"""The index of a transposed pattern, made on the GPU by one kernel: what tables.transposed_index makes with a dozen.

One CTA for a few block columns of an item. As the columns of a block row ascend, those of the CTA are one run of each
row, which two binary searches find. Each column is a bitmap over the block rows, in shared memory:

    every row          counts its blocks in earlier columns, and sets a bit for each of its own
    all                add up the former: where the CTA's first column begins; a scan over the bitmaps' words: how many
                       blocks come before each word, first by column and then by row
    every row          finds its blocks' places: the scan up to their word, and bits below their own

Sums of integers and bits are all that threads add to, so the order in which they do decides nothing. Works on every
architecture: no TMA, no tensor cores.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from cute_kernels.dtypes import NAMES_OF_INDEX
from cute_kernels.runtime.derived import written
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from ..scan import WARP, exclusive_scan
from .tables import TransposedFacts, TransposedIndex

THREADS = 512
MOST_WORDS = 8192  # of a CTA's bitmaps: they and their sums are 64 KB of shared memory
MOST_ROWS = WARP * MOST_WORDS
MOST_ITEMS = 65_535  # of a grid's second mode
CTAS = 128  # for each item, where columns and bitmaps allow: each searches every row once


class TransposedKernel:
    """Compiles to one kernel per `TransposedFacts`."""

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (items, rows + 1)
        col_indices: cute.Tensor,  # (nnz,)
        starts: cute.Tensor,  # (items, cols + 1)
        rows: cute.Tensor,  # (nnz,): block rows, column by column
        numbers: cute.Tensor,  # (nnz,)
        width: Int32,  # columns of a CTA
        stream: cuda.CUstream,
    ):
        items, ends = starts.shape
        self.kernel(crow_indices, col_indices, starts, rows, numbers, width).launch(
            grid=(cute.ceil_div(ends - 1, width), items, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        starts: cute.Tensor,
        rows: cute.Tensor,
        numbers: cute.Tensor,
        width: Int32,
    ):
        @cute.struct
        class Storage:
            bits: cute.struct.MemRange[Int32, MOST_WORDS]
            before: cute.struct.MemRange[Int32, MOST_WORDS]
            totals: cute.struct.MemRange[Int32, WARP]
            earlier: cute.struct.MemRange[Int32, 1]

        self.smem_bytes = Storage.size_in_bytes()
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        bits, earlier = storage.bits.data_ptr(), storage.earlier.data_ptr()
        sBits = cute.make_tensor(bits, cute.make_layout(MOST_WORDS))  # (columns, words of a column)
        sBefore = cute.make_tensor(storage.before.data_ptr(), cute.make_layout(MOST_WORDS))
        sTotals = cute.make_tensor(storage.totals.data_ptr(), cute.make_layout(WARP))
        sEarlier = cute.make_tensor(earlier, cute.make_layout(1))  # blocks of the item in earlier columns
        tidx, item = cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        first = cute.arch.block_idx()[0] * width
        cols, n_rows = starts.shape[1] - 1, crow_indices.shape[1] - 1
        here = cutlass.min(width, cols - first)
        words = (n_rows + 31) // 32  # of a column

        for i in cutlass.range(tidx, here * words, THREADS):
            sBits[i] = 0
        if tidx == 0:
            sEarlier[0] = 0
        cute.arch.sync_threads()

        earlier_here = Int32(0)
        for row in cutlass.range(tidx, n_rows, THREADS):
            begin, p, q = self.run(crow_indices, col_indices, item, row, first, first + here)
            earlier_here += p - begin
            for i in cutlass.range(p, q):
                word = (Int32(col_indices[i]) - first) * words + row // 32
                cute.arch.atomic_or(bits + word, Int32(1) << row % 32)
        cute.arch.atomic_add(earlier, earlier_here)
        cute.arch.sync_threads()

        for i in cutlass.range(tidx, here * words, THREADS):
            sBefore[i] = cute.arch.popc(sBits[i])
        total = exclusive_scan(sBefore, here * words, sTotals, tidx, THREADS)
        start = Int32(crow_indices[item, 0]) + sEarlier[0]
        for i in cutlass.range(tidx, here, THREADS):
            starts[item, first + i] = start + sBefore[i * words]
        if tidx == 0 and first + here == cols:
            starts[item, cols] = start + total
        for row in cutlass.range(tidx, n_rows, THREADS):
            _, p, q = self.run(crow_indices, col_indices, item, row, first, first + here)
            for i in cutlass.range(p, q):
                word = (Int32(col_indices[i]) - first) * words + row // 32
                lower = sBits[word] & ((Int32(1) << row % 32) - 1)
                place = start + sBefore[word] + cute.arch.popc(lower)
                rows[place] = row
                numbers[place] = i

    @cute.jit
    def run(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        item: Int32,
        row: Int32,
        first: Int32,
        end: Int32,
    ):
        """(where the row begins, where its blocks in columns from `first` on do, where those before `end` end)."""
        begin, stop = Int32(crow_indices[item, row]), Int32(crow_indices[item, row + 1])
        p = self.lower_bound(col_indices, begin, stop, first)
        return begin, p, self.lower_bound(col_indices, p, stop, end)

    @cute.jit
    def lower_bound(self, col_indices: cute.Tensor, low: Int32, high: Int32, column: Int32):
        """The first place in [low, high) of at least this column; high if there is none."""
        while low < high:
            middle = low + (high - low) // 2
            if Int32(col_indices[middle]) < column:
                low = middle + 1
            else:
                high = middle
        return low


def fits(crow: torch.Tensor, nnz: int, cols: int) -> bool:
    """Whether the kernel serves a pattern, of which the arguments are transposed_index_on_gpu's."""
    items = 1 if crow.dim() == 1 else len(crow)
    return nnz > 0 and cols > 0 and crow.shape[-1] - 1 <= MOST_ROWS and items <= MOST_ITEMS


def columns_of_a_cta(rows: int, cols: int) -> int:
    """So many that their bitmaps fit, and that there are some CTAS of them."""
    return min(MOST_WORDS // -(-rows // WARP), -(-cols // CTAS))


def transposed_index_on_gpu(crow: torch.Tensor, col: torch.Tensor, cols: int) -> tuple[TransposedIndex, Callable]:
    """family.index_of a checked pattern on a GPU, for patterns that `fits`."""
    starts = torch.empty((*crow.shape[:-1], cols + 1), dtype=col.dtype, device=col.device)
    rows, numbers = torch.empty_like(col), torch.empty(len(col), dtype=torch.int32, device=col.device)
    facts = TransposedFacts(device_arch(col.get_device())[0].target, NAMES_OF_INDEX[col.dtype])
    width = columns_of_a_cta(crow.shape[-1] - 1, cols)
    starts_of_items = starts if starts.dim() == 2 else starts[None]
    function = function_for(facts)

    def make(crow, col) -> None:
        function(crow if crow.dim() == 2 else crow[None], col, starts_of_items, rows, numbers, width)

    def again(W) -> None:
        make(W.crow_indices, W.col_indices)
        written(starts, rows, numbers)  # for the tables that are made of these

    make(crow, col)
    return TransposedIndex(starts, rows, numbers), again
