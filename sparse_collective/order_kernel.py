"""The order of work tiles, made on the GPU by one kernel: what balance.work_order makes with some hundred, to the bit.

    every thread        reads rows' lengths; a bitonic sort in shared memory ranks them, the longest first
    every item          finds its place in the order by arithmetic (`Deal`), and adds its cost to its card's
    deal after deal     every worker counts those with less work so far, and takes the card of that number
    every item          finds its place once more, and so its round and its worker

A card is what a deal gives one worker: an item, or one of each of several rounds. All CTAs do the same but for the last
step, which they share: nothing passes between them. Costs are counted in int32 K-tiles.

Works on every architecture: no TMA, no tensor cores.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.dtypes import NAMES_OF_INDEX
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.runtime.plan import device_arch

from .balance import LONG, MOST_DEALS, OVERHEAD

THREADS = 1024
HELPERS = 4  # threads that count for one worker
MOST_WORKERS = THREADS // HELPERS
MOST_ROWS = 8192  # keys of eight bytes, of the 99 KB of shared memory that every architecture has
MOST_SLOTS = 2**30
MOST_CTAS = 32
SLOTS_A_THREAD = 4
NO_ROW = 2**63 - 1  # sorts behind every row


@dataclass(frozen=True)
class OrderFacts:
    """What an order kernel is compiled from."""

    arch: str
    index_dtype: str
    dealt: bool  # to workers; else the order alone counts


class Mark(NamedTuple):
    """How much of a class of rows, the long or the short, comes before some position of the order."""

    columns: Int32  # columns of tiles of the complete panels, over all batches
    rest: Int32  # items of the panel that has begun
    width: Int32  # its columns

    def items(self, height):
        """Items before the position, of the class's `height` longest row tiles."""
        return self.columns * height + cutlass.min(self.rest, height * self.width)


@dataclass(frozen=True)
class Deal:
    """Where items come, without sorting them: arithmetic on row tiles whose rows are sorted already.

    The order before it is dealt: long rows, then short ones; of each, panel by panel, a panel's row tiles by length, and
    of a row tile the panel's columns. `step` of its items make a deal. Sorted by row tile they fill its rounds.

    Numbers of the host or of the kernel: the tests go through the same arithmetic. All divisors are fixed for a launch.
    """

    tiles_m: Int32
    row_tiles: Int32
    tiles_n: Int32
    batch: Int32
    group: Int32
    workers: Int32
    rounds: Int32  # of a deal, at most
    step: Int32  # rounds * workers

    @property
    def columns(self):
        return self.tiles_n * self.batch

    @property
    def items(self):
        return self.tiles_m * self.columns

    def mark(self, position, long, short):
        """The Mark of a position in one class; `long` row tiles are of long rows, `short` is 1 in the class of others."""
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
        column = index // self.tiles_m
        return column, index - column * self.tiles_m

    def class_of(self, tile, long):
        """(1 for a short row, the row tile's number in its class)."""
        short = cutlass.min(cutlass.max(tile - long + 1, 0), 1)
        return short, tile - short * long

    def position(self, column, tile, long):
        """Where in the order an item comes, before it is dealt."""
        short, tile = self.class_of(tile, long)
        l = column // self.tiles_n
        n = column - l * self.tiles_n
        first = n // self.group * self.group
        panel = short * long * self.columns + self.height(long, short) * (l * self.tiles_n + first)
        return panel + tile * self.width(first) + n - first

    def place(self, column, tile, long, deal, begin: Mark, end: Mark):
        """Which of its deal's items an item is, sorted by row tile; `begin` and `end` are the deal's, in its class.

        Shorter ones of its class and all long items if it is short come before it, and its own row's in columns before.
        """
        short, tile = self.class_of(tile, long)
        longs = long * self.columns
        before = cutlass.min((deal + 1) * self.step, longs) - cutlass.min(deal * self.step, longs)
        return short * before + end.items(tile) - begin.items(tile + 1) + column

    def card(self, place, deal):
        """(round, card) of a deal's item: to and fro, but for the last round, as nobody may miss one before it."""
        turn = place // self.workers
        card = place - turn * self.workers
        total = (self.items + self.workers - 1) // self.workers
        last = cutlass.min(self.rounds, total - deal * self.rounds) - 1
        back = cutlass.min(cutlass.max(last - turn, 0), turn & 1)
        return deal * self.rounds + turn, card + back * (self.workers - 1 - 2 * card)


class TileDealer:
    """Compiles to one kernel per `OrderFacts`."""

    def __init__(self, facts: OrderFacts):
        self.dealt = facts.dealt

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        order: cute.Tensor,  # (slots, 2): whole rounds of workers
        row_tiles: Int32,
        steps: Int32,
        tiles_n: Int32,
        batch: Int32,
        group: Int32,  # at most tiles_n
        workers: Int32,
        bits: Int32,  # 2**bits is at least the number of rows
        stream: cuda.CUstream,
    ):
        slots = order.shape[0]
        rounds = cute.ceil_div(cute.ceil_div(slots, workers), MOST_DEALS)
        tiles_m = (crow_indices.shape[0] - 1) * row_tiles
        deal = Deal(tiles_m, row_tiles, tiles_n, batch, group, workers, rounds, rounds * workers)
        ctas = cutlass.min(cute.ceil_div(slots, SLOTS_A_THREAD * THREADS), MOST_CTAS)
        self.kernel(crow_indices, order, deal, steps, bits).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, crow_indices: cute.Tensor, order: cute.Tensor, deal: Deal, steps: Int32, bits: Int32):
        places = const_expr(MOST_DEALS * MOST_WORKERS if self.dealt else 1)

        @cute.struct
        class Storage:
            keys: cute.struct.MemRange[Int64, MOST_ROWS]
            cards: cute.struct.MemRange[Int32, places]
            loads: cute.struct.MemRange[Int32, MOST_WORKERS]
            marks: cute.struct.MemRange[Int32, (MOST_DEALS + 1) * 2 * 3]
            long: cute.struct.MemRange[Int32, 1]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        sKeys = cute.make_tensor(storage.keys.data_ptr(), cute.make_layout(MOST_ROWS))
        sLong = cute.make_tensor(storage.long.data_ptr(), cute.make_layout(1))
        tidx, bidx, ctas = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

        self.sort_rows(crow_indices, sKeys, sLong, steps, bits, tidx)
        long = sLong[0] * deal.row_tiles
        if const_expr(self.dealt):
            table = cute.make_layout((MOST_DEALS, MOST_WORKERS), stride=(MOST_WORKERS, 1))
            sCards = cute.make_tensor(storage.cards.data_ptr(), table)  # cost, then worker, of each card
            sLoads = cute.make_tensor(storage.loads.data_ptr(), cute.make_layout(MOST_WORKERS))
            sMarks = cute.make_tensor(storage.marks.data_ptr(), cute.make_layout((MOST_DEALS + 1, 2, 3)))
            deals = cute.ceil_div(order.shape[0], deal.step)
            for i in cutlass.range(tidx, deals * MOST_WORKERS, THREADS):
                sCards[i // MOST_WORKERS, i % MOST_WORKERS] = 0
            if tidx < MOST_WORKERS:
                sLoads[tidx] = 0
            if tidx <= deals:
                for short in range_constexpr(2):
                    mark = deal.mark(cutlass.min(tidx * deal.step, deal.items), long, short)
                    for part in range_constexpr(3):
                        sMarks[tidx, short, part] = mark[part]
            cute.arch.sync_threads()

            for i in cutlass.range(tidx, deal.items, THREADS):
                column, tile = deal.split(i)
                number, _, card = self.find(deal, column, tile, long, sMarks)
                cost = -Int32(sKeys[tile // deal.row_tiles] >> 32)
                cute.arch.atomic_add(storage.cards.data_ptr() + (number * MOST_WORKERS + card), cost)
            cute.arch.sync_threads()
            self.deal_cards(sCards, sLoads, deals, deal.workers, tidx)

        for i in cutlass.range(bidx * THREADS + tidx, deal.items, THREADS * ctas):
            column, tile = deal.split(i)
            rank = tile // deal.row_tiles
            if const_expr(self.dealt):
                number, turn, card = self.find(deal, column, tile, long, sMarks)
                slot = turn * deal.workers + sCards[number, card]
            else:
                slot = deal.position(column, tile, long)
            order[slot, 0] = Int32(sKeys[rank]) * deal.row_tiles + tile - rank * deal.row_tiles
            order[slot, 1] = column
        if const_expr(self.dealt):
            # The last round's last cards are blank.
            if bidx == 0 and tidx < order.shape[0] - deal.items:
                card = deal.workers - 1 - tidx
                slot = order.shape[0] - deal.workers + sCards[deals - 1, card]
                order[slot, 0] = -1
                order[slot, 1] = -1

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
                bit = k - 1 - j
                for i in cutlass.range(tidx, Int32(1) << (bits - 1), THREADS):
                    low = ((i >> bit) << (bit + 1)) | (i & ((Int32(1) << bit) - 1))
                    high = low | (Int32(1) << bit)
                    a, b = sKeys[low], sKeys[high]
                    if (a > b) == (((low >> k) & 1) == 0):
                        sKeys[low] = b
                        sKeys[high] = a
                cute.arch.sync_threads()

    @cute.jit
    def find(self, deal: Deal, column: Int32, tile: Int32, long: Int32, sMarks: cute.Tensor):
        """(deal, round, card) of an item."""
        number = deal.position(column, tile, long) // deal.step
        short, _ = deal.class_of(tile, long)
        begin = Mark(*(sMarks[number, short, part] for part in range(3)))
        end = Mark(*(sMarks[number + 1, short, part] for part in range(3)))
        turn, card = deal.card(deal.place(column, tile, long, number, begin, end), number)
        return number, turn, card

    @cute.jit
    def deal_cards(
        self,
        sCards: cute.Tensor,  # (MOST_DEALS, MOST_WORKERS): costs; becomes workers
        sLoads: cute.Tensor,  # (MOST_WORKERS,): each worker's work so far
        deals: Int32,
        workers: Int32,
        tidx: Int32,
    ):
        """In each deal the worker with the r-th least work gets card r; of equals the first comes first."""
        worker, helper = tidx // HELPERS, tidx % HELPERS
        for number in cutlass.range(deals):
            mine = sLoads[worker]
            rank = Int32(0)
            for other in cutlass.range(helper, workers, HELPERS):
                load = sLoads[other]
                if load < mine or (load == mine and other < worker):
                    rank += 1
            for distance in range_constexpr(HELPERS.bit_length() - 1):
                rank += cute.arch.shuffle_sync_bfly(rank, 1 << distance)
            cute.arch.sync_threads()
            if helper == 0 and worker < workers:
                sLoads[worker] = mine + sCards[number, rank]
                sCards[number, rank] = worker
            cute.arch.sync_threads()


def compile_order(facts: OrderFacts, *, keep_cubin: bool = False):
    """Compile the order kernel of `facts`, on any machine."""
    tensors = fake_tensor(facts.index_dtype, 1, 0, 1), fake_tensor("int32", 2, 1, 2)
    numbers = [Int32(1)] * 7
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_for(facts.arch, TileDealer(facts), *tensors, *numbers, stream, keep_cubin=keep_cubin)
