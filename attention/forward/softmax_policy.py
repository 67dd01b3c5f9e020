"""Softmax policies of sm_90 attention: when row maxima are raised and O is rescaled.

    ExactMax   every tile raises the maxima, and O is rescaled at every step; decode
    LazyMax    a maximum is raised, and O rescaled, only if it has grown by more than FlashFacts.rescale_threshold
    SkipMax    as LazyMax; full tiles first try to skip their maxima, and recompute their scores if that fails

`first` computes P of the first tile, `step` that of a later one, and `finish` rescales O to the new maxima. The state
is an OnlineSoftmax, which `make` creates.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.tile.hopper import WARPGROUP

from .config import FlashFacts
from .kv_tiles import FULL
from .mask import cap_scores
from .mask_and_softmax import QueryWork, mask_and_softmax
from .recompute_scores import recompute_scores
from .softmax import OnlineSoftmax, rows_and_columns


class ExactMax:
    """Each tile raises the maxima of its rows."""

    def __init__(self, facts: FlashFacts, softmax: type = OnlineSoftmax):
        self.facts, self.softmax = facts, softmax

    def make(self, scale_log2: Float32) -> OnlineSoftmax:
        """Softmax of a thread's two rows."""
        return self.softmax.of_rows(2, scale_log2)

    def skips(self, kind: cutlass.Constexpr) -> bool:
        """True if tiles of a kind go through `step_without_max`."""
        return False

    def first(self, c, work: QueryWork):
        """Scores of the first tile to P, the A operand of P V."""
        mask_and_softmax(self.facts, rows_and_columns(c.acc_S), c.softmax, work, 0, work.tiles.first)
        self.convert(c)

    def step(self, c, work: QueryWork, i: Int32, kind: cutlass.Constexpr):
        """Scores of the i-th tile to P. Returns True if O must be rescaled."""
        return mask_and_softmax(self.facts, rows_and_columns(c.acc_S), c.softmax, work, i, kind)

    def finish(self, c, grown, at_v):
        """Convert P to the A operand of the next P V and rescale O to the new maxima; releases V's stage."""
        c.pipe_v.consumer_release(at_v)
        self.convert(c)
        c.softmax.rescale(rows_and_columns(c.acc_O))

    @cute.jit
    def convert(self, c):
        """Convert P to 16 bits, eight values at a time: as one vector it held so many registers that WGMMAs were
        serialized."""
        for i in range_constexpr(0, cute.size(c.acc_S), 8):
            part = cute.make_tensor(c.acc_S.iterator + i, cute.make_layout(8))
            to = cute.make_tensor(c.tOrP.iterator + i, cute.make_layout(8))
            to.store(part.load().to(c.tOrP.element_type))


class LazyMax(ExactMax):
    """A maximum is raised only if it has grown by more than the threshold."""

    def make(self, scale_log2: Float32) -> OnlineSoftmax:
        return self.softmax.of_rows(2, scale_log2, rescale_threshold=self.facts.rescale_threshold)

    def step(self, c, work: QueryWork, i: Int32, kind: cutlass.Constexpr):
        return mask_and_softmax(self.facts, rows_and_columns(c.acc_S), c.softmax, work, i, kind, True)

    @cute.jit
    def finish(self, c, grown, at_v):
        self.convert(c)
        if grown:
            c.softmax.rescale_lazily(rows_and_columns(c.acc_O))
        c.pipe_v.consumer_release(at_v)  # last, since other warps wait for the code above


class SkipMax(LazyMax):
    """Full tiles first try to skip their row maxima, if FlashFacts.skips_max."""

    def skips(self, kind: cutlass.Constexpr) -> bool:
        return self.facts.skips_max and kind == FULL

    @cute.jit
    def step_without_max(self, c, work: QueryWork, i: Int32, stage: Int32):
        """Scores of full tile i to P, without their row maxima if possible. Returns True if O must be rescaled.

        K's stage is not yet released. Some warps of a warpgroup may have to recompute their scores and others not, so
        nothing in between may involve the whole warpgroup: no wait for its WGMMAs, and P V is still in flight.
        """
        softmax, scores, grown = c.softmax, rows_and_columns(c.acc_S), cutlass.Boolean(False)
        if const_expr(self.facts.softcap):
            cap_scores(scores, work.softcap)
        small, *sums = softmax.step_without_max(scores, self.facts.config.groups < 3)
        if not small:
            grown = self.step_again(c, work, i, stage, sums)
        return grown

    def step_again(self, c, work: QueryWork, i: Int32, stage: Int32, sums: list):
        """`step` with recomputed scores, called if the `sums` of P are too large."""
        scores = rows_and_columns(c.acc_S)
        self.recompute(c, stage)
        if self.facts.softcap:
            cap_scores(scores, work.softcap)
        return c.softmax.step_lazily(scores, c.softmax.too_large(sums))

    def recompute(self, c, stage: Int32):
        """Recompute this warp's scores of a stage of K."""
        recompute_scores(c.acc_S, c.sQ[None, None, 0], c.sK[None, None, stage], WARPGROUP // 32)


def policy_of(facts: FlashFacts) -> LazyMax:
    """Softmax policy of the forward kernel."""
    return SkipMax(facts) if facts.skips_max else LazyMax(facts)
