"""The small-block kernel (sm_90): many low block rows in one CTA, which loads each chunk of B once for all of them.

A block 16 high fills a quarter of WGMMA's 64 rows, and every block row that loads its own copy of B uses it for 16 rows
only: then L2 is the limit. So the operands are swapped, with 64 dense columns as WGMMA's M and one block's height as
its N, and a CTA owns 192 rows of D, that is as many block rows as those hold, by 256 columns. It goes
through the block columns in which a row of its cluster has a block, in chunks of 64 columns of W, which need not be
neighbors:

    warp 0             B: the chunk, multicast to the CTAs of a cluster, which own other rows of the same columns; each
                       of its block columns (a slice) by one TMA
    warps 1..3         A: the blocks of consumer 0..2 that lie in the chunk, each by one TMA, packed
    warpgroups 1..3    consumers; each owns 64 of the rows and all 256 columns. For each of its block rows and each
                       K-step of the chunk: if the block is there, multiply

    pipeline   producers arrive                            consumers arrive (per stage)
    chunk      4 threads + the bytes of B and of A         1 thread of each of the 12 warps of every CTA in the cluster

A's blocks lie in one ring for each consumer, without stages: a chunk takes as many slots as it has blocks, and gives
them back with the chunk. Those of a transposed view lie there as they are stored, (bk, bm), and WGMMA transposes them:
its N is then contiguous, in rows one swizzle atom wide. What is there says a word of bits a consumer and chunk: bit
r * steps + s for slice s of row r. The list of slices, the words, and the blocks in the order in which they are met,
are made once per pattern (tables.py).
"""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90_utils

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.matmul.config import GemmConfig, GemmFacts
from cute_kernels.matmul.contexts import StoreCtx
from cute_kernels.matmul.epilogue.formula import EpilogueArgs
from cute_kernels.matmul.epilogue.store_sm90 import WARPGROUP, StoreSm90
from cute_kernels.scheduler import TileScheduler
from cute_kernels.tile.descriptors import MMA_M, descriptor_high, descriptor_low
from cute_kernels.tile.hopper import ALIGN, smem_layout
from cute_kernels.tile.ptx import wgmma_slabs

from .tables import BATCH
from .tile import CHUNK, CONSUMERS, ROWS, Geometry, chunk_arrivals

REGISTERS = (32, 160)  # a thread of producers, of consumers: 65,536 over 128 and 384
SLAB = MMA_M


class SmallBlocksSm90:
    """Compiles to one kernel per `GemmFacts` with a SmallBlocksConfig; called with operands in the swapped frame."""

    def __init__(self, facts: GemmFacts):
        cfg = facts.config
        self.facts, self.cfg = facts, cfg
        self.geometry = Geometry.of_block(facts.block.bm, facts.block.bk, facts.majors[1] == "k")
        self.a_m_major = facts.block.permuted
        fold = self.fold = 1 if self.a_m_major else self.geometry.fold
        self.block_tile = facts.block.bm // fold, self.geometry.width * fold  # of A, as TMA sees it
        self.slice = self.geometry.width * self.geometry.gather  # rows of B
        self.dtype = cutlass_dtype(facts.dtype)
        self.out_dtype = cutlass_dtype(facts.out_dtype)
        self.b_n_major = facts.majors[1] != "k"
        self.columns = cfg.tile_n
        width = facts.element.width
        self.slot_bytes = facts.block.bm * self.geometry.width * width
        self.ring_bytes = cfg.chunks * ROWS * CHUNK * width  # of A, a consumer
        self.chunk_bytes = self.columns * CHUNK * width  # of B
        self.slots = self.ring_bytes // self.slot_bytes
        row_bytes = width * (facts.block.bm if self.a_m_major else self.geometry.width)
        self.a_high = descriptor_high(row_bytes)
        self.mma_k = facts.element.mma_k
        # An MMA step's columns of a block, and rows of B, in units of 16 bytes
        self.a_step = self.mma_k * (row_bytes if self.a_m_major else width) >> 4
        self.b_step = self.mma_k * (SLAB if self.b_n_major else 1) * width >> 4
        self.threads = WARPGROUP * (1 + CONSUMERS)
        self.cluster = cfg.cluster_m
        self.arrivals = {"chunk": chunk_arrivals(cfg.cluster_m)}
        self.store = StoreSm90(swapped(facts), ROWS, self.out_dtype, anchor_bias=False)
        self.smem_bytes = None  # known once traced

    # ------------------------------------------------------------------ storage

    def layouts(self) -> tuple:
        """(sA, sB, sD); static, and made anew on the host and in the kernel, whose values must not mix."""
        store = self.store
        sA = smem_layout(self.dtype, *self.block_tile, self.slots * CONSUMERS, not self.a_m_major)
        slices = self.cfg.stages * self.geometry.slices
        sB = smem_layout(self.dtype, self.columns, self.slice, slices, not self.b_n_major)
        sD = smem_layout(self.out_dtype, 64, store.epi_n, store.buffers * CONSUMERS, store.n_major)
        return sA, sB, sD

    def make_storage(self, sA_layout, sB_layout, sD_layout):
        sizes = [cute.cosize(layout) for layout in (sA_layout, sB_layout, sD_layout)]
        if not self.store.tma:
            sizes[2] = 8

        @cute.struct
        class SharedStorage:
            full: cute.struct.MemRange[cutlass.Int64, self.cfg.stages]
            empty: cute.struct.MemRange[cutlass.Int64, self.cfg.stages]
            one: cute.struct.MemRange[Float32, 1]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], ALIGN]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], ALIGN]
            sD: cute.struct.Align[cute.struct.MemRange[self.out_dtype, sizes[2]], ALIGN]

        self.storage = SharedStorage
        self.smem_bytes = SharedStorage.size_in_bytes()

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (bm / fold, bk fold, nnz), of a batch (.., .., L nnz); contiguous along bk, of a view bm
        mB: cute.Tensor,  # (N, K, L), or (N, K, 1) for all items of a batch
        mD: cute.Tensor,  # (N, M, 1, L)
        source,
        args: EpilogueArgs,
        group: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        cfg = self.cfg
        sA_layout, sB_layout, sD_layout = self.layouts()
        self.make_storage(sA_layout, sB_layout, sD_layout)
        tma_a, tA = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            mA,
            cute.slice_(sA_layout, (None, None, 0)),
            self.block_tile,
        )
        multicast = const_expr(cfg.cluster_m > 1)
        tma_b, tB = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp(),
            mB,
            cute.slice_(sB_layout, (None, None, 0)),
            (self.columns, self.slice),
            num_multicast=cfg.cluster_m,
        )
        tma_d, tD = self.store.make_tma(mD, sD_layout)
        tma_z, tZ = None, None
        if const_expr(self.facts.epilogue.stores_z):
            tma_z, tZ = self.store.make_tma(args.z, sD_layout)
        rows = const_expr(ROWS * CONSUMERS * cfg.cluster_m)
        scheduler = TileScheduler(
            cute.ceil_div(mD.shape[1], rows), cute.ceil_div(mD.shape[0], self.columns), mD.shape[3], group
        )
        mma = sm90_utils.make_trivial_tiled_mma(  # of the store: how accumulators lie in a warpgroup
            self.dtype,
            self.dtype,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            tiler_mn=(SLAB, ROWS),
        )
        clusters = cutlass.min(scheduler.count, max_ctas // cfg.cluster_m)
        extent = (mD.shape[0], mD.shape[1])
        self.kernel(tma_a, tA, tma_b, tB, tma_d, tD, tma_z, tZ, mma, source, args, scheduler, extent).launch(
            grid=(clusters * cfg.cluster_m, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(cfg.cluster_m, 1, 1),
            min_blocks_per_mp=1,
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
        mma: cute.TiledMma,
        source,
        args: EpilogueArgs,
        scheduler: TileScheduler,
        extent: tuple,
    ):
        cfg = self.cfg
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1  # -1: the producers
        block, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        rank = block % cfg.cluster_m
        first, step = block // cfg.cluster_m, ctas // cfg.cluster_m
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if const_expr(self.store.tma):
                cpasync.prefetch_descriptor(tma_d)
        sA_layout, sB_layout, sD_layout = self.layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA = storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)  # (*block_tile, CONSUMERS x slots)
        sB = storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)  # (columns, slice, PIPE x slices)
        sD = storage.sD.get_tensor(sD_layout.outer, swizzle=sD_layout.inner)  # (64, epi_n, PIPE)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        arrivals = self.arrivals["chunk"]
        if warp == 0:
            with cute.arch.elect_one():
                for s in range_constexpr(cfg.stages):
                    cute.arch.mbarrier_init(full + s, arrivals.full)
                    cute.arch.mbarrier_init(empty + s, arrivals.empty)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.store.anchored):
            if tidx == 0:
                cute.make_tensor(storage.one.data_ptr(), cute.make_layout(1))[0] = Float32(1.0)
        self.sync_cluster()  # barriers are visible to every CTA that arrives on them

        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == 0:
                self.load_b(tma_b, mB, sB, source, scheduler, full, empty, first, step, rank)
            else:
                self.load_a(tma_a, mA, sA, source, scheduler, full, empty, first, step, rank, warp - 1)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            thr_mma = mma.get_slice(tidx % WARPGROUP)
            acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((self.columns, ROWS)), Float32)  # (MMA, slabs, 1)
            outs = [(tma_d, self.store.tiles(mD))]
            if const_expr(self.facts.epilogue.stores_z):
                outs += [(tma_z, self.store.tiles(mZ))]
            out = StoreCtx(args, outs, sD, thr_mma, mma, extent, consumer, storage.one.data_ptr())
            # Opaque to the compiler, which would compute them again for each block.
            ring = storage.sA.data_ptr().toint() + consumer * self.ring_bytes
            ring = cute.arch.make_warp_uniform(descriptor_low(ring, int(not self.a_m_major)))
            chunks_at = descriptor_low(storage.sB.data_ptr().toint(), int(not self.b_n_major))
            chunks_at = cute.arch.make_warp_uniform(chunks_at)
            stage, phase, head = Int32(0), Int32(0), Int32(0)
            for index in cutlass.range(first, scheduler.count, step, unroll=1):
                m, n, l = scheduler.decode(index)
                chunks = source.for_tile(m, rank)
                acc.fill(0.0)
                stage, phase, head = self.mma(chunks, acc, ring, chunks_at, full, empty, stage, phase, head, consumer)
                self.store.store(acc, out, ((n, m * cfg.cluster_m + rank, 0),), (l, l))
            self.store.drain()
        # A CTA must not exit while its peer may still write to its shared memory or arrive at its barriers.
        self.sync_cluster()

    @cute.jit
    def sync_cluster(self):
        if const_expr(self.cfg.cluster_m > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def advance(self, stage: Int32, phase: Int32):
        stage += 1
        if stage == self.cfg.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    # ------------------------------------------------------------------ producers

    @cute.jit
    def load_b(self, tma_b, mB, sB, source, scheduler, full, empty, first, step, rank):
        """Every chunk of every work tile; a CTA of a cluster loads its share and multicasts it."""
        cluster, slices = const_expr(self.cfg.cluster_m), const_expr(self.geometry.slices)
        gB = cute.local_tile(mB, (self.columns, self.slice), (None, None, None))  # (columns, slice, rest_n, rest_k, L)
        tBsB, tBgB = cpasync.tma_partition(
            tma_b, rank, cute.make_layout(cluster), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        mask = Int32((1 << cluster) - 1).to(cutlass.Int16)
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(first, scheduler.count, step, unroll=1):
            m, n, l = scheduler.decode(index)
            if const_expr(source.blocks is not None):
                l = cutlass.min(l, mB.shape[2] - 1)
            chunks = source.for_tile(m, rank)
            batch = Int32(0)  # lane j: slice j of the next BATCH
            for i in cutlass.range(chunks.count, unroll=1):
                if i * slices % BATCH == 0:
                    batch = chunks.slice(i * slices + lane)
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.chunk_bytes)
                for s in range_constexpr(slices):
                    number = cute.arch.shuffle_sync(batch, i * slices % BATCH + s)
                    cute.copy(
                        tma_b,
                        tBgB[None, n, number, l],
                        tBsB[None, stage * slices + s],
                        tma_bar_ptr=full + stage,
                        mcast_mask=mask if const_expr(cluster > 1) else None,
                    )
                stage, phase = self.advance(stage, phase)

    @cute.jit
    def load_a(self, tma_a, mA, sA, source, scheduler, full, empty, first, step, rank, consumer):
        """One consumer's blocks, chunk by chunk, into its ring of slots."""
        stages = const_expr(self.cfg.stages)
        parts = const_expr(self.geometry.parts)
        gA = cute.local_tile(mA, self.block_tile, (None, None, None))
        tAsA, tAgA = cpasync.tma_partition(  # (TMA, CONSUMERS x slots), (TMA, 1, parts, nnz)
            tma_a, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        lane = cute.arch.lane_idx()
        stage, oldest, phase, flying = Int32(0), Int32(0), Int32(0), Int32(0)  # stages filled and not yet given back
        taken, used, head = Int32(0), Int32(0), Int32(0)  # slots: lane s, those of stage s; all of them; the next one
        for index in cutlass.range(first, scheduler.count, step, unroll=1):
            m, n, l = scheduler.decode(index)
            chunks = source.for_tile(m, rank)
            at = source.first_block(m, rank, consumer)
            item = Int32(0)  # its first block
            if const_expr(source.blocks is not None):
                item = l * source.blocks
            words, places = Int32(0), Int32(0)
            numbers = source.block(at + lane)  # lane j: the next chunk's block j
            for i in cutlass.range(chunks.count, unroll=1):
                if i % BATCH == 0:
                    words = chunks.word(i + lane, consumer)
                    if const_expr(parts > 1):
                        places = chunks.slice(i + lane)
                count = cute.arch.popc(cute.arch.shuffle_sync(words, i % BATCH))
                part = Int32(0)
                if const_expr(parts > 1):
                    part = cute.arch.shuffle_sync(places, i % BATCH) % parts
                now = numbers
                if part == parts - 1:
                    at += count
                    numbers = source.block(at + lane)
                # A chunk is given back when the next one's products have been issued: at least two fit into the ring.
                while flying == stages or used + count > self.slots:
                    cute.arch.mbarrier_wait(empty + oldest, phase)
                    used -= cute.arch.shuffle_sync(taken, oldest)
                    flying -= 1
                    oldest, phase = self.advance(oldest, phase)
                used += count
                flying += 1
                if lane == stage:
                    taken = count
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, count * self.slot_bytes)
                for j in cutlass.range(count, unroll=4):
                    number = item + cute.arch.shuffle_sync(now, j)
                    slot = consumer * self.slots + ((head + j) & (self.slots - 1))
                    cute.copy(tma_a, tAgA[None, 0, part, number], tAsA[None, slot], tma_bar_ptr=full + stage)
                head = (head + count) & (self.slots - 1)
                stage, _ = self.advance(stage, Int32(0))

    # ------------------------------------------------------------------ consumers

    @cute.jit
    def mma(self, chunks, acc, ring, chunks_at, full, empty, stage, phase, head, consumer):
        """Sum over all chunks; returns the pipeline's state and the ring's head, in units of 16 bytes."""
        steps, width = const_expr(self.geometry.steps), const_expr(self.geometry.width)
        k_steps, b_step = const_expr(width // self.mma_k), const_expr(self.b_step)
        b_slice = const_expr(self.columns * self.slice * self.facts.element.width >> 4)
        gather = const_expr(self.geometry.gather)
        lane = cute.arch.lane_idx()
        before, words = Int32(0), Int32(0)
        for i in cutlass.range(chunks.count, unroll=1):
            if i % BATCH == 0:
                words = chunks.word(i + lane, consumer)
            word = cute.arch.shuffle_sync(words, i % BATCH)
            chunk = chunks_at + stage * (self.chunk_bytes >> 4)
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for r in range_constexpr(self.geometry.rows):
                if word & const_expr(signed(((1 << steps) - 1) << (r * steps))) != 0:
                    for s in range_constexpr(steps):
                        if word & const_expr(signed(1 << (r * steps + s))) != 0:
                            slot = ring + (head & ((self.ring_bytes >> 4) - 1))
                            for k in range_constexpr(k_steps):
                                step = const_expr(s // gather * b_slice + (s % gather * k_steps + k) * b_step)
                                self.multiply(acc, r, chunk + step, slot + k * self.a_step)
                            head += self.slot_bytes >> 4
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if i > 0:
                self.give_back(empty + before, lane)
            before = stage
            stage, phase = self.advance(stage, phase)
        warpgroup.wait_group(0)
        if chunks.count > 0:
            self.give_back(empty + before, lane)
        return stage, phase, head

    @cute.jit
    def give_back(self, barrier: cute.Pointer, lane: Int32):
        """Tell the producers of every CTA in the cluster that this warp is done with a stage."""
        if const_expr(self.cfg.cluster_m > 1):
            if lane < self.cfg.cluster_m:
                cute.arch.mbarrier_arrive(barrier, lane)
        else:
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier)

    def multiply(self, acc: cute.Tensor, r: int, chunk: Int32, slot: Int32):
        """Add one K-step of a block, for all columns, to the accumulators of block row r.

        Of two rows that TMA copied as one, odd groups of 8 have come with neighbors swapped: so have the products'
        columns, and of four accumulators of such a group the first and second, and the third and fourth.
        """
        bm, row_bytes = self.facts.block.bm, self.slice * self.facts.element.width
        slabs = range(self.columns // SLAB)
        order = [v ^ (v // 4 % 2 if self.fold > 1 else 0) for v in range(bm // 2)]
        at = [s * (ROWS // 2) + r * (bm // 2) + v for s in slabs for v in order]
        result = wgmma_slabs(
            [acc[i] for i in at],
            bm,
            self.facts.dtype,
            chunk,
            descriptor_high(SLAB * self.facts.element.width if self.b_n_major else row_bytes),
            SLAB * row_bytes >> 4,
            self.b_n_major,
            slot,
            self.a_high,
            self.a_m_major,
        )
        for i, value in zip(at, result):
            acc[i] = value


def signed(bits: int) -> int:
    """32 bits as the signed number that they are."""
    return bits - (1 << 32) if bits >> 31 else bits


def swapped(facts: GemmFacts) -> GemmFacts:
    """The facts of the same GEMM with D transposed, for the store and the epilogue."""
    cfg, spec = facts.config, facts.epilogue
    other = {"n": "m", "m": "n", "any": "any"}
    return replace(
        facts,
        config=GemmConfig(cfg.tile_n, cfg.tile_m, cfg.tile_k, 1, 1, CONSUMERS, ring=cfg.ring, store_row=cfg.store_row),
        majors=(*facts.majors[:2], other[facts.majors[2]]),
        epilogue=replace(
            spec,
            bias={None: None, "row": "col", "col": "row"}[spec.bias],
            residual=None if spec.residual is None else other[spec.residual],
        ),
    )
