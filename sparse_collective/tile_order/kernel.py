"""The order of work tiles, made on the GPU by one kernel: the very table that reference.work_order makes with hundreds.

    every row           gets its rank, the longest first: a bitonic sort in shared memory
    every item          finds its slot by arithmetic (`Placement`), and adds its cost to it
    chunk after chunk   every worker counts those with less work so far, and takes the slot of that number
    every item          finds its slot again, which now tells the worker, and is stored

An item is a work tile. A chunk is a few rounds that are assigned at once, and a slot is what one worker gets of a
chunk: an item of each of its rounds. All CTAs do the same, so that nothing passes between them, but for the last step,
which they share. With one CTA a tile there are no workers to assign to, and an item's place is arithmetic alone.

Works on every architecture: no TMA, no tensor cores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dtypes import NAMES_OF_INDEX
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from .config import OrderFacts
from .reference import LONG, MOST_CHUNKS, OVERHEAD

WARP = 32
THREADS = 1024
HELPERS = 4  # threads that count for one worker
MOST_WORKERS = THREADS // HELPERS
MOST_ROWS = 8192  # 64 KB of the 99 KB of shared memory that every architecture has; slots are 32 KB
MOST_ITEMS = 2**30  # numbers are 32 bits wide
MOST_CTAS = 32
ITEMS_A_THREAD = 4  # stored
NOBODY = 2**31 - 1  # more work than anybody has
NO_ROW = 2**63 - 1  # sorts behind every row


class Mark(NamedTuple):
    """How much of a class of rows, the long or the short, comes before some position of the order."""

    columns: Int32  # columns of tiles of the complete panels, over all batches
    rest: Int32  # items of the panel that has begun
    width: Int32  # its columns

    def items(self, height):
        """Items before the position, of the class's `height` longest row tiles."""
        return self.columns * height + cutlass.min(self.rest, height * self.width)


@dataclass(frozen=True)
class Divisors:
    """What all items are divided by: numbers, or in a kernel cute.FastDivmodDivisorV2, a multiplication and a shift."""

    tiles_m: Any
    row_tiles: Any
    tiles_n: Any
    group: Any
    workers: Any
    chunk: Any


@dataclass(frozen=True)
class Placement:
    """Where items come, without sorting them: arithmetic on row tiles whose rows are sorted already.

    The order before workers are chosen: long rows, then short ones; of each, panel by panel, a panel's row tiles by
    length, and of a row tile the panel's columns. `chunk_items` of its items make a chunk. Sorted by row tile they fill
    its rounds.

    Numbers of the kernel or of the host, where the tests go through the same arithmetic.
    """

    tiles_m: Int32
    row_tiles: Int32
    tiles_n: Int32
    batch: Int32
    group: Int32
    workers: Int32
    rounds: Int32  # of a chunk, at most
    by: Divisors

    @property
    def chunk_items(self):
        return self.rounds * self.workers

    @property
    def columns(self):
        return self.tiles_n * self.batch

    @property
    def items(self):
        return self.tiles_m * self.columns

    def mark(self, position, long, short):
        """The Mark of a position in one class; `long` row tiles are of long rows, `short` is 1 for the others."""
        height = self.height(long, short)
        local = cutlass.min(cutlass.max(position - short * long * self.columns, 0), height * self.columns)
        some = cutlass.max(height, 1)  # a class without rows has no items to divide
        l = local // (some * self.tiles_n)
        local = local - l * some * self.tiles_n
        first = local // (some * self.group) * self.group
        return Mark(l * self.tiles_n + first, local - first * some, self.width(first))

    def height(self, long, short):
        """Row tiles of a class."""
        return long + short * (self.tiles_m - 2 * long)

    def width(self, first):
        """Columns of the panel that begins with column `first`."""
        return cutlass.min(self.group, self.tiles_n - first)

    def split(self, index):
        """(column, row tile) of the items in an order that is easily computed; the longest row tile is 0."""
        column = index // self.by.tiles_m
        return column, index - column * self.tiles_m

    def class_of(self, tile, long):
        """(1 for a short row, the row tile's number in its class)."""
        short = cutlass.min(cutlass.max(tile - long + 1, 0), 1)
        return short, tile - short * long

    def position(self, column, tile, long):
        """Where in the order an item comes, before workers are chosen."""
        short, tile = self.class_of(tile, long)
        l = column // self.by.tiles_n
        n = column - l * self.tiles_n
        first = n // self.by.group * self.group
        panel = short * long * self.columns + self.height(long, short) * (l * self.tiles_n + first)
        return panel + tile * self.width(first) + n - first

    def place(self, column, tile, long, chunk, begin: Mark, end: Mark):
        """Which of its chunk's items an item is, sorted by row tile; `begin` and `end` are the chunk's, of its class.

        Before it come all long items if it is short, its class's longer row tiles, and its row tile's columns so far:
        of each as many as come before the chunk's end, less those before its begin.
        """
        short, tile = self.class_of(tile, long)
        longs = long * self.columns
        before = cutlass.min((chunk + 1) * self.chunk_items, longs) - cutlass.min(chunk * self.chunk_items, longs)
        return short * before + end.items(tile) - begin.items(tile + 1) + column

    def slot(self, place, chunk):
        """(round, slot) of a chunk's item: to and fro, but for the last round, as nobody may miss one before it."""
        round_ = place // self.by.workers  # of the chunk
        slot = place - round_ * self.workers
        total = (self.items + self.workers - 1) // self.by.workers
        last = cutlass.min(self.rounds, total - chunk * self.rounds) - 1
        back = cutlass.min(cutlass.max(last - round_, 0), round_ & 1)
        return chunk * self.rounds + round_, slot + back * (self.workers - 1 - 2 * slot)


def pair(i, bit):
    """The i-th two places that differ in this bit alone."""
    low = ((i >> bit) << (bit + 1)) | (i & ((1 << bit) - 1))
    return low, low | (1 << bit)


class TileOrderKernel:
    """Compiles to one kernel per `OrderFacts`."""

    def __init__(self, facts: OrderFacts):
        self.to_workers = facts.to_workers

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        order: cute.Tensor,  # (entries, 2): whole rounds of workers
        row_tiles: Int32,
        steps: Int32,
        tiles_n: Int32,
        batch: Int32,
        group: Int32,  # at most tiles_n
        workers: Int32,
        bits: Int32,  # 2**bits is at least the number of rows
        stream: cuda.CUstream,
    ):
        entries = order.shape[0]
        rounds = cute.ceil_div(cute.ceil_div(entries, workers), MOST_CHUNKS)
        tiles_m = (crow_indices.shape[0] - 1) * row_tiles
        sizes = tiles_m, row_tiles, tiles_n, group, workers, rounds * workers
        by = Divisors(*(cute.fast_divmod_create_divisor_v2(size) for size in sizes))
        placement = Placement(tiles_m, row_tiles, tiles_n, batch, group, workers, rounds, by)
        ctas = cutlass.min(cute.ceil_div(entries, ITEMS_A_THREAD * THREADS), MOST_CTAS)
        self.kernel(crow_indices, order, placement, steps, bits).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, crow_indices: cute.Tensor, order: cute.Tensor, placement: Placement, steps: Int32, bits: Int32):
        places = const_expr(MOST_CHUNKS * MOST_WORKERS if self.to_workers else 1)

        @cute.struct
        class Storage:
            keys: cute.struct.MemRange[Int64, MOST_ROWS]
            slots: cute.struct.MemRange[Int32, places]
            loads: cute.struct.Align[cute.struct.MemRange[Int32, MOST_WORKERS], 16]
            marks: cute.struct.MemRange[Int32, (MOST_CHUNKS + 1) * 2 * 3]
            long: cute.struct.MemRange[Int32, 1]

        self.smem_bytes = Storage.size_in_bytes()
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sKeys = cute.make_tensor(storage.keys.data_ptr(), cute.make_layout(MOST_ROWS))
        sLong = cute.make_tensor(storage.long.data_ptr(), cute.make_layout(1))
        tidx, bidx, ctas = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

        self.sort_rows(crow_indices, sKeys, sLong, steps, bits, tidx)
        long = sLong[0] * placement.row_tiles
        if const_expr(self.to_workers):
            table = cute.make_layout((MOST_CHUNKS, MOST_WORKERS), stride=(MOST_WORKERS, 1))
            sSlots = cute.make_tensor(storage.slots.data_ptr(), table)  # cost, then worker, of each slot
            sLoads = cute.make_tensor(storage.loads.data_ptr(), cute.make_layout(MOST_WORKERS))
            sMarks = cute.make_tensor(storage.marks.data_ptr(), cute.make_layout((MOST_CHUNKS + 1, 2, 3)))
            chunks = cute.ceil_div(order.shape[0], placement.chunk_items)
            for i in cutlass.range(tidx, chunks * MOST_WORKERS, THREADS):
                sSlots[i // MOST_WORKERS, i % MOST_WORKERS] = 0
            if tidx < MOST_WORKERS:
                sLoads[tidx] = tidx if tidx < placement.workers else NOBODY
            if tidx <= chunks:
                for short in range_constexpr(2):
                    mark = placement.mark(cutlass.min(tidx * placement.chunk_items, placement.items), long, short)
                    for part in range_constexpr(3):
                        sMarks[tidx, short, part] = mark[part]
            cute.arch.sync_threads()

            for i in cutlass.range(tidx, placement.items, THREADS):
                column, tile = placement.split(i)
                chunk, _, slot = self.find(placement, column, tile, long, sMarks)
                cost = -Int32(sKeys[tile // placement.by.row_tiles] >> 32)
                cute.arch.atomic_add(storage.slots.data_ptr() + (chunk * MOST_WORKERS + slot), cost)
            cute.arch.sync_threads()
            self.assign_slots(sSlots, sLoads, chunks, placement.workers, tidx)

        for i in cutlass.range(bidx * THREADS + tidx, placement.items, THREADS * ctas):
            column, tile = placement.split(i)
            rank = tile // placement.by.row_tiles
            if const_expr(self.to_workers):
                chunk, round_, slot = self.find(placement, column, tile, long, sMarks)
                entry = round_ * placement.workers + sSlots[chunk, slot]
            else:
                entry = placement.position(column, tile, long)
            order[entry, 0] = Int32(sKeys[rank]) * placement.row_tiles + tile - rank * placement.row_tiles
            order[entry, 1] = column
        if const_expr(self.to_workers):
            # The last round's last slots have no item.
            if bidx == 0 and tidx < order.shape[0] - placement.items:
                slot = placement.workers - 1 - tidx
                entry = order.shape[0] - placement.workers + sSlots[chunks - 1, slot]
                order[entry, 0] = -1
                order[entry, 1] = -1

    @cute.jit
    def sort_rows(
        self,
        crow_indices: cute.Tensor,
        sKeys: cute.Tensor,  # (MOST_ROWS,): -cost << 32 | row, ascending
        sLong: cute.Tensor,  # (1,): how many rows are long
        steps: Int32,
        bits: Int32,
        tidx: Int32,
    ):
        rows = crow_indices.shape[0] - 1
        if tidx == 0:
            sLong[0] = 0
        cute.arch.sync_threads()
        total = Int64(Int32(crow_indices[rows]) - Int32(crow_indices[0])) * steps + rows * OVERHEAD
        for row in cutlass.range(tidx, Int32(1) << bits, THREADS):
            key = Int64(NO_ROW)
            if row < rows:
                cost = (Int32(crow_indices[row + 1]) - Int32(crow_indices[row])) * steps + OVERHEAD
                key = (Int64(-cost) << 32) | Int64(row)
                if Int64(cost) * rows >= total * LONG:
                    cute.arch.atomic_add(sLong.iterator, 1)
            sKeys[row] = key
        cute.arch.sync_threads()
        for k in cutlass.range(1, bits + 1):
            for j in cutlass.range(k):
                for i in cutlass.range(tidx, Int32(1) << (bits - 1), THREADS):
                    low, high = pair(i, k - 1 - j)
                    a, b = sKeys[low], sKeys[high]
                    if (a > b) == ((low >> k) & 1 == 0):  # runs of 2**k ascend and descend in turn
                        sKeys[low] = b
                        sKeys[high] = a
                cute.arch.sync_threads()

    @cute.jit
    def find(self, placement: Placement, column: Int32, tile: Int32, long: Int32, sMarks: cute.Tensor):
        """(chunk, round, slot) of an item."""
        chunk = placement.position(column, tile, long) // placement.by.chunk
        short, _ = placement.class_of(tile, long)
        begin = Mark(*(sMarks[chunk, short, part] for part in range(3)))
        end = Mark(*(sMarks[chunk + 1, short, part] for part in range(3)))
        round_, slot = placement.slot(placement.place(column, tile, long, chunk, begin, end), chunk)
        return chunk, round_, slot

    @cute.jit
    def assign_slots(
        self,
        sSlots: cute.Tensor,  # (MOST_CHUNKS, MOST_WORKERS): costs; becomes workers
        sLoads: cute.Tensor,  # (MOST_WORKERS,): work so far * MOST_WORKERS + worker
        chunks: Int32,
        workers: Int32,
        tidx: Int32,
    ):
        """In each chunk the worker with the r-th least work gets slot r; of equals the first worker comes first.

        Beyond 2**23 K-tiles a worker, seconds of work, keys wrap: still an order, no longer the best one.
        """
        worker, helper = tidx // HELPERS, tidx % HELPERS
        others = workers
        if tidx >= cute.round_up(workers * HELPERS, WARP):
            others = 0
        for chunk in cutlass.range(chunks):
            mine = sLoads[worker]
            rank = Int32(0)
            for first in cutlass.range(helper * 4, others, HELPERS * 4):
                for i in range_constexpr(4):  # one load of 16 bytes
                    rank += Int32(sLoads[first + i] < mine)
            for distance in range_constexpr(HELPERS.bit_length() - 1):
                rank += cute.arch.shuffle_sync_bfly(rank, 1 << distance)
            cute.arch.sync_threads()
            if helper == 0 and worker < workers:
                sLoads[worker] = mine + sSlots[chunk, rank] * MOST_WORKERS
                sSlots[chunk, rank] = worker
            cute.arch.sync_threads()


def fits(rows: int, *, row_tiles: int, tiles_n: int, batch: int, workers: int | None, **_) -> bool:
    """Whether the kernel serves a problem, of which the arguments are work_order_on_gpu's."""
    items = rows * row_tiles * tiles_n * batch
    return rows <= MOST_ROWS and 1 <= items <= MOST_ITEMS and (workers or 1) <= MOST_WORKERS


def work_order_on_gpu(
    crow: torch.Tensor, *, row_tiles: int, steps: int, tiles_n: int, batch: int, group: int, workers: int | None
) -> tuple[torch.Tensor, Callable]:
    """reference.work_order of a checked pattern on a GPU, for problems that `fits`; and what makes it of other rows."""
    rows, to_workers = len(crow) - 1, workers is not None
    workers = workers or 1
    entries = -(-rows * row_tiles * tiles_n * batch // workers) * workers
    order = torch.empty((entries, 2), dtype=torch.int32, device=crow.device)
    facts = OrderFacts(device_arch(crow.get_device())[0].target, NAMES_OF_INDEX[crow.dtype], to_workers)
    bits = max(1, (rows - 1).bit_length())
    function, numbers = function_for(facts), (row_tiles, steps, tiles_n, batch, min(group, tiles_n), workers, bits)

    def again(crow: torch.Tensor) -> None:
        function(crow, order, *numbers)

    again(crow)
    return order, again
