"""The second kernel of a split attention: one result of the parts that CTAs made of their runs of K and V.

A part has its own softmax: O_s, divided by its own sum, and LSE_s, that sum's logarithm. Of all of them

    LSE = log(sum of exp(LSE_s))    O = sum of exp(LSE_s - LSE) O_s

A CTA makes one row. Each warp adds up every fourth part, several at once, as an online softmax adds up tiles, lanes
having a column of each 32; then the warps' sums are added through shared memory. The order is always the same.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from ..forward.softmax import LN2, exp2

LOG2E = 1.4426950408889634
WARPS = 4
UNROLL = 8  # parts that a warp loads at once


class Combine:
    """Compiles to the kernel for one width of O.

    `early`: launched before the parts are there, it waits for them, and lets the kernel after it start likewise.
    """

    threads = 32 * WARPS

    def __init__(self, head_dim_v: int, early: bool):
        self.head_dim_v, self.early = head_dim_v, early

    @cute.kernel
    def kernel(
        self,
        mPartO: cute.Tensor,  # (splits, B, H, Sq, Dv)
        mPartLSE: cute.Tensor,  # (splits, B, H, Sq)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        splits: Int32,
    ):
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
        tidx = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(tidx // 32), tidx % 32
        q, h, b = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.head_dim_v, WARPS)), byte_alignment=16)
        largests, totals = (smem.allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16) for _ in range(2))
        gO, gLSE = mPartO[None, b, h, q, None], mPartLSE[None, b, h, q]  # (splits, Dv), (splits,)
        columns = const_expr(self.head_dim_v // 32)
        acc = cute.make_rmem_tensor(columns, Float32)
        acc.fill(0.0)
        largest, total = -Float32.inf, Float32(0.0)
        lses = cute.make_rmem_tensor(UNROLL, Float32)
        parts = cute.make_rmem_tensor((UNROLL, columns), Float32)
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()

        for begin in cutlass.range(warp, splits, WARPS * UNROLL, unroll=1):
            for u in range_constexpr(UNROLL):
                s = cutlass.min(begin + u * WARPS, splits - 1)  # beyond them the last again, of no weight
                lses[u] = gLSE[s]
                for c in range_constexpr(columns):
                    parts[u, c] = gO[s, lane + 32 * c]
            before = largest
            for u in range_constexpr(UNROLL):
                if begin + u * WARPS >= splits:
                    lses[u] = -Float32.inf
                largest = cute.arch.fmax(largest, lses[u])
            against = self.finite(largest)
            factor = exp2((before - against) * LOG2E)
            total = total * factor
            for c in range_constexpr(columns):
                acc[c] = acc[c] * factor
            for u in range_constexpr(UNROLL):
                weight = exp2((lses[u] - against) * LOG2E)
                total = total + weight
                for c in range_constexpr(columns):
                    acc[c] = acc[c] + weight * parts[u, c]
        for c in range_constexpr(columns):
            sums[lane + 32 * c, warp] = acc[c]
        if lane == 0:
            largests[warp], totals[warp] = largest, total
        cute.arch.barrier()

        largest, total = -Float32.inf, Float32(0.0)
        for w in range_constexpr(WARPS):
            largest = cute.arch.fmax(largest, largests[w])
        against = self.finite(largest)
        factors = cute.make_rmem_tensor(WARPS, Float32)
        for w in range_constexpr(WARPS):
            factors[w] = exp2((largests[w] - against) * LOG2E)
            total = total + factors[w] * totals[w]
        inverse = cute.arch.rcp_approx(total)
        lse = against + cute.math.log2(total, approx=True, ftz=True) * LN2
        if total == 0.0:  # which NaN is not: a part of NaN makes the row NaN
            inverse, lse = Float32(0.0), -Float32.inf
        for begin in range_constexpr(0, self.head_dim_v, self.threads):
            column = begin + tidx
            if column < self.head_dim_v:
                out = Float32(0.0)
                for w in range_constexpr(WARPS):
                    out = out + factors[w] * sums[column, w]
                mO[b, h, q, column] = (out * inverse).to(mO.element_type)
        if const_expr(mLSE is not None):
            if tidx == 0:
                mLSE[b, h, q] = lse

    @cute.jit
    def finite(self, largest: Float32) -> Float32:
        """0 for -inf, so that no -inf is subtracted from another."""
        against = largest
        if largest == -Float32.inf:
            against = Float32(0.0)
        return against
