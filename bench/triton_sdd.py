"""A sampled product in Triton, as STK formulates it: a program for each stored block, which sums over all of K.

A peer's set-up imports this; it needs Triton.
"""

import triton
import triton.language as tl


@triton.jit
def kernel(
    a,  # (M, K)
    b,  # (K, N)
    out,  # (nnz, BM, BN), contiguous
    rows,  # (nnz,) block row of each block
    columns,  # (nnz,)
    K,  # a multiple of BK
    a_m,
    a_k,
    b_k,
    b_n,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    block = tl.program_id(0)
    m = tl.load(rows + block) * BM + tl.arange(0, BM)
    n = tl.load(columns + block) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a + m[:, None] * a_m + k[None, :] * a_k  # (BM, BK)
    b_at = b + k[:, None] * b_k + n[None, :] * b_n  # (BK, BN)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        sums = tl.dot(tl.load(a_at), tl.load(b_at), sums)
        a_at += BK * a_k
        b_at += BK * b_k
    at = block * BM * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty))


def sdd(a, b, rows, columns, out, depth: int, warps: int, stages: int):
    """Write the blocks of a @ b at these block rows and columns to `out`, by K-tiles of `depth`; returns it.

    All offsets fit in 32 bits: at most 2^31 elements each.
    """
    nnz, bm, bn = out.shape
    strides = *a.stride(), *b.stride()
    kernel[(nnz,)](
        a, b, out, rows, columns, a.shape[1], *strides, BM=bm, BN=bn, BK=depth, num_warps=warps, num_stages=stages
    )
    return out
