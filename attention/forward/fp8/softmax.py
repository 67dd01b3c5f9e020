"""Softmax policies of FP8 attention.

P's rounding is the largest error of FP8 P: E4M3 has three bits of mantissa, and nothing below 2 ** -9. See
OnlineSoftmax.headroom for its range, and Float8Facts. Row sums are those of P before it is rounded: that costs nothing,
and LSE is as accurate as the scores.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import to_e4m3

from ..config import Float8Facts
from ..mask_and_softmax import QueryWork
from ..softmax import OnlineSoftmax, exp2, quad_max, row_max_of, rows_and_columns
from ..softmax_policy import SkipMax
from .recompute import recompute_fp8_scores
from .tokens_softmax import TokensSoftmax

HEADROOM = 3.0  # see Float8Facts
LARGEST = 448.0  # of e4m3


class SkipMaxFp8(SkipMax):
    """Scores of FP8 Q and K, 16-bit P."""

    def recompute(self, c, stage: Int32):
        recompute_fp8_scores(self.facts, c.acc_S, c.sQ, c.sK, stage)


class SkipMaxFast(SkipMaxFp8):
    """FP8 P, too. Sums that are too large but finite need no recomputed scores: their P is rescaled."""

    def make(self, scale_log2: Float32) -> OnlineSoftmax:
        threshold = self.facts.rescale_threshold
        return self.softmax.of_rows(2, scale_log2, rescale_threshold=threshold, headroom=HEADROOM, largest_p=LARGEST)

    @cute.jit
    def step_again(self, c, work: QueryWork, i: Int32, stage: Int32, sums: list):
        softmax, scores, grown = c.softmax, rows_and_columns(c.acc_S), cutlass.Boolean(False)
        finite = (sums[0] < Float32.inf) & (sums[1] < Float32.inf)
        if cute.arch.vote_all_sync(finite):
            rescale_to_headroom(softmax, scores, sums)
            grown = cutlass.Boolean(True)
        else:
            grown = SkipMaxFp8.step_again(self, c, work, i, stage, sums)
        return grown

    @cute.jit
    def convert(self, c):
        """Convert P to FP8: four scores of a row, two of each 8 columns, form a register."""
        acc_S, words = c.acc_S, cute.recast_tensor(c.tOrP, Int32)  # (rows, pairs of 8 columns)
        for i in range_constexpr(cute.size(acc_S) // 8):
            for r in range_constexpr(2):
                words[2 * i + r] = to_e4m3([acc_S[8 * i + 4 * (j // 2) + 2 * r + j % 2] for j in range(4)])


@cute.jit
def rescale_to_headroom(softmax: OnlineSoftmax, scores: cute.Tensor, sums: list):  # (rows, columns) of P
    """Rescale the P of rows that made `step_without_max` fail, if their sums are finite, so that the largest p is 2 **
    headroom, and raise their maxima.

    A row may have seen few scores, like the first rows of a causal mask in their first tile, and then its maximum is
    low. Each row is decided independently, as in OnlineSoftmax.too_large.
    """
    for r, too_large in enumerate(softmax.too_large(sums)):
        largest = cute.math.log2(quad_max(row_max_of(scores, r)), approx=True, ftz=True)
        grown = select_(too_large, largest - softmax.headroom, Float32(0.0))
        row_max = softmax.row_max[r] + grown * cute.arch.rcp_approx(softmax.scale_log2)
        softmax.factor[r] = exp2((softmax.row_max[r] - row_max) * softmax.scale_log2)
        softmax.row_max[r] = row_max
        softmax.row_sum[r] = softmax.multiplied_sum(r, sums[r])
        for c in range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = scores[r, c] * softmax.factor[r]


def policy_of(facts: Float8Facts) -> SkipMaxFp8:
    """Softmax policy of the forward kernel."""
    return (SkipMaxFast if facts.fast else SkipMaxFp8)(facts, TokensSoftmax if facts.tokens else OnlineSoftmax)
