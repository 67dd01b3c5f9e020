"""The online softmax of KV tiles that have their own scales: one per block of tokens of K and of V.

With s a tile's scale of scores (that of K's block times all others, and log2(e) / sqrt(D)) and w that of V's block, a
score's x is s times the raw score, as elsewhere. V's scale is part of the exponent, so that O's accumulator needs no
scale:

    y = x + log2(w)    m' = max(m, max y)    p = 2^(y - m')    l' = l 2^(m - m') + (sum p) / w

and O = (sum of p V) / l as without scales. m is stored in units of y: two tiles' raw scores cannot be compared. P is in
the middle of its range where p w is largest, which determines O's error.

The cost per tile is a multiplication and an addition per row maximum, a subtraction and a multiplication per row, a
logarithm and a reciprocal. The cost per score does not change.
"""

from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.tile.ptx import value_after

from ..softmax import OnlineSoftmax


@dataclass(frozen=True)
class TokensSoftmax(OnlineSoftmax):
    """OnlineSoftmax with row_max in units of y; `scale_log2`, which multiplies row_max, is 1."""

    tile_scale: Float32 | None = None  # scale of scores: of a tile, or until `load` the factor common to all tiles
    shift: Float32 | None = None  # log2 of V's scale; None without one
    inverse: Float32 | None = None  # reciprocal of V's scale
    k_scales: cute.Tensor | None = None  # (blocks,) of a query tile's batch index and KV head
    v_scales: cute.Tensor | None = None
    k_scale: Float32 | None = None  # of a tile's block; so is v_scale
    v_scale: Float32 | None = None

    @staticmethod
    def of_rows(rows: int, scale_log2: Float32, **terms) -> "TokensSoftmax":
        """A softmax with its own registers, as OnlineSoftmax.of_rows."""
        plain = OnlineSoftmax.of_rows(rows, Float32(1.0), **terms)
        return TokensSoftmax(
            **{field.name: getattr(plain, field.name) for field in fields(plain)}, tile_scale=scale_log2
        )

    def times(self, factor: Float32) -> "TokensSoftmax":
        """The softmax with scores multiplied by another factor."""
        return replace(self, tile_scale=self.tile_scale * factor)

    def loading(self, block: Int32) -> "TokensSoftmax":
        """The softmax for a tile in this block of tokens, whose scales are being loaded."""
        k, v = (None if scales is None else scales[block] for scales in (self.k_scales, self.v_scales))
        return replace(self, k_scale=k, v_scale=v)

    def loaded(self, score: Float32) -> "TokensSoftmax":
        """The softmax with the loaded scales; they depend on one of the tile's scores, so that nothing waits for them
        before."""
        k, v = (None if scale is None else value_after(scale, score) for scale in (self.k_scale, self.v_scale))
        if v is None:
            return replace(self, k_scale=k)
        return replace(self, k_scale=k, shift=cute.math.log2(v, approx=True, ftz=True), inverse=cute.arch.rcp_approx(v))

    def in_scores(self, powers: Float32 | float, row_max: Float32) -> Float32:
        return Float32(powers)

    def to_kept(self, row_max: Float32) -> Float32:
        row_max = row_max * self.tile_scale
        return row_max if self.shift is None else row_max + self.shift

    def score_scale(self) -> Float32:
        return self.tile_scale

    def subtracted(self, scaled_max: Float32) -> Float32:
        return scaled_max if self.shift is None else scaled_max - self.shift

    def in_row_sum(self, row_sum: Float32) -> Float32:
        return row_sum if self.inverse is None else row_sum * self.inverse

    def multiplied_sum(self, r: cutlass.Constexpr, row_sum: Float32) -> Float32:
        """Rescale the tile's sum before it is divided by w: it may be near FP32's maximum."""
        return self.row_sum[r] * self.factor[r] + self.in_row_sum(row_sum * self.factor[r])
