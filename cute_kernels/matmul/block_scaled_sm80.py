"""Scales of blocks in the mma.sync mainloop of 8-bit floats: 1x128 of A and 128x128 of B.

A warp's part of a K-tile lies in one block of K and in one of B's columns, so each of a thread's rows has one factor.
The scales of the next K-tile are loaded when a K-tile begins, and multiplied with each other when it ends.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

BLOCK_SHIFT = 7  # 128 of K, and of B's columns, have one scale


class BlockScaling(NamedTuple):
    """One warp's scales of a work tile, of which None are those of an operand that has none of blocks."""

    scale_a: cute.Tensor | None  # (M, K / 128, L)
    scale_b: cute.Tensor | None  # (N / 128, K / 128, L)
    rows: tuple  # of the thread
    block: Any  # of B's columns
    batch: tuple  # items of A and B
    of_a: cute.Tensor  # (2 MMA_M,): scales that were loaded last
    of_b: cute.Tensor  # (1,)
    factors: cute.Tensor  # (2, MMA_M): what products are multiplied by


def block_scaling(facts, args, mmas_m: int, origin: tuple, index_warp: tuple, batch: tuple) -> BlockScaling:
    """args: EpilogueArgs; origin: (m, n) of the tile; batch: items of A and B."""
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
    """Those of a K-tile."""
    k = tile.b[0] * tile_k >> BLOCK_SHIFT
    scale_a, scale_b = scaling.scale_a, scaling.scale_b
    if scale_a is not None:
        item = cutlass.min(scaling.batch[0], scale_a.shape[2] - 1)
        for i, row in enumerate(scaling.rows):
            scaling.of_a[i] = scale_a[row, k, item]
    if scale_b is not None:
        scaling.of_b[0] = scale_b[scaling.block, k, cutlass.min(scaling.batch[1], scale_b.shape[2] - 1)]


def multiply_scales(scaling: BlockScaling) -> None:
    """What products are multiplied by, from the scales that were loaded last."""
    for i in range(cute.size(scaling.factors)):
        if scaling.scale_a is None:
            scaling.factors[i] = scaling.of_b[0]
        elif scaling.scale_b is None:
            scaling.factors[i] = scaling.of_a[i]
        else:
            scaling.factors[i] = scaling.of_a[i] * scaling.of_b[0]
