"""A tile of scores to P, on both paths: the cap, the mask, the softmax."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .kv_tiles import EITHER, PARTIAL
from .mask import cap_scores, mask_elements, mask_window
from .softmax import OnlineSoftmax


class MaskAndSoftmax:
    """What FlashForwardSm90 and FlashForwardSm80 do with scores; they have `facts` and `cfg`."""

    @cute.jit
    def mask_and_softmax(
        self,
        scores: cute.Tensor,  # (rows, columns)
        softmax: OnlineSoftmax,
        source,
        tiles,
        i,  # which of the tiles
        row: Int32,  # of the thread's first row
        tile,  # scheduler.QueryTile
        seqlen,  # seqlen.SeqlenInfo
        softcap: Float32,
        kind: cutlass.Constexpr,  # k_tiles.FULL, PARTIAL or EITHER
        lazily: cutlass.Constexpr = False,  # OnlineSoftmax.step_lazily
    ):
        """Scores to P: the cap, the mask, the softmax. Returns whether O is to be rescaled."""
        if const_expr(self.facts.softcap):
            cap_scores(scores, softcap)
        if const_expr(kind == EITHER):
            if tiles.ends[0] > i:
                self.mask(scores, source, tiles.at_partial(i), row, tile, seqlen)
        elif const_expr(kind == PARTIAL):
            self.mask(scores, source, tiles.at_partial(i), row, tile, seqlen)
        grown = cutlass.Boolean(True)
        if const_expr(lazily):
            grown = softmax.step_lazily(scores)
        else:
            softmax.step(scores)
        return grown

    @cute.jit
    def mask(self, scores: cute.Tensor, source, n: Int32, row: Int32, tile, seqlen):
        """-inf where a row does not see a column of tile n of K."""
        if const_expr(self.facts.blocks is None):
            mask_window(scores, source, row, n * self.cfg.tile_n, seqlen)
        else:
            mask_elements(scores, self.facts.blocks, source.mask_tensors, row, n * self.cfg.tile_n, tile, seqlen)
