"""Kernel that selects the k largest scores of short rows, exactly: a warp per row, with its scores in registers.

    1  lanes load their scores, 4 neighboring ones at a time; one that is no candidate becomes -inf
    2  the k-th largest of the lanes' largest scores is a bound: k scores at least are not below it, and few more
    3  candidates not below the bound are appended to a list in shared memory, in the order of the row
    4  a binary search finds the k-th largest of them; it ends where k of them are not below the middle
    5  k candidates are written to the list, of equal ones the first

The binary searches compare keys, integers in the order of the scores, and count lanes by ballots. With up to 32
candidates in step 4 each lane has the key of one; others are loaded in each step of the search.

Warps share nothing, so that there is no barrier.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import make_ptr

from cute_kernels.tile.bits import lowest_bit, scan_lanes

from .config import VECTOR, WARP, WARPS, TopFacts
from .rows import Bounds, Terms, bounds_of, key_of, score_of, write_rest

INFINITY = float("inf")
LEAST, LARGEST = -(2**31), 2**31 - 1  # the key of a lane without a candidate; of NaN
LOWEST = LEAST + 0x7FFFFF  # the key of -inf
PACKED = 4  # vectors whose bits and numbers of candidates share a register, 8 bits each
PART = PACKED * VECTOR * WARP  # scores of these vectors


class SelectTopByWarps:
    """Compiles to one kernel per `TopFacts` without a capacity."""

    def __init__(self, facts: TopFacts):
        self.facts, self.vectors = facts, facts.values // VECTOR
        self.parts = [range(v, min(v + PACKED, self.vectors)) for v in range(0, self.vectors, PACKED)]
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
        # For sm_80 ptxas would spill to stay at 32 registers
        self.kernel(scores, out, terms).launch(
            grid=(cute.ceil_div(batch * groups * rows, WARPS), 1, 1), block=(self.facts.threads, 1, 1),
            min_blocks_per_mp=int(self.facts.arch == "sm_80"), stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, scores: cute.Tensor, out: cute.Tensor, terms: Terms):
        entries, warp = const_expr(self.facts.values * WARP), cute.arch.thread_idx()[0] // WARP
        smem = cutlass.memory.SmemAllocator()
        sBlock = smem.allocate_tensor(Int32, cute.make_layout((entries, WARPS)), 16)
        number = cute.arch.block_idx()[0] * WARPS + warp
        batch, groups, rows, _ = scores.shape
        if number < batch * groups * rows:
            group, row = number // rows, number % rows
            b, g = group // groups, group % groups
            at = scores.iterator.toint() + 4 * (
                b * scores.stride[0] + g * scores.stride[1] + row * Int64(scores.stride[2])
            )
            bounds = bounds_of(terms, row)
            mine = out[b, row, g, None]
            wanted = mine.shape[0] - bounds.begin - (bounds.visible - bounds.high)
            count = bounds.end - bounds.begin
            if count <= wanted:
                for i in cutlass.range(cute.arch.lane_idx(), count, WARP, unroll=1):
                    mine[bounds.begin + i] = bounds.begin + i
            else:
                if wanted > 0:
                    self.select(at, cute.domain_offset(bounds.begin, mine), bounds, wanted, sBlock[None, warp])
                count = wanted
            write_rest(mine, bounds, count, cute.arch.lane_idx(), WARP)

    @cute.jit
    def select(self, at: Int64, out: cute.Tensor, bounds: Bounds, wanted: Int32, sBlock: cute.Tensor):
        """Write the `wanted` best of more candidates of a row to its list."""
        scores = cute.make_rmem_tensor((VECTOR, self.vectors), Float32)
        largest = key_of(self.load(at, bounds, scores))
        low, high = (cute.arch.warp_redux_sync(largest, kind) for kind in ("min", "max"))
        bound = self.nth(largest, at, sBlock, Int32(WARP), low, high, wanted)
        count = self.append(scores, bound, bounds, sBlock)
        cute.arch.sync_warp()
        own = self.key(at, sBlock, cute.arch.lane_idx(), count)
        key = self.nth(own, at, sBlock, count, bound, high, wanted)
        above = self.number_above(own, at, sBlock, count, key)
        self.write(own, at, sBlock, count, key, wanted - above, out)

    @cute.jit
    def load(self, at: Int64, bounds: Bounds, scores: cute.Tensor) -> Float32:
        """Load this lane's scores, of the parts that the row has; returns the largest."""
        lane, largest = cute.arch.lane_idx(), Float32(-INFINITY)
        for part in range_constexpr(len(self.parts)):
            if part * PART < bounds.end:
                for v in range_constexpr(self.parts[part].start, self.parts[part].stop):
                    scores[None, v].fill(-INFINITY)
                    first = (v * WARP + lane) * VECTOR
                    if first < bounds.end:
                        place = make_ptr(Float32, at + 4 * Int64(first), AddressSpace.gmem, assumed_align=4 * VECTOR)
                        cute.autovec_copy(cute.make_tensor(place, VECTOR), scores[None, v])
        for part in range_constexpr(len(self.parts)):
            if part * PART < bounds.end:
                for v in range_constexpr(self.parts[part].start, self.parts[part].stop):
                    if const_expr(v == 0):  # `begin` is at most the length of a list
                        self.mask(scores[None, v], bounds.begin - lane * VECTOR, True)
                    if (v + 1) * WARP * VECTOR > bounds.end:
                        self.mask(scores[None, v], bounds.end - (v * WARP + lane) * VECTOR, False)
                    for i in range_constexpr(VECTOR):
                        largest = cute.arch.fmax(largest, scores[i, v], nan=True)
        return largest

    @cute.jit
    def mask(self, scores: cute.Tensor, limit: Int32, before: cutlass.Constexpr):
        """Replace the scores before a limit, or from it on, by -inf."""
        for i in range_constexpr(VECTOR):
            if (i < limit) == before:
                scores[i] = Float32(-INFINITY)

    @cute.jit
    def append(self, scores: cute.Tensor, bound: Int32, bounds: Bounds, sBlock: cute.Tensor) -> Int32:
        """Write the blocks of the candidates not below the bound, in order; returns their number."""
        lane, count, least = cute.arch.lane_idx(), Int32(0), score_of(bound)
        for part in range_constexpr(len(self.parts)):
            if part * PART < bounds.end:
                passed, first = Int32(0), part * PART + lane * VECTOR
                for v in range_constexpr(self.parts[part].start, self.parts[part].stop):
                    for i in range_constexpr(VECTOR):
                        if ~(scores[i, v] < least):  # NaN, too
                            passed = passed | (1 << (8 * (v % PACKED) + i))
                if (bound == LOWEST) | (bound == LARGEST):  # what is no candidate has passed, too
                    for v in range_constexpr(PACKED):
                        for i in range_constexpr(VECTOR):
                            n = first + v * WARP * VECTOR + i
                            if (n < bounds.begin) | (n >= bounds.end):
                                passed = passed & ~(1 << (8 * v + i))
                own = passed - ((passed >> 1) & 0x05050505)
                own = (own & 0x03030303) + ((own >> 2) & 0x03030303)
                upto = scan_lanes(own, WARP)  # at most 128 in each 8 bits
                every, before = cute.arch.shuffle_sync(upto, WARP - 1), Uint32(upto - own)
                while passed != 0:
                    bit = lowest_bit(passed)
                    shift = bit & 24
                    place = count + self.sum_of_bytes(every & ((1 << shift) - 1)) + Int32((before >> shift) & 0xFF)
                    before = before + (1 << shift)
                    sBlock[place] = first + (bit >> 3) * (WARP * VECTOR) + (bit & 7)
                    passed = passed & (passed - 1)
                count = count + self.sum_of_bytes(every)
        return count

    def sum_of_bytes(self, x: Int32) -> Int32:
        pairs = (x & 0xFF00FF) + ((x >> 8) & 0xFF00FF)
        return (pairs & 0xFFFF) + (pairs >> 16)

    @cute.jit
    def key(self, at: Int64, sBlock: cute.Tensor, i: Int32, count: Int32) -> Int32:
        """The key of a candidate; LEAST if there are fewer."""
        key = Int32(LEAST)
        if i < count:
            place = make_ptr(Float32, at + 4 * Int64(sBlock[i]), AddressSpace.gmem, assumed_align=4)
            key = key_of(cute.make_tensor(place, 1)[0])
        return key

    @cute.jit
    def nth(
        self, own: Int32, at: Int64, sBlock: cute.Tensor, count: Int32, low: Int32, high: Int32, wanted: Int32
    ) -> Int32:
        """A key in [low, high] that `wanted` keys are not below, or the largest that more are not below."""
        while low < high:
            middle = low + Int32((Uint32(high - low) + 1) >> 1)
            number = self.number_above(own, at, sBlock, count, middle - 1)
            if number >= wanted:
                low = middle
                if number == wanted:
                    high = middle
            else:
                high = middle - 1
        return low

    @cute.jit
    def number_above(self, own: Int32, at: Int64, sBlock: cute.Tensor, count: Int32, key: Int32) -> Int32:
        """Number of keys above a key. own: the lane's key among the first 32."""
        number = cute.arch.popc(cute.arch.vote_ballot_sync(own > key))
        if count > WARP:
            more = Int32(0)
            for i in cutlass.range(WARP + cute.arch.lane_idx(), count, WARP, unroll=1):
                if self.key(at, sBlock, i, count) > key:
                    more = more + 1
            number = number + cute.arch.warp_redux_sync(more, "add")
        return number

    @cute.jit
    def write(
        self, own: Int32, at: Int64, sBlock: cute.Tensor, count: Int32, key: Int32, equal: Int32, out: cute.Tensor
    ):
        """Write the blocks of candidates above a key, and of the first `equal` that are equal to it."""
        lane, to, ties = cute.arch.lane_idx(), Int32(0), Int32(0)
        lanes_before = (Int32(1) << lane) - 1
        for start in cutlass.range(0, count, WARP, unroll=1):
            tie = cute.arch.vote_ballot_sync(own == key)
            rank = ties + cute.arch.popc(tie & lanes_before)
            selected = (own > key) | ((own == key) & (rank < equal))
            every = cute.arch.vote_ballot_sync(selected)
            if selected:
                out[to + cute.arch.popc(every & lanes_before)] = sBlock[start + lane]
            to = to + cute.arch.popc(every)
            ties = ties + cute.arch.popc(tie)
            own = self.key(at, sBlock, start + WARP + lane, count)
