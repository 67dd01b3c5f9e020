"""The sm_80 mainloop with a 2:4 sparse A: the schedule of the dense one with mma.sp.

An mma.sp instruction multiplies 32 columns of 16-bit elements, of which 16 are stored, or on sm_89 64 columns of FP8,
whose accumulation is promoted step by step.

    cp.async     A's stored half, (tile_m, tile_k / 2), and B, (tile_n, tile_k)
    ldmatrix     per step 16 rows by 32 stored bytes of A, as in a dense GEMM, and two dense steps of B
    metadata     from global memory to registers, prefetched by one K-tile

A warp's 16 rows and 64 columns have 32 words of metadata, one per lane, in the order of the instruction (format). For
16-bit elements the lanes of sparsity selector 0 have the first 32 columns and those of selector 1 the others, so a lane
loads one word for two steps. For FP8 it loads one word per step. A warp loads 128 contiguous bytes.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..matmul.mainloops.mainloop_sm80 import MainloopSm80
from ..tile.ampere import WARP
from ..tile.ptx import load_vector, sparse_mma
from .format import KEPT, SPAN

STEPS = 2  # dense MMA steps per sparse one
WORD = 4  # bytes


class MetadataWords(NamedTuple):
    """A thread's metadata of one K-tile, a word per 64 columns and 16 rows."""

    start: Int32  # bytes from those of the tile's first 64 rows and 64 columns to this thread's first word
    ahead: cute.Tensor  # (MMA_M, tile_k / 64), loaded last
    now: cute.Tensor  # of the K-tile that is multiplied


class Sparse24MainloopSm80(MainloopSm80):
    """Steps of one work tile."""

    stored = KEPT

    def __init__(self, facts, dtype, a, b):
        super().__init__(facts, dtype, a, b)
        self.kind = facts.dtype
        self.spans = facts.config.tile_k // SPAN
        self.k_blocks = tuple(steps // STEPS for steps in self.k_blocks)
        self.unroll = 1 + sum(self.k_blocks) % 2
        self.steps = SPAN // (STEPS * self.element.mma_k)  # whose metadata are one word

    def metadata_words(self, warp_m: Int32) -> MetadataWords:
        start = (warp_m * (self.mmas_m * WARP) + cute.arch.lane_idx()) * WORD
        return MetadataWords(start, *(cute.make_rmem_tensor((self.mmas_m, self.spans), Int32) for _ in range(2)))

    def load_ahead(self, words: MetadataWords, tile) -> None:
        for span in range(self.spans):
            for m in range(self.mmas_m):
                at = tile.metadata[span] + words.start + m * (WARP * WORD)
                words.ahead[m, span] = load_vector(at, None, False, 1)[0]

    def use_next(self, words: MetadataWords) -> None:
        for i in range(cute.size(words.now)):
            words.now[i] = words.ahead[i]

    def fragments(self) -> tuple:
        """Fragments: of A as in a dense GEMM, of B two steps, (8 bytes, MMA_N, 2)."""
        shape = (self.element.vector // 2, self.mmas_n, KEPT)
        rA = [cute.make_rmem_tensor((self.element.vector, self.mmas_m), self.dtype) for _ in range(2)]
        return rA, [cute.make_rmem_tensor(shape, self.dtype) for _ in range(2)]

    def read_step(self, k: int, lanes: tuple, stage: Int32, rA: cute.Tensor, rB: cute.Tensor):
        self.read(self.a, k, lanes[0], stage, rA)
        for half in range(KEPT):
            self.read(self.b, KEPT * k + half, lanes[1], stage + self.a.bytes, rB[None, None, half])

    def product(self, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, words: MetadataWords, k: int):
        a, b = cute.recast_tensor(rA, Int32), cute.recast_tensor(rB, Int32)  # (4, MMA_M), (2, MMA_N, 2)
        for m in range(self.mmas_m):
            for n in range(self.mmas_n):
                sums = self.mma_step([acc[v, m, n] for v in range(4)], a, b, words, m, n, k)
                for v in range(4):
                    acc[v, m, n] = sums[v]

    def promoted_product(
        self, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, words: MetadataWords, scales, k: int
    ):
        a, b = cute.recast_tensor(rA, Int32), cute.recast_tensor(rB, Int32)
        for m in range(self.mmas_m):
            for n in range(self.mmas_n):
                sums = self.mma_step([Float32(0.0)] * 4, a, b, words, m, n, k)
                for v in range(4):
                    acc[v, m, n] = acc[v, m, n] + (sums[v] * scales[0] if self.scaled else sums[v])

    def mma_step(
        self, sums: list, a: cute.Tensor, b: cute.Tensor, words: MetadataWords, m: int, n: int, k: int
    ) -> list:
        return sparse_mma(
            sums,
            [a[v, m] for v in range(4)],
            [b[v % 2, n, v // 2] for v in range(4)],
            words.now[m, k // self.steps],
            k % self.steps,
            self.kind,
        )
