"""The sm_90 mainloop: TMA fills a ring of shared-memory stages, warpgroups multiply out of it with WGMMA.

    producer warp      acquire empty[s] -> expect bytes on full[s] -> TMA A, TMA B -> s += 1
    consumer groups    wait full[s] -> issue the stage's WGMMAs, commit -> wait until one group is in flight
                       -> release empty[s - 1] -> s += 1

Exactly one K-tile's WGMMAs are in flight while the next one's are issued, so the tensor cores never drain between
stages. Where the tiles lie is the source's business (k_tiles.py).

Two ping-pong consumer groups multiply in an order that named barriers keep: one starts when the other has issued its
last WGMMA. The order keeps the tensor cores from being shared, and it is what makes stepping over the other group's
stages safe: an mbarrier tells only the parity of its phase, so whoever waits must never be more than one phase away.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ...tile.barriers import PRODUCT_ORDER
from ...tile.hopper import start_product

ORDER_THREADS = 256  # one consumer group waits, the other arrives


class MainloopSm90:
    """Steps of one work tile, for the producer (`load`) and for the consumers (`mma`)."""

    columns = 256  # of one WGMMA, at most
    a_in_registers = False
    multiplies_by_one = False  # True if it reads a 1.0 from shared memory
    stored = 1  # columns of A per stored column: 2 for 2:4 sparsity
    metadata_bytes = 0  # of A per stage; the metadata of all stages lies behind A's ring
    # Registers a thread of (producer, consumers) with two consumer warpgroups: what setmaxnreg makes of 65,536 over 384
    # threads. The producer's loop fits 24; the consumers hold up to 192 accumulators each, or 128 and a GELU's
    # temporaries.
    registers = (24, 240)

    def __init__(self, k_blocks: tuple[int, ...], consumer_groups: int, multicast_a: bool, multicast_b: bool):
        self.k_blocks = k_blocks
        self.consumer_groups = consumer_groups
        self.multicast_a = multicast_a
        self.multicast_b = multicast_b

    def operand_a(self, tiled_mma: cute.TiledMma, thr_mma, sA: cute.Tensor, thread: cutlass.Int32):
        """A as `mma` takes it: fragments (MMA, MMA_M, MMA_K, PIPE). thread: index in the consumer group."""
        return tiled_mma.make_fragment_A(thr_mma.partition_A(sA))

    def operand_b(self, tiled_mma: cute.TiledMma, thr_mma, sB: cute.Tensor, warpgroup: cutlass.Int32):
        """B as `mma` takes it: fragments (MMA, MMA_N, MMA_K, PIPE). warpgroup: index in the consumer group."""
        return tiled_mma.make_fragment_B(thr_mma.partition_B(sB))

    @cute.jit
    def load(
        self,
        k_tiles,
        tma_a: cute.CopyAtom,
        tAgA: cute.Tensor,  # (TMA, rest_m, rest_k, outer_a)
        tAsA: cute.Tensor,  # (TMA, PIPE)
        mask_a: cutlass.Int16,
        tma_b: cute.CopyAtom,
        tBgB: cute.Tensor,  # (TMA, rest_k, outer_k) of this work tile's n and l
        tBsB: cute.Tensor,  # (TMA, PIPE)
        mask_b: cutlass.Int16,
        pipeline,
        state,
        ahead=None,  # K-tiles whose A is loaded already; of a chained kernel (tile/dependent_launch.py)
    ):
        """Issue the TMA loads of every K-tile; returns the pipeline state after them."""
        for i in cutlass.range(k_tiles.count, unroll=1):
            tile = k_tiles.at(i)
            if const_expr(ahead is None):
                pipeline.producer_acquire(state)
                barrier = pipeline.producer_get_barrier(state)
                self.load_a(tile, tma_a, tAgA, tAsA, mask_a, barrier, state.index)
            else:
                barrier = pipeline.producer_get_barrier(state)
                if i >= ahead:
                    pipeline.producer_acquire(state)
                    self.load_a(tile, tma_a, tAgA, tAsA, mask_a, barrier, state.index)
            self.load_b(tile, tma_b, tBgB, tBsB, mask_b, barrier, state.index)
            state.advance()
        return state

    @cute.jit
    def load_a(
        self,
        tile,
        tma_a: cute.CopyAtom,
        tAgA: cute.Tensor,  # (TMA, rest_m, rest_k, outer_a)
        tAsA: cute.Tensor,  # (TMA, PIPE)
        mask_a: cutlass.Int16,
        barrier: cute.Pointer,
        stage: cutlass.Int32,
    ):
        """Issue the TMA loads of A's part of a K-tile."""
        cute.copy(
            tma_a,
            tAgA[(None, *tile.a)],
            tAsA[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=mask_a if const_expr(self.multicast_a) else None,
        )

    @cute.jit
    def load_b(
        self,
        tile,
        tma_b: cute.CopyAtom,
        tBgB: cute.Tensor,  # (TMA, rest_k, outer_k) of this work tile's n and l
        tBsB: cute.Tensor,  # (TMA, PIPE)
        mask_b: cutlass.Int16,
        barrier: cute.Pointer,
        stage: cutlass.Int32,
    ):
        """Issue the TMA loads of B's part of a K-tile."""
        cute.copy(
            tma_b,
            tBgB[(None, *tile.b)],
            tBsB[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=mask_b if const_expr(self.multicast_b) else None,
        )

    @cute.jit
    def mma(
        self,
        k_tiles,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        tCrA: cute.Tensor,  # (MMA, MMA_M, MMA_K, PIPE)
        tCrB: cute.Tensor,  # (MMA, MMA_N, MMA_K, PIPE)
        pipeline,
        read,
        release,
        consumer_group: cutlass.Int32,
    ):
        """Accumulate every K-tile into acc; returns the read and release states after them."""
        period = const_expr(len(self.k_blocks))
        self.order_wait(consumer_group)
        if k_tiles.count == 0:
            acc.fill(0.0)
            self.order_arrive(consumer_group)
        else:
            # The first period starts the accumulation, so that no register is cleared beforehand.
            for j in range_constexpr(period):
                pipeline.consumer_wait(read)
                self.multiply(tiled_mma, acc, tCrA, tCrB, read.index, self.k_blocks[j], j == 0)
                if const_expr(j > 0):
                    warpgroup.wait_group(1)
                    pipeline.consumer_release(release)
                    release.advance()
                read.advance()
            for _ in cutlass.range(1, k_tiles.count // period, unroll=1):
                for j in range_constexpr(period):
                    pipeline.consumer_wait(read)
                    self.multiply(tiled_mma, acc, tCrA, tCrB, read.index, self.k_blocks[j], False)
                    warpgroup.wait_group(1)
                    pipeline.consumer_release(release)
                    release.advance()
                    read.advance()
            self.order_arrive(consumer_group)
            warpgroup.wait_group(0)
            pipeline.consumer_release(release)
            release.advance()
        return read, release

    def order_wait(self, consumer_group):
        """Wait until it is this consumer group that may start its mainloop."""
        if self.consumer_groups > 1:
            cute.arch.barrier(barrier_id=PRODUCT_ORDER + consumer_group, number_of_threads=ORDER_THREADS)

    def order_arrive(self, consumer_group):
        """Let the other consumer group start its mainloop."""
        if self.consumer_groups > 1:
            cute.arch.barrier_arrive(barrier_id=PRODUCT_ORDER + 1 - consumer_group, number_of_threads=ORDER_THREADS)

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        stage: cutlass.Int32,
        steps: cutlass.Constexpr,
        clear: cutlass.Constexpr,
    ):
        """Issue the WGMMAs of one stage."""
        start_product(tiled_mma, acc, lambda k: (tCrA[None, None, k, stage], tCrB[None, None, k, stage]), steps, clear)
