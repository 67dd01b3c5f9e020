"""Recompute one warp's FP8 scores after the softmax has overwritten the WGMMA accumulators.

Hopper has no FP8 mma.sync. So Q and K are converted to FP16 in registers, which represents all E4M3 values.
"""

from collections.abc import Iterator
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32

from cute_kernels.tile.hopper import WARPGROUP, smem_layout
from cute_kernels.tile.ptx import float8_to_fp16

from ..recompute_scores import recompute_scores


@cute.jit
def recompute_fp8_scores(facts: cutlass.Constexpr, acc_S: cute.Tensor, sQ: cute.Tensor, sK: cute.Tensor, stage: Int32):
    """acc_S = Q K' of this warp's sixteen rows, as recompute_scores does for 16-bit operands.

    sQ and sK are the rings (rows, D, PIPE).

    ldmatrix treats two FP8 values as one element. A lane gets values 4t to 4t + 3 of 16 in a register; after conversion
    to FP16 the first two and the other two go to different registers. Sums over D do not depend on this order.
    """
    cfg, dim, dtype = facts.config, facts.head_dim, facts.dtype
    sQ, sK = in_pairs(sQ, cfg.tile_m, dim, 1), in_pairs(sK, cfg.tile_n, dim, cfg.stages)
    operands = partial(converted_operands, dtype)
    recompute_scores(acc_S, sQ[None, None, 0], sK[None, None, stage], WARPGROUP // 32, operands)


def converted_operands(dtype: str, rQ: cute.Tensor, rK: cute.Tensor) -> Iterator[tuple]:
    """FP16 operands of two MMAs, 16 values of D each; the second are converted after the first MMA."""
    for half in range(2):
        yield fragment_q(rQ, half, dtype), fragment_k(rK, half, dtype)


def in_pairs(smem: cute.Tensor, rows: int, head_dim: int, stages: int) -> cute.Tensor:
    """A ring (rows, D, PIPE) viewed as 16-bit elements, (rows, D / 2, PIPE): its lines and swizzles are the same
    bytes."""
    layout = smem_layout(Float16, rows, head_dim // 2, stages, True)
    return cute.make_tensor(cute.recast_ptr(smem.iterator, layout.inner, dtype=Float16), layout.outer)


def fragment_q(pairs: cute.Tensor, half: int, dtype: str) -> cute.Tensor:
    """A fragment (8, 1): the first or second 16 values of the rows, 4t to 4t + 3 per lane."""
    words = cute.recast_tensor(pairs, Int32)
    rows = [float8_to_fp16(words[2 * half + r], dtype, False) for r in range(2)]
    return fragment((8, 1), [rows[0][0], rows[1][0], rows[0][1], rows[1][1]])


def fragment_k(pairs: cute.Tensor, half: int, dtype: str) -> cute.Tensor:
    """B fragment (4, 2): the same for two times 8 columns."""
    words = cute.recast_tensor(pairs, Int32)
    columns = [float8_to_fp16(words[2 * n + half], dtype, False) for n in range(2)]
    return fragment((4, 2), [*columns[0], *columns[1]])


def fragment(shape: tuple, words: list) -> cute.Tensor:
    """FP16 registers with these 32-bit words."""
    registers = cute.make_rmem_tensor(shape, Float16)
    as_words = cute.recast_tensor(registers, Int32)
    for i, word in enumerate(words):
        as_words[i] = word
    return registers
