"""Dequantization scales of Q, K and V in FP8 attention: one per head, or one per block of 128 tokens of a head.

Scales per head are read once per query tile. With scales per block of tokens, a warpgroup's 64 rows of Q lie in one
block, and so does a KV tile, whose columns divide 128. So Q's scale is read once per query tile, K's and V's once per
KV tile, by all threads at one address. They are loaded before the wait for the tile, and used once its scores are
available: without this ordering the compiler uses them at once, and so waits for them before it issues the tile's
WGMMAs. TokensSoftmax applies them.

With a softcap or a score_mod, Q's and K's scales multiply the scores before it.
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
    """Scales (B, H) of Q, (B, Hkv) of K and V, or None for 1."""

    per_tile = False

    def __init__(self, facts: Float8Facts):
        self.facts = facts

    @property
    def before_scores(self) -> bool:
        """True if the scales of Q and K multiply the scores before a softcap or a score_mod."""
        return self.facts.softcap or self.facts.score is not None

    def of_query_tile(self, c: Consumer, softcap: Float32, scales: tuple, tile) -> tuple:
        """(consumer, softcap) with the scales of Q and K applied."""
        factors = [of_head(s, tile, head) for s, head in zip(scales, (tile.h, tile.h_kv)) if s is not None]
        if not factors:
            return c, softcap
        factor = factors[0] * factors[1] if len(factors) == 2 else factors[0]
        if self.before_scores:
            return c, softcap * factor
        return replace(c, softmax=replace(c.softmax, scale_log2=c.softmax.scale_log2 * factor)), softcap

    def value_register(self) -> cute.Tensor | None:
        """A register (1,) for V's scale, which multiplies O; None without one."""
        return cute.make_rmem_tensor(1, Float32) if self.facts.v_descale else None

    def read_value(self, scales: tuple, tile, to: cute.Tensor):
        """Read V's scale at the end of a query tile, so that no register holds it before."""
        to[0] = of_head(scales[2], tile, tile.h_kv)


class TokenScales(HeadScales):
    """Scales (B, H, blocks) of Q, (B, Hkv, blocks) of K and V, with any strides, or None for 1."""

    per_tile = True

    def of_query_tile(self, c: Consumer, softcap: Float32, scales: tuple, tile) -> tuple:
        """(consumer, softcap) with Q's scale of this warpgroup's rows applied, and with the scale tensors of K and
        V."""
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
        """The consumer with the scales of the i-th tile's block, whose loads are in flight."""
        n = work.tiles.at_partial(i) if const_expr(kind == PARTIAL) else work.tiles.at(i)
        if self.facts.blocks is not None:  # which may list what is no block
            n = cutlass.min(n, (work.seqlen.cols - 1) // self.facts.config.tile_n)
        return replace(c, softmax=c.softmax.loading(n // (SCALE_TOKENS // self.facts.config.tile_n)))

    def apply(self, c: Consumer, work: QueryWork) -> tuple:
        """(consumer, work) with these scales applied, once the tile's scores are available."""
        softmax = c.softmax.loaded(c.acc_S[0])
        if softmax.k_scale is not None:
            if self.before_scores:
                work = replace(work, softcap=work.softcap * softmax.k_scale)
            else:
                softmax = softmax.times(softmax.k_scale)
        return replace(c, softmax=softmax), work

    def value_register(self) -> None:
        """None: P contains V's scales."""
        return None


def of_head(scale: cute.Tensor, tile, head) -> Float32:
    """Scale of a head, from (B, heads). The sequence after the last packed one, which has no scale, reads the last
    one's."""
    return scale[cutlass.min(tile.b, scale.shape[0] - 1), head]
