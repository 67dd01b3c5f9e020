"""Block scales in the FP8 mma.sync mainloop: 1x128 for A and 128x128 for B.

A warp's part of a K-tile lies in one block of K and in one block of B's columns, so each of a thread's rows has one
factor. The scales of the next K-tile are loaded at the start of a K-tile and multiplied with each other at its end.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

BLOCK_SHIFT = 7  # 128 of K, and of B's columns, have one scale


class BlockScaling(NamedTuple):
    """One warp's scales of a work tile; None for an operand without block scales."""

    scale_a: cute.Tensor | None  # (M, K / 128, L)
    scale_b: cute.Tensor | None  # (N / 128, K / 128, L)
    rows: tuple  # of the thread
    block: Any  # of B's columns
    batch: tuple  # items of A and B
    of_a: cute.Tensor  # (2 MMA_M,): the scales loaded last
    of_b: cute.Tensor  # (1,)
    factors: cute.Tensor  # (2, MMA_M): scale_a * scale_b, applied to partial accumulators


def block_scaling(facts, args, mmas_m: int, origin: tuple, index_warp: tuple, batch: tuple) -> BlockScaling:
    """The scales of one warp. args: EpilogueArgs; origin: (m, n) of the tile; batch: batch indices of A and B."""
    spec, cfg = facts.epilogue, facts.config
    scale_a = args.scale_m if spec.scale_m == "1x128" else None
    scale_b = args.scale_n if spec.scale_n == "128x128" else None
    rows, block = (), None
    # Clamped: what lies outside of D is not stored.
    if scale_a is not None:  # 8 apart, and 16 apart from one MMA to the next
        first = origin[0] + index_warp[0] * (cfg.tile_m // cfg.warps_m) + (cute.arch.lane_idx() >> 2)
        rows = tuple(cutlass.min(first + 8 * i, scale_a.shape[0] - 1) for i in range(2 * mmas_m))
    if scale_b is not None:
        column = origin[1] + index_warp[1] * (cfg.tile_n // cfg.warps_n)
        block = cutlass.min(column >> BLOCK_SHIFT, scale_b.shape[0] - 1)
    fragments = (cute.make_rmem_tensor(shape, Float32) for shape in (2 * mmas_m, 1, (2, mmas_m)))
    return BlockScaling(scale_a, scale_b, rows, block, batch, *fragments)


def load_scales(scaling: BlockScaling, tile, tile_k: int) -> None:
    """Load the scales of a K-tile."""
    k = tile.b[0] * tile_k >> BLOCK_SHIFT
    scale_a, scale_b = scaling.scale_a, scaling.scale_b
    if scale_a is not None:
        item = cutlass.min(scaling.batch[0], scale_a.shape[2] - 1)
        for i, row in enumerate(scaling.rows):
            scaling.of_a[i] = scale_a[row, k, item]
    if scale_b is not None:
        scaling.of_b[0] = scale_b[scaling.block, k, cutlass.min(scaling.batch[1], scale_b.shape[2] - 1)]


def multiply_scales(scaling: BlockScaling) -> None:
    """Compute the factors from the scales loaded last."""
    for i in range(cute.size(scaling.factors)):
        if scaling.scale_a is None:
            scaling.factors[i] = scaling.of_b[0]
        elif scaling.scale_b is None:
            scaling.factors[i] = scaling.of_a[i]
        else:
            scaling.factors[i] = scaling.of_a[i] * scaling.of_b[0]
