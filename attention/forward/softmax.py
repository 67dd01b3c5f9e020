"""The online softmax of a tile of scores, in the accumulator layout that mma.sync and wgmma have in common.

A thread holds rows r, each spread over the four threads of a quad. With x the scores times log2(e) / sqrt(D), m the
largest x so far and l the sum of 2^(x - m), one step is (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023)

    m' = max(m, max x)    p = 2^(x - m')    l' = l 2^(m - m') + sum p    O' = O 2^(m - m') + p V

A row that has seen nothing yet has m = -inf; its p and its factor are taken against 0 instead, so that no -inf meets
another.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import after

LN2 = 0.6931471805599453
LARGE = 2.0**15  # more than a p of 16 bits should be; fp16 ends at 65504


def rows_and_columns(acc: cute.Tensor, tiles_m: int = 1) -> cute.Tensor:
    """An accumulator (2, 2, ..) of mma.sync or wgmma, re-viewed as (rows of this thread, columns of this thread)."""
    columns = cute.size(acc) // (4 * tiles_m)
    return cute.make_tensor(
        acc.iterator, cute.make_layout(((2, tiles_m), (2, columns)), stride=((2, 4), (1, 4 * tiles_m)))
    )


def exp2(x: Float32) -> Float32:
    """2 ** x by one instruction."""
    return cute.math.exp2(x, approx=True, ftz=True)


@cute.jit
def quad_max(x: Float32) -> Float32:
    """The largest x of the four threads that share a row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """The sum of x over the four threads that share a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, 1)
    return x + cute.arch.shuffle_sync_bfly(x, 2)


@cute.jit
def largest_of(scores: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    """The largest score of a row that this thread holds."""
    largest = scores[r, 0]
    for c in range_constexpr(1, cute.size(scores, mode=[1])):
        largest = cute.arch.fmax(largest, scores[r, c])
    return largest


@dataclass(frozen=True)
class OnlineSoftmax:
    """Largest scores and sums of one thread's rows."""

    scale_log2: Float32
    largest: cute.Tensor  # (rows,)
    total: cute.Tensor  # (rows,), of this thread's columns only, until `finish`
    factor: cute.Tensor  # (rows,), what the last step asks O to be multiplied by
    adds: cutlass.Constexpr[bool] = True  # whether `step` adds up `total`, and not the product of P with ones
    slack: cutlass.Constexpr[float] = 0.0  # of `step_lazily`

    @staticmethod
    def of_rows(
        rows: int, scale_log2: Float32, total: cute.Tensor | None = None, slack: float = 0.0
    ) -> "OnlineSoftmax":
        """With registers of its own; for use inside a kernel.

        `total`: of whole rows, kept by the kernel, as if V had one more column, of ones.
        """
        largest, factor = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
        adds = total is None
        total = cute.make_rmem_tensor(rows, Float32) if adds else total
        return OnlineSoftmax(scale_log2, largest, total, factor, adds, slack)

    def clear(self):
        self.largest.fill(-Float32.inf)
        if self.adds:
            self.total.fill(0.0)

    @cute.jit
    def against(self, largest: Float32) -> Float32:
        """What a row's scaled scores are taken against: 0 where none has been seen."""
        against = largest * self.scale_log2
        if largest == -Float32.inf:
            against = Float32(0.0)
        return against

    @cute.jit
    def exponentials(self, scores: cute.Tensor, r: cutlass.Constexpr, against: Float32 | None) -> Float32:
        """A row's scores to p; returns their sum, of this thread's columns, 0 where sums are not added up.

        against: None of scores that are scaled, and taken against something, already.
        """
        # Not begun with what there was before: the compiler then puts all maxima before all exponentials, and a
        # dense kernel of head dimension 128 takes 12 % longer.
        total = Float32(0.0)
        for c in range_constexpr(cute.size(scores, mode=[1])):
            if const_expr(against is None):
                scores[r, c] = exp2(scores[r, c])
            else:
                scores[r, c] = exp2(scores[r, c] * self.scale_log2 - against)
            if const_expr(self.adds):
                total = total + scores[r, c]
        return total

    @cute.jit
    def step(self, scores: cute.Tensor):  # (rows, columns), replaced by p
        """One tile of scores."""
        for r in range_constexpr(cute.size(self.total)):
            largest = largest_of(scores, r)
            largest = cute.arch.fmax(self.largest[r], quad_max(largest))
            against = self.against(largest)
            self.factor[r] = exp2(self.largest[r] * self.scale_log2 - against)
            self.largest[r] = largest
            total = self.exponentials(scores, r, against)
            if const_expr(self.adds):
                self.total[r] = self.total[r] * self.factor[r] + total

    @cute.jit
    def step_lazily(self, scores: cute.Tensor):  # (rows, columns), replaced by p
        """A tile of scores after the first one. Returns whether O is to be rescaled, the same in all threads of a warp.

        What p is taken against stays what it was until a score is larger by a factor of more than 2 ** slack: p is at
        most that then, and O and the sums are divided by each other (FlashAttention-4, Dao et al. 2025). With much
        slack nearly all steps rescale nothing, and ask no other thread for its largest score; with little, the p of a
        row's largest score is exact more often (FlashFacts.slack). Each row decides for itself.
        """
        larger, slack = cutlass.Boolean(False), self.slack / self.scale_log2
        for r in range_constexpr(cute.size(self.total)):
            largest = largest_of(scores, r)
            self.factor[r] = Float32(1.0)
            grows = cute.arch.vote_any_sync(largest > self.largest[r] + slack)
            if grows:
                largest = quad_max(largest)
                if largest > self.largest[r] + slack:
                    self.factor[r] = exp2((self.largest[r] - largest) * self.scale_log2)
                    self.largest[r] = largest
                if const_expr(self.adds):
                    self.total[r] = self.total[r] * self.factor[r]
            larger = larger | grows
            total = self.exponentials(scores, r, self.against(self.largest[r]))
            if const_expr(self.adds):
                self.total[r] = self.total[r] + total
        return larger

    @cute.jit
    def step_without_max(self, scores: cute.Tensor, apart: cutlass.Constexpr):  # (rows, columns), replaced by p
        """A tile of scores after the first one, if that can be had without their largest. Returns whether it could, the
        same in all threads of a warp; else the scores are lost, and nothing else has changed.

        p is taken against what it was before. That its sum is small says that no p is large: so no score is compared,
        and the first p is there as soon as its score. A row that has seen nothing has sums of inf or NaN.

        apart: to multiply and add row by row, as if the second row's offset came of the first row's last result. Then
        an offset is read from the register file once, and not for each score: by two warpgroups, whose products P V
        read P from the registers at the same time, 5 % faster; by three, no faster. Needs sums that are added up.
        """
        rows, columns = const_expr(cute.size(self.total)), const_expr(cute.size(scores, mode=[1]))
        sums = []
        for r in range_constexpr(rows):
            against = self.largest[r] * self.scale_log2
            if const_expr(apart and r > 0):
                against = after(against, scores[r - 1, columns - 1])
            if const_expr(apart):
                for c in range_constexpr(columns):
                    scores[r, c] = scores[r, c] * self.scale_log2 - against
            else:
                sums.append(self.exponentials(scores, r, against))
        if const_expr(apart):
            sums = [self.exponentials(scores, r, None) for r in range(rows)]
        small = cutlass.Boolean(True)
        for r in range_constexpr(rows):
            small = small & (sums[r] < LARGE)
        small = cute.arch.vote_all_sync(small)
        for r in range_constexpr(rows):
            # Not in a branch, where ptxas adds the sums up once more to save their registers.
            self.total[r] = select_(small, self.total[r] + sums[r], self.total[r])
        return small

    @cute.jit
    def rescale(self, out: cute.Tensor):  # (rows, columns) of O
        """Multiply O by the last step's factors."""
        for r in range_constexpr(cute.size(self.total)):
            for c in range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = out[r, c] * self.factor[r]

    @cute.jit
    def rescale_lazily(self, out: cute.Tensor):  # (rows, columns) of O
        """The same, after `step_lazily`: of a warp's rows with number r, all or none."""
        for r in range_constexpr(cute.size(self.total)):
            if cute.arch.vote_any_sync(self.factor[r] != 1.0):
                for c in range_constexpr(cute.size(out, mode=[1])):
                    out[r, c] = out[r, c] * self.factor[r]

    @cute.jit
    def finish(self, out: cute.Tensor, lse: cute.Tensor):  # (rows, columns) of O; (rows,)
        """Divide O by the sums, and give each row's log of its sum of exponentials: 0 and -inf for an empty row.

        A score of NaN is no largest one, but its p is NaN, and so is the sum: that makes O and LSE NaN.
        """
        for r in range_constexpr(cute.size(self.total)):
            total = quad_sum(self.total[r]) if const_expr(self.adds) else self.total[r]
            inverse = cute.arch.rcp_approx(total)
            lse[r] = (self.largest[r] * self.scale_log2 + cute.math.log2(total, approx=True, ftz=True)) * LN2
            if total == 0.0:  # which NaN is not
                inverse = Float32(0.0)
                lse[r] = -Float32.inf
            for c in range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = out[r, c] * inverse
