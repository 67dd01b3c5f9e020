"""Descale factors of Q, K and V in FP8 attention: one for each head, or one for each block of 128 tokens of a head.

Those of heads are read once for a query tile. Of blocks of tokens, a warpgroup's 64 rows of Q lie in one block, and so
does a tile of K, whose columns divide 128. So Q's factor is read once for a query tile, K's and V's once for each of
their tiles, by all threads at one address. They are loaded before the tile is waited for, and used when its scores are
there: by itself the compiler uses them at once, and so waits for them before it issues the tile's products.
TokensSoftmax says what becomes of them.

With a cap or a score_mod, Q's and K's factors multiply the scores before it.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.tile.hopper import WARPGROUP
from cute_kernels.tile.ptx import read_special_register

from ..config import SCALE_TOKENS, Float8Facts
from ..kv_tiles import PARTIAL
from ..mainloop_sm90 import ROWS, Consumer
from ..mask_and_softmax import QueryWork


class HeadScales:
    """Factors (B, H) of Q, (B, Hkv) of K and V, or None for 1."""

    per_tile = False

    def __init__(self, facts: Float8Facts):
        self.facts = facts

    @property
    def before_scores(self) -> bool:
        """True if the factors of Q and K multiply the scores before a cap or a score_mod."""
        return self.facts.softcap or self.facts.score is not None

    def of_query_tile(self, c: Consumer, softcap: Float32, scales: tuple, tile) -> tuple:
        """(consumer, softcap) with the factors of Q and K."""
        factors = [of_head(s, tile, head) for s, head in zip(scales, (tile.h, tile.h_kv)) if s is not None]
        if not factors:
            return c, softcap
        factor = factors[0] * factors[1] if len(factors) == 2 else factors[0]
        if self.before_scores:
            return c, softcap * factor
        return replace(c, softmax=replace(c.softmax, scale_log2=c.softmax.scale_log2 * factor)), softcap

    def value_register(self) -> cute.Tensor | None:
        """A register (1,) for V's factor, which multiplies O; None without one."""
        return cute.make_rmem_tensor(1, Float32) if self.facts.v_descale else None

    def read_value(self, scales: tuple, tile, to: cute.Tensor):
        """Fill it at the end of a query tile, so that no register holds it before."""
        to[0] = of_head(scales[2], tile, tile.h_kv)


class TokenScales(HeadScales):
    """Factors (B, H, blocks) of Q, (B, Hkv, blocks) of K and V, of any strides, or None for 1."""

    per_tile = True

    def of_query_tile(self, c: Consumer, softcap: Float32, scales: tuple, tile) -> tuple:
        """(consumer, softcap) with Q's factor of this warpgroup's rows, and where K's and V's are."""
        q, *of_keys = scales
        k, v = (None if s is None else s[tile.b, tile.h_kv, None] for s in of_keys)
        softmax = replace(c.softmax, k_scales=k, v_scales=v)
        if q is not None:
            group = cute.arch.make_warp_uniform(read_special_register("tid.x") // WARPGROUP) - 1
            block = (tile.m * self.facts.config.tile_m + group * ROWS) // SCALE_TOKENS
            scale = q[tile.b, tile.h, cutlass.min(block, q.shape[2] - 1)]  # a warpgroup may have no rows
            if self.before_scores:
                softcap = softcap * scale
            else:
                softmax = softmax.times(scale)
        return replace(c, softmax=softmax), softcap

    def load(self, c: Consumer, work: QueryWork, i: Int32, kind: cutlass.Constexpr) -> Consumer:
        """The consumer with the factors of the i-th tile's block, which are being loaded."""
        n = work.tiles.at_partial(i) if const_expr(kind == PARTIAL) else work.tiles.at(i)
        return replace(c, softmax=c.softmax.loading(n // (SCALE_TOKENS // self.facts.config.tile_n)))

    def apply(self, c: Consumer, work: QueryWork) -> tuple:
        """(consumer, work) with these factors, once the tile's scores are there."""
        softmax = c.softmax.loaded(c.acc_S[0])
        if softmax.k_scale is not None:
            if self.before_scores:
                work = replace(work, softcap=work.softcap * softmax.k_scale)
            else:
                softmax = softmax.times(softmax.k_scale)
        return replace(c, softmax=softmax), work

    def value_register(self) -> None:
        """P contains V's factors."""
        return None


def of_head(scale: cute.Tensor, tile, head) -> Float32:
    """Of (B, heads). Rows after the last of packed sequences are those of a sequence that has no factor."""
    return scale[cutlass.min(tile.b, scale.shape[0] - 1), head]
