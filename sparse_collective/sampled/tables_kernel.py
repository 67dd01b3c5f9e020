"""The groups of boxes of a sampled product, made on the GPU by one kernel: what tables.box_groups makes with twenty.

One CTA. Each thread has a run of block rows. It counts their full groups, and for each number of boxes how many rows
have so many left. A scan over these counts, by number left and then by thread, says where each thread's first entry of
each kind goes, and it puts them there in the order of its rows: a stable counting sort.

Works on every architecture: no TMA, no tensor cores.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from cute_kernels.dtypes import NAMES_OF_INDEX
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from ..scan import WARP, exclusive_scan
from .tables import BoxFacts

THREADS = 256
MOST_BOXES = 32  # of a tile; counts are 33 KB of shared memory
MOST_NUMBER = 2**31 - 1  # numbers of boxes are 32 bits wide


class BoxGroupsKernel:
    """Compiles to one kernel per `BoxFacts`."""

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (items, rows + 1)
        groups: cute.Tensor,  # (groups, 3)
        spare: Int32,  # places for full groups
        parts: Int32,
        boxes: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(crow_indices, groups, spare, parts, boxes).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, crow_indices: cute.Tensor, groups: cute.Tensor, spare: Int32, parts: Int32, boxes: Int32):
        @cute.struct
        class Storage:
            counts: cute.struct.MemRange[Int32, (MOST_BOXES + 1) * THREADS]
            totals: cute.struct.MemRange[Int32, WARP]

        self.smem_bytes = Storage.size_in_bytes()
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        flat = cute.make_layout((MOST_BOXES + 1) * THREADS)
        # Of each thread: full groups; then its rows with boxes - 1 left, with boxes - 2, ..., with none.
        sCounts = cute.make_tensor(storage.counts.data_ptr(), flat)
        sTotals = cute.make_tensor(storage.totals.data_ptr(), cute.make_layout(WARP))
        tidx = cute.arch.thread_idx()[0]
        rows = crow_indices.shape[0] * (crow_indices.shape[1] - 1)
        share = cute.ceil_div(rows, THREADS)
        first = cutlass.min(tidx * share, rows)
        last = cutlass.min(first + share, rows)
        kinds = (boxes + 1) * THREADS

        for i in cutlass.range(tidx, kinds, THREADS):  # its own
            sCounts[i] = 0
        every = Int32(0)
        for row in cutlass.range(first, last):
            _, full, left = self.boxes_of(crow_indices, row, parts, boxes)
            every += full
            kind = (boxes - left) * THREADS + tidx
            sCounts[kind] = sCounts[kind] + 1
        sCounts[tidx] = every
        exclusive_scan(sCounts, kinds, sTotals, tidx, THREADS)

        all_full = Int32(sCounts[THREADS])
        place = Int32(sCounts[tidx])
        cute.arch.sync_threads()  # from here on each thread moves its own counts on
        for row in cutlass.range(first, last):
            box, full, left = self.boxes_of(crow_indices, row, parts, boxes)
            for i in cutlass.range(full):
                self.put(groups, place + i, row, box + i * boxes, boxes)
            place += full
            if boxes > 1:
                kind = (boxes - left) * THREADS + tidx
                number = Int32(sCounts[kind])
                sCounts[kind] = number + 1
                there = cutlass.min(left, 1)
                self.put(groups, spare + number - all_full, row, (box + full * boxes) * there, left)
        for i in cutlass.range(all_full + tidx, spare, THREADS):
            self.put(groups, i, rows - 1, Int32(0), Int32(0))

    @cute.jit
    def boxes_of(self, crow_indices: cute.Tensor, row: Int32, parts: Int32, boxes: Int32):
        """(number of the first box, full groups, boxes that are left) of a block row, counted through all items."""
        rows = crow_indices.shape[1] - 1
        item = row // rows
        begin, end = (Int32(crow_indices[item, row - item * rows + i]) for i in range(2))
        number = (end - begin) * parts
        full = number // boxes
        return begin * parts, full, number - full * boxes

    @cute.jit
    def put(self, groups: cute.Tensor, place: Int32, row: Int32, box: Int32, number: Int32):
        groups[place, 0] = row
        groups[place, 1] = box
        groups[place, 2] = number


def fits(rows: int, nnz: int, parts: int, boxes: int) -> bool:
    """Whether the kernel serves a pattern of so many block rows, of all items."""
    return rows > 0 and nnz > 0 and boxes <= MOST_BOXES and nnz * parts + rows <= MOST_NUMBER


def box_groups_on_gpu(crow: torch.Tensor, nnz: int, parts: int, boxes: int) -> tuple[torch.Tensor, Callable]:
    """tables.box_groups of a checked pattern on a GPU, of one that `fits`; and what makes it of another crow.

    crow: (rows + 1,), or (items, rows + 1).
    """
    rows, spare = (1 if crow.dim() == 1 else len(crow)) * (crow.shape[-1] - 1), nnz * parts // boxes
    groups = torch.empty(spare + (rows if boxes > 1 else 0), 3, dtype=torch.int32, device=crow.device)
    facts = BoxFacts(device_arch(crow.get_device())[0].target, NAMES_OF_INDEX[crow.dtype])
    function = function_for(facts)

    def again(crow: torch.Tensor) -> None:
        function(crow if crow.dim() == 2 else crow[None], groups, spare, parts, boxes)

    again(crow)
    return groups, again
