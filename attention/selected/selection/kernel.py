"""Kernel that selects the k largest scores of a row, exactly: a CTA per row, with a buffer in shared memory.

    1  a sample of a long row gives a bound that probably few more than k scores are above
    2  threads read the row in chunks, and append the scores above the bound to the buffer, in the order of the row
    3  where they do not fit, the k-th largest key in the buffer becomes the bound, and the buffer keeps k entries
    4  with fewer than k entries at the end, steps 2 and 3 are repeated with a bound below all scores
    5  k of the buffer's entries are written to the list

So most rows are read once, and few scores pass. Without a sample k * (1 + log(n / k)) of n in random order would, and
the buffer would be searched several times. Rows may be of any length.

All entries stay in the order of the row, by prefix sums: lists ascend, and of equal scores the first are selected.

    shared memory   sKey, sBlock   the buffer
                    sHist          histograms, one per digit
                    sWarp          four numbers per warp: of prefix sums, which take turns so that one barrier per sum
                                   suffices, and the smallest and largest key
                    sFound         the bin with the k-th largest key
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import make_ptr

from cute_kernels.tile.bits import scan_lanes
from cute_kernels.tile.ptx import here, read_special_register

from .config import DIGIT, DIGITS, SAMPLE_DIGITS, SAMPLED, VECTOR, VECTORS, WARP, TopFacts
from .radix import KthLargest
from .rows import Bounds, Terms, below, bounds_of, key_of, write_rest

LEAST = -(2**31)
LEAST_THREADS = 1024  # of an SM's CTAs, which leaves 64 registers; left to itself, ptxas fits more and spills


class SelectTop:
    """Compiles to one kernel per `TopFacts` with a capacity."""

    def __init__(self, facts: TopFacts):
        self.facts, self.warps, self.kth = facts, facts.threads // WARP, KthLargest(facts)
        self.smem_bytes = facts.smem_bytes

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,  # (B, G, rows, blocks) float32
        out: cute.Tensor,  # (B, rows, G, top) int32
        first: Int32,
        columns: Int32,
        block_size: Int32,
        local: Int32,
        initial: Int32,
        causal: Int32,
        whole: Int32,
        stream: cuda.CUstream,
    ):
        batch, groups, rows, _ = scores.shape
        terms = Terms(first, columns, block_size, local, initial, causal, whole)
        self.kernel(scores, out, terms).launch(
            grid=(batch * groups * rows, 1, 1),
            block=(self.facts.threads, 1, 1),
            min_blocks_per_mp=max(LEAST_THREADS // self.facts.threads, 1),
            preferred_smem_carveout=100,  # otherwise the DSL would query a GPU
            stream=stream,
        )

    @cute.kernel
    def kernel(self, scores: cute.Tensor, out: cute.Tensor, terms: Terms):
        facts = self.facts
        smem = cutlass.memory.SmemAllocator()
        sKey, sBlock = (smem.allocate_tensor(Int32, cute.make_layout(facts.capacity), 16) for _ in range(2))
        sHist = smem.allocate_tensor(Int32, cute.make_layout(DIGIT * DIGITS), 16)
        sWarp = smem.allocate_tensor(Int32, cute.make_layout((self.warps, 4)), 16)
        sFound = smem.allocate_tensor(Int32, cute.make_layout(4), 16)

        at, mine, bounds, wanted = self.row_of(scores, out, terms)
        count = bounds.end - bounds.begin
        if count <= wanted:
            for i in cutlass.range(cute.arch.thread_idx()[0], count, facts.threads, unroll=1):
                mine[bounds.begin + i] = bounds.begin + i
        elif wanted > 0:
            self.select(at, bounds, wanted, (sKey, sBlock, sHist, sWarp, sFound), (scores, out, terms))
        _, mine, bounds, wanted = self.row_of(scores, out, terms)
        count = cutlass.min(bounds.end - bounds.begin, wanted)
        write_rest(mine, bounds, count, cute.arch.thread_idx()[0], facts.threads)

    @cute.jit
    def row_of(self, scores: cute.Tensor, out: cute.Tensor, terms: Terms) -> tuple:
        """(address of this CTA's row of scores, its list, its bounds, how many of the candidates it has room for).
        These are computed where they are needed, so that no registers hold them in between, which would be spilled."""
        number = read_special_register("ctaid.x")
        _, groups, rows, _ = scores.shape
        row = rows - 1 - number % rows  # the longest rows first
        group = number // rows
        b, g = group // groups, group % groups
        at = scores.iterator.toint() + 4 * (b * scores.stride[0] + g * scores.stride[1] + row * Int64(scores.stride[2]))
        mine, bounds = out[b, row, g, None], bounds_of(terms, row)
        return at, mine, bounds, mine.shape[0] - bounds.begin - (bounds.visible - bounds.high)

    @cute.jit
    def select(self, at: Int64, bounds: Bounds, wanted: Int32, buffers: tuple, row: tuple):
        """Write the `wanted` best of more candidates of a row to its list. row: see row_of."""
        facts = self.facts
        sKey, sBlock, sHist, sWarp, sFound = buffers
        tidx = cute.arch.thread_idx()[0]
        begin = bounds.begin // VECTOR * VECTOR
        count, turn, bound, reads = Int32(0), Int32(0), Float32(float("nan")), Int32(1)
        if bounds.end - begin > SAMPLED * facts.chunk:
            bound = self.sample(at, begin, bounds.end, wanted, buffers)
            reads = Int32(2)
        while reads > 0:
            count, turn = self.collect(row, bound, buffers, turn)
            _, _, _, wanted = self.row_of(*row)
            reads = reads - 1
            if count >= wanted:
                reads = Int32(0)
            bound = Float32(float("nan"))
        cute.arch.sync_threads()
        _, mine, bounds, wanted = self.row_of(*row)
        selected = cute.domain_offset(bounds.begin, mine)
        if count > wanted:
            key, equal = self.kth.threshold(buffers, count, wanted, DIGITS)
            self.keep(buffers, selected, count, key, equal, turn, True)
        else:
            for i in cutlass.range(tidx, count, facts.threads, unroll=1):
                selected[i] = sBlock[i]

    @cute.jit
    def sample(
        self,
        at: Int64,
        begin: Int32,
        end: Int32,
        wanted: Int32,
        buffers: tuple,
    ) -> Float32:
        """A bound that probably at least `wanted` scores of a row are above, from a chunk of vectors far apart.

        The rank in the sample exceeds the expected one, r, by r / 2 + 16: 3.4 standard deviations or more of random
        scores for k = 512.
        """
        facts, sKey, tidx = self.facts, buffers[0], cute.arch.thread_idx()[0]
        vectors, step = const_expr(facts.threads * VECTORS), (end - begin) // VECTOR
        values = cute.make_rmem_tensor((VECTOR, VECTORS), Float32)
        for v in range_constexpr(VECTORS):
            number = v * facts.threads + tidx
            first = begin + Int32(Int64(number) * step // vectors) * VECTOR
            place = make_ptr(Float32, at + 4 * Int64(first), AddressSpace.gmem, assumed_align=4 * VECTOR)
            cute.autovec_copy(cute.make_tensor(place, VECTOR), values[None, v])
        for i in range_constexpr(VECTOR * VECTORS):
            sKey[i * facts.threads + tidx] = key_of(values[i])
        cute.arch.sync_threads()
        rank = Int32(Int64(wanted) * facts.chunk // (end - begin))
        key, _ = self.kth.threshold(buffers, Int32(facts.chunk), rank + rank // 2 + 16, SAMPLE_DIGITS)
        return below(key)

    @cute.jit
    def collect(self, row: tuple, bound: Float32, buffers: tuple, turn: Int32) -> tuple:
        """Fill the buffer with candidates above a bound; returns (their number, turn). If some had to be left out, as
        many of the best as are wanted are in the buffer."""
        at, _, bounds, _ = self.row_of(*row)
        facts, tidx, begin = self.facts, cute.arch.thread_idx()[0], bounds.begin // VECTOR * VECTOR
        mine = (tidx // WARP * VECTORS * WARP + tidx % WARP) * VECTOR
        coming, values = (cute.make_rmem_tensor((VECTOR, VECTORS), Float32) for _ in range(2))
        self.load(at, begin + mine, bounds.end, coming)
        count = Int32(0)
        for start in cutlass.range(begin, bounds.end, facts.chunk, unroll=1):
            for i in range_constexpr(VECTOR * VECTORS):
                values[i] = coming[i]
            self.load(at, start + facts.chunk + mine, bounds.end, coming)
            inside = (start >= bounds.begin) & (start + facts.chunk <= bounds.end)
            count, turn, bound = self.append(values, start + mine, bounds, inside, bound, row, buffers, count, turn)
        return count, turn

    @cute.jit
    def load(self, at: Int64, block: Int32, end: Int32, values: cute.Tensor):
        """Load this thread's scores of a chunk, of which `block` is the first."""
        first = at + 4 * Int64(block)
        for v in range_constexpr(VECTORS):
            if block < end - v * WARP * VECTOR:
                place = first + 4 * v * WARP * VECTOR
                place = make_ptr(Float32, place, AddressSpace.gmem, assumed_align=4 * VECTOR)
                cute.autovec_copy(cute.make_tensor(place, VECTOR), values[None, v])

    @cute.jit
    def append(
        self,
        values: cute.Tensor,  # (VECTOR, VECTORS)
        block: Int32,  # of the first value
        bounds: Bounds,
        inside,  # True if all values of the chunk are candidates
        bound: Float32,
        row: tuple,
        buffers: tuple,
        count: Int32,
        turn: Int32,
    ) -> tuple:
        """Append the candidates above the bound to `count` entries of the buffer; returns (count, turn, bound)."""
        sKey, sBlock, sHist, sWarp, sFound = buffers
        passed = Int32(0)  # bits of this thread's values
        for v in range_constexpr(VECTORS):
            for i in range_constexpr(VECTOR):
                if ~(values[i, v] <= bound):  # all scores, if it is NaN
                    passed = passed | (1 << (VECTOR * v + i))
        if not inside:
            passed = here(passed)  # a branch, or all chunks would execute this
            for v in range_constexpr(VECTORS):
                for i in range_constexpr(VECTOR):
                    n = block + v * WARP * VECTOR + i
                    if (n < bounds.begin) | (n >= bounds.end):
                        passed = passed & ~(1 << (VECTOR * v + i))
        own, upto, every = Int32(0), Int32(0), Int32(0)  # numbers per vector, in 16 bits each
        if cute.arch.vote_any_sync(passed != 0):
            for v in range_constexpr(VECTORS):
                own = own + (cute.arch.popc(passed & (((1 << VECTOR) - 1) << VECTOR * v)) << 16 * v)
            upto = scan_lanes(own, WARP)
            every = cute.arch.shuffle_sync(upto, WARP - 1)
        before, total = self.scan_warps(sWarp, turn, (every & 0xFFFF) + (every >> 16))
        turn = turn ^ 1
        if count + total > self.facts.capacity:
            _, _, _, wanted = self.row_of(*row)
            key, equal = self.kth.threshold(buffers, count, wanted, DIGITS)
            turn = self.keep(buffers, sBlock, count, key, equal, turn, False)
            count, bound = wanted, below(key)
        for v in range_constexpr(VECTORS):
            place = count + before + (((upto - own) >> 16 * v) & 0xFFFF)
            rest = Uint32(passed >> VECTOR * v) & ((1 << VECTOR) - 1)
            while rest != 0:
                i = Int32(cute.arch.popc((rest - 1) & ~rest))
                low, high = values[0, v], values[2, v]
                if i & 1 != 0:
                    low, high = values[1, v], values[3, v]
                if i >= 2:
                    low = high
                sKey[place] = key_of(low)
                sBlock[place] = block + v * WARP * VECTOR + i
                place = place + 1
                rest = rest & (rest - 1)
            before = before + ((every >> 16 * v) & 0xFFFF)
        return count + total, turn, bound

    @cute.jit
    def scan_warps(self, sWarp: cute.Tensor, turn: Int32, own: Int32) -> tuple:
        """(sum over the warps before this one, sum over all); has a barrier."""
        lane, warp = cute.arch.lane_idx(), cute.arch.thread_idx()[0] // WARP
        if lane == 0:
            sWarp[warp, turn] = own
        cute.arch.sync_threads()
        if const_expr(self.warps <= 8):
            sums, before, total = cute.make_rmem_tensor(self.warps, Int32), Int32(0), Int32(0)
            cute.autovec_copy(sWarp[None, turn], sums)
            for w in range_constexpr(self.warps):
                if w < warp:
                    before = before + sums[w]
                total = total + sums[w]
        else:
            other = Int32(0)
            if lane < self.warps:
                other = sWarp[lane, turn]
            upto = scan_lanes(other, self.warps)
            before, total = cute.arch.shuffle_sync(upto, warp) - own, cute.arch.shuffle_sync(upto, self.warps - 1)
        return before, total

    @cute.jit
    def keep(
        self,
        buffers: tuple,
        to: cute.Tensor,
        count: Int32,
        key: Int32,
        equal: Int32,
        turn: Int32,
        final: cutlass.Constexpr,
    ) -> Int32:
        """Keep the entries above a key, and the first `equal` equal to it. Returns the next turn.

        Their blocks are copied to `to`, which may be sBlock, and their keys to the front of sKey unless `final`.

        An entry's place is never after the one it was read from, and those of later rounds are not overwritten.
        """
        sKey, sBlock, _, sWarp, _ = buffers
        tidx, per_round = cute.arch.thread_idx()[0], const_expr(self.facts.threads * VECTOR)
        keys, blocks = (cute.make_rmem_tensor(VECTOR, Int32) for _ in range(2))
        done = Int32(0)  # entries above the key in the low 16 bits, equal to it in the others
        for start in cutlass.range(0, count, per_round, unroll=1):
            first = start + tidx * VECTOR
            own = Int32(0)
            for i in range_constexpr(VECTOR):
                keys[i], blocks[i] = sKey[first + i], sBlock[first + i]
                if first + i >= count:
                    keys[i] = Int32(LEAST)
                if keys[i] > key:
                    own = own + 1
                elif keys[i] == key:
                    own = own + 0x10000
            upto = scan_lanes(own, WARP)
            before, total = self.scan_warps(sWarp, turn, cute.arch.shuffle_sync(upto, WARP - 1))
            turn = turn ^ 1
            before = done + before + upto - own
            for i in range_constexpr(VECTOR):
                ties = before >> 16
                place = (before & 0xFFFF) + cutlass.min(ties, equal)
                if (keys[i] > key) | ((keys[i] == key) & (ties < equal)):
                    to[place] = blocks[i]
                    if const_expr(not final):
                        sKey[place] = keys[i]
                if keys[i] > key:
                    before = before + 1
                elif keys[i] == key:
                    before = before + 0x10000
            done = done + total
        return turn
