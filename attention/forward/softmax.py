"""The online softmax of a tile of scores, in the accumulator layout that mma.sync and wgmma have in common.

A thread holds a part of several rows; the four threads of a quad share each row. With x the scores times log2(e) /
sqrt(D), m the largest x so far and l the sum of 2^(x - m), one step is (Milakov and Gimelshein 2018; FlashAttention-2,
Dao 2023)

    m' = max(m, max x)    p = 2^(x - m')    l' = l 2^(m - m') + sum p    O' = O 2^(m - m') + p V

A row that has seen no score yet has m = -inf. Its p and its factor are then computed with m = 0, so that -inf is never
subtracted from -inf.

The result does not require m to be the largest x: with any other value O and l have the same ratio, and LSE is right.
For FP8 P, m is smaller by `headroom`, so that the largest p is 2 ** headroom and small ones do not underflow.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ptx import value_after

LN2 = 0.6931471805599453
LARGE = 2.0**15  # upper bound of a 16-bit p; the FP16 maximum is 65504


def rows_and_columns(acc: cute.Tensor, tiles_m: int = 1) -> cute.Tensor:
    """View of an accumulator (2, 2, ..) of mma.sync or wgmma as (rows of this thread, columns of this thread)."""
    columns = cute.size(acc) // (4 * tiles_m)
    return cute.make_tensor(
        acc.iterator, cute.make_layout(((2, tiles_m), (2, columns)), stride=((2, 4), (1, 4 * tiles_m)))
    )


def exp2(x: Float32) -> Float32:
    """2 ** x in one instruction."""
    return cute.math.exp2(x, approx=True, ftz=True)


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Maximum of x over the four threads that share a row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum of x over the four threads that share a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, 1)
    return x + cute.arch.shuffle_sync_bfly(x, 2)


@cute.jit
def row_max_of(scores: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    """Largest score of a row among this thread's columns."""
    row_max = scores[r, 0]
    for c in range_constexpr(1, cute.size(scores, mode=[1])):
        row_max = cute.arch.fmax(row_max, scores[r, c])
    return row_max


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maxima and sums of one thread's rows."""

    scale_log2: Float32
    row_max: cute.Tensor  # (rows,)
    row_sum: cute.Tensor  # (rows,), over this thread's columns only, until `finish`
    factor: cute.Tensor  # (rows,), rescale factor of O from the last step
    adds_row_sums: cutlass.Constexpr[bool] = True  # True if `step` adds to `row_sum`; False: an MMA of P with ones does
    rescale_threshold: cutlass.Constexpr[float] = 0.0  # see `step_lazily`
    headroom: cutlass.Constexpr[float] = 0.0  # log2 of p at a new maximum
    largest_p: cutlass.Constexpr[float] = LARGE  # upper bound of p in P's dtype

    @staticmethod
    def of_rows(
        rows: int,
        scale_log2: Float32,
        row_sum: cute.Tensor | None = None,
        rescale_threshold: float = 0.0,
        headroom: float = 0.0,
        largest_p: float = LARGE,
    ) -> "OnlineSoftmax":
        """A softmax with its own registers; for use inside a kernel.

        row_sum: the sums of whole rows if the kernel computes them itself, as if V had an additional column of ones.
        """
        row_max, factor = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
        adds_row_sums = row_sum is None
        row_sum = cute.make_rmem_tensor(rows, Float32) if adds_row_sums else row_sum
        limits = rescale_threshold, headroom, largest_p
        return OnlineSoftmax(scale_log2, row_max, row_sum, factor, adds_row_sums, *limits)

    def clear(self):
        self.row_max.fill(-Float32.inf)
        if self.adds_row_sums:
            self.row_sum.fill(0.0)

    def below(self, row_max: Float32) -> Float32:
        """The maximum to store for a row: its largest score minus the headroom."""
        if not self.headroom:
            return row_max
        return row_max - self.in_scores(self.headroom, row_max)

    # Units: here row_max has the units of scores. In TokensSoftmax, whose tiles have different scales, it has others.

    def in_scores(self, powers: Float32 | float, row_max: Float32) -> Float32:
        """Powers of 2 in row_max's units. The division is here, after `row_max`, so that its result needs no register
        in the loop."""
        return powers * cute.arch.rcp_approx(value_after(self.scale_log2, row_max))

    def to_kept(self, row_max: Float32) -> Float32:
        """A tile's largest score in row_max's units."""
        return row_max

    def score_scale(self) -> Float32:
        """Scale of a tile's scores."""
        return self.scale_log2

    def subtracted(self, scaled_max: Float32) -> Float32:
        """Value to subtract from a tile's scaled scores."""
        return scaled_max

    def subtracted_at(self, scaled_max: Float32, r: cutlass.Constexpr, c: cutlass.Constexpr) -> Float32:
        """Value that `step_without_max` subtracts from the scaled score of a row and column."""
        return self.subtracted(scaled_max)

    def in_row_sum(self, row_sum: Float32) -> Float32:
        """A tile's sum of p in the units of row_sum."""
        return row_sum

    def multiplied_sum(self, r: cutlass.Constexpr, row_sum: Float32) -> Float32:
        """A row's sum plus a tile's sum of p, both rescaled to the raised maximum."""
        return (self.row_sum[r] + row_sum) * self.factor[r]

    @cute.jit
    def scaled_max(self, row_max: Float32) -> Float32:
        """Value to subtract from a row's scaled scores: its scaled maximum, 0 if it has seen no score."""
        scaled_max = row_max * self.scale_log2
        if row_max == -Float32.inf:
            scaled_max = Float32(0.0)
        return scaled_max

    @cute.jit
    def exponentials(self, scores: cute.Tensor, r: cutlass.Constexpr, scaled_max: Float32 | None) -> Float32:
        """Scores of a row to p. Returns their sum over this thread's columns, 0 if sums are not added up.

        scaled_max: the value to subtract from the scaled scores; None if it has been subtracted already.
        """
        # The sum does not start from that of earlier tiles: the compiler would put all maxima before all exponentials,
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
        """Process one tile of scores."""
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
        """Process a tile of scores after the first one. Returns True if O must be rescaled, the same in all threads of
        a warp.

        A row's maximum does not change until a score is larger by more than rescale_threshold powers of 2. Until then p
        is at most 2 ** (rescale_threshold + headroom); O and the sums have the same factor, which the final division
        removes (FlashAttention-4, Dao et al. 2025). With a high threshold nearly all steps rescale nothing and exchange
        no maximum between threads; with a low one the p of a row's maximum is exact more often
        (FlashFacts.rescale_threshold). Each row is decided independently.
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
        """Process a tile of scores after the first one without computing its row maxima.

        Returns True if that was possible, the same in all threads of a warp, and this thread's sums of the tile's p. If
        it was not, the scores are lost, and nothing else has changed.

        p is computed with the maximum of earlier tiles. If the sum of p is small, so is each p. No score is compared
        with others, and the first p can be computed as soon as its score is available. A row that has seen no score yet
        has sums of inf or NaN.

        row_by_row: True to scale and subtract row by row, with an artificial dependency of the second row's maximum on
        the first row's last result. The maximum is then read from the register file once instead of once per score.
        With two warpgroups, whose WGMMAs P V read P from registers at the same time, that is 5 % faster; with three it
        is not. Requires adds_row_sums.
        """
        rows, columns = const_expr(cute.size(self.row_sum)), const_expr(cute.size(scores, mode=[1]))
        sums = []
        for r in range_constexpr(rows):
            scaled_max = self.row_max[r] * self.scale_log2
            if const_expr(row_by_row and r > 0):
                scaled_max = value_after(scaled_max, scores[r - 1, columns - 1])
            if const_expr(row_by_row):
                for c in range_constexpr(columns):
                    scores[r, c] = scores[r, c] * self.score_scale() - self.subtracted_at(scaled_max, r, c)
            else:
                sums.append(self.exponentials(scores, r, scaled_max))
        if const_expr(row_by_row):
            sums = [self.exponentials(scores, r, None) for r in range(rows)]
        small = cutlass.Boolean(True)
        for r in range_constexpr(rows):
            small = small & (sums[r] < self.largest_p)
        small = cute.arch.vote_all_sync(small)
        for r in range_constexpr(rows):
            # Not in a branch, where ptxas recomputes the sums to save their registers.
            self.row_sum[r] = select_(small, self.row_sum[r] + self.in_row_sum(sums[r]), self.row_sum[r])
        return small, *sums

    def too_large(self, sums: list) -> tuple | None:
        """Rows whose sums made `step_without_max` fail: `step_lazily` brings them back to their headroom. None with a
        16-bit P.

        For FP8 the bound of p and of the sum is the same. A row whose first tile had few scores may have p that are in
        range and sums that are too large, in every tile; each tile's scores would be computed twice. With a new maximum
        its p are at most 2 ** headroom, and their sums are small. Other rows of its warp are not changed, so that no
        row's result depends on others. A 16-bit P has enough range.
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
        """Rescale O after `step_lazily`: rows r are skipped in a warp where no factor differs from 1."""
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
        scale: cute.Tensor | None = None,  # (1,), dequantization scale of V, applied to O
    ):
        """Divide O by the sums and compute each row's LSE, the log of its sum; an empty row gets 0 and -inf.

        A row's sink is one more term of its sum, without a value; so an empty row's LSE is its sink. A score of NaN is
        never a row's maximum, but its p is NaN, and so is the sum: O and LSE become NaN.
        """
        for r in range_constexpr(cute.size(self.row_sum)):
            row_sum = quad_sum(self.row_sum[r]) if const_expr(self.adds_row_sums) else self.row_sum[r]
            if const_expr(sinks is not None):
                row_max, row_sum, factor = self.with_sink(r, row_sum, sinks[r])
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
    def with_sink(self, r: cutlass.Constexpr, row_sum: Float32, sink: Float32) -> tuple:
        """(scaled maximum, sum, rescale factor of O) of a row with its sink. The sink may exceed the maximum, which is
        raised so that the sink's term does not overflow."""
        before = self.row_max[r] * self.scale_log2
        row_max = cute.arch.fmax(before, sink)
        if row_max == -Float32.inf:
            row_max = Float32(0.0)
        factor = exp2(before - row_max)
        return row_max, row_sum * factor + exp2(sink - row_max), factor
