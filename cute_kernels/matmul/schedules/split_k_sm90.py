"""Adding up a tile whose K-tiles were shared among the CTAs of a cluster (GemmConfig.split).

Every CTA holds a sum over its share of K. CTA q will store part q of the tile, 1 / split of its columns (or rows), so
each sends the others their parts, into their shared memory:

    barrier    who arrives                                             who waits
    arrived    1 thread of this CTA, and the bytes the others send     this warpgroup, before it adds
    free       1 thread for each warp of the same warpgroup elsewhere  this warpgroup, before it sends

    warpgroup w of CTA r    wait free -> send part r ^ i to CTA r ^ i, for i = 1, 2, ... -> wait arrived
                            -> add the parts of CTAs 0, 1, ... in this order -> arrive at free of all the others

A thread's accumulators mean the same elements in every CTA, so they are sent as they lie: 4 a thread and step, and a
warp's 512 bytes in one piece. The order of the sum is that of K, whatever arrives first: the bits are the same on
every run. The buffer belongs to the exchange alone, so the producer may already load the next tile; and warpgroups do
not wait for each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from ...tile.barriers import Arrivals
from ...tile.hopper import WARPGROUP

VECTOR = 4  # fp32 of one store


def swaps(split: int) -> list[tuple[int, int, int]]:
    """(bit, place, other place): where `rank` has that bit, the two are swapped; all in all p and p ^ rank are."""
    bits = range(split.bit_length() - 1)
    return [(bit, p, p | 1 << bit) for bit in bits for p in range(split) if not p >> bit & 1]


class SplitKSm90:
    """The exchange among `split` CTAs, of `groups` warpgroups with `accumulators` a thread."""

    def __init__(self, split: int, groups: int, accumulators: int):
        self.split, self.groups = split, groups
        self.part = accumulators // split  # of a thread
        self.bytes = (split - 1) * self.part * WARPGROUP * 4  # that one warpgroup receives
        self.barriers = 2 * groups
        # Of one warpgroup's barriers: `arrived` is full, `free` is empty.
        self.arrivals = Arrivals(1, 4, groups=groups, sharers=split - 1)

    def layout(self) -> cute.Layout:
        """(VECTOR, thread, step, sender, warpgroup)"""
        return cute.make_layout((VECTOR, WARPGROUP, self.part // VECTOR, self.split - 1, self.groups))

    @cute.jit
    def init(self, barriers: cute.Pointer):
        """By one thread, before the cluster's barriers are made visible."""
        for group in range_constexpr(self.groups):
            cute.arch.mbarrier_init(barriers + group, self.arrivals.full)
            cute.arch.mbarrier_init(barriers + self.groups + group, self.arrivals.empty)

    @cute.jit
    def reduce(
        self,
        acc: cute.Tensor,  # (split * part,) in the order of the store's chunks; its contents are lost
        sX: cute.Tensor,  # layout()
        barriers: cute.Pointer,
        group: Int32,
        rank: Int32,
        phase: Int32,  # parity of the work tile's number
    ):
        """Leave part `rank` of the whole sum in the first `part` accumulators."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        arrived, free = barriers + group, barriers + self.groups + group
        if tidx == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, self.bytes)
        self.sort(acc, rank)
        cute.arch.mbarrier_wait(free, phase ^ 1)
        bits = cute.recast_tensor(acc, Int32)
        for i in range_constexpr(1, self.split):
            for step in range_constexpr(self.part // VECTOR):
                value = tuple(bits[i * self.part + step * VECTOR + v] for v in range(VECTOR))
                slot = sX[None, tidx, step, i - 1, group].iterator
                cute.arch.store_async_dsmem(slot, value, arrived, rank ^ i)
        cute.arch.mbarrier_wait(arrived, phase)
        rX = cute.make_rmem_tensor((VECTOR, self.split), Float32)
        for step in range_constexpr(self.part // VECTOR):
            for r in range_constexpr(self.split):
                slot = cutlass.max(rank ^ r, 1) - 1  # one's own is in no slot, and what is read not used
                cute.autovec_copy(sX[None, tidx, step, slot, group], rX[None, r])
            for v in range_constexpr(VECTOR):
                own = acc[step * VECTOR + v]
                total = own if rank == 0 else rX[v, 0]
                for r in range_constexpr(1, self.split):
                    total = total + (own if rank == r else rX[v, r])
                acc[step * VECTOR + v] = total
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < self.split:
            if lane != rank:
                # It hands over no data, only a buffer that has been read, as the pipelines' releases do: a release at
                # the cluster's scope would wait for the GPU's memory.
                cute.arch.mbarrier_arrive(free, lane)

    @cute.jit
    def sort(self, acc: cute.Tensor, rank: Int32):
        """Part p of acc to place p ^ rank: selects, because registers cannot be indexed at run time."""
        for bit, p, other in swaps(self.split):
            swapped = (rank >> bit) & 1 == 1
            for v in range_constexpr(self.part):
                x, y = acc[p * self.part + v], acc[other * self.part + v]
                acc[p * self.part + v] = y if swapped else x
                acc[other * self.part + v] = x if swapped else y

    @cute.jit
    def drain(self, barriers: cute.Pointer, group: Int32, phase: Int32):
        """Before the CTA ends, the others must have made their last arrival at its barriers."""
        cute.arch.mbarrier_wait(barriers + self.groups + group, phase ^ 1)
