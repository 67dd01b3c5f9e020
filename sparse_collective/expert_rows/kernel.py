"""Kernels that move rows of a mixture of experts between the tokens of all ranks and the layouts of their experts.

A rank sorts its choices by expert, and publishes its tokens and this `order`. The layout of a rank has the rows of its
experts in ascending order, each expert's padded to whole runs; those of an expert by rank, and those of a rank as it
sorted them. All of this follows from the table of where each rank's rows of each expert begin:

    Places      thread: sorted rows; where each is in the layout of the rank that has its expert. The first CTA lists
                where the rows of each expert and rank begin in this rank's layout: its segments
    Dispatch    warp: a row of the layout at a time; segment, token's number and token, from the rank that has it
    Combine     warp: a chunk of a token; the rows of its choices, from the ranks that have them, added in FP32
    Values      thread: choices; one FP32 value each, from the rank that has it

Loads from another GPU take microseconds. So a lane has `ahead` loads in flight, and a multiprocessor 24 to 32 warps.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.ptx import load_vector
from cute_kernels.tile.vectors import widened

from .config import MOST_EXPERTS, RESIDENT, THREADS, VECTOR, WARPS, RowsFacts

WARP = 32
CARVEOUT = 25  # per cent of what an SM has, enough for RESIDENT CTAs; the rest is L1
OWNER = 32  # bits of a place below its rank


@cute.jit
def last_upto(sFirsts: cute.Tensor, count: Int32, number: Int32) -> Int32:
    """The last of `count` ascending numbers that is at most `number`; the first one is."""
    low, high = Int32(0), count
    while high - low > 1:
        middle = (low + high) // 2
        if sFirsts[middle] <= number:
            low = middle
        else:
            high = middle
    return low


def first_of(pointers: cute.Tensor, rank: Int32, local: bool) -> Int64:
    """Address of a rank's memory."""
    return pointers.iterator.toint() if local else pointers[rank]


def load(at: Int64, dtype, valid) -> cute.Tensor:
    """VECTOR elements at an address, as words; zeros if not `valid`."""
    words = cute.make_rmem_tensor(VECTOR * dtype.width // 32, Int32)
    for part in range(cute.size(words) // 4):
        for w, word in enumerate(load_vector(at + 16 * part, valid, stream=True, fresh=True)):
            words[4 * part + w] = word
    return words


def store(words: cute.Tensor, at: Int64) -> None:
    """Store words of VECTOR elements in vectors of 16 bytes."""
    for part in range(cute.size(words) // 4):
        vector = cute.make_rmem_tensor(4, Int32)
        for w in range(4):
            vector[w] = words[4 * part + w]
        pointer = make_ptr(Int32, at + 16 * part, AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(vector, cute.make_tensor(pointer, 4))


def floats(words: cute.Tensor, dtype) -> list:
    """Loaded elements in FP32."""
    return widened(cute.recast_tensor(words, dtype))


def rounded(values: list, dtype) -> cute.Tensor:
    """FP32 values in a dtype, as words."""
    found = cute.make_rmem_tensor(VECTOR, dtype)
    for v in range(VECTOR):
        found[v] = values[v].to(dtype)
    return cute.recast_tensor(found, Int32)


class Places:
    """Compiles to the kernel of the step "places"."""

    def __init__(self, facts: RowsFacts):
        self.smem_bytes, self.ahead = facts.smem_bytes, facts.ahead

    @cute.jit
    def __call__(
        self,
        table: cute.Tensor,  # (ranks, experts + 2) int64: where the rows of each expert begin, of each rank
        order: cute.Tensor,  # (T * k,) int64: the choice of each sorted row
        places: cute.Tensor,  # (T * k,) int64: rank << 32 | row of its layout, or -1 for choices of no expert
        firsts: cute.Tensor,  # (experts of a rank * ranks + 1,) int32: segments of this rank's layout, and its rows
        rank: Int32,
        each: Int32,  # experts of a rank
        group_rows: Int32,
        most: Int64,  # choices of a rank; if one has more, segments are empty
        stream: cuda.CUstream,
    ):
        grid = (order.shape[0] // (THREADS * self.ahead) + 1, 1, 1)
        self.kernel(table, order, places, firsts, rank, each, group_rows, most).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, table: cute.Tensor, order: cute.Tensor, places: cute.Tensor, firsts: cute.Tensor, rank: Int32,
        each: Int32, group_rows: Int32, most: Int64,
    ):  # fmt: skip
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sBegins, sRows, sFirsts = (smem.allocate_tensor(Int32, cute.make_layout(MOST_EXPERTS + 4), 16) for _ in "123")
        ranks, experts = table.shape[0], table.shape[1] - 2
        for e in cutlass.range(tidx, experts, THREADS, unroll=1):
            total, before = Int32(0), Int32(0)
            for r in cutlass.range(ranks, unroll=1):
                count = Int32(table[r, e + 1] - table[r, e])
                if r < rank:
                    before = before + count
                total = total + count
            sRows[e] = (total + group_rows - 1) // group_rows * group_rows
            sFirsts[e] = before
        for e in cutlass.range(tidx, experts + 1, THREADS, unroll=1):
            sBegins[e] = Int32(table[rank, e])
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, experts, THREADS, unroll=1):
            owner, first = e // each, Int32(0)
            for other in cutlass.range(owner * each, e, unroll=4):
                first = first + sRows[other]
            sFirsts[e] = sFirsts[e] + first
            if (cta == 0) & (owner == rank):
                keep = Int32(1)
                for r in cutlass.range(ranks, unroll=1):
                    if table[r, experts + 1] > most:
                        keep = Int32(0)
                for r in cutlass.range(ranks, unroll=1):
                    firsts[(e - owner * each) * ranks + r] = first * keep
                    first = first + Int32(table[r, e + 1] - table[r, e])
                if e + 1 == (owner + 1) * each:
                    firsts[each * ranks] = (first + group_rows - 1) // group_rows * group_rows * keep
        cute.arch.sync_threads()
        for u in range_constexpr(self.ahead):
            row = (cta * self.ahead + u) * THREADS + tidx
            if row < order.shape[0]:
                place = Int64(-1)
                if (row >= sBegins[0]) & (row < sBegins[experts]):
                    e = last_upto(sBegins, experts, row)
                    place = (Int64(e // each) << OWNER) + Int64(sFirsts[e] + row - sBegins[e])
                places[order[row]] = place


class Dispatch:
    """Compiles to the kernels of the steps "dispatch" and "gradient"."""

    def __init__(self, facts: RowsFacts):
        self.facts, self.smem_bytes, self.ahead = facts, facts.smem_bytes, facts.ahead
        self.scaled, self.local = facts.step == "gradient", facts.local
        self.dtype, self.out_dtype = cutlass_dtype(facts.dtype), cutlass_dtype(facts.out_dtype)

    @cute.jit
    def __call__(
        self,
        pointers: cute.Tensor,  # (ranks,) int64: addresses of each rank's tokens, (T, N); `local` the tokens
        table: cute.Tensor,  # as of Places
        firsts: cute.Tensor,
        out: cute.Tensor,  # (rows, N)
        expert_ids: cute.Tensor | None,  # (rows / group_rows,) int32, numbered from this rank's first
        y: cute.Tensor | None,  # (rows, N): result of the layers, for gradients of weights
        dots: cute.Tensor | None,  # (rows,) fp32: a row, before it is scaled, times the one of y
        order_at,  # Int64: bytes from a rank's tokens to its order, (T * k,) int64; `local` the order
        weights_at,  # Int64: bytes from them to its weights, (T * k,) fp32; `local` the weights or None
        first_expert: Int32,
        k: Int32,
        group_rows: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            pointers, table, firsts, out, expert_ids, y, dots, order_at, weights_at, first_expert, k, group_rows
        ).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=CARVEOUT,  # unnamed, the DSL would ask a GPU for it
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, pointers: cute.Tensor, table: cute.Tensor, firsts: cute.Tensor, out: cute.Tensor,
        expert_ids: cute.Tensor | None, y: cute.Tensor | None, dots: cute.Tensor | None, order_at, weights_at,
        first_expert: Int32, k: Int32, group_rows: Int32,
    ):  # fmt: skip
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        sFirsts = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(MOST_EXPERTS + 4), 16)
        ranks, segments = 1 if self.local else pointers.shape[0], firsts.shape[0] - 1
        for i in cutlass.range(tidx, segments + 1, THREADS, unroll=1):
            sFirsts[i] = firsts[i]
        cute.arch.sync_threads()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        # A warp copies consecutive rows, so that all ranks are read at any time. With all warps at one place of the
        # layout, all ranks would read the same one.
        rows = cute.ceil_div(out.shape[0], cute.arch.grid_dim()[0] * WARPS)
        first = (cta * WARPS + warp) * rows
        for place in cutlass.range(first, cutlass.min(first + rows, out.shape[0]), unroll=1):
            segment = last_upto(sFirsts, segments + 1, place)
            e, r = segment // ranks, segment % ranks  # behind the last segment e is no expert of this rank
            if const_expr(expert_ids is not None):
                if (lane == 0) & (place % group_rows == 0):
                    expert_ids[place // group_rows] = e
            begin, row = table[r, first_expert + e], place - sFirsts[segment]
            valid = (segment < segments) & (Int64(row) < table[r, first_expert + e + 1] - begin)
            tokens, number = first_of(pointers, r, self.local), begin + Int64(row)
            at = self.behind(tokens, order_at) + number * 8
            choice = load_vector(at, valid, stream=True, words=1, fresh=True)[0]
            weight = None
            if const_expr(self.scaled):
                at = self.behind(tokens, weights_at) + Int64(choice) * 4
                weight = load_vector(at, valid, stream=True, words=1, fresh=True)[0]
            self.move(tokens, choice // k, valid, weight, out, y, dots, place, lane)

    def behind(self, tokens: Int64, at) -> Int64:
        """Address of a rank's order or weights."""
        return at.iterator.toint() if self.local else tokens + at

    @cute.jit
    def move(
        self, tokens: Int64, token: Int32, valid, weight, out: cute.Tensor, y: cute.Tensor | None,
        dots: cute.Tensor | None, place: Int32, lane: Int32,
    ):  # fmt: skip
        """Copy a token to a row of the layout, by one warp; zeros if not `valid`."""
        parts, width, out_width = out.shape[1] // VECTOR, self.dtype.width // 8, self.out_dtype.width // 8
        source = tokens + Int64(token) * (Int64(out.shape[1]) * width)
        offset = Int64(place) * (Int64(out.shape[1]) * out_width)
        to, dot, scale = out.iterator.toint() + offset, Float32(0.0), None
        if const_expr(self.scaled):
            bits = cute.make_rmem_tensor(1, Int32)
            bits[0] = weight
            scale = cute.recast_tensor(bits, Float32)[0]
        for first in cutlass.range(lane, parts, WARP * self.ahead, unroll=1):
            inside = [first + u * WARP < parts for u in range(self.ahead)]
            at = [Int64(first + u * WARP) * VECTOR for u in range(self.ahead)]
            loaded = [load(source + at[u] * width, self.dtype, inside[u] & valid) for u in range(self.ahead)]
            others = []
            if const_expr(y is not None):
                own = y.iterator.toint() + offset
                others = [load(own + at[u] * out_width, self.out_dtype, inside[u]) for u in range(self.ahead)]
            for u in range_constexpr(self.ahead):
                words = loaded[u]
                if const_expr(self.scaled):
                    values = floats(loaded[u], self.dtype)
                    if const_expr(y is not None):
                        results = floats(others[u], self.out_dtype)
                        for v in range_constexpr(VECTOR):
                            dot = dot + values[v] * results[v]
                    words = rounded([value * scale for value in values], self.out_dtype)
                if inside[u]:
                    store(words, to + at[u] * out_width)
        if const_expr(y is not None):
            total = cute.arch.warp_reduction_sum(dot)
            if lane == 0:
                dots[place] = total


class Combine:
    """Compiles to the kernel of the step "combine"."""

    def __init__(self, facts: RowsFacts):
        self.ahead, self.local = facts.ahead, facts.local
        self.dtype, self.out_dtype = cutlass_dtype(facts.dtype), cutlass_dtype(facts.out_dtype)

    @cute.jit
    def __call__(
        self,
        pointers: cute.Tensor,  # (ranks,) int64: addresses of each rank's layout, (rows, N); `local` the layout
        places: cute.Tensor,  # (T * k,) int64, as of Places
        weights: cute.Tensor | None,  # (T, k) fp32
        out: cute.Tensor,  # (T, N)
        k: Int32,
        stream: cuda.CUstream,
    ):
        chunks = cute.ceil_div(out.shape[1], VECTOR * WARP * self.ahead)
        self.kernel(pointers, places, weights, out, k, chunks).launch(
            grid=(cute.ceil_div(out.shape[0] * chunks, WARPS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, pointers: cute.Tensor, places: cute.Tensor, weights: cute.Tensor | None, out: cute.Tensor, k: Int32,
        chunks: Int32,
    ):  # fmt: skip
        tidx, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        task = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(tidx // WARP)
        token, first = task // chunks, task % chunks * (WARP * self.ahead) + lane
        parts, width, out_width = out.shape[1] // VECTOR, self.dtype.width // 8, self.out_dtype.width // 8
        if token < out.shape[0]:
            inside = [first + u * WARP < parts for u in range(self.ahead)]
            at = [Int64(first + u * WARP) * VECTOR for u in range(self.ahead)]
            sums = cute.make_rmem_tensor((VECTOR, self.ahead), Float32)
            sums.fill(0.0)
            for j in cutlass.range(k, unroll=1):
                place, weight = places[token * k + j], Float32(1.0)
                valid, owner = place >= 0, Int32(0)
                if const_expr(weights is not None):
                    weight = weights[token, j]
                if valid:
                    owner = Int32(place >> OWNER)
                row = first_of(pointers, owner, self.local) + (place & ((1 << OWNER) - 1)) * (
                    Int64(out.shape[1]) * width
                )
                loaded = [load(row + at[u] * width, self.dtype, inside[u] & valid) for u in range(self.ahead)]
                for u in range_constexpr(self.ahead):
                    values = floats(loaded[u], self.dtype)
                    for v in range_constexpr(VECTOR):
                        value = values[v]
                        if const_expr(weights is not None):
                            value = value * weight
                        sums[v, u] = sums[v, u] + value
            to = out.iterator.toint() + Int64(token) * (Int64(out.shape[1]) * out_width)
            for u in range_constexpr(self.ahead):
                if inside[u]:
                    words = rounded([sums[v, u] for v in range(VECTOR)], self.out_dtype)
                    store(words, to + at[u] * out_width)


class Values:
    """Compiles to the kernel of the step "values"."""

    def __init__(self, facts: RowsFacts):
        self.ahead, self.local = facts.ahead, facts.local

    @cute.jit
    def __call__(
        self,
        pointers: cute.Tensor,  # (ranks,) int64: addresses of each rank's (rows,) fp32; `local` these
        places: cute.Tensor,  # (T * k,) int64, as of Places
        out: cute.Tensor,  # (T * k,) fp32
        stream: cuda.CUstream,
    ):
        grid = (cute.ceil_div(out.shape[0], THREADS * self.ahead), 1, 1)
        self.kernel(pointers, places, out).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, pointers: cute.Tensor, places: cute.Tensor, out: cute.Tensor):
        tidx, bits = cute.arch.thread_idx()[0], cute.make_rmem_tensor(self.ahead, Int32)
        begin = cute.arch.block_idx()[0] * (THREADS * self.ahead) + tidx
        for u in range_constexpr(self.ahead):
            place = places[cutlass.min(begin + u * THREADS, out.shape[0] - 1)]
            valid, owner = place >= 0, Int32(0)
            if valid:
                owner = Int32(place >> OWNER)
            at = first_of(pointers, owner, self.local) + (place & ((1 << OWNER) - 1)) * 4
            bits[u] = load_vector(at, valid, stream=True, words=1, fresh=True)[0]
        values = cute.recast_tensor(bits, Float32)
        for u in range_constexpr(self.ahead):
            if begin + u * THREADS < out.shape[0]:
                out[begin + u * THREADS] = values[u]
