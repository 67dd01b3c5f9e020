"""The online softmax of a tile of scores, in the accumulator layout that mma.sync and wgmma have in common.

A thread holds a part of several rows; the four threads of a quad share each row. With x the scores times log2(e) /
sqrt(D), m the largest x so far and l the sum of 2^(x - m), one step is (Milakov and Gimelshein 2018; FlashAttention-2,
Dao 2023)

    m' = max(m, max x)    p = 2^(x - m')    l' = l 2^(m - m') + sum p    O' = O 2^(m - m') + p V

A row that has seen no score yet has m = -inf. Its p and its factor are then computed with m = 0, so that -inf is never
subtracted from -inf.

Nothing asks m to be the largest x: with any other number O and l are divided by each other all the same, and LSE is
right. Where p becomes an 8-bit float, m is smaller by `headroom`, so that the largest p is 2 ** headroom and small ones
are not lost.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import value_after

LN2 = 0.6931471805599453
LARGE = 2.0**15  # no p of 16 bits may be larger; fp16 ends at 65504


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
def row_max_of(scores: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    """The largest score of a row that this thread holds."""
    row_max = scores[r, 0]
    for c in range_constexpr(1, cute.size(scores, mode=[1])):
        row_max = cute.arch.fmax(row_max, scores[r, c])
    return row_max


@dataclass(frozen=True)
class OnlineSoftmax:
    """Largest scores and sums of one thread's rows."""

    scale_log2: Float32
    row_max: cute.Tensor  # (rows,)
    row_sum: cute.Tensor  # (rows,), of this thread's columns only, until `finish`
    factor: cute.Tensor  # (rows,), what the last step asks O to be multiplied by
    adds_row_sums: cutlass.Constexpr[bool] = (
        True  # whether `step` adds up `row_sum`, and not the product of P with ones
    )
    rescale_threshold: cutlass.Constexpr[float] = 0.0  # of `step_lazily`
    headroom: cutlass.Constexpr[float] = 0.0  # p of a new maximum is 2 to this
    largest_p: cutlass.Constexpr[float] = LARGE  # that P's dtype holds, or more than that needs

    @staticmethod
    def of_rows(
        rows: int,
        scale_log2: Float32,
        row_sum: cute.Tensor | None = None,
        rescale_threshold: float = 0.0,
        headroom: float = 0.0,
        largest_p: float = LARGE,
    ) -> "OnlineSoftmax":
        """With registers of its own; for use inside a kernel.

        row_sum: the sums of whole rows, where the kernel computes them itself, as if V had one more column, of ones.
        """
        row_max, factor = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
        adds_row_sums = row_sum is None
        row_sum = cute.make_rmem_tensor(rows, Float32) if adds_row_sums else row_sum
        more = rescale_threshold, headroom, largest_p
        return OnlineSoftmax(scale_log2, row_max, row_sum, factor, adds_row_sums, *more)

    def clear(self):
        self.row_max.fill(-Float32.inf)
        if self.adds_row_sums:
            self.row_sum.fill(0.0)

    def below(self, row_max: Float32) -> Float32:
        """What is kept of a row's largest score: less than that, by the headroom."""
        if not self.headroom:
            return row_max
        return row_max - self.in_scores(self.headroom, row_max)

    # Units: row_max is in those of scores here. TokensSoftmax, whose tiles differ in theirs, has other ones.

    def in_scores(self, powers: Float32 | float, row_max: Float32) -> Float32:
        """Powers of 2 in row_max's units. Divided here, after `row_max`, and in no register all through the loop."""
        return powers * cute.arch.rcp_approx(value_after(self.scale_log2, row_max))

    def to_kept(self, row_max: Float32) -> Float32:
        """A tile's largest score in row_max's units."""
        return row_max

    def score_scale(self) -> Float32:
        """What a tile's scores are multiplied by."""
        return self.scale_log2

    def subtracted(self, scaled_max: Float32) -> Float32:
        """What is subtracted from a tile's scaled scores."""
        return scaled_max

    def in_row_sum(self, row_sum: Float32) -> Float32:
        """A tile's sum of p as what is added to a row's sum."""
        return row_sum

    def multiplied_sum(self, r: cutlass.Constexpr, row_sum: Float32) -> Float32:
        """A row's sum with a tile's sum of p, both in units of the maximum that was raised."""
        return (self.row_sum[r] + row_sum) * self.factor[r]

    @cute.jit
    def scaled_max(self, row_max: Float32) -> Float32:
        """What is subtracted from a row's scaled scores: its scaled maximum, 0 where it has seen no score."""
        scaled_max = row_max * self.scale_log2
        if row_max == -Float32.inf:
            scaled_max = Float32(0.0)
        return scaled_max

    @cute.jit
    def exponentials(self, scores: cute.Tensor, r: cutlass.Constexpr, scaled_max: Float32 | None) -> Float32:
        """A row's scores to p. Returns their sum over this thread's columns, 0 where sums are not added up.

        scaled_max: what is subtracted from the scaled scores; None where that has been done already.
        """
        # The sum does not begin with that of earlier tiles: the compiler would put all maxima before all exponentials,
        # and a dense kernel of head dimension 128 would take 12 % longer.
        row_sum = Float32(0.0)
        for c in range_constexpr(cute.size(scores, mode=[1])):
            if const_expr(scaled_max is None):
                scores[r, c] = exp2(scores[r, c])
            else:
                scores[r, c] = exp2(scores[r, c] * self.score_scale() - self.subtracted(scaled_max))
            if const_expr(self.adds_row_sums):
                row_sum = row_sum + scores[r, c]
        return row_sum

    @cute.jit
    def step(self, scores: cute.Tensor):  # (rows, columns), replaced by p
        """One tile of scores."""
        for r in range_constexpr(cute.size(self.row_sum)):
            row_max = self.to_kept(row_max_of(scores, r))
            row_max = cute.arch.fmax(self.row_max[r], self.below(quad_max(row_max)))
            scaled_max = self.scaled_max(row_max)
            self.factor[r] = exp2(self.row_max[r] * self.scale_log2 - scaled_max)
            self.row_max[r] = row_max
            row_sum = self.exponentials(scores, r, scaled_max)
            if const_expr(self.adds_row_sums):
                self.row_sum[r] = self.row_sum[r] * self.factor[r] + self.in_row_sum(row_sum)

    @cute.jit
    def step_lazily(
        self,
        scores: cute.Tensor,  # (rows, columns), replaced by p
        large: tuple | None = None,  # too_large
    ):
        """A tile of scores after the first one. Returns whether O must be rescaled, the same in all threads of a warp.

        A row's maximum stays what it was until a score is larger by more than rescale_threshold powers of 2. Until then
        p is at most 2 ** (rescale_threshold + headroom), and O and the sums are divided by each other at the end
        (FlashAttention-4, Dao et al. 2025). With a high threshold nearly all steps rescale nothing and exchange no
        maximum between threads; with a low one the p of a row's maximum is exact more often
        (FlashFacts.rescale_threshold). Each row decides for itself.
        """
        larger, threshold = cutlass.Boolean(False), self.rescale_threshold / self.scale_log2
        for r in range_constexpr(cute.size(self.row_sum)):
            row_max = self.to_kept(row_max_of(scores, r))
            self.factor[r] = Float32(1.0)
            if const_expr(self.headroom > 0):
                threshold = Float32(self.rescale_threshold + self.headroom)
                if const_expr(large is not None):
                    threshold = select_(large[r], Float32(self.headroom), threshold)
                threshold = self.in_scores(threshold, row_max)
            grows = cute.arch.vote_any_sync(row_max > self.row_max[r] + threshold)
            if grows:
                row_max = quad_max(row_max)
                if row_max > self.row_max[r] + threshold:
                    row_max = self.below(row_max)
                    self.factor[r] = exp2((self.row_max[r] - row_max) * self.scale_log2)
                    self.row_max[r] = row_max
                if const_expr(self.adds_row_sums):
                    self.row_sum[r] = self.row_sum[r] * self.factor[r]
            larger = larger | grows
            row_sum = self.exponentials(scores, r, self.scaled_max(self.row_max[r]))
            if const_expr(self.adds_row_sums):
                self.row_sum[r] = self.row_sum[r] + self.in_row_sum(row_sum)
        return larger

    @cute.jit
    def step_without_max(self, scores: cute.Tensor, row_by_row: cutlass.Constexpr):  # (rows, columns), replaced by p
        """A tile of scores after the first one, without computing its row maxima.

        Returns whether that was possible, the same in all threads of a warp, and this thread's sums of the tile's p. If
        it was not, the scores are lost, and nothing else has changed.

        p is computed with the maximum of earlier tiles. If the sum of p is small, so is each p. So no score is compared
        with others, and the first p can be computed as soon as its score is there. A row that has seen no score yet has
        sums of inf or NaN.

        row_by_row: whether to scale and subtract row by row, as if the second row's maximum came of the first row's
            last result. The maximum is then read from the register file once, and not for each score. With two
            warpgroups, whose products P V read P from registers at the same time, that is 5 % faster; with three it is
            not. Needs sums that are added up.
        """
        rows, columns = const_expr(cute.size(self.row_sum)), const_expr(cute.size(scores, mode=[1]))
        sums = []
        for r in range_constexpr(rows):
            scaled_max = self.row_max[r] * self.scale_log2
            if const_expr(row_by_row and r > 0):
                scaled_max = value_after(scaled_max, scores[r - 1, columns - 1])
            if const_expr(row_by_row):
                for c in range_constexpr(columns):
                    scores[r, c] = scores[r, c] * self.score_scale() - self.subtracted(scaled_max)
            else:
                sums.append(self.exponentials(scores, r, scaled_max))
        if const_expr(row_by_row):
            sums = [self.exponentials(scores, r, None) for r in range(rows)]
        small = cutlass.Boolean(True)
        for r in range_constexpr(rows):
            small = small & (sums[r] < self.largest_p)
        small = cute.arch.vote_all_sync(small)
        for r in range_constexpr(rows):
            # Not in a branch, where ptxas adds the sums up once more to save their registers.
            self.row_sum[r] = select_(small, self.row_sum[r] + self.in_row_sum(sums[r]), self.row_sum[r])
        return small, *sums

    def too_large(self, sums: list) -> tuple | None:
        """Which rows' sums made `step_without_max` give up: `step_lazily` brings them back to their headroom.

        Of 8 bits the largest p and the largest sum are the same. A row whose first tile had few scores may have p that
        are right and sums that are too large, in every tile; each tile's scores would be computed twice. With a new
        maximum its p are at most 2 ** headroom, and their sums are small. Other rows of its warp stay as they are, so
        that no row's bits depend on others. None of 16 bits, whose p have room.
        """
        if not self.headroom:
            return None
        quad = cute.arch.lane_idx() // 4 * 4
        too_large = (cute.arch.vote_ballot_sync(~(s < self.largest_p)) for s in sums)
        return tuple((Int32(lanes) >> quad) & 15 != 0 for lanes in too_large)

    @cute.jit
    def rescale(self, out: cute.Tensor):  # (rows, columns) of O
        """Multiply O by the last step's factors."""
        for r in range_constexpr(cute.size(self.row_sum)):
            for c in range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = out[r, c] * self.factor[r]

    @cute.jit
    def rescale_lazily(self, out: cute.Tensor):  # (rows, columns) of O
        """The same, after `step_lazily`: skips the rows r of a warp where no factor differs from 1."""
        for r in range_constexpr(cute.size(self.row_sum)):
            if cute.arch.vote_any_sync(self.factor[r] != 1.0):
                for c in range_constexpr(cute.size(out, mode=[1])):
                    out[r, c] = out[r, c] * self.factor[r]

    @cute.jit
    def finish(
        self,
        out: cute.Tensor,  # (rows, columns) of O
        lse: cute.Tensor,  # (rows,)
        sinks: cute.Tensor | None = None,  # (rows,), times log2(e)
        scale: cute.Tensor | None = None,  # (1,), of V, what O is multiplied by besides
    ):
        """Divide O by the sums and compute each row's LSE, the log of its sum; an empty row gets 0 and -inf.

        A row's sink is one more term of its sum, without a value; so an empty row's LSE is its sink.
        A score of NaN is never a row's maximum, but its p is NaN, and so is the sum: O and LSE become NaN.
        """
        for r in range_constexpr(cute.size(self.row_sum)):
            row_sum = quad_sum(self.row_sum[r]) if const_expr(self.adds_row_sums) else self.row_sum[r]
            if const_expr(sinks is not None):
                row_max, row_sum, factor = self.join(r, row_sum, sinks[r])
            inverse = cute.arch.rcp_approx(row_sum)
            if const_expr(sinks is not None):
                inverse = inverse * factor
            else:
                row_max = self.row_max[r] * self.scale_log2
            lse[r] = (row_max + cute.math.log2(row_sum, approx=True, ftz=True)) * LN2
            if row_sum == 0.0:  # NaN is not 0
                inverse = Float32(0.0)
                lse[r] = -Float32.inf
            if const_expr(scale is not None):
                inverse = inverse * scale[0]
            for c in range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = out[r, c] * inverse

    @cute.jit
    def join(self, r: cutlass.Constexpr, row_sum: Float32, sink: Float32) -> tuple:
        """(scaled maximum, sum, what O is to be multiplied by) of a row with its sink, which may be far above all
        scores: that would be a term of inf beside their maximum."""
        before = self.row_max[r] * self.scale_log2
        row_max = cute.arch.fmax(before, sink)
        if row_max == -Float32.inf:
            row_max = Float32(0.0)
        factor = exp2(before - row_max)
        return row_max, row_sum * factor + exp2(sink - row_max), factor
