"""Factors of partial sums in promoted accumulation (promoted_sm90): none, one per stored block, or block scales.

Multiplying costs no extra instruction, since FFMA takes the place of FADD. Factors have two sets of registers, so that
those of the next K-tile are loaded before the WGMMAs of this one; double-buffered by the code, since the compiler
copied one buffer to the other, and so waited for the loads, before the WGMMAs.

    consumer groups    load the factors of K-tile 0 -> for each K-tile i:
                           load the factors of K-tile i + 1 -> multiply and accumulate K-tile i
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from ...tile.hopper import WARPGROUP
from ...tile.ptx import load_volatile
from ..contexts import ConsumerCtx, Tile

BLOCK_SHIFT = 7  # 128 of K, and of B's columns, have one scale


class NoFactors:
    """Partial sums are added as they are."""

    reads_one = False

    def first(self, tile: Tile, ctx: ConsumerCtx):
        """Two sets of factor registers, the first one loaded for K-tile 0."""
        return None

    def load(self, k_tiles, i, factors, turn: int) -> None:
        """Load the factors of K-tile i, which may be past the last, into a set."""

    def keep(self, factors) -> None:
        """Move the factors of the second set to the first."""

    def of(self, factors, turn: int):
        """The factors of a set as `add` reads them."""
        return factors

    def add(self, sums: cute.Tensor, part: cute.Tensor, column: int, factors) -> None:
        """sums += part times the factors; both (MMA,). column: first column of the WGMMA in the warpgroup's tile."""
        for v in range(cute.size(part)):
            sums[v] = sums[v] + part[v]


class One(NoFactors):
    """A factor of 1.0 that the compiler does not know, for double-buffered accumulation: with FADD, ptxas serialized
    the WGMMAs, and spilled."""

    reads_one = True

    def first(self, tile: Tile, ctx: ConsumerCtx):
        return load_volatile(ctx.out.one)

    def add(self, sums: cute.Tensor, part: cute.Tensor, column: int, factors) -> None:
        for v in range(cute.size(part)):
            sums[v] = sums[v] + part[v] * factors


class BlockFactors(One):
    """One scale per stored block (k_tiles.scale), which all threads of a warpgroup load from one address."""

    reads_one = False

    @cute.jit
    def first(self, tile: Tile, ctx: ConsumerCtx):
        factors = cute.make_rmem_tensor(2, Float32)
        factors[0] = tile.k_tiles.scale(0)
        return factors

    @cute.jit
    def load(self, k_tiles, i, factors, turn: cutlass.Constexpr):
        factors[turn] = k_tiles.scale(i)

    @cute.jit
    def keep(self, factors):
        factors[0] = factors[1]

    def of(self, factors, turn: int):
        return factors[turn]


def block_scales(spec, args, thr_mma, tile: tuple, out: tuple, batch: tuple) -> tuple:
    """Scales of A and B for ScaleFactors: for each the tensor, the tile's first index, and the offsets of this thread's
    scales from it. Empty for an operand without block scales.

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


class ScaleFactors(NoFactors):
    """Block scales: one per 128 elements of K, and per row of A (1x128) or 128 columns of B (128x128).

    A thread's accumulators of a WGMMA of 64 rows and at most 128 columns lie in two rows and in one block of B's
    columns, so they have two factors. Scales come from global memory through L1. Their addresses are incremented from
    one K-tile to the next. The K-tiles of a work tile must be consecutive along K.
    """

    def __init__(self, facts):
        cfg, self.spec = facts.config, facts.epilogue
        self.tile = cfg.tile_m, cfg.tile_n
        self.group_threads = WARPGROUP * cfg.warps_m * cfg.warps_n
        self.groups = cfg.consumer_groups

    def scales(self, tile: Tile, ctx: ConsumerCtx) -> tuple:
        """block_scales of a work tile."""
        thread = cute.arch.thread_idx()[0] - WARPGROUP  # after the producer
        if self.groups > 1:
            thread = thread % self.group_threads
        out, batch = tile.k_tiles.out(tile.n), (tile.k_tiles.l, tile.l)
        return block_scales(self.spec, ctx.out.args, ctx.tiled_mma.get_slice(thread), self.tile, out, batch)

    @cute.jit
    def first(self, tile: Tile, ctx: ConsumerCtx):
        """(scales, where they are, the two sets)"""
        scales = self.scales(tile, ctx)
        # The thread's scales of A, (rows,), and of B, (blocks of columns,)
        sets = [[self.fragment(Float32, len(places) - 1) for places in scales[1]] for _ in range(2)]
        # Per operand: the address of its first scale, which all threads share, and each scale's distance from it
        at = [(self.fragment(Int64, min(1, len(p))), self.fragment(Int32, len(p) - 1)) for p in scales[1]]
        k = tile.k_tiles.at(Int32(0)).b[0]
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
    def load(self, k_tiles, i, factors: tuple, turn: cutlass.Constexpr):
        """Load the scales of the next K-tile; past the last one, load its scales again, which are never used."""
        scales, at, sets = factors
        step = 1 if i < k_tiles.count else 0
        for scale, (address, _) in zip(scales, at, strict=True):
            if const_expr(scale is not None):
                address[0] = address[0] + Int64(step) * (scale.stride[1] * 4)
        self.read_scales(scales, at, sets[turn])

    def of(self, factors: tuple, turn: int) -> list:
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

    def add(self, sums: cute.Tensor, part: cute.Tensor, column: int, factors: list):
        """sums += part * scale_a * scale_b"""
        of_a, of_b = factors
        block = column >> BLOCK_SHIFT  # of B's columns
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
