"""Two kernels that do one thing only, as ceilings for those that do everything: L2 to shared memory, and WGMMA.

`FeedProbe` loads tiles of a matrix that L2 holds, into a ring that nobody reads. `TensorProbe` multiplies a pair of
tiles that lie in shared memory, again and again, in the loop of our mainloop but without its loads. Neither can be
faster than the unit it drives, and a power-limited card is in the state it would be in at work.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.tile.hopper import ALIGN, smem_layout

STAGES = 6
FEED_TILE = (256, 64)  # rows x bf16 columns of one TMA box: 32 KB, as a 256-wide B tile's
TENSOR_TILE = (128, 256, 64)


@dataclass(frozen=True)
class ProbeFacts:
    """What a probe is compiled from."""

    name: str  # "feed" or "tensor"
    arch: str = "sm_90a"
    version: int = 1  # to be raised when a probe changes: this file is not in the cache's fingerprint of sources


class FeedProbe:
    """Every CTA loads `tiles` tiles of src (rows, 64 * k), each from another place, STAGES of them in flight."""

    @cute.jit
    def __call__(self, src: cute.Tensor, tiles: Int32, ctas: Int32, stream: cuda.CUstream):
        layout = smem_layout(cutlass.BFloat16, *FEED_TILE, STAGES, True)
        tma, mS = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), src, cute.slice_(layout, (None, None, 0)), FEED_TILE
        )
        self.kernel(tma, mS, tiles).launch(grid=(ctas, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, tma: cute.CopyAtom, mS: cute.Tensor, tiles: Int32):
        layout = smem_layout(cutlass.BFloat16, *FEED_TILE, STAGES, True)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, STAGES]
            ring: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, cute.cosize(layout)], ALIGN]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        full = storage.full.data_ptr()
        sS = storage.ring.get_tensor(layout.outer, swizzle=layout.inner)  # (256, 64, PIPE)
        gS = cute.local_tile(mS, FEED_TILE, (None, None))  # (256, 64, rest_m, rest_k)
        tSsS, tSgS = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sS, 0, 2), cute.group_modes(gS, 0, 2)
        )
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + s, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        rows, cols = cute.size(tSgS, mode=[1]), cute.size(tSgS, mode=[2])
        for i in cutlass.range(tiles + STAGES, unroll=1):
            stage = i % STAGES
            if i >= STAGES:
                cute.arch.mbarrier_wait(full + stage, (i // STAGES - 1) % 2)
            if i < tiles:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, FEED_TILE[0] * FEED_TILE[1] * 2)
                place = cute.arch.block_idx()[0] * 5 + i  # neighbours in different places
                cute.copy(
                    tma, tSgS[None, place % rows, place // rows % cols], tSsS[None, stage], tma_bar_ptr=full + stage
                )


class TensorProbe:
    """Two warpgroups a CTA each do `steps` K-tiles of a 64 x 256 product, on tiles filled from src once."""

    @cute.jit
    def __call__(self, src: cute.Tensor, steps: Int32, ctas: Int32, stream: cuda.CUstream):
        mma = sm90_utils.make_trivial_tiled_mma(
            cutlass.BFloat16,
            cutlass.BFloat16,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K,
            Float32,
            (2, 1, 1),
            tiler_mn=(64, TENSOR_TILE[1]),
        )
        self.kernel(src, steps, mma).launch(grid=(ctas, 1, 1), block=(256, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(self, src: cute.Tensor, steps: Int32, mma: cute.TiledMma):
        m, n, k = TENSOR_TILE
        a_layout = smem_layout(cutlass.BFloat16, m, k, 2, True)
        b_layout = smem_layout(cutlass.BFloat16, n, k, 2, True)

        @cute.struct
        class Storage:
            sA: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, cute.cosize(a_layout)], ALIGN]
            sB: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, cute.cosize(b_layout)], ALIGN]

        tidx = cute.arch.thread_idx()[0]
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        # Random bits of src, in whatever order: what counts is that operands toggle as real ones do.
        for piece, size in ((storage.sA, m * k * 2), (storage.sB, n * k * 2)):
            flat = cute.make_tensor(piece.data_ptr(), cute.make_layout(size))
            for i in cutlass.range(tidx, size, 256):
                flat[i] = src[i // src.shape[1], i % src.shape[1]]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        sA = storage.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        group = cute.arch.make_warp_uniform(tidx // 128)
        thr_mma = mma.get_slice(cute.make_layout(2, stride=128)(group))
        tCrA = mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, 2)
        tCrB = mma.make_fragment_B(thr_mma.partition_B(sB))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((m, n)), Float32)
        acc.fill(0.0)
        for i in cutlass.range(steps, unroll=1):
            warpgroup.fence()
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            for j in cutlass.range_constexpr(k // 16):
                cute.gemm(atom, acc, tCrA[None, None, j, i % 2], tCrB[None, None, j, i % 2], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
        warpgroup.wait_group(0)
        total = Float32(0.0)
        for v in cutlass.range_constexpr(cute.size(acc)):
            total += acc[v]
        if total == 12345.678:  # never, but the compiler cannot know: the products must be made
            src[0, 0] = total.to(cutlass.BFloat16)


def probe(facts: ProbeFacts):
    """The probe's function, compiled or from the cache: of a (rows, columns) bf16 matrix, a count, a number of CTAs."""
    return default_cache().get(facts, lambda: compile_probe(facts))


def compile_probe(facts: ProbeFacts, *, keep_cubin: bool = False):
    """Compile a probe, on any machine."""
    kernel = FeedProbe() if facts.name == "feed" else TensorProbe()
    return compile_for(
        facts.arch, kernel, fake_tensor("bfloat16", 2, 1, 8), Int32(1), Int32(1), fake_stream(), keep_cubin=keep_cubin
    )
