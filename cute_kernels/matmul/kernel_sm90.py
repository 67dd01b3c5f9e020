"""The sm_90 GEMM kernel: persistent, warp-specialized, TMA loads, WGMMA, TMA stores.

    warpgroup 0        producer; one of its warps issues all TMA loads, the others idle
    warpgroups 1..     consumers; each owns tile_m / warps_m rows and tile_n / warps_n columns of its group's tile

    pipeline   producer arrives          consumers arrive (per stage; `arrivals`)
    AB ring    1 thread + bytes of TMA   1 thread for each warp of a group and each CTA that shares operands

A consumer group consists of the warpgroups that share a tile. A kernel is composed of

    schedule   loops over work tiles: which tile a role has next, and when it is stored (schedules/)
    mainloop   an accumulator (mainloops/), and the issuer of its loads and WGMMAs
    store      epilogue and store of D (epilogue/)
    source     K-tiles that a work tile accumulates (k_tiles)

This file has storage, atoms and launch.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90_utils

from ..dtypes import cutlass_dtype
from ..k_tiles import check_sharing
from ..scheduler import TileScheduler
from ..tile.barriers import Arrivals
from ..tile.hopper import ALIGN, WARPGROUP, MmaTF32Op, smem_layout
from .config import GemmFacts
from .contexts import ConsumerCtx, Load, ProducerCtx, StoreCtx, WorkTiles
from .epilogue.formula import EpilogueArgs
from .epilogue.gated_store_sm90 import GatedStoreSm90
from .epilogue.store_sm90 import StoreSm90
from .mainloops.in_place_sm90 import InPlaceSm90
from .schedules.cooperative import Cooperative


class GemmSm90:
    """Compiles to one kernel per `GemmFacts`; called with operands in the kernel's modes (see k_tiles)."""

    def __init__(self, facts: GemmFacts, mainloop: InPlaceSm90, schedule: type[Cooperative] = Cooperative):
        cfg = facts.config
        self.facts, self.cfg = facts, cfg
        self.mainloop, self.issue = mainloop, mainloop.issue
        self.dtype = cutlass_dtype(facts.dtype)
        self.out_dtype = cutlass_dtype(facts.out_dtype)
        self.acc_dtype = cutlass_dtype(facts.acc_dtype)
        self.warpgroups = cfg.warps_m * cfg.warps_n  # of a consumer group
        self.consumers = self.warpgroups * cfg.consumer_groups
        self.threads = WARPGROUP * (1 + self.consumers)
        self.group_n = cfg.tile_n // cfg.warps_n
        self.cluster = cfg.cluster  # CTAs that take work tiles together
        self.k_of_a = cfg.tile_k // self.issue.stored  # columns of A that are stored of a K-tile
        self.box_n = cfg.tile_n // cfg.boxes_b  # columns of a box of B
        self.store = (GatedStoreSm90 if facts.gate_apart else StoreSm90)(facts, self.group_n, self.out_dtype)
        self.schedule = schedule(facts, mainloop, self.store)
        sharers = cfg.cluster_m + cfg.cluster_n - 1  # CTAs of this one's row and column
        ring = Arrivals(1, 4 * self.warpgroups, groups=cfg.consumer_groups, sharers=sharers)
        self.arrivals = {"AB": ring} | self.schedule.arrivals()
        self.smem_bytes = None  # known once traced

    # ------------------------------------------------------------------ storage

    def layouts(self) -> tuple:
        """(sA, sB, sD); static, and made anew on the host and in the kernel, whose values must not mix."""
        cfg, store = self.cfg, self.store
        a_k, b_k = self.facts.majors[0] == "k", self.facts.majors[1] == "k"
        stages = cfg.stages * cfg.rings
        sA = smem_layout(self.dtype, cfg.tile_m, self.k_of_a, stages, a_k)
        sB = smem_layout(self.dtype, cfg.tile_n, cfg.tile_k, stages, b_k, cfg.boxes_b)
        sD = smem_layout(self.out_dtype, 64, store.epi_n, store.buffers * self.consumers, store.n_major)
        return sA, sB, sD

    def boxes_of_b(self):
        """sB as TMA writes it, (tile_n / boxes, tile_k, boxes x PIPE)."""
        cfg = self.cfg
        stages = cfg.stages * cfg.rings * cfg.boxes_b
        return smem_layout(self.dtype, self.box_n, cfg.tile_k, stages, self.facts.majors[1] == "k")

    def make_storage(self, sA_layout, sB_layout, sD_layout):
        sizes = [cute.cosize(layout) for layout in (sA_layout, sB_layout, sD_layout)]
        sizes[0] += self.cfg.stages * self.cfg.rings * self.issue.metadata_bytes * 8 // self.dtype.width
        if not self.store.tma:
            sizes[2] = 8
        buffer = self.schedule.buffer()
        exchanged = 0 if buffer is None else cute.cosize(buffer)

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.cfg.stages * self.cfg.rings]
            one: cute.struct.MemRange[Float32, 1]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], ALIGN]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], ALIGN]
            sD: cute.struct.Align[cute.struct.MemRange[self.out_dtype, sizes[2]], ALIGN]
            sX: cute.struct.Align[cute.struct.MemRange[Float32, exchanged], 16]
            exchange_barriers: cute.struct.MemRange[cutlass.Int64, self.schedule.barriers]

        self.storage = SharedStorage
        self.smem_bytes = SharedStorage.size_in_bytes()

    def stage_bytes(self) -> int:
        """Bytes that TMA and bulk copies write to a stage."""
        elements = self.cfg.tile_m * self.k_of_a + self.cfg.tile_n * self.cfg.tile_k
        return elements * self.dtype.width // 8 + self.issue.metadata_bytes

    # ------------------------------------------------------------------ atoms

    def make_mma(self, warps_m: int, warps_n: int, columns: int, a_in_registers: bool = False):
        """The tiled MMA of warps_m x warps_n warpgroups, whose WGMMAs have `columns` columns."""
        sources = warpgroup.OperandSource
        if self.facts.element.width == 4:
            op = MmaTF32Op(columns, sources.RMEM if a_in_registers else sources.SMEM)
            return cute.make_tiled_mma(cute.make_mma_atom(op), (warps_m, warps_n, 1))
        major = {"k": cute.nvgpu.OperandMajorMode.K, "m": cute.nvgpu.OperandMajorMode.MN}
        major["n"] = major["m"]
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            major[self.facts.majors[0]],
            major[self.facts.majors[1]],
            self.acc_dtype,
            (warps_m, warps_n, 1),
            tiler_mn=(64, columns),
            a_source=sources.RMEM if a_in_registers else sources.SMEM,
        )

    def make_load(self, tensor: cute.Tensor, layout, tile: tuple, multicast: bool, sharers: int):
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
        smem = cute.slice_(layout, (None, None, 0))
        # TMA rounds fp32 to TF32, to nearest even. Tensor cores would cut bits off.
        internal = cutlass.TFloat32 if self.facts.element.width == 4 else None
        return cpasync.make_tiled_tma_atom(op, tensor, smem, tile, num_multicast=sharers, internal_type=internal)

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (M, K, outer_a), or of K what is stored
        mB: cute.Tensor,  # (N, K, outer_k, L)
        mD: cute.Tensor,  # (M, N, outer_m, L)
        source,
        args: EpilogueArgs,
        tiles_m: Int32,  # row tiles of the whole product
        group: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        cfg = self.cfg
        check_sharing(source, cfg.cluster_m, cfg.cluster_n)
        sA_layout, sB_layout, sD_layout = self.layouts()
        self.make_storage(sA_layout, sB_layout, sD_layout)
        columns = min(self.group_n, self.mainloop.columns)
        tiled_mma = self.make_mma(cfg.warps_m, cfg.warps_n, columns, self.issue.a_in_registers)
        tiled_mma_group = self.make_mma(1, 1, self.group_n)
        tile_a, tile_b = (cfg.tile_m, self.k_of_a), (self.box_n, cfg.tile_k)
        tma_a, tA = self.make_load(mA, sA_layout, tile_a, cfg.cluster_n > 1, cfg.cluster_n)
        tma_b, tB = self.make_load(mB, self.boxes_of_b(), tile_b, cfg.cluster_m > 1, cfg.cluster_m)
        tma_d, tD = self.store.make_tma(mD, sD_layout)
        tma_z, tZ = None, None
        if const_expr(self.facts.epilogue.stores_z):
            tma_z, tZ = self.store.make_tma(args.z, sD_layout)
        columns = mD.shape[1] if const_expr(source.columns is None) else source.columns
        scheduler = (TileScheduler.with_divisors if const_expr(self.facts.multiplies_tile_numbers) else TileScheduler)(
            cute.ceil_div(tiles_m, cfg.cluster_m),
            cute.ceil_div(columns, cfg.tile_n * cfg.cluster_n),
            mD.shape[3],
            group,
            source.order,
        )
        clusters = cutlass.min(scheduler.count, max_ctas // self.cluster)
        extent = (mD.shape[0], mD.shape[1])
        self.kernel(
            tma_a, tA, tma_b, tB, tma_d, tD, tma_z, tZ, tiled_mma, tiled_mma_group, source, args, scheduler, extent
        ).launch(
            grid=(clusters * self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=self.facts.chained,
            stream=stream,
        )

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        tma_d: cute.CopyAtom,
        mD: cute.Tensor,
        tma_z: cute.CopyAtom | None,
        mZ: cute.Tensor | None,
        tiled_mma: cute.TiledMma,
        tiled_mma_group: cute.TiledMma,
        source,
        args: EpilogueArgs,
        scheduler: TileScheduler,
        extent: tuple,
    ):
        cfg = self.cfg
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1  # -1: the producer
        block = cute.arch.block_idx()[0]
        ctas = cute.arch.grid_dim()[0]
        rank = block % self.cluster
        rank_k = Int32(0)
        if const_expr(cfg.split > 1):
            rank, rank_k = Int32(0), rank
        rank_m, rank_n = rank % cfg.cluster_m, rank // cfg.cluster_m

        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if const_expr(self.store.tma):
                cpasync.prefetch_descriptor(tma_d)

        sA_layout, sB_layout, sD_layout = self.layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA = storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)  # (tile_m, k_of_a, PIPE)
        sB = storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)  # (tile_n, tile_k, PIPE)
        sD = storage.sD.get_tensor(sD_layout.outer, swizzle=sD_layout.inner)  # (64, epi_n, PIPE)
        if const_expr(self.store.anchored or self.mainloop.reads_one):
            if tidx == 0:
                cute.make_tensor(storage.one.data_ptr(), cute.make_layout(1))[0] = Float32(1.0)
            cute.arch.sync_threads()
        sX = None
        if const_expr(self.schedule.buffer() is not None):
            sX = storage.sX.get_tensor(self.schedule.buffer())
            if tidx == 0:
                self.schedule.init(storage.exchange_barriers.data_ptr())
        ring, cta_layout = self.make_pipeline(storage.barriers.data_ptr())

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.mainloop.registers[0])
            if self.schedule.produces(warp):
                boxes_b = self.boxes_of_b()
                sB_boxes = storage.sB.get_tensor(boxes_b.outer, swizzle=boxes_b.inner)
                coord = cta_layout.get_flat_coord(rank)
                a, b = self.loads(tma_a, mA, sA, tma_b, mB, sB_boxes, (rank_m, rank_n), cta_layout, coord)
                tiles = self.work_tiles(scheduler, source, block, ctas, (rank_m, rank_n, rank_k))
                self.schedule.produce(ProducerCtx(tiles, a, b, mB.shape[3], ring, warp))
        else:
            cute.arch.setmaxregister_increase(self.mainloop.registers[1])
            if const_expr(self.facts.chained):
                cute.arch.griddepcontrol_wait()  # before scales of B are read, and D is written
            groups = cute.make_layout(self.warpgroups, stride=WARPGROUP)
            thr_mma = tiled_mma.get_slice(groups(warpgroup % self.warpgroups))
            A = self.issue.operand_a(tiled_mma, thr_mma, sA, (tidx - WARPGROUP) % (WARPGROUP * self.warpgroups))
            B = self.issue.operand_b(tiled_mma, thr_mma, sB, warpgroup % self.warpgroups)
            acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((cfg.tile_m, cfg.tile_n)), self.acc_dtype)
            thr_mma_group = tiled_mma_group.get_slice(tidx % WARPGROUP)
            outs = [(tma_d, self.store.tiles(mD))]
            if const_expr(self.facts.epilogue.stores_z):
                outs += [(tma_z, self.store.tiles(mZ))]
            tiles = self.work_tiles(scheduler, source, block, ctas, (rank_m, rank_n, rank_k))
            one = storage.one.data_ptr()
            out = StoreCtx(args, outs, sD, thr_mma_group, tiled_mma_group, extent, warpgroup, one)
            exchange = sX, storage.exchange_barriers.data_ptr()
            group = warpgroup // self.warpgroups
            self.schedule.consume(ConsumerCtx(tiles, tiled_mma, acc, A, B, ring, out, group, exchange))

    def work_tiles(self, scheduler: TileScheduler, source, block: Int32, ctas: Int32, ranks: tuple) -> WorkTiles:
        """The work tiles of this CTA; ranks: m, n, k."""
        first, step = block // self.cluster, ctas // self.cluster
        return WorkTiles(scheduler, source, first, step, *ranks, (self.cfg.cluster_m, self.cfg.cluster_n))

    def loads(
        self,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        sA: cute.Tensor,  # (tile_m, k_of_a, PIPE)
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        sB: cute.Tensor,  # (tile_n / boxes, tile_k, boxes x PIPE)
        ranks: tuple,  # m, n
        cta_layout: cute.Layout,
        coord: tuple,  # of this CTA
    ) -> tuple[Load, Load]:
        """The loads of A and B."""
        cfg = self.cfg
        # (tile_m, k_of_a, rest_m, rest_k, outer_a) and (tile_n / boxes, tile_k, rest_n, rest_k, outer_k, L)
        gA = cute.local_tile(mA, (cfg.tile_m, self.k_of_a), (None, None, None))
        gB = cute.local_tile(mB, (self.box_n, cfg.tile_k), (None, None, None, None))
        places = (ranks[1] % cfg.cluster_n, cfg.cluster_n), (ranks[0], cfg.cluster_m)
        found = []
        for tma, sX, gX, (rank, sharers), mode in zip((tma_a, tma_b), (sA, sB), (gA, gB), places, (1, 0)):
            sX, gX = cpasync.tma_partition(
                tma, rank, cute.make_layout(sharers), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
            )
            mask = cute.make_layout_image_mask(cta_layout, coord, mode=mode) if sharers > 1 else None
            found.append(Load(tma, gX, sX, mask))
        return tuple(found)

    @cute.jit
    def make_pipeline(self, barriers: cute.Pointer):
        """The AB ring and the cluster's layout (cluster_m, cluster_n, 1); returns after every barrier is visible."""
        cfg = self.cfg
        cta_layout = cute.make_layout((cfg.cluster_m, cfg.cluster_n, 1))
        arrivals = self.arrivals["AB"]
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=cfg.stages * cfg.rings,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.full),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.empty),
            tx_count=self.stage_bytes(),
            # CTAs that differ in the last mode, K, share no operands: each arrives at its own barriers.
            cta_layout_vmnk=cute.make_layout((1, cfg.cluster_m, cfg.cluster_n, cfg.split)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))
        return ring, cta_layout
