"""The sweep kernel (sm_80): many low block rows in one CTA, which loads each chunk of B once for all of them.

The same idea and the same plan as sweep_sm90.py's, with cp.async, ldmatrix and mma.sync, and nothing swapped: blocks
have 16 rows and more, which is what mma.sync takes. A CTA owns 192 rows of D, three segments of 64, by 128 or 64
columns. It sweeps over the block columns in which one of its rows has a block, in chunks of 64 columns of W, which
need not be neighbours. Every thread loads and every thread multiplies. For chunk i, with `stages - 1` loads in flight:

    wait until chunk i has arrived, __syncthreads: it is visible, and the stage of chunk i - 1 is free
    copy chunk i + stages - 1 into that: its slices of B, and the blocks of A that lie in it; fetch the numbers of the
    next one's, so that no copy waits for an index
    read B's fragments of chunk i, all 64 of its rows; then for each block that is there its own, and multiply

    stage    | A: segment 0 | segment 1 | segment 2 | B |      a segment has room for a full chunk, 64 x 64

Warp (w, c) owns columns 32 c .. 32 c + 31 and half of every segment: rows 32 w .. 32 w + 31. So what a warp does is
static, accumulators included, for blocks 16 and 32 high, of which a half has its own, and for those 64 high, of which
it has 32 rows. A's blocks lie in units of 16 x 16, in the order in which a warp reads them, so the next one's fragments
are fetched before it is known which block that is. What is there says a word of bits a segment and chunk.
"""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.cute.typing import AddressSpace

from cute_kernels.arch import MMA_K
from cute_kernels.config import ELEMENT, GemmFacts
from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.epilogue import EpilogueArgs
from cute_kernels.gemm_sm80 import OperandTile, log2
from cute_kernels.mainloop_sm80 import keep
from cute_kernels.scheduler import TileScheduler
from cute_kernels.store_sm80 import WARP, StoreSm80
from cute_kernels.sweep_tile import CHUNK, CONSUMERS, ROWS, Geometry

from .sweep_blocks import UNIT, VECTOR, BlockLayout

SEGMENT_BYTES = ROWS * CHUNK * ELEMENT
HALF = ROWS // 2  # rows of a segment that a warp owns: two MMAs


class SweepSm80:
    """Compiles to one kernel per `GemmFacts` with `config.sweep`."""

    def __init__(self, facts: GemmFacts):
        cfg = facts.config
        self.facts, self.cfg = facts, cfg
        bm, bk = facts.block.bm, facts.block.bk
        self.geometry = Geometry.of_block(bm, bk)
        self.dtype = cutlass_dtype(facts.dtype)
        self.threads = WARP * cfg.warps_m * cfg.warps_n
        self.block = BlockLayout(bm, self.geometry.width)
        self.b = OperandTile(cfg.tile_n, CHUNK, facts.majors[1] == "k", 8, self.threads, cfg.warps_n, True)
        self.a_bytes = CONSUMERS * SEGMENT_BYTES
        self.stage_bytes = self.a_bytes + self.b.bytes
        self.rows = max(1, HALF // bm)  # block rows of a segment that a warp owns
        self.own = (1 << (self.rows * self.geometry.steps)) - 1  # their bits in a word
        self.shift = self.rows * self.geometry.steps if bm < ROWS else 0  # of the second half's
        self.store = StoreSm80(of_segment(facts), cutlass_dtype(facts.out_dtype))
        self.smem_bytes = max(cfg.stages * self.stage_bytes, self.store.bytes)

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (bm, bk, nnz)
        mB: cute.Tensor,  # (N, K, L)
        mD: cute.Tensor,  # (M, N, 1, L)
        source,
        args: EpilogueArgs,
        group: Int32,
        max_ctas: Int32,  # has no meaning here: one CTA does one work tile
        stream: cuda.CUstream,
    ):
        tiles_m, tiles_n = cute.ceil_div(mD.shape[0], ROWS * CONSUMERS), cute.ceil_div(mD.shape[1], self.cfg.tile_n)
        scheduler = TileScheduler(tiles_m, tiles_n, mD.shape[3], group)
        self.kernel(mA, mB, mD, source, args, scheduler).launch(
            grid=(scheduler.count, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        source,
        args: EpilogueArgs,
        scheduler: TileScheduler,
    ):
        cfg = self.cfg
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index_warp = (warp_index % cfg.warps_m, warp_index // cfg.warps_m)  # (warp_m, warp_n)
        smem = cutlass.utils.SmemAllocator().allocate(self.smem_bytes, byte_alignment=UNIT).toint()
        m, n, l = scheduler.decode(cute.arch.block_idx()[0])
        # Of each segment (MMA, MMA_M, MMA_N)
        acc = [cute.make_rmem_tensor((4, 2, self.store.mmas_n), Float32) for _ in range(CONSUMERS)]
        for segment in range_constexpr(CONSUMERS):
            acc[segment].fill(0.0)
        self.mma(source, source.for_tile(m, 0), mA, mB[None, None, l], m, n, acc, smem, index_warp, warp_index)

        # The last copies, and other warps' reads, must be done before the ring becomes store buffers.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        extent = (mD.shape[0], mD.shape[1])
        for segment in range_constexpr(CONSUMERS):
            tile = (m * CONSUMERS + segment, n, 0, l)
            self.store.store(acc[segment], args, mD, smem, extent, tile, index_warp, warp_index)
            if const_expr(segment + 1 < CONSUMERS):
                cute.arch.sync_warp()  # its lanes have read what the next one overwrites

    @cute.jit
    def mma(self, source, chunks, mA, mB, m, n, acc: list, ring: Int32, index_warp: tuple, warp_index: Int32):
        """Sum over all chunks."""
        count, stages = chunks.count, const_expr(self.cfg.stages)
        if count > 0:
            lane = cute.arch.lane_idx()
            part_b = self.thread_part(mB, n)
            # The next chunk to load: of each segment its word, where its blocks begin in the source's order, and
            # their numbers (lane j: block j); and the slices of B (lane s: slice s).
            words, at, numbers = (cute.make_rmem_tensor(CONSUMERS, Int32) for _ in range(3))
            slices = cute.make_rmem_tensor(1, Int32)
            coming = (words, at, numbers, slices)
            for s in range_constexpr(CONSUMERS):
                at[s] = source.first_block(m, 0, s)
            self.fetch(source, chunks, Int32(0), *coming)
            for s in range_constexpr(stages - 1):
                stage = ring + s * self.stage_bytes
                self.load(source, chunks, Int32(s), mA, mB, part_b, stage, warp_index, coming)
            lanes = (self.block.lane_offset(lane), self.b.lane_offset(lane, index_warp[1]))
            read, write = ring, ring + (stages - 1) * self.stage_bytes
            for i in cutlass.range(count, unroll=1):
                now = [chunks.word(i, s) for s in range(CONSUMERS)]  # in time, while others are waited for
                cute.arch.cp_async_wait_group(stages - 2)
                cute.arch.sync_threads()
                self.load(source, chunks, i + (stages - 1), mA, mB, part_b, write, warp_index, coming)
                self.multiply_chunk(now, acc, read, lanes, index_warp[0])
                write = read
                read = read + self.stage_bytes
                if read == ring + stages * self.stage_bytes:
                    read = ring

    # ------------------------------------------------------------------ global memory -> shared memory

    def fetch(self, source, chunks, i, words, at, numbers, slices):
        """The indices of chunk i, or, past the end, of the last one."""
        lane = cute.arch.lane_idx()
        for s in range(CONSUMERS):
            words[s] = chunks.word(i, s)
            numbers[s] = source.block(at[s] + lane)
        slices[0] = chunks.slice(i * self.geometry.slices + (lane & (self.geometry.slices - 1)))

    @cute.jit
    def load(self, source, chunks, i, mA, mB, part_b: tuple, stage: Int32, warp_index: Int32, coming: tuple):
        """Issue and commit the copies of chunk i as one group, an empty one past the end, and fetch what comes next."""
        words, at, numbers, slices = coming
        if i < chunks.count:
            self.load_b(mB, part_b, stage + self.a_bytes, slices)
            counts = [cute.arch.popc(words[s]) for s in range(CONSUMERS)]
            parts = const_expr(self.geometry.parts)
            part = cute.arch.shuffle_sync(slices[0], 0) % parts if const_expr(parts > 1) else Int32(0)
            self.load_a(mA, counts, part, stage, warp_index, numbers)
            for s in range_constexpr(CONSUMERS):
                # A block wider than a chunk is met in several.
                at[s] = at[s] + (counts[s] if const_expr(parts == 1) else counts[s] * Int32(part == parts - 1))
            self.fetch(source, chunks, i + 1, *coming)
        cute.arch.cp_async_commit_group()

    def thread_part(self, mB, n) -> tuple:
        """(row, slice, to, source): this thread's first vector of B.

        Its row of mB, its slice of a chunk, its place in a stage; and where slice 0 of mB has it, in bytes. Row-major B
        needs no row: the vectors of a thread are in one.
        """
        b, width = self.b, self.geometry.width
        line, element = b.position(cute.arch.thread_idx()[0])
        to = b.offset(line, element * ELEMENT)
        if b.k_major:
            source = mB.iterator.toint() + Int64(element & (width - 1)) * ELEMENT
            return n * b.rows + line, element >> log2(width), to, keep(source)
        # What stands in columns past the extent does not matter, since what comes of it is never stored.
        row = cutlass.min(n * b.rows + element, mB.shape[0] - b.vector)
        source = mB.iterator.toint() + (Int64(row) * mB.stride[0] + Int64(line) * mB.stride[1]) * ELEMENT
        return row, 0, to, keep(source)

    @cute.jit
    def load_b(self, mB, part_b: tuple, stage: Int32, slices):
        """The chunk's slices: of each thread 16 bytes of some rows of mB or, if it is K-major, of some columns."""
        b, width = const_expr(self.b), const_expr(self.geometry.width)
        row, slice_, to, source = part_b
        if const_expr(b.k_major):
            number = Uint32(cute.arch.shuffle_sync(slices[0], slice_))
            source = source + Int64(number) * (width * ELEMENT)
        for v in range_constexpr(b.copies):
            line = const_expr(v * b.stride)
            x, add = b.split(line, 0)
            if const_expr(b.k_major):
                at = source + Int64(cutlass.min(row + line, mB.shape[0] - 1)) * mB.stride[0] * ELEMENT
            else:  # a slice has a multiple of `stride` lines
                number = Uint32(cute.arch.shuffle_sync(slices[0], line // width))
                at = source + Int64(number) * (mB.stride[1] * (width * ELEMENT))
                at = at + mB.stride[1] * (line % width * ELEMENT)
            self.copy_vector(at, stage + (to ^ x) + add)

    @cute.jit
    def load_a(self, mA, counts: list, part: Int32, stage: Int32, warp_index: Int32, numbers):
        """The chunk's blocks, in pieces that the warps deal out."""
        bm, bk, _ = mA.shape
        lane = cute.arch.lane_idx()
        second, third = counts[0], counts[0] + counts[1]  # where segments begin among the chunk's blocks
        end = (third + counts[2]) * self.block.pieces
        warps = const_expr(self.threads // WARP)
        for q in cutlass.range(warp_index, end, warps, unroll=1):
            j, piece, mine, to = q >> log2(self.block.pieces), q & (self.block.pieces - 1), numbers[0], stage
            if j >= third:
                j, mine, to = j - third, numbers[2], stage + 2 * SEGMENT_BYTES
            elif j >= second:
                j, mine, to = j - second, numbers[1], stage + SEGMENT_BYTES
            number = cute.arch.shuffle_sync(mine, j)
            row, vector = self.block.vector(piece, lane)
            source = mA.iterator.toint() + Int64(Uint32(number)) * (bm * bk * ELEMENT)
            source = source + (row * bk + part * CHUNK) * ELEMENT + vector * VECTOR
            self.copy_vector(source, to + j * self.block.bytes + self.block.offset(row, vector))

    def copy_vector(self, source: Int64, to: Int32):
        gX = cute.make_tensor(make_ptr(self.dtype, source, AddressSpace.gmem, assumed_align=VECTOR), 8)
        sX = cute.make_tensor(make_ptr(self.dtype, to, AddressSpace.smem, assumed_align=VECTOR), 8)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128)
        cute.copy(atom, gX, sX)

    # ------------------------------------------------------------------ shared memory -> registers -> tensor cores

    @cute.jit
    def multiply_chunk(self, now: list, acc: list, stage: Int32, lanes: tuple, half: Int32):
        """Add the products of the chunk in `stage`, whose words are `now`."""
        block, steps = const_expr(self.block), const_expr(self.geometry.steps)
        words, at, any_ = [], [], Int32(0)
        for s in range_constexpr(CONSUMERS):
            word = cute.arch.make_warp_uniform(now[s])
            if const_expr(self.shift == 0):
                skipped = half * (block.units * UNIT)
            else:
                below = half * const_expr((1 << self.shift) - 1)  # bits of the other half's blocks, which come first
                skipped = cute.arch.popc(word & below) * block.bytes
                word = word >> half * self.shift
            words.append(word & self.own)
            at.append(stage + s * SEGMENT_BYTES + skipped + lanes[0])
            any_ = any_ | words[s]
        for r in range_constexpr(1, self.rows):
            any_ = any_ | any_ >> (r * steps)
        # B's fragments for all of the chunk that this warp needs; of A's, two units of each segment.
        rB = [cute.make_rmem_tensor((4, self.store.mmas_n), self.dtype) for _ in range(CHUNK // MMA_K)]
        rA = [[cute.make_rmem_tensor((8, 1), self.dtype) for _ in range(2)] for _ in range(CONSUMERS)]
        for s in range_constexpr(steps):
            if any_ & (1 << s) != 0:
                for k in range_constexpr(block.steps):
                    self.read_b(s * block.steps + k, lanes[1], stage + self.a_bytes, rB)
        for s in range_constexpr(CONSUMERS):
            if words[s] != 0:
                self.read_a(at[s], 0, rA[s][0])
        for s in range_constexpr(CONSUMERS):
            self.multiply_segment(words[s], at[s], acc[s], rA[s], rB)

    @cute.jit
    def multiply_segment(self, word: Int32, at: Int32, acc, rA: list, rB: list):
        """The blocks of a segment that are there; rA[0] holds the first one's first unit, `at` says where it lies."""
        block, steps = const_expr(self.block), const_expr(self.geometry.steps)
        for r in range_constexpr(self.rows):
            if word & (((1 << steps) - 1) << r * steps) != 0:
                for s in range_constexpr(steps):
                    bit = const_expr(1 << (r * steps + s))
                    if word & bit != 0:
                        for u in range_constexpr(block.units):
                            this, other = const_expr(u % 2), const_expr((u + 1) % 2)
                            if const_expr(u + 1 < block.units):
                                self.read_a(at, u + 1, rA[other])
                            else:
                                at = at + block.bytes
                                if word >= 2 * bit:  # there is another block
                                    self.read_a(at, 0, rA[other])
                            slab = const_expr(r * block.slabs + u % block.slabs)
                            self.multiply(acc, slab, rA[this], rB[s * block.steps + u // block.slabs])
                        if const_expr(block.units % 2):
                            rA[0].store(rA[1].load())

    def read_a(self, at: Int32, u: int, rA):
        """ldmatrix a warp's unit u of the block at `at`, which has the lane's offset in it."""
        at = (at ^ (self.block.flip(u // self.block.slabs) << 5)) + u * UNIT
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        at = make_ptr(self.dtype, at, AddressSpace.smem, assumed_align=VECTOR)
        cute.copy(atom, cute.make_tensor(at, 8), cute.make_tensor(rA.iterator, 8))

    def read_b(self, k: int, lane: Int32, stage: Int32, rB: list):
        """ldmatrix the warp's columns of step k of a chunk: 16 an instruction."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not self.b.k_major, 4), self.dtype)
        to = cute.make_tensor(rB[k].iterator, cute.make_layout((8, self.b.span // 16)))
        for i in range(self.b.span // 16):
            x, add = self.b.step(i, k)
            at = make_ptr(self.dtype, stage + (lane ^ x) + add, AddressSpace.smem, assumed_align=VECTOR)
            cute.copy(atom, cute.make_tensor(at, 8), to[None, i])

    def multiply(self, acc, slab: int, rA, rB):
        """Add a unit's products to the accumulators of its 16 rows."""
        atom = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)))
        n = self.store.mmas_n
        mine = cute.make_tensor(acc.iterator + 4 * slab, cute.make_layout((4, 1, n), stride=(1, 0, 8)))
        cute.gemm(atom, mine, rA, rB, mine)


def of_segment(facts: GemmFacts) -> GemmFacts:
    """The facts of one segment's rows: what the store sees, once for each."""
    return replace(facts, config=replace(facts.config, tile_m=ROWS))
