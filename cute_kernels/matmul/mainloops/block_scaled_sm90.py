"""The sm_90 FP8 mainloop with block scales: one scale per 128 elements of K, and per row of A.

Accumulation is promoted as in promoted_sm90, and each partial sum is multiplied by its scales as it is added. This
costs no extra instruction: FFMA takes the place of FADD. A thread's accumulators of a WGMMA of 64 rows and at most 128
columns lie in two rows and in one block of B's columns, so they have two factors.

    consumer groups    load the scales of K-tile 0 -> for each K-tile i:
                           load the scales of K-tile i + 1 -> multiply and accumulate K-tile i

Scales come from global memory through L1; their latency is hidden behind the WGMMAs of a K-tile. Their addresses are
incremented from one K-tile to the next. Scales are double-buffered in registers by the code, since the compiler copied
one buffer to the other, and so waited for the loads, before the WGMMAs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from .promoted_sm90 import PromotedMainloopSm90

BLOCK_SHIFT = 7  # 128 of K, and of B's columns, have one scale


def block_scales(spec, args, thr_mma, tile: tuple, out: tuple, batch: tuple) -> tuple:
    """Scales of A and B for BlockScaledMainloopSm90.mma: for each the tensor, the tile's first index, and the offsets
    of this thread's scales from it. Empty for an operand without block scales.

    Args:
        spec, args: EpilogueSpec and EpilogueArgs.
        thr_mma: the thread's slice of the warpgroups' tiled MMA.
        tile: (tile_m, tile_n).
        out: (rest_m, rest_n, ...) of D.
        batch: batch indices of A and B.
    """
    # (MMA, MMA_M, MMA_N): (row, column) of each accumulator inside of the tile
    cC = thr_mma.partition_C(cute.make_identity_tensor(tile))
    scale_a = args.scale_m if spec.scale_m == "1x128" else None
    scale_b = args.scale_n if spec.scale_n == "128x128" else None
    rows, blocks = [], []
    if scale_a is not None:  # values 0 and 2 lie in the thread's two rows; clamped, since others are not stored
        first = out[0] * tile[0]
        rows = [first, *(cutlass.min(cC[2 * r, 0, 0][0], scale_a.shape[0] - 1 - first) for r in range(2))]
    if scale_b is not None:
        each = max(1, (1 << BLOCK_SHIFT) // (2 * cute.size(cC, mode=[0])))  # WGMMAs whose columns lie in one block
        blocks = [cC[0, 0, n][1] for n in range(0, cute.size(cC, mode=[2]), each)]
        first, blocks = out[1] * tile[1] >> BLOCK_SHIFT, [out[1] * tile[1] + column >> BLOCK_SHIFT for column in blocks]
        blocks = [first, *(cutlass.min(block, scale_b.shape[0] - 1) - first for block in blocks)]
    return (scale_a, scale_b), (rows, blocks), batch


class BlockScaledMainloopSm90(PromotedMainloopSm90):
    """Steps of one work tile whose K-tiles are consecutive along K; loads are those of the plain mainloop."""

    loads_factors = True

    @cute.jit
    def first_factors(self, k_tiles, scales: tuple):
        """(scales, where they are, the two sets); scales: block_scales."""
        # The thread's scales of A, (rows,), and of B, (blocks of columns,)
        sets = [[self.fragment(Float32, len(places) - 1) for places in scales[1]] for _ in range(2)]
        # Per operand: the address of its first scale, which all threads share, and each scale's distance from it
        at = [(self.fragment(Int64, min(1, len(p))), self.fragment(Int32, len(p) - 1)) for p in scales[1]]
        k = k_tiles.at(Int32(0)).b[0]
        for scale, places, item, (address, distances) in zip(*scales, at, strict=True):
            if const_expr(scale is not None):
                # Clamped to the last block of K and the last batch index
                k, item = cutlass.min(k, scale.shape[1] - 1), cutlass.min(item, scale.shape[2] - 1)
                first = Int64(places[0]) * scale.stride[0] + Int64(k) * scale.stride[1] + Int64(item) * scale.stride[2]
                address[0] = scale.iterator.toint() + first * 4
                for v in range_constexpr(len(places) - 1):
                    distances[v] = Int32(places[v + 1] * scale.stride[0] * 4)
        self.read_scales(scales[0], at, sets[0])
        return scales[0], at, sets

    @cute.jit
    def load_factors(self, k_tiles, i, factors: tuple, turn: cutlass.Constexpr):
        """Load the scales of the next K-tile; past the last one, load its scales again, which are never used."""
        scales, at, sets = factors
        step = 1 if i < k_tiles.count else 0
        for scale, (address, _) in zip(scales, at, strict=True):
            if const_expr(scale is not None):
                address[0] = address[0] + Int64(step) * (scale.stride[1] * 4)
        self.read_scales(scales, at, sets[turn])

    def factors_of(self, factors: tuple, turn: int) -> list:
        return factors[2][turn]

    def fragment(self, dtype, count: int):
        """Registers for `count` values; None if count is 0."""
        return cute.make_rmem_tensor(count, dtype) if count > 0 else None

    @cute.jit
    def read_scales(self, scales: tuple, at: list, into: list):
        """Load the scales at these addresses."""
        for scale, (address, distances), fragment in zip(scales, at, into, strict=True):
            if const_expr(scale is not None):
                for v in range_constexpr(cute.size(fragment)):
                    place = address[0] + Int64(distances[v])
                    fragment[v] = cute.make_tensor(make_ptr(Float32, place, AddressSpace.gmem, assumed_align=4), 1)[0]

    def promote(self, sums: cute.Tensor, part: cute.Tensor, m: int, n: int, factors: list):
        """sums += part * scale_a * scale_b"""
        of_a, of_b = factors
        block = n * self.columns >> BLOCK_SHIFT  # of B's columns
        for r in range(2):
            if of_a is None:
                factor = of_b[block]
            elif of_b is None:
                factor = of_a[r]
            else:
                factor = of_a[r] * of_b[block]
            for j in range(cute.size(part) // 4):  # of 8 columns, of which a thread has two
                for c in range(2):
                    v = 4 * j + 2 * r + c
                    sums[v] = sums[v] + part[v] * factor
