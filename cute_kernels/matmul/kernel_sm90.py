"""The sm_90 GEMM kernel: persistent, warp-specialized, TMA loads, WGMMA, TMA stores.

    warpgroup 0        producer; one of its warps issues all TMA loads, the others idle
    warpgroups 1..     consumers; each owns tile_m / warps_m rows and tile_n / warps_n columns of its group's tile

    pipeline   producer arrives          consumers arrive (per stage; `arrivals`)
    AB ring    1 thread + bytes of TMA   1 thread for each warp of a group and each CTA that shares operands

    cooperative   producer  | load 0 | load 1 | load 2 | ...                    runs ahead by the ring's stages
                  group 0   |  mma 0  | store 0 |  mma 1  | store 1 | ...
    ping-pong     producer  | load 0 | load 1 | load 2 | ...
                  group 0   |  mma 0  | store 0 |  mma 2  | store 2 | ...
                  group 1            |  mma 1  | store 1 |  mma 3  | ...
    own rings     producer 0  | load 0 | load 2 | ...
                  producer 1  | load 1 | load 3 | ...
                  group 0   |  mma 0      | store 0 |  mma 2      | store 2 | ...
                  group 1         |  mma 1      | store 1 |  mma 3      | store 3 | ...

A consumer group consists of the warpgroups that share a tile. One ring feeds both groups in tile order; a group skips
the stages of the other group's tiles. With a ring each, the groups are as independent as two CTAs: under promoted
accumulation one group issues WGMMAs while the other adds or stores.

With split-K, the CTAs of a cluster share a tile's K-tiles, reduce their accumulators (split_k_sm90), and each stores a
part:

    CTA 0             group 0   |  mma 0, first K-tiles | exchange | store a part of 0 |  mma 1, ...
    CTA 1             group 0   |  mma 0, last K-tiles  | exchange | store the rest    |  mma 1, ...

The source decides which K-tiles a work tile accumulates; this file has storage, atoms and launch.
"""

from collections.abc import Callable
from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90_utils

from ..dtypes import cutlass_dtype
from ..k_tiles import check_sharing, split_k_tiles
from ..scheduler import TileScheduler
from ..tile.barriers import Arrivals
from ..tile.hopper import ALIGN, WARPGROUP, MmaTF32Op, RingState, smem_layout
from .config import GemmFacts
from .epilogue.formula import EpilogueArgs
from .epilogue.gated_store_sm90 import GatedStoreSm90
from .epilogue.store_sm90 import StoreSm90, in_fp32
from .mainloops.block_scaled_sm90 import block_scales
from .mainloops.mainloop_sm90 import MainloopSm90
from .schedules.split_k_sm90 import SplitKSm90


class GemmSm90:
    """Compiles to one kernel per `GemmFacts`; called with operands in the kernel's modes (see k_tiles)."""

    def __init__(self, facts: GemmFacts, mainloop: Callable = MainloopSm90):
        cfg = facts.config
        self.facts, self.cfg = facts, cfg
        self.dtype = cutlass_dtype(facts.dtype)
        self.out_dtype = cutlass_dtype(facts.out_dtype)
        self.acc_dtype = cutlass_dtype(facts.acc_dtype)
        self.warpgroups = cfg.warps_m * cfg.warps_n  # of a consumer group
        self.consumers = self.warpgroups * cfg.consumer_groups
        self.threads = WARPGROUP * (1 + self.consumers)
        self.group_n = cfg.tile_n // cfg.warps_n
        self.cluster = cfg.cluster  # CTAs that take work tiles together
        self.in_turns = cfg.consumer_groups > cfg.rings  # groups multiply in turns, and share a ring
        self.mainloop = mainloop(facts.k_blocks, 1 + self.in_turns, cfg.cluster_n > 1, cfg.cluster_m > 1)
        self.k_of_a = cfg.tile_k // self.mainloop.stored  # columns of A that are stored of a K-tile
        self.box_n = cfg.tile_n // cfg.boxes_b  # columns of a box of B
        self.store = (GatedStoreSm90 if facts.gate_apart else StoreSm90)(facts, self.group_n, self.out_dtype)
        sharers = cfg.cluster_m + cfg.cluster_n - 1  # CTAs of this one's row and column
        self.arrivals = {"AB": Arrivals(1, 4 * self.warpgroups, groups=cfg.consumer_groups, sharers=sharers)}
        self.exchange = None
        if cfg.split > 1:
            accumulators = cfg.tile_m * self.group_n // (cfg.warps_m * WARPGROUP)  # of a thread
            self.exchange = SplitKSm90(cfg.split, self.warpgroups, accumulators)
            self.arrivals["exchange"] = self.exchange.arrivals
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
        sizes[0] += self.cfg.stages * self.cfg.rings * self.mainloop.metadata_bytes * 8 // self.dtype.width
        if not self.store.tma:
            sizes[2] = 8
        exchange = self.exchange
        sums = cute.cosize(exchange.layout()) if exchange else 0

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.cfg.stages * self.cfg.rings]
            one: cute.struct.MemRange[Float32, 1]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], ALIGN]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], ALIGN]
            sD: cute.struct.Align[cute.struct.MemRange[self.out_dtype, sizes[2]], ALIGN]
            sX: cute.struct.Align[cute.struct.MemRange[Float32, sums], 16]  # nothing without a split
            exchange_barriers: cute.struct.MemRange[cutlass.Int64, exchange.barriers if exchange else 0]

        self.storage = SharedStorage
        self.smem_bytes = SharedStorage.size_in_bytes()

    def stage_bytes(self) -> int:
        """Bytes that TMA and bulk copies write to a stage."""
        elements = self.cfg.tile_m * self.k_of_a + self.cfg.tile_n * self.cfg.tile_k
        return elements * self.dtype.width // 8 + self.mainloop.metadata_bytes

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
        tiled_mma = self.make_mma(cfg.warps_m, cfg.warps_n, columns, self.mainloop.a_in_registers)
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
        if const_expr(self.store.anchored or self.mainloop.multiplies_by_one):
            if tidx == 0:
                cute.make_tensor(storage.one.data_ptr(), cute.make_layout(1))[0] = Float32(1.0)
            cute.arch.sync_threads()
        sX = None
        if const_expr(self.exchange is not None):
            sX = storage.sX.get_tensor(self.exchange.layout())
            if tidx == 0:
                self.exchange.init(storage.exchange_barriers.data_ptr())
        ring, cta_layout = self.make_pipeline(storage.barriers.data_ptr())

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.mainloop.registers[0])
            if warp == 0 if const_expr(cfg.rings == 1) else warp < cfg.rings:
                boxes_b = self.boxes_of_b()
                sB_boxes = storage.sB.get_tensor(boxes_b.outer, swizzle=boxes_b.inner)
                self.produce(
                    tma_a, mA, sA, tma_b, mB, sB_boxes, source, scheduler, ring, cta_layout,
                    (rank, rank_m, rank_n, rank_k), warp,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.mainloop.registers[1])
            if const_expr(self.facts.chained):
                cute.arch.griddepcontrol_wait()  # before scales of B are read, and D is written
            groups = cute.make_layout(self.warpgroups, stride=WARPGROUP)
            thr_mma = tiled_mma.get_slice(groups(warpgroup % self.warpgroups))
            tCrA = self.mainloop.operand_a(tiled_mma, thr_mma, sA, (tidx - WARPGROUP) % (WARPGROUP * self.warpgroups))
            tCrB = self.mainloop.operand_b(tiled_mma, thr_mma, sB, warpgroup % self.warpgroups)
            acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((cfg.tile_m, cfg.tile_n)), self.acc_dtype)
            thr_mma_group = tiled_mma_group.get_slice(tidx % WARPGROUP)
            outs = [(tma_d, self.store.tiles(mD))]
            if const_expr(self.facts.epilogue.stores_z):
                outs += [(tma_z, self.store.tiles(mZ))]
            self.consume(
                (block // self.cluster, ctas // self.cluster), scheduler, source, (rank_m, rank_n, rank_k), ring,
                (tiled_mma, acc, tCrA, tCrB), args, (outs, sD, thr_mma_group, tiled_mma_group, extent), warpgroup,
                storage.one.data_ptr(), (sX, storage.exchange_barriers.data_ptr()),
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        tiles: tuple,  # the first work tile, and how many are between this CTA's
        scheduler: TileScheduler,
        source,
        ranks: tuple,  # m, n, k
        ring,
        operands: tuple,  # tiled MMA, accumulators, A, B: what `mma` takes
        args: EpilogueArgs,
        store: tuple,  # what `store` takes: outs, sD, thr_mma, tiled MMA of a warpgroup, extent
        warpgroup: Int32,
        anchor: cute.Pointer,  # 1.0 in shared memory
        exchange: tuple,  # of a split K: sums in shared memory, mbarriers
    ):
        """A consumer warpgroup: multiply and store every work tile, or those of its consumer group."""
        cfg = self.cfg
        rank_m, rank_n, rank_k = ranks
        tiled_mma, acc = operands[:2]
        outs, sD, thr_mma_group, tiled_mma_group, extent = store
        sX, exchange_barriers = exchange
        # Of several rings each is one warpgroup's.
        read = self.ring_state(pipeline.PipelineUserType.Consumer, warpgroup)
        release = self.ring_state(pipeline.PipelineUserType.Consumer, warpgroup)
        first, step = tiles
        end = scheduler.end(first, step)
        consumer_group = warpgroup // self.warpgroups
        phase = Int32(0)  # of the exchange
        bounds = self.bounds(first, scheduler, source, rank_m)
        if const_expr(self.in_turns):
            if consumer_group == 1:
                self.mainloop.order_arrive(consumer_group)  # group 0 goes first
                read, release = self.skip(first, end, scheduler, source, rank_m, bounds, read, release)
                bounds = self.bounds(first + step, scheduler, source, rank_m)
            first = first + consumer_group * step
        if const_expr(cfg.rings > 1):
            first = first + consumer_group * step
            bounds = self.bounds(first, scheduler, source, rank_m)
        for index in cutlass.range(first, end, step * cfg.consumer_groups, unroll=1):
            m, n, l = scheduler.decode(index)
            k_tiles = self.share(source.for_tile(m * cfg.cluster_m + rank_m, l, bounds), rank_k)
            other = bounds
            if const_expr(self.in_turns):
                other = self.bounds(index + step, scheduler, source, rank_m)
            bounds = self.bounds(index + step * cfg.consumer_groups, scheduler, source, rank_m)
            scales = self.block_scales(args, tiled_mma, k_tiles, n * cfg.cluster_n + rank_n, l)
            if const_expr(self.mainloop.multiplies_by_one):
                scales = ((anchor,),)
            read, release = self.mainloop.mma(k_tiles, *operands, ring, read, release, consumer_group, *scales)
            if const_expr(self.in_turns):
                read, release = self.skip(index + step, end, scheduler, source, rank_m, other, read, release)
            sums = acc if const_expr(self.exchange is None) else in_fp32(acc, 0, cute.size(acc))[0]
            if const_expr(self.exchange is not None):
                self.exchange.reduce(sums, sX, exchange_barriers, warpgroup, rank_k, phase)
                phase = phase ^ 1
            self.store.store(
                sums, args, outs, sD, thr_mma_group, tiled_mma_group, extent,
                self.places(k_tiles, n * cfg.cluster_n + rank_n, warpgroup), (l, k_tiles.l), warpgroup, anchor, rank_k,
            )  # fmt: skip
        self.store.drain()
        if const_expr(self.exchange is not None):
            self.exchange.drain(exchange_barriers, warpgroup, phase)

    @cute.jit
    def produce(
        self,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        sA: cute.Tensor,  # (tile_m, k_of_a, PIPE)
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        sB_boxes: cute.Tensor,  # (tile_n / boxes, tile_k, boxes x PIPE)
        source,
        scheduler: TileScheduler,
        ring,
        cta_layout: cute.Layout,
        ranks: tuple,
        warp: Int32,
    ):
        """A producer warp: issue the loads of every work tile, or of those of its consumer group."""
        cfg = self.cfg
        rank, rank_m, rank_n, rank_k = ranks
        block, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        # (tile_m, k_of_a, rest_m, rest_k, outer_a) and (tile_n / boxes, tile_k, rest_n, rest_k, outer_k, L)
        gA = cute.local_tile(mA, (cfg.tile_m, self.k_of_a), (None, None, None))
        gB = cute.local_tile(mB, (self.box_n, cfg.tile_k), (None, None, None, None))
        tAsA, tAgA = cpasync.tma_partition(
            tma_a,
            rank_n % cfg.cluster_n,
            cute.make_layout(cfg.cluster_n),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b,
            rank_m,
            cute.make_layout(cfg.cluster_m),
            cute.group_modes(sB_boxes, 0, 2),
            cute.group_modes(gB, 0, 2),
        )
        coord = cta_layout.get_flat_coord(rank)
        mask_a = cute.make_layout_image_mask(cta_layout, coord, mode=1)
        mask_b = cute.make_layout_image_mask(cta_layout, coord, mode=0)
        state = self.ring_state(pipeline.PipelineUserType.Producer, warp)
        first, step = block // self.cluster, ctas // self.cluster
        end = scheduler.end(first, step)
        if const_expr(cfg.rings > 1):
            first, step = first + warp * step, step * cfg.rings
        bounds = self.bounds(first, scheduler, source, rank_m)
        ahead = Int32(0)
        if const_expr(self.facts.chained):
            loads = tma_a, tAgA, tAsA, mask_a
            ahead = self.load_a_ahead((first, end), bounds, scheduler, source, loads, ring, rank_k)
            cute.arch.griddepcontrol_wait()
        for index in cutlass.range(first, end, step, unroll=1):
            m, n, l = scheduler.decode(index)
            n = n * cfg.cluster_n + rank_n
            k_tiles = self.share(source.for_tile(m * cfg.cluster_m + rank_m, l, bounds), rank_k)
            bounds = self.bounds(index + step, scheduler, source, rank_m)
            # Of several boxes each K-tile names the columns.
            n = k_tiles.out(n)[1] if const_expr(cfg.boxes_b == 1) else None
            state = self.mainloop.load(
                k_tiles,
                tma_a, tAgA, tAsA, mask_a,
                tma_b, tBgB[None, n, None, None, cutlass.min(l, mB.shape[3] - 1)], tBsB, mask_b,
                ring, state, *((ahead,) if self.facts.chained else ()),
            )  # fmt: skip
            ahead = Int32(0)
        if const_expr(self.facts.chained):
            # No earlier: the next kernel's CTAs would all be where this one has left an SM idle.
            cute.arch.griddepcontrol_launch_dependents()
        replace(ring, num_stages=cfg.stages).producer_tail(state)

    @cute.jit
    def load_a_ahead(
        self, tiles: tuple, bounds: tuple, scheduler: TileScheduler, source, loads: tuple, ring, rank_k: Int32
    ):
        """Load A's part of the first K-tiles, as many as there are stages, of a chained kernel; returns how many.

        tiles: the first work tile, and past the last. Without clusters of rows and columns.
        """
        count = Int32(0)
        if tiles[0] < tiles[1]:
            m, _, l = scheduler.decode(tiles[0])
            k_tiles = self.share(source.for_tile(m, l, bounds), rank_k)
            count = cutlass.min(k_tiles.count, self.cfg.stages)
            state = self.ring_state(pipeline.PipelineUserType.Producer, Int32(0))
            for i in cutlass.range(count, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                self.mainloop.load_a(k_tiles.at(i), *loads, barrier, state.index)
                state.advance()
        return count

    @cute.jit
    def bounds(self, index: Int32, scheduler: TileScheduler, source, rank_m: Int32) -> tuple:
        """The source's bounds for a work tile. Past the last tile they are the last tile's, and are never used."""
        m, n, l = scheduler.decode(cutlass.min(index, scheduler.count - 1))
        return source.bounds(m * self.cfg.cluster_m + rank_m, n * self.cfg.cluster_n, l)

    def block_scales(self, args: EpilogueArgs, tiled_mma: cute.TiledMma, k_tiles, n: Int32, l: Int32) -> tuple:
        """The block scales of a work tile for the mainloop; () without any."""
        cfg, spec = self.cfg, self.facts.epilogue
        if not spec.scales_blocks:
            return ()
        thread = cute.arch.thread_idx()[0] - WARPGROUP  # after the producer
        if const_expr(cfg.consumer_groups > 1):
            thread = thread % (WARPGROUP * self.warpgroups)
        return (
            block_scales(
                spec, args, tiled_mma.get_slice(thread), (cfg.tile_m, cfg.tile_n), k_tiles.out(n), (k_tiles.l, l)
            ),
        )

    def places(self, k_tiles, n: Int32, warpgroup: Int32) -> tuple:
        """The tile of D of a work tile; if the tile consists of boxes, that of each of this warpgroup's boxes."""
        boxes = self.cfg.boxes_b // self.cfg.warps_n
        if self.cfg.boxes_b == 1:
            return (k_tiles.out(n),)
        first = warpgroup % self.warpgroups // self.cfg.warps_m * boxes
        return tuple(k_tiles.out(first + box) for box in range(boxes))

    def share(self, k_tiles, rank_k: Int32):
        """This CTA's part of a work tile's K-tiles."""
        if self.cfg.split == 1:
            return k_tiles
        return split_k_tiles(k_tiles, rank_k, self.cfg.split, len(self.facts.k_blocks))

    def ring_state(self, user: pipeline.PipelineUserType, number: Int32):
        """The initial pipeline state of a producer warp or consumer group in ring `number`."""
        cfg = self.cfg
        if cfg.rings == 1:
            return pipeline.make_pipeline_state(user, cfg.stages)
        return RingState.begin(cfg.stages, number * cfg.stages, user is pipeline.PipelineUserType.Producer)

    @cute.jit
    def skip(self, index, end, scheduler: TileScheduler, source, rank_m: Int32, bounds: tuple, read, release):
        """Step over the stages of a work tile that the other consumer group reads."""
        if index < end:
            m, _, l = scheduler.decode(index)
            count = source.for_tile(m * self.cfg.cluster_m + rank_m, l, bounds).count
            read.advance(count)
            release.advance(count)
        return read, release

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
