"""A tile of scores to P, on both paths: the softcap or score_mod, the mask, the softmax."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .gather.mask import mask_members
from .kv_tiles import EITHER, FULL, PARTIAL
from .mask import cap_scores, change_scores, mask_elements, mask_window
from .softmax import OnlineSoftmax


@dataclass(frozen=True)
class QueryWork:
    """One query tile: the KV tiles that it visits, and the inputs of its masks."""

    source: Any  # kv_tiles.WindowSource, block_source.BlockSource or gather.source.UnionSource
    tiles: Any  # returned by source.for_tile
    tile: Any  # scheduler.QueryTile or problem.DecodeTile
    seqlen: Any  # seqlen.SeqlenInfo
    row: Int32  # first row of this thread
    softcap: Float32  # with a score_mod, the scale of scores before it
    score_tensors: tuple | None = None  # inputs of the score_mod
    members: Any = None  # gather.mask.Members of this thread's rows


@cute.jit
def mask_and_softmax(
    facts: cutlass.Constexpr,
    scores: cute.Tensor,  # (rows, columns)
    softmax: OnlineSoftmax,
    work: QueryWork,
    i,  # index of the visited tile
    kind: cutlass.Constexpr,  # kv_tiles.FULL, PARTIAL or EITHER
    lazily: cutlass.Constexpr = False,  # OnlineSoftmax.step_lazily
):
    """Scores to P: the softcap or score_mod, the mask, the softmax. Returns True if O must be rescaled."""
    if const_expr(facts.softcap):
        cap_scores(scores, work.softcap)
    if const_expr(facts.score is not None):
        n = work.tiles.at_partial(i) if const_expr(kind == PARTIAL) else work.tiles.at(i)
        if const_expr(facts.blocks is not None and kind == FULL):  # tensors are not read past their ends
            n = cutlass.min(n, work.seqlen.cols // facts.config.tile_n - 1)
        position = work.source, work.row, n * facts.config.tile_n, work.tile, work.seqlen
        change_scores(scores, facts.score, work.score_tensors, work.softcap, *position, kind == FULL)
    if const_expr(facts.gathers):
        mask_members(facts, scores, work, i, kind == PARTIAL)
    elif const_expr(kind == EITHER):
        if work.tiles.ends[0] > i:
            mask(facts, scores, work, i)
    elif const_expr(kind == PARTIAL):
        mask(facts, scores, work, i)
    grown = cutlass.Boolean(True)
    if const_expr(lazily):
        grown = softmax.step_lazily(scores)
    else:
        softmax.step(scores)
    return grown


@cute.jit
def mask(facts: cutlass.Constexpr, scores: cute.Tensor, work: QueryWork, i):
    """Set scores to -inf where a row does not attend to a column of the i-th tile."""
    col0 = work.tiles.at_partial(i) * facts.config.tile_n
    if const_expr(facts.blocks is None):
        mask_window(scores, work.source, work.row, col0, work.seqlen)
    else:
        mask_elements(scores, facts.blocks, work.source, work.row, col0, work.tile, work.seqlen)
