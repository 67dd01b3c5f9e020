"""Kernel that selects the k largest scores of short rows, exactly: a warp per row, with its scores in registers.

    1  lanes load 4 * n scores each and make keys of them; one that is no candidate has the smallest key
    2  the k-th largest of the lanes' largest keys is a bound: k keys at least are not below it, and few more
    3  candidates not below the bound are copied to shared memory, in the order of the row
    4  a binary search finds the k-th largest of them; it ends where k keys are above the middle
    5  k candidates are written to the list, of equal ones the first

Warps share nothing, so that there is no barrier.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import make_ptr

from cute_kernels.tile.bits import scan_lanes

from .config import VECTOR, WARP, WARPS, TopFacts
from .rows import Bounds, Terms, bounds_of, key_of, write_rest

LEAST = -(2**31)  # the key of what is no candidate
PACKED = 4  # vectors whose numbers of candidates share a register, 8 bits each


class SelectTopByWarps:
    """Compiles to one kernel per `TopFacts` without a capacity."""

    def __init__(self, facts: TopFacts):
        self.facts, self.vectors = facts, facts.values // VECTOR
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
            grid=(cute.ceil_div(batch * groups * rows, WARPS), 1, 1), block=(self.facts.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, scores: cute.Tensor, out: cute.Tensor, terms: Terms):
        entries, warp = const_expr(self.facts.values * WARP), cute.arch.thread_idx()[0] // WARP
        smem = cutlass.memory.SmemAllocator()
        sKey, sBlock = (smem.allocate_tensor(Int32, cute.make_layout((entries, WARPS)), 16) for _ in range(2))
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
                    self.select(at, mine, bounds, wanted, sKey[None, warp], sBlock[None, warp])
                count = wanted
            write_rest(mine, bounds, count, cute.arch.lane_idx(), WARP)

    @cute.jit
    def select(
        self, at: Int64, out: cute.Tensor, bounds: Bounds, wanted: Int32, sKey: cute.Tensor, sBlock: cute.Tensor
    ):
        """Write the `wanted` best of more candidates of a row to its list."""
        keys = cute.make_rmem_tensor((VECTOR, self.vectors), Int32)
        largest = self.load(at, bounds, keys)
        bound = self.nth(largest, wanted)
        count = self.copy(keys, cutlass.max(bound, LEAST + 1), sKey, sBlock)
        cute.arch.sync_warp()
        key, above = self.search(sKey, count, bound, self.reduced(largest, "max"), wanted)
        self.write(sKey, sBlock, count, key, wanted - above, cute.domain_offset(bounds.begin, out))

    @cute.jit
    def load(self, at: Int64, bounds: Bounds, keys: cute.Tensor) -> Int32:
        """Load this lane's keys; returns the largest."""
        lane, largest = cute.arch.lane_idx(), Int32(LEAST)
        scores = cute.make_rmem_tensor((VECTOR, self.vectors), Float32)
        for v in range_constexpr(self.vectors):
            first = (v * WARP + lane) * VECTOR
            if first < bounds.end:
                place = make_ptr(Float32, at + 4 * Int64(first), AddressSpace.gmem, assumed_align=4 * VECTOR)
                cute.autovec_copy(cute.make_tensor(place, VECTOR), scores[None, v])
        for v in range_constexpr(self.vectors):
            for i in range_constexpr(VECTOR):
                n = (v * WARP + lane) * VECTOR + i
                key = key_of(scores[i, v])
                if (n < bounds.begin) | (n >= bounds.end):
                    key = Int32(LEAST)
                keys[i, v] = key
                largest = cutlass.max(largest, key)
        return largest

    @cute.jit
    def nth(self, key: Int32, n: Int32) -> Int32:
        """The n-th largest of the lanes' keys."""
        lane, rank = cute.arch.lane_idx(), Int32(0)
        for i in range_constexpr(WARP):
            other = cute.arch.shuffle_sync(key, i)
            if (other > key) | ((other == key) & (i < lane)):
                rank = rank + 1
        holder = Uint32(cute.arch.vote_ballot_sync(rank == n - 1))
        return cute.arch.shuffle_sync(key, Int32(cute.arch.popc(holder - 1)) & (WARP - 1))

    @cute.jit
    def copy(self, keys: cute.Tensor, bound: Int32, sKey: cute.Tensor, sBlock: cute.Tensor) -> Int32:
        """Copy the candidates that are not below the bound to shared memory, in order; returns their number."""
        lane, count = cute.arch.lane_idx(), Int32(0)
        for part in range_constexpr(-(-self.vectors // PACKED)):
            own, vectors = Int32(0), range(part * PACKED, min(self.vectors, (part + 1) * PACKED))
            for v in range_constexpr(vectors.start, vectors.stop):
                for i in range_constexpr(VECTOR):
                    if keys[i, v] >= bound:
                        own = own + (1 << 8 * (v % PACKED))
            upto = Uint32(scan_lanes(own, WARP))  # at most 128 in each 8 bits
            every = cute.arch.shuffle_sync(upto, WARP - 1)
            before = upto - Uint32(own)
            for v in range_constexpr(vectors.start, vectors.stop):
                shift = const_expr(8 * (v % PACKED))
                place = count + Int32((before >> shift) & 0xFF)
                for i in range_constexpr(VECTOR):
                    if keys[i, v] >= bound:
                        sKey[place] = keys[i, v]
                        sBlock[place] = (v * WARP + lane) * VECTOR + i
                        place = place + 1
                count = count + Int32((every >> shift) & 0xFF)
        return count

    @cute.jit
    def search(self, sKey: cute.Tensor, count: Int32, low: Int32, high: Int32, wanted: Int32) -> tuple:
        """(key, number of keys above it): `wanted` keys are not below the key, or some of them equal to it."""
        while low < high:
            middle = low + Int32((Uint32(high - low) + 1) >> 1)
            if high - low == -1:  # all integers
                middle = Int32(0)
            found = self.number_above(sKey, count, middle - 1)
            if found >= wanted:
                low = middle
                if found == wanted:
                    high = middle
            else:
                high = middle - 1
        return low, self.number_above(sKey, count, low)

    @cute.jit
    def number_above(self, sKey: cute.Tensor, count: Int32, key: Int32) -> Int32:
        found = Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), count, WARP, unroll=1):
            if sKey[i] > key:
                found = found + 1
        return self.reduced(found, "add")

    def reduced(self, value: Int32, kind: str) -> Int32:
        return cute.arch.warp_redux_sync(value, kind)

    @cute.jit
    def write(self, sKey: cute.Tensor, sBlock: cute.Tensor, count: Int32, key: Int32, equal: Int32, out: cute.Tensor):
        """Write the blocks of entries above a key, and of the first `equal` that are equal to it."""
        lane, at, ties = cute.arch.lane_idx(), Int32(0), Int32(0)
        lanes_before = (Int32(1) << lane) - 1
        for start in cutlass.range(0, count, WARP, unroll=1):
            own = Int32(LEAST)
            if start + lane < count:
                own = sKey[start + lane]
            tie = cute.arch.vote_ballot_sync((own == key) & (start + lane < count))
            rank = ties + cute.arch.popc(tie & lanes_before)
            selected = (own > key) | ((own == key) & (start + lane < count) & (rank < equal))
            every = cute.arch.vote_ballot_sync(selected)
            if selected:
                out[at + cute.arch.popc(every & lanes_before)] = sBlock[start + lane]
            at = at + cute.arch.popc(every)
            ties = ties + cute.arch.popc(tie)
