"""The sm_80 GEMM kernel: cp.async in, ldmatrix and mma.sync, 16-byte stores out. It runs on sm_80 and newer.

    all warps    load and multiply (mainloop_sm80.py), then store their own part of the tile (store_sm80.py)

    smem     | A 0 | B 0 | A 1 | B 1 | ...  a ring of stages; after the mainloop, the warps' store buffers

One CTA does one work tile: the grid is all of them, in the scheduler's order.
Two CTAs share an SM where registers and shared memory allow it, so that one multiplies while the other begins or ends.

Which K-tiles a work tile sums over is the source's business; this file owns storage, atoms and launch.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..dtypes import cutlass_dtype
from ..scheduler import TileScheduler
from ..tile.ampere import ALIGN, WARP, OperandTile
from .config import GemmFacts
from .epilogue.formula import EpilogueArgs
from .epilogue.store_sm80 import StoreSm80
from .mainloops.block_scaled_sm80 import block_scaling
from .mainloops.mainloop_sm80 import MainloopSm80


class GemmSm80:
    """Compiles to one kernel per `GemmFacts`; called with operands in the kernel's modes (see k_tiles)."""

    def __init__(self, facts: GemmFacts, mainloop: Callable = MainloopSm80):
        cfg = facts.config
        assert cfg.stages >= 3, "the last MMA step of a K-tile waits for the next one, with one more in flight"
        self.facts, self.cfg = facts, cfg
        self.dtype = cutlass_dtype(facts.dtype)
        self.out_dtype = cutlass_dtype(facts.out_dtype)
        self.acc_dtype = cutlass_dtype(facts.acc_dtype)
        self.threads = WARP * cfg.warps_m * cfg.warps_n
        vectors = [1 if major == "any" else align for major, align in zip(facts.majors, facts.aligns)]
        a_k, b_k = facts.majors[0] != "m", facts.majors[1] != "n"
        k_of_a = cfg.tile_k // mainloop.stored
        a = OperandTile(cfg.tile_m, k_of_a, a_k, vectors[0], self.threads, cfg.warps_m, False, facts.element)
        b = OperandTile(cfg.tile_n, cfg.tile_k, b_k, vectors[1], self.threads, cfg.warps_n, True, facts.element)
        self.mainloop = mainloop(facts, self.dtype, a, b)
        self.store = StoreSm80(facts, self.out_dtype)
        self.smem_bytes = max(cfg.stages * self.mainloop.stage_bytes, self.store.bytes)

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (M, K, outer_a)
        mB: cute.Tensor,  # (N, K, outer_k, L)
        mD: cute.Tensor,  # (M, N, outer_m, L)
        source,
        args: EpilogueArgs,
        tiles_m: Int32,  # row tiles of the whole product
        group: Int32,
        max_ctas: None,  # the grid is all work tiles
        stream: cuda.CUstream,
    ):
        columns = mD.shape[1] if const_expr(source.columns is None) else source.columns
        tiles_n = cute.ceil_div(columns, self.cfg.tile_n)
        scheduler = TileScheduler(tiles_m, tiles_n, mD.shape[3], group, source.order)
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
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index_warp = (warp % cfg.warps_m, warp // cfg.warps_m)  # (warp_m, warp_n)
        smem = cutlass.memory.SmemAllocator().allocate(self.smem_bytes, byte_alignment=ALIGN).toint()

        m, n, l = scheduler.decode(cute.arch.block_idx()[0])
        k_tiles = source.for_tile(m, l, source.bounds(m, n, l))
        main = self.mainloop
        # (MMA, MMA_M, MMA_N)
        acc = cute.make_rmem_tensor((4, main.mmas_m, main.mmas_n), self.acc_dtype)
        acc.fill(0.0)
        scaling = None
        if const_expr(self.facts.epilogue.scales_blocks):
            origin = (k_tiles.out(n)[0] * cfg.tile_m, k_tiles.out(n)[1] * cfg.tile_n)
            scaling = block_scaling(self.facts, args, main.mmas_m, origin, index_warp, (k_tiles.l, l))
        elif const_expr(main.stored > 1):
            scaling = main.metadata_words(index_warp[0])
        main.mma(k_tiles, mA, mB[None, None, None, l], k_tiles.out(n)[1], acc, smem, index_warp, scaling)

        # The last copies, zero fills, and other warps' reads must be done before the ring becomes store buffers.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        extent = (mD.shape[0], mD.shape[1])
        self.store.store(acc, args, mD, smem, extent, (*k_tiles.out(n), l, k_tiles.l), index_warp, warp)
