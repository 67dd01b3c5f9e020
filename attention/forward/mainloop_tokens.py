"""The mainloops of 8-bit floats whose scales are of blocks of 128 tokens: a mixin of those with scales of heads.

A warpgroup's 64 rows of Q lie in one block, and a tile of K and V does, whose columns divide 128. So Q's scale is read
once for a query tile, K's and V's once for each of their tiles, by all threads at one address. They are loaded before
the tile is waited for, and used when its scores are there: by itself the compiler uses them at once, and so waits for
them before it issues the tile's products. TokensSoftmax says what becomes of them. With a cap or a score_mod, Q's and
K's multiply the scores before it.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.tile.hopper import WARPGROUP
from cute_kernels.tile.ptx import read_special_register

from .config import SCALE_TOKENS
from .kv_tiles import PARTIAL
from .mainloop_float8 import MainloopFloat8, MainloopFloat8Fast
from .mainloop_sm90 import ROWS, Consumer
from .mask_and_softmax import QueryWork
from .softmax_tokens import TokensSoftmax


class ScalesOfTokens:
    """Scales are (B, H, blocks) of Q, (B, Hkv, blocks) of K and V, of any strides, or None for 1."""

    def make_softmax(self, scale_log2: Float32) -> TokensSoftmax:
        return TokensSoftmax.like(super().make_softmax(Float32(1.0)), scale_log2)

    @property
    def before_scores(self) -> bool:
        """Whether scales of Q and K multiply the scores before what is done to them."""
        return self.facts.softcap or self.facts.score is not None

    def of_tile(self, c: Consumer, softcap: Float32, scales: tuple, tile) -> tuple:
        """(consumer, softcap) with Q's scale of this warpgroup's rows, and where K's and V's are."""
        q, *of_keys = scales
        k, v = (None if s is None else s[tile.b, tile.h_kv, None] for s in of_keys)
        softmax = replace(c.softmax, k_scales=k, v_scales=v)
        if q is not None:
            group = cute.arch.make_warp_uniform(read_special_register("tid.x") // WARPGROUP) - 1
            block = (tile.m * self.cfg.tile_m + group * ROWS) // SCALE_TOKENS
            scale = q[tile.b, tile.h, cutlass.min(block, q.shape[2] - 1)]  # a warpgroup may have no rows
            if self.before_scores:
                softcap = softcap * scale
            else:
                softmax = softmax.times(scale)
        return replace(c, softmax=softmax), softcap

    def of_keys(self, c: Consumer, work: QueryWork, i: Int32, kind: cutlass.Constexpr) -> Consumer:
        """The consumer with the scales of the i-th tile's block, which are being loaded."""
        n = work.tiles.at_partial(i) if const_expr(kind == PARTIAL) else work.tiles.at(i)
        return replace(c, softmax=c.softmax.loading(n // (SCALE_TOKENS // self.cfg.tile_n)))

    def of_scores(self, c: Consumer, work: QueryWork) -> tuple:
        """(consumer, work) with what comes of these scales."""
        softmax = c.softmax.loaded(c.acc_S[0])
        if softmax.k_scale is not None:
            if self.before_scores:
                work = replace(work, softcap=work.softcap * softmax.k_scale)
            else:
                softmax = softmax.times(softmax.k_scale)
        return replace(c, softmax=softmax), work

    def value_scale(self, scales: tuple) -> None:
        """O's sums have V's scales in P."""
        return None

    def read_value_scale(self, scales: tuple, tile, to: None):
        """There is none."""


class MainloopTokens(ScalesOfTokens, MainloopFloat8):
    """Q and K of 8 bits, P and V of 16, whatever dtype V was given in."""


class MainloopTokensFast(ScalesOfTokens, MainloopFloat8Fast):
    """P and V of 8 bits, too."""
