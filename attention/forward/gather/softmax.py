"""Softmax policy of listed blocks: full steps, masked by membership alone, try to skip their row maxima.

A tile has one or two blocks, so that such a step needs no mask of single scores: for a block that a row's token has not
selected, inf is subtracted from scores instead of the row's maximum, and their p is 0. A row without any score so far
has a finite maximum, so that a step in which it has none either is not computed again.
"""

from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..mask import cap_scores
from ..mask_and_softmax import QueryWork
from ..softmax import OnlineSoftmax, rows_and_columns
from ..softmax_policy import SkipMax
from .mask import hidden_blocks, load_words, mask_step

# Less than any score: one that is less counts as -inf. A power of two, so that its product with the scale is exact, for
# scales below 128. Of `LOWEST * scale - z` ptxas makes an FFMA: if z is the product, rounded, it is 0 only then, and
# otherwise a rounding error so large that its exponential may be inf.
LOWEST = -(2.0**120)


@dataclass(frozen=True)
class ListedSoftmax(OnlineSoftmax):
    """A softmax whose maxima begin with a finite value."""

    hidden: tuple = ()  # hidden_blocks of a step (rows, blocks)
    block_size: cutlass.Constexpr[int] = 64

    def clear(self):
        self.row_max.fill(LOWEST)
        self.row_sum.fill(0.0)

    def subtracted_at(self, scaled_max: Float32, r: cutlass.Constexpr, c: cutlass.Constexpr) -> Float32:
        return self.subtracted(scaled_max) + self.hidden[r][c // 2 * 8 // self.block_size]


class ListedSkipMax(SkipMax):
    """SkipMax with the mask of a step's members."""

    def make(self, scale_log2: Float32) -> OnlineSoftmax:
        plain = super().make(scale_log2)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return ListedSoftmax(**values, block_size=self.facts.block_size)

    @cute.jit
    def step_without_max(self, c, work: QueryWork, i: Int32, stage: Int32):
        """As SkipMax, and load the words of the next step: in between, they may be needed again."""
        hidden = tuple(tuple(row) for row in hidden_blocks(self.facts, work, i))
        hiding = replace(c, softmax=replace(c.softmax, hidden=hidden))
        grown = SkipMax.step_without_max(self, hiding, work, i, stage)
        load_words(work.members, work.tiles, i + 1)
        return grown

    @cute.jit
    def step_again(self, c, work: QueryWork, i: Int32, stage: Int32, sums: list):
        scores = rows_and_columns(c.acc_S)
        self.recompute(c, stage)
        if const_expr(self.facts.softcap):
            cap_scores(scores, work.softcap)
        mask_step(self.facts, scores, work, i, False)
        return c.softmax.step_lazily(scores)
