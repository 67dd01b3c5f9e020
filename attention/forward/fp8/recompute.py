"""Recompute one warp's FP8 scores after the softmax has overwritten the WGMMA accumulators.

Hopper has no FP8 mma.sync. So Q and K are converted to FP16 in registers, which represents all E4M3 values.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op

from cute_kernels.tile.hopper import WARPGROUP, smem_layout
from cute_kernels.tile.ptx import float8_to_fp16, read_special_register


@cute.jit
def recompute_fp8_scores(facts: cutlass.Constexpr, acc_S: cute.Tensor, sQ: cute.Tensor, sK: cute.Tensor, stage: Int32):
    """acc_S = Q K' of this warp's sixteen rows, as recompute_scores does for 16-bit operands.

    sQ and sK are the rings (rows, D, PIPE).

    ldmatrix treats two FP8 values as one element. A lane gets values 4t to 4t + 3 of 16 in a register; after conversion
    to FP16 the first two and the other two go to different registers. Sums over D do not depend on this order.
    """
    cfg, dim = facts.config, facts.head_dim
    sQ, sK = in_pairs(sQ, cfg.tile_m, dim, 1), in_pairs(sK, cfg.tile_n, dim, cfg.stages)
    sQ, sK = sQ[None, None, 0], sK[None, None, stage]
    tile_n, pairs = const_expr(cfg.tile_n), const_expr(dim // 2)
    thread = read_special_register("tid.x")
    warp, lane = thread // 32 - WARPGROUP // 32, thread % 32
    op = MmaF16BF16Op(Float16, Float32, (16, 8, 16))
    atom, tiled = cute.make_mma_atom(op), cute.make_tiled_mma(op, permutation_mnk=(16, 16, 16))
    load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), Float16)
    load_q, load_k = cute.make_tiled_copy_A(load, tiled), cute.make_tiled_copy_B(load, tiled)
    # (COPY, rows / 16, D / 32) of this lane
    from_q = load_q.get_slice(lane).partition_S(cute.local_tile(sQ, (16, pairs), (warp, 0)))
    from_k = load_k.get_slice(lane).partition_S(sK)
    rQ, rK = cute.make_rmem_tensor((8, 1), Float16), cute.make_rmem_tensor((4, 2), Float16)
    to_q, to_k = (cute.make_tensor(t.iterator, cute.make_layout(((8, 1),))) for t in (rQ, rK))
    for n in range_constexpr(tile_n // 16):
        acc = cute.make_rmem_tensor((4, 1, 2), Float32)
        acc.fill(0.0)
        for k in cutlass.range(pairs // 16, unroll=1):
            cute.copy(load_q, from_q[None, 0, k], to_q)
            cute.copy(load_k, from_k[None, n, k], to_k)
            for half in range_constexpr(2):  # 16 values of D each
                cute.gemm(atom, acc, fragment_q(rQ, half, facts.dtype), fragment_k(rK, half, facts.dtype), acc)
        cute.make_tensor(acc_of(acc_S, n), acc.layout).store(acc.load())


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


def acc_of(acc_S: cute.Tensor, n: int):
    """Pointer to the n-th 16 columns of the accumulators."""
    return acc_S.iterator + 8 * n


def fragment(shape: tuple, words: list) -> cute.Tensor:
    """FP16 registers with these 32-bit words."""
    registers = cute.make_rmem_tensor(shape, Float16)
    as_words = cute.recast_tensor(registers, Int32)
    for i, word in enumerate(words):
        as_words[i] = word
    return registers
