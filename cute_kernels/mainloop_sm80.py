"""The sm_80 mainloop: cp.async fills a ring of shared-memory stages, warps multiply out of it with mma.sync.

Every thread loads and every thread multiplies. For K-tile i, with `stages - 1` loads in flight:

    first MMA step    issue the copies of K-tile i + stages - 1 into the stage that K-tile i - 1 has left, commit
    last MMA step     wait until K-tile i + 1 has arrived, __syncthreads: it is visible, and stage i is free
    every MMA step    ldmatrix the next step's fragments into the other register buffer, multiply this one's

Where the tiles lie is the source's business (k_tiles.py). Its answer is fetched one K-tile ahead, because for a
sparse source it is a load from memory. Past the last K-tile it is asked for the last one again, so that it reads
nothing out of range, and all copies are turned into zero fills, which read nothing at all: no branch is needed.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.cute.typing import AddressSpace

from .config import ELEMENT
from .k_tiles import MMA_K

CHUNK = 16  # bytes; what ldmatrix reads of a line, and the unit of the swizzle


def log2(x: int) -> int:
    assert x > 0 and x & (x - 1) == 0, f"{x} is no power of two"
    return x.bit_length() - 1


@dataclass(frozen=True)
class OperandTile:
    """A (rows, tile_k) tile of A or B: where its elements lie in a stage, who copies them and who reads them.

    A stage holds lines along the contiguous mode: tile_k elements of one row, or all rows of one k. The 16-byte
    chunks of a line are permuted by an XOR with bits of the line's number, so that eight lanes hit 32 banks both
    when they copy along a line and when ldmatrix reads one chunk from each of eight lines.

    Offsets are linear over disjoint bits: offset(line + 2^i, byte) differs from offset(line, byte) by an XOR and an
    addition that are known at compile time (`split`). So a thread needs one base, however many vectors it moves.
    The methods take Python integers as well as Int32, and are checked on the host.
    """

    rows: int
    tile_k: int
    k_major: bool
    vector: int  # elements of one copy
    threads: int
    warps: int  # how many share the rows
    is_b: bool

    @property
    def lines(self) -> int:
        return self.rows if self.k_major else self.tile_k

    @property
    def line_bytes(self) -> int:
        return 2 * (self.tile_k if self.k_major else self.rows)

    @property
    def bytes(self) -> int:
        return self.lines * self.line_bytes

    @property
    def span(self) -> int:
        """Rows of one warp."""
        return self.rows // self.warps

    def swizzle(self, line):
        """The XOR for a line, in bytes."""
        chunks = min(8, self.line_bytes // CHUNK)
        return ((line >> log2(8 // chunks)) & (chunks - 1)) << 4

    def offset(self, line, byte):
        return line * self.line_bytes + (byte ^ self.swizzle(line))

    def split(self, line: int, byte: int) -> tuple[int, int]:
        """(x, add): offset(l + line, b + byte) == (offset(l, b) ^ x) + add where no bit is set on both sides."""
        mask = min(8 * CHUNK, self.line_bytes) - CHUNK
        return (byte & mask) ^ self.swizzle(line), line * self.line_bytes + (byte & ~mask)

    # ------------------------------------------------------------------ copying: vector index = thread + j * active

    @property
    def active(self) -> int:
        """Threads that copy: a small tile has fewer vectors than the CTA has threads."""
        return min(self.threads, self.bytes // (2 * self.vector))

    @property
    def copies(self) -> int:
        return self.bytes // (2 * self.vector * self.active)

    @property
    def stride(self) -> int:
        """Lines between two vectors of a thread, where they are 16 bytes long."""
        return self.position(self.active)[0]

    def position(self, index):
        """(line, element) of a vector."""
        bits = log2(self.line_bytes // (2 * self.vector))
        return index >> bits, (index & ((1 << bits) - 1)) * self.vector

    # ------------------------------------------------------------------ reading: ldmatrix x4 = 16 rows x 16 k

    def lane_offset(self, lane, index_warp):
        """Where a lane's eight-element row of its 8 x 8 matrix lies, for the warp's first 16 rows and first 16 k.

        A fragment's four matrices run along its rows first for A, along k first for B.
        """
        i, r = lane >> 3, lane & 7
        row_half, k_half = (i >> 1, i & 1) if self.is_b else (i & 1, i >> 1)
        row = index_warp * self.span + row_half * 8
        if self.k_major:
            return self.offset(row + r, k_half * CHUNK)
        return self.offset(k_half * 8 + r, row * 2)

    def step(self, i: int, k: int) -> tuple[int, int]:
        """`split` of the warp's i-th 16 rows and k-th 16 columns."""
        return self.split(16 * i, 2 * MMA_K * k) if self.k_major else self.split(MMA_K * k, 32 * i)


def keep(value: Int64) -> Int64:
    """The value, made once: the compiler sees no way to compute it anew in a loop, which it would prefer to do."""
    return cute.arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[value])


class MainloopSm80:
    """Steps of one work tile; see the schedule above. Addresses are integers: bytes, shared ones 32 bits wide."""

    def __init__(self, facts, dtype, threads: int):
        cfg = facts.config
        self.dtype = dtype
        self.stages, self.tile_k = cfg.stages, cfg.tile_k
        self.k_blocks, self.clips_k = facts.k_blocks, facts.clips_k
        self.period = len(self.k_blocks)
        # The two register buffers alternate with the MMA steps, so a loop's body must hold an even number of them.
        self.unroll = 1 + sum(self.k_blocks) % 2
        vectors = [1 if major == "any" else align for major, align in zip(facts.majors, facts.aligns)]
        a_k, b_k = facts.majors[0] != "m", facts.majors[1] != "n"
        self.a = OperandTile(cfg.tile_m, cfg.tile_k, a_k, vectors[0], threads, cfg.warps_m, False)
        self.b = OperandTile(cfg.tile_n, cfg.tile_k, b_k, vectors[1], threads, cfg.warps_n, True)
        self.stage_bytes = self.a.bytes + self.b.bytes
        self.mmas_m, self.mmas_n = self.a.span // 16, self.b.span // 8

    # ------------------------------------------------------------------ global memory -> shared memory

    @cute.jit
    def load(
        self,
        tile,  # KTile
        left: Int32,  # K-tiles that are left, this one included; below 1, nothing is read
        j: cutlass.Constexpr,  # number of the K-tile in its period
        mA: cute.Tensor,  # (M, K, outer_a)
        mB: cute.Tensor,  # (N, K, outer_k)
        threads: tuple,  # thread_part of A and of B
        stage: Int32,
    ):
        """Issue and commit the copies of one K-tile, as one group."""
        cols = const_expr(self.k_blocks[j % self.period] * MMA_K)
        self.copy(self.a, mA, tile.a[1:], left, cols, threads[0], stage)
        self.copy(self.b, mB, tile.b, left, cols, threads[1], stage + self.a.bytes)
        cute.arch.cp_async_commit_group()

    def thread_part(self, op: OperandTile, mX: cute.Tensor, rest: Int32) -> tuple:
        """(row0, line, element, to, sources): what this thread's copies have in common in all K-tiles.

        `to` is where its first vector goes in a stage; `sources` where its vectors of a k-major operand come from,
        or where the first one comes from if lines are steps of k: bytes past the tile's column 0.
        Rows past the extent are read from the last one: it is there, and what comes of it is never stored.
        """
        extent = mX.shape[0]
        s_row, s_k = [stride * ELEMENT for stride in mX.stride[:2]]
        row0 = rest * op.rows
        line, element = op.position(cute.arch.thread_idx()[0])
        if op.vector < 8:
            sources = []
        elif not op.k_major:
            sources = [Int64(cutlass.min(row0 + element, extent - op.vector)) * s_row + Int64(line) * s_k]
        elif isinstance(extent, int) and extent % op.rows == 0:
            first = Int64(row0 + line) * s_row + Int64(element) * s_k
            sources = [first + v * op.stride * s_row for v in range(op.copies)]
        else:
            rows = [cutlass.min(row0 + line + v * op.stride, extent - 1) for v in range(op.copies)]
            sources = [Int64(row) * s_row + Int64(element) * s_k for row in rows]
        if len(sources) <= 4:
            sources = [keep(source) for source in sources]
        return row0, line, element, op.offset(line, element * ELEMENT), sources

    @cute.jit
    def copy(
        self,
        op: cutlass.Constexpr,
        mX: cute.Tensor,  # (rows, K, outer)
        tile: tuple,  # (rest_k, outer)
        left: Int32,
        cols: cutlass.Constexpr,  # columns that an MMA step will read
        thread: tuple,
        stage: Int32,
    ):
        """Copy one operand's tile; columns past the extent of mode K become zeros."""
        k0 = tile[0] * op.tile_k
        source = mX.iterator.toint() + (Int64(tile[1]) * mX.stride[2] + Int64(k0) * mX.stride[1]) * ELEMENT
        # Columns of this tile that exist; below 1 of them, all copies are zero fills.
        columns = mX.shape[1] - k0 if const_expr(self.clips_k) else cols
        limit = cutlass.min(left * op.tile_k, columns)
        tidx = cute.arch.thread_idx()[0]
        copy = const_expr(self.copy_wide if op.vector == 8 else self.copy_narrow)
        if const_expr(op.active == op.threads):
            copy(op, mX, source, left, limit, cols, thread, stage, tidx)
        elif tidx < op.active:
            copy(op, mX, source, left, limit, cols, thread, stage, tidx)

    @cute.jit
    def copy_wide(
        self,
        op: cutlass.Constexpr,
        mX: cute.Tensor,
        source: Int64,
        left: Int32,
        limit: Int32,
        cols: cutlass.Constexpr,
        thread: tuple,
        stage: Int32,
        tidx: Int32,
    ):
        """This thread's 16-byte vectors: unrolled, from one base."""
        _, line, element, to, sources = thread
        at = source + sources[0]
        for v in range_constexpr(op.copies):
            x, add = op.split(v * op.stride, 0)
            if const_expr(op.k_major):
                self.copy_vector(op, source + sources[v], stage + (to ^ x) + add, element < limit)
            elif const_expr(v * op.stride < cols):
                partial = const_expr(self.clips_k or (v + 1) * op.stride > cols)
                valid = limit - line > v * op.stride if const_expr(partial) else left > 0
                self.copy_vector(op, at, stage + (to ^ x) + add, valid)
                at = at + op.stride * mX.stride[1] * ELEMENT

    @cute.jit
    def copy_narrow(
        self,
        op: cutlass.Constexpr,
        mX: cute.Tensor,
        source: Int64,
        left: Int32,
        limit: Int32,
        cols: cutlass.Constexpr,
        thread: tuple,
        stage: Int32,
        tidx: Int32,
    ):
        """This thread's vectors below 16 bytes: there are many, so in a loop, each from its own coordinates."""
        for v in cutlass.range(op.copies, unroll=4):
            line, element = op.position(tidx + v * op.active)
            row, k = (line, element) if const_expr(op.k_major) else (element, line)
            row = cutlass.min(thread[0] + row, mX.shape[0] - (1 if const_expr(op.k_major) else op.vector))
            at = source + (Int64(row) * mX.stride[0] + Int64(k) * mX.stride[1]) * ELEMENT
            self.copy_vector(op, at, stage + op.offset(line, element * ELEMENT), k < limit)

    @cute.jit
    def copy_vector(self, op: cutlass.Constexpr, source: Int64, to: Int32, valid: cutlass.Boolean):
        """One vector, or zeros where it is not valid."""
        size = const_expr(op.vector * ELEMENT)
        layout = cute.make_layout(((op.vector, 1), 1))  # ((vector, rest), copies)
        gX = cute.make_tensor(make_ptr(self.dtype, source, AddressSpace.gmem, assumed_align=size), layout)
        sX = cute.make_tensor(make_ptr(self.dtype, to, AddressSpace.smem, assumed_align=size), layout)
        if const_expr(op.vector > 1):
            # With a predicate that is false, cp.async reads nothing and writes zeros.
            mode = const_expr(LoadCacheMode.GLOBAL if size == CHUNK else LoadCacheMode.ALWAYS)
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), self.dtype, num_bits_per_copy=8 * size)
            pred = cute.make_rmem_tensor((1, 1), cutlass.Boolean)  # (rest, copies)
            pred[0] = valid
            cute.copy(atom, gX, sX, pred=pred)
        else:
            value = self.dtype(0.0)
            if valid:
                value = gX[0]
            sX[0] = value

    # ------------------------------------------------------------------ shared memory -> registers -> tensor cores

    @cute.jit
    def read(self, op: cutlass.Constexpr, k: cutlass.Constexpr, lane: Int32, stage: Int32, rX: cute.Tensor):
        """ldmatrix one operand's fragments of MMA step k: 16 rows an instruction."""
        # Lines along k need no transposing: the tensor core takes pairs along k in one register.
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not op.k_major, 4), self.dtype)
        rX = cute.make_tensor(rX.iterator, cute.make_layout((8, op.span // 16)))  # two n8 fragments of B are one x4
        for i in range_constexpr(op.span // 16):
            x, add = op.step(i, k)
            at = make_ptr(self.dtype, stage + (lane ^ x) + add, AddressSpace.smem, assumed_align=CHUNK)
            cute.copy(atom, cute.make_tensor(at, 8), rX[None, i])

    @cute.jit
    def multiply(self, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
        """One MMA step. Every other row of products runs backwards, to begin with the B fragment just used."""
        atom = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, cutlass.Float32, (16, 8, 16)))
        cute.gemm(atom, acc, rA, rB, acc)

    @cute.jit
    def mma(
        self,
        k_tiles,
        mA: cute.Tensor,  # (M, K, outer_a)
        mB: cute.Tensor,  # (N, K, outer_k) of this work tile's l
        n: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N), zeros
        ring: Int32,  # PIPE stages of A and B
        index_warp: tuple,  # (warp_m, warp_n)
    ):
        """Accumulate every K-tile into acc."""
        count = k_tiles.count
        if count > 0:
            lane = cute.arch.lane_idx()
            lanes = (self.a.lane_offset(lane, index_warp[0]), self.b.lane_offset(lane, index_warp[1]))
            # Two of each, for this MMA step and the next: (8, MMA_M) and (4, MMA_N)
            rA = [cute.make_rmem_tensor((8, self.mmas_m), self.dtype) for _ in range(2)]
            rB = [cute.make_rmem_tensor((4, self.mmas_n), self.dtype) for _ in range(2)]
            tile = k_tiles.at(Int32(0))
            threads = (self.thread_part(self.a, mA, tile.a[0]), self.thread_part(self.b, mB, n))
            for s in range_constexpr(self.stages - 1):
                self.load(tile, count - s, s, mA, mB, threads, ring + s * self.stage_bytes)
                tile = k_tiles.at(cutlass.min(Int32(s + 1), count - 1))
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.sync_threads()
            self.read_step(0, lanes, ring, rA[0], rB[0])
            left = count - (self.stages - 1)
            read, write = ring, ring + (self.stages - 1) * self.stage_bytes
            for _ in cutlass.range(count // (self.period * self.unroll), unroll=1):
                for u in range_constexpr(self.unroll):
                    tile, left, read, write = self.run_period(
                        u, k_tiles, tile, left, read, write, mA, mB, threads, acc, ring, lanes, rA, rB
                    )
            if const_expr(self.unroll > 1):
                if count // self.period % self.unroll > 0:
                    self.run_period(0, k_tiles, tile, left, read, write, mA, mB, threads, acc, ring, lanes, rA, rB)

    @cute.jit
    def run_period(
        self,
        u: cutlass.Constexpr,
        k_tiles,
        tile,  # the next K-tile to load
        left: Int32,
        read: Int32,
        write: Int32,
        mA: cute.Tensor,
        mB: cute.Tensor,
        threads: tuple,
        acc: cute.Tensor,
        ring: Int32,
        lanes: tuple,
        rA: list,
        rB: list,
    ):
        """Multiply one period of K-tiles, and load as many ahead."""
        step = const_expr(u * sum(self.k_blocks))
        for j in range_constexpr(self.period):
            blocks = const_expr(self.k_blocks[j])
            for k in range_constexpr(blocks):
                buffer, other = const_expr(step % 2), const_expr((step + 1) % 2)
                if const_expr(k + 1 < blocks):
                    self.read_step(k + 1, lanes, read, rA[other], rB[other])
                if const_expr(k == 0):
                    self.load(tile, left, j + self.stages - 1, mA, mB, threads, write)
                    left = left - 1
                    # The mask says that the number is not negative, which makes a source's divisions cheap.
                    tile = k_tiles.at((k_tiles.count - cutlass.max(left, 1)) & 0x7FFFFFFF)
                if const_expr(k + 1 == blocks):
                    write = read
                    read = read + self.stage_bytes
                    if read == ring + self.stages * self.stage_bytes:
                        read = ring
                    cute.arch.cp_async_wait_group(self.stages - 2)
                    cute.arch.sync_threads()
                    self.read_step(0, lanes, read, rA[other], rB[other])
                self.multiply(acc, rA[buffer], rB[buffer])
                step = const_expr(step + 1)
        return tile, left, read, write

    def read_step(self, k: int, lanes: tuple, stage: Int32, rA: cute.Tensor, rB: cute.Tensor):
        self.read(self.a, k, lanes[0], stage, rA)
        self.read(self.b, k, lanes[1], stage + self.a.bytes, rB)
