"""The decode kernel for selected blocks, on all architectures: bound by the bytes of the selected K and V.

    four warps     each with all 16 packed rows of a query token, every fourth KV tile of the list, and its own ring
                   (mainloop); at the end their results are merged (merge)

Roles and launches are those of decode from an FP8 cache (decode/fp8/kernel). A CTA computes one split of a token's
list. On sm_90 up to 8 splits are a cluster, whose CTAs combine their results; a second kernel combines others. Where
decode/fp8 walks the tiles of a sequence, this one walks those of a list, whose rows are gathered from the cache or its
pages; K and V may be FP8 or 16-bit.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.tile.ampere import ALIGN, WARP

from ...decode.combine import combine_splits
from ...decode.fp8.kernel import scales_of_head
from ...decode.fp8.merge import Merge
from ...forward.heads import TileRows
from .config import ROWS, SelectedDecodeFacts
from .mainloop import Gather16, GatherFloat8
from .merge import ClusterMerge, Merge16
from .problem import ListSource, problem_of


class SelectedDecode:
    """Compiles to one kernel per `SelectedDecodeFacts`, plus the combine kernel with split lists."""

    def __init__(self, facts: SelectedDecodeFacts):
        self.facts, self.cfg = facts, facts.config
        self.mainloop = (GatherFloat8 if facts.cache else Gather16)(facts)
        self.merge = (Merge if facts.cache else Merge16)(facts)
        if facts.cluster > 1:
            self.merge = ClusterMerge(facts, self.merge)
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
        mIndices: cute.Tensor,  # (B, Sq, G, top)
        mSeqlens: cute.Tensor,  # (B,)
        mTable: cute.Tensor | None,  # (B, pages per sequence)
        mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv) fp32
        mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq) fp32
        mKScale: cute.Tensor | None,  # (B, Hkv) fp32
        mVScale: cute.Tensor | None,  # (B, Hkv) fp32
        scale_log2: Float32,
        softcap: Float32,
        right: Int32,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        facts = self.facts
        source, seqlens, grid = problem_of(facts, mQ, mK, mIndices, mSeqlens, mTable, right, splits)
        self.kernel(
            mQ, mK, mV, mO, mLSE, mPartO, mPartLSE, mKScale, mVScale, source, seqlens, scale_log2, softcap,
            None if const_expr(facts.split) else mSinks,
        ).launch(
            grid=grid,
            block=(self.threads, 1, 1),
            cluster=(facts.cluster, 1, 1) if const_expr(facts.cluster > 1) else None,
            min_blocks_per_mp=self.cfg.ctas,
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
        mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv)
        mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq)
        mKScale: cute.Tensor | None,  # (B, Hkv)
        mVScale: cute.Tensor | None,  # (B, Hkv)
        source: ListSource,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        mSinks: cute.Tensor | None,  # (H,); None with splits
    ):
        facts = self.facts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        at_softmax = cutlass.memory.SmemAllocator().allocate(self.smem_bytes, byte_alignment=ALIGN).toint()
        at_q = at_softmax + const_expr(facts.softmax_bytes)
        rings = at_q + const_expr(facts.q_bytes)
        at_exchange = rings + const_expr(self.cfg.groups * facts.warp_bytes)
        tile = source.tile(cute.arch.block_idx())
        row0, end = tile.m * ROWS, source.heads.qhead_per_kvhead
        if const_expr(facts.cluster > 1):
            self.merge.init(at_exchange, tile.split, end - row0)
        if const_expr(facts.early):
            cute.arch.griddepcontrol_wait()  # no global memory access before it
        seqlen = seqlens.of(tile.b)
        tiles = source.for_tile(tile, seqlen)
        rows = TileRows(source.heads, tile, seqlen, end)
        row, kv_head = row0 + cute.arch.lane_idx() // 4, source.kv_head(tile)  # the first row of this thread
        ring = rings + warp * const_expr(facts.warp_bytes)
        caches = mK[None, kv_head, None, None], mV[None, kv_head, None, None]
        valid, following = cute.make_rmem_tensor(self.cfg.stages, Int32), cute.make_rmem_tensor(3, Int32)
        self.mainloop.fill_ring(ring, warp, tiles, caches, valid, following)
        k_scale, v_scale = scales_of_head(facts, mKScale, mVScale, tile.b, kv_head)
        if const_expr(facts.cluster == 1):
            sinks = source.heads.sink_registers(mSinks, 2)
            source.heads.read_sinks(mSinks, tile, row, sinks)
        c = self.mainloop.state(ring, at_q, warp, rows.view(mQ), row, rows.end, k_scale, scale_log2)
        c.softmax.clear()
        c.acc_O.fill(0.0)
        self.mainloop.run(c, tiles, caches, valid, following, softcap)
        if const_expr(facts.early):
            cute.arch.griddepcontrol_launch_dependents()
        outputs = (mPartO, mPartLSE) if const_expr(facts.split) else (mO, mLSE)
        if const_expr(facts.cluster > 1):
            self.merge(c, at_softmax, at_exchange, mSinks, v_scale, *outputs, rows, row0)
        else:
            self.merge(c, at_softmax, rings, sinks, v_scale, *outputs, rows, row0)
