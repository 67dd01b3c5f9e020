"""The sm_80 decode kernel: packed rows, sequence lengths, pages and splits (problem.py) on mainloop_sm80.

    four warps     of 16 packed rows each; they load, multiply, and do the softmax of their own rows, or split the
                   head dimension of the same rows (mainloop_sm80)

A CTA computes one split of a tile. Several CTAs share an SM: their total of bytes in flight determines the speed. With
pages, a thread looks up the page of each line that it copies.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.tile.ampere import WARP

from ..forward.config import DecodeFacts
from ..forward.mainloop_sm80 import MainloopSm80, first_vector, lines_at_once, vectors
from ..forward.mask_and_softmax import QueryWork
from ..forward.softmax import rows_and_columns
from .combine import combine_splits
from .pages import place_of_row
from .problem import DecodeScheduler, SplitSource, problem_of
from .store import store_of_split


class DecodeSm80:
    """Compiles to one kernel per `DecodeFacts`, plus the combine kernel with split-KV."""

    def __init__(self, facts: DecodeFacts):
        self.facts, self.cfg, self.store = facts, facts.config, store_of_split(facts)
        self.mainloop = MainloopSm80(facts, self.copy_tile, adds_row_sums=True)
        self.threads = WARP * facts.config.groups
        self.smem_bytes = facts.smem_bytes

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D) or (pages, Hkv, page_size, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv) or (pages, Hkv, page_size, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        mSinks: cute.Tensor | None,  # (H,)
        mSeqlens: cute.Tensor | None,  # (B,) or (B, 2)
        mTable: cute.Tensor | None,  # (B, pages per sequence)
        score_tensors: tuple | None,  # inputs of the score_mod
        mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv) fp32
        mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq) fp32
        scale_log2: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        facts = self.facts
        source, scheduler, seqlens = problem_of(facts, self.cfg.tile_m, mQ, mK, mSeqlens, mTable, (left, right), splits)
        self.kernel(
            mQ, mK, mV, mO, mLSE, mTable, mPartO, mPartLSE, source, scheduler, seqlens, scale_log2, softcap,
            None if const_expr(facts.split) else mSinks, score_tensors,
        ).launch(
            grid=(scheduler.count, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip
        combine_splits(facts, False, (mPartO, mPartLSE), (mO, mLSE), splits, mSinks, stream)

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B or pages, Hkv, S, D)
        mV: cute.Tensor,  # (B or pages, Hkv, S, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        mTable: cute.Tensor | None,  # (B, pages per sequence)
        mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv)
        mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq)
        source: SplitSource,
        scheduler: DecodeScheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        mSinks: cute.Tensor | None,  # (H,); None with split-KV
        score_tensors: tuple | None,
    ):
        cfg, facts = self.cfg, self.facts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        c = self.mainloop.consumer(warp, lane, scale_log2)
        softmax, out = c.softmax, rows_and_columns(c.acc_O)
        lse = cute.make_rmem_tensor(2, Float32)

        tile = scheduler.decode(cute.arch.block_idx()[0])
        seqlen = seqlens.of(tile.b)
        tiles = source.for_tile(tile, seqlen)
        row0 = self.mainloop.row_group(warp) * self.mainloop.q.span + lane // 4  # of this thread, in the tile
        row = tile.m * cfg.tile_m + row0  # packed
        rows = source.heads.of_tile(tile, seqlen)
        from_k, from_v = ((mX, mTable, mK.shape[0], tile) for mX in (mK, mV))
        if tiles.count > 0:
            # Only the first tile visited can extend past the end of K and V; the rows after it become zeros.
            self.copy_q(rows.view(mQ), tile.m * cfg.tile_m, c.sQ, rows.end)
            self.mainloop.fill(c, tiles, from_k, from_v, seqlen.cols, None)
        self.mainloop.wait(2 * cfg.stages - 1)
        softmax.clear()
        c.acc_O.fill(0.0)
        work = QueryWork(source, tiles, tile, seqlen, row, softcap, score_tensors)
        # Q's fragments are read again for each tile, since registers are few with pages.
        self.mainloop.steps(c, work, [], from_k, from_v, None)
        sinks = source.heads.sink_registers(mSinks, 2)
        source.heads.read_sinks(mSinks, tile, row, sinks)
        softmax.finish(out, lse, sinks)
        outputs = (mPartO, mPartLSE) if const_expr(facts.split) else (mO, mLSE)
        self.store(c.acc_O, lse, *outputs, rows, row, self.mainloop.first_column(c), lane, True)

    # ------------------------------------------------------------------ global memory -> shared memory

    @cute.jit
    def copy_q(self, mQ: cute.Tensor, first: Int32, tile: Int32, end: Int32):
        """Copy the packed rows (rows, D) from `first` on; those from `end` on become zeros."""
        op = self.mainloop.q
        line, element = first_vector(op, cute.arch.thread_idx()[0])
        start = element * op.element.width  # in bytes
        to = op.offset(line, start)
        for lines, byte in const_expr(vectors(op)):
            row = first + line + lines
            source = mQ[cutlass.min(row, end - 1), None].iterator.toint() + start + byte
            x, add = op.split(lines, byte)
            self.mainloop.tile_steps.copy_vector(op, source, tile + (to ^ x) + add, row < end)

    @cute.jit
    def copy_tile(self, op: cutlass.Constexpr, cache: tuple, n: Int32, to_tile: Int32, end: Int32 | None):
        """Copy tile n of K or V; lines from `end` on, unless it is None, and lines of invalid pages become zeros.

        cache: (mX, mTable, pages, tile), with mX (B or pages, Hkv, S, D) and mTable (B, pages per sequence) or None.
        """
        if const_expr(lines_at_once(op) <= op.lines):
            self.copy_lines(op, cache, n, to_tile, end)
        elif first_vector(op, cute.arch.thread_idx()[0])[0] < op.lines:
            self.copy_lines(op, cache, n, to_tile, end)

    @cute.jit
    def copy_lines(self, op: cutlass.Constexpr, cache: tuple, n: Int32, to_tile: Int32, end: Int32 | None):
        """Copy this thread's vectors of a tile; see `copy_tile`."""
        mX, mTable, pages, tile = cache
        line, element = first_vector(op, cute.arch.thread_idx()[0])
        width = const_expr(op.element.width)
        to = op.offset(line, element * width)
        head = mX.iterator.toint() + (Int64(tile.h_kv) * mX.stride[1] + element) * width
        source, valid, passed = head, cutlass.Boolean(True), const_expr(-1)
        for lines, byte in const_expr(vectors(op)):
            if const_expr(lines > passed):
                passed = const_expr(lines)
                number, row = tile.b, n * op.lines + line + lines
                valid = cutlass.Boolean(True)
                if const_expr(end is not None):
                    valid = row < end
                if const_expr(mTable is not None):
                    past_end = const_expr(self.facts.page_size < op.lines)  # a tile's last lines may be past all pages
                    number, row, exists = place_of_row(self.facts, mTable, pages, tile.b, row, past_end)
                    valid = valid and exists
                source = head + (Int64(number) * mX.stride[0] + Int64(row) * mX.stride[2]) * width
            x, add = op.split(lines, byte)
            self.mainloop.tile_steps.copy_vector(op, source + byte, to_tile + (to ^ x) + add, valid)
