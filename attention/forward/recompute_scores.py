"""Recompute one warp's scores after the softmax has overwritten the WGMMA accumulators.

A WGMMA needs all four warps of a warpgroup, but perhaps only one of them needs its scores again
(OnlineSoftmax.step_without_max). So the warp multiplies its 16 rows by mma.sync. The accumulators of a 16 x 8 mma.sync
are in the same registers as those of 16 x 8 of a WGMMA.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op

from cute_kernels.tile.ptx import read_special_register


def loaded_operands(rQ: cute.Tensor, rK: cute.Tensor) -> list[tuple]:
    """The loaded fragments themselves: one MMA."""
    return [(rQ, rK)]


@cute.jit
def recompute_scores(
    acc_S: cute.Tensor,
    sQ: cute.Tensor,
    sK: cute.Tensor,
    first: cutlass.Constexpr,
    operands: cutlass.Constexpr = loaded_operands,
):
    """acc_S = Q K' of sixteen rows.

    acc_S: ((2, 2, tile_n / 8), 1, 1), of a WGMMA. sQ: (tile_m, D); warp `first` has the first 16 rows, the next warps
    the next ones. sK: (tile_n, D). operands: (loaded fragments of Q and K) -> pairs of MMA operands.
    """
    tile_n, head_dim = const_expr(cute.size(sK, mode=[0])), const_expr(cute.size(sK, mode=[1]))
    dtype, thread = sQ.element_type, read_special_register("tid.x")
    warp, lane = thread // 32 - first, thread % 32
    op = MmaF16BF16Op(dtype, Float32, (16, 8, 16))
    atom, tiled = cute.make_mma_atom(op), cute.make_tiled_mma(op, permutation_mnk=(16, 16, 16))
    load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), dtype)
    load_q, load_k = cute.make_tiled_copy_A(load, tiled), cute.make_tiled_copy_B(load, tiled)
    # (COPY, rows / 16, D / 16) of this lane
    from_q = load_q.get_slice(lane).partition_S(cute.local_tile(sQ, (16, head_dim), (warp, 0)))
    from_k = load_k.get_slice(lane).partition_S(sK)
    rQ, rK = cute.make_rmem_tensor((8, 1), dtype), cute.make_rmem_tensor((4, 2), dtype)
    to_q, to_k = (cute.make_tensor(t.iterator, cute.make_layout(((8, 1),))) for t in (rQ, rK))
    # Sixteen columns at a time, not unrolled: of everything that may be in registers next to S, this is needed the
    # least often.
    for n in range_constexpr(tile_n // 16):
        acc = cute.make_rmem_tensor((4, 1, 2), Float32)
        acc.fill(0.0)
        for k in cutlass.range(head_dim // 16, unroll=1):
            cute.copy(load_q, from_q[None, 0, k], to_q)
            cute.copy(load_k, from_k[None, n, k], to_k)
            for a, b in operands(rQ, rK):
                cute.gemm(atom, acc, a, b, acc)
        cute.make_tensor(acc_S.iterator + 8 * n, acc.layout).store(acc.load())
