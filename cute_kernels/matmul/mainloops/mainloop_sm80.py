"""The sm_80 mainloop: cp.async fills a ring of shared-memory stages, warps multiply out of it with mma.sync.

Every thread loads and every thread multiplies. For K-tile i, with `stages - 1` loads in flight:

    first MMA step    issue the copies of K-tile i + stages - 1 into the stage that K-tile i - 1 has left, commit
    last MMA step     wait until K-tile i + 1 has arrived, __syncthreads: it is visible, and stage i is free
    every MMA step    ldmatrix the next step's fragments into the other register buffer, multiply this one's

Where the tiles lie is the source's business (k_tiles.py). Its answer is fetched one K-tile ahead, because for a
sparse source it is a load from memory. Past the last K-tile it is asked for the last one again, so that it reads
nothing out of range, and all copies are turned into zero fills, which read nothing at all: no branch is needed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from ...tile.ampere import CHUNK, TileSteps, rounded_to_tf32
from ...tile.ptx import opaque
from .block_scaled_sm80 import load_scales, multiply_scales


def of_mma(fragments: cute.Tensor, i: int) -> cute.Tensor:
    """(bytes of a thread, 1) of the i-th of (bytes of a thread, MMAs)."""
    return cute.append_ones(fragments[None, i], up_to_rank=2)


class MainloopSm80(TileSteps):
    """Steps of one work tile; see the schedule above."""

    stored = 1  # of so many columns of A one is stored

    def __init__(self, facts, dtype, a, b):  # OperandTiles
        super().__init__(dtype)
        self.stages = facts.config.stages
        self.element, self.promotes = facts.element, facts.promotes
        self.scaled = facts.block is not None and facts.block.scaled  # promoted accumulation, times the block's scale
        self.k_blocks, self.clips_k = facts.k_blocks, facts.clips_k
        self.period = len(self.k_blocks)
        # The two register buffers alternate with the MMA steps, so a loop's body must hold an even number of them.
        self.unroll = 1 + sum(self.k_blocks) % 2
        self.a, self.b = a, b
        self.stage_bytes = a.bytes + b.bytes
        self.mmas_m, self.mmas_n = a.span // 16, b.span // 8

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
        cols = const_expr(self.k_blocks[j % self.period] * self.element.mma_k)
        self.copy(self.a, mA, tile.a[1:], left, cols, threads[0], stage)
        self.copy(self.b, mB, tile.b, left, cols * self.stored, threads[1], stage + self.a.bytes)
        cute.arch.cp_async_commit_group()

    def thread_part(self, op, mX: cute.Tensor, rest: Int32) -> tuple:
        """(row0, line, element, to, source): what this thread's copies have in common in all K-tiles.

        `to` is where its first vector goes in a stage; `source` where that comes from, in bytes past the tile's
        column 0. Rows past the extent may hold anything, since their results are never stored.
        """
        line, element = op.position(cute.arch.thread_idx()[0])
        row0 = rest * op.rows
        row, k = (row0 + line, element) if op.k_major else (cutlass.min(row0 + element, mX.shape[0] - op.vector), line)
        source = (Int64(row) * mX.stride[0] + Int64(k) * mX.stride[1]) * op.element.width
        return row0, line, element, op.offset(line, element * op.element.width), opaque(source)

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
        width = const_expr(op.element.width)
        source = mX.iterator.toint() + (Int64(tile[1]) * mX.stride[2] + Int64(k0) * mX.stride[1]) * width
        # Columns of this tile that exist; below 1 of them, all copies are zero fills.
        columns = mX.shape[1] - k0 if const_expr(self.clips_k) else cols
        limit = cutlass.min(left * op.tile_k, columns)
        tidx = cute.arch.thread_idx()[0]
        copy = const_expr(self.copy_wide if op.vector_bytes == CHUNK else self.copy_narrow)
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
        row0, line, element, to, at = thread
        at = source + at
        # Number of lines from this thread's first one on; 0 if its columns do not exist. All lines are known to exist
        # if tiles divide the rows, and for steps of k inside the multiplied extent.
        extent = mX.shape[0]
        exact = const_expr(isinstance(extent, int) and extent % op.rows == 0)
        there = limit - (element if const_expr(op.k_major) else line)
        if const_expr(op.k_major and not exact):
            there = cutlass.min(extent - row0 - line, cutlass.min(there, 1) * op.rows)
        for v in range_constexpr(op.copies):
            lines = const_expr(v * op.stride)
            if const_expr(op.k_major):
                valid = there > (0 if const_expr(exact) else lines)
            elif const_expr(self.clips_k or lines + op.stride > cols):
                valid = there > lines
            else:
                valid = left > 0
            if const_expr(op.k_major or lines < cols):
                x, add = op.split(lines, 0)
                self.copy_vector(op, at, stage + (to ^ x) + add, valid)
                at = at + op.stride * mX.stride[0 if op.k_major else 1] * op.element.width

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
        width = const_expr(op.element.width)
        for v in cutlass.range(op.copies, unroll=4):
            line, element = op.position(tidx + v * op.active)
            row, k = (line, element) if const_expr(op.k_major) else (element, line)
            row = cutlass.min(thread[0] + row, mX.shape[0] - (1 if const_expr(op.k_major) else op.vector))
            at = source + (Int64(row) * mX.stride[0] + Int64(k) * mX.stride[1]) * width
            self.copy_vector(op, at, stage + op.offset(line, element * width), k < limit)

    # ------------------------------------------------------------------ shared memory -> registers -> tensor cores

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
        scaling=None,  # what products need of A or B besides: BlockScaling, where there are scales of blocks
    ):
        """Accumulate every K-tile into acc."""
        count = k_tiles.count
        if count > 0:
            lane = cute.arch.lane_idx()
            lanes = (self.a.lane_offset(lane, index_warp[0]), self.b.lane_offset(lane, index_warp[1]))
            rA, rB = self.fragments()
            tile = k_tiles.at(Int32(0))
            if const_expr(scaling is not None):
                self.load_ahead(scaling, tile)
                self.use_next(scaling)
            threads = (self.thread_part(self.a, mA, tile.a[0]), self.thread_part(self.b, mB, n))
            for s in range_constexpr(self.stages - 1):
                self.load(tile, count - s, s, mA, mB, threads, ring + s * self.stage_bytes)
                tile = k_tiles.at(cutlass.min(Int32(s + 1), count - 1))
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.sync_threads()
            self.read_step(0, lanes, ring, rA[0], rB[0])
            left = count - (self.stages - 1)
            scales = None
            if const_expr(self.scaled):
                scales = cute.make_rmem_tensor(2, Float32)  # of the K-tile that is multiplied, and of the next
                scales[1] = k_tiles.scale(0)
            read, write = ring, ring + (self.stages - 1) * self.stage_bytes
            for _ in cutlass.range(count // (self.period * self.unroll), unroll=1):
                for u in range_constexpr(self.unroll):
                    tile, left, read, write = self.run_period(
                        u, k_tiles, tile, left, read, write, mA, mB, threads, acc, ring, lanes, rA, rB, scaling, scales
                    )
            if const_expr(self.unroll > 1):
                if count // self.period % self.unroll > 0:
                    self.run_period(
                        0, k_tiles, tile, left, read, write, mA, mB, threads, acc, ring, lanes, rA, rB, scaling, scales
                    )

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
        scaling,  # BlockScaling, or None
        scales: cute.Tensor | None,  # (2,)
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
                    if const_expr(self.scaled):
                        scales[0] = scales[1]
                        scales[1] = k_tiles.scale(k_tiles.count - (self.stages - 1) - left + 1)
                    self.load(tile, left, j + self.stages - 1, mA, mB, threads, write)
                    left = left - 1
                    if const_expr(scaling is not None):  # of the K-tile after this one
                        following = k_tiles.count - left - (self.stages - 1)
                        self.load_ahead(scaling, k_tiles.at(cutlass.min(following, k_tiles.count - 1)))
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
                if const_expr(self.promotes):
                    self.promoted_product(acc, rA[buffer], rB[buffer], scaling, scales, k)
                else:
                    self.product(acc, rA[buffer], rB[buffer], scaling, k)
                if const_expr(scaling is not None and k + 1 == blocks):
                    self.use_next(scaling)
                step = const_expr(step + 1)
        return tile, left, read, write

    def promoted_product(self, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, scaling, scales, k: int) -> None:
        """MMA step k of a K-tile, whose products are added in fp32."""
        self.add_product(acc, rA, rB, None if scaling is None else scaling.factors, scales)

    @cute.jit
    def add_product(self, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, factors, scales: cute.Tensor | None):
        """One MMA step whose result is added in FP32, since tensor cores accumulate FP8 with fewer bits.

        factors: (2, MMA_M) block scales of the thread's rows, or None.
        scales: scales of the sparse operand's blocks, of which the first applies; or None.
        """
        part = cute.make_rmem_tensor((4, 1, 1), Float32)
        for m in range_constexpr(self.mmas_m):
            for n in range_constexpr(self.mmas_n):
                part.fill(0.0)
                self.multiply(part, of_mma(rA, m), of_mma(rB, n))
                for v in range_constexpr(4):
                    product = part[v] if const_expr(factors is None) else part[v] * factors[v // 2, m]
                    product = product * scales[0] if const_expr(self.scaled) else product
                    acc[v, m, n] = acc[v, m, n] + product

    def fragments(self) -> tuple:
        """Two of A and two of B, for this MMA step and the next: 16 bytes of each MMA_M, and 8 of each MMA_N."""
        rA = [cute.make_rmem_tensor((self.element.vector, self.mmas_m), self.dtype) for _ in range(2)]
        rB = [cute.make_rmem_tensor((self.element.vector // 2, self.mmas_n), self.dtype) for _ in range(2)]
        return rA, rB

    def load_ahead(self, scaling, tile) -> None:
        """Issue the loads of what a K-tile's products need besides A and B."""
        load_scales(scaling, tile, self.a.tile_k)

    def use_next(self, scaling) -> None:
        """The K-tile that was loaded ahead is the next one to multiply."""
        multiply_scales(scaling)

    def product(self, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, scaling, k: int) -> None:
        """MMA step k of a K-tile, of fp32 numbers rounded to TF32."""
        if self.element.width == 4:
            rA, rB = rounded_to_tf32(rA), rounded_to_tf32(rB)
        self.multiply(acc, rA, rB)

    def read_step(self, k: int, lanes: tuple, stage: Int32, rA: cute.Tensor, rB: cute.Tensor):
        self.read(self.a, k, lanes[0], stage, rA)
        self.read(self.b, k, lanes[1], stage + self.a.bytes, rB)
