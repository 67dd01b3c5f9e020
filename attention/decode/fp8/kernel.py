"""The decode kernel for an FP8 KV cache, on all architectures: bound by the bytes of K and V.

    four warps     each with all 16 packed rows (forward/heads), every fourth KV tile, and its own ring
                   (mainloop_float8); at the end their results are merged (merge_float8)

Warps are independent while they read, so nearly all of the rings is in flight, on sm_90 those of two CTAs per SM. A CTA
computes one split of a tile. Loads and MMAs are those of the sm_80 path: Hopper's WGMMA would require 16-bit K and V in
shared memory.

With pages, lane j looks up the page of a tile's box j, a whole step before the copies that need it.

On sm_90 both kernels use programmatic dependent launch, see kernel_sm90.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.tile.ampere import ALIGN, WARP
from cute_kernels.tile.ptx import BY_BITS_SCALE

from ...forward.config import DecodeFacts
from ...forward.mainloop_sm80 import first_vector, lines_at_once, vectors
from ...forward.mask_and_softmax import QueryWork
from ..combine import combine_splits
from ..pages import box_of_tile
from ..problem import DecodeScheduler, SplitSource, problem_of
from .mainloop import ROWS, MainloopFloat8
from .merge import Merge


def scales_of_head(facts, mKScale: cute.Tensor | None, mVScale: cute.Tensor | None, b: Int32, kv_head: Int32) -> tuple:
    """(factor of K, factor of V) of a head, None where there is none. mKScale, mVScale: (B, Hkv)."""
    k_scale = None if mKScale is None else mKScale[b, kv_head]
    v_scale = None if mVScale is None else mVScale[b, kv_head]
    if facts.by_bits:
        v_scale = (Float32(1.0) if v_scale is None else v_scale) / BY_BITS_SCALE
    return k_scale, v_scale


class DecodeFloat8:
    """Compiles to one kernel per `DecodeFacts`, plus the combine kernel with split-KV."""

    def __init__(self, facts: DecodeFacts):
        self.facts, self.cfg = facts, facts.config
        self.mainloop = MainloopFloat8(facts, self.copy_tile)
        self.merge = Merge(facts)
        self.threads = WARP * facts.config.groups
        self.smem_bytes = facts.smem_bytes

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D) or (pages, Hkv, page_size, D), FP8
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv) or (pages, Hkv, page_size, Dv), FP8
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        mSinks: cute.Tensor | None,  # (H,)
        mSeqlens: cute.Tensor | None,  # (B,) or (B, 2)
        mTable: cute.Tensor | None,  # (B, pages per sequence)
        score_tensors: tuple | None,  # inputs of the score_mod
        mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv) fp32
        mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq) fp32
        mKScale: cute.Tensor | None,  # (B, Hkv) fp32
        mVScale: cute.Tensor | None,  # (B, Hkv) fp32
        scale_log2: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        cfg, facts = self.cfg, self.facts
        source, scheduler, seqlens = problem_of(facts, ROWS, mQ, mK, mSeqlens, mTable, (left, right), splits)
        self.kernel(
            mQ, mK, mV, mO, mLSE, mTable, mPartO, mPartLSE, mKScale, mVScale, source, scheduler, seqlens, scale_log2,
            softcap, None if const_expr(facts.split) else mSinks, score_tensors,
        ).launch(
            grid=(scheduler.count, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=100,  # not exported; otherwise the DSL would query a GPU
            use_pdl=facts.early,
            stream=stream,
        )  # fmt: skip
        combine_splits(facts, facts.early, (mPartO, mPartLSE), (mO, mLSE), splits, mSinks, stream)

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
        mKScale: cute.Tensor | None,  # (B, Hkv)
        mVScale: cute.Tensor | None,  # (B, Hkv)
        source: SplitSource,
        scheduler: DecodeScheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        mSinks: cute.Tensor | None,  # (H,); None with split-KV
        score_tensors: tuple | None,
    ):
        facts = self.facts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        at_softmax = cutlass.memory.SmemAllocator().allocate(self.smem_bytes, byte_alignment=ALIGN).toint()
        at_q = at_softmax + const_expr(facts.softmax_bytes)
        rings = at_q + const_expr(facts.q_bytes)
        tile = scheduler.decode(cute.arch.block_idx()[0])
        if const_expr(facts.early):
            cute.arch.griddepcontrol_wait()  # no global memory access before it
        seqlen = seqlens.of(tile.b)
        tiles = source.for_tile(tile, seqlen)
        row = tile.m * ROWS + cute.arch.lane_idx() // 4  # of this thread, packed
        rows = source.heads.of_tile(tile, seqlen)
        ring = rings + warp * self.mainloop.ring_bytes
        from_k, from_v = (mK, mTable), (mV, mTable)
        if tiles.count > 0:
            # Only the first tile visited can extend past the end of K and V; the rows after it become zeros.
            self.mainloop.fill(ring, warp, tile, tiles, from_k, from_v, seqlen.cols)
        k_scale, v_scale = scales_of_head(facts, mKScale, mVScale, tile.b, tile.h_kv)
        sinks = source.heads.sink_registers(mSinks, 2)
        source.heads.read_sinks(mSinks, tile, row, sinks)
        c = self.mainloop.state(ring, at_q, warp, rows.view(mQ), row, rows.end, k_scale, scale_log2)
        c.softmax.clear()
        c.acc_O.fill(0.0)
        if tiles.count > 0:
            work = QueryWork(source, tiles, tile, seqlen, row, softcap, score_tensors)
            self.mainloop.steps(c, work, from_k, from_v)
        if const_expr(facts.early):
            cute.arch.griddepcontrol_launch_dependents()
        outputs = (mPartO, mPartLSE) if const_expr(facts.split) else (mO, mLSE)
        self.merge(c, at_softmax, rings, sinks, v_scale, *outputs, rows, tile.m * ROWS)

    # ------------------------------------------------------------------ global memory -> shared memory

    @cute.jit
    def copy_tile(
        self, op: cutlass.Constexpr, cache: tuple, tile, n: Int32, pages: Int32, to_tile: Int32, end: Int32 | None
    ):
        """Copy a warp's tile n of K or V; lines from `end` on, unless it is None, and lines of invalid pages become
        zeros.

        cache: (mX, mTable), with mX (B or pages, Hkv, S, D) and mTable (B, pages per sequence) or None. pages: page
        indices of the tile's boxes, from pages.pages_of_tile.
        """
        mX, mTable = cache
        line, element = first_vector(op, cute.arch.lane_idx())
        start = element * op.element.width  # in bytes
        to = op.offset(line, start)
        box = const_expr(self.facts.box)
        head = mX.iterator.toint() + Int64(tile.h_kv) * mX.stride[1] + start
        pitch = Int64(mX.stride[2]) * const_expr(lines_at_once(op))  # bytes from a thread's line to its next one
        source, valid, passed = head, cutlass.Boolean(True), const_expr(-1)
        for lines, byte in const_expr(vectors(op)):
            if const_expr(lines > passed):
                passed = const_expr(lines)
                if const_expr(lines % box == 0):
                    number, item = box_of_tile(self.facts, pages, tile.b, n, lines // box)
                    valid = cutlass.Boolean(True)
                    if const_expr(mTable is not None):
                        valid = (item >= 0) & (item < mX.shape[0])
                        item = cutlass.max(item, 0)
                    source = head + Int64(item) * mX.stride[0] + (Int64(number) * box + line) * mX.stride[2]
                else:
                    source = source + pitch
                inside = valid
                if const_expr(end is not None):
                    inside = valid & (n * op.lines + line + lines < end)
            x, add = op.split(lines, byte)
            self.mainloop.tile_steps.copy_vector(op, source + byte, to_tile + (to ^ x) + add, inside)
