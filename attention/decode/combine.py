"""The combine kernel of split-KV attention: it combines the partial results of the splits.

A split has its own softmax: O_s is divided by its own sum, and LSE_s is the logarithm of that sum. The result is

    LSE = log(sum of exp(LSE_s))    O = sum of exp(LSE_s - LSE) O_s

A sink is one more split, whose O is 0.

A CTA computes one row. Each warp accumulates every fourth split, several at once, as an online softmax accumulates
tiles; a lane has one column of each 32. Then the warps' accumulators are added through shared memory. The order is
fixed, so the result is deterministic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from ..forward.softmax import LN2, exp2

LOG2E = 1.4426950408889634
WARPS = 4
UNROLL = 8  # splits that a warp loads at once


def combine_splits(facts, early: bool, parts: tuple, outputs: tuple, splits: Int32, sinks: cute.Tensor | None, stream):
    """Launch the combine kernel if the facts have splits.

    parts: (O (splits, B, H, Sq, Dv), LSE (splits, B, H, Sq)) of the splits; outputs: (O (B, H, Sq, Dv), LSE or None).
    """
    if facts.split:
        batch, heads, rows, _ = outputs[0].shape
        combine = Combine(facts.head_dim_v, early)
        combine.kernel(*parts, *outputs, splits, sinks).launch(
            grid=(rows, heads, batch), block=(combine.threads, 1, 1), use_pdl=early, stream=stream
        )


class Combine:
    """Compiles to the kernel for one head_dim_v.

    early: True for a secondary kernel of programmatic dependent launch. It waits for the splits, and lets the next
    kernel start early, too.
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
        mSinks: cute.Tensor | None,  # (H,)
    ):
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
        tidx = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(tidx // 32), tidx % 32
        q, h, b = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        accumulators = smem.allocate_tensor(Float32, cute.make_layout((self.head_dim_v, WARPS)), byte_alignment=16)
        row_maxes, row_sums = (
            smem.allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16) for _ in range(2)
        )
        gO, gLSE = mPartO[None, b, h, q, None], mPartLSE[None, b, h, q]  # (splits, Dv), (splits,)
        columns = const_expr(self.head_dim_v // 32)
        acc = cute.make_rmem_tensor(columns, Float32)
        acc.fill(0.0)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        lses = cute.make_rmem_tensor(UNROLL, Float32)
        parts = cute.make_rmem_tensor((UNROLL, columns), Float32)
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()
        if const_expr(mSinks is not None):
            sink = mSinks[h].to(Float32)

        for begin in cutlass.range(warp, splits, WARPS * UNROLL, unroll=1):
            for u in range_constexpr(UNROLL):
                s = cutlass.min(begin + u * WARPS, splits - 1)  # past the last split, the last one again with weight 0
                lses[u] = gLSE[s]
                for c in range_constexpr(columns):
                    parts[u, c] = gO[s, lane + 32 * c]
            before = row_max
            for u in range_constexpr(UNROLL):
                if begin + u * WARPS >= splits:
                    lses[u] = -Float32.inf
                row_max = cute.arch.fmax(row_max, lses[u])
            scaled_max = self.finite(row_max)
            factor = exp2((before - scaled_max) * LOG2E)
            row_sum = row_sum * factor
            for c in range_constexpr(columns):
                acc[c] = acc[c] * factor
            for u in range_constexpr(UNROLL):
                weight = exp2((lses[u] - scaled_max) * LOG2E)
                row_sum = row_sum + weight
                for c in range_constexpr(columns):
                    acc[c] = acc[c] + weight * parts[u, c]
        for c in range_constexpr(columns):
            accumulators[lane + 32 * c, warp] = acc[c]
        if lane == 0:
            row_maxes[warp], row_sums[warp] = row_max, row_sum
        cute.arch.barrier()

        row_max, row_sum = -Float32.inf, Float32(0.0)
        for w in range_constexpr(WARPS):
            row_max = cute.arch.fmax(row_max, row_maxes[w])
        if const_expr(mSinks is not None):
            row_max = cute.arch.fmax(row_max, sink)
        scaled_max = self.finite(row_max)
        factors = cute.make_rmem_tensor(WARPS, Float32)
        for w in range_constexpr(WARPS):
            factors[w] = exp2((row_maxes[w] - scaled_max) * LOG2E)
            row_sum = row_sum + factors[w] * row_sums[w]
        if const_expr(mSinks is not None):
            row_sum = row_sum + exp2((sink - scaled_max) * LOG2E)
        inverse = cute.arch.rcp_approx(row_sum)
        lse = scaled_max + cute.math.log2(row_sum, approx=True, ftz=True) * LN2
        if row_sum == 0.0:  # NaN is not 0: a NaN split makes the row NaN
            inverse, lse = Float32(0.0), -Float32.inf
        for begin in range_constexpr(0, self.head_dim_v, self.threads):
            column = begin + tidx
            if column < self.head_dim_v:
                out = Float32(0.0)
                for w in range_constexpr(WARPS):
                    out = out + factors[w] * accumulators[column, w]
                mO[b, h, q, column] = (out * inverse).to(mO.element_type)
        if const_expr(mLSE is not None):
            if tidx == 0:
                mLSE[b, h, q] = lse

    @cute.jit
    def finite(self, row_max: Float32) -> Float32:
        """0 for -inf, so that -inf is never subtracted from -inf."""
        scaled_max = row_max
        if row_max == -Float32.inf:
            scaled_max = Float32(0.0)
        return scaled_max
