"""The sweep kernel's plan, made on the GPU by one kernel: what sweep.sweep_plan makes with forty.

One CTA a group of rows. Its table of words lies in shared memory, so all that is read are the indices, twice:

    every block        sets its bit in the word of its segment and chunk
    warp s             for segment s, counts the blocks in all earlier chunks: a scan over the words
    warp 6             lists the chunks that somebody needs: a ballot over 32 chunks at a time
    every block        finds its place: the segment's first, plus the earlier chunks', plus the lower bits of its word

Works on every architecture: no TMA, no tensor cores.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.dtypes import NAMES_OF_INDEX
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.runtime.plan import device_arch
from cute_kernels.sweep_tile import CONSUMERS, Geometry

from .sweep import SweepPlan, table_shape

THREADS = 512
MOST_CHUNKS = 1536  # words and counts in 72 KB of shared memory: K up to 98,304
WARP = 32


@dataclass(frozen=True)
class PlanFacts:
    """What a plan kernel is compiled from."""

    arch: str
    bm: int
    bk: int
    index_dtype: str
    cluster: int


class SweepPlanner:
    """Compiles to one kernel per `PlanFacts`."""

    def __init__(self, facts: PlanFacts):
        self.g = Geometry.of_block(facts.bm, facts.bk)
        self.segments = CONSUMERS * facts.cluster
        self.rows = self.segments * self.g.rows  # block rows of a group

    @cute.jit
    def __call__(
        self,
        crow_indices: cute.Tensor,  # (M / bm + 1,)
        col_indices: cute.Tensor,  # (nnz,)
        counts: cute.Tensor,  # (groups,)
        entries: cute.Tensor,  # (groups, chunks, 4 or 8)
        order: cute.Tensor,  # (nnz,)
        stream: cuda.CUstream,
    ):
        self.kernel(crow_indices, col_indices, counts, entries, order).launch(
            grid=(counts.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        crow_indices: cute.Tensor,
        col_indices: cute.Tensor,
        counts: cute.Tensor,
        entries: cute.Tensor,
        order: cute.Tensor,
    ):
        segments, rows = const_expr(self.segments), const_expr(self.rows)

        @cute.struct
        class Storage:
            starts: cute.struct.MemRange[Int32, rows + 1]
            words: cute.struct.MemRange[Int32, MOST_CHUNKS * segments]
            before: cute.struct.MemRange[Int32, MOST_CHUNKS * segments]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        words = storage.words.data_ptr()
        sWords = cute.make_tensor(words, cute.make_layout((MOST_CHUNKS, segments), stride=(segments, 1)))
        sBefore = cute.make_tensor(storage.before.data_ptr(), sWords.layout)
        sStarts = cute.make_tensor(storage.starts.data_ptr(), cute.make_layout(rows + 1))
        tidx, group = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = tidx // WARP, tidx % WARP
        chunks = entries.shape[1]

        for i in cutlass.range(tidx, chunks * segments, THREADS):
            sWords[i // segments, i % segments] = 0
        if tidx <= rows:
            last = crow_indices.shape[0] - 1
            sStarts[tidx] = Int32(crow_indices[cutlass.min(group * rows + tidx, last)])
        cute.arch.sync_threads()

        begin, end = sStarts[0], sStarts[rows]
        for p in cutlass.range(begin + tidx, end, THREADS):
            segment, chunk, bit = self.place(p, col_indices, sStarts)
            for part in range_constexpr(self.g.parts):
                cute.arch.atomic_or(words + ((chunk + part) * segments + segment), Int32(1) << bit)
        cute.arch.sync_threads()

        if warp < segments:
            total = Int32(0)
            for first in cutlass.range(0, chunks, WARP):
                chunk = first + lane
                mine = Int32(0)
                # A block wider than a chunk stands in `parts` words, and is counted in the first.
                if chunk < chunks and chunk % self.g.parts == 0:
                    mine = cute.arch.popc(sWords[chunk, warp])
                sum_ = mine
                for distance in range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(sum_, 1 << distance)
                    if lane >= (1 << distance):
                        sum_ += other
                if chunk < chunks:
                    sBefore[chunk, warp] = total + sum_ - mine
                total += cute.arch.shuffle_sync(sum_, WARP - 1)
        if warp == segments:
            count = Int32(0)
            for first in cutlass.range(0, chunks, WARP):
                chunk = first + lane
                needed = Int32(0)
                if chunk < chunks:
                    for s in range_constexpr(segments):
                        needed = needed | sWords[chunk, s]
                ballot = cute.arch.vote_ballot_sync(needed != 0)
                if needed != 0:
                    place = count + cute.arch.popc(ballot & ((Int32(1) << lane) - 1))
                    entries[group, place, 0] = chunk
                    for s in range_constexpr(segments):
                        entries[group, place, 1 + s] = sWords[chunk, s]
                count += cute.arch.popc(ballot)
            if lane == 0:
                counts[group] = count
        cute.arch.sync_threads()

        for p in cutlass.range(begin + tidx, end, THREADS):
            segment, chunk, bit = self.place(p, col_indices, sStarts)
            lower = sWords[chunk, segment] & ((Int32(1) << bit) - 1)
            order[sStarts[segment * self.g.rows] + sBefore[chunk, segment] + cute.arch.popc(lower)] = p

    @cute.jit
    def place(self, p: Int32, col_indices: cute.Tensor, sStarts: cute.Tensor):
        """(segment, first chunk, bit) of stored block p."""
        row = Int32(0)
        for i in range_constexpr(1, self.rows):
            if sStarts[i] <= p:
                row += 1
        col = Int32(col_indices[p])
        chunk = col * self.g.parts // self.g.steps
        return row // self.g.rows, chunk, row % self.g.rows * self.g.steps + col % self.g.steps


def compile_planner(facts: PlanFacts, *, keep_cubin: bool = False):
    """Compile the plan kernel of `facts`, on any machine."""
    indices = [fake_tensor(facts.index_dtype, 1, 0, 1) for _ in range(2)]
    tables = fake_tensor("int32", 1, 0, 1), fake_tensor("int32", 3, 2, 4), fake_tensor("int32", 1, 0, 1)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_for(facts.arch, SweepPlanner(facts), *indices, *tables, stream, keep_cubin=keep_cubin)


def sweep_plan_on_gpu(
    crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], cluster: int
) -> SweepPlan:
    """sweep.sweep_plan of a checked pattern on a GPU, for matrices of at most MOST_CHUNKS chunks; raises as it does.

    Places of `entries` past a group's count hold anything.
    """
    table = table_shape(shape, cluster)
    sizes = table[0], table, max(1, len(col))
    counts, entries, order = (torch.empty(size, dtype=torch.int32, device=col.device) for size in sizes)
    facts = PlanFacts(device_arch(col.get_device())[0].target, *block, NAMES_OF_INDEX[col.dtype], cluster)
    planner = default_cache().get(facts, lambda: compile_planner(facts))
    planner(crow, col if len(col) else col.new_zeros(1), counts, entries, order)
    return SweepPlan(counts, entries, order)
