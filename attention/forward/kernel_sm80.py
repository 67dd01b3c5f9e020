"""The sm_80 attention kernel: cp.async in, ldmatrix and mma.sync, O straight from registers. For sm_80 and newer.

    all warps    load, multiply, and do the softmax of their own rows: 16 of the query tile, or a multiple of 16; or
                 split the head dimension of the same rows (mainloop_sm80)

One CTA computes one query tile (mainloop_sm80): the grid is all of them, in the scheduler's order. Several CTAs share
an SM where registers and shared memory allow it: while warps of one do a softmax, those of another use the tensor
cores.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.tile.ampere import WARP, OperandTile
from cute_kernels.tile.ptx import read_special_register

from .config import FlashFacts
from .mainloop_sm80 import MainloopSm80, first_vector, lines_at_once, vectors
from .mask_and_softmax import QueryWork
from .problem import problem_of
from .softmax import rows_and_columns
from .store_o import store_policy


class FlashForwardSm80:
    """Compiles to one kernel per `FlashFacts`."""

    def __init__(self, facts: FlashFacts):
        self.facts, self.cfg, self.store = facts, facts.config, store_policy(facts)
        self.mainloop = MainloopSm80(facts, self.copy, facts.adds_row_sums)
        self.threads = WARP * facts.config.groups
        self.smem_bytes = facts.smem_bytes

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq), packed (H, total_q)
        mSinks: cute.Tensor | None,  # (H,)
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # block_sparse.blocks_of; None without a block mask
        score_tensors: tuple | None,  # inputs of the score_mod
        scale_log2: Float32,
        softcap: Float32,
        left: Int32 | None,  # None with a block mask
        right: Int32 | None,
        offsets: tuple | None,  # (q_offset, k_offset) with FlashFacts.offsets
        stream: cuda.CUstream,
    ):
        p = problem_of(self.facts, (mQ, mK, mV, mO, mLSE), (cu_q, cu_k), blocks, left, right, offsets)
        self.kernel(
            p.mQ, p.mK, p.mV, p.mO, p.mLSE, p.source, p.scheduler, p.seqlens, scale_log2, softcap, score_tensors,
            mSinks,
        ).launch(
            grid=(p.scheduler.count, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        source,
        scheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        score_tensors: tuple | None,
        mSinks: cute.Tensor | None,  # (H,)
    ):
        cfg, facts = self.cfg, self.facts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        c = self.mainloop.consumer(warp, lane, scale_log2)
        softmax, out = c.softmax, rows_and_columns(c.acc_O, self.mainloop.tiles_m)
        lse = cute.make_rmem_tensor(2 * self.mainloop.tiles_m, Float32)
        row0 = self.mainloop.row_group(warp) * self.mainloop.q.span + lane // 4  # of this thread, in the tile

        tile = scheduler.decode(cute.arch.block_idx()[0])
        seqlen = seqlens.of(tile.b)
        tiles = source.for_tile(tile, seqlen)
        row = tile.m * cfg.tile_m + row0
        softmax.clear()
        c.acc_O.fill(0.0)
        c.acc_L.fill(0.0)
        if tiles.count > 0:
            from_q = self.thread_part(self.mainloop.q, mQ, seqlen.b, tile.h, seqlen.q0)
            from_k, from_v = (
                self.thread_part(*x, seqlen.b, tile.h_kv, seqlen.k0)
                for x in ((self.mainloop.k, mK), (self.mainloop.v, mV))
            )
            # Rows past the end of K and V become zeros. Only the first tile visited can extend past it, or any tile
            # with a block mask.
            end = const_expr(None) if const_expr(facts.blocks is None) else seqlen.cols
            self.copy(self.mainloop.q, from_q, tile.m, c.sQ, seqlen.rows)
            self.mainloop.fill(c, tiles, from_k, from_v, seqlen.cols, end)
            self.mainloop.wait(2 * cfg.stages - 1)
            in_registers = self.mainloop.depth // facts.element.mma_k if facts.q_in_registers else 0
            q_fragments = [self.mainloop.fragment_q(c, k, []) for k in range(in_registers)]
            work = QueryWork(source, tiles, tile, seqlen, row, softcap, score_tensors)
            self.mainloop.steps(c, work, q_fragments, from_k, from_v, end)
        sinks = source.heads.sink_registers(mSinks, 2 * self.mainloop.tiles_m)
        source.heads.read_sinks(mSinks, tile, row, sinks)
        softmax.finish(out, lse, sinks)
        if const_expr(facts.packed and facts.score is not None):
            # Decoded again instead of kept in registers: the score_mod leaves few.
            tile = scheduler.decode(read_special_register("ctaid.x"))
            seqlen = seqlens.of(tile.b)
            row = tile.m * cfg.tile_m + row0
        rows, column = source.heads.of_tile(tile, seqlen), self.mainloop.first_column(c)
        owner = self.mainloop.writes_lse(c)
        self.store(c.acc_O, lse, mO, mLSE, rows, row, column, lane, owner, self.mainloop.tiles_m)

    # ------------------------------------------------------------------ global memory -> shared memory

    def thread_part(self, op: OperandTile, mX: cute.Tensor, b: Int32, h: Int32, begin: Int32) -> tuple:
        """(line, to, source, pitch): the constants of this thread's copies of a head's tiles, from row `begin` on.

        Neighboring threads copy neighboring chunks, `op.chunks` of a line at a time. `to` is the offset of the thread's
        first vector in a tile, `source` the address of that vector in the head's first tile, `pitch` the bytes of a
        line.
        """
        line, element = first_vector(op, cute.arch.thread_idx()[0])
        width = op.element.width
        pitch = Int64(mX.stride[2]) * width
        head = (Int64(b) * mX.stride[0] + Int64(h) * mX.stride[1] + element) * width
        return line, op.offset(line, element * width), mX.iterator.toint() + head + (begin + line) * pitch, pitch

    @cute.jit
    def copy(self, op: cutlass.Constexpr, thread: tuple, n: Int32, tile: Int32, end: Int32 | None):
        """Copy tile n of an operand to `tile`; lines from `end` on, unless it is None, become zeros."""
        if const_expr(lines_at_once(op) <= op.lines):
            self.copy_lines(op, thread, n, tile, end)
        elif thread[0] < op.lines:
            self.copy_lines(op, thread, n, tile, end)

    @cute.jit
    def copy_lines(self, op: cutlass.Constexpr, thread: tuple, n: Int32, tile: Int32, end: Int32 | None):
        """Copy this thread's vectors of a tile; see `copy`."""
        line, to, source, pitch = thread
        source = source + n * op.lines * pitch
        passed = const_expr(0)
        for lines, byte in const_expr(vectors(op)):
            if const_expr(lines > passed):
                source = source + (lines - passed) * pitch
                passed = const_expr(lines)
            valid = cutlass.Boolean(True)
            if const_expr(end is not None):
                valid = n * op.lines + line + lines < end
            x, add = op.split(lines, byte)
            self.mainloop.tile_steps.copy_vector(op, source + byte, tile + (to ^ x) + add, valid)
