"""Issue of an sm_90 mainloop: TMA loads of the operands into the ring, and WGMMAs out of it.

A mainloop is an *accumulator* (in_place_sm90, promoted_sm90, first_in_place_sm90) of WGMMAs that an *issuer* starts:

    IssueSS             A and B from shared memory
    IssueRS             A from registers, which ldmatrix fills once per K-tile (issue_rs_sm90)
    IssueSparse24       2:4 sparse A with metadata (sparse24/issue_sm90)

Where the tiles lie is the source's business (k_tiles.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...tile.hopper import start_product
from ..contexts import ConsumerCtx, Load

# Promoted accumulation: MMA steps, of 32 FP8 elements of K, per partial sum; columns of a WGMMA, at most
PARTIAL_STEPS, PARTIAL_COLUMNS = 4, 128


def of_step(fragment: cute.Tensor, k: int) -> cute.Tensor:
    """(MMA, 1) of MMA step k of (MMA, MMA_K)."""
    return cute.append_ones(fragment[None, k], up_to_rank=2)


class IssueSS:
    """Operands in shared memory."""

    a_in_registers = False
    stored = 1  # columns of A per stored column: 2 for 2:4 sparsity
    metadata_bytes = 0  # of A per stage; the metadata of all stages lies behind A's ring
    partial_steps = PARTIAL_STEPS
    # Registers a thread of (producer, consumers) with two consumer warpgroups: what setmaxnreg makes of 65,536 over 384
    # threads. The producer's loop fits 24; the consumers hold up to 192 accumulators each, or 128 and a GELU's
    # temporaries.
    registers = (24, 240)

    def __init__(self, facts):
        self.k_blocks = facts.k_blocks

    def operand_a(self, tiled_mma: cute.TiledMma, thr_mma, sA: cute.Tensor, thread: cutlass.Int32):
        """A as `start` and `multiply` read it: fragments (MMA, MMA_M, MMA_K, PIPE). thread: index in the consumer
        group."""
        return tiled_mma.make_fragment_A(thr_mma.partition_A(sA))

    def operand_b(self, tiled_mma: cute.TiledMma, thr_mma, sB: cute.Tensor, warpgroup: cutlass.Int32):
        """B likewise: fragments (MMA, MMA_N, MMA_K, PIPE). warpgroup: index in the consumer group."""
        return tiled_mma.make_fragment_B(thr_mma.partition_B(sB))

    # ------------------------------------------------------------------ producer

    @cute.jit
    def load(
        self,
        k_tiles,
        a: Load,
        b: Load,  # of this work tile's n and l
        ring,
        state,
        loaded=None,  # K-tiles whose A is loaded already; of a secondary kernel (tile/dependent_launch.py)
    ):
        """Issue the TMA loads of every K-tile; returns the pipeline state after them."""
        for i in cutlass.range(k_tiles.count, unroll=1):
            tile = k_tiles.at(i)
            if const_expr(loaded is None):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                self.load_a(tile, a, barrier, state.index)
            else:
                barrier = ring.producer_get_barrier(state)
                if i >= loaded:
                    ring.producer_acquire(state)
                    self.load_a(tile, a, barrier, state.index)
            self.load_b(tile, b, barrier, state.index)
            state.advance()
        return state

    def load_a(self, tile, a: Load, barrier: cute.Pointer, stage: cutlass.Int32) -> None:
        """Issue the TMA loads of A's part of a K-tile."""
        cute.copy(a.atom, a.gX[(None, *tile.a)], a.sX[None, stage], tma_bar_ptr=barrier, mcast_mask=a.mask)

    def load_b(self, tile, b: Load, barrier: cute.Pointer, stage: cutlass.Int32) -> None:
        """Issue the TMA loads of B's part of a K-tile."""
        cute.copy(b.atom, b.gX[(None, *tile.b)], b.sX[None, stage], tma_bar_ptr=barrier, mcast_mask=b.mask)

    # ------------------------------------------------------------------ consumers

    def multiply(self, ctx: ConsumerCtx, stage: cutlass.Int32, steps: int, clear: bool) -> None:
        """Issue the WGMMAs of a stage into the accumulators."""
        A, B = ctx.A, ctx.B
        start_product(
            ctx.tiled_mma, ctx.acc, lambda k: (A[None, None, k, stage], B[None, None, k, stage]), steps, clear
        )

    def prepare(self, ctx: ConsumerCtx, stage: cutlass.Int32):
        """Registers that `start` reads, loaded once per K-tile."""
        return None

    def a(self, ctx: ConsumerCtx, prepared, stage: cutlass.Int32, m: int):
        """A of a stage as `start` reads it: (MMA, MMA_K) of the m-th slab of 64 rows."""
        return ctx.A[None, m, None, stage]

    def b(self, ctx: ConsumerCtx, stage: cutlass.Int32, n: int):
        """B of a stage as `start` reads it: (MMA, MMA_K) of the columns of the n-th WGMMA."""
        return ctx.B[None, n, None, stage]

    def start(self, part: cute.Tensor, ctx: ConsumerCtx, a, b, first: int, steps: int) -> None:
        """Start MMA steps first, first + 1, ... as one group of WGMMAs, which overwrites part (MMA, 1, 1)."""
        fragments = [(of_step(a, first + k), of_step(b, first + k)) for k in range(steps)]
        start_product(ctx.tiled_mma, part, fragments.__getitem__, steps, True)
